"""Shared memory: clocks of a warp's load, store, ldmatrix, stmatrix on a busy SM, and latencies."""

from __future__ import annotations

from case import MBARRIERS, Case, keep, loop

ITERATIONS = 32
UNROLLED = 32
BYTES = 65536

# One access; {a}: address register, {i}: number of a group of four result registers.
ACCESSES = {
    "ld32": ("ld.volatile.shared.b32 %f{i}, [{a}+{o}];", 4),
    "ld64": ("ld.volatile.shared.v2.b32 {{%f{i}, %f{i1}}}, [{a}+{o}];", 8),
    "ld128": ("ld.volatile.shared.v4.b32 {{%f{i}, %f{i1}, %f{i2}, %f{i3}}}, [{a}+{o}];", 16),
    "st32": ("st.shared.b32 [{a}+{o}], %f{i};", 4),
    "st64": ("st.shared.v2.b32 [{a}+{o}], {{%f{i}, %f{i1}}};", 8),
    "st128": ("st.shared.v4.b32 [{a}+{o}], {{%f{i}, %f{i1}, %f{i2}, %f{i3}}};", 16),
    "ldmatrix4": (
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%f{i}, %f{i1}, %f{i2}, %f{i3}}}, [{a}+{o}];"
        "xor.b32 %r58, %r58, %f{i};",
        16,
    ),
    "stmatrix4": ("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{a}+{o}], {{%f{i}, %f{i1}, %f{i2}, %f{i3}}};", 16),
}  # fmt: skip
MIXES = {"ld128_shfl": ("ld128", "shfl"), "st128_ld128": ("st128", "ld128")}


def _line(access: str, number: int) -> str:
    if access == "shfl":
        return f"shfl.sync.bfly.b32 %f{200 + number % 8}, %f{200 + number % 8}, 1, 31, -1;"
    text, width = ACCESSES[access]
    first = 4 * (number % 16)
    registers = {f"i{n or ''}": first + n for n in range(4)}
    return text.format(a="%r1", o=32 * width * number, **registers)


def _setup(width: int) -> str:
    lines = [
        f"mad.lo.s32 %r1, %lane, {width}, %s; sub.s32 %r3, %n, 1;",
        "and.b32 %r2, %warp, 15; mad.lo.s32 %r1, %r2, 2048, %r1;",
    ]
    lines += [f"mov.b32 %f{n}, %thread;" for n in (*range(64), *range(200, 208))] + ["mov.b32 %r58, 0;"]
    return "\n".join(lines)


def _case(name: str, accesses: tuple[str, ...], warps: int) -> Case:
    lines = [_line(access, number) for number in range(UNROLLED // len(accesses)) for access in accesses]
    width = max(ACCESSES[access][1] for access in accesses if access in ACCESSES)
    return Case(
        f"shared_{name}_w{warps}",
        loop("\n".join([*lines, "add.s32 %r1, %r1, %r3;"]), ITERATIONS, f"L_{name}_{warps}"),
        operations=ITERATIONS * len(lines) * warps,
        setup=_setup(width),
        finish=keep([*(f"%f{n}" for n in (*range(64), *range(200, 208))), "%r58"]),
        block=32 * warps,
        shared=BYTES,
        about={"kind": "shared", "of": name, "warps": warps},
    )


def _latency(name: str, line: str) -> Case:
    setup = "mad.lo.s32 %r1, %lane, 16, %s; st.shared.v4.b32 [%r1], {%r1, %r1, %r1, %r1}; bar.warp.sync -1;"
    return Case(
        f"shared_latency_{name}",
        loop("\n".join([line] * UNROLLED), ITERATIONS, f"L_{name}"),
        operations=ITERATIONS * UNROLLED,
        setup=setup,
        finish=keep(["%r1"]),
        shared=BYTES,
        about={"kind": "latency", "of": name},
    )


def cases() -> list[Case]:
    """Accesses without bank conflicts by 1, 4, 8 and 16 warps; latencies by a chain of addresses."""
    found = [_case(name, (name,), warps) for name in ACCESSES for warps in (1, 4, 8, 16)]
    found += [_case(name, accesses, 8) for name, accesses in MIXES.items()]
    found += [
        _latency("ld32", "ld.shared.b32 %r1, [%r1];"),
        _latency("ld128", "ld.shared.v4.b32 {%r1, %r2, %r3, %r4}, [%r1];"),
        _latency(
            "store_load", f"st.shared.b32 [%r1+{MBARRIERS}], %r1; ld.shared.b32 %r1, [%r1+{MBARRIERS}];"
        ),
    ]
    return found
