"""Split KV: into how many splits the keys are cut. Plain Python.

``choose_splits`` compares split counts by a model of the clocks that the launch and its combine launch take.
Its constants are counted from the instruction set and data sheets, or assumed; measured are only those of ``Loads``:

- A CTA takes SETUP_CLOCKS, then per KV tile what the busiest unit of the SM needs for it: the tensor core,
  the exponential unit, or filling shared memory. CTAs on one SM, up to ``ctas_per_sm``, share those units: a tile of
  one takes n times as long with n CTAs.
- CTAs run in waves of ``sm_count * ctas_per_sm``, each as long as its longest CTA. Persistent CTAs set up their later
  tiles in half the time: loads of the next begin before this one's end.
- ``Loads`` says how fast an SM and the whole GPU load; the launch takes no less than its bytes.
  Splits get an SM each only up to a share of the SMs: further ones were seen to share SMs, apparently because the
  previous call's combine launch still occupies the others.
- With more than one split, every row's o is written in fp32 once a split and read again by the combine
  launch, at FILL_BYTES by all SMs; reading takes at least LOAD_CLOCKS a round of loads that a thread makes.
  COMBINE_CLOCKS come on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from warpspec.common.hardware import FP32_BYTES
from warpspec.fmha.combine import BATCH, CombineConfig
from warpspec.fmha.heads import class_of
from warpspec.fmha.tiles import ELEMENT_BYTES

MMA_FLOPS = 8192  # bf16 FLOPs per clock and SM, with 128 rows
MMA_FULL_ROWS = 128  # with 64 rows the tensor core runs at half the rate
EXPONENTIALS = 16  # exponentials per clock and SM
FILL_BYTES = 32  # bytes per clock and SM, all SMs loading: 8 TB/s over 148 SMs at 1.9 GHz is 28

SETUP_CLOCKS = 4000  # assumed: barriers, TMEM, the first loads' latency, the last PV, the epilogue
COMBINE_CLOCKS = 4000  # assumed: 2 microseconds from one launch's end to the next one's first loads
LOAD_CLOCKS = 800  # assumed: a round of loads from L2, all SMs loading


@dataclass(frozen=True)
class Loads:
    """Bytes that arrive on an SM per clock.

    one, two: with one or two CTAs on the SM while other SMs are idle. all: with all SMs loading. spread: the fraction
    of the SMs up to which each split gets its own SM. alone: whether the rates also hold for tile shapes
    whose CTAs have an SM each.
    """

    one: float
    two: float
    all: float
    spread: float
    alone: bool = False


COUNTED = Loads(FILL_BYTES, FILL_BYTES, all=math.inf, spread=1)
# FP8 keys, counted in the bytes the same numbers would have in bf16: conversion is the bottleneck, and one CTA on an SM
# is nearly as fast as two. Measured on an H200 at three shapes.
FLOAT8_LOADS = Loads(one=20, two=25, all=25, spread=1)
# If warps convert codes in registers, by bits of a number; bytes counted as in FLOAT8_LOADS. From B1 L65536 and B32
# L8192 at D 128, 2026-11-26: of e4m3, splits that have an SM each are best on an H100 (11 of 13 that do), and as good
# as any on an H200; splits that meet on SMs are slower.
WARP_LOADS = {
    8: Loads(one=60, two=37, all=37, spread=0.75),
    4: Loads(one=35, two=43, all=43, spread=0.75, alone=True),
}


@lru_cache(maxsize=4096)
def choose_splits(
    *,
    m_tiles: int,
    kv_tiles: int,
    rows: int,
    head_dim: int,
    v_dim: int = 0,
    tile_m: int,
    tile_n: int,
    sm_count: int,
    shared_kv: bool = False,
    ctas_per_sm: int = 1,
    persistent: bool = False,
    loads: Loads = COUNTED,
) -> int:
    """Number of splits with the fewest clocks by the model above; the fewest splits among equals.

    m_tiles: CTAs without splits. kv_tiles: KV tiles of the M tile that visits most (``visited_tiles``). rows: B
    * Sq * Hq. v_dim: head size of V, 0 for head_dim. tile_m, tile_n: rows and keys of a tile. shared_kv: K and
    V are one tile. Never more than kv_tiles; 1 where the M tiles fill the device. No split has no tile of the
    longest M tile.
    """
    resident = sm_count * ctas_per_sm
    if m_tiles >= resident or kv_tiles <= 1:
        return 1
    least = m_tiles * kv_tiles * tile_bytes(head_dim, tile_n, shared_kv) / (sm_count * loads.all)

    def clocks(splits):
        ctas = m_tiles * splits
        waves = -(-ctas // resident)
        together = min(ctas_per_sm, math.ceil(ctas / (sm_count * (loads.spread if splits > 1 else 1))))
        rate = loads.two if together > 1 else loads.one
        tile = together * tile_clocks(head_dim, tile_m, tile_n, shared_kv, rate)
        setup = SETUP_CLOCKS * ((waves + 1) / 2 if persistent else waves)
        attention = setup + max(waves * -(-kv_tiles // splits) * tile, least)
        return attention + combine_clocks(splits, rows, v_dim or head_dim, sm_count)

    # Among counts whose longest splits have the same number of tiles, try only the fewest splits.
    longest = {-(-kv_tiles // splits) for splits in range(1, min(kv_tiles, 2 * resident) + 1)}
    return min(sorted(-(-kv_tiles // tiles) for tiles in longest), key=clocks)


def tile_clocks(
    head_dim: int, tile_m: int, tile_n: int, shared_kv: bool, fill_bytes: float = FILL_BYTES
) -> float:
    """Clocks of the SM's busiest unit for one tile of tile_m rows by tile_n keys. fill_bytes: loaded a clock."""
    rate = MMA_FLOPS if tile_m >= MMA_FULL_ROWS else MMA_FLOPS // 2
    mma = 2 * 2 * tile_m * tile_n * head_dim / rate  # QK and PV
    exponentials = tile_m * tile_n / EXPONENTIALS
    return max(mma, exponentials, tile_bytes(head_dim, tile_n, shared_kv) / fill_bytes)


def tile_bytes(head_dim: int, tile_n: int, shared_kv: bool) -> int:
    """Bytes of K and V of a KV tile."""
    return (1 if shared_kv else 2) * tile_n * head_dim * ELEMENT_BYTES


def combine_clocks(splits: int, rows: int, head_dim: int, sm_count: int) -> float:
    """Clocks that splitting adds: partial o written and read once each, and the combine launch. 0 for one."""
    if splits == 1:
        return 0.0
    transfer = splits * rows * head_dim * FP32_BYTES / (sm_count * FILL_BYTES)
    batches = -(-splits // (CombineConfig.of(class_of(head_dim), splits).ways * BATCH))
    return COMBINE_CLOCKS + transfer + max(transfer, batches * LOAD_CLOCKS)


def visited_tiles(
    *, seq_k: int, queries: int, tile_n: int, left: int | None = None, right: int | None = None, causal=False
) -> int:
    """Most KV tiles that one M tile of ``queries`` queries visits, from shapes alone.

    left, right: the window; causal bounds the right side like a window of 0 (at key_stride 1, the only one
    with a window).
    """
    tiles = -(-seq_k // tile_n)
    right = min(right, 0) if causal and right is not None else 0 if causal else right
    if left is None or right is None:
        return tiles
    keys = left + queries + right  # an interval; it may begin at the last key of a tile
    return min(tiles, (keys + tile_n - 2) // tile_n + 1)
