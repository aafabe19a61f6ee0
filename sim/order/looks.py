"""Early looks: reads of what an earlier launch may still write, ahead of griddepcontrol.wait.

A strong read (relaxed, volatile or acquire) may look at any time, as long as nothing depends on what it finds: whoever
looks must read the place again behind the wait. A CTA that looks at a place and never does is held to have used what it
found.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from warpspec.sim.order.findings import Access


class Looks:
    """The early looks at one allocation, by CTA: unit -> the last one."""

    __slots__ = ("_of_cta",)

    def __init__(self) -> None:
        self._of_cta: dict[tuple, dict[int, Access]] = {}

    def look(self, where: slice | np.ndarray, access: Access) -> None:
        """An access looks at units."""
        self._of_cta.setdefault(access.cta, {}).update(dict.fromkeys(_units(where), access))

    def again(self, where: slice | np.ndarray, access: Access) -> None:
        """An access behind the wait reads units."""
        mine = self._of_cta.get(access.cta)
        if mine:
            for unit in _units(where):
                mine.pop(unit, None)

    def left(self, cta: tuple) -> dict[int, Access]:
        """What a CTA has not read again; asked once, at its end."""
        return self._of_cta.pop(cta, {})


def _units(where: slice | np.ndarray) -> Iterable[int]:
    return range(where.start, where.stop) if isinstance(where, slice) else where.ravel().tolist()
