"""Shadow memory: which accesses touched each unit of memory last.

A unit (a word, or less where a kernel accesses less) holds the number of its last write and the number of the set of
reads since then that later ones do not cover. Many units share the number of an access, so an access to a tile looks at
few numbers, however large the tile is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from warpspec.sim.order.clocks import Clock, Snapshot
from warpspec.sim.order.findings import Access
from warpspec.sim.tcgen05.memory import COLUMNS, LANES

READS = 32  # lowest bit of the write's number in a cell
SET = (1 << READS) - 1
TINY = 16  # most units of one dimension that are examined one by one
SMALL = 128  # likewise, if they are not all equal
RUNS = 4096  # runs of one number that are looked at one by one
GRAIN = 8  # lanes that tensor memory's numbers stand for
FEW = 8  # kinds of cells that are replaced one after the other


class Shadow:
    """Numbers of one memory, in any shape. cells: a write's number << READS | a set's number, int64.

    touched: numbers of all accesses so far.
    """

    __slots__ = ("cells", "touched")

    def __init__(self, shape: int | tuple[int, ...]):
        self.cells = np.zeros(shape, np.int64)
        self.touched: set[int] = set()

    def clear(self) -> None:
        """Forget all accesses."""
        if self.touched:
            self.cells.fill(0)
            self.touched = set()

    @property
    def writes(self) -> np.ndarray:
        """The numbers of writes, a view."""
        return self.cells.view(np.int32).reshape(*self.cells.shape, 2)[..., 1]

    @property
    def reads(self) -> np.ndarray:
        """The numbers of sets of reads, a view."""
        return self.cells.view(np.int32).reshape(*self.cells.shape, 2)[..., 0]


class TensorShadow(Shadow):
    """Numbers of tensor memory [rows, columns]: a row is `GRAIN` lanes as long as every access is to whole rows, as
    those of nearly all kernels are, and one lane from the first other access on."""

    __slots__ = ("grain",)

    def __init__(self):
        super().__init__((LANES // GRAIN, COLUMNS))
        self.grain = GRAIN

    def index(self, where: tuple) -> tuple:
        """An index of lanes and columns as one of `cells`."""
        if self.grain > 1:
            rows = _whole_rows(where)
            if rows is not None:
                return rows
            self.cells = np.repeat(self.cells, self.grain, axis=0)
            self.grain = 1
        return where


def _whole_rows(where: tuple) -> tuple | None:
    """An index of lanes and columns as one of rows of `GRAIN` lanes and columns; None where it has parts of rows."""
    lanes, columns = where
    if isinstance(lanes, slice) and isinstance(columns, slice):
        start, stop = lanes.start or 0, LANES if lanes.stop is None else lanes.stop
        if start % GRAIN or stop % GRAIN:
            return None
        return slice(start // GRAIN, stop // GRAIN), columns
    lanes, columns = np.asarray(lanes), np.asarray(columns)
    return _rows_of_arrays(lanes.tobytes(), lanes.shape, columns.tobytes(), columns.shape)


@lru_cache(maxsize=1 << 10)
def _rows_of_arrays(lanes: bytes, lanes_shape: tuple, columns: bytes, columns_shape: tuple) -> tuple | None:
    touched = np.zeros((LANES, COLUMNS), bool)
    touched[
        np.frombuffer(lanes, np.intp).reshape(lanes_shape),
        np.frombuffer(columns, np.intp).reshape(columns_shape),
    ] = True
    parts = touched.reshape(-1, GRAIN, COLUMNS)
    rows = parts.any(axis=1)
    return np.nonzero(rows) if (rows == parts.all(axis=1)).all() else None


def distinct(numbers: np.ndarray) -> list[int]:
    """The distinct numbers in an array."""
    if numbers.size > TINY:
        first = numbers.item(0)
        if not differ(numbers, first):
            return [first]
        if numbers.size > SMALL:
            flat = numbers.reshape(-1)
            changed = flat[1:][flat[1:] != flat[:-1]]  # accesses leave long runs of one number
            if changed.size > RUNS:
                changed = np.unique(changed)
            return list(dict.fromkeys((first, *changed.tolist())))
    return list(dict.fromkeys(numbers.ravel().tolist()))


def differ(numbers: np.ndarray, number: int) -> bool:
    """Whether some number differs from this one."""
    return b"\1" in (numbers != number).tobytes()


class Ledger:
    """The accesses and sets of reads behind the numbers."""

    def __init__(self, known: Callable[[Access, Clock | Snapshot], bool]):
        self.accesses: list[Access | None] = [None]
        self.sets: list[tuple[Access, ...]] = [()]
        self._joined: dict[tuple[int, int], int] = {}
        self._known = known

    def number(self, access: Access) -> int:
        """The number of an access."""
        if not access.key:
            access.key = len(self.accesses)
            self.accesses.append(access)
        return access.key

    def alone(self, access: Access) -> int:
        """The number of the set with only this read."""
        key = (0, self.number(access))
        joined = self._joined.get(key)
        if joined is None:
            joined = self._joined[key] = len(self.sets)
            self.sets.append((access,))
        return joined

    def with_reader(self, number: int, access: Access, clock: Clock | Snapshot) -> int:
        """The number of a set of reads plus one more, without those that happen before it (by its clock)."""
        key = (number, self.number(access))
        joined = self._joined.get(key)
        if joined is None:
            before = self.sets[number]
            if access in before:
                joined = number
            else:
                kept = tuple(read for read in before if not self._known(read, clock))
                joined = len(self.sets)
                self.sets.append((*kept, access))
            self._joined[key] = joined
        return joined

    def note(self, shadow: Shadow, where, access: Access, clock: Clock | Snapshot) -> list[int]:
        """Note an access to the units `where` (any index); returns the kinds of cells that were there."""
        key = access.key or self.number(access)
        shadow.touched.add(key)
        cells = shadow.cells[where]
        kinds = distinct(cells)
        if access.write:
            shadow.cells[where] = key << READS
        elif len(kinds) == 1:
            (kind,) = kinds
            new = kind & ~SET | self.with_reader(kind & SET, access, clock)
            if new != kind:
                shadow.cells[where] = new
        elif len(kinds) == 2:
            one, other = (kind & ~SET | self.with_reader(kind & SET, access, clock) for kind in kinds)
            if [one, other] != kinds:
                shadow.cells[where] = np.where(cells == kinds[0], one, other)
        elif len(kinds) <= FEW:
            new = cells.copy()
            for kind in kinds:
                new[cells == kind] = kind & ~SET | self.with_reader(kind & SET, access, clock)
            shadow.cells[where] = new
        else:
            found, which = np.unique(cells, return_inverse=True)
            sets = [kind & ~SET | self.with_reader(kind & SET, access, clock) for kind in found.tolist()]
            shadow.cells[where] = np.array(sets, np.int64)[which].reshape(cells.shape)
        return kinds

    def of(self, kind: int, write: bool) -> list[Access]:
        """The accesses that a kind of cell stands for, as far as they may conflict with a write, or with a read."""
        found = [self.accesses[kind >> READS]] if kind >> READS else []
        return [*found, *self.sets[kind & SET]] if write else found
