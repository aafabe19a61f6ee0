"""Pieces of packed key tiles dealt to the SMs in counts, as the device does it to choose their lengths.

The device's own are in ``device.lengths`` and ``device.runs``, a lane for each of the lengths that are tried.
"""

from __future__ import annotations


class Dealing:
    """SMs counted by the time at which they are free, in whole numbers of a quantum up to ``times``. last: when the
    last piece dealt so far is done."""

    def __init__(self, sms: int, times: int):
        self.free, self.times = [sms] + [0] * times, times
        self.time = self.last = 0

    def deal(self, count: int, steps: float) -> None:
        """Deal so many pieces, each to the SM that is free first. steps: quanta that a piece takes, rounded here."""
        taken = max(int(steps + 0.5), 1)
        while count and self.time < self.times:
            moved, end = min(self.free[self.time], count), min(self.time + taken, self.times)
            self.free[self.time] -= moved
            self.free[end] += moved
            count -= moved
            self.last = max(self.last, end if moved else 0)
            self.time += count > 0
