"""Configuration of the kernel with keys as rows of the products. Plain Python.

Two consumer warpgroups take 128 keys together, a step. In S^T each has 64 keys and all columns, which are the task's
rows; in O^T each has half of the value columns and all keys. They agree on the rows' maxima, and pass P, through shared
memory. One warp loads codes, 32 keys at a time, to a ring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.common import memory
from warpspec.common.barriers import Barrier
from warpspec.common.hardware import (
    FP32_BYTES,
    WARP_THREADS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
    WORD_BYTES,
)
from warpspec.common.memory import ROW_BYTES
from warpspec.fmha.config import AttentionKernel, Schedule, TileScheduler
from warpspec.fmha.sm90.shapes import Shape
from warpspec.fmha.tiles import ELEMENT_BYTES, TileRows
from warpspec.latent.gathered.config import E4M3_ROWS, PAGE_ROWS, Gathers, gathered_records
from warpspec.latent.gathered.ring import RingOfCodes

CONSUMERS = 2
UNIT_KEYS = 32  # keys that are loaded together; each warp multiplies keys of one unit with Q
UNITS = PAGE_ROWS // UNIT_KEYS  # units of a KV tile
# Bytes from one key to the next in shared memory. Four neighbouring keys must begin in different quarters of the 128
# bytes that shared memory reads at a time; TMA fills what lies behind a row with zeros.
KEY_BYTES = 608
ROWS = (8, 16, 32)  # rows that a task may have: N of the products
REGISTERS = (232, 40)  # of a consumer's thread, and of the load warp's
FLAGS = 2  # steps take turns at them
VECTOR = 4 * FP32_BYTES
# Named barriers of all consumers.
MAXIMA_BARRIER, WEIGHTS_BARRIER, QUERIES_BARRIER, SUMS_BARRIER = range(1, 5)
PAGED_CODES = Gathers(E4M3_ROWS.name, paged=True, has_kv_scale=True)


@dataclass(frozen=True)
class TransposedConfig(RingOfCodes, AttentionKernel):
    """The kernel for tasks of ``count`` rows."""

    count: int = ROWS[-1]
    gathers: Gathers = PAGED_CODES

    def __post_init__(self):
        super().__post_init__()
        assert self.count in ROWS and self.count % self.pack == 0
        assert self.gathers.paged and self.gathers.has_kv_scale and self.gathers.fmt.tail == 0
        assert self.gathers.fmt.row_bytes <= KEY_BYTES
        # Each key begins a quarter of a row of banks further than the key before, up or down.
        assert KEY_BYTES % ROW_BYTES * 4 in (ROW_BYTES, 3 * ROW_BYTES)
        assert self.smem_bytes <= self.smem_limit and self.units >= CONSUMERS * UNITS
        assert self.role_registers <= self.register_pool, "setmaxnreg would wait for ever"

    @classmethod
    def of(
        cls, count: int, *, line: bool = False, ahead: bool = False, exact: bool = False, **options
    ) -> TransposedConfig:
        """A configuration for tasks of ``count`` rows. line, ahead, options: as in ``GatheredConfig.of``. exact:
        row_max, if it is a result, is the row's maximum; otherwise some reference near it."""
        records = gathered_records(**options)
        records["output"] = replace(records["output"], exact_maximum=exact)
        if line:
            scheduler = TileScheduler(Schedule.LINE, in_step=True, adds_up=True, cuts_ahead=ahead)
        else:
            scheduler = TileScheduler(Schedule.PERSISTENT)
        return cls(count=count, scheduler=scheduler, **records)

    @property
    def rows(self) -> TileRows:
        return TileRows(self.pack, 1, self.count)

    @property
    def value_tiles(self) -> int:
        """Number of products of a consumer along its value columns, 64 of which each has as rows of O^T."""
        return self.heads.v // CONSUMERS // WARPGROUP_ROWS

    @property
    def clears_unseen(self) -> bool:
        """As in ``GatheredConfig``; also keys behind a request's end are found by it here."""
        return True

    # Warp roles: consumer warpgroups, then one whose first warp loads.

    @property
    def consumer_threads(self) -> int:
        return CONSUMERS * WARPGROUP_THREADS

    @property
    def consumer_warps(self) -> int:
        return self.consumer_threads // WARP_THREADS

    @property
    def load_warp(self) -> int:
        return self.consumer_warps

    @property
    def threads(self) -> int:
        return self.consumer_threads + WARPGROUP_THREADS

    @property
    def shape(self) -> Shape:
        """As in ``sm90.AttentionConfig``."""
        return Shape(CONSUMERS, self.tile_n, self.units, 1, *REGISTERS)

    @property
    def role_registers(self) -> int:
        """Registers of a CTA once the roles have set theirs."""
        consumer, load = REGISTERS
        return CONSUMERS * WARPGROUP_THREADS * consumer + WARPGROUP_THREADS * load

    # Shared memory, in bytes.

    @property
    def unit_bytes(self) -> int:
        return UNIT_KEYS * KEY_BYTES

    @property
    def q_bytes(self) -> int:
        return self.count * self.heads.qk_room * ELEMENT_BYTES

    @property
    def p_bytes(self) -> int:
        """P of one consumer's keys."""
        return self.count * ROW_BYTES

    def regions_of(self, units: int) -> tuple[memory.Region, ...]:
        """The regions, with so many units of the ring."""
        cursors = self.scheduler.cursor_bytes // WORD_BYTES
        each = self.consumer_warps * self.count
        return (
            memory.barrier_region(barriers_of(units)),
            memory.Region("cursors", cursors, "int32", 0, "ends of chunks"),
            memory.Region("masks", units, "uint32", 0, "", "whether a unit's page is there"),
            memory.Region("factors", self.count, "float32", VECTOR, "", "of the scores of rows"),
            memory.Region("maxima", self.count, "int32", VECTOR, "", "of the scores of rows, so far, as integers"),
            memory.Region("references", 2 * self.count, "float32", VECTOR, "", "of rows; moved to the other place"),
            memory.Region("flags", FLAGS, "int32", 0, "", "the step that needs larger references"),
            memory.Region("sums", each, "float32", VECTOR, "", "row sums of each warp's keys"),
            memory.tile_region("q", self.q_bytes, "Q", f"[{self.count}, {self.heads.qk_room}]"),
            memory.tile_region("p", CONSUMERS * self.p_bytes, "P", f"{CONSUMERS} x [{self.count}, {PAGE_ROWS}]"),
            memory.Region("codes", units * self.unit_bytes, "uint8", 128, "codes", f"{units} x {UNIT_KEYS} keys"),
        )  # fmt: skip

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return barriers_of(self.units)


def barriers_of(units: int) -> tuple[Barrier, ...]:
    """The barrier table of a ring of so many units."""
    warps = CONSUMERS * WARPGROUP_THREADS // WARP_THREADS
    return (
        Barrier("full", units, 1, "load warp, expect_tx + TMA bytes", "consumers", "a unit of codes has arrived"),
        Barrier("empty", units, warps, "consumers, one thread a warp", "load warp", "the unit's values were read"),
        Barrier("p_empty", 1, warps, "consumers, one thread a warp", "consumers", "P was read"),
    )  # fmt: skip


def rows_of(heads: int, queries: int) -> int:
    """Rows of the tasks of a call, the fewest that hold all heads and queries of a request; 0 if there are too many."""
    return next((count for count in ROWS if count >= heads * queries), 0)
