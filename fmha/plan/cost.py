"""One model of the time that a launch takes, whose constants were fitted to timings.

A plan is judged by counted quantities (``work.Work``). ``microseconds`` computes from these:

- the time of a KV tile in a CTA: the maximum, smoothed by a power mean, of what the tensor cores, the exponential
  units, one consumer's chain of products and softmax, the loads' bytes and the loads' latency need;
- the time of the busiest CTA, by how the schedule hands out query tiles;
- the bytes that the call must move, at the GPU's copy speed;
- the launch, the cuts of a line and the second launch that joins or combines.

Lengths that the host does not know are drawn up as scenarios (``scenarios``).

All arithmetic works for numbers and for numpy arrays alike, which is how ``scripts/fit_plans.py`` fits the constants.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from warpspec.common.hardware import FP32_BYTES
from warpspec.fmha.combine import SEGMENT, VECTOR
from warpspec.fmha.join import BATCH, THREADS, TILE_CTAS
from warpspec.fmha.line import FEW_PIECES, LEAST_TILES, PAIR_OVERHEAD, TILE_OVERHEAD
from warpspec.fmha.plan.work import Tiling, Work
from warpspec.fmha.schedule import LEAST_PARTITION, stay_whole

CLOCKS_PER_US = 1755.0  # SM clock, in MHz, that constants in clocks assume
MMA_FLOPS = 4096  # bf16 FLOPs per clock and SM
EXPONENTIALS = 16  # exponentials per clock and SM
UNSORTED = 2.0
GET_APART = 60.0  # microseconds in which CTAs get so far apart that they share nothing in L2
AT_ONCE = 0.3  # part of ``Work.waste`` that is lost before
# By how much more time starts and ends take, and rounds of tiles or splits, if a CTA has two KV heads: no other CTA of
# its SM fills the gaps (docs/records/2026-11-28-head-size-rows.md).
APART_ENDS, APART_ROUNDS = 0.5, 0.05
CROWDED = 0.02  # share of the SMs that may have one more CTA than the others without delaying the launch


class Way(enum.Enum):
    """How CTAs get their query tiles."""

    SINGLE = "one each, in their order as SMs come free"
    PERSISTENT = "one of every round"
    QUEUE = "from a queue, one after another"
    LINE = "a chunk of the line of all, cut by length; a second launch or the CTAs themselves join pieces"
    SPLIT = "one of every round, for each split of the keys, which a second launch combines"
    PARTITIONS = "from a queue, partitions of the keys, of one length, which a second launch combines"


def join_rounds(t: Tiling, w: Work, pieces, ops: Arithmetic):
    """Extra rounds of loads that joining a query tile takes if it has many pieces (``device.join.row_each``)."""
    maximum, minimum, ceil, _ = ops
    ctas = TILE_CTAS[0] + (TILE_CTAS[1] - TILE_CTAS[0]) * minimum(t.row_groups - 1, 1)
    groups = THREADS * VECTOR / minimum(w.depth, SEGMENT)
    rows = w.rows / maximum(w.tiles, 1)
    each = ceil(rows / (ctas * groups)) * ceil(pieces / BATCH)
    shared = ceil(rows / ctas) * (2 + pieces / (BATCH * groups))
    return maximum(minimum(each, shared) - 1, 0)


@dataclass(frozen=True)
class Constants:
    """The model's constants for one family of kernels. A microsecond has CLOCKS_PER_US clocks.

    One KV tile, which is a step of a consumer:
        serial_mma, serial_key, serial_tile: a step's chain of products and softmax takes serial_mma times the clocks of
            its products, plus serial_key clocks for each key, plus serial_tile clocks.
        mma, exponentials: the tensor cores and the exponential units take this multiple of the clocks counted at their
            peak rates.
        turn: clocks that the tensor cores lose in each step of each consumer.
        power: exponent of the power mean that smooths the maximum over units.
        sm_bytes, l2_bytes: bytes per clock that an SM receives from memory, and in all.
        load_power: exponent of the power mean of what an SM receives and what memory delivers to all of them: few SMs
            do not receive all that memory delivers.
        latency: clocks from the request of a KV tile to its arrival.
        box: clocks that issuing one load takes.
        mask, pack_mask: a KV tile with a mask takes ``mask`` more clocks for each key, times pack_mask if several heads
            share a query tile.
        team_RC: time of a step of kernels with R row groups and C CTAs an SM, relative to two row groups. Kernels with
            three row groups have no C of their own.
    One query tile:
        tile, tile_row, pack_ends: start and end take ``tile`` clocks, plus tile_row for each element of the tile's
            rows; both times pack_ends if several heads share a query tile.
        first_tile: share of its first KV tile's bytes whose arrival nothing hides.
        hidden: each further CTA on the SM lengthens start and end by this share.
        single_ends, queue_ends, partition_ends: factor of start and end if each CTA has one tile (SINGLE), or takes
            tiles (QUEUE) or partitions (PARTITIONS) from a queue, which overlaps them with those before and after.
        idle: clocks of a query tile without a query.
        queue: clocks that taking a tile from the queue costs.
    The busiest CTA:
        alone: clocks of a launch's first tile that nothing hides.
        round_, greedy, queue_rest: the share of a last round's idle time that is lost by the ways PERSISTENT and SPLIT,
            SINGLE, and QUEUE.
        relief: 1 if of PERSISTENT's and SPLIT's share only that part is lost which a KV tile takes while few CTAs are
            at work, as a fraction of what it takes while all are; 0 if all of it.
        spread, greedy_spread, queue_spread: for the same three, the number of standard deviations of a tile's length by
            which the busiest CTA exceeds the mean.
        single, queue_last: how many starts and ends remain exposed at the end of a launch of SINGLE and QUEUE.
    The launch:
        launch: microseconds of the launch itself.
        memory, reading: speeds of memory as multiples of the GPU's copy speed: the one that a step's loads see, and the
            one that bounds a launch by its bytes.
        chunk: clocks that starting a chunk of a line takes.
        scan, scan_requests: microseconds of cutting the line, and more for every 32 requests.
        join, join_bytes: microseconds of the launch that joins pieces, and bytes of states that it reads per
            microsecond.
        add, add_more: microseconds in which paired consumers add the state of another piece, up to FEW_PIECES, and of
            each further one, whose columns they share out.
        add_rows: microseconds in which they leave and add a row of a query tile.
        line: factor of the whole time of a launch by LINE.
        combine, combine_bytes: microseconds of the launch that combines split keys, and bytes of states that are
            written and read again per microsecond.
        own_sm: share of the SMs up to which splits get one each; further ones share SMs.
        partition_scan: microseconds of cutting partitions.
        partition_rest, partition_last: the shares of a partition's time, and of its start and end, by which the busiest
            CTA exceeds the mean.
        uneven: weight of scenarios with unequal lengths, relative to that of equal ones (``plan.expectation``).
        combine_round, combine_splits: microseconds of each round of loads, which covers combine_splits splits. Extra
            rounds of a join take combine_round, too.
    """

    serial_mma: float = 0.187
    serial_key: float = 7.513
    serial_tile: float = 60.7
    mma: float = 0.7445
    exponentials: float = 1.42
    power: float = 2.709
    sm_bytes: float = 80.0
    load_power: float = 2.0
    l2_bytes: float = 45.53
    latency: float = 236.0
    box: float = 46.7
    mask: float = 3.633
    tile: float = 1484.0
    tile_row: float = 0.109
    first_tile: float = 0.273
    hidden: float = 0.0684
    alone: float = 640.0
    round_: float = 0.693
    relief: float = 1.0
    greedy: float = 0.188
    spread: float = 0.6272
    greedy_spread: float = 0.7734
    launch: float = 3.41
    memory: float = 1.183
    reading: float = 1.2
    turn: float = 194.3
    chunk: float = 97.25
    scan: float = 1.186
    scan_requests: float = 0.01184
    join: float = 3.581
    join_bytes: float = 2706000.0
    combine: float = 0.8111
    combine_bytes: float = 4229000.0
    own_sm: float = 1.0
    queue: float = 2.25
    pack_mask: float = 2.217
    pack_ends: float = 0.9805
    team_11: float = 0.9829
    team_12: float = 1.035
    team_13: float = 1.063
    team_31: float = 1.034
    single: float = 1.305
    single_ends: float = 1.228
    queue_ends: float = 0.8068
    queue_rest: float = 0.4755
    queue_spread: float = 1.699
    queue_last: float = 2.275
    combine_round: float = 0.7336
    combine_splits: float = 32.0
    idle: float = 3572.0
    line: float = 1.077
    add: float = 2.0
    add_more: float = 0.15
    add_rows: float = 0.0
    partition_scan: float = 3.0
    partition_rest: float = 0.15
    partition_last: float = 0.5
    partition_ends: float = 0.75
    uneven: float = 1.0


class TileTime(NamedTuple):
    """The components of the time that a tile shape takes at one head size.

    unit: sum of the clocks of the tensor cores and of the exponential units for a KV tile of one warpgroup, each raised
    to the power ``Constants.power``. fixed: likewise of a KV tile's serial chain and of its loads' latency. bytes:
    bytes of a KV tile. mask: extra clocks of a KV tile with a mask. ends: clocks of a query tile's start and end. team:
    factor of a KV tile's time.
    """

    unit: float
    fixed: float
    bytes: float
    mask: float
    ends: float
    team: float


def tile_time(t: Tiling, depth, tensors, number, c: Constants, where) -> TileTime:
    """Compute the ``TileTime`` of a tiling.

    depth, tensors, number: as in ``Work``. where: ``numpy.where`` for arrays, ``either`` for numbers.
    """
    columns = depth / t.column_groups
    products = t.rows * t.tile_n * (depth + columns) * 2 / MMA_FLOPS  # clocks of QK and PV for a row group
    exponentials = t.rows * t.tile_n / EXPONENTIALS
    serial = c.serial_mma * products + c.serial_key * t.tile_n + c.serial_tile
    p = c.power
    one_each = where(t.ctas_per_sm == 2, c.team_12, where(t.ctas_per_sm == 3, c.team_13, c.team_11))
    team = where(t.row_groups == 1, one_each, where(t.row_groups == 3, c.team_31, 1.0))
    several = t.pack > 1
    tile_bytes = tensors * t.tile_n * depth * number
    ends = c.tile + c.tile_row * t.row_groups * t.rows * depth + c.first_tile * tile_bytes / c.sm_bytes
    return TileTime(
        unit=(c.mma * products + c.turn) ** p + (c.exponentials * exponentials) ** p,
        fixed=serial**p + (c.latency / t.stages) ** p,
        bytes=tile_bytes,
        mask=c.mask * t.tile_n * where(several, c.pack_mask, 1.0),
        ends=ends * where(several, c.pack_ends, 1.0),
        team=team,
    )


def either(condition, first, second):
    """Do for numbers what ``numpy.where`` does for arrays."""
    return first if condition else second


@lru_cache(maxsize=1024)
def known_tile(t: Tiling, depth: float, tensors: int, number: float, c: Constants) -> TileTime:
    """``tile_time`` for numbers, remembered."""
    return tile_time(t, depth, tensors, number, c, either)


class Arithmetic(NamedTuple):
    """Functions of numbers, or of numpy arrays."""

    maximum: Callable
    minimum: Callable
    ceil: Callable
    where: Callable


NUMBERS = Arithmetic(max, min, math.ceil, either)


class Shares(NamedTuple):
    """How a launch's KV tiles are handed out to CTAs.

    resident: CTAs that run at once. items: query tiles, or their splits or partitions. items_of: of a query tile. ctas:
    CTAs that run on an SM. size: most KV tiles of a partition (``Way.PARTITIONS``). overhead, length, chunks: KV tiles
    that a query tile's ends count as, KV tiles of the whole line with these, and CTAs that take a chunk of it
    (``Way.LINE``).
    """

    resident: float
    items: float
    items_of: float
    ctas: float
    size: float = 0.0
    overhead: float = 0.0
    length: float = 0.0
    chunks: float = 0.0


def shares(w: Work, t: Tiling, way: Way, splits, sms: int, ops: Arithmetic) -> Shares:
    """The ``Shares`` of a launch on ``sms`` SMs."""
    maximum, minimum, ceil, _ = ops
    resident, items, items_of = sms * t.ctas_per_sm, w.tiles * splits, 1
    if way is Way.LINE:
        overhead = TILE_OVERHEAD + (PAIR_OVERHEAD - TILE_OVERHEAD) * minimum(t.column_groups - 1, 1)
        length = w.kv + overhead * w.tiles
        chunks = maximum(minimum(length / LEAST_TILES, resident), 1.0)
        ctas = maximum(minimum(t.ctas_per_sm, chunks / sms), 1.0)
        return Shares(resident, items, items_of, ctas, 0.0, overhead, length, chunks)
    size = 0.0
    if way is Way.SPLIT:
        items_of = splits
    elif way is Way.PARTITIONS:
        size = maximum(ceil(w.longest / splits), LEAST_PARTITION)
        whole = (w.shortest == w.longest) & stay_whole(w.tiles, splits, resident)  # as the device decides
        size = ops.where(whole, maximum(w.longest, 1), size)
        items = minimum(w.kv / size + ops.where(whole, 0, 0.5 * w.tiles), items)
        items_of = items / maximum(w.tiles, 1)
    ctas = maximum(minimum(t.ctas_per_sm, items / sms), t.apart)
    return Shares(resident, items, items_of, ctas, size)


def bytes_of_line(w: Work, t: Tiling, target, ops: Arithmetic):
    """Bytes that a line reads from memory and writes.

    The query tiles of a head follow each other on the line, so n of them read the same keys at n times that are spread
    evenly. Between two of these, CTAs read 1/n of all keys from memory; what is more than L2 holds is read again.
    Paired consumers' CTAs read a request's keys in step.
    """
    again = w.again - target.l2_room / ops.maximum(w.bytes, 1) * w.again_often
    return w.bytes + ops.where(t.column_groups > 1, 0.0, ops.maximum(again, 0.0))


def sent_again(w: Work, way: Way, share: Shares, tile: TileTime, rate, ops: Arithmetic):
    """Bytes that memory sends for rows of keys, divided by the rows' bytes: ``Work.waste`` in full once CTAs that began
    with neighbouring heads at the same time have been under way for so long that L2 does not hold what they share any
    more. Without a queue they begin together only once. rate: of memory, bytes a microsecond."""
    ctas = ops.minimum(share.items, share.resident)
    begun = share.items if way in (Way.QUEUE, Way.PARTITIONS, Way.SINGLE) else ctas
    apart = w.kv * tile.bytes * ctas / (begun * rate)  # microseconds
    return 1 + (w.waste - 1) * (AT_ONCE + (1 - AT_ONCE) * ops.minimum(apart / GET_APART, 1.0))


def step_of(
    w: Work, t: Tiling, tile: TileTime, moved, waste, target, c: Constants, ops: Arithmetic
) -> Callable:
    """A function that returns the clocks of a KV tile, by how many CTAs run beside its own. moved: bytes that are read
    from memory and written. waste: ``sent_again``."""
    maximum, p, of_both, warpgroups = ops.maximum, c.power, c.load_power, t.row_groups * t.column_groups
    fresh = ops.minimum(moved / (w.kv * tile.bytes), 1.0)  # fraction of the loads that come from memory
    memory_rate = c.memory * target.speeds.copy * 1e6  # bytes a microsecond
    rest = tile.fixed + (w.boxes * w.tensors * c.box) ** p
    load = fresh * tile.bytes * waste

    def step(ctas, ctas_here, groups=1.0):
        """Clocks while ``ctas`` CTAs run on its SM and ``ctas_here`` on all SMs together. groups: share of the
        warpgroups that have a query."""
        of_sm, of_memory = ctas / c.sm_bytes, ctas_here * CLOCKS_PER_US / memory_rate  # clocks a byte
        loads = load * (of_sm**of_both + of_memory**of_both) ** (1 / of_both)
        loads = maximum(loads, w.lines * tile.bytes * ctas / c.l2_bytes)
        return ((warpgroups * ctas * groups) ** p * tile.unit + loads**p + rest) ** (1 / p) * tile.team

    return step


def busy_step(
    w: Work, t: Tiling, way: Way, step: Callable, share: Shares, sms: int, c: Constants, ops: Arithmetic
):
    """Clocks of a KV tile while all CTAs are at work. Tiles whose row groups all have a query are mixed with tiles
    where only one has, so that the mean is right."""
    maximum, minimum, ceil, _ = ops
    groups, least = w.groups / maximum(w.kv * t.row_groups, 1), 1 / t.row_groups
    whole = (groups - least) / maximum(1 - least, 0.1)
    if way is Way.LINE:
        beside = share.ctas, share.chunks
        return whole * step(*beside) + (1 - whole) * step(*beside, least)
    most = share.ctas
    if way is Way.SPLIT:
        most = maximum(minimum(t.ctas_per_sm, share.items / (sms * c.own_sm)), 1.0)
    beside = ceil(most - CROWDED), minimum(share.items, share.resident)
    full = step(*beside)
    if ops is not NUMBERS or (t.skips and t.row_groups > 1):
        full = full + t.skips * (1 - whole) * (step(*beside, least) - full)
    return full


class Clocks(NamedTuple):
    """Clocks that the tiles of a launch take. full, alone: a KV tile while all CTAs are at work, and while few are.
    ends, each: the ends of an item and all of it, on average. total: all items. average: KV tiles of an item, no
    clocks.
    """

    full: float
    alone: float
    ends: float
    each: float
    total: float
    average: float


def busy_in_partitions(share: Shares, k: Clocks, c: Constants, ops: Arithmetic):
    """Clocks of the busiest CTA if partitions come from a queue. Most are as long as the longest."""
    busy = (k.total + share.items * c.queue) / ops.minimum(share.resident, share.items)
    few = ops.maximum(share.size - k.average, 0) * k.alone
    shortest = ops.maximum(2 * k.average - share.size, 0)
    rounds = crowded(share.size, shortest, share, k, ops)
    many = ops.maximum(busy + c.partition_rest * k.each + c.partition_last * k.ends, rounds)
    return ops.where(share.items <= share.resident, busy + few, many)


def crowded(longest, shortest, share: Shares, k: Clocks, ops: Arithmetic):
    """Clocks that a CTA takes at least if there are more items than CTAs: with more than n for each, some CTA has n + 1
    of the longest n for each and one. Lengths are taken to follow a power law from the longest to the shortest item, of
    so many KV tiles, which has their mean. The last of the CTA's items runs beside as few others as are left then."""
    maximum, _, ceil, _ = ops
    rounds = maximum(share.items, 1) / share.resident
    before = ceil(rounds) - 1
    place = before / rounds
    power = maximum(k.average - shortest, 0) / maximum(longest - k.average, 1e-6)
    length = longest - (longest - shortest) * place**power
    left = before + 1 - rounds
    last = k.full + left * (ops.minimum(k.alone, k.full) - k.full)
    return before * (length * k.full + k.ends) + length * last + k.ends


def busy_in_rounds(w: Work, way: Way, splits, share: Shares, k: Clocks, c: Constants, ops: Arithmetic):
    """Clocks of the busiest CTA if CTAs take whole query tiles or splits, one of every round or as they come free."""
    maximum, minimum, ceil, where = ops
    total = k.total + share.items * c.queue if way is Way.QUEUE else k.total
    mean = total / minimum(share.resident, share.items)
    longest, spread = ceil(w.longest / splits) if way is Way.SPLIT else w.longest, w.spread / share.items_of
    one = maximum(longest - k.average, 0) * k.alone  # by which the longest tile exceeds the mean one
    short = minimum(w.shortest / share.items_of * k.full + k.ends, k.each)
    launched = share.items + (w.idle if way is Way.PERSISTENT else 0)  # idle splits give way at once
    rounds = ceil(launched / share.resident)
    left = rounds - share.items / share.resident  # share of the last round that is idle
    if way in (Way.PERSISTENT, Way.SPLIT):
        # 1 if the tiles' order says nothing about their lengths, 0 if it sorts them.
        mixed = minimum(UNSORTED * spread / maximum(k.average, 0.1), 1.0)
        lost = c.round_ * (1 - c.relief * (1 - minimum(k.alone / k.full, 1.0)))
        more = left * (lost * short * (1 - mixed) + k.each * mixed)
        more = more + c.spread * spread * k.alone * rounds**0.5
    elif way is Way.SINGLE:
        more = left * c.greedy * short + c.greedy_spread * spread * k.alone + c.single * k.ends
    else:
        unsorted = c.queue_spread * (1 - w.sorts)
        more = left * c.queue_rest * short + unsorted * spread * k.alone + c.queue_last * k.ends
    busy = mean + where(launched <= share.resident, one, maximum(more, one - mean + k.each))
    if way in (Way.SINGLE, Way.QUEUE):
        least = crowded(w.longest, w.shortest, share, k, ops)
        busy = maximum(busy, where(share.items > share.resident, least, 0.0))
    return busy


def combining(w: Work, splits, share: Shares, c: Constants, ops: Arithmetic):
    """Microseconds of the second launch that combines splits or partitions."""
    states = share.items / ops.maximum(w.tiles, 1) + splits  # written, and read
    found = c.combine + states * w.rows * w.depth * FP32_BYTES / c.combine_bytes
    return found + c.combine_round * ops.ceil(splits / c.combine_splits)


def joining(w: Work, t: Tiling, share: Shares, c: Constants, ops: Arithmetic):
    """Microseconds of joining the pieces of a line's query tiles: in a second launch, or by paired consumers
    (``sm90.add_up``)."""
    maximum, minimum, _, where = ops
    tiles = maximum(w.tiles, 1)
    pieces = share.chunks + minimum(share.chunks, tiles)  # of tiles that are cut, or left of these
    states = pieces * w.rows / tiles * w.depth * FP32_BYTES
    pieces = (w.longest + share.overhead) * share.chunks / maximum(share.length, 1) + 1  # of the longest tile
    joined = c.join + states / c.join_bytes
    joined = joined + c.combine_round * join_rounds(t, w, pieces, ops)
    added = c.add * minimum(pieces - 1, FEW_PIECES) + c.add_more * maximum(pieces - 1 - FEW_PIECES, 0)
    added = added + c.add_rows * w.rows / tiles
    return where(t.column_groups > 1, added, joined)


def microseconds(w: Work, t: Tiling, way: Way, splits, target, c: Constants, xp=None):
    """Microseconds of a launch, including the second launch that joins or combines its results.

    w, t: the launch's work and tiling. way: how CTAs get their query tiles. splits: splits of the keys (1: not split).
    target: the ``Target``, of which the number of SMs, L2 and the copy speed count. c: the constants. xp: numpy if
    ``w`` and ``t`` hold arrays, None for numbers.
    """
    if xp is None:
        ops, tile = NUMBERS, known_tile(t, w.depth, w.tensors, w.number, c)
    else:
        ops = Arithmetic(xp.maximum, xp.minimum, xp.ceil, xp.where)
        tile = tile_time(t, w.depth, w.tensors, w.number, c, xp.where)
    sms, share = target.sm_count, shares(w, t, way, splits, target.sm_count, ops)
    moved = bytes_of_line(w, t, target, ops) if way is Way.LINE else w.bytes
    waste = sent_again(w, way, share, tile, target.speeds.copy * 1e6, ops)
    step = step_of(w, t, tile, moved, waste, target, c, ops)
    full = busy_step(w, t, way, step, share, sms, c, ops)
    alone = step(1.0, 0.5 * ops.minimum(share.items, sms))
    mask = tile.mask * ops.maximum(t.row_groups * t.column_groups * share.ctas / 2, 1.0)
    ends = {Way.SINGLE: c.single_ends, Way.QUEUE: c.queue_ends, Way.PARTITIONS: c.partition_ends}.get(
        way, 1.0
    )
    ends = tile.ends * (1 + c.hidden * (share.ctas - 1)) * ends * (1 + APART_ENDS * (t.apart - 1))
    tiles = ops.maximum(w.tiles, 1)
    average = w.kv / tiles / share.items_of
    each = average * full + ends + w.masked / tiles / share.items_of * mask
    idle = w.idle * (1 - w.sorts) if way is Way.QUEUE else 0.0 if way is Way.PARTITIONS else w.idle
    clocks = Clocks(full, alone, ends, each, share.items * each + idle * c.idle, average)
    if way is Way.LINE:
        busy = clocks.total / share.chunks + tile.ends + c.chunk
    elif way is Way.PARTITIONS:
        busy = busy_in_partitions(share, clocks, c, ops)
    else:
        busy = busy_in_rounds(w, way, splits, share, clocks, c, ops)
    if way in (Way.PERSISTENT, Way.SPLIT):
        busy = busy * (1 + APART_ROUNDS * (t.apart - 1))
    reading = moved * waste / (c.reading * target.speeds.copy * 1e6)
    found = c.launch + ops.maximum((busy + c.alone) / CLOCKS_PER_US, reading)
    if way is Way.PARTITIONS:
        found = found + c.partition_scan
    if way in (Way.SPLIT, Way.PARTITIONS):
        found = found + combining(w, splits, share, c, ops)
    if way is Way.LINE:
        found = found + c.scan + c.scan_requests * w.requests / 32
        found = c.line * (found + joining(w, t, share, c, ops))
    return found


# Fitted by scripts/fit_plans.py to timings of scripts/collect_plans.py.
HOPPER = Constants()
# Assumed, not measured: the tensor cores take half the clocks, and memory delivers more to an SM.
BLACKWELL = replace(HOPPER, mma=HOPPER.mma / 2, serial_mma=HOPPER.serial_mma / 2)
