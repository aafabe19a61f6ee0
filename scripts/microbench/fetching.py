"""Code that runs for the first time: where the CTAs of a grid run different code, and beside loads from L2 or HBM.

`parts` cases: the CTAs of a grid run one of several stretches of straight-line FMAs, each of its own code. `crowded`
cases: before the code runs, another warp has begun to stream tiles by TMA, and goes on. L2 and all code caches were
flushed before the kernel; under ncu, they are by ncu.
"""

from __future__ import annotations

import numpy as np
from case import END, MBARRIERS, START, Case, keep, wait
from instructions import CHAINS
from memory import ALL, TENSOR_LOAD, _init, load_ring

SIZE = 1024  # instructions of a stretch: 128 lines
PARTS = (1, 4, 16, 44)
TILE = 16 << 10  # bytes of a load
FILLED = 12000  # clocks that the stream runs before the code does
STREAMED = 96  # tiles


def _lines_of_code(case: Case, times: np.ndarray) -> dict[str, float]:
    """Clocks of a line of 128 bytes: of the median CTA and the slowest, by its slowest warp that runs the code."""
    warps = case.about["warps"]
    clocks = (times[:, :warps, END] - times[:, :warps, START]).astype(np.int64).max(1)
    lines = SIZE / 8
    return {"clocks_a_line": float(np.median(clocks)) / lines, "slowest": float(clocks.max()) / lines}


def _stream(name: str, stages: int, source: str) -> str:
    """One thread loads tiles through a ring of stages, each reissued as soon as it has arrived."""
    begin, issue, advance = load_ring(TENSOR_LOAD, source, stages, TILE, parity=1)
    skip = f"setp.ge.s32 %p6, %r1, {STREAMED}; @%p6 bra SKIP_{name};"
    body = f"L_{name}:\n" + wait("%r12", "%r11", f"W_{name}") + skip + issue + f"SKIP_{name}:\n"
    body += f"add.s32 %r1, %r1, 1;{advance} setp.lt.s32 %p7, %r1, {STREAMED + stages}; @%p7 bra L_{name};\n"
    return f"setp.ne.s32 %p8, %lane, 0; @%p8 bra JOIN_{name};\n{begin}\n{body}bra JOIN_{name};\n"


def _case(parts: int, warps: int, stages: int, source: str) -> Case:
    name = f"parts_{parts}_w{warps}" + (f"_crowded_{stages}x{TILE}_{source}" if stages else "")
    setup = ["cvt.rn.f32.u32 %f100, %thread; mul.f32 %f101, %f100, 0f3c000000; mov.b32 %r40, 0;"]
    setup += [f"mul.f32 %f{i}, %f101, 0f3e{16 + i:02x}0000;" for i in range(CHAINS)]
    setup.append(f"rem.u32 %r41, %cta, {parts};")
    body = ""
    if stages:
        setup.append(_init(stages))
        body += f"setp.lt.u32 %p9, %warp, {warps}; @%p9 bra CODE_{name};\n{_stream(name, stages, source)}"
        body += f"CODE_{name}:\nmov.u64 %rd40, %clock64; sub.s64 %rd41, %rd40, %t0;\n"
        body += f"setp.lt.s64 %p11, %rd41, {FILLED}; @%p11 bra CODE_{name};\nmov.u64 %t0, %clock64;\n"
    for part in range(parts):
        body += f"setp.eq.s32 %p10, %r41, {part}; @%p10 bra PART{part}_{name};\n"
    for part in range(parts):
        fmas = "".join(f"fma.rn.f32 %f{i % CHAINS}, %f{i % CHAINS}, %f100, %f101;\n" for i in range(SIZE))
        body += f"PART{part}_{name}:\n{fmas}mov.b32 %r40, {part}; bra JOIN_{name};\n"
    body += f"JOIN_{name}:\n"
    return Case(
        name,
        body,
        1,
        setup="\n".join(setup),
        finish=keep([*(f"%f{i}" for i in range(CHAINS)), "%r40"]),
        grid=ALL,
        block=32 * (warps + bool(stages)),
        shared=MBARRIERS + stages * TILE if stages else 0,
        map_rows=TILE // 128 if stages else 0,
        evaluate=_lines_of_code,
        about={
            "kind": "parts",
            "parts": parts,
            "warps": warps,
            "stages": stages,
            "tile": TILE,
            "loads": source,
            "source": "cold",
        },
    )


def cases() -> list[Case]:
    """Cases by number of parts, alone, and then beside loads of several depths from L2 and from HBM."""
    found = [_case(parts, warps, 0, "") for parts in PARTS for warps in (1, 4)]
    return found + [
        _case(parts, 4, stages, source)
        for source in ("dram", "l2")
        for stages in (1, 4, 10)
        for parts in (1, 4, 16)
    ]
