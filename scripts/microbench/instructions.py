"""What code costs that a warp runs for the first time: straight-line FMAs, once and again, L2 flushed or not.

"cold": behind other code that fills the instruction caches, and a flush of L2.
"""

from __future__ import annotations

from case import Case, keep, loop
from memory import ALL

SIZES = (128, 512, 1024, 2048, 4096)  # instructions of 16 bytes
CHAINS = 8
PASSES = (1, 2, 3)

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


def cases() -> list[Case]:
    """By size of the code: one SM and all, one warp and eight; `dram`: after a flush of L2; `cold`: of all caches."""
    return [
        _case(size, passes, grid, warps, source)
        for size in SIZES
        for passes in PASSES
        for grid, warps in ((1, 1), (ALL, 1), (ALL, 8))
        for source in ("again", "dram", "cold")
    ]
