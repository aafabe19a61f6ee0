"""Attention on sm_100a: tile shapes, warp roles, memory budgets, barrier table.

Everything here is plain Python, fixed at compile time. One ``AttentionConfig`` is one compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warpspec.common import tma, tmem
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.pipeline import Barrier, barrier_count
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm100.shapes import SHAPES, SHARED_SHAPES, Shape

WARP_THREADS = 32
SMEM_PER_SM = 228 * 1024  # bytes, sm_100a
SMEM_RESERVED_PER_CTA = 1024  # bytes the system keeps of them for every resident CTA
SMEM_PER_CTA = 227 * 1024  # bytes one CTA may have
REGISTERS_PER_SM = 65536
REGISTER_ALLOCATION = 8  # registers a thread, granularity
MAX_REGISTERS = 255  # a thread
ELEMENT_BYTES = 2  # bf16 and fp16
FP32_BYTES = 4
BIAS_BYTES = {"bfloat16": 2, "float32": 4}  # of an element

BLOCK = 64  # elements of D that stand side by side in shared memory: one span of the 128-byte swizzle
PAGE_SIZES = (16, 32, 64, 128)  # keys; a page's rows start where the 128-byte swizzle does, every 8 rows
MMA_K = 16  # reduction of one tcgen05.mma of kind f16
MMA_N_MAX = 256  # columns of D that one tcgen05.mma writes
QUARTER_LANES = 32  # lanes of tensor memory that a warp reaches

# The running maximum may fall this far behind the true one, in powers of two, before O is rescaled: P then
# stays below 2**8, well within fp16 and bf16, and sums of it within fp32. Where few queries are decoded the
# reference follows every step: then the largest P of a row is exactly 1, and its rounding error 0.
RESCALE_THRESHOLD = 8.0
EXACT_QUERIES = 8


@dataclass(frozen=True)
class AttentionConfig:
    """Compile-time shape of one kernel.

    head_dim, shape: D and its tiles. shared_kv: K and V are one tensor. dtype: "bfloat16" or "float16".
    pack: query heads of one KV group in an M tile; its row r is head r % pack of query r // pack. causal,
    has_left, has_right, key_stride: which sides of the band that a row sees are bounded, and how. negate:
    scores are negated, for a negative scale. splits: partial results, one for each split of the keys, are
    written. page_size: keys of a page of K and V, 0 where they are not paged. bias: its dtype; bias_heads,
    bias_batches: heads, batch rows have each their own; bias_stages: KV tiles of it in flight, 0 where it is read
    from global memory. exact_maximum: O is rescaled whenever the maximum moves. The rest: which optional operands there
    are.
    """

    dtype: str
    head_dim: int = 64
    shape: Shape = SHAPES[64][0]
    shared_kv: bool = False
    pack: int = 1
    causal: bool = False
    has_left: bool = False
    has_right: bool = False
    key_stride: int = 1
    has_kv_lengths: bool = False
    has_q_start: bool = False
    has_sink: bool = False
    has_lse: bool = False
    normalize: bool = True
    negate: bool = False
    splits: bool = False
    page_size: int = 0
    bias: str | None = None
    bias_heads: bool = False
    bias_batches: bool = False
    bias_stages: int = 0
    exact_maximum: bool = False
    softmax_registers: int = 216
    other_registers: int = 72

    def __post_init__(self):
        assert 1 <= self.pack <= self.tile_m
        assert self.bias in (None, *BIAS_BYTES)
        assert self.page_size in (0, *PAGE_SIZES)
        assert not self.page_size or self.has_kv_lengths, "pages past the KV length hold anything"
        assert not (self.splits and (self.normalize or self.has_lse)), "splits write un-normalised states"
        assert self.tmem_allocation * self.ctas_per_sm <= tmem.TMEM_COLUMNS
        assert self.smem_bytes <= SMEM_PER_CTA
        assert (self.smem_bytes + SMEM_RESERVED_PER_CTA) * self.ctas_per_sm <= SMEM_PER_SM
        assert self.register_pool >= self.role_registers
        assert barrier_count(self.barriers) <= self.barrier_slots

    @classmethod
    def of(
        cls, problem: AttentionProblem, *, shape: Shape | None = None, splits: bool = False
    ) -> AttentionConfig:
        """The kernel for a problem. UnsupportedProblem names what this kernel does not do.

        shape: instead of the head dimension's default. splits: for split KV, whose results are combined later.
        """
        for name, value, wrong in (
            ("page_size", problem.page_size, problem.paged and problem.page_size not in PAGE_SIZES),
            ("bias", "of strided rows", problem.bias_rows == "strided"),
        ):
            if wrong:
                raise UnsupportedProblem(f"sm100 attention: {name}={value} is not supported")
        shapes = SHARED_SHAPES if problem.shared_kv else SHAPES
        shape = shape or shapes[problem.head_dim][0]
        config = cls(
            dtype=str(problem.dtype).removeprefix("torch."),
            head_dim=problem.head_dim,
            shape=shape,
            shared_kv=problem.shared_kv,
            pack=choose_pack(problem.group, problem.seq_q, shape.tile_m),
            causal=problem.causal,
            has_left=problem.window_left is not None,
            has_right=problem.window_right is not None,
            key_stride=problem.key_stride if problem.causal else 1,
            has_kv_lengths=problem.has_kv_lengths,
            has_q_start=problem.has_q_start,
            has_sink=problem.has_sink and not splits,
            has_lse=problem.return_lse and not splits,
            normalize=problem.normalize and not splits,
            negate=problem.scale < 0,
            splits=splits,
            page_size=problem.page_size or 0,
            exact_maximum=problem.seq_q <= EXACT_QUERIES,
        )
        return config.with_bias(problem) if problem.has_bias else config

    def with_bias(self, problem: AttentionProblem) -> AttentionConfig:
        """This kernel, of a problem with a bias. Room for it comes from the rings of K and V, which keep two
        stages where they had them, then from the second CTA of an SM; it gets two stages where that is enough.
        """
        streamed = problem.bias_rows == "aligned"  # otherwise threads read it from global memory
        tiles = self
        # ptxas starts a tile's loads from global memory all at once, and at 128 keys has no registers for that. In
        # fp32, half the keys leave room for two CTAs, with two stages of everything.
        if not streamed or (problem.bias_dtype.itemsize == FP32_BYTES and self.ctas_per_sm > 1):
            tiles = replace(self, shape=replace(self.shape, tile_n=min(self.tile_n, BLOCK)))
        config = replace(
            tiles,
            bias=str(problem.bias_dtype).removeprefix("torch."),
            bias_heads=problem.bias_heads,
            bias_batches=problem.bias_batches,
        )
        if not streamed:
            return config
        stage_bytes = len(tiles.rings) * tiles.kv_tile_bytes
        for ctas in range(self.ctas_per_sm, 0, -1):
            room = min(SMEM_PER_CTA, SMEM_PER_SM // ctas - SMEM_RESERVED_PER_CTA)
            room -= tiles.smem_bytes - tiles.kv_stages * stage_bytes
            most = self.kv_stages * self.ctas_per_sm // ctas
            for stages in (2, 1):
                kv_stages = min((room - stages * config.bias_tile_bytes) // stage_bytes, most)
                if kv_stages >= min(self.kv_stages, 2):
                    shape = replace(tiles.shape, kv_stages=kv_stages, ctas_per_sm=ctas)
                    return replace(config, shape=shape, bias_stages=stages)
        raise AssertionError("every shape leaves room for a tile of bias")

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA."""
        return self.shape.tile_m

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""
        return self.shape.tile_n

    @property
    def kv_stages(self) -> int:
        return self.shape.kv_stages

    @property
    def ctas_per_sm(self) -> int:
        return self.shape.ctas_per_sm

    @property
    def p_in_smem(self) -> bool:
        return self.shape.p_in == "smem"

    @property
    def rescale_threshold(self) -> float:
        """Powers of two that the reference may lag behind the maximum."""
        return 0.0 if self.exact_maximum else RESCALE_THRESHOLD

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
    def blocks(self) -> int:
        """Blocks of BLOCK elements that D is cut into."""
        return self.head_dim // BLOCK

    @property
    def halves(self) -> int:
        """Parts that a row of O is cut into: an accumulator of 64 rows takes 16 lanes of each quarter of
        tensor memory, and the other 16 hold the second half of D."""
        return 128 // self.tile_m

    @property
    def o_columns(self) -> int:
        """Columns of tensor memory, and of O, that one thread has."""
        return self.head_dim // self.halves

    def row_of(self, thread):
        """Row of the M tile that a softmax thread works on."""
        if self.halves == 1:
            return thread
        lanes = QUARTER_LANES // self.halves
        return thread // QUARTER_LANES * lanes + thread % lanes

    def half_of(self, thread):
        """Which part of its row's O a softmax thread has."""
        if self.halves == 1:
            return 0
        return thread % QUARTER_LANES // (QUARTER_LANES // self.halves)

    @property
    def queries(self) -> int:
        """Queries of an M tile; rows past pack * queries are idle."""
        return self.tile_m // self.pack

    @property
    def q_box(self) -> tuple[int, int, int]:
        """(D, HEAD, QUERY) of a Q load: one block of D."""
        return (BLOCK, self.pack, self.queries)

    @property
    def kv_box(self) -> tuple[int, int, int]:
        """(D, KEY, BLOCK) of a K or V load: a whole tile, or the keys of one page in one block of D."""
        return (BLOCK, self.page_keys, self.blocks if self.tile_pages == 1 else 1)

    @property
    def page_keys(self) -> int:
        """Keys of a KV tile that lie together in memory: all of them, or a page's."""
        return min(self.page_size or self.tile_n, self.tile_n)

    @property
    def tile_pages(self) -> int:
        """Pages that the keys of a KV tile come from."""
        return self.tile_n // self.page_keys

    @property
    def kv_boxes(self) -> tuple[int, int]:
        """(BLOCK, PAGE): loads of one K or V tile. Shared memory has a tile's pages side by side in each block
        of D, so a box of several blocks would leave no room between them for the other pages."""
        return (self.blocks // self.kv_box[2], self.tile_pages)

    @property
    def bias_rows(self) -> int:
        """Rows of a bias tile: one a query where its heads share them."""
        return self.pack * self.queries if self.bias_heads else self.queries

    @property
    def bias_box(self) -> tuple[int, int, int]:
        """(KEY, HEAD, QUERY) of a bias load: 128 bytes of keys."""
        keys = tma.ROW_BYTES // BIAS_BYTES[self.bias]
        return (keys, self.pack if self.bias_heads else 1, self.queries)

    @property
    def bias_boxes(self) -> int:
        """Loads of a KV tile's bias."""
        return self.tile_n // self.bias_box[0]

    @property
    def bias_box_room(self) -> int:
        """Bytes of shared memory from one box to the next."""
        return -(-self.bias_rows * tma.ROW_BYTES // tma.TILE_ALIGNMENT) * tma.TILE_ALIGNMENT

    @property
    def bias_tile_bytes(self) -> int:
        return self.bias_boxes * self.bias_box_room

    @property
    def qk_tiler(self) -> tuple[int, int, int]:
        """(M, N, K) of S = Q K^T."""
        return (self.tile_m, self.tile_n, self.head_dim)

    @property
    def pv_tiler(self) -> tuple[int, int, int]:
        """(M, N, K) of O += P V."""
        return (self.tile_m, self.head_dim, self.tile_n)

    @property
    def pv_instruction(self) -> tuple[int, int]:
        """(M, N) of one tcgen05.mma of PV: D above 256 is written in column tiles."""
        return (self.tile_m, min(self.head_dim, MMA_N_MAX))

    @property
    def band(self) -> bool:
        """A row may see only part of a tile that another row of its M tile sees more of."""
        return self.causal or self.has_left or self.has_right

    # Registers: what two CTAs of one SM leave each thread at launch, and what setmaxnreg makes of them.

    @property
    def launch_registers(self) -> int:
        """Registers a thread at launch."""
        per_thread = min(REGISTERS_PER_SM // (self.ctas_per_sm * self.threads), MAX_REGISTERS)
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
        """First column of S [tile_m, tile_n] fp32."""
        return 0

    @property
    def tmem_p(self) -> int:
        """First column of P [tile_m, tile_n], 16 bits, two keys to a column; no columns with P in SMEM."""
        return self.tmem_s + self.tile_n

    @property
    def p_columns(self) -> int:
        return 0 if self.p_in_smem else self.tile_n * ELEMENT_BYTES // tmem.TMEM_COLUMN_BYTES

    @property
    def tmem_o(self) -> int:
        """First column of O fp32: a multiple of 64, which tcgen05.mma needs of an N of 256."""
        return -(-(self.tmem_p + self.p_columns) // BLOCK) * BLOCK

    @property
    def tmem_columns(self) -> int:
        return self.tmem_o + self.o_columns

    @property
    def tmem_allocation(self) -> int:
        return tmem.allocation(self.tmem_columns)

    # Shared memory, in bytes.

    @property
    def q_bytes(self) -> int:
        return self.tile_m * self.head_dim * ELEMENT_BYTES

    @property
    def kv_tile_bytes(self) -> int:
        return self.tile_n * self.head_dim * ELEMENT_BYTES

    @property
    def p_bytes(self) -> int:
        return self.tile_m * self.tile_n * ELEMENT_BYTES if self.p_in_smem else 0

    @property
    def v_bytes(self) -> int:
        """Shared memory of V's ring: none where V is K."""
        return 0 if self.shared_kv else self.kv_stages * self.kv_tile_bytes

    @property
    def bias_ring_bytes(self) -> int:
        return self.bias_stages * self.bias_tile_bytes if self.bias_stages else 0

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
            ("Q", self.q_bytes, f"[{self.tile_m}, {self.head_dim}], 128-byte swizzle"),
            (
                "K and V" if self.shared_kv else "K",
                stages * self.kv_tile_bytes,
                f"{stages} x [{self.tile_n}, {self.head_dim}], 128-byte swizzle",
            ),
            ("V", self.v_bytes, f"{stages} x [{self.tile_n}, {self.head_dim}], 128-byte swizzle"),
            ("P", self.p_bytes, f"[{self.tile_m}, {self.tile_n}], 128-byte swizzle"),
            *self._bias_region(),
        )

    def _bias_region(self) -> tuple[tuple[str, int, str], ...]:
        if not self.bias_stages:
            return ()
        tile = f"{self.bias_stages} x [{self.bias_rows}, {self.tile_n}] {self.bias}, 128-byte swizzle"
        return (("bias", self.bias_ring_bytes, tile),)

    @property
    def smem_bytes(self) -> int:
        return sum(size for _, size, _ in self.smem_regions)  # every region is a multiple of the alignment

    # Barriers.

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, what then holds. One use a KV tile."""
        threads = self.softmax_threads
        load, mma, softmax = "load warp", "MMA warp", "softmax warps"
        commit = f"{mma}, tcgen05.commit"
        every = f"{softmax}, each of {threads} threads"
        return (
            Barrier("q_full", 1, 1, f"{load}, expect_tx + TMA bytes", mma, "Q is in shared memory"),
            *self._kv_barriers(load, mma, softmax, commit),
            *self._bias_barriers(load, softmax, every),
            Barrier("s_full", 1, 1, commit, softmax, "S of the tile is in tensor memory"),
            Barrier("s_empty", 1, threads, every, mma, "S is in registers, its columns may be overwritten"),
            Barrier(
                "p_full",
                1,
                threads,
                every,
                mma,
                f"P is in {'shared' if self.p_in_smem else 'tensor'} memory, O is rescaled, V rows that no query row "
                "sees are zero",
            ),
            Barrier("pv_done", 1, 1, commit, softmax, "O holds the tile, P may be overwritten"),
        )

    def _kv_barriers(self, load, mma, softmax, commit) -> tuple[Barrier, ...]:
        """Barriers of the rings of K and V, or of the one ring of both."""
        stages, filled = self.kv_stages, f"{load}, expect_tx + TMA bytes"
        both = f"{mma}; {softmax} when they clear rows"
        if self.shared_kv:
            return (
                Barrier("k_full", stages, 1, filled, both, "KV tile is in shared memory"),
                Barrier("k_empty", stages, 1, commit, load, "QK and PV have read the KV tile"),
            )
        return (
            Barrier("k_full", stages, 1, filled, mma, "K tile is in shared memory"),
            Barrier("k_empty", stages, 1, commit, load, "QK has read the K tile"),
            Barrier("v_full", stages, 1, filled, both, "V tile is in shared memory"),
            Barrier("v_empty", stages, 1, commit, load, "PV has read the V tile"),
        )

    def _bias_barriers(self, load, softmax, every) -> tuple[Barrier, ...]:
        """Barriers of the bias ring, where there is one."""
        stages, threads, filled = self.bias_stages, self.softmax_threads, f"{load}, expect_tx + TMA bytes"
        if not stages:
            return ()
        return (
            Barrier("bias_full", stages, 1, filled, softmax, "bias tile is in shared memory"),
            Barrier("bias_empty", stages, threads, every, load, "the bias tile has been added"),
        )

    @property
    def v_ring(self) -> str:
        """Name of the ring that V comes through."""
        return "k" if self.shared_kv else "v"

    @property
    def rings(self) -> tuple[str, ...]:
        return ("k",) if self.shared_kv else ("k", "v")


def choose_pack(group: int, seq_q: int, tile_m: int) -> int:
    """Heads of a KV group that share an M tile: what makes the fewest tiles, the most heads among equals.

    More heads to a tile means fewer queries in it: under a causal or window mask its rows then see more
    nearly the same keys, so at equal tile count more heads never costs and often saves KV tiles.
    """

    def tiles(pack):
        return -(-group // pack) * -(-seq_q // (tile_m // pack))

    return min(range(1, min(group, tile_m) + 1), key=lambda pack: (tiles(pack), -pack))
