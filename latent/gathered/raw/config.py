"""Configuration of the kernel that multiplies codes of Q and K as they are. Plain Python.

A score warpgroup takes a KV tile of 64 keys a step: S^T, softmax, P^T to shared memory. Two value warpgroups add the
tile's V^T P^T to O^T, half of the value columns each. One warp loads codes, a page at a time, to a ring.
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
from warpspec.fmha.tiles import TileRows
from warpspec.latent.gathered.config import (
    E4M3_ROWS,
    PAGE_ROWS,
    VALUE_DIM,
    Gathers,
    gathered_records,
)
from warpspec.latent.gathered.ring import RingOfCodes

VALUE_GROUPS = 2  # value warpgroups
ROWS = (8, 16, 32, 64)  # rows that a task may have: N of the products
# Registers of a thread of the score warpgroup, of the value warpgroups, of the load warp. Of fewer rows O takes fewer.
REGISTERS, OF_FEWER_ROWS = (136, 176, 24), (160, 152, 40)
# Columns whose products the tensor core adds up before their sum is added in fp32, and buffers of such sums.
SUM_COLUMNS, SUM_BUFFERS = 64, 2
# By what share such sums are too small on average, because the tensor core cuts bits off (docs/notebook/latent.md).
SHORTFALL = 4e-5
FLAGS = 2  # steps take turns at them
P_TURNS = 2  # and at places of P
VECTOR = 4 * FP32_BYTES
HALF = VALUE_DIM // VALUE_GROUPS  # value columns of a value warpgroup
SLOTS = 2  # tasks whose records and rows are in shared memory
# Words of a task's record.
COUNT, SPLIT, WHOLE, STATE, EARLIER, LATER, FIRST_TILE, FIRST_END, LAST_END, FULL, LINE_HEAD = range(11)
RECORD_WORDS = 11
FACTOR, REFERENCE, TOTAL, TOKEN, HEAD = range(5)  # numbers of a task's row
ROW_NUMBERS = 5
CODES_ALIGNMENT = 512  # bytes of the pattern by which TMA swizzles rows of 64 bytes
# Named barriers of the score warpgroup; value warpgroups have those from ``fmha.sm90.config.SCORED_BARRIER`` on.
MAXIMA_BARRIER, WEIGHTS_BARRIER, QUERIES_BARRIER, SUMS_BARRIER = range(1, 5)
PAGED_CODES = Gathers(E4M3_ROWS.name, paged=True, has_kv_scale=True, has_q_scale=True)


@dataclass(frozen=True)
class RawConfig(RingOfCodes, AttentionKernel):
    """The kernel for tasks of ``count`` rows."""

    count: int = ROWS[-1]
    gathers: Gathers = PAGED_CODES

    def __post_init__(self):
        super().__post_init__()
        assert self.count in ROWS and self.count % self.pack == 0
        assert self.heads.qk_room % SUM_COLUMNS == 0
        assert self.gathers.paged and self.gathers.has_kv_scale and self.gathers.fmt.tail == 0
        assert self.smem_bytes <= self.smem_limit and self.units > 1
        assert self.role_registers <= self.register_pool, "setmaxnreg would wait for ever"

    @classmethod
    def of(
        cls, count: int, *, line: bool = False, ahead: bool = False, exact: bool = False, **options
    ) -> RawConfig:
        """A configuration for tasks of ``count`` rows. line, ahead, options: as in ``GatheredConfig.of``. exact: as in
        ``TransposedConfig.of``."""
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
    def sums_vector(self) -> int:
        """Row sums that a thread of the score warpgroup loads at a time."""
        return min(self.columns, VECTOR // FP32_BYTES)

    @property
    def a_buffers(self) -> int:
        """Buffers of A in a value warpgroup. With two, codes become fp16 while products read the other; where work is
        cut by length, ptxas has no registers for that and runs every product alone."""
        return 1 if self.scheduler.cuts_tiles else 2

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread of the score warpgroup, of the value warpgroups, of the load warp."""
        return REGISTERS if self.count == ROWS[-1] else OF_FEWER_ROWS

    @property
    def value_tiles(self) -> int:
        """Number of products of a value warpgroup along its value columns, 64 of which each has as rows of O^T."""
        return self.heads.v // VALUE_GROUPS // WARPGROUP_ROWS

    @property
    def divides(self) -> bool:
        """Whether O is divided by the rows' sums, or what is left of it are means."""
        return self.output.normalize or self.output.means

    @property
    def clears_unseen(self) -> bool:
        """As in ``TransposedConfig``."""
        return True

    # Warp roles: value warpgroups, the score warpgroup, then one whose first warp loads.

    @property
    def value_threads(self) -> int:
        return VALUE_GROUPS * WARPGROUP_THREADS

    @property
    def score_warp(self) -> int:
        """First warp of the score warpgroup."""
        return self.value_threads // WARP_THREADS

    @property
    def load_warp(self) -> int:
        return self.score_warp + WARPGROUP_THREADS // WARP_THREADS

    @property
    def threads(self) -> int:
        return self.value_threads + 2 * WARPGROUP_THREADS

    @property
    def shape(self) -> Shape:
        """As in ``sm90.AttentionConfig``."""
        return Shape(VALUE_GROUPS, self.tile_n, self.units, 1, *self.registers[1:])

    @property
    def role_registers(self) -> int:
        """Registers of a CTA once the roles have set theirs."""
        score, value, load = self.registers
        return (VALUE_GROUPS * value + score + load) * WARPGROUP_THREADS

    # Shared memory, in bytes.

    @property
    def unit_bytes(self) -> int:
        """A KV tile's codes."""
        return self.tile_n * self.gathers.fmt.row_bytes

    @property
    def q_bytes(self) -> int:
        return self.count * self.heads.qk_room

    @property
    def p_bytes(self) -> int:
        """P of a KV tile."""
        return self.count * ROW_BYTES

    def regions_of(self, units: int) -> tuple[memory.Region, ...]:
        """The regions, with so many units of the ring."""
        cursors = self.scheduler.cursor_bytes // WORD_BYTES
        each, own = WARPGROUP_THREADS // WARP_THREADS * self.count, P_TURNS * WARPGROUP_THREADS * self.columns
        return (
            memory.barrier_region(barriers_of(units)),
            memory.Region("cursors", cursors, "int32", 0, "ends of chunks"),
            memory.Region("masks", units, "uint32", 0, "", "whether a KV tile's page is there"),
            memory.Region("maxima", self.count, "int32", VECTOR, "", "of the scores of rows, so far, as integers"),
            memory.Region("references", 2 * self.count, "float32", VECTOR, "", "of rows; moved to the other place"),
            memory.Region("flags", FLAGS, "int32", 0, "", "the step that needs larger references"),
            memory.Region("moved", P_TURNS, "int32", 0, "", "the step in which references have moved"),
            memory.Region("factors", P_TURNS * self.count, "float32", VECTOR, "", "of O^T, where they have"),
            memory.Region("weights", own, "float32", VECTOR, "", "row sums of each thread's keys"),
            memory.Region("sums", each, "float32", VECTOR, "", "row sums of each warp's keys"),
            memory.Region("record", SLOTS * RECORD_WORDS, "int32", 0, "", "what value warpgroups know of a task"),
            memory.Region("rows", SLOTS * ROW_NUMBERS * self.count, "float32", VECTOR, "", "numbers of a task's rows"),
            memory.Region("share", VALUE_GROUPS, "int32", 0, "", "what to add up of a task that is cut"),
            memory.tile_region("q", self.q_bytes, "Q", f"[{self.count}, {self.heads.qk_room}], e4m3"),
            memory.tile_region("p", P_TURNS * self.p_bytes, "P", f"{P_TURNS} x [{self.count}, {PAGE_ROWS}]"),
            memory.Region("codes", units * self.unit_bytes, "uint8", CODES_ALIGNMENT, "codes", f"{units} KV tiles"),
        )  # fmt: skip

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return barriers_of(self.units)


def barriers_of(units: int) -> tuple[Barrier, ...]:
    """The barrier table of a ring of so many units."""
    warps = WARPGROUP_THREADS // WARP_THREADS
    values = VALUE_GROUPS * warps
    score, value = "score warpgroup, one thread a warp", "value warpgroups, one thread a warp"
    return (
        Barrier("full", units, 1, "load warp, expect_tx + TMA bytes", "score warpgroup", "a KV tile has arrived"),
        Barrier("empty", units, values, value, "load warp", "the tile's values were read"),
        Barrier("p_full", P_TURNS, warps, score, "value warpgroups", "P is there, with what O is multiplied by"),
        Barrier("p_empty", P_TURNS, values, value, "score warpgroup", "P was read"),
        Barrier("task_full", SLOTS, warps, score, "value warpgroups", "the next task's record is there"),
        Barrier("rows_full", SLOTS, warps, score, "value warpgroups", "the numbers of its rows are there"),
        Barrier("task_empty", SLOTS, values, value, "score warpgroup", "both were read"),
    )  # fmt: skip
