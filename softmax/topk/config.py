"""Configuration of softmax + top-k: who reads what, and how much shared memory that takes. Plain Python.

``warps`` warps of each of ``cluster`` CTAs read a row. One ``TopkConfig`` is one compiled kernel; k and the row length
are its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.hardware import (
    FP32_BYTES,
    MAX_CTAS_PER_SM,
    MAX_THREADS_PER_SM,
    SMEM_PER_SM,
    SMEM_RESERVED_PER_CTA,
    VECTOR_BYTES,
    WARP_THREADS,
    ctas_by_registers,
)
from warpspec.softmax.problem import WIDTHS

CANDIDATE_BYTES = 8
REGISTERS = {"float32": 64, "float16": 80, "bfloat16": 80}  # registers of a thread; with fewer, it spills
MORE_REGISTERS = 8  # further registers of a thread, if rows have edges and warps or CTAs wait for each other
# Registers of a thread if candidates are fetched again: for 1, 2, 3, 4 vectors in flight.
AGAIN_REGISTERS = {"float32": (64, 64, 64, 72), "float16": (64, 64, 72, 80), "bfloat16": (64, 64, 72, 80)}
K_LIMIT = 128
LENGTH_LIMIT = 2**20
MAX_WARPS = 16  # most warps of one CTA that share a row
# Most CTAs of a cluster: if candidates are picked while rows stream; if they are fetched again.
MAX_CLUSTER, AGAIN_CLUSTER = 8, 16
LEADER = 0  # the CTA of a cluster that merges its candidates
# Spare places in a list. Fewer sift candidates too often; more take shared memory that could hide no latency.
SPARE_ROOM = 96
# Number of samples of the lanes' maxima in a CTA, or of all CTAs in a cluster; one sample is the row's threshold.
SAMPLES = 32
RENEW_AFTER = 4  # lanes with candidates after which the thresholds are renewed, for the smaller k
SAMPLE_RANK = 16  # rank of the threshold among the samples, at most
CHUNKS = 32  # parts that a lane's elements are divided into, at most; each has a maximum in shared memory
FETCHED = 2  # vectors of a lane that are fetched again at a time
RANK_BATCH = 4  # candidates that are compared at a time
HELD_ELEMENTS = 32  # most elements that a lane holds in registers
SORTED_ELEMENTS = 8  # elements of a lane, if lanes sort what they hold; also the largest k
SORTED_LANES = (1, 2, 4, 8)
HELD_ROOM = {32: 64, 16: 32, 8: 32}  # room for candidates of a held row, by lanes that share the row
HELD_MOST_K = {32: 20, 16: 10, 8: 5}  # largest k, by lanes: beyond it the threshold lets too many through
K_CAPACITIES = (32, 128)  # kernels are compiled for k up to these


@dataclass(frozen=True)
class TopkConfig:
    """Compile-time shape of one kernel.

    dtype: name of the logits' dtype. k_capacity: largest k, one of K_CAPACITIES. warps: warps of a CTA that share a
    row. cluster: CTAs that share a row. rows: rows of a CTA; 1 unless warps is 1. unroll: 16-byte vectors that a lane
    has in flight. held: these vectors are all that a lane reads, and they stay in registers (``held``); otherwise it
    continues with the next ones (``stream``). lanes: lanes of a warp that share a row; all 32 unless one warp holds the
    row. full: a held row
    fills its lanes' registers. sorts: the lanes of a held row sort what they hold (``sorted``). again: candidates of a
    streamed row are fetched again once there is a threshold (``again``); otherwise they are picked while streaming.
    edges: rows may start or end off a 16-byte boundary. renormalize: divide the probabilities by their sum.
    """

    dtype: str
    k_capacity: int
    warps: int = 8
    cluster: int = 1
    rows: int = 1
    unroll: int = 4
    held: bool = False
    lanes: int = WARP_THREADS
    full: bool = False
    sorts: bool = False
    again: bool = False
    edges: bool = True
    renormalize: bool = False

    def __post_init__(self):
        assert self.k_capacity in K_CAPACITIES
        assert SAMPLES % self.warps == 0
        assert self.lanes == WARP_THREADS or (
            self.held and self.warps == 1 and self.threads % WARP_THREADS == 0
        )
        assert not self.edges or self.lanes * self.warps >= 2 * self.per_vector, (
            "a lane has one element of them"
        )
        assert not self.full or (self.held and not self.edges)
        assert not self.held or (self.cluster == 1 and self.unroll * self.per_vector <= HELD_ELEMENTS)
        if self.sorts:
            assert self.held and self.warps == 1 and not self.edges and self.lanes in SORTED_LANES
            assert self.unroll * self.per_vector == SORTED_ELEMENTS
        assert 1 <= self.warps <= MAX_WARPS and 1 <= self.cluster <= (
            AGAIN_CLUSTER if self.again else MAX_CLUSTER
        )
        assert self.rows == 1 or self.warps == self.cluster == 1
        # A warp's threshold is one of its lanes' maxima, so it needs as many lanes as its share of k.
        assert self.k_capacity <= self.warps * WARP_THREADS

    @property
    def per_vector(self) -> int:
        """Elements of a 16-byte vector."""
        return VECTOR_BYTES // WIDTHS[self.dtype]

    @property
    def accurate(self) -> bool:
        """Whether exponentials must have the full precision of fp32."""
        return self.dtype == "float32"

    @property
    def threads(self) -> int:
        return self.lanes * self.warps * self.rows

    @property
    def registers(self) -> int:
        """Registers of a thread: the fewest without spilling."""
        if self.again:
            more = (
                self.edges and self.cluster > 1 and self.k_capacity > min(K_CAPACITIES) and self.unroll == 3
            )
            return AGAIN_REGISTERS[self.dtype][self.unroll - 1] + (MORE_REGISTERS if more else 0)
        more = self.edges and (self.cluster > 1 or self.needs_others) and not self.held
        return REGISTERS[self.dtype] + (MORE_REGISTERS if more else 0)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs whose registers must fit an SM."""
        return ctas_by_registers(self.threads, self.registers)

    @property
    def room(self) -> int:
        """CTAs that fit an SM."""
        by_smem = SMEM_PER_SM // (self.smem_bytes + SMEM_RESERVED_PER_CTA)
        return max(1, min(self.ctas_per_sm, MAX_CTAS_PER_SM, MAX_THREADS_PER_SM // self.threads, by_smem))

    @property
    def smem_carveout_percent(self) -> int:
        """Percentage of an SM's L1 and shared memory that its resident CTAs use as shared memory."""
        resident = min(self.ctas_per_sm, MAX_CTAS_PER_SM, MAX_THREADS_PER_SM // self.threads)
        taken = resident * (self.smem_bytes + SMEM_RESERVED_PER_CTA)
        return min(100, -(-100 * taken // SMEM_PER_SM))

    @property
    def dependent(self) -> bool:
        """Whether this is a programmatic dependent launch."""
        return self.held or self.again

    @property
    def needs_others(self) -> bool:
        """Whether k may exceed a warp's lanes; the warp then has no threshold of its own and waits for the others'
        first."""
        return self.k_capacity > WARP_THREADS

    @property
    def renew_after(self) -> int:
        """Lanes with candidates after which the thresholds are renewed."""
        return RENEW_AFTER * self.k_capacity // K_CAPACITIES[0]

    @property
    def list_room(self) -> int:
        """Candidates that a warp, or the lanes of a held row, have room for.

        A streamed row needs room for the k that are kept, some spare ones, and what one vector of every lane may add.
        About one random row in ten thousand that is held has more candidates than this.
        """
        if self.held:
            return HELD_ROOM[self.lanes]
        return self.k_capacity + SPARE_ROOM + (0 if self.again else WARP_THREADS * self.per_vector)

    @property
    def list_size(self) -> int:
        """Words of a list of candidates, with its terminators."""
        return self.list_room + RANK_BATCH

    @property
    def cluster_list_size(self) -> int:
        """Words that a cluster's leader has for a CTA's candidates and, if they are not ranked, for terminators."""
        return self.k_capacity + (RANK_BATCH if self.again else 0)

    @property
    def capacity(self) -> int:
        """Vectors of the longest row that can be held."""
        return self.unroll * self.lanes * self.warps

    @property
    def lane_stride(self) -> int:
        """Vectors between two that a lane has in flight: one for each lane that shares the row."""
        return self.warps * self.cluster * WARP_THREADS

    @property
    def tile_vectors(self) -> int:
        """Vectors of a row that its warps read at a time."""
        return self.unroll * self.lane_stride

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory: candidates of every warp, or of every group of lanes. If rows are streamed, also the
        row's candidates in order, those of every CTA of the cluster, the chunks' maxima, samples and statistics."""
        if self.sorts:
            return 0
        warps = self.warps * self.rows
        candidates, words = warps * self.list_size, 4 * warps
        clusters = self.cluster if self.cluster > 1 else 0
        if self.again:
            candidates += self.k_capacity * self.rows + self.cluster_list_size * clusters
            words = 3 * self.warps + CHUNKS * WARP_THREADS * warps + SAMPLES
            words += 3 * clusters + SAMPLES if clusters else 0
        elif not self.held:
            candidates += self.k_capacity * self.rows + self.cluster_list_size * clusters
            words = 3 * warps + SAMPLES + 1 + 3 * self.cluster
        size = CANDIDATE_BYTES * candidates + FP32_BYTES * words
        return -(-size // VECTOR_BYTES) * VECTOR_BYTES  # the compiler reads the last words as a vector


def smallest_capacity(k: int) -> int:
    return next(capacity for capacity in K_CAPACITIES if k <= capacity)
