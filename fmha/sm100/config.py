"""Attention on sm_100a at D = 64: tile shapes, warp roles, memory budgets, barrier table.

Everything here is plain Python, fixed at compile time. One ``AttentionConfig`` is one compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common import tma, tmem
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.pipeline import Barrier, barrier_count
from warpspec.fmha.problem import AttentionProblem

WARP_THREADS = 32
SMEM_PER_SM = 228 * 1024  # bytes, sm_100a
SMEM_RESERVED_PER_CTA = 1024  # bytes the system keeps of them for every resident CTA
SMEM_PER_CTA = 227 * 1024  # bytes one CTA may have
REGISTERS_PER_SM = 65536
REGISTER_ALLOCATION = 8  # registers a thread, granularity
ELEMENT_BYTES = 2  # bf16 and fp16
FP32_BYTES = 4

HEAD_DIM = 64
TILE_M = 128  # query rows of a CTA: the lanes of tensor memory
TILE_N = 128  # keys of a K or V tile
MMA_K = 16  # reduction of one tcgen05.mma of kind f16

# The running maximum may fall this far behind the true one, in powers of two, before O is rescaled: P then
# stays below 2**8, well within fp16 and bf16, and sums of it within fp32.
RESCALE_THRESHOLD = 8.0

# Compute capability 10.0 makes 16 exponentials a clock and SM: the 128 x 128 of a tile keep that unit busy
# for 1024 clocks, while a warp issues some 280 other instructions and both products take the tensor core 512
# clocks. So one of this many pairs of scores is computed on the multiply-add units: 768 clocks, some 480
# instructions.
POLYNOMIAL_EVERY = 4


@dataclass(frozen=True)
class AttentionConfig:
    """Compile-time shape of one kernel.

    dtype: "bfloat16" or "float16". pack: query heads of one KV group in an M tile; its row r is head r % pack
    of query r // pack. causal, has_left, has_right: which sides of the band that a row sees are bounded.
    negate: scores are negated, for a negative scale. The rest: which optional operands there are.
    """

    dtype: str
    pack: int = 1
    causal: bool = False
    has_left: bool = False
    has_right: bool = False
    has_kv_lengths: bool = False
    has_q_start: bool = False
    has_sink: bool = False
    has_lse: bool = False
    normalize: bool = True
    negate: bool = False
    kv_stages: int = 3
    ctas_per_sm: int = 2
    softmax_registers: int = 216
    other_registers: int = 72

    def __post_init__(self):
        assert 1 <= self.pack <= TILE_M
        assert self.kv_stages >= 2, "K and V are at least double-buffered"
        assert self.tmem_allocation * self.ctas_per_sm <= tmem.TMEM_COLUMNS
        assert self.smem_bytes <= SMEM_PER_CTA
        assert (self.smem_bytes + SMEM_RESERVED_PER_CTA) * self.ctas_per_sm <= SMEM_PER_SM
        assert self.register_pool >= self.role_registers
        assert barrier_count(self.barriers) <= self.barrier_slots

    @classmethod
    def of(cls, problem: AttentionProblem) -> AttentionConfig:
        """The kernel for a problem. UnsupportedProblem names what this kernel does not do."""
        for name, value, wrong in (
            ("head_dim", problem.head_dim, problem.head_dim != HEAD_DIM),
            ("page_table", "given", problem.paged),
            ("bias", "given", problem.has_bias),
            ("key_stride", problem.key_stride, problem.key_stride != 1),
            ("num_splits", problem.num_splits, problem.num_splits not in (None, 1)),
        ):
            if wrong:
                raise UnsupportedProblem(
                    f"sm100 attention: {name}={value} is not supported by the D={HEAD_DIM} kernel"
                )
        return cls(
            dtype=str(problem.dtype).removeprefix("torch."),
            pack=choose_pack(problem.group, problem.seq_q),
            causal=problem.causal,
            has_left=problem.window_left is not None,
            has_right=problem.window_right is not None,
            has_kv_lengths=problem.has_kv_lengths,
            has_q_start=problem.has_q_start,
            has_sink=problem.has_sink,
            has_lse=problem.return_lse,
            normalize=problem.normalize,
            negate=problem.scale < 0,
        )

    # Warp roles. The first four warps are one warpgroup: warp w reaches lanes 32 w to 32 w + 31 of tensor
    # memory.

    @property
    def softmax_warps(self) -> range:
        return range(4)

    @property
    def mma_warp(self) -> int:
        return 4

    @property
    def load_warp(self) -> int:
        return 5

    @property
    def softmax_threads(self) -> int:
        return len(self.softmax_warps) * WARP_THREADS

    @property
    def threads(self) -> int:
        return 6 * WARP_THREADS

    # Tiles.

    @property
    def queries(self) -> int:
        """Queries of an M tile; rows past pack * queries are idle."""
        return TILE_M // self.pack

    @property
    def q_box(self) -> tuple[int, int, int]:
        """(D, HEAD, QUERY) of a Q load."""
        return (HEAD_DIM, self.pack, self.queries)

    @property
    def kv_box(self) -> tuple[int, int]:
        """(D, KEY) of a K or V load."""
        return (HEAD_DIM, TILE_N)

    @property
    def qk_tiler(self) -> tuple[int, int, int]:
        """(M, N, K) of S = Q K^T."""
        return (TILE_M, TILE_N, HEAD_DIM)

    @property
    def pv_tiler(self) -> tuple[int, int, int]:
        """(M, N, K) of O += P V."""
        return (TILE_M, HEAD_DIM, TILE_N)

    @property
    def band(self) -> bool:
        """A row may see only part of a tile that another row of its M tile sees more of."""
        return self.causal or self.has_left or self.has_right

    # Registers: what two CTAs of one SM leave each thread at launch, and what setmaxnreg makes of them.

    @property
    def launch_registers(self) -> int:
        """Registers a thread at launch."""
        per_thread = REGISTERS_PER_SM // (self.ctas_per_sm * self.threads)
        return per_thread // REGISTER_ALLOCATION * REGISTER_ALLOCATION

    @property
    def register_pool(self) -> int:
        """Registers of a CTA."""
        return self.launch_registers * self.threads

    @property
    def role_registers(self) -> int:
        """Registers of a CTA once the roles have set theirs."""
        others = self.threads - self.softmax_threads
        return self.softmax_registers * self.softmax_threads + self.other_registers * others

    # Tensor memory, in 32-bit columns. S, P and O each have columns of their own: QK of the next tile
    # overwrites S as soon as it has been read, while P of this one is still being made or used.

    @property
    def tmem_s(self) -> int:
        """First column of S [128, TILE_N] fp32."""
        return 0

    @property
    def tmem_p(self) -> int:
        """First column of P [128, TILE_N], 16 bits, two keys to a column."""
        return self.tmem_s + TILE_N

    @property
    def p_columns(self) -> int:
        return TILE_N * ELEMENT_BYTES // tmem.TMEM_COLUMN_BYTES

    @property
    def tmem_o(self) -> int:
        """First column of O [128, D] fp32."""
        return self.tmem_p + self.p_columns

    @property
    def tmem_columns(self) -> int:
        return self.tmem_o + HEAD_DIM

    @property
    def tmem_allocation(self) -> int:
        return tmem.allocation(self.tmem_columns)

    # Shared memory, in bytes.

    @property
    def q_bytes(self) -> int:
        return TILE_M * HEAD_DIM * ELEMENT_BYTES

    @property
    def kv_tile_bytes(self) -> int:
        return tma.tile_bytes(self.kv_box)

    @property
    def barrier_slots(self) -> int:
        """mbarriers there is room for: with the TMEM address, less than the alignment of what follows."""
        return 64

    @property
    def smem_regions(self) -> tuple[tuple[str, int, str], ...]:
        """(region, bytes, what stands in it), in order."""
        stages = self.kv_stages
        return (
            (
                "barriers, TMEM address",
                tma.TILE_ALIGNMENT,
                f"{barrier_count(self.barriers)} mbarriers, 4 bytes",
            ),
            ("Q", self.q_bytes, f"[{TILE_M}, {HEAD_DIM}], 128-byte swizzle"),
            ("K", stages * self.kv_tile_bytes, f"{stages} x [{TILE_N}, {HEAD_DIM}], 128-byte swizzle"),
            ("V", stages * self.kv_tile_bytes, f"{stages} x [{TILE_N}, {HEAD_DIM}], 128-byte swizzle"),
        )

    @property
    def smem_bytes(self) -> int:
        return sum(size for _, size, _ in self.smem_regions)

    # Barriers.

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, what then holds. One use a KV tile."""
        stages, threads = self.kv_stages, self.softmax_threads
        load, mma, softmax = "load warp", "MMA warp", "softmax warps"
        commit = f"{mma}, tcgen05.commit"
        every = f"{softmax}, each of {threads} threads"
        return (
            Barrier("q_full", 1, 1, f"{load}, expect_tx + TMA bytes", mma, "Q is in shared memory"),
            Barrier("k_full", stages, 1, f"{load}, expect_tx + TMA bytes", mma, "K tile is in shared memory"),
            Barrier("k_empty", stages, 1, commit, load, "QK has read the K tile"),
            Barrier(
                "v_full",
                stages,
                1,
                f"{load}, expect_tx + TMA bytes",
                f"{mma}; {softmax} when they clear rows",
                "V tile is in shared memory",
            ),
            Barrier("v_empty", stages, 1, commit, load, "PV has read the V tile"),
            Barrier("s_full", 1, 1, commit, softmax, "S of the tile is in tensor memory"),
            Barrier("s_empty", 1, threads, every, mma, "S is in registers, its columns may be overwritten"),
            Barrier(
                "p_full",
                1,
                threads,
                every,
                mma,
                "P is in tensor memory, O is rescaled, V rows that no query row sees are zero",
            ),
            Barrier(
                "pv_done", 1, 1, commit, softmax, "O holds the tile, the columns of P may be overwritten"
            ),
        )


def choose_pack(group: int, seq_q: int) -> int:
    """Heads of a KV group that share an M tile: what makes the fewest tiles, the most heads among equals.

    More heads to a tile means fewer queries in it: under a causal or window mask its rows then see more
    nearly the same keys, so at equal tile count more heads never costs and often saves KV tiles.
    """

    def tiles(pack):
        return -(-group // pack) * -(-seq_q // (TILE_M // pack))

    return min(range(1, min(group, TILE_M) + 1), key=lambda pack: (tiles(pack), -pack))
