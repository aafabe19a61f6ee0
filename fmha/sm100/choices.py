"""The choices of plans for the sm_100a attention kernel: tiles, heads per tile, ways to hand out work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from warpspec.common.launch import Target
from warpspec.fmha.config import Schedule, check_call
from warpspec.fmha.heads import class_of
from warpspec.fmha.plan.cost import BLACKWELL, Constants, Tiling, Way
from warpspec.fmha.plan.splits import Loads
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm100.shapes import QUANTIZED_SHAPES, SHAPES, SHARED_SHAPES, Shape
from warpspec.fmha.tiles import choose_packs, fits_blocks

FULL_ROWS = 128  # lanes of tensor memory: rows of an accumulator, one to a thread


def default_shape(problem: AttentionProblem) -> Shape:
    """The default tiles for a problem's head sizes and key format: the first that fit its blocks."""
    if problem.format.kv_format:
        return QUANTIZED_SHAPES[problem.format.kv_bits][problem.head_dim]
    shapes = SHARED_SHAPES if problem.format.shared_kv else SHAPES
    size = problem.heads.v if problem.format.shared_kv else max(problem.head_dim, problem.heads.v)
    shapes = shapes[class_of(size)]
    keys = problem.mask.block_size[1] if problem.mask.has_blocks else 0
    return next((shape for shape in shapes if keys % shape.tile_n == 0), shapes[0])


class Choices:
    """Class methods of a configuration that ``fmha.plan`` calls; costs: constants of its model."""

    costs: ClassVar[Constants] = BLACKWELL
    expanded_rows: ClassVar[int | None] = None
    schedules: ClassVar[dict[Way, Schedule]] = {
        Way.SINGLE: Schedule.SINGLE,
        Way.LINE: Schedule.LINE,
        Way.SPLIT: Schedule.SINGLE,
    }

    @classmethod
    def check(cls, problem: AttentionProblem, target: Target) -> None:
        """Raise UnsupportedProblem, naming what this kernel does not support."""
        check_call("sm100", problem, tuple(QUANTIZED_SHAPES.get(problem.format.kv_bits, ())))

    @staticmethod
    def decode_loads(problem: AttentionProblem) -> Loads | None:
        """How fast an SM loads keys for few queries (``plan.splits``); None: such calls have not been timed."""
        return None

    @classmethod
    def tilings(cls, problem: AttentionProblem) -> Iterator[tuple[Shape, Tiling]]:
        """The shape and its tiling, for each number of heads that may share a tile."""
        shape = default_shape(problem)
        for pack in choose_packs(problem, shape.tile_m):
            if not fits_blocks(problem, shape.tile_m // pack, shape.tile_n):
                continue
            yield shape, Tiling(1, shape.tile_m, 1, shape.tile_n, shape.kv_stages, shape.ctas_per_sm, pack)

    @classmethod
    def ways(cls, problem: AttentionProblem) -> tuple[Way, ...]:
        """How CTAs may get their work; the first is for any number of tiles."""
        if problem.bias or problem.mask.has_blocks or default_shape(problem).tile_m < FULL_ROWS:
            return Way.SINGLE, Way.SPLIT
        return tuple(cls.schedules)
