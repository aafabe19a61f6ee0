"""Select: the k largest logits of a row, ties to the lower index, as slots in order of index. One CTA a row.

Logits become 32-bit keys that order like them. The row goes through shared memory a chunk at a time, and what was
chosen of the chunks before goes along. For each chunk: a threshold that k keys reach at least, from the largest of
every eight; the few keys that reach it, listed; among these the k-th largest key, bit by bit; then all keys above it
and, of those equal to it, the first, each to its place by ballots and a scan. Where most keys are alike the list is too
short: then the k-th key is found among all. Nothing depends on the order in which warps run.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.indexer.config import K_LIMIT, SelectConfig

NOTHING = 0  # key of what is not there: of -inf, and past the row's length
SIGN = 0x80000000
TOP_SHIFT = 30  # of the first digit of two bits
COUNT_BITS, COUNT_MASK = 16, 0xFFFF  # a chunk has fewer keys
NO_SLOT = -1
SLACK_SHIFT = 3  # a threshold may let through an eighth more group maxima than are wanted
BATCH = 8  # loads under way together


class Shared(NamedTuple):
    """keys: (CHUNK) of the row's logits. list: (SLOT) candidates' keys. kept_keys, kept: (K_LIMIT) what was chosen of
    earlier chunks, in order. listed: (1), how many candidates. sums: (2, WARP, TURN) of ``add_up``. ballots: (LINE,
    WARP) how many of 32 neighbours are chosen; equal: the same of those equal to the k-th."""

    keys: cute.Tensor
    list: cute.Tensor
    kept_keys: cute.Tensor
    kept: cute.Tensor
    listed: cute.Tensor
    sums: cute.Tensor
    ballots: cute.Tensor
    equal: cute.Tensor


class Select:
    """``Select(config)(...)`` is the host function."""

    def __init__(self, config: SelectConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        lengths: cute.Tensor | None,
        page_table: cute.Tensor | None,
        requests: cute.Tensor | None,
        slots: cute.Tensor,
        counts: cute.Tensor,
        page_size: Int32,
        stream: CUstream,
    ):
        """logits: fp32 [T, N]. lengths: int32 [T]. page_table: int32 [R, pages], requests: int32 [T]. slots: int32
        [T, k]. counts: int32 [T]."""
        self.kernel(logits, lengths, page_table, requests, slots, counts, page_size).launch(
            grid=(logits.shape[0], 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, logits, lengths, page_table, requests, slots, counts, page_size):
        config = self.config
        token, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        lines = config.per_thread + config.kept

        def words(dtype, *shape):
            return smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

        shared = Shared(
            words(Uint32, config.chunk),
            words(Uint32, config.slots),
            words(Uint32, K_LIMIT),
            words(Int32, K_LIMIT),
            words(Int32, 1),
            words(Uint32, 2, WARP_THREADS, 2),
            words(Int32, WARP_THREADS, lines),
            words(Int32, WARP_THREADS, lines),
        )
        length = Int32(logits.shape[1])
        if cutlass.const_expr(config.lengths):
            length = cutlass.max(cutlass.min(Int32(lengths[token]), length), 0)
        k = Int32(slots.shape[1])
        row, result = logits[token, None], slots[token, None]
        kept = Int32(0)
        for chunk in cutlass.range(cute.ceil_div(length, config.chunk), unroll=1):
            first = chunk * config.chunk
            count = cutlass.min(length - first, config.chunk)
            kept = choose(config, shared, row, first, count, kept, k)
        finish(config, shared, page_table, requests, result, counts, page_size, token, kept, k)


@cute.jit
def choose(config: cutlass.Constexpr, shared, row, first, count, kept, k) -> Int32:
    """The k largest of those kept and of ``count`` logits from ``first`` on are kept; returns how many they are."""
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.sync_threads()  # what the chunk before left has been read
    if thread == 0:
        shared.listed[0] = 0
    maxima = cute.make_rmem_tensor(config.per_thread // config.group + config.kept, Uint32)
    load_keys(config, shared, row, first, count, maxima)
    own = config.per_thread // config.group
    for i in cutlass.range_constexpr(config.kept):
        at = thread + i * config.threads
        key = Uint32(NOTHING)
        if at < kept:
            key = shared.kept_keys[at]
        maxima[own + i] = key
    cute.arch.sync_threads()

    # 1. A threshold that at least k keys reach, unless there are fewer: then all that are there.
    bound, turn = search(shared, maxima, k, k + (k >> SLACK_SHIFT), Int32(0))
    # 2. The keys that reach it, listed in any order.
    listed = list_keys(config, shared, maxima, bound)
    # 3. The k-th largest key.
    if listed <= config.slots:
        candidates = cute.make_rmem_tensor(config.slots // config.threads, Uint32)
        for i in cutlass.range_constexpr(config.slots // config.threads):
            at = thread + i * config.threads
            key = Uint32(NOTHING)
            if at < listed:
                key = shared.list[at]
            candidates[i] = key
        # A word below the threshold may be reached by k of the listed keys, and by more of all.
        exact, turn = search(shared, candidates, k, k, turn)
        bound = larger(bound, exact)
    else:
        bound, turn = search_all(config, shared, maxima, k, turn)
    # 4. All above it, and of those equal to it the first.
    return place(config, shared, maxima, first, bound, kept, k)


@cute.jit
def load_keys(config: cutlass.Constexpr, shared, row, first, count, maxima: cute.Tensor):
    """keys of the chunk's logits, and the largest of every ``group`` of a thread."""
    thread, _, _ = cute.arch.thread_idx()
    for batch in cutlass.range_constexpr(config.per_thread // BATCH):
        values = cute.make_rmem_tensor(BATCH, Float32)
        for i in cutlass.range_constexpr(BATCH):
            at = (batch * BATCH + i) * config.threads + thread
            values[i] = -Float32.inf
            if at < count:
                values[i] = row[first + at].to(Float32)
        largest = Uint32(NOTHING)
        for i in cutlass.range_constexpr(BATCH):
            key = key_of(values[i])
            shared.keys[(batch * BATCH + i) * config.threads + thread] = key
            largest = larger(largest, key)
        maxima[batch] = largest


def key_of(value: Float32) -> Uint32:
    """A word that orders like the number: NaN largest, -0 as 0, -inf NOTHING."""
    bits = (value + 0.0).bitcast(Uint32)
    negative = Boolean((bits & Uint32(SIGN)) != 0)
    key = Uint32(cutlass.select_(negative, ~bits, bits | Uint32(SIGN)))
    key = Uint32(cutlass.select_(Boolean(value != value), Uint32(0xFFFFFFFF), key))
    return Uint32(cutlass.select_(Boolean(value == -Float32.inf), Uint32(NOTHING), key))


def larger(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two words; ``cutlass.max`` takes them for signed ones."""
    return Uint32(cutlass.select_(Boolean(a > b), a, b))


@cute.jit
def search(shared, keys: cute.Tensor, least, most, turn) -> tuple:
    """(The largest word that at least ``least`` of all threads' keys (n) reach, or the first found that at most
    ``most`` reach, too, 1 where fewer are there; turn after it.) Two bits a round. turn: of ``add_up``."""
    found, shift = Uint32(0), Int32(TOP_SHIFT)
    while shift >= 0:
        low, high = Uint32(0), Uint32(0)
        for i in cutlass.range_constexpr(cute.size(keys)):
            low, high = count(keys[i], found, shift, low, high)
        found, total = decide(found, shift, add_up(shared, low, high, turn), least)
        turn = 1 - turn
        stop = Boolean(total >= least) & Boolean(total <= most)
        shift = Int32(cutlass.select_(stop, Int32(-1), shift - 2))
    return larger(found, Uint32(1)), turn


@cute.jit
def search_all(config: cutlass.Constexpr, shared, maxima, k, turn) -> tuple:
    """(The k-th largest of all keys, turn after it), as ``search``."""
    thread, _, _ = cute.arch.thread_idx()
    found, shift = Uint32(0), Int32(TOP_SHIFT)
    while shift >= 0:
        low, high = Uint32(0), Uint32(0)
        for i in cutlass.range_constexpr(config.per_thread):
            low, high = count(shared.keys[i * config.threads + thread], found, shift, low, high)
        for i in cutlass.range_constexpr(config.kept):
            low, high = count(maxima[config.per_thread // config.group + i], found, shift, low, high)
        found, total = decide(found, shift, add_up(shared, low, high, turn), k)
        turn = 1 - turn
        shift = Int32(cutlass.select_(Boolean(total == k), Int32(-1), shift - 2))
    return larger(found, Uint32(1)), turn


def count(key: Uint32, found: Uint32, shift, low: Uint32, high: Uint32) -> tuple:
    """Counts of keys that reach found with the digit 1 and, in the upper half, 2 at ``shift``; with the digit 3."""
    one, two, three = (Boolean(key >= (found | (Uint32(digit) << Uint32(shift)))) for digit in (1, 2, 3))
    low += Uint32(cutlass.select_(one, Uint32(1), Uint32(0)))
    low += Uint32(cutlass.select_(two, Uint32(1 << COUNT_BITS), Uint32(0)))
    return low, high + Uint32(cutlass.select_(three, Uint32(1), Uint32(0)))


def decide(found: Uint32, shift, totals: tuple, least) -> tuple:
    """(found with the largest digit at ``shift`` that ``least`` keys reach, how many do; 0 where the digit is 0)."""
    low, high = totals
    counts = (Int32(low & Uint32(COUNT_MASK)), Int32(low >> COUNT_BITS), Int32(high))
    digit, total = Uint32(0), Int32(0)
    for value, reach in enumerate(counts, 1):
        enough = Boolean(reach >= least)
        digit = Uint32(cutlass.select_(enough, Uint32(value), digit))
        total = Int32(cutlass.select_(enough, reach, total))
    return found | (digit << Uint32(shift)), total


@cute.jit
def add_up(shared, low: Uint32, high: Uint32, turn) -> tuple:
    """Both words' sums over all threads: a warp's by lane 0 to shared memory, and those by every warp. turn: 0 or 1,
    the other than that of the call before, whose sums somebody may still read."""
    low = Uint32(cute.arch.warp_redux_sync(low, "add"))
    high = Uint32(cute.arch.warp_redux_sync(high, "add"))
    lane, warp = cute.arch.lane_idx(), cute.arch.thread_idx()[0] // WARP_THREADS
    if lane == 0:
        shared.sums[0, warp, turn], shared.sums[1, warp, turn] = low, high
    cute.arch.sync_threads()
    low = Uint32(cute.arch.warp_redux_sync(shared.sums[0, lane, turn], "add"))
    return low, Uint32(cute.arch.warp_redux_sync(shared.sums[1, lane, turn], "add"))


@cute.jit
def list_keys(config: cutlass.Constexpr, shared, maxima, bound) -> Int32:
    """Lists the keys that reach ``bound``, as far as the list goes; returns how many they are."""
    thread, _, _ = cute.arch.thread_idx()
    groups = config.per_thread // config.group
    for group in cutlass.range_constexpr(groups):
        if maxima[group] >= bound:
            for i in cutlass.range_constexpr(config.group):
                key = shared.keys[(group * config.group + i) * config.threads + thread]
                if key >= bound:
                    append(config, shared, key)
    for i in cutlass.range_constexpr(config.kept):
        if maxima[groups + i] >= bound:
            append(config, shared, maxima[groups + i])
    cute.arch.sync_threads()
    return shared.listed[0]


@cute.jit
def append(config: cutlass.Constexpr, shared, key):
    """One key to the list, by any thread."""
    at = cute.arch.atomic_add(shared.listed.iterator, Int32(1), sem="relaxed", scope="cta")
    if at < config.slots:
        shared.list[at] = key


@cute.jit
def place(config: cutlass.Constexpr, shared, maxima, first, bound, kept, k) -> Int32:
    """Keys above ``bound``, and as many equal to it as are wanted, become what is kept, in order of index. Those kept
    before come first: their indices are lower. Returns how many are kept."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    lines = config.kept + config.per_thread
    groups = config.per_thread // config.group
    keys = [maxima[groups + i] for i in range(config.kept)]
    indices = cute.make_rmem_tensor(config.kept, Int32)
    for i in cutlass.range_constexpr(config.kept):
        at = thread + i * config.threads
        indices[i] = Int32(0)
        if at < kept:
            indices[i] = shared.kept[at]
    # How many of 32 neighbours, by line (a multiple of threads apart) and warp.
    for line in cutlass.range_constexpr(lines):
        key = key_at(config, shared, keys, line, thread)
        above = cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(key > bound)))
        equal = cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(key == bound)))
        if lane == 0:
            shared.ballots[warp, line], shared.equal[warp, line] = above, equal
    cute.arch.sync_threads()
    all_above = scan(shared.ballots, lines, warp, lane)
    all_equal = scan(shared.equal, lines, warp, lane)
    cute.arch.sync_threads()
    wanted = cutlass.min(k - all_above, all_equal)
    for line in cutlass.range_constexpr(lines):
        key = key_at(config, shared, keys, line, thread)
        above, equal = Boolean(key > bound), Boolean(key == bound)
        above_before = shared.ballots[warp, line] + before(cute.arch.vote_ballot_sync(above))
        equal_before = shared.equal[warp, line] + before(cute.arch.vote_ballot_sync(equal))
        chosen = above | (equal & Boolean(equal_before < wanted))
        if chosen:
            at = above_before + cutlass.min(equal_before, wanted)
            index = first + (line - config.kept) * config.threads + thread
            if cutlass.const_expr(line < config.kept):
                index = indices[line]
            shared.kept_keys[at], shared.kept[at] = key, index
    return all_above + wanted


def key_at(config, shared, keys: list, line: int, thread) -> Uint32:
    """The thread's key in a line: those kept before, then the chunk's."""
    if line < config.kept:
        return keys[line]
    return shared.keys[(line - config.kept) * config.threads + thread]


def before(ballot) -> Int32:
    """Lanes below this one in a ballot."""
    return cute.arch.popc(ballot & Int32(cute.arch.lanemask_lt()))


@cute.jit
def scan(numbers: cute.Tensor, lines: cutlass.Constexpr, warp, lane) -> Int32:
    """numbers (WARP, LINE) become what stands before each, line by line; returns the sum. Each warp its lines, twice
    over: a line's sum first, then all lines'. Ends with a barrier."""
    sums = Int32(0)
    for first in cutlass.range_constexpr(0, lines, WARP_THREADS):
        line = first + warp
        if line < lines:
            value = numbers[lane, line]
            total = running(value, lane)
            numbers[lane, line] = total - value
            if lane == WARP_THREADS - 1:
                numbers[0, line] = total  # its own, 0, is known
    cute.arch.sync_threads()
    for first in cutlass.range_constexpr(0, lines, WARP_THREADS):
        value = Int32(0)
        if first + lane < lines:
            value = numbers[0, first + lane]
        total = running(value, lane)
        start = sums + total - value
        sums += cute.arch.shuffle_sync(total, WARP_THREADS - 1)
        cute.arch.sync_threads()  # all warps have read the lines' sums
        mine = cute.arch.shuffle_sync(start, warp)
        line = first + warp
        if line < lines:
            before_line = numbers[lane, line]
            if lane == 0:
                before_line = Int32(0)
            numbers[lane, line] = before_line + mine
    cute.arch.sync_threads()
    return sums


def running(value: Int32, lane) -> Int32:
    """The sum over this lane and those below."""
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        value += Int32(cutlass.select_(Boolean(lane >= distance), other, Int32(0)))
    return value


@cute.jit
def finish(
    config: cutlass.Constexpr, shared, page_table, requests, result, counts, page_size, token, kept, k
):
    """What is kept as slots; behind it NO_SLOT."""
    thread, _, _ = cute.arch.thread_idx()
    cute.arch.sync_threads()
    for at in cutlass.range(thread, k, config.threads, unroll=1):
        slot = Int32(NO_SLOT)
        if at < kept:
            slot = shared.kept[at]
            if cutlass.const_expr(config.table):
                request = Int32(requests[token])
                page, within = slot // page_size, slot % page_size
                slot = Int32(NO_SLOT)
                if (request >= 0) & (request < page_table.shape[0]) & (page < page_table.shape[1]):
                    number = Int32(page_table[request, page])
                    if number >= 0:
                        slot = number * page_size + within
        result[at] = slot
    if thread == 0:
        counts[token] = kept


def host_and_arguments(config: SelectConfig) -> tuple:
    """The host function and its arguments but the stream."""
    return (
        Select(config),
        fake_rows(Float32, 2),
        fake_rows(Int32, 1) if config.lengths else None,
        fake_rows(Int32, 2) if config.table else None,
        fake_rows(Int32, 1) if config.table else None,
        fake_rows(Int32, 2),
        fake_rows(Int32, 1),
        Int32(1),
    )


SELECT = Kernel("indexer.select", host_and_arguments)  # by SelectConfig
