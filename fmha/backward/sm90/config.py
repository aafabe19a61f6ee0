"""The backward kernel for sm_90a: tiles, warp roles, memory budgets, barrier table. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import memory
from warpspec.common.barriers import MBARRIER_BYTES, Barrier, barrier_count
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import (
    FP32_BYTES,
    MAX_SMEM_PER_CTA,
    REGISTERS_PER_SM,
    TMA_ALIGNMENT,
    WARP_THREADS,
    WARPGROUP_THREADS,
)
from warpspec.fmha.backward.features import SUBTILE_ROWS, WARPS, BackwardKernel, common_fields
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.config import check_requests
from warpspec.fmha.heads import BLOCK, HeadSizes, rounded
from warpspec.fmha.tiles import ELEMENT_BYTES

CONSUMERS = 2  # warpgroups
CONSUMER_KEYS = 64
TILE_M = {64: 128, 128: 64, 192: 64, 256: 64, 512: 64}  # queries of a tile, by D of Q and K
BIAS_DIM, BIAS_STAGES, BIAS_VECTOR = 128, 2, 8  # if TMA loads the bias
WIDE = HeadSizes(192, 128)  # largest sizes of the tile for Q and K that are wider than V
WIDE_BLOCK = 32  # its queries of a block, and columns of dQ at a time: 64 would take too many registers
SUM_STEP = 16  # columns of dK and dV are made and stored in multiples of this
ALONE = 96  # most columns of dQ that one consumer makes alone: with more, it would have too few registers
PAIRED_DIM = 256  # from this D on, both consumers have the same keys: one makes P and dV, the other dS and dK
WIDTH = 256  # most columns of a head in a CTA: at D 512, two CTAs of a cluster have half each (``partial``)
TURN_STAGES = 2  # steps by which a consumer's granted turns may run ahead of its additions
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
BARRIER_BYTES = 1024  # room for the mbarriers: what follows is aligned to it
CONSUMER_BARRIER = 1  # named barrier of both consumers: dS is in shared memory, or rows have been cleared
P_FACTOR = 2.0**14  # factor of P (P is at most 1) when paired consumers exchange it in fp16
# Least soft cap there: its derivative is made of log2(P), which is off by up to 2**-11. With this cap and logits of ten
# caps dQ and dK are off by 0.0034 (bf16 rounding alone: 0.0029), with a tenth of it by 0.014, a hundredth 0.12.
LEAST_CAP = 1.0
LEAST_SCALE = 2.0**-20  # of logits, and 1 over the largest, where products subtract lse'
P_BARRIER = 2  # named barrier of paired consumers: P is in shared memory
APART_BARRIER = 3  # named barrier that the second consumer waits at until the first is half a step ahead
CLEARING_BARRIER = 4  # named barrier of the first consumer: its threads have cleared rows of a step
CLEARED_BARRIER = 5  # and 6, in turn: named barriers at which the second consumer waits for such rows
VISIT_WORDS = 4  # words that the first warp leaves of a step of lists of blocks (``visits``)


def can_subtract(logits, scale: float) -> bool:
    """Whether products may subtract lse' from S (``subtraction``): logits are scores times a factor whose inverse is no
    extreme number."""
    plain = logits.bias is None and not logits.curved
    return plain and LEAST_SCALE <= abs(scale) <= 1 / LEAST_SCALE


def has_bias_tiles(fields: dict, forward) -> bool:
    """Whether TMA can load the bias and store its gradient: bf16, aligned rows, and enough shared memory."""
    logits = fields["logits"]
    fits = forward.head_dim == BIAS_DIM and not fields["deterministic"] and forward.bias_rows == "aligned"
    whole_rows = forward.seq_k % BIAS_VECTOR == 0 or fields["wanted"].bias != "bfloat16"
    fits = fits and not logits.curved  # dS no longer equals dbias when it is stored
    return fits and whole_rows and fields["format"].dtype == logits.bias.dtype == "bfloat16"


def tile_heads(fields: dict, rows: HeadSizes | None) -> HeadSizes:
    """The head sizes of the kernel's tile: the tuned size, or ``WIDE`` where rows fit, logits take no registers, dQ has
    no order, and blocks of a list are of whole tiles. rows: the sizes of rows in memory, if they differ from the tuned
    size."""
    heads, logits, block = fields["heads"], fields["logits"], fields["mask"].block_size
    narrower = rows is not None and WIDE.v < rows.qk <= WIDE.qk and rows.v <= WIDE.v
    plain = logits.bias is None and not logits.curved and not fields["deterministic"]
    whole = block is None or block[1] % (CONSUMERS * CONSUMER_KEYS) == 0
    return WIDE if narrower and plain and whole else heads


@dataclass(frozen=True)
class BackwardConfig(BackwardKernel):
    """Compile-time shape of one kernel. tile_m: queries of a tile. q_stages, do_stages: stages of the rings of Q and
    dO; without a load warp, Q has one more. bias_tiles: the bias comes through shared memory (``bias``). late: dQ of a
    step is made in the next step (``exchange``). subtractable: see ``can_subtract``."""

    tile_m: int = 64
    q_stages: int = 3
    do_stages: int = 2
    bias_tiles: bool = False
    late: bool = False
    subtractable: bool = False

    def __post_init__(self):
        super().__post_init__()
        columns = self.dq_columns * CONSUMERS * self.dq_blocks * self.column_groups
        assert columns * SUBTILE_ROWS == self.tile_m * self.heads.qk
        assert self.smem_bytes <= MAX_SMEM_PER_CTA
        assert sum(self.registers) * WARPGROUP_THREADS <= REGISTERS_PER_SM
        assert self.paired or self.q_stages == self.do_stages + 1
        # S of the next step is issued before this step's fetch arrives.
        assert (self.wanted.q and not (self.paired or self.bias_tiles) and self.ahead > 1) or not self.late
        assert barrier_count(self.barriers) * 8 <= BARRIER_BYTES

    @classmethod
    def of(cls, problem: BackwardProblem) -> BackwardConfig:
        """The kernel for a problem. UnsupportedProblem names what the kernel does not support."""
        forward = problem.forward
        check_requests("sm90", forward)
        fields = common_fields(problem)
        fields["heads"] = tile_heads(fields, problem.rows)
        dim, cap = fields["heads"].qk, forward.logits.softcap
        if dim >= PAIRED_DIM and cap is not None and cap < LEAST_CAP:
            raise UnsupportedProblem(
                f"sm90 attention's gradients: softcap: must be at least {LEAST_CAP:g} at head sizes above {2 * BLOCK}, "
                f"got {cap}"
            )
        tiles = has_bias_tiles(fields, forward)
        tight = dim >= WIDE.qk or tiles
        return cls(
            **fields,
            rows=problem.rows,
            tile_m=TILE_M[dim],
            q_stages=2 if dim >= PAIRED_DIM else 3 if tight else 4,
            do_stages=1 if dim > WIDTH else 2 if tight else 3,
            bias_tiles=tiles,
            late=fields["wanted"].q and not tight,
            subtractable=can_subtract(fields["logits"], forward.logits.scale),
        )

    @property
    def can_cut(self) -> bool:
        return True

    @property
    def can_finish(self) -> bool:
        return self.wanted.q and not (self.paired or self.deterministic or self.requests.packed_q)

    @property
    def paired(self) -> bool:
        """Whether both consumers have the tile's keys: one makes P and dV, the other dS and dK (``pair``)."""
        return self.heads.qk >= PAIRED_DIM

    @property
    def wide(self) -> bool:
        """Whether the tile is that of ``WIDE``. Its threads hold more of dK than others, so less of all else."""
        return self.heads == WIDE

    @property
    def block_m(self) -> int:
        return WIDE_BLOCK if self.wide else BLOCK

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a consumer makes at a time: a consumer's block of dQ, 64 rows."""
        return WIDE_BLOCK if self.wide else BLOCK

    def dq_place(self, number) -> tuple:
        """(subtile of dQ's sums, first column in it) of a block of dQ that some consumer makes."""
        if self.makes_dq_alone:
            return 0, 0
        if self.dq_columns == BLOCK:
            return number, 0
        return number * self.dq_columns // BLOCK, number * self.dq_columns % BLOCK

    @property
    def makes_dq_alone(self) -> bool:
        """Whether the second consumer makes all of dQ, which then reads dS once, and the other none. The second, for
        the first also loads."""
        plain = self.logits.bias is None and not self.logits.curved and not self.deterministic
        return self.late and self.trims and plain and BLOCK < self.rows.qk <= ALONE

    @property
    def sent_spans(self) -> int:
        """Spans of dQ that go through shared memory and are added by the copy engine (``results.send_queries``), where
        one consumer makes all of dQ: it would wait for its own additions, which are as slow as L2 is busy. Under a mask
        both gain; where all queries see all keys, one."""
        if not self.makes_dq_alone:
            return 0
        if self.mask.band or self.mask.has_blocks:
            return 2 if self.rows.v > BLOCK else 0
        return 1

    @property
    def clears_in_two_loops(self) -> bool:
        """Where that was timed, and ptxas then takes the fast waits of the main loop: 0.96 of the time."""
        return self.sent_spans == 1

    @property
    def holds_v(self) -> bool:
        """Whether consumers hold V's second span in registers, so that its room is free for dQ."""
        return self.sent_spans > 1

    @property
    def trims(self) -> bool:
        """Whether dQ has only the columns that rows have: where these are fewer, up to whole instructions."""
        return self.sum_columns("k") < self.room

    def dq_size(self, number) -> int:
        """Columns of this block that are made: of a pair's blocks whole ones, or none."""
        if not self.trims:
            return self.dq_columns
        if self.makes_dq_alone:
            return self.rows.qk if number == CONSUMERS - 1 else 0
        size = min(max(self.rows.qk - number * self.dq_columns % self.heads.qk, 0), self.dq_columns)
        return rounded(size, BLOCK) if self.paired else size

    @property
    def dq_width(self) -> int:
        return self.rows.qk if self.trims and not self.paired else self.heads.qk

    def sum_columns(self, name: str) -> int:
        """Columns of the sums of dK or dV ("k" or "v") in a CTA: as many as rows have, up to whole instructions. Pairs
        have whole spans: with fewer columns ptxas serialises their products."""
        if self.rows is None or self.paired:
            return self.spans_of(name) * BLOCK
        return rounded(self.rows.qk if name == "k" else self.rows.v, SUM_STEP)

    @property
    def has_own_code(self) -> bool:
        """Whether each consumer has code of its own: with blocks of its own sizes, and constants instead of registers,
        of which ``WIDE`` has too few. With as many columns as D 128, code of its own takes more registers."""
        return self.paired or self.wide or self.trims

    @property
    def width(self) -> int:
        return min(self.heads.qk, WIDTH)

    @property
    def room(self) -> int:
        return self.width

    @property
    def partial_bytes(self) -> int:
        """Bytes of partial sums of S, or of dP, that one CTA of a cluster gets from the other in a step."""
        return self.tile_m * self.tile_n * FP32_BYTES if self.clustered else 0

    @property
    def delta_factor(self) -> float:
        """Factor of delta: 1 / P_FACTOR where a pair exchanges P, so that delta matches dP, else 1."""
        return 1 / P_FACTOR if self.paired else 1.0

    @property
    def sink_limit(self) -> float:
        """Less where a pair exchanges P in fp16, whose least normal number is 2**-14 / P_FACTOR = 2**-28."""
        return 20.0 if self.paired else super().sink_limit

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return CONSUMER_KEYS if self.paired else CONSUMERS * CONSUMER_KEYS

    @property
    def dq_blocks(self) -> int:
        """Blocks of dQ that a consumer makes one after another."""
        return self.width * self.tile_m // (SUBTILE_ROWS * CONSUMERS * self.dq_columns)

    # Warp roles: consumer warpgroups, then, of a pair, the producer's, of which one warp loads. Where dQ's order is
    # fixed, a turn warp.

    @property
    def threads(self) -> int:
        return self.consumer_threads + WARPGROUP_THREADS * self.moves_registers

    @property
    def load_warp(self) -> int:
        """The warp that loads: a warp of its own with paired consumers, else the first."""
        return CONSUMERS * WARPGROUP_THREADS // WARP_THREADS if self.paired else 0

    @property
    def turn_warp(self) -> int:
        """The first of the turn warps, which follow the consumers and a pair's load warp."""
        return self.consumer_threads // WARP_THREADS + self.paired

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread, by warpgroup."""
        if self.moves_registers:
            return (CONSUMER_REGISTERS,) * CONSUMERS + (PRODUCER_REGISTERS,)
        return (REGISTERS_PER_SM // self.threads - 1,) * CONSUMERS

    @property
    def moves_registers(self) -> bool:
        """Whether warps of the last warpgroup hand registers to the consumers. Each quarter of an SM has 512 registers
        a lane for one warp of every warpgroup, so a single extra warp costs consumers as much as a whole warpgroup."""
        return self.paired or self.deterministic

    @property
    def consumer_threads(self) -> int:
        return CONSUMERS * WARPGROUP_THREADS

    # Shared memory, in bytes.

    @property
    def keys_in_registers(self) -> bool:
        """Whether S and dP take K and V from registers, which saves reading them from shared memory each time."""
        return self.heads.qk == BLOCK and self.logits.bias is None

    @property
    def subtracts(self) -> bool:
        """Whether products subtract the statistics: in the kernels of D 64 that gained by it when timed, or that are
        like these. Where all queries see all keys, long and packed rows lose."""
        wanted, mask, requests = self.wanted, self.mask, self.requests
        whole = self.heads.qk == BLOCK and self.rows is None and not (self.cut or self.deterministic)
        timed = not (mask.has_blocks or mask.has_ranges or requests.has_kv_lengths or requests.has_q_start)
        gains = mask.band or not (self.finishes or requests.packed_q)
        return self.subtractable and self.late and wanted.k and wanted.v and whole and timed and gains

    @property
    def keeps_order(self) -> bool:
        """Whether the next P is kept in front of the wait for dQ, against the compiler, which makes it behind the
        additions: that gains 1 to 3% under a causal mask alone, and loses up to 4% elsewhere."""
        return self.subtracts and self.mask.band and not (self.mask.has_left or self.requests.packed_q)

    @property
    def weighs_early(self) -> bool:
        """Whether P is made before waiting for the previous step's dQ."""
        return self.heads.qk == BLOCK

    @property
    def stores_early(self) -> bool:
        """Whether dS is stored to shared memory before the next S is issued, which takes all of shared memory's
        bandwidth."""
        return self.late and self.weighs_early

    @property
    def stores_bias(self) -> bool:
        """Whether TMA stores dS of a step, one query per row, to dbias."""
        return self.bias_tiles and self.wanted.bias == "bfloat16"

    @property
    def bias_alignment(self) -> int | None:
        return TMA_ALIGNMENT if self.bias_tiles else None

    @property
    def dbias_alignment(self) -> int | None:
        return TMA_ALIGNMENT if self.stores_bias else None

    @property
    def bias_bytes(self) -> int:
        """Bytes of a step's bias in shared memory."""
        return self.tile_m * self.tile_n * ELEMENT_BYTES if self.bias_tiles else 0

    @property
    def ds_stages(self) -> int:
        return 2 if self.wanted.q or self.stores_bias else 0

    @property
    def dv_first(self) -> bool:
        """Whether to wait for dV of a block before dS is made: beside a turn warp D 128 has 240 registers a thread, and
        holding P while making dS takes 250."""
        return self.deterministic and self.heads.qk == 2 * BLOCK

    @property
    def turn_counts(self) -> int:
        return CONSUMERS * self.column_groups

    @property
    def ahead(self) -> int:
        """Steps that are fetched ahead."""
        return self.do_stages - self.late

    @property
    def sent_bytes(self) -> int:
        """Bytes of dQ on the way to the copy engine, beside what lies where V's second span was."""
        columns = (0, BLOCK, self.dq_width - BLOCK)[self.sent_spans]
        return self.tile_m * columns * FP32_BYTES

    @property
    def p_bytes(self) -> int:
        """Bytes of a step's P, if one consumer hands it to the other."""
        return self.tile_m * self.tile_n * ELEMENT_BYTES if self.paired else 0

    @property
    def leaves_visits(self) -> bool:
        """Whether consumers learn the steps of lists of blocks from the first warp (``visits``)."""
        return self.mask.has_blocks and not self.paired

    @property
    def smem_regions(self) -> tuple[memory.Region, ...]:
        """Shared memory, in order."""
        ds = f"{self.ds_stages} x transposed [{self.tile_n}, {self.tile_m}]"
        return (
            memory.barrier_region(self.barriers, BARRIER_BYTES // MBARRIER_BYTES),
            *self.operand_regions,
            memory.tile_region("ds", self.ds_stages * self.ds_bytes, "dS", ds),
            memory.tile_region(
                "bias", BIAS_STAGES * self.bias_bytes, "", f"{BIAS_STAGES} x [{self.tile_m}, 64] a consumer"
            ),
            memory.Region(
                "p", self.p_bytes, "uint8", memory.TILE_ALIGNMENT, "P",
                "for dS, fp16, in the order of wgmma's registers",
            ),
            memory.Region(
                "partial", 2 * self.partial_bytes, "uint8", memory.TILE_ALIGNMENT, "S, dP",
                "the other CTA's partial sums",
            ),
            memory.Region("dq", self.sent_bytes, "uint8", 16, "dQ", "a span of it, fp32, in the sums' order"),
            memory.Region(
                "visits", self.q_stages * VISIT_WORDS * self.leaves_visits, "int32", 16, "steps",
                f"{self.q_stages} x query head, query tile, rule",
            ),
        )  # fmt: skip

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, and what then holds."""
        load = "load warp" if self.paired else "first warp"
        filled = f"{load}, expect_tx + TMA bytes"
        warps, warp = self.consumer_threads // WARP_THREADS, "consumers, one thread a warp"
        released = {
            "q": (
                Barrier(
                    "q_empty", self.q_stages, warps, warp, load, "S and dK have read Q, dS the statistics"
                ),
            ),
            "do": (Barrier("do_empty", self.do_stages, warps, warp, load, "dP and dV have read dO"),),
        }
        biases = (Barrier("bias_full", BIAS_STAGES, 1, filled, "consumers", "the bias is in shared memory"),)
        exchanged = Barrier(
            "exchanged",
            self.ds_stages,
            warps,
            warp,
            "consumers",
            "dS is there, dQ has read that of the step before, dV dO, and dK the Q before it",
        )
        uses = CONSUMERS * TURN_STAGES
        turns = (
            Barrier(
                "turn",
                uses,
                1,
                "first turn warp, a thread for each",
                "a consumer",
                "the consumer may add its dQ",
            ),
            Barrier("added", uses, WARPS, warp, "a consumer's turn warp", "the consumer has added its dQ"),
            Barrier("left", uses, 1, "a consumer's turn warp", "first turn warp", "added has been seen"),
        )
        partial = [
            each
            for name, consumer in (("s", "first"), ("dp", "second"))
            for each in (
                Barrier(
                    name + "_there", 1, 1, f"{consumer} consumer, expect_tx + bytes of the other CTA's stores",
                    f"{consumer} consumer", "the other CTA's partial sums are in shared memory",
                ),
                Barrier(
                    name + "_taken", 1, WARPS, f"{consumer} consumer of the other CTA, one thread a warp",
                    f"{consumer} consumer", "the other CTA has added the partial sums",
                ),
            )
        ]  # fmt: skip
        return (
            Barrier("k_full", 1, 1, filled, "consumers", "K is in shared memory"),
            Barrier("v_full", 1, 1, filled, "consumers", "V is in shared memory"),
            Barrier("q_full", self.q_stages, 1, filled, "consumers", "Q and statistics are in shared memory"),
            *(released["q"] if self.paired else ()),
            *(biases if self.bias_tiles else ()),
            Barrier("do_full", self.do_stages, 1, filled, "consumers", "dO is in shared memory"),
            *(released["do"] if self.paired else ()),
            *((exchanged,) if self.late else ()),
            *(partial if self.clustered else ()),
            *(turns if self.deterministic else ()),
        )
