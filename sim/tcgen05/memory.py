"""Tensor memory of one CTA: 128 lanes x 512 columns of 32-bit words, and its allocation rules.

PTX ISA: "Tensor Memory", `tcgen05.alloc`. An address is lane << 16 | column.
"""

from __future__ import annotations

import numpy as np

from warpspec.sim.errors import TmemFault
from warpspec.sim.names import placed

LANES = 128
COLUMNS = 512
ALLOCATION_UNIT = 32  # columns
PARTITION_LANES = 32  # the lanes one warp of a warpgroup may touch
POISON = 0xFFFFFFFF  # what memory holds that nobody wrote: a NaN in every floating-point format


def address_parts(address: int) -> tuple[int, int]:
    """(lane, column) of a 32-bit tensor-memory address; the top bits, a scale-factor byte index, are
    dropped."""
    return address >> 16 & 0x3FFF, address & 0xFFFF


Who = tuple | None  # (warp, instruction)


def _by(who: Who) -> str:
    """A text for messages that names the warp and the instruction."""
    if who is None:
        return ""
    w, ins = who
    return f" (by warp {w.index}, {placed(ins.source) or f'PTX line {ins.line}'})"


class Tmem:
    """`data` is uint32[128, 512]. Columns outside an allocation may not be touched. data: an array to use for it."""

    def __init__(self, data: np.ndarray | None = None):
        self.data = np.full((LANES, COLUMNS), POISON, np.uint32) if data is None else data
        self.blocks: dict[int, int] = {}  # first column -> columns
        self._allocated_by: dict[int, Who] = {}  # key: first column
        self._freed: dict[int, tuple[int, Who]] = {}  # free again: first column -> columns, by whom
        self.allocated = np.zeros(COLUMNS, bool)
        self.cta_group: int | None = None  # the one value every tcgen05 instruction of a kernel uses
        # Columns a .cta_group::2 allocation asks for, until both CTAs ask.
        self.pair_request: int | None = None
        self.pair_grant: int | None = None  # its address, until this CTA's warp takes it
        self.peak_columns = 0
        self.relinquished = False
        self._last_request: int | None = None

    def allocate(self, columns: int, who: Who = None) -> int | None:
        """The address of a new allocation, lowest first, or None when it does not fit now (tcgen05.alloc
        waits). who: (warp, instruction) that asks."""
        self._check_size(columns)
        if self.relinquished:
            raise TmemFault("tcgen05.alloc after the CTA executed tcgen05.relinquish_alloc_permit")
        if self._last_request is not None and columns > self._last_request:
            raise TmemFault(
                f"tcgen05.alloc of {columns} columns after one of {self._last_request}: "
                "within a CTA the size must not increase from one allocation to the next"
            )
        for first in range(0, COLUMNS - columns + 1, ALLOCATION_UNIT):
            if not self.allocated[first : first + columns].any():
                break
        else:
            return None
        self._last_request = columns
        self.blocks[first] = columns
        self._allocated_by[first] = who
        for gone in [
            at for at, (count, _) in self._freed.items() if at < first + columns and first < at + count
        ]:
            del self._freed[gone]
        self.allocated[first : first + columns] = True
        self.data[:, first : first + columns] = POISON
        self.peak_columns = max(self.peak_columns, self.allocated_columns)
        return first

    def deallocate(self, address: int, columns: int, who: Who = None) -> None:
        """Free what `allocate` returned; address and size must be those of one allocation."""
        self._check_size(columns)
        held = self.blocks.get(address)
        if held is None:
            raise TmemFault(
                f"tcgen05.dealloc of 0x{address:08x}, which no tcgen05.alloc returned; {self.describe()}"
            )
        if held != columns:
            raise TmemFault(f"tcgen05.dealloc of {columns} columns at 0x{address:08x}, allocated with {held}")
        del self.blocks[address]
        self._freed[address] = columns, who
        self.allocated[address : address + columns] = False

    def relinquish(self) -> None:
        """tcgen05.relinquish_alloc_permit: later allocations by this CTA are faults."""
        self.relinquished = True

    def require(self, column: int, columns: int, what: str) -> None:
        """Raise TmemFault unless [column, column + columns) lies in allocated columns."""
        for first, count in self.blocks.items():
            if first <= column and column + columns <= first + count:
                return
        if column + columns > COLUMNS:
            raise TmemFault(f"{what} reaches columns {column} to {column + columns - 1}; there are {COLUMNS}")
        if not self.allocated[column : column + columns].all():
            raise TmemFault(
                f"{what} touches columns {column} to {column + columns - 1}, not all of them allocated; "
                + self.describe()
            )

    @property
    def allocated_columns(self) -> int:
        return sum(self.blocks.values())

    def use_cta_group(self, cta_group: int) -> None:
        """Every tcgen05 instruction of a kernel must name the same .cta_group."""
        if self.cta_group is None:
            self.cta_group = cta_group
        elif self.cta_group != cta_group:
            raise TmemFault(f".cta_group::{cta_group} after .cta_group::{self.cta_group} in the same kernel")

    def describe(self) -> str:
        """The live allocations and what was freed, by whom, for messages."""
        spans = [
            f"{first}-{first + count - 1}{_by(self._allocated_by.get(first))}"
            for first, count in sorted(self.blocks.items())
        ]
        text = f"allocated columns: {', '.join(spans)}" if spans else "nothing is allocated"
        freed = [f"{at}-{at + count - 1}{_by(who)}" for at, (count, who) in sorted(self._freed.items())]
        return f"{text}; freed: {', '.join(freed)}" if freed else text

    @staticmethod
    def _check_size(columns: int) -> None:
        if not ALLOCATION_UNIT <= columns <= COLUMNS or columns & (columns - 1):
            raise TmemFault(f"{columns} columns: tensor memory comes in powers of two from 32 to 512")
