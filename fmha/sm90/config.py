"""Attention on sm_90a: tile shapes, warp roles, memory budgets, barrier table.

Plain Python, fixed at compile time. One ``AttentionConfig`` is one compiled kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.pipeline import Barrier, barrier_count
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90.shapes import DECODE, NARROW, NARROW_KEYS, PREFILL, WARPGROUP_ROWS, Shape
from warpspec.fmha.sm100.config import EXACT_QUERIES, PAGE_SIZES, RESCALE_THRESHOLD, choose_pack

WARP_THREADS = 32
WARPGROUP_THREADS = 128
SMEM_PER_SM = 228 * 1024  # bytes, sm_90a
SMEM_RESERVED_PER_CTA = 1024  # bytes the system keeps of them for every resident CTA
SMEM_PER_CTA = 227 * 1024  # bytes one CTA may have
REGISTERS_PER_SM = 65536
ELEMENT_BYTES = 2  # bf16 and fp16
BLOCK = 64  # elements of D that stand side by side in shared memory: one span of the 128-byte swizzle
BARRIER_BYTES = 1024  # room for the mbarriers: what follows is aligned to it
FIRST_ORDER_BARRIER = (
    1  # named barriers in which consumers take turns at the tensor core: one each from here on
)
CLEAR_BARRIER = 5  # named barrier of all consumers, around rows of V that one of them clears


def shapes_for(problem: AttentionProblem, pack: int) -> dict[int, Shape]:
    """The table that suits a problem, by head dimension."""
    if problem.paged or -(-problem.seq_q // (WARPGROUP_ROWS // pack)) == 1:
        return DECODE
    right = 0 if problem.causal else problem.window_right
    if problem.window_left is not None and right is not None:
        return NARROW if problem.window_left + right < NARROW_KEYS else PREFILL
    return PREFILL


@dataclass(frozen=True)
class AttentionConfig:
    """Compile-time shape of one kernel. Fields as in ``sm100.config.AttentionConfig``."""

    dtype: str
    head_dim: int
    shape: Shape
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
    exact_maximum: bool = False
    bias: str | None = None
    bias_heads: bool = False
    bias_batches: bool = False

    def __post_init__(self):
        assert 1 <= self.pack <= WARPGROUP_ROWS
        assert not (self.splits and (self.normalize or self.has_lse)), "splits write un-normalised states"
        assert self.smem_bytes <= self.smem_limit
        assert self.role_registers * self.shape.ctas_per_sm <= REGISTERS_PER_SM
        assert barrier_count(self.barriers) * 8 <= BARRIER_BYTES

    @classmethod
    def of(cls, problem: AttentionProblem, *, shape: Shape | None = None, splits: bool = False):
        """The kernel for a problem. UnsupportedProblem names what this kernel does not do."""
        if problem.bias_rows == "strided":
            raise UnsupportedProblem("sm90 attention: bias=of strided rows is not supported")
        if problem.head_dim not in PREFILL:
            raise UnsupportedProblem(
                f"sm90 attention: D must be one of {', '.join(map(str, PREFILL))}, got {problem.head_dim}"
            )
        pack = choose_pack(problem.group, problem.seq_q, WARPGROUP_ROWS)
        if shape is None:
            shape = shapes_for(problem, pack)[problem.head_dim]
        if problem.paged and problem.page_size not in PAGE_SIZES:
            raise UnsupportedProblem(f"sm90 attention: page_size={problem.page_size} is not supported")
        return cls(
            dtype=str(problem.dtype).removeprefix("torch."),
            head_dim=problem.head_dim,
            shape=shape,
            shared_kv=problem.shared_kv,
            pack=pack,
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
            bias=str(problem.bias_dtype).removeprefix("torch.") if problem.has_bias else None,
            bias_heads=problem.has_bias and problem.bias_heads,
            bias_batches=problem.has_bias and problem.bias_batches,
        )

    @property
    def consumers(self) -> int:
        return self.shape.consumers

    @property
    def takes_turns(self) -> bool:
        """Consumers issue their products one after another."""
        return self.shape.turns and self.consumers > 1

    @property
    def tile_m(self) -> int:
        """Query rows of a CTA."""
        return self.consumers * WARPGROUP_ROWS

    @property
    def tile_n(self) -> int:
        """Keys of a KV tile."""
        return self.shape.tile_n

    @property
    def kv_stages(self) -> int:
        return self.shape.kv_stages

    @property
    def rescale_threshold(self) -> float:
        """Powers of two that the reference may lag behind the maximum."""
        return 0.0 if self.exact_maximum else RESCALE_THRESHOLD

    # Warp roles: consumer warpgroups, then the producer's, of which one warp works.

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def load_warp(self) -> int:
        return self.consumers * WARPGROUP_THREADS // WARP_THREADS

    @property
    def consumer_threads(self) -> int:
        return self.consumers * WARPGROUP_THREADS

    @property
    def role_registers(self) -> int:
        """Registers of a CTA once the roles have set theirs."""
        per_lane = self.consumers * self.shape.consumer_registers + self.shape.producer_registers
        return per_lane * WARPGROUP_THREADS

    # Tiles.

    @property
    def blocks(self) -> int:
        """Blocks of BLOCK elements that D is cut into."""
        return self.head_dim // BLOCK

    @property
    def group_queries(self) -> int:
        """Queries of a consumer's 64 rows; rows past pack * group_queries are idle."""
        return WARPGROUP_ROWS // self.pack

    @property
    def queries(self) -> int:
        """Queries of an M tile."""
        return self.consumers * self.group_queries

    @property
    def q_box(self) -> tuple[int, int, int]:
        """(D, HEAD, QUERY) of a Q load: one block of D of one consumer's rows."""
        return (BLOCK, self.pack, self.group_queries)

    @property
    def page_keys(self) -> int:
        """Keys of a KV tile that lie together in memory: all of them, or a page's."""
        return min(self.page_size or self.tile_n, self.tile_n)

    @property
    def tile_pages(self) -> int:
        """Pages that the keys of a KV tile come from."""
        return self.tile_n // self.page_keys

    @property
    def kv_box(self) -> tuple[int, int, int]:
        """(D, KEY, BLOCK) of a K or V load: a whole tile, or the keys of one page in one block of D."""
        return (BLOCK, self.page_keys, self.blocks if self.tile_pages == 1 else 1)

    @property
    def kv_boxes(self) -> tuple[int, int]:
        """(BLOCK, PAGE): loads of one K or V tile."""
        return (self.blocks // self.kv_box[2], self.tile_pages)

    @property
    def band(self) -> bool:
        """A row may see only part of a tile that another row of its M tile sees more of."""
        return self.causal or self.has_left or self.has_right

    # Shared memory, in bytes.

    @property
    def q_bytes(self) -> int:
        """Q of one consumer."""
        return WARPGROUP_ROWS * self.head_dim * ELEMENT_BYTES

    @property
    def kv_tile_bytes(self) -> int:
        return self.tile_n * self.head_dim * ELEMENT_BYTES

    @property
    def v_bytes(self) -> int:
        """Shared memory of V's ring: none where V is K."""
        return 0 if self.shared_kv else self.kv_stages * self.kv_tile_bytes

    @property
    def smem_regions(self) -> tuple[tuple[str, int, str], ...]:
        """(region, bytes, what stands in it), in order."""
        stages = self.kv_stages
        return (
            ("barriers", BARRIER_BYTES, f"{barrier_count(self.barriers)} mbarriers"),
            (
                "Q",
                self.consumers * self.q_bytes,
                f"{self.consumers} x [{WARPGROUP_ROWS}, {self.head_dim}], 128-byte swizzle",
            ),
            (
                "K and V" if self.shared_kv else "K",
                stages * self.kv_tile_bytes,
                f"{stages} x [{self.tile_n}, {self.head_dim}], 128-byte swizzle",
            ),
            ("V", self.v_bytes, f"{stages} x [{self.tile_n}, {self.head_dim}], 128-byte swizzle"),
        )

    @property
    def smem_bytes(self) -> int:
        return sum(size for _, size, _ in self.smem_regions)

    @property
    def smem_limit(self) -> int:
        """Bytes that a CTA may have when so many share an SM."""
        return min(SMEM_PER_SM // self.shape.ctas_per_sm - SMEM_RESERVED_PER_CTA, SMEM_PER_CTA)

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        """Every mbarrier: who arrives, how often, who waits, what then holds."""
        stages, warps = self.kv_stages, self.consumer_threads // WARP_THREADS
        load, filled = "load warp", "load warp, expect_tx + TMA bytes"
        warp = "consumers, one thread a warp"
        own = "consumer, one thread a warp"
        q = (
            Barrier("q_full", self.consumers, 1, filled, own, "the consumer's Q is in shared memory"),
            Barrier("q_empty", self.consumers, 4, own, load, "the consumer has read its Q"),
        )
        if self.shared_kv:
            return (
                *q,
                Barrier("k_full", stages, 1, filled, "consumers", "KV tile is in shared memory"),
                Barrier("k_empty", stages, warps, warp, load, "QK and PV have read the KV tile"),
            )
        return (
            *q,
            Barrier("k_full", stages, 1, filled, "consumers", "K tile is in shared memory"),
            Barrier("k_empty", stages, warps, warp, load, "QK has read the K tile"),
            Barrier("v_full", stages, 1, filled, "consumers", "V tile is in shared memory"),
            Barrier("v_empty", stages, warps, warp, load, "PV has read the V tile"),
        )

    @property
    def v_ring(self) -> str:
        """Name of the ring that V comes through."""
        return "k" if self.shared_kv else "v"

    @property
    def rings(self) -> tuple[str, ...]:
        return ("k",) if self.shared_kv else ("k", "v")
