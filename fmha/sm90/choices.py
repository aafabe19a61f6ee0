"""The choices of plans for the sm_90a attention kernel: tiles, heads per tile, ways to hand out work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import Target
from warpspec.fmha.config import Schedule, check_call
from warpspec.fmha.heads import MMA_K, rounded
from warpspec.fmha.plan.cost import HOPPER, Constants, Tiling, Way
from warpspec.fmha.plan.splits import DECODE_LOADS, FLOAT8_LOADS, WARP_LOADS, Loads
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90.shapes import FLOAT8, Shape, float8_tiles, tiles
from warpspec.fmha.tiles import ELEMENT_BYTES, choose_packs, fits_blocks


class Choices:
    """Class methods of a configuration that ``fmha.plan`` calls; costs: constants of its model."""

    costs: ClassVar[Constants] = HOPPER
    expanded_rows: ClassVar[int | None] = 2048  # ``expand.expands``
    schedules: ClassVar[dict[Way, Schedule]] = {
        Way.PERSISTENT: Schedule.PERSISTENT,
        Way.SINGLE: Schedule.PERSISTENT,  # of as many CTAs as there are tiles
        Way.QUEUE: Schedule.QUEUE,
        Way.LINE: Schedule.LINE,
        Way.SPLIT: Schedule.PERSISTENT,
    }

    @classmethod
    def check(cls, problem: AttentionProblem, target: Target) -> None:
        """Raise UnsupportedProblem, naming what this kernel does not support on the target."""
        check_call("sm90", problem, tuple(FLOAT8))
        if problem.format.kv_format and problem.bias:
            raise UnsupportedProblem(
                f"sm90 attention: bias with k in {problem.format.kv_format} is not supported"
            )

    @classmethod
    def shapes(cls, problem: AttentionProblem) -> tuple[Shape, ...]:
        """Tile shapes that a problem may get; for FP8 keys just one."""
        if problem.format.kv_format is not None:
            return float8_tiles(problem)
        heads = problem.heads
        key_bytes = (
            heads.qk_room if problem.format.shared_kv else heads.qk_room + heads.v_room
        ) * ELEMENT_BYTES
        columns, row_bytes = rounded(heads.v, MMA_K), heads.qk_room * ELEMENT_BYTES
        return tiles(columns, row_bytes, key_bytes, problem.format.shared_kv, problem.bias is not None)

    @classmethod
    def decode_loads(cls, problem: AttentionProblem) -> Loads:
        """How fast an SM loads keys for few queries (``plan.splits``)."""
        if not problem.format.kv_format:
            return DECODE_LOADS
        return WARP_LOADS[problem.format.kv_bits] if cls.shapes(problem)[0].row_tiles else FLOAT8_LOADS

    @classmethod
    def tilings(cls, problem: AttentionProblem) -> Iterator[tuple[Shape, Tiling]]:
        """Shapes and their tilings, for each number of heads that may share a tile, except shapes in which some
        consumer would have no rows."""
        for shape in cls.shapes(problem):
            groups, rows = shape.consumers // shape.column_parts, shape.most_rows
            for pack in choose_packs(problem, rows):
                several = groups == 1 or problem.seq_q > (groups - 1) * (rows // pack)
                if several and fits_blocks(problem, groups * (rows // pack), shape.tile_n):
                    sizes = (groups, rows, shape.column_parts, shape.tile_n, shape.kv_stages)
                    yield shape, Tiling(*sizes, shape.ctas_per_sm, pack)

    @classmethod
    def ways(cls, problem: AttentionProblem) -> tuple[Way, ...]:
        """How CTAs may get their work; the first is for any number of tiles."""
        if cls.shapes(problem)[0].column_parts > 1:
            return Way.PERSISTENT, Way.SPLIT
        if problem.bias:
            return Way.PERSISTENT, Way.SINGLE, Way.SPLIT
        if problem.mask.has_blocks:  # the lengths of lists are on the device
            return tuple(way for way in cls.schedules if way is not Way.LINE)
        return tuple(cls.schedules)
