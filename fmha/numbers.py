"""The numbers among an attention kernel's arguments."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from warpspec.common.operands import INT32, Number
from warpspec.fmha.logits import LogitNumbers


class LaunchNumbers(NamedTuple):
    """The numbers among an attention kernel's arguments.

    window_left, window_right: not read where unbounded. ctas: most persistent CTAs to launch. section: of
    ``TileGrid.decode``. There must be at least one tile; ctas and section are at least 1.
    """

    logits: LogitNumbers
    window_left: Annotated[Any, Number(INT32)]
    window_right: Annotated[Any, Number(INT32)]
    ctas: Annotated[Any, Number(INT32)]
    section: Annotated[Any, Number(INT32)]

    @property
    def window(self) -> tuple:
        """(left, right)."""
        return self.window_left, self.window_right
