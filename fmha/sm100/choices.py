"""The choices of plans for the sm_100a attention kernel: tiles, heads per tile, ways to hand out work."""

from __future__ import annotations

from collections.abc import Iterator

from warpspec.fmha.config import Schedule
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.plan.cost import BLACKWELL, Way
from warpspec.fmha.plan.work import Tiling
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm100.config import AttentionConfig
from warpspec.fmha.sm100.shapes import FULL_ROWS, Shape, default_shape
from warpspec.fmha.tiles import choose_packs, fits_blocks

SCHEDULES = {Way.SINGLE: Schedule.SINGLE, Way.LINE: Schedule.LINE, Way.SPLIT: Schedule.SINGLE}


class BlackwellChoices(Choices):
    """``Choices`` of this kernel."""

    def tilings(self, problem: AttentionProblem) -> Iterator[tuple[Shape, Tiling]]:
        """The shape and its tiling, for each number of heads that may share a tile."""
        shape = default_shape(problem)
        for pack in choose_packs(problem, shape.tile_m):
            if not fits_blocks(problem, shape.tile_m // pack, shape.tile_n):
                continue
            yield shape, Tiling(1, shape.tile_m, 1, shape.tile_n, shape.kv_stages, shape.ctas_per_sm, pack)

    def ways(self, problem: AttentionProblem, shape: Shape) -> tuple[Way, ...]:
        """The ways in which CTAs of a shape may get their work; the first suits any number of tiles."""
        if problem.bias or problem.mask.has_blocks or shape.tile_m < FULL_ROWS:
            return Way.SINGLE, Way.SPLIT
        return tuple(self.schedules)


CHOICES = BlackwellChoices(AttentionConfig, BLACKWELL, SCHEDULES)
