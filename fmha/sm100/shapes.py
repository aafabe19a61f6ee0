"""Tile shapes of the sm100 attention kernel: one row per head dimension and staging of P.

docs/notebook/attention_sm100.md says by counted bytes and clocks why each is the default of its head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.fmha.heads import class_of
from warpspec.fmha.problem import AttentionProblem

FULL_ROWS = 128  # lanes of tensor memory: rows of an accumulator, one to a thread


@dataclass(frozen=True)
class Shape:
    """tile_m: query rows of a CTA. tile_n: keys of a KV tile. p_in: where P lies for PV, "tmem" or "smem".
    kv_stages: KV tiles in flight. ctas_per_sm: CTAs that share an SM. polynomial_every: one in this many pairs of
    exponentials is computed on the multiply-add units (0: none). raw_stages: if K and V are FP8, tiles of each that are
    loaded ahead of their conversion."""

    tile_m: int
    tile_n: int
    p_in: str
    kv_stages: int
    ctas_per_sm: int
    polynomial_every: int = 0
    raw_stages: int = 0


# Compute capability 10.0 makes 16 exponentials a clock and SM. At D = 64 that unit is busy for 1032 clocks of a tile of
# 128 x 128, the tensor core for 512, and issuing all instructions takes 472. So there one of
# every four pairs of scores is computed on the multiply-add units: 776 clocks of exponentials, 616 of issue.
#
# The first of a head dimension is its default. If K and V are one tensor, a stage holds one tile, not two.
SHAPES: dict[int, tuple[Shape, ...]] = {
    64: (Shape(128, 128, "tmem", 3, 2, 4), Shape(128, 64, "smem", 4, 2, 4)),
    128: (Shape(128, 128, "tmem", 3, 1), Shape(128, 64, "tmem", 2, 2), Shape(128, 64, "smem", 2, 2)),
    256: (Shape(128, 64, "tmem", 2, 1), Shape(128, 64, "smem", 2, 1)),
    512: (Shape(64, 64, "smem", 1, 1),),
}
# K and V one tensor: a stage is half as large.
SHARED_SHAPES: dict[int, tuple[Shape, ...]] = {
    64: (Shape(128, 128, "tmem", 4, 2, 4), Shape(128, 64, "smem", 6, 2, 4)),
    128: (Shape(128, 128, "tmem", 4, 1), Shape(128, 64, "tmem", 4, 2), Shape(128, 64, "smem", 4, 2)),
    256: (Shape(128, 64, "tmem", 4, 1), Shape(128, 64, "smem", 4, 1)),
    512: (Shape(64, 64, "smem", 2, 1),),
}
# K and V in FP8, which four more warps convert: 2.1 instructions a number, for 128 keys of D 128 about 540 of a
# scheduler's clocks beside the tensor core's 1024. The 16-bit tiles take the room of a third stage; at D 64 two CTAs
# have registers for three warpgroups only with half the keys.
FLOAT8_SHAPES: dict[int, Shape] = {
    64: Shape(128, 64, "tmem", 3, 2, 4, raw_stages=4),
    128: Shape(128, 128, "tmem", 2, 1, raw_stages=2),
    256: Shape(128, 64, "tmem", 2, 1, raw_stages=1),
}
# By bits of a number of K and V; a tile of 4 is half as large.
QUANTIZED_SHAPES: dict[int, dict[int, Shape]] = {
    8: FLOAT8_SHAPES,
    4: {**FLOAT8_SHAPES, 128: replace(FLOAT8_SHAPES[128], raw_stages=3)},
}
# (softmax_registers, other_registers) with a converter, by CTAs an SM.
FLOAT8_REGISTERS = {1: (240, 128), 2: (144, 48)}


def default_shape(problem: AttentionProblem) -> Shape:
    """The default tiles for a problem's head sizes and key format: the first that fit its blocks."""
    if problem.format.kv_format:
        return QUANTIZED_SHAPES[problem.format.kv_bits][problem.head_dim]
    shapes = SHARED_SHAPES if problem.format.shared_kv else SHAPES
    size = problem.heads.v if problem.format.shared_kv else max(problem.head_dim, problem.heads.v)
    shapes = shapes[class_of(size)]
    keys = problem.mask.block_size[1] if problem.mask.has_blocks else 0
    return next((shape for shape in shapes if keys % shape.tile_n == 0), shapes[0])
