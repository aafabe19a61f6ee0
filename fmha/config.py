"""The architecture-independent part of an attention kernel's configuration, except tiles.

A configuration is composed of records of a few switches: those that it has in common with its problem (``features``,
``heads``, ``logits``), ``Output`` and ``TileScheduler``. ``AttentionConfig`` of ``sm90`` and ``sm100`` adds tiles and
memory of its own. Kernels that differ in nothing else share these records and the device code that reads them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from warpspec.common.barriers import Barrier
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.common.operands import FLOAT16, FLOAT32
from warpspec.fmha.conversion import CodeRings
from warpspec.fmha.features import Format, Mask, RequestLayout
from warpspec.fmha.heads import HeadSizes
from warpspec.fmha.line import AHEAD_REQUESTS, KEPT_WORDS, MOST_ROUNDS, TILE_OVERHEAD
from warpspec.fmha.logits import PLAIN, LogitMap
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import SORTED_REQUESTS
from warpspec.fmha.tiles import KvTile, TileRows, check_page_size, takes_pages

# A packed request is found by a warp, 32 candidates at a time (``device.packed``).
SEARCH_ROUNDS = 3
MOST_REQUESTS = WARP_THREADS**SEARCH_ROUNDS

CURSOR_WORDS = 3  # words in shared memory for a cut of the line (``device.line``)
CUT_WORDS = 3  # and for the tile that the last of a CTA's chunks begins in
RECORD_WORDS = 24  # words of a tile's record (``device.record``), with spare ones

# The running maximum may fall this far behind the true one, in powers of two, before O is rescaled: P then
# stays below 2**8, well within fp16 and bf16, and sums of it within fp32. When few queries decode, the reference
# follows every step, so that the largest P of a row is exactly 1 and has no rounding error. This is necessary: keys
# with the same weight other than 1 all have the same rounding error, however small each weight is, unless the row's sum
# has it, too (``lags_if_light``).
RESCALE_THRESHOLD = 8.0
EXACT_QUERIES = 8
# Keys of a box where queries are few and see at most SMALL_WINDOW keys, at both ends of which some of a KV tile is
# hidden. On an H200, 128 requests with windows of 128 keys in pages of 64, 32/8 heads of 128, take 0.90 of the time;
# boxes of 16 are as good.
BOX_KEYS, SMALL_WINDOW = 32, 256
APART_KEYS = 512  # of a request, from which on CTAs that read them for different heads get apart


class Schedule(enum.Enum):
    """The ways to assign the tiles of a launch to CTAs."""

    SINGLE = "single tile"  # the one of its number
    PERSISTENT = "persistent"  # one tile per round, a round having as many tiles as there are CTAs
    QUEUE = "queue"  # whole tiles taken from a queue in memory (``device.queue``)
    LINE = "line"  # its chunk of the line of all tiles, cut by length (``line``); it may leave pieces' states


@dataclass(frozen=True)
class Output:
    """The results that a kernel writes for a row.

    dtype, size: dtype and elements of a row of o. normalize: O is divided by the row's sum; otherwise the kernel writes
    its un-normalised state, row_max and row_sum beside o. splits: it writes a state for each split of the keys. means:
    O of a split is divided by the row's sum all the same, in fp16 (``leaves_means``).
    exact_maximum: O is rescaled whenever the maximum moves. sink_dtype: dtype of the sink, if there is one.
    """

    dtype: str = "bfloat16"
    size: int = 64
    has_sink: bool = False
    has_lse: bool = False
    normalize: bool = True
    splits: bool = False
    means: bool = False
    exact_maximum: bool = False
    sink_dtype: str = FLOAT32

    def __post_init__(self):
        assert not (self.splits and (self.normalize or self.has_lse)), "splits write un-normalised states"
        assert self.splits or not self.means

    @classmethod
    def of(cls, problem: AttentionProblem, splits: bool) -> Output:
        """splits: splits of the keys, whose results another kernel combines."""
        normalize = problem.normalize and not splits
        return cls(
            dtype=problem.format.dtype if normalize else FLOAT32,
            size=problem.heads.v_state if splits else problem.heads.v,
            has_sink=problem.has_sink and not splits,
            sink_dtype=problem.sink_dtype,
            has_lse=problem.return_lse and not splits,
            normalize=normalize,
            splits=splits,
            exact_maximum=problem.seq_q <= EXACT_QUERIES,
        )

    def as_means(self) -> Output:
        """These results, of splits, as means."""
        return replace(self, dtype=FLOAT16, means=True)

    @property
    def writes_state(self) -> bool:
        """Whether an un-normalised state is written: row_max and row_sum beside o."""
        return not self.normalize

    @property
    def rescale_threshold(self) -> float:
        """Powers of two that the reference may lag behind the maximum."""
        return 0.0 if self.exact_maximum else RESCALE_THRESHOLD


@dataclass(frozen=True)
class TileScheduler:
    """The assignment of tiles to CTAs, and the way in which a CTA's roles learn of their tiles.

    has_warp: a warp computes the CTA's tiles for all roles and writes them to ``record_count`` records
    (``device.record``). by_producer: that warp is one of the producers, and looks for a tile when it needs one. sorts:
    packed query tiles, or partitions, are taken from the queue longest first (``device.longest``).
    in_step: work that is cut by length is cut alike for all heads, and neighbouring CTAs take one chunk of different
    heads (``device.line``). queries_in_step: likewise for all query tiles of a head. adds_up: CTAs add up the states of
    a tile that is cut; otherwise a second launch joins them. reads_cuts: CTAs do not cut the line themselves, but read
    their chunks from the operand ``cuts`` (``device.cuts``). cuts_ahead: the scheduler warp, or without it the load
    warp, cuts the line before the launch before has ended (``device.cut_ahead``).
    """

    schedule: Schedule = Schedule.SINGLE
    has_warp: bool = False
    by_producer: bool = False
    record_count: int = 1
    sorts: bool = False
    in_step: bool = False
    queries_in_step: bool = False
    adds_up: bool = False
    reads_cuts: bool = False
    cuts_ahead: bool = False

    def __post_init__(self):
        assert self.has_warp or not (self.by_producer or self.schedule is Schedule.QUEUE)
        assert self.schedule is Schedule.QUEUE or not self.sorts
        assert self.schedule is Schedule.LINE or not (self.in_step or self.adds_up)
        assert self.adds_up or not self.reads_cuts
        assert (self.adds_up and not self.reads_cuts) or not self.cuts_ahead
        assert (self.in_step and self.adds_up) or not self.queries_in_step

    @property
    def cuts_tiles(self) -> bool:
        """Whether work is cut by length: CTAs leave states of pieces of tiles."""
        return self.schedule is Schedule.LINE

    @property
    def places_chunks(self) -> bool:
        """Whether all warps of a CTA cut the line (``device.line.place_chunks``)."""
        return self.cuts_tiles and not self.reads_cuts and not self.cuts_ahead

    @property
    def fills_first(self) -> bool:
        """Whether the warp that cuts the line ahead also writes the record of the first tile."""
        return self.cuts_ahead and self.has_warp and not self.by_producer

    @property
    def copies_cuts(self) -> bool:
        """Whether a CTA copies the words of its chunk, if it reads them, to shared memory: roles that find their tiles
        themselves have no registers to keep them in."""
        return self.reads_cuts and (self.by_producer or not self.has_warp)

    @property
    def leaves_joins(self) -> bool:
        """Whether CTAs leave join records, by which another launch joins pieces."""
        return self.cuts_tiles and not self.adds_up

    @property
    def counts(self) -> bool:
        """Whether CTAs share words in global memory that every launch leaves as it found them (``common.workspace``):
        a queue, or those that announce states of pieces."""
        return self.from_queue or self.adds_up

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
        """Bytes of shared memory for the ends of the CTA's chunks, and what is kept of them ahead, or for the words of
        the chunk that it reads."""
        if self.reads_cuts:
            return KEPT_WORDS * WORD_BYTES if self.copies_cuts else 0
        words = 2 * CURSOR_WORDS * MOST_ROUNDS + CUT_WORDS + self.cuts_ahead * (AHEAD_REQUESTS + 1)
        return words * WORD_BYTES if self.cuts_tiles else 0

    @property
    def record_bytes(self) -> int:
        """Bytes of shared memory for the records of tiles."""
        return RECORD_WORDS * WORD_BYTES * self.record_count if self.has_warp else 0

    @property
    def order_bytes(self) -> int:
        """Bytes of shared memory for a word of each request whose tiles are sorted."""
        return SORTED_REQUESTS * WORD_BYTES if self.sorts else 0

    @property
    def word_bytes(self) -> int:
        """Bytes of shared memory for cursors, records and sorted requests."""
        return self.cursor_bytes + self.record_bytes + self.order_bytes

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

    pack: query heads that share an M tile. box_keys: as in ``KvTile``.
    """

    mask: Mask = Mask()
    requests: RequestLayout = RequestLayout()
    logits: LogitMap = PLAIN
    heads: HeadSizes = HeadSizes(64, 64)
    format: Format = Format()
    output: Output = Output()
    scheduler: TileScheduler = TileScheduler()
    pack: int = 1
    box_keys: int = 0

    def __post_init__(self):
        assert not (self.requests.packed_q and self.logits.bias)
        assert not self.requests.page_size or takes_pages(self.requests.page_size)
        assert not (self.output.splits and self.scheduler.cuts_tiles)
        assert not self.queues_partitions or (self.scheduler.sorts and not self.requests.many_queries)

    @property
    def plain_kv(self) -> KvTile:
        """A KV tile of ``tile_n`` keys in 16 bits; ``kv`` of an architecture is it, or its codes."""
        heads, requests = self.heads, self.requests
        return KvTile(self.tile_n, heads, self.format.shared_kv, requests.page_size, box_keys=self.box_keys)

    @property
    def lags_if_light(self) -> bool:
        """Whether references of few queries lag behind maxima that weigh little (``device.softmax.lag_of_light``), and
        row sums are of weights as PV multiplies them: rounded."""
        return False

    @property
    def mean_groups(self) -> int:
        """As in ``CombineConfig``, of means that splits leave."""
        return 0

    @property
    def waits_late(self) -> bool:
        """Whether each role waits for the end of the launch before where it first needs its results, instead of all at
        the start."""
        return False

    @property
    def line_source(self):
        """What the line of work that is cut by length consists of (``device.line.Source``); None: requests."""
        return None

    @property
    def tile_overhead(self) -> int:
        """Length on the line of a query tile's start and end, in KV tiles."""
        return TILE_OVERHEAD

    @property
    def finds_in_memory(self) -> bool:
        """Whether tiles are found by what global memory holds."""
        requests, mask = self.requests, self.mask
        described = requests.has_kv_lengths or requests.has_q_start or requests.packed_q or requests.packed_k
        return described or mask.has_ranges or mask.has_blocks or self.scheduler.from_queue

    @property
    def queues_partitions(self) -> bool:
        """Whether CTAs take partitions of the requests' keys from a queue (``device.partitions``)."""
        return self.output.splits and self.scheduler.from_queue

    @property
    def clears_unseen(self) -> bool:
        """Whether a KV tile may hold keys past those that some row sees, whose V rows are cleared."""
        return (self.mask.band and not self.mask.has_blocks) or self.requests.ends_in_tile

    @property
    def skips_boxes(self) -> bool:
        """Whether boxes of a KV tile without a key that some row sees are not loaded: zeros take their place. Without a
        window there are too few of them."""
        return self.mask.has_left and not self.mask.has_blocks and self.kv.pages > 1

    @property
    def masks_last(self) -> bool:
        """Whether the last KV tiles of a span may need a mask: at a window's left edge, or where the KV length ends in
        a full block."""
        return self.mask.has_left or (self.mask.has_blocks and self.requests.ends_in_tile)

    @property
    def rows(self) -> TileRows:
        """Rows of an M tile."""
        raise NotImplementedError

    @property
    def kv(self) -> KvTile:
        """A KV tile."""
        raise NotImplementedError

    @property
    def codes(self) -> CodeRings:
        """Tiles of K and V in FP8 or NVFP4 as they are loaded."""
        raise NotImplementedError

    @property
    def converts(self) -> bool:
        """Whether four warps convert K and V to 16 bits (``device.convert``)."""
        return self.format.kv_format is not None

    @property
    def p_dtype(self) -> str:
        """dtype of P, and of V in products: fp16 for codes, which it represents exactly, and in which P has three more
        bits."""
        return "float16" if self.format.kv_format and not self.format.shared_kv else self.format.dtype

    @property
    def qk_dtype(self) -> str:
        """dtype of Q and K in products."""
        return self.format.dtype

    def ring_dtype(self, ring: str) -> str:
        """dtype of a ring's 16-bit tiles."""
        return self.p_dtype if ring == "v" else self.qk_dtype

    def load_ring(self, ring: str) -> str:
        """Name of the ring that TMA fills with a ring's tiles."""
        return f"raw_{ring}" if self.converts else ring

    @property
    def load_stages(self) -> int:
        """Stages of each ring that TMA fills."""
        return self.codes.stages

    def load_tile_bytes(self, ring: str) -> int:
        """Bytes that TMA loads for a tile of a ring."""
        return self.codes.tile_bytes if self.converts else self.kv.bytes_of(ring)


def common_fields(problem: AttentionProblem, *, rows_of_cta: int, pack: int, splits: bool) -> dict:
    """The fields of a configuration that follow from the problem. rows_of_cta: query rows of an M tile. pack: heads
    that share it. splits: as in ``Output.of``."""
    requests = problem.requests
    many = requests.packed_q and problem.seq_q > rows_of_cta // pack
    return {
        "mask": problem.mask,
        "requests": replace(requests, many_queries=True) if many else requests,
        "logits": LogitMap.of(problem),
        "heads": problem.heads,
        "format": problem.format,
        "output": Output.of(problem, splits),
        "pack": pack,
        "box_keys": box_keys_of(problem),
    }


def box_keys_of(problem: AttentionProblem) -> int:
    """``AttentionKernel.box_keys`` of a problem: small where a window hides a large part of the first and the last KV
    tile of few queries, which then need not be loaded. Keys of equal, known number often begin with a tile."""
    mask, requests = problem.mask, problem.requests
    right = problem.right
    bounded = mask.has_left and right is not None and mask.key_stride == 1
    more = mask.has_blocks or mask.has_tree or mask.has_ranges
    few = problem.seq_q <= EXACT_QUERIES and (requests.has_kv_lengths or requests.packed_k)
    if more or not (bounded and few) or problem.format.kv_format or problem.format.shared_kv:
        return 0
    return BOX_KEYS if problem.window_left + right + problem.seq_q <= SMALL_WINDOW else 0


def shares_lines(problem) -> bool:
    """Whether few queries read rows of keys that begin and end amid a line of L2, the rest of which is another KV
    head's. Memory sends such lines again if heads of a request are not read at the same time, and they are not if they
    have many keys."""
    few = problem.seq_q <= EXACT_QUERIES and problem.seq_k >= APART_KEYS and problem.heads_kv > 1
    plain = not (problem.format.kv_format or problem.format.shared_kv or problem.bias is not None)
    listed = problem.mask.has_blocks or problem.mask.has_ranges
    return few and plain and not listed and not problem.heads.whole


def check_requests(kernel: str, problem: AttentionProblem) -> None:
    """Raise UnsupportedProblem for more packed requests than kernels search through."""
    if problem.requests.packed_q and problem.batch > MOST_REQUESTS:
        raise UnsupportedProblem(
            f"{kernel} attention: cu_seqlens_q: at most {MOST_REQUESTS} requests are supported, got {problem.batch}"
        )


def check_call(kernel: str, problem: AttentionProblem, code_sizes: tuple[int, ...]) -> None:
    """Raise UnsupportedProblem for what neither architecture's kernel supports. code_sizes: head sizes for which the
    kernel reads the problem's format of quantised keys."""
    check_page_size(kernel, problem.requests.page_size)
    check_requests(kernel, problem)
    if problem.bias_rows == "strided":
        raise UnsupportedProblem(
            f'{kernel} attention: bias: its last dimension must be contiguous ("reference" takes any strides)'
        )
    if problem.format.kv_format and (
        problem.head_dim not in code_sizes or problem.heads.v != problem.head_dim
    ):
        raise UnsupportedProblem(
            f"{kernel} attention: k and v in {problem.format.kv_format} must have one head size of {code_sizes}, got "
            f"{problem.head_dim} and {problem.heads.v}"
        )
