"""wgmma of one warpgroup while others compute, or multiply too: how much each slows the other down.

The first warpgroup makes a fixed number of rounds, the others go on until it has set a flag in shared memory (or make
as many where they multiply too: a warpgroup's warps must leave together). Measured: how many clocks a round takes.
"""

from __future__ import annotations

import numpy as np
import wgmma
from arithmetic import MIXES, _line
from case import END, END_NS, START, Case, keep

ROUNDS = 24  # of wgmmas
COUNTED = 192  # instructions of a round of arithmetic
# What the first warpgroup does where it does not multiply: it lets the others work for a while.
WAIT = """IDLE_{name}: mov.u64 %rd40, %clock64; sub.s64 %rd41, %rd40, %t0;
setp.lt.s64 %p11, %rd41, 20000; @%p11 bra IDLE_{name};"""
CLEAR = "mov.b32 %r57, 0; st.shared.u32 [%s+16], %r57;"
MMAS = {"n128ss": (128, False), "n128rs": (128, True), "n64rs": (64, True), "n256ss": (256, False)}
ARITHMETIC = ("fma", "fmax", "ex2", "lop3", "shfl", "pack_bf16", "attention", "fma4_ex2")
# Accesses of shared memory after what wgmma reads, and additions to global memory: {0} to {3} are registers.
ACCESSES = {
    "lds128": "ld.volatile.shared.v4.b32 {{{0}, {1}, {2}, {3}}}, [%r9+{offset}];",
    "sts128": "st.volatile.shared.v4.b32 [%r9+{offset}], {{{0}, {1}, {2}, {3}}};",
    "stsm4": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r9+{offset}], {{{0}, {1}, {2}, {3}}};",
    "red4": "red.relaxed.gpu.global.add.v4.f32 [%rd9+{offset}], {{{0}, {1}, {2}, {3}}};",
}
ACCESSED = 100 * 1024  # where in shared memory accesses are
ADDRESSES = (
    f"mad.lo.s32 %r9, %lane, 16, %s; add.s32 %r9, %r9, {ACCESSED}; and.b32 %r8, %warp, 7;"
    "mad.lo.s32 %r9, %r8, 4096, %r9; mad.lo.s32 %r8, %cta, 16, %warp; mul.wide.u32 %rd9, %r8, 65536;"
    "mul.wide.u32 %rd8, %lane, 16; add.s64 %rd9, %rd9, %rd8; add.s64 %rd9, %rd9, %data;"
)


def rounds(case: Case, times: np.ndarray) -> dict[str, float]:
    """Clocks of a round: of each warpgroup of the first CTA."""
    found = {}
    for i in range(0, len(times[0]), 4):
        group = times[0][i : i + 4]
        took = float(group[:, END].max() - group[:, START].min())
        found[f"group{i // 4}"] = took / max(1.0, float(group[:, END_NS].mean()))
    return found


def _repeat(body: str, label: str) -> str:
    return f"{label}:\n{body}\nadd.s32 %r58, %r58, 1; setp.lt.s32 %p11, %r58, {ROUNDS}; @%p11 bra {label};\n"


def _until_flag(body: str, label: str) -> str:
    again = "add.s32 %r58, %r58, 1; ld.volatile.shared.u32 %r57, [%s+16]; setp.eq.s32 %p11, %r57, 0;"
    again += f"@%p11 bra {label};"
    return f"{label}:\n{body}\n{again}\n"


def _mma(width: int, registers: bool, length: int) -> str:
    lines = "wgmma.fence.sync.aligned;\n"
    lines += "".join(wgmma._instruction("bf16", width, registers, n, False) for n in range(length))
    return lines + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"


def _accesses(name: str) -> str:
    lines = []
    for number in range(COUNTED):
        registers = [f"%g{4 * (number % 12) + i}" for i in range(4)]
        lines.append(ACCESSES[name].format(*registers, offset=512 * (number % 8)))
    return "\n".join(lines)


def _arithmetic(name: str) -> str:
    if name in ACCESSES:
        return _accesses(name)
    operations = MIXES.get(name, (name,))
    lines, chains = [], 12
    while len(lines) < COUNTED:
        for operation in operations:
            chain = len(lines) % chains
            text = _line(operation, chain)
            for number in range(127, -1, -1):  # registers that are nobody else's
                text = text.replace(f"%f{number},", f"%g{number},").replace(f"%f{number};", f"%g{number};")
            lines.append(text)
    return "\n".join(lines)


def _case(
    name: str, width: int, registers: bool, length: int, other: str, groups: int, first: str = ""
) -> Case:
    """The first warpgroup multiplies, or does `first`; the others do `other`: arithmetic, mma4, mma16, or nothing."""
    multiplies = {"mma4": 4, "mma16": 16}.get(other)
    if multiplies:
        rest = _repeat(_mma(width, registers, multiplies), f"REST_{name}")
    else:
        rest = "" if other == "nothing" else _until_flag(_arithmetic(other), f"REST_{name}")
    values = "".join(
        f"cvt.rn.f32.u32 %g{i}, %thread; mul.f32 %g{i}, %g{i}, 0f3c{i:02x}0000;\n" for i in range(128)
    )
    work = _mma(width, registers, length) if length else _arithmetic(first) if first else ""
    body = f"""mov.b32 %r58, 0; setp.ge.u32 %p9, %warp, 4; @%p9 bra OTHERS_{name};
{_repeat(work, f"FIRST_{name}") if work else WAIT.format(name=name)}
mov.b32 %r57, 1; st.volatile.shared.u32 [%s+16], %r57; bra DONE_BODY_{name};
OTHERS_{name}:
{rest}DONE_BODY_{name}:
"""
    finish = "mov.b32 %r59, 0;" + "".join(f"xor.b32 %r59, %r59, %f{i};" for i in range(width // 2))
    finish += "setp.eq.s32 %p13, %r59, 0x12345677; @%p13 st.global.b32 [%out], %r59;"
    finish += keep([f"%g{i}" for i in range(16)]) + "cvt.u64.u32 %t3, %r58;"
    return Case(
        name,
        body,
        1,
        setup=f".reg .b32 %g<128>;\n{values}{wgmma._setup(width, registers)}{ADDRESSES}{CLEAR}",
        finish=finish,
        block=128 * groups,
        shared=160 * 1024,
        evaluate=rounds,
        about={
            "kind": "overlap",
            "n": width,
            "a": registers,
            "length": length,
            "others": other,
            "groups": groups,
            "first": first,
        },
    )


def cases() -> list[Case]:
    """Each width beside each kind of arithmetic, by one and by two other warpgroups; alone; beside other wgmmas."""
    found = []
    for which, (width, registers) in MMAS.items():
        for other in ("nothing", *ARITHMETIC, *ACCESSES):
            groups = (2, 3) if other in ("attention", "fma") else (2,)
            for count in groups:
                name = f"overlap_{which}_{other}_g{count}"
                found.append(_case(name, width, registers, 16, other, count))
        found.append(_case(f"overlap_{which}_4_mma16", width, registers, 4, "mma16", 2))
        found.append(_case(f"overlap_{which}_16_mma4", width, registers, 16, "mma4", 2))
    found += [
        _case(f"overlap_{first}_{other}_g2", 128, False, 0, other, 2, first)
        for first in ("sts128", "shfl", "fma")
        for other in ("nothing", "red4")
    ]
    found += [
        _case(f"overlap_none_{other}_g{count}", 128, False, 0, other, count)
        for other in (*ARITHMETIC, *ACCESSES)
        for count in (2, 3)
    ]
    return found
