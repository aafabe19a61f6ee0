"""What code costs that a warp runs for the first time: straight-line FMAs, once and again, L2 flushed or not.

"cold": after other code that fills the instruction caches, and a flush of L2. Under ncu, which flushes all caches in
front of each kernel, code comes from HBM ("again" is then the first time). `jump` cases branch over code again and
again, as unrolled epilogues do.
"""

from __future__ import annotations

from case import Case, keep, loop
from memory import ALL, whole

SIZES = (128, 512, 1024, 2048, 4096)  # instructions of 16 bytes
LARGE = (8192, 12288, 16384, 24576, 32768)  # the same, of more code than an SM's caches hold
CHAINS = 8
PASSES = (1, 2, 3)

JUMPS = (
    (8, 40),
    (32, 40),
    (128, 40),
    (32, 256),
    (128, 256),
)  # instructions between taken branches, and jumped over
SEGMENTS = 24

EVICTOR = "evict_code"
EVICTING = 16384  # instructions: 256 KB


def evictor() -> str:
    """A kernel whose code takes the place of any other in an SM's caches."""
    lines = [f"fma.rn.f32 %f{i % CHAINS}, %f{i % CHAINS}, %f100, %f101;" for i in range(EVICTING)]
    setup = ["cvt.rn.f32.u32 %f100, %thread; mul.f32 %f101, %f100, 0f3c000000;"]
    setup += [f"mul.f32 %f{i}, %f101, 0f3e{16 + i:02x}0000;" for i in range(CHAINS)]
    finish = keep([f"%f{i}" for i in range(CHAINS)])
    return Case(EVICTOR, "\n".join(lines), 1, setup="\n".join(setup), finish=finish).text


def _case(size: int, passes: int, grid: int, warps: int, source: str) -> Case:
    name = f"code_{size}_p{passes}_{'all' if grid == ALL else 'one'}_w{warps}_{source}"
    lines = [f"fma.rn.f32 %f{i % CHAINS}, %f{i % CHAINS}, %f100, %f101;" for i in range(size)]
    setup = ["cvt.rn.f32.u32 %f100, %thread; mul.f32 %f101, %f100, 0f3c000000;"]
    setup += [f"mul.f32 %f{i}, %f101, 0f3e{16 + i:02x}0000;" for i in range(CHAINS)]
    # The number of passes comes from memory's size parameter, so that ptxas cannot unroll the loop.
    body = loop("\n".join(lines), "%r62", f"L_{name}")
    return Case(
        name,
        body,
        1,
        setup="\n".join([*setup, "cvt.u32.u64 %r62, %size;"]),
        finish=keep([f"%f{i}" for i in range(CHAINS)]),
        grid=grid,
        block=32 * warps,
        size=passes,
        about={"kind": "code", "of": size, "passes": passes, "warps": warps, "source": source},
    )


def _jumps(every: int, over: int, grid: int, warps: int) -> Case:
    """Segments of code, each of which ends with a taken branch over code that never runs."""
    name = f"jump_{every}_{over}_{'all' if grid == ALL else 'one'}_w{warps}"

    def fmas(count: int) -> str:
        return "".join(f"fma.rn.f32 %f{i % CHAINS}, %f{i % CHAINS}, %f100, %f101;\n" for i in range(count))

    body = "".join(f"{fmas(every)}@%p9 bra S{i}_{name};\n{fmas(over)}S{i}_{name}:\n" for i in range(SEGMENTS))
    setup = ["cvt.rn.f32.u32 %f100, %thread; mul.f32 %f101, %f100, 0f3c000000; setp.ne.u64 %p9, %size, 0;"]
    setup += [f"mul.f32 %f{i}, %f101, 0f3e{16 + i:02x}0000;" for i in range(CHAINS)]
    return Case(
        name,
        body,
        1,
        setup="\n".join(setup),
        finish=keep([f"%f{i}" for i in range(CHAINS)]),
        grid=grid,
        block=32 * warps,
        size=1,
        evaluate=whole,
        about={"kind": "jump", "every": every, "over": over, "segments": SEGMENTS, "warps": warps},
    )


def cases() -> list[Case]:
    """Cases by size of the code, for one SM and all, one warp and eight. `dram`: L2 was flushed; `cold`: all caches
    were."""
    jumps = [_jumps(*sizes, grid, warps) for sizes in JUMPS for grid, warps in ((1, 1), (ALL, 1), (ALL, 8))]
    return (
        jumps
        + [
            _case(size, passes, grid, warps, source)
            for size in SIZES
            for passes in PASSES
            for grid, warps in ((1, 1), (ALL, 1), (ALL, 8))
            for source in ("again", "dram", "cold")
        ]
        + [
            _case(size, passes, grid, warps, source)
            for size in LARGE
            for passes in (1, 2)
            for grid, warps in ((1, 1), (ALL, 4))
            for source in ("again", "dram")
        ]
    )
