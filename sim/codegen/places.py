"""The places of registers while a block of native code runs.

A register that is live after the block has a home in the warp's register file. What a block computes on the way lies
in temporary places after the homes, which all blocks share: a place is free again after the last use of its value.
The last write of a register that is live after its block goes to its home, in the executing lanes only.
"""

from __future__ import annotations

from collections.abc import Sequence

from warpspec.sim.codegen.emitter import Place
from warpspec.sim.codegen.layout import REGISTER_ALIGN, RegisterFile, register_bytes

Touched = tuple[tuple[str, ...], tuple[str, ...]]  # names that an instruction reads, that it writes


class _Pool:
    """Places of one size; those freed last are given out first."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.count = 0

    def take(self) -> int:
        if self.free:
            return self.free.pop()
        self.count += 1
        return self.count - 1


class TemporaryPlaces:
    """Finds places for the registers of blocks; `block` for each of them first, then `resolve`."""

    def __init__(self, registers: RegisterFile):
        self._registers = registers
        self._pools: dict[int, _Pool] = {}  # key: bytes of a place
        self._start: dict[int, int] = {}

    def block(self, touched: Sequence[Touched], live_out: frozenset[str]) -> list[tuple[dict, dict]]:
        """Sources and targets of each instruction as in `Place`, temporary ones as (bytes, number)."""
        dead_behind, is_last = _uses(touched, live_out)
        homes = self._registers.offset
        taken: dict[str, tuple[int, int]] = {}
        moved: dict[str, object] = {}  # registers that do not lie in their homes, or did not
        found = []
        for (reads, writes), dead, last in zip(touched, dead_behind, is_last, strict=True):
            sources = {}
            for name in reads:
                at = moved.get(name, homes.get(name))
                if at is not None:
                    sources[name] = at
            for name in dead:
                if name in taken:
                    self._free(taken.pop(name))
            targets = {}
            for name in writes:
                if name in taken:
                    self._free(taken.pop(name))
                if name in last:
                    moved[name] = homes[name]
                    targets[name] = homes[name], True
                else:
                    taken[name] = moved[name] = self._take(name)
                    targets[name] = moved[name], False
            for name in dead:
                if name in taken:
                    self._free(taken.pop(name))
            found.append((sources, targets))
        for place in taken.values():
            self._free(place)
        return found

    def _take(self, name: str) -> tuple[int, int]:
        size = register_bytes(self._registers.bits[name])
        return size, self._pools.setdefault(size, _Pool()).take()

    def _free(self, place: tuple[int, int]) -> None:
        self._pools[place[0]].free.append(place[1])

    def reserve(self, start: int) -> int:
        """Put the temporary places after `start` bytes of homes; the end of all."""
        for size in sorted(self._pools, reverse=True):
            self._start[size] = start
            start += size * self._pools[size].count
        return -(-start // REGISTER_ALIGN) * REGISTER_ALIGN

    def resolve(self, sources: dict, targets: dict) -> Place:
        """The places that `block` found for an instruction, as byte offsets."""
        return Place(
            {name: self._offset(at) for name, at in sources.items()},
            {name: (self._offset(at), masked) for name, (at, masked) in targets.items()},
        )

    def _offset(self, at) -> int:
        return at if isinstance(at, int) else self._start[at[0]] + at[0] * at[1]


def _uses(touched: Sequence[Touched], live_out: frozenset[str]) -> tuple[list[list[str]], list[set[str]]]:
    """Two lists with an entry for each instruction: registers whose value nothing after it needs, and registers of
    live_out that it is the last to write."""
    needed = set(live_out)
    unwritten = set(live_out)
    dead_behind, is_last = [], []
    for reads, writes in reversed(touched):
        dead_behind.append([name for name in {*reads, *writes} if name not in needed])
        last = unwritten.intersection(writes)
        is_last.append(last)
        unwritten -= last
        needed.difference_update(writes)
        needed.update(reads)
    return dead_behind[::-1], is_last[::-1]
