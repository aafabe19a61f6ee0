"""What attention kernels of every architecture are compiled for: the switches of a configuration, and what follows from
them alone."""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from warpspec.common.barriers import Barrier
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.common.kv_formats import FORMATS as CACHE_FORMATS
from warpspec.common.operands import FLOAT32, UINT8
from warpspec.fmha.heads import BLOCK, HeadSizes
from warpspec.fmha.line import MOST_ROUNDS
from warpspec.fmha.logits import PLAIN, LogitMap
from warpspec.fmha.problem import AttentionProblem

ELEMENT_BYTES = 2  # bf16 and fp16
BIAS_BYTES = {"bfloat16": 2, "float32": 4}  # of an element
# Keys: a page holds a multiple of the first up to the second, or a multiple of the second, the most of a KV tile. So
# the boxes that a tile is loaded in begin where the 128-byte swizzle does, every 8 rows, and are few.
PAGE_STEP, PAGE_LARGE = 16, 128

# A packed request is found by a warp, 32 candidates at a time (``device.packed``).
SEARCH_ROUNDS = 3
MOST_REQUESTS = WARP_THREADS**SEARCH_ROUNDS

CURSOR_WORDS = 3  # of what is kept in shared memory of a cut of the line (``device.line``)
RECORD_WORDS = 24  # of a tile's record (``device.record``), with room
PIECE_STATISTICS = 4  # fp32 behind the D columns of a row of a piece's state: maximum, sum, two unused

# The running maximum may fall this far behind the true one, in powers of two, before O is rescaled: P then
# stays below 2**8, well within fp16 and bf16, and sums of it within fp32. Where few queries are decoded the
# reference follows every step: then the largest P of a row is exactly 1, and its rounding error 0. Nothing less
# will do: keys of one weight that is not 1 share its error, however light each is.
RESCALE_THRESHOLD = 8.0
EXACT_QUERIES = 8


class Schedule(enum.Enum):
    """Which tiles of a launch a CTA does."""

    SINGLE = "single tile"  # the one of its number
    PERSISTENT = "persistent"  # one of every round of as many tiles as there are CTAs
    QUEUE = "queue"  # whole tiles that it takes from a queue in memory (``device.queue``)
    LINE = (
        "line"  # its chunk of the line of all tiles, cut by length (``line``); it may leave states of pieces
    )


@dataclass(frozen=True)
class KernelFeatures:
    """Switches of one kernel.

    dtype: "bfloat16" or "float16". head_dim: D; v_dim: of V and O, 0 for D. shared_kv: V is K, or the first part of its
    rows. pack: query heads of one KV group whose rows stand together; row r is head r % pack of query r // pack.
    causal, has_left, has_right, key_stride: which sides of the band that a row sees are bounded, and how. logits: the
    map between S and P. splits: partial results, one for each split of the keys, are written. schedule: which tiles a
    CTA does. scheduled: a warp works out the CTA's tiles for all roles (``device.record``). page_size: keys of a page
    of K and V, 0 where they are not paged. bias_heads, bias_batches: heads, batch rows have each their own bias.
    packed_q, packed_k: requests' queries, keys stand one behind another. many_queries: some request of packed queries
    has more than a tile's, as far as the host knows. kv_format: FP8 or NVFP4 format of K and V; None: they have dtype.
    exact_maximum: O is rescaled whenever the maximum moves. The rest: which optional operands there are.
    """

    dtype: str
    head_dim: int = 64
    v_dim: int = 0
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
    logits: LogitMap = PLAIN
    splits: bool = False
    page_size: int = 0
    bias_heads: bool = False
    bias_batches: bool = False
    packed_q: bool = False
    packed_k: bool = False
    many_queries: bool = False
    exact_maximum: bool = False
    schedule: Schedule = Schedule.SINGLE
    scheduled: bool = False
    kv_format: str | None = None
    has_k_scale: bool = False
    has_v_scale: bool = False
    swizzled: bool = False
    has_tree: bool = False
    has_ranges: bool = False
    record_slots: ClassVar[int] = 1  # of tile records

    def __post_init__(self):
        assert self.bias in (None, *BIAS_BYTES)
        assert not self.page_size or takes_pages(self.page_size)
        assert not (self.has_tree or self.has_ranges) or (self.causal and self.key_stride == 1)
        assert not self.page_size or self.has_kv_lengths, "pages past the KV length hold anything"
        assert not self.packed_k or (self.packed_q and not self.page_size and not self.has_kv_lengths)
        assert not (self.packed_q and self.bias)
        assert not (self.splits and self.schedule in (Schedule.LINE, Schedule.QUEUE))
        assert self.scheduled or self.schedule is not Schedule.QUEUE
        assert not (self.splits and (self.normalize or self.has_lse)), "splits write un-normalised states"

    @property
    def bias(self) -> str | None:
        """dtype of the bias, or None."""
        return self.logits.bias

    @property
    def kv_dtype(self) -> str:
        """dtype of K and V as they lie in memory; FP8 and NVFP4 as bytes."""
        return UINT8 if self.kv_format else self.dtype

    def kv_row(self, size: int) -> int:
        """Elements, of kv_dtype, of a row of K or V of so many numbers."""
        return CACHE_FORMATS[self.kv_format].row_bytes(size) if self.kv_format else size

    @property
    def kv_block(self) -> int:
        """Numbers of K and V that share a block scale; 0 without."""
        return CACHE_FORMATS[self.kv_format].block if self.kv_format else 0

    @property
    def o_dtype(self) -> str:
        """dtype of o."""
        return self.dtype if self.normalize else FLOAT32

    @property
    def o_size(self) -> int:
        """Elements of a row of o: a split's are padded to the tuned head size."""
        return self.heads.v_state if self.splits else self.heads.v

    @property
    def split_dims(self) -> int:
        """Dimensions in front of o's, row_max's and row_sum's: the splits."""
        return int(self.splits)

    @property
    def cuts_tiles(self) -> bool:
        """Work is cut by length: CTAs leave states of pieces of tiles, and join records."""
        return self.schedule is Schedule.LINE

    @property
    def from_queue(self) -> bool:
        """CTAs take tiles from a queue."""
        return self.schedule is Schedule.QUEUE

    @property
    def writes_state(self) -> bool:
        """What is written is an un-normalised state: row_max and row_sum beside o."""
        return not self.normalize

    @property
    def rescale_threshold(self) -> float:
        """Powers of two that the reference may lag behind the maximum."""
        return 0.0 if self.exact_maximum else RESCALE_THRESHOLD

    @property
    def heads(self) -> HeadSizes:
        """Head sizes, and what follows from them."""
        return HeadSizes(self.head_dim, self.v_dim or self.head_dim)

    @property
    def blocks(self) -> int:
        """Blocks of BLOCK elements that a row of Q and K is cut into."""
        return self.heads.qk_blocks

    @property
    def band(self) -> bool:
        """A row may see only part of a tile that another row of its M tile sees more of."""
        return self.causal or self.has_left or self.has_right

    # Row groups, of ``row_group_size`` rows, of which an M tile has ``row_groups``: what a configuration adds.

    @property
    def row_group_queries(self) -> int:
        """Queries of a row group; its rows past pack * row_group_queries are idle."""
        return self.row_group_size // self.pack

    @property
    def column_parts(self) -> int:
        """Parts of O's columns that have consumers of their own."""
        return 1

    @property
    def queries(self) -> int:
        """Queries of an M tile."""
        return self.row_groups * self.row_group_queries

    @property
    def last_first(self) -> bool:
        """Query tiles are done from the last to the first, a tile of all heads at a time: work grows with a row's
        position, or tiles of packed queries have their own order (``device.packed``)."""
        return self.causal or self.packed_q

    @property
    def ends_in_tile(self) -> bool:
        """A KV tile may hold keys that are no row's: past the KV length, or another request's."""
        return self.has_kv_lengths or self.packed_k

    @property
    def every_tile_masked(self) -> bool:
        """Any KV tile may hold keys that are not seen: no code for others."""
        return False

    @property
    def swizzled_kv(self) -> bool:
        """Whether K and V tiles are swizzled as TMA loads them."""
        return True

    @property
    def v_ring(self) -> str:
        """Name of the ring that V comes through."""
        return "k" if self.shared_kv else "v"

    @property
    def rings(self) -> tuple[str, ...]:
        return ("k",) if self.shared_kv else ("k", "v")

    @property
    def piece_columns(self) -> int:
        """fp32 numbers of a row in a piece's state."""
        return self.heads.v_state + PIECE_STATISTICS

    @property
    def cursor_bytes(self) -> int:
        """Shared memory of the ends of the CTA's chunks."""
        return 2 * CURSOR_WORDS * MOST_ROUNDS * WORD_BYTES if self.schedule is Schedule.LINE else 0

    def record_barriers(self, scheduler: str, readers: str, warps: int) -> tuple[Barrier, ...]:
        """mbarriers of the records of tiles, which so many warps read."""
        readers, slots = f"{readers}, one thread a warp", self.record_slots
        return (
            Barrier(
                "tile_full", slots, 1, scheduler, readers, "the record of the next tile is in shared memory"
            ),
            Barrier("tile_empty", slots, warps, readers, scheduler, "every role has read it"),
        )

    @property
    def record_bytes(self) -> int:
        """Shared memory of the records of tiles."""
        return RECORD_WORDS * WORD_BYTES * self.record_slots if self.scheduled else 0

    # KV tiles, of ``tile_n`` keys, which a configuration adds.

    @property
    def kv_tile_bytes(self) -> int:
        """Shared memory of a tile of K."""
        return self.tile_n * self.heads.qk_room * ELEMENT_BYTES

    @property
    def v_tile_bytes(self) -> int:
        """Shared memory of a tile of V."""
        return self.tile_n * self.heads.v_room * ELEMENT_BYTES

    def ring_tile_bytes(self, ring: str) -> int:
        """Shared memory of a tile of a ring's."""
        return self.v_tile_bytes if ring == "v" else self.kv_tile_bytes

    @property
    def v_stage_bytes(self) -> int:
        """Shared memory from one stage of V to the next: where V is K, K's stage."""
        return self.kv_tile_bytes if self.shared_kv else self.v_tile_bytes

    @property
    def v_bytes(self) -> int:
        """Shared memory of V's ring: none where V is K."""
        return 0 if self.shared_kv else self.kv_stages * self.v_tile_bytes

    @property
    def page_keys(self) -> int:
        """Keys of a KV tile that lie together in memory wherever the tile begins: all of them, a page's, or a part's of
        a page of which tiles are no multiple, nor it of tiles."""
        return math.gcd(self.page_size, self.tile_n)

    @property
    def tile_pages(self) -> int:
        """Pages, or parts of pages, that the keys of a KV tile come from."""
        return self.tile_n // self.page_keys

    def kv_box(self, ring: str = "k") -> tuple[int, int, int]:
        """(D, KEY, BLOCK) of a load of a ring's: a whole tile, or the keys of (a part of) one page in one block of
        D."""
        whole = self.tile_pages == 1 and self.heads.whole
        return (BLOCK, self.page_keys, self.heads.blocks(ring) if whole else 1)

    def kv_boxes(self, ring: str = "k") -> tuple[int, int]:
        """(BLOCK, PAGE): loads of one tile of a ring's. Shared memory has a tile's pages side by side in each block
        of D, so a box of several blocks would leave no room between them for the other pages."""
        return (self.heads.blocks(ring) // self.kv_box(ring)[2], self.tile_pages)

    def box_of(self, row, block, source) -> tuple:
        """Which box of K or V, as its coordinates are cut into boxes. row: of the keys, source: batch row or page."""
        return (row, block, source) if self.heads.whole else (block, row, source)


def takes_pages(page_size: int) -> bool:
    """Kernels read pages of so many keys."""
    return page_size > 0 and page_size % (PAGE_STEP if page_size < PAGE_LARGE else PAGE_LARGE) == 0


def check_requests(kernel: str, problem: AttentionProblem) -> None:
    """Raise UnsupportedProblem for more packed requests than kernels search through."""
    if problem.packed_q and problem.batch > MOST_REQUESTS:
        raise UnsupportedProblem(
            f"{kernel} attention: cu_seqlens_q: at most {MOST_REQUESTS} requests are supported, got {problem.batch}"
        )


def check_page_size(kernel: str, page_size: int | None) -> None:
    """Raise UnsupportedProblem, saying what is allowed, for pages that kernels do not read. None: there are none."""
    if page_size is None or takes_pages(page_size):
        return
    advice = ""
    if page_size < PAGE_STEP:
        advice = f"; set the page size (block size) of the engine's KV cache to {PAGE_STEP} or more"
    raise UnsupportedProblem(
        f"{kernel} attention: page_size={page_size} is not supported: pages must hold a multiple of {PAGE_STEP} keys "
        f"up to {PAGE_LARGE}, or a multiple of {PAGE_LARGE}{advice}"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def logits_of(problem: AttentionProblem, signed: bool = False) -> LogitMap:
    """The map of a problem; signed: see ``LogitMap.of``."""
    return LogitMap.of(problem, dtype_name(problem.bias_dtype) if problem.has_bias else None, signed)


def features(
    problem: AttentionProblem,
    *,
    pack: int,
    tile_m: int,
    splits: bool = False,
    schedule: Schedule = Schedule.SINGLE,
    scheduled: bool = False,
) -> dict:
    """The fields of ``KernelFeatures`` for a problem.

    tile_m: query rows of a CTA. splits: for split KV, whose results are combined later. schedule: which tiles a
    CTA does. scheduled: a warp works out tiles for all roles.
    """
    return {
        "dtype": dtype_name(problem.dtype),
        "head_dim": problem.head_dim,
        "v_dim": problem.v_dim,
        "shared_kv": problem.shared_kv,
        "pack": pack,
        "causal": problem.causal,
        "has_left": problem.window_left is not None,
        "has_right": problem.window_right is not None,
        "key_stride": problem.key_stride if problem.causal else 1,
        "has_kv_lengths": problem.has_kv_lengths,
        "has_q_start": problem.has_q_start,
        "has_sink": problem.has_sink and not splits,
        "has_lse": problem.return_lse and not splits,
        "normalize": problem.normalize and not splits,
        "logits": logits_of(problem),
        "splits": splits,
        "page_size": problem.page_size or 0,
        "bias_heads": problem.has_bias and problem.bias_heads,
        "bias_batches": problem.has_bias and problem.bias_batches,
        "packed_q": problem.packed_q,
        "packed_k": problem.packed_k,
        "many_queries": problem.packed_q and problem.seq_q > tile_m // pack,
        "exact_maximum": problem.seq_q <= EXACT_QUERIES,
        "schedule": schedule,
        "scheduled": scheduled,
        "kv_format": problem.kv_format,
        "has_k_scale": problem.has_k_scale,
        "has_v_scale": problem.has_v_scale,
        "swizzled": problem.swizzled,
        "has_tree": problem.has_tree,
        "has_ranges": problem.has_ranges,
    }


@functools.lru_cache(maxsize=4096)
def choose_pack(group: int, seq_q: int, tile_m: int) -> int:
    """Heads of a KV group that share an M tile: what makes the fewest tiles, the most heads among equals.

    More heads to a tile means fewer queries in it: under a causal or window mask its rows then see more
    nearly the same keys, so at equal tile count more heads never costs and often saves KV tiles.
    """

    def tiles(pack):
        return -(-group // pack) * -(-seq_q // (tile_m // pack))

    return min(range(1, min(group, tile_m) + 1), key=lambda pack: (tiles(pack), -pack))


def choose_packs(problem: AttentionProblem, tile_m: int) -> tuple[int, ...]:
    """Numbers of heads of a KV group that may share an M tile: what suits the longest request, and of packed queries
    what suits a request of one."""
    most = choose_pack(problem.group, problem.seq_q, tile_m)
    few = choose_pack(problem.group, 1, tile_m) if problem.packed_q else most
    return (most,) if few == most else (most, few)
