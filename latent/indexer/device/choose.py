"""Choose: the k largest keys of a chunk and of those kept from earlier chunks; ties go to the lower index. One CTA.

Keys are 32-bit words that order like logits. A chunk takes four steps. 1. Find a threshold that at least k keys reach,
from the largest key of every group of eight. 2. List the few keys that reach it. 3. Find the k-th largest of the list
by histograms of eight bits at a time. 4. Set a bit for each key above the k-th and a bit for each key equal to it; a
scan over the bits gives each its place in order of index. Where most keys are equal the list is too short, and step 3
runs over all keys. The result does not depend on the order in which warps run.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from warpspec.common.device.warp import running_sum
from warpspec.common.hardware import WARP_THREADS
from warpspec.latent.indexer.config import BINS, HISTOGRAMS, K_LIMIT, SelectConfig

NOTHING = 0  # key of -inf and of places past the row's length
SIGN = 0x80000000
KEY_BITS, DIGIT_BITS = 32, 8
SLACK_SHIFT = 3  # the threshold may let through an eighth more group maxima than are wanted
LANE_BINS = BINS // WARP_THREADS
# Halves of a word with two counts: keys above the k-th; below it, keys equal to it.
HALF_BITS, HALF_MASK = (16, 0xFFFF)


class SelectStorage(NamedTuple):
    """Shared memory of a CTA that chooses.

    keys: (CHUNK) of the row's logits. list, listed_at: (SLOT) the candidates' keys and places. kept_keys, kept:
    (K_LIMIT, TURN) keys and indices kept from earlier chunks, in order of index. listed: (1) how many are listed. bins:
    (BIN, HISTOGRAM). above, equal: (WORD) a bit for each place, set if its key is above the k-th, or equal to it. sums:
    (WARP).

    A place is the number of a kept key, or K_LIMIT plus a key's number in the chunk; places are in order of index.
    """

    keys: cute.Tensor
    list: cute.Tensor
    listed_at: cute.Tensor
    kept_keys: cute.Tensor
    kept: cute.Tensor
    listed: cute.Tensor
    bins: cute.Tensor
    above: cute.Tensor
    equal: cute.Tensor
    sums: cute.Tensor


def allocate(config: SelectConfig) -> SelectStorage:
    """Allocate the regions of shared memory."""
    smem = cutlass.memory.SmemAllocator()

    def words(dtype, *shape):
        return smem.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=16)

    return SelectStorage(
        words(Uint32, config.chunk),
        words(Uint32, config.listed),
        words(Int32, config.listed),
        words(Uint32, K_LIMIT, 2),
        words(Int32, K_LIMIT, 2),
        words(Int32, 1),
        words(Int32, BINS, HISTOGRAMS),
        words(Uint32, config.place_words),
        words(Uint32, config.place_words),
        words(Uint32, WARP_THREADS),
    )


def meet(config: SelectConfig) -> None:
    """Barrier of the threads that choose."""
    if config.barrier:
        cute.arch.barrier(barrier_id=config.barrier, number_of_threads=config.threads)
    else:
        cute.arch.sync_threads()


@cute.jit
def begin(config: cutlass.Constexpr, shared):
    """Clear histograms and sums; the barrier at the start of ``choose`` makes this visible."""
    thread, _, _ = cute.arch.thread_idx()
    flat = cute.make_tensor(shared.bins.iterator, cute.make_layout(BINS * HISTOGRAMS))
    for i in cutlass.range(thread, BINS * HISTOGRAMS, config.threads, unroll=1):
        flat[i] = 0
    if thread < WARP_THREADS:
        shared.sums[thread] = Uint32(0)  # entries of warps that do not exist stay 0


def key_of(value: Float32) -> Uint32:
    """A word that orders like the number: NaN is largest, -0 equals 0, -inf is NOTHING."""
    bits = (value + 0.0).bitcast(Uint32)
    negative = Boolean((bits & Uint32(SIGN)) != 0)
    key = Uint32(cutlass.select_(negative, ~bits, bits | Uint32(SIGN)))
    key = Uint32(cutlass.select_(Boolean(value != value), Uint32(0xFFFFFFFF), key))
    return Uint32(cutlass.select_(Boolean(value == -Float32.inf), Uint32(NOTHING), key))


def larger(a: Uint32, b: Uint32) -> Uint32:
    """The larger of two unsigned words; ``cutlass.max`` compares them as signed."""
    return Uint32(cutlass.select_(Boolean(a > b), a, b))


def value_of(key: Uint32) -> Float32:
    """Inverse of ``key_of`` for numbers and NaN."""
    bits = cutlass.select_(Boolean((key & Uint32(SIGN)) != 0), key ^ Uint32(SIGN), ~key)
    return Uint32(bits).bitcast(Float32)


@cute.jit
def choose(config: cutlass.Constexpr, shared, maxima: cute.Tensor, first, kept, turn, step, k) -> tuple:
    """Keep the k largest of the keys kept so far and of the chunk's, whose logits begin at index ``first``.

    maxima: those of the thread's groups, with room for the kept keys after them. turn: which buffer holds the kept
    keys. step: as in ``search``. Returns (how many are kept, turn, step).
    """
    thread, _, _ = cute.arch.thread_idx()
    for i in cutlass.range(thread, config.place_words, config.threads, unroll=1):
        shared.above[i], shared.equal[i] = Uint32(0), Uint32(0)
    if thread == 0:
        shared.listed[0] = 0
    for i in cutlass.range_constexpr(config.kept):
        at = thread + i * config.threads
        key = Uint32(NOTHING)
        if at < kept:
            key = shared.kept_keys[at, turn]
        maxima[config.groups + i] = key
    meet(config)

    # 1. A threshold that at least k keys reach; if there are fewer keys, one that all of them reach.
    zero = Uint32(0)
    bound, step = search(
        config, shared, maxima, False, zero, Int32(KEY_BITS), k, k + (k >> SLACK_SHIFT), step
    )
    bound = larger(bound, Uint32(1))
    # 2. List the keys that reach it, in any order.
    listed, largest = list_keys(config, shared, maxima, bound)
    # 3. Find the k-th largest key, if there are k; set a bit for each place above it, and for each place equal to it.
    bits = Int32(cute.arch.bfind(largest - bound)) + 1
    if listed <= config.listed:
        candidates = cute.make_rmem_tensor(config.listed // config.threads, Uint32)
        for i in cutlass.range_constexpr(config.listed // config.threads):
            at = thread + i * config.threads
            key = Uint32(NOTHING)
            if at < listed:
                key = shared.list[at]
            candidates[i] = key
        if listed > k:
            bound, step = search(config, shared, candidates, False, bound, bits, k, k, step)
        for i in cutlass.range_constexpr(config.listed // config.threads):
            if candidates[i] >= bound:
                mark(shared, candidates[i], bound, shared.listed_at[thread + i * config.threads])
    else:
        bound, step = search(config, shared, maxima, True, bound, bits, k, k, step)
        mark_all(config, shared, maxima, bound)
    meet(config)
    # 4. Keep all above it, and the first of those equal to it.
    return keep(config, shared, first, turn, k), 1 - turn, step


@cute.jit
def search(
    config: cutlass.Constexpr,
    shared,
    keys: cute.Tensor,
    everything: cutlass.Constexpr,
    low,
    bits,
    least,
    most,
    step,
) -> tuple:
    """(threshold, step after it): the largest word from ``low`` on that at least ``least`` keys reach.

    The search takes eight bits at a time, with a histogram each. It stops early at a word that at most ``most`` keys
    reach. If fewer than ``least`` keys are there, the threshold is low. keys: (n), the thread's. everything: search the
    chunk's keys and the kept ones, which are the end of ``keys``. bits: the lowest bits, in which keys may differ from
    low. step: counts histograms; they take turns, the next one being cleared while one is filled.
    """
    thread, _, _ = cute.arch.thread_idx()
    above = Int32(0)
    while bits > 0:
        shift = cutlass.max(bits - DIGIT_BITS, 0)
        limit, histogram = Uint32(1) << Uint32(bits - shift), step % HISTOGRAMS
        if thread < BINS:
            shared.bins[thread, (step + 1) % HISTOGRAMS] = 0
        if cutlass.const_expr(everything):
            for i in cutlass.range(config.per_thread, unroll=4):
                count(shared, shared.keys[i * config.threads + thread], low, shift, limit, histogram)
            for i in cutlass.range_constexpr(config.kept):
                count(shared, keys[config.groups + i], low, shift, limit, histogram)
        else:
            for i in cutlass.range_constexpr(cute.size(keys)):
                count(shared, keys[i], low, shift, limit, histogram)
        meet(config)
        digit, above, total = narrow(shared.bins[None, histogram], above, least)
        low = low + (Uint32(digit) << Uint32(shift))
        stop = Boolean(total <= most)
        bits = Int32(cutlass.select_(stop, Int32(0), shift))
        step += 1
    return low, step


@cute.jit
def count(shared, key: Uint32, low: Uint32, shift, limit: Uint32, histogram):
    """Count a key in the histogram, if it is there and within the histogram's span."""
    digit = (key - low) >> Uint32(shift)
    if (key >= larger(low, Uint32(1))) & (digit < limit):
        cute.arch.atomic_add(shared.bins.iterator + (histogram * BINS + Int32(digit)), Int32(1))


@cute.jit
def narrow(bins: cute.Tensor, above: Int32, least) -> tuple:
    """Find the digit at which ``least`` keys are reached, counted from the histogram's top. Executed by every warp.

    above: keys beyond the histogram. Returns (the largest digit that at least ``least`` keys reach, keys beyond that
    digit, keys that reach it), or (0, above, all) if fewer reach it.
    """
    lane = cute.arch.lane_idx()
    own = cute.make_rmem_tensor(LANE_BINS, Int32)
    cute.autovec_copy(cute.local_tile(bins, (LANE_BINS,), (lane,)), own)
    mine = own[0]
    for i in cutlass.range_constexpr(1, LANE_BINS):
        mine += own[i]
    reach = mine
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync_down(reach, distance)
        reach += Int32(cutlass.select_(Boolean(lane + distance < WARP_THREADS), other, Int32(0)))
    reach += above  # keys that reach this lane's first bin
    enough = Uint32(cute.arch.vote_ballot_sync(Boolean(reach >= least)))
    source = Int32(cutlass.select_(Boolean(enough == 0), Int32(0), Int32(cute.arch.bfind(enough))))
    # Among that lane's bins, find the last one that enough keys reach.
    past = reach - mine
    digit, found_past, total = lane * LANE_BINS, past + mine - own[0], reach
    running = past
    for i in cutlass.range_constexpr(LANE_BINS - 1, 0, -1):
        hit = Boolean(running < least) & Boolean(running + own[i] >= least)
        digit = Int32(cutlass.select_(hit, lane * LANE_BINS + i, digit))
        found_past = Int32(cutlass.select_(hit, running, found_past))
        running += own[i]
        total = Int32(cutlass.select_(hit, running, total))
    return tuple(Int32(cute.arch.shuffle_sync(value, source)) for value in (digit, found_past, total))


@cute.jit
def list_keys(config: cutlass.Constexpr, shared, maxima, bound) -> tuple:
    """List the keys that reach ``bound``, as many as fit; returns how many reach it, and the largest key."""
    thread, _, _ = cute.arch.thread_idx()
    largest = maxima[0]
    for i in cutlass.range_constexpr(1, config.groups + config.kept):
        largest = larger(largest, maxima[i])
    for group in cutlass.range_constexpr(config.groups):
        if maxima[group] >= bound:
            for i in cutlass.range_constexpr(config.group):
                at = (group * config.group + i) * config.threads + thread
                if shared.keys[at] >= bound:
                    append(config, shared, shared.keys[at], K_LIMIT + at)
    for i in cutlass.range_constexpr(config.kept):
        if maxima[config.groups + i] >= bound:
            append(config, shared, maxima[config.groups + i], thread + i * config.threads)
    largest = Uint32(cute.arch.warp_redux_sync(largest, "umax"))
    if thread % WARP_THREADS == 0:
        shared.sums[thread // WARP_THREADS] = largest
    meet(config)
    largest = Uint32(cute.arch.warp_redux_sync(shared.sums[thread % WARP_THREADS], "umax"))
    return shared.listed[0], largest


@cute.jit
def append(config: cutlass.Constexpr, shared, key, place):
    """Append one key to the list; any thread may call it."""
    at = cute.arch.atomic_add(shared.listed.iterator, Int32(1), sem="relaxed", scope="cta")
    if at < config.listed:
        shared.list[at], shared.listed_at[at] = key, place


@cute.jit
def mark(shared, key: Uint32, bound: Uint32, place):
    """Set a place's bit in ``above`` or ``equal``; its key reaches the bound."""
    bit = Uint32(1) << Uint32(place % WARP_THREADS)
    if key > bound:
        cute.arch.atomic_or(shared.above.iterator + place // WARP_THREADS, bit)
    else:
        cute.arch.atomic_or(shared.equal.iterator + place // WARP_THREADS, bit)


@cute.jit
def mark_all(config: cutlass.Constexpr, shared, maxima, bound):
    """Set the bits of all places."""
    thread, _, _ = cute.arch.thread_idx()
    warps = config.threads // WARP_THREADS
    for line in cutlass.range(config.kept + config.per_thread, unroll=1):
        key = Uint32(NOTHING)
        if line < config.kept:
            for i in cutlass.range_constexpr(config.kept):
                key = Uint32(cutlass.select_(Boolean(line == i), maxima[config.groups + i], key))
        else:
            key = shared.keys[(line - config.kept) * config.threads + thread]
        above = cute.arch.vote_ballot_sync(Boolean(key > bound))
        equal = cute.arch.vote_ballot_sync(Boolean(key == bound))
        if thread % WARP_THREADS == 0:
            word = line * warps + thread // WARP_THREADS
            shared.above[word], shared.equal[word] = Uint32(above), Uint32(equal)


@cute.jit
def keep(config: cutlass.Constexpr, shared, first, turn, k) -> Int32:
    """Copy the marked keys to the other buffer in order of place; of those equal to the bound, only as many as wanted.

    Each thread has adjacent words of places. Returns how many keys are kept.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    above = cute.make_rmem_tensor(config.own_words, Uint32)
    equal = cute.make_rmem_tensor(config.own_words, Uint32)
    above.fill(0), equal.fill(0)
    mine = Int32(0)
    for i in cutlass.range_constexpr(config.own_words):
        if thread * config.own_words + i < config.place_words:
            above[i], equal[i] = (
                shared.above[thread * config.own_words + i],
                shared.equal[thread * config.own_words + i],
            )
        mine += (Int32(cute.arch.popc(above[i])) << HALF_BITS) + Int32(cute.arch.popc(equal[i]))
    before = running_sum(mine, lane)
    if lane == WARP_THREADS - 1:
        shared.sums[warp] = Uint32(before)
    meet(config)
    warps = running_sum(Int32(shared.sums[lane]), lane)
    everything = Int32(cute.arch.shuffle_sync(warps, WARP_THREADS - 1))
    lower = Int32(cute.arch.shuffle_sync(warps, cutlass.max(warp - 1, 0)))
    before += Int32(cutlass.select_(Boolean(warp > 0), lower, Int32(0))) - mine
    wanted = cutlass.min(k - (everything >> HALF_BITS), everything & HALF_MASK)
    at_above, at_equal = before >> HALF_BITS, before & HALF_MASK
    for i in cutlass.range_constexpr(config.own_words):
        left = above[i] | equal[i]
        while left != 0:
            bit = left & (Uint32(0) - left)
            place = (thread * config.own_words + i) * WARP_THREADS + Int32(cute.arch.bfind(bit))
            is_above = Boolean((above[i] & bit) != 0)
            if is_above | Boolean(at_equal < wanted):
                copy_kept(shared, place, first, turn, at_above + cutlass.min(at_equal, wanted))
            at_above += Int32(is_above)
            at_equal += 1 - Int32(is_above)
            left = left ^ bit
    meet(config)
    return (everything >> HALF_BITS) + wanted


@cute.jit
def copy_kept(shared, place, first, turn, to):
    """Copy a place's key and index to the other buffer."""
    key, index = Uint32(0), Int32(0)
    if place < K_LIMIT:
        key, index = shared.kept_keys[place, turn], shared.kept[place, turn]
    else:
        key, index = shared.keys[place - K_LIMIT], first + place - K_LIMIT
    shared.kept_keys[to, 1 - turn], shared.kept[to, 1 - turn] = key, index
