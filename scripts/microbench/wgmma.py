"""wgmma: clocks of a group of K instructions from the first fence to the end of the wait, by shape and operands."""

from __future__ import annotations

from case import Case, loop

ITERATIONS = 8
# The rows of a 128-byte swizzle atom are 1024 bytes apart; bits 62-63: that swizzle.
DESCRIPTOR = (1 << 62) | (64 << 32) | (1 << 16)
WIDTHS = (8, 16, 32, 64, 96, 128, 160, 192, 256)
A_REGISTERS = 300  # number of the first register of A
LONG = 16  # instructions of the longest group


def _instruction(kind: str, width: int, registers: bool, number: int, transposed: bool) -> str:
    accumulator = ", ".join(f"%f{i}" for i in range(width // 2))
    types = {"bf16": "f32.bf16.bf16", "f16": "f32.f16.f16", "e4m3": "f32.e4m3.e4m3"}[kind]
    depth = 32 if kind == "e4m3" else 16
    step = number % 4
    a = "{" + ", ".join(f"%f{A_REGISTERS + i}" for i in range(4)) + "}" if registers else f"%rd{10 + step}"
    flags = (
        "p, 1, 1" if kind == "e4m3" else ("p, 1, 1, " + ("" if registers else "0, ") + str(int(transposed)))
    )
    return (
        f"{{ .reg .pred p; setp.ne.b32 p, %n, 0;\nwgmma.mma_async.sync.aligned.m64n{width}k{depth}.{types} "
        f"{{{accumulator}}}, {a}, %rd{20 + step}, {flags}; }}\n"
    )


def _setup(width: int, registers: bool) -> str:
    lines = [f"mov.b32 %f{i}, 0;" for i in range(width // 2)]
    if registers:
        a = ", ".join(f"%f{A_REGISTERS + i}" for i in range(4))
        lines.append(
            f"mul.wide.u32 %rd3, %thread, 16; add.s64 %rd3, %rd3, %data; ld.volatile.global.v4.b32 {{{a}}}, [%rd3];"
        )
    lines.append("and.b32 %r1, %s, 0x3ffff; shr.u32 %r1, %r1, 4; cvt.u64.u32 %rd1, %r1;")
    lines.append(f"or.b64 %rd1, %rd1, {DESCRIPTOR}; shr.u32 %r2, %warp, 2; cvt.u64.u32 %rd2, %r2;")
    lines.append("shl.b64 %rd2, %rd2, 10; add.s64 %rd2, %rd1, %rd2;")  # 16 KB of A a warpgroup
    for step in range(4):
        lines.append(
            f"add.s64 %rd{10 + step}, %rd2, {2 * step}; add.s64 %rd{20 + step}, %rd1, {4096 + 2 * step};"
        )
    return "\n".join(lines)


def _case(kind: str, width: int, registers: bool, length: int, groups: int, transposed: bool = False) -> Case:
    name = f"wgmma_{kind}_n{width}_{'rs' if registers else 'ss'}_k{length}_g{groups}" + "_t" * transposed
    lines = "wgmma.fence.sync.aligned;\n"
    lines += "".join(_instruction(kind, width, registers, n, transposed) for n in range(length))
    lines += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    finish = "mov.b32 %r59, 0;" + "".join(f"xor.b32 %r59, %r59, %f{i};" for i in range(width // 2))
    finish += "setp.eq.s32 %p13, %r59, 0x12345677; @%p13 st.global.b32 [%out], %r59;"
    return Case(
        name,
        loop(lines, ITERATIONS, f"L_{name}"),
        operations=ITERATIONS,
        setup=_setup(width, registers),
        finish=finish,
        block=128 * groups,
        shared=160 * 1024,
        about={
            "kind": "wgmma",
            "type": kind,
            "n": width,
            "a": "registers" if registers else "shared",
            "instructions": length,
            "warpgroups": groups,
            "transposed": transposed,
        },
    )


def _issue(width: int, registers: bool, length: int) -> Case:
    """Until the last of this many instructions is issued: how many may be in flight."""
    name = f"wgmma_issue_n{width}_{'rs' if registers else 'ss'}_k{length}"
    lines = "wgmma.wait_group.sync.aligned 0;\nmov.u64 %t0, %clock64;\nwgmma.fence.sync.aligned;\n"
    lines += "".join(_instruction("bf16", width, registers, n, False) for n in range(length))
    lines += "wgmma.commit_group.sync.aligned;\n"
    finish = "wgmma.wait_group.sync.aligned 0;\nmov.b32 %r59, 0;"
    finish += "".join(f"xor.b32 %r59, %r59, %f{i};" for i in range(width // 2))
    finish += "setp.eq.s32 %p13, %r59, 0x12345677; @%p13 st.global.b32 [%out], %r59;"
    about = {"kind": "wgmma_issue", "n": width, "a": registers, "instructions": length}
    return Case(
        name,
        loop(lines, ITERATIONS, f"L_{name}"),
        1,
        setup=_setup(width, registers),
        finish=finish,
        block=128,
        shared=160 * 1024,
        about=about,
    )


def cases() -> list[Case]:
    """Groups of 1, 4 and 16 instructions by one warpgroup, 4 and 16 by two: interval and tail follow from them."""
    found = []
    for width in WIDTHS:
        for registers in (False, True):
            for length, groups in ((1, 1), (4, 1), (LONG, 1), (4, 2), (LONG, 2)):
                found.append(_case("bf16", width, registers, length, groups))
    for width in (64, 128, 256):
        found += [_case("e4m3", width, False, length, 1) for length in (1, 4, LONG)]
        found += [_case("bf16", width, False, length, 1, True) for length in (4, LONG)]
    for width, registers in ((64, False), (128, False), (128, True), (256, False)):
        found += [_issue(width, registers, length) for length in (1, 2, 3, 4, 6, 8, 10, 12, LONG)]
    found += [_case("bf16", 128, True, LONG, 3), _case("bf16", 64, True, LONG, 3)]
    return found
