"""The choices of plans for the sm_90a attention kernel: tiles, heads per tile, ways to hand out work."""

from __future__ import annotations

from collections.abc import Iterator

from warpspec.fmha.config import Schedule
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.plan.cost import HOPPER, Tiling, Way
from warpspec.fmha.plan.splits import DECODE_LOADS, FLOAT8_LOADS, WARP_LOADS, Loads
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90.config import AttentionConfig
from warpspec.fmha.sm90.shapes import Shape, shapes_of
from warpspec.fmha.tiles import choose_packs, fits_blocks

SCHEDULES = {
    Way.PERSISTENT: Schedule.PERSISTENT,
    Way.SINGLE: Schedule.PERSISTENT,  # of as many CTAs as there are tiles
    Way.QUEUE: Schedule.QUEUE,
    Way.LINE: Schedule.LINE,
    Way.SPLIT: Schedule.PERSISTENT,
}


class HopperChoices(Choices):
    """``Choices`` of this kernel."""

    def decode_loads(self, problem: AttentionProblem) -> Loads:
        """How fast an SM loads keys for few queries (``plan.splits``)."""
        if not problem.format.kv_format:
            return DECODE_LOADS
        return WARP_LOADS[problem.format.kv_bits] if shapes_of(problem)[0].row_tiles else FLOAT8_LOADS

    def tilings(self, problem: AttentionProblem) -> Iterator[tuple[Shape, Tiling]]:
        """Shapes and their tilings, for each number of heads that may share a tile, except shapes in which some
        consumer would have no rows."""
        for shape in shapes_of(problem):
            groups, rows = shape.groups, shape.most_rows
            for pack in choose_packs(problem, rows):
                several = groups == 1 or problem.seq_q > (groups - 1) * (rows // pack)
                if several and fits_blocks(problem, groups * (rows // pack), shape.tile_n):
                    sizes = (groups, rows, shape.column_parts, shape.tile_n, shape.kv_stages)
                    yield shape, Tiling(*sizes, shape.ctas_per_sm, pack, problem.requests.packed_q)

    def ways(self, problem: AttentionProblem) -> tuple[Way, ...]:
        """How CTAs may get their work; the first is for any number of tiles."""
        if shapes_of(problem)[0].column_parts > 1:
            return Way.PERSISTENT, Way.SPLIT
        if problem.bias:
            return Way.PERSISTENT, Way.SINGLE, Way.SPLIT
        if problem.mask.has_blocks:  # the lengths of lists are on the device
            return tuple(way for way in self.schedules if way is not Way.LINE)
        return tuple(self.schedules)


CHOICES = HopperChoices(AttentionConfig, HOPPER, SCHEDULES, expanded_rows=2048)
