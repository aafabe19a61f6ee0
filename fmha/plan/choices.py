"""The choices that plans have for an architecture's attention kernel: tiles, and ways in which CTAs get their work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warpspec.fmha.config import Schedule
from warpspec.fmha.plan.cost import Constants, Way
from warpspec.fmha.plan.splits import Loads
from warpspec.fmha.plan.work import Tiling
from warpspec.fmha.problem import AttentionProblem


@dataclass(eq=False)
class Choices:
    """Base of the choices of an architecture. Its package has one object, ``CHOICES``, whose class adds the methods.

    config: its ``AttentionConfig``. costs: constants of the model of its time. schedules: the ways in which CTAs may
    get their work, with the kernel's schedule for each. expanding: microseconds, beside those of its
    bytes, of a launch that dequantises keys in codes first (``expanding.expands``); None: that is never done.
    """

    config: type
    costs: Constants
    schedules: dict[Way, Schedule]
    expanding: float | None = None

    def constants(self, problem: AttentionProblem) -> Constants:
        """Constants of the model for a problem."""
        return self.costs

    def converts(self, problem: AttentionProblem) -> bool:
        """Whether a converter makes 16-bit tiles of a problem's codes for all of a CTA's rows."""
        return True

    def decode_loads(self, problem: AttentionProblem) -> Loads | None:
        """Rates at which an SM loads keys for few queries (``plan.splits``); None: such calls have not been timed."""
        return None

    def tilings(self, problem: AttentionProblem) -> Iterator[tuple[object, Tiling]]:
        """Shapes that a problem may get and their tilings, for each number of heads that may share a tile."""
        raise NotImplementedError

    def ways(self, problem: AttentionProblem, shape: object) -> tuple[Way, ...]:
        """The ways in which CTAs of a shape may get their work; the first suits any number of tiles."""
        raise NotImplementedError
