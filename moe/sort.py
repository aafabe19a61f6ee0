"""Sorting by expert as a kernel, for sm_90a and sm_100a: ids to rows, offsets and the list of work, in one launch.

One CTA sorts: a stable counting sort. Every warp has a stretch of the choices, in order. It counts them by expert; a
prefix sum over (expert, warp) gives the first row of each warp's choices of each expert; the warp then goes through its
stretch again. Within 32 choices ``match.sync`` finds who has the same expert. Nothing is left to chance: the order of
rows is that of ``permute.sort_tokens``, bit for bit. The other CTAs, where there are any, meanwhile write the tokens as
activations in the order of ``streamed.column_order``.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import MAX_SMEM_PER_CTA, QUAD, VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.nvfp4 import BLOCK
from warpspec.moe.permute import DROPPED, SortedTokens
from warpspec.moe.streamed import CHUNK, padded_k

INT32_BYTES, WORD_BYTES = 4, 4
FEW_CHOICES, FEW_WARPS, MANY_WARPS = 1024, 4, 32
BATCH = 4  # groups of 32 choices whose loads are issued together
WORK_COLUMNS = 4
COPY_THREADS_PER_SM = 512  # at most, of the CTAs that write activations
WHOLE_WARP = 0xFFFFFFFF
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
VECTOR_COLUMNS = VECTOR_BYTES // 2  # bf16


@dataclass(frozen=True)
class SortConfig:
    """experts: E, with the shared ones. shared: the last so many of them, which every token takes. choices: k, without
    them. warps: of the CTA. widths: of classes of entries of work, the widest first: an entry has as many rows as that
    at most, an expert's last entry is of the last class that holds it; (): there is no list. reorders: tokens become
    activations.
    """

    experts: int
    choices: int
    shared: int = 0
    warps: int = FEW_WARPS
    widths: tuple[int, ...] = ()
    reorders: bool = False

    def __post_init__(self):
        if self.smem_bytes > MAX_SMEM_PER_CTA:
            raise UnsupportedProblem(f"experts: {self.experts} are more than the sort has room for")

    @property
    def taken(self) -> int:
        """Choices of a token, with the shared experts."""
        return self.choices + self.shared

    @property
    def threads(self) -> int:
        return self.warps * WARP_THREADS

    @property
    def bins(self) -> int:
        """Experts, and one more for choices of none."""
        return self.experts + 1

    @property
    def counters(self) -> int:
        return self.bins * self.warps

    @property
    def smem_bytes(self) -> int:
        return (self.counters + 2 * self.warps) * INT32_BYTES


class SortChoices:
    """``SortChoices(config)(...)`` is the host function of ``sort_choices``."""

    def __init__(self, config: SortConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        source: cute.Tensor,
        position: cute.Tensor,
        offsets: cute.Tensor,
        work: cute.Tensor | None,
        x: cute.Tensor | None,
        activations: cute.Tensor | None,
        ctas: Int32,
        stream: CUstream,
    ):
        """ids: [T, k]. source: [T * taken]. position: [T, taken]. offsets: [E]. work: [entries + 1, 4]. x: [T, H/2]
        words. activations: [T, padded H / 2] words. ctas: 1, or more that write activations."""
        self.kernel(ids, source, position, offsets, work, x, activations).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, ids, source, position, offsets, work, x, activations):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        counters = smem.allocate_tensor(Int32, cute.make_layout(config.counters), byte_alignment=VECTOR_BYTES)
        totals = smem.allocate_tensor(Int32, cute.make_layout((config.warps, 2)), byte_alignment=VECTOR_BYTES)
        cute.arch.griddepcontrol_launch_dependents()
        if block == 0:
            sort(config, ids, source, position, offsets, work, counters, totals, thread)
        elif cutlass.const_expr(config.reorders):
            reorder(config, x, activations, thread, block - 1)


@cute.jit
def sort(config: cutlass.Constexpr, ids, source, position, offsets, work, counters, totals, thread):
    """The one CTA that sorts. counters (EXPERT WARP), totals (WARP, 2): shared memory."""
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    total = Int32(ids.shape[0]) * config.taken
    group = WARP_THREADS * BATCH
    stretch = cute.ceil_div(cute.ceil_div(total, config.warps), group) * group
    begin = cutlass.min(warp * stretch, total)
    end = cutlass.min(begin + stretch, total)
    for i in cutlass.range(thread, config.counters, config.threads):
        counters[i] = Int32(0)
    cute.arch.sync_threads()

    # 1. How many choices of every expert each warp has.
    for first in cutlass.range(begin, end, group, unroll=1):
        bins = load_bins(config, ids, first + lane, end)
        for i in cutlass.range_constexpr(BATCH):
            if bins[i] >= 0:  # whichever lane adds first: a sum
                at = bins[i] * config.warps + warp
                cute.arch.atomic_add(counters.iterator + at, Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()

    # 2. The first row of each; the experts' ends; the list of work.
    scan(config, counters, config.counters, totals[None, 0], thread)
    for expert in cutlass.range(thread, config.experts, config.threads):
        offsets[expert] = counters[(expert + 1) * config.warps]
    if cutlass.const_expr(len(config.widths) > 0):
        list_work(config, counters, totals[None, 1], work, thread)
    cute.arch.sync_threads()

    # 3. Every choice's row.
    for first in cutlass.range(begin, end, group, unroll=1):
        bins = load_bins(config, ids, first + lane, end)
        for i in cutlass.range_constexpr(BATCH):
            same, rank = alike(bins[i], lane)
            if bins[i] >= 0:
                row = counters[bins[i] * config.warps + warp] + rank
                choice = first + i * WARP_THREADS + lane
                source[row] = choice
                kept = Int32(cutlass.select_(Boolean(bins[i] < config.experts), row, Int32(DROPPED)))
                position[choice // config.taken, choice % config.taken] = kept
            cute.arch.sync_warp()
            count_bin(config, counters, bins[i], warp, same, lane)


@cute.jit
def load_bins(config: cutlass.Constexpr, ids, first, end) -> cute.Tensor:
    """(BATCH): the bins of choices first, first + 32, ...: an expert, or the last for none; -1 from ``end`` on."""
    bins = cute.make_rmem_tensor(BATCH, Int32)
    for i in cutlass.range_constexpr(BATCH):
        choice = first + i * WARP_THREADS
        found = Int32(-1)
        if choice < end:
            which = choice % config.taken
            found = config.experts + which - config.taken  # of a shared expert
            if which < config.choices:
                found = Int32(ids[choice // config.taken, which])
                if (found < 0) | (found >= config.experts - config.shared):
                    found = Int32(config.experts)
        bins[i] = found
    return bins


def alike(value: Int32, lane) -> tuple:
    """(mask of the lanes with this lane's value, how many of them come before it)."""
    same = cute.arch.match_sync(WHOLE_WARP, value)
    before = (Uint32(1) << Uint32(lane)) - Uint32(1)
    return same, Int32(cute.arch.popc(same & before))


@cute.jit
def count_bin(config: cutlass.Constexpr, counters, value, warp, same, lane):
    """The first lane of each value adds how many there are. By a whole warp."""
    if (value >= 0) & ((same & ((Uint32(1) << Uint32(lane)) - Uint32(1))) == 0):
        at = value * config.warps + warp
        counters[at] = counters[at] + Int32(cute.arch.popc(same))
    cute.arch.sync_warp()


@cute.jit
def scan(config: cutlass.Constexpr, values, size: cutlass.Constexpr, totals, thread):
    """values (size) in shared memory become the sums of all before them. By the CTA, which is synchronised."""
    share = -(-size // config.threads)
    own = Int32(0)
    for i in cutlass.range(share, unroll=1):
        if thread * share + i < size:
            own += values[thread * share + i]
    running = sum_before(config, own, totals, thread)
    for i in cutlass.range(share, unroll=1):
        at = thread * share + i
        if at < size:
            value = values[at]
            values[at] = running
            running += value
    cute.arch.sync_threads()


@cute.jit
def sum_before(config: cutlass.Constexpr, own: Int32, totals, thread) -> Int32:
    """The sum of ``own`` of all threads before this one. totals (WARP): shared memory. Synchronises the CTA."""
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    inclusive = own
    for bit in cutlass.range_constexpr(WARP_THREADS.bit_length() - 1):
        got = Int32(cute.arch.shuffle_sync_up(inclusive, 1 << bit))
        inclusive += Int32(cutlass.select_(Boolean(lane >= 1 << bit), got, Int32(0)))
    if lane == WARP_THREADS - 1:
        totals[warp] = inclusive
    cute.arch.sync_threads()
    before = inclusive - own
    for other in cutlass.range_constexpr(config.warps):
        before += Int32(cutlass.select_(Boolean(warp > other), totals[other], Int32(0)))
    return before


@cute.jit
def list_work(config: cutlass.Constexpr, counters, totals, work, thread):
    """work: (where each class ends), then (expert, first row, rows) of every expert's rows, cut by the widest class's
    width; class by class, in each by expert."""
    share = -(-config.experts // config.threads)
    end = Int32(0)
    for number in cutlass.range_constexpr(len(config.widths)):
        own = Int32(0)
        for i in cutlass.range(share, unroll=1):
            expert = thread * share + i
            if expert < config.experts:
                own += entries_of(config, number, rows_of(config, counters, expert))
        entry = end + sum_before(config, own, totals, thread)
        for warp in cutlass.range_constexpr(config.warps):
            end += totals[warp]
        for i in cutlass.range(share, unroll=1):
            expert = thread * share + i
            if expert < config.experts:
                rows = rows_of(config, counters, expert)
                begin = Int32(0)
                if cutlass.const_expr(number > 0):
                    begin = rows // config.widths[0] * config.widths[0]
                for j in cutlass.range(entries_of(config, number, rows), unroll=1):
                    entry += 1
                    at = begin + j * config.widths[0]
                    work[entry, 0] = expert
                    work[entry, 1] = counters[expert * config.warps] + at
                    work[entry, 2] = cutlass.min(rows - at, config.widths[0])
        if thread == 0:
            work[0, number] = end
        cute.arch.sync_threads()


def entries_of(config, number: int, rows) -> Int32:
    """Entries of a class that an expert of so many rows has."""
    narrower = (*config.widths, 0)[number + 1]
    left = rows % config.widths[0]
    last = Int32((left > narrower) & (left <= config.widths[number]))
    return last if number else rows // config.widths[0] + last


def rows_of(config, counters, expert) -> Int32:
    """Rows of an expert, from prefix sums."""
    return Int32(counters[(expert + 1) * config.warps]) - Int32(counters[expert * config.warps])


@cute.jit
def reorder(config: cutlass.Constexpr, x, activations, thread, block):
    """The other CTAs: 16 bytes of an activation row at a time, from four words of the token's."""
    vectors = activations.shape[1] // VECTOR_WORDS
    blocks = cute.arch.grid_dim()[0] - 1
    for index in cutlass.range(
        block * config.threads + thread, activations.shape[0] * vectors, blocks * config.threads, unroll=1
    ):
        token, vector = index // vectors, index % vectors
        place = vector * VECTOR_COLUMNS
        chunk, s, high = place // CHUNK, place % CHUNK // BLOCK, place % BLOCK // VECTOR_COLUMNS
        words = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
        for q in cutlass.range_constexpr(QUAD):
            column = chunk * CHUNK + q * BLOCK + s * QUAD + high * 2
            words[q] = Uint32(0)
            if column // 2 < x.shape[1]:
                words[q] = x[token, column // 2]
        cute.autovec_copy(words, cute.local_tile(activations[token, None], (VECTOR_WORDS,), (vector,)))


def _host_and_arguments(config: SortConfig) -> tuple:
    """The host function and its arguments but the stream."""
    return (
        SortChoices(config),
        fake_rows(Int32, 2),
        fake_rows(Int32, 1),
        fake_rows(Int32, 2),
        fake_rows(Int32, 1),
        fake_rows(Int32, 2, WORK_COLUMNS) if config.widths else None,
        fake_rows(Uint32, 2) if config.reorders else None,
        fake_rows(Uint32, 2, alignment=VECTOR_BYTES) if config.reorders else None,
        1,
    )


sort_kernel = Kernel("moe.sort", _host_and_arguments)  # by SortConfig


def entries_bound(rows: int, experts: int, most: int) -> int:
    """Most entries of work that rows of experts can make, each of at most ``most`` rows."""
    return rows // most + min(experts, rows)


def sort_choices(
    topk_ids: torch.Tensor,
    experts: int,
    *,
    shared: int = 0,
    widths: tuple[int, ...] = (),
    x: torch.Tensor | None = None,
    target: Target | None = None,
) -> tuple[SortedTokens, torch.Tensor | None, torch.Tensor | None, object]:
    """Sorts the choices topk_ids [T, k] (int32) by expert, in one launch without synchronisation.

    experts: E, the last ``shared`` of which every token takes as further choices and no id names; ids outside of the
    others are dropped. widths: as of ``SortConfig``. x: bf16 [T, H], becomes activations.

    Returns (sorted tokens of k + shared choices; work int32 [entries + 1, 4]: (where each class ends), then (expert,
    first row, rows, -), by class and expert, or None; activations bf16 [T, padded H] or None; the simulator's report
    or None).
    """
    tokens, choices = topk_ids.shape
    taken = choices + shared
    count = tokens * taken
    target = target or target_of(topk_ids.device)

    def empty(*shape, dtype=torch.int32):
        return torch.empty(*shape, dtype=dtype, device=topk_ids.device)

    result = SortedTokens(empty(count), empty(tokens, taken), empty(experts))
    work = empty(entries_bound(count, experts, widths[0]) + 1, WORK_COLUMNS) if widths else None
    activations, ctas = None, 1
    config = SortConfig(
        *(experts, choices, shared, FEW_WARPS if count <= FEW_CHOICES else MANY_WARPS, widths, x is not None)
    )
    if x is not None:
        activations = empty(tokens, padded_k(x.shape[1]), dtype=torch.bfloat16)
        most = target.sm_count * COPY_THREADS_PER_SM // config.threads
        ctas += min(-(-activations.numel() // (VECTOR_COLUMNS * config.threads)), max(1, most))
    words = [None if t is None else t.view(torch.uint32) for t in (x, activations)]
    report = sort_kernel.run(
        config, target, topk_ids, result.source, result.position, result.offsets, work, *words, ctas
    )
    return result, work, activations, report
