"""Tile shapes of the sm_90a attention kernel by head dimension: the tuning table.

``scripts/tune_attention.py`` remakes it; docs/attention_tuning.md has what it measured for these shapes and the others
(H200, 2026-11-22), in comments here what was measured for these. Shapes within 3 percent were not told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

WARPGROUP_ROWS = 64  # query rows of a consumer warpgroup: M of wgmma


@dataclass(frozen=True)
class Shape:
    """consumers: warpgroups of 64 query rows each. tile_n: keys of a KV tile. kv_stages: KV tiles in flight.
    ctas_per_sm: that registers and shared memory are budgeted for. consumer_registers, producer_registers: of a
    thread, set by setmaxnreg. column_parts: consumers that share 64 rows, each with a part of O's columns."""

    consumers: int
    tile_n: int
    kv_stages: int
    ctas_per_sm: int
    consumer_registers: int
    producer_registers: int
    column_parts: int = 1


# Many rows: O, S and P of 64 rows in a consumer's registers decide how many consumers and keys fit.
PREFILL = {
    64: Shape(3, 128, 4, 1, 160, 32),  # causal B2 H32 S8192: 462 TFLOP/s; of 12 the best 474
    128: Shape(2, 128, 2, 1, 240, 24),  # causal B2 H32 S8192: 596 TFLOP/s; of 13 the best 616
    256: Shape(2, 80, 2, 1, 240, 24),  # causal B2 H16 S8192: 682 TFLOP/s; of 3 the best 694
    512: Shape(2, 32, 2, 1, 240, 24, column_parts=2),  # causal B2 H16 S4096: 414 TFLOP/s; not tuned
}
# Few rows (decode): memory binds; two CTAs of one consumer on an SM keep enough loads in flight.
DECODE = {
    64: Shape(1, 128, 3, 2, 208, 48),  # 64/8 heads, B32 L8192: 4.16 TB/s; of 15 the best 4.29
    128: Shape(1, 64, 3, 2, 208, 48),  # 64/8 heads, B32 L8192: 4.38 TB/s; of 9 the best 4.40
    256: Shape(1, 64, 3, 1, 240, 24),  # 64/8 heads, B32 L4096: 4.30 TB/s; of 4 the best 4.34
    512: PREFILL[512],
}
# Narrow windows: few KV tiles a query tile, so that a third consumer's rows mostly add keys that they do not see.
# Window 128 with a sink, S8192: D 64 97 TFLOP/s (best of 10); 128 155 (157); 256 189 (with 80 keys a tile 140).
NARROW = {**PREFILL, 64: Shape(2, 128, 4, 1, 240, 24), 256: Shape(2, 64, 2, 1, 240, 24)}
NARROW_KEYS = 512  # keys of a window up to which it counts as narrow
# K and V one tensor: a stage holds both, so that the keys of a tile may be twice as many.
# 128 heads, 4096 queries over 4096 keys: 606 TFLOP/s. Nothing else fits: two tiles of 64 keys beside Q.
SHARED = {512: Shape(2, 64, 2, 1, 240, 24, column_parts=2)}
