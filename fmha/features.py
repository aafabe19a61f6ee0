"""The architecture-independent part of an attention kernel's configuration, except tiles: records of a few switches.

A configuration is composed of such records and adds tiles and memory of its own: ``AttentionConfig`` and
``BackwardConfig`` of ``sm90`` and ``sm100``. Kernels that differ in nothing else share these records and the device
code that reads them. A new switch is a field of one record, a line of that record's ``of``, and its use.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from warpspec.common.barriers import Barrier
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.common.kv_formats import FORMATS as CACHE_FORMATS
from warpspec.common.operands import FLOAT32, UINT8
from warpspec.fmha.block_mask import WORD_BITS
from warpspec.fmha.heads import HeadSizes
from warpspec.fmha.line import MOST_ROUNDS
from warpspec.fmha.logits import PLAIN, LogitMap
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.tiles import KvTile, TileRows, check_page_size, takes_pages

# A packed request is found by a warp, 32 candidates at a time (``device.packed``).
SEARCH_ROUNDS = 3
MOST_REQUESTS = WARP_THREADS**SEARCH_ROUNDS

CURSOR_WORDS = 3  # words in shared memory for a cut of the line (``device.line``)
RECORD_WORDS = 24  # words of a tile's record (``device.record``), with spare ones

# The running maximum may fall this far behind the true one, in powers of two, before O is rescaled: P then
# stays below 2**8, well within fp16 and bf16, and sums of it within fp32. When few queries decode, the reference
# follows every step, so that the largest P of a row is exactly 1 and has no rounding error. This is necessary: keys
# with the same weight other than 1 all have the same rounding error, however small each weight is.
RESCALE_THRESHOLD = 8.0
EXACT_QUERIES = 8


class Schedule(enum.Enum):
    """Which tiles of a launch a CTA works on."""

    SINGLE = "single tile"  # the one of its number
    PERSISTENT = "persistent"  # one tile per round, a round having as many tiles as there are CTAs
    QUEUE = "queue"  # whole tiles taken from a queue in memory (``device.queue``)
    LINE = "line"  # its chunk of the line of all tiles, cut by length (``line``); it may leave pieces' states


@dataclass(frozen=True)
class Mask:
    """Which sides of the band of keys that a row sees are bounded, and how.

    key_stride: positions that a key stands for. has_tree, has_ranges: an operand gives further visible keys, those of
    drafts (``tree``) or of an image. sparse: any key of a tile may be missing; the source of the keys knows which.
    block_size: (queries, keys) of the blocks that operands list (``block_mask``); None: no lists. has_patterns:
    patterns of bits hide keys of partial blocks.
    """

    causal: bool = False
    has_left: bool = False
    has_right: bool = False
    key_stride: int = 1
    has_tree: bool = False
    has_ranges: bool = False
    sparse: bool = False
    block_size: tuple[int, int] | None = None
    has_patterns: bool = False

    def __post_init__(self):
        assert not (self.has_tree or self.has_ranges) or (self.causal and self.key_stride == 1)

    @classmethod
    def of(cls, problem: AttentionProblem) -> Mask:
        return cls(
            causal=problem.causal,
            has_left=problem.window_left is not None,
            has_right=problem.window_right is not None,
            key_stride=problem.key_stride if problem.causal else 1,
            has_tree=problem.has_tree,
            has_ranges=problem.has_ranges,
            block_size=problem.block_size,
            has_patterns=problem.has_patterns,
        )

    @property
    def band(self) -> bool:
        """Whether a row's keys are bounded on a side where another row's are not."""
        return self.causal or self.has_left or self.has_right

    @property
    def has_blocks(self) -> bool:
        """Whether operands list the blocks of keys that rows see."""
        return self.block_size is not None

    @property
    def uneven(self) -> bool:
        """Whether a row may see less of a tile than another row of its M tile."""
        return self.band or self.has_blocks

    @property
    def pattern_words(self) -> int:
        """Words of a row's pattern of bits."""
        return -(-self.block_size[1] // WORD_BITS) if self.has_patterns else 0

    def bounds(self, window) -> dict:
        """Arguments of ``mask.key_range``. window: (left, right), not read where unbounded."""
        return {
            "causal": self.causal,
            "left": window[0] if self.has_left else None,
            "right": window[1] if self.has_right else None,
            "key_stride": self.key_stride,
        }


@dataclass(frozen=True)
class RequestLayout:
    """How requests' queries and keys are laid out, and which operands describe it.

    packed_q, packed_k: queries, keys of all requests are packed one after another. many_queries: with packed queries,
    some request has more queries than a tile, as far as the host knows. page_size: keys of a page of K and V, 0 if they
    are not paged.
    """

    has_kv_lengths: bool = False
    has_q_start: bool = False
    packed_q: bool = False
    packed_k: bool = False
    many_queries: bool = False
    page_size: int = 0

    def __post_init__(self):
        assert not self.page_size or takes_pages(self.page_size)
        assert not self.page_size or self.has_kv_lengths, "pages past the KV length hold anything"
        assert not self.packed_k or (self.packed_q and not self.page_size and not self.has_kv_lengths)

    @classmethod
    def of(cls, problem: AttentionProblem, tile_queries: int | None = None) -> RequestLayout:
        """tile_queries: queries of an M tile; None if ``many_queries`` is not needed."""
        return cls(
            has_kv_lengths=problem.has_kv_lengths,
            has_q_start=problem.has_q_start,
            packed_q=problem.packed_q,
            packed_k=problem.packed_k,
            many_queries=tile_queries is not None and problem.packed_q and problem.seq_q > tile_queries,
            page_size=problem.page_size or 0,
        )

    @property
    def ends_in_tile(self) -> bool:
        """Whether a KV tile may hold keys that no row sees: past the KV length, or another request's."""
        return self.has_kv_lengths or self.packed_k


@dataclass(frozen=True)
class Format:
    """Formats of numbers in memory.

    dtype: of Q, "bfloat16" or "float16". kv_format: FP8 or NVFP4 format of K and V; None: they have dtype. has_k_scale,
    has_v_scale: codes are multiplied by scales. swizzled: NVFP4's block scales are swizzled. shared_kv: V is K, or the
    first part of its rows.
    """

    dtype: str = "bfloat16"
    kv_format: str | None = None
    has_k_scale: bool = False
    has_v_scale: bool = False
    swizzled: bool = False
    shared_kv: bool = False

    @classmethod
    def of(cls, problem: AttentionProblem) -> Format:
        return cls(
            dtype=dtype_name(problem.dtype),
            kv_format=problem.kv_format,
            has_k_scale=problem.has_k_scale,
            has_v_scale=problem.has_v_scale,
            swizzled=problem.swizzled,
            shared_kv=problem.shared_kv,
        )

    @property
    def kv_dtype(self) -> str:
        """dtype of K and V in memory; bytes for FP8 and NVFP4."""
        return UINT8 if self.kv_format else self.dtype

    def kv_row(self, size: int) -> int:
        """Elements of kv_dtype in a row of K or V with so many numbers."""
        return CACHE_FORMATS[self.kv_format].row_bytes(size) if self.kv_format else size

    @property
    def kv_bits(self) -> int:
        """Bits of a number of K and V in memory."""
        return CACHE_FORMATS[self.kv_format or self.dtype].bits

    @property
    def kv_block(self) -> int:
        """Numbers of K and V that share a block scale; 0 without."""
        return CACHE_FORMATS[self.kv_format].block if self.kv_format else 0

    @property
    def rings(self) -> tuple[str, ...]:
        """Names of the rings of KV tiles in shared memory."""
        return ("k",) if self.shared_kv else ("k", "v")

    @property
    def v_ring(self) -> str:
        """Name of the ring that V comes through."""
        return self.rings[-1]


@dataclass(frozen=True)
class Output:
    """What a kernel writes of a row's sums.

    dtype, size: those of a row of o. normalize: O is divided by the row's sum; otherwise the kernel writes its
    un-normalised state, row_max and row_sum beside o. splits: it writes a state for each split of the keys.
    exact_maximum: O is rescaled whenever the maximum moves.
    """

    dtype: str = "bfloat16"
    size: int = 64
    has_sink: bool = False
    has_lse: bool = False
    normalize: bool = True
    splits: bool = False
    exact_maximum: bool = False

    def __post_init__(self):
        assert not (self.splits and (self.normalize or self.has_lse)), "splits write un-normalised states"

    @classmethod
    def of(cls, problem: AttentionProblem, splits: bool) -> Output:
        """splits: splits of the keys, whose results another kernel combines."""
        normalize = problem.normalize and not splits
        return cls(
            dtype=dtype_name(problem.dtype) if normalize else FLOAT32,
            size=problem.heads.v_state if splits else problem.heads.v,
            has_sink=problem.has_sink and not splits,
            has_lse=problem.return_lse and not splits,
            normalize=normalize,
            splits=splits,
            exact_maximum=problem.seq_q <= EXACT_QUERIES,
        )

    @property
    def writes_state(self) -> bool:
        """Whether an un-normalised state is written: row_max and row_sum beside o."""
        return not self.normalize

    @property
    def split_dims(self) -> int:
        """Number of leading dimensions of o, row_max and row_sum for splits."""
        return int(self.splits)

    @property
    def rescale_threshold(self) -> float:
        """Powers of two that the reference may lag behind the maximum."""
        return 0.0 if self.exact_maximum else RESCALE_THRESHOLD


@dataclass(frozen=True)
class TileScheduler:
    """Which tiles a CTA works on, and how its roles learn of them.

    has_warp: a warp computes the CTA's tiles for all roles and writes them to ``record_count`` records
    (``device.record``).
    """

    schedule: Schedule = Schedule.SINGLE
    has_warp: bool = False
    record_count: int = 1

    def __post_init__(self):
        assert self.has_warp or self.schedule is not Schedule.QUEUE

    @property
    def cuts_tiles(self) -> bool:
        """Whether work is cut by length: CTAs leave states of pieces of tiles, and join records."""
        return self.schedule is Schedule.LINE

    @property
    def single(self) -> bool:
        """Whether a CTA works on one tile."""
        return self.schedule is Schedule.SINGLE

    @property
    def persistent(self) -> bool:
        """Whether a CTA works on a tile of every round."""
        return self.schedule is Schedule.PERSISTENT

    @property
    def from_queue(self) -> bool:
        """Whether CTAs take tiles from a queue."""
        return self.schedule is Schedule.QUEUE

    @property
    def cursor_bytes(self) -> int:
        """Bytes of shared memory for the ends of the CTA's chunks."""
        return 2 * CURSOR_WORDS * MOST_ROUNDS * WORD_BYTES if self.cuts_tiles else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of shared memory for the records of tiles."""
        return RECORD_WORDS * WORD_BYTES * self.record_count if self.has_warp else 0

    def barriers(self, scheduler: str, readers: str, warps: int) -> tuple[Barrier, ...]:
        """mbarriers of the records of tiles. warps: number of reading warps."""
        readers, count = f"{readers}, one thread a warp", self.record_count
        return (
            Barrier(
                "tile_full", count, 1, scheduler, readers, "the record of the next tile is in shared memory"
            ),
            Barrier("tile_empty", count, warps, readers, scheduler, "every role has read it"),
        )


@dataclass(frozen=True)
class AttentionKernel:
    """Configuration of an attention kernel, shared by all architectures. Each adds its tiles.

    pack: query heads that share an M tile.
    """

    mask: Mask = Mask()
    requests: RequestLayout = RequestLayout()
    logits: LogitMap = PLAIN
    heads: HeadSizes = HeadSizes(64, 64)
    format: Format = Format()
    output: Output = Output()
    scheduler: TileScheduler = TileScheduler()
    pack: int = 1

    def __post_init__(self):
        assert not (self.requests.packed_q and self.logits.bias)
        assert not (self.output.splits and (self.scheduler.cuts_tiles or self.scheduler.from_queue))

    @property
    def clears_unseen(self) -> bool:
        """Whether a KV tile may hold keys past those that some row sees, whose V rows are cleared."""
        return (self.mask.band and not self.mask.has_blocks) or self.requests.ends_in_tile

    @property
    def rows(self) -> TileRows:
        """Rows of an M tile."""
        raise NotImplementedError

    @property
    def kv(self) -> KvTile:
        """A KV tile."""
        raise NotImplementedError


def parts_of(problem: AttentionProblem, *, rows_of_cta: int, pack: int, splits: bool) -> dict:
    """The parts of a configuration that follow from the problem. rows_of_cta: query rows of an M tile. pack: heads that
    share it. splits: as in ``Output.of``."""
    return {
        "mask": Mask.of(problem),
        "requests": RequestLayout.of(problem, rows_of_cta // pack),
        "logits": logits_of(problem),
        "heads": problem.heads,
        "format": Format.of(problem),
        "output": Output.of(problem, splits),
        "pack": pack,
    }


def check_requests(kernel: str, problem: AttentionProblem) -> None:
    """Raise UnsupportedProblem for more packed requests than kernels search through."""
    if problem.packed_q and problem.batch > MOST_REQUESTS:
        raise UnsupportedProblem(
            f"{kernel} attention: cu_seqlens_q: at most {MOST_REQUESTS} requests are supported, got {problem.batch}"
        )


def check_call(kernel: str, problem: AttentionProblem, code_sizes: tuple[int, ...]) -> None:
    """Raise UnsupportedProblem for what neither architecture's kernel supports. code_sizes: head sizes for which the
    kernel reads the problem's format of quantised keys."""
    check_page_size(kernel, problem.page_size)
    check_requests(kernel, problem)
    if problem.block_size is not None and problem.kv_format:
        raise UnsupportedProblem(
            f"{kernel} attention: block_mask with k in {problem.kv_format} is not supported"
        )
    if problem.bias_rows == "strided":
        raise UnsupportedProblem(f"{kernel} attention: bias=of strided rows is not supported")
    if problem.kv_format and (problem.head_dim not in code_sizes or problem.heads.v != problem.head_dim):
        raise UnsupportedProblem(
            f"{kernel} attention: k in {problem.kv_format} is supported for head sizes {code_sizes}, "
            f"got {problem.head_dim}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def logits_of(problem: AttentionProblem, signed: bool = False) -> LogitMap:
    """The map of a problem; signed: see ``LogitMap.of``."""
    return LogitMap.of(problem, dtype_name(problem.bias_dtype) if problem.has_bias else None, signed)
