"""The order in which CTAs take key tiles, and the number of pieces into which a key tile's steps are cut.

A *row* is a KV head of a batch row (or of all packed requests together); every row has the same key tiles. CTAs are
numbered by section (some rows), within it by key tile, then by row, then by piece. ``decode`` is arithmetic that the
host and kernels share; ``choose_order`` is a model of cost on the host. Where many query heads share a KV head, slices
of them are rows of their own: under a causal mask a row's key tiles go through its heads at different speeds, so they
read all of its heads at once. All pieces of a key tile then add to one sum of dK and dV.

Under a causal mask a row's first key tiles have the most query tiles. So within a section the longest CTAs come first
and short ones fill the end: with several times as many CTAs as SMs, the busiest SM has no more than the mean plus one
of the shortest CTAs. But what the rows of a section read and add to should stay in L2: so a section has just a few more
CTAs than there are SMs, and more rows as long as these bytes fit. If all key tiles have the same work, a section is a
row. If dQ is added up in order, sections are as under a causal mask: CTAs that run at the same time then belong to few
key tiles of each row, and the last of them waits for few others.

One CTA may have too much work: in B1 32/8 S2048, causal, the longest key tile has twice an SM's share, and no order
helps. Then tiles are cut into pieces of at most this many steps, and the last kernel adds up their dK and dV in the
order of the pieces. Each piece costs a write and a read of dK and dV in fp32, and the start and end of a CTA. Where
batch rows have different steps, all tiles are cut into the same number of pieces instead.

Where CTAs make few rounds on the SMs, it may be best to cut the last rows' key tiles alone (``rounds``). With lists of
blocks, of which the host knows no key tile's length, only heads are sliced (``lists``).

Packed requests are cut by the device (``pieces``): it knows their lengths, and cuts only long key tiles, those of all
rows or of the last sections alone (``lengths``). If all queries see all keys of their request, there are no sections:
CTAs go through the requests, the longest first, and within one through its KV heads (``runs``). So the last CTAs are
short, and what CTAs read together stays in L2. The host decides only whether cutting is possible, there by guessed
lengths (``guesses``), as it does how heads are sliced.

Worst case: the busiest SM has at most the mean plus the longest CTA. ``choose_order`` expects this if the lengths are
as the problem says; with kv_lengths it does not know the longest CTA; with packed requests the longest CTA is at most
the longest piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from warpspec.common.hardware import FP32_BYTES, H200_SPEEDS
from warpspec.common.launch import Target
from warpspec.fmha.backward import guesses, lists, rounds, runs
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.pieces import PieceLength, may_cut, most_further
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.sections import L2_SHARE, ctas_of, piece_counts, read_together, section_of
from warpspec.fmha.backward.work import even, row_bytes, tile_spans, tile_steps
from warpspec.fmha.tiles import ELEMENT_BYTES

# Microseconds on an H200.
STEP_US = {64: 2.4, 128: 2.25, 192: 3.6, 256: 3.1, 512: 4.2}  # a step, by D of the tile
CTA_US = 6.3  # start and end of a CTA, beside its steps
# The same of packed requests whose queries see all of their keys; the part of STEP_US that a step of theirs takes.
RUN_CTA_US, RUN_STEP = 2.8, 0.93
JOIN_US = 3.0  # a further launch
JOIN_BYTES_US = 2.5e6  # bytes of pieces' sums written or read in a microsecond
ORDERED_COST = 2.0  # what a piece of packed requests costs with a fixed order, over what it costs in any
SLICED_US = 1.5  # what a CTA with a slice of heads takes beside CTA_US, for it adds dK and dV to sums
# What a step takes longer if nothing that it reads and adds to, STEP_BYTES, is in an H200's L2.
BEYOND_US = 0.45
STEP_BYTES = 64 << 10
# With lists of blocks: how fast reads miss L2 as these pass its size; how much longer a step takes, as a part of the
# time in which memory moves what all SMs miss.
LISTED_MISSES, LISTED_BEYOND = 4.0, 0.5

MOST_PIECES = 32
LAST_WAIT = 0.15  # fraction of the longest CTA's time that an SM waits in the end, where CTAs are more
LEAST_GAIN = 0.03  # fraction of the time that cutting tiles must save
BEYOND_L2 = 1.9  # reads of concurrent key tiles, in L2 sizes, from which heads_inside gains
SLICES_BEYOND_L2 = 2.05  # the same of slices
INNER_HEADS = 2
WHOLE_HEADS = 6  # query heads of a KV head up to which slices of packed requests lost, at eight shapes
DEALT_HEADS = 4  # the same of equal rows, whose order is simulated
SLICE_HEADS = 4  # of a slice, at most
SLICE_BYTES = 1.25  # reads of concurrent key tiles of a slice, in L2 sizes, at most
SLICE_STEPS = 14  # of a key tile's slice of packed requests, on average, from which slices gain
FEW_CTAS = 1.05  # key tiles, in SMs, up to which slices gain although all heads would fit L2
FEW_HEADS = 2  # of such a slice; of one of packed requests, at least
ONE_HEAD_BEYOND_L2 = 3.6  # L2 sizes read together, from which a slice has one head if there is no other
COUNTED_ROUNDS = 16  # CTAs per SM from which the mean predicts the busiest SM's load


class Order(NamedTuple):
    """An order of CTAs.

    pieces: pieces of a key tile, or of the longest key tile if tiles are cut by length. section: rows of a section.
    slices: slices of a KV head's query heads; each of them is a row. whole: rows, of the first sections, that are not
    cut. most: steps up to which a CTA has more heads than a slice, with lists of blocks.
    """

    pieces: int
    section: int
    slices: int = 1
    whole: int = 0
    most: int = 0


class CutTiles(NamedTuple):
    """Key tiles cut by length. most: the most steps of a piece. pieces: number of pieces of all key tiles of a row."""

    most: int
    pieces: int


def decode(tiles, rows, pieces, section, index, minimum=min) -> tuple:
    """(key tile, row, piece) of the index-th CTA. tiles: tiles of a row. Ints or Int32."""
    first = index // (section * tiles * pieces) * section
    index = index - first * tiles * pieces
    size = minimum(section, rows - first) * pieces  # the last section may be short
    rest = index % size
    return index // size, first + rest // pieces, rest % pieces


@lru_cache(maxsize=4096)
def choose_order(problem: BackwardProblem, config: BackwardKernel, target: Target) -> Order:
    """Choose the order with the least time by the model above. config: the main kernel's, cut or not."""
    if config.mask.has_blocks and not config.deterministic:
        return listed_order(problem, config, -(-max(problem.forward.seq_k, 1) // config.tile_n), target)
    if config.keeps_requests and config.can_cut and (config.wanted.k or config.wanted.v):
        return run_order(problem, config, target)
    steps = sorted(tile_steps(problem, config), reverse=True)
    if is_dealt(problem, config, target):
        slices, found = dealt(problem, config, target)
        return Order(found.pieces, found.section, slices, found.whole)
    pieces = choose_pieces(problem, config, steps, target)
    if in_rows(config, steps):
        return Order(pieces, 1)
    slices = slices_of(problem, config, steps, target)
    if slices > 1:
        steps = [each // slices for each in steps]
        pieces = choose_pieces(problem, config, steps, target, slices)
    ctas = ctas_of(problem, config, steps, pieces)
    return Order(pieces, section_of(problem, config, target, ctas, slices), slices)


def is_dealt(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """Whether the order is chosen by simulation (``rounds``): the host knows all key tiles, may cut them, and they are
    not too many."""
    tiles, rows = tile_steps(problem, config), problem.forward.heads_kv * problem.forward.batch
    few = len(tiles) * rows <= rounds.MOST_CTAS * target.sm_count // config.column_groups
    wanted = config.wanted.k or config.wanted.v
    return bool(config.alike and few and wanted and any(tiles) and not is_uncut(problem, config))


def is_uncut(problem: BackwardProblem, config: BackwardKernel) -> bool:
    """Whether no key tile may be cut. The gradient of a bias that heads or batch rows share is summed in a fixed order
    launch by launch."""
    ordered_bias = problem.deterministic and config.wanted.bias == "sum"
    return bool(not config.can_cut or config.mask.has_blocks or config.inner_heads or ordered_bias)


def may_slice(problem: BackwardProblem, config: BackwardKernel) -> bool:
    """Whether heads may be sliced: pieces then add to dK and dV in any order."""
    return config.can_slice and not problem.deterministic and (config.wanted.k or config.wanted.v)


def side_by_side(config: BackwardKernel, target: Target) -> int:
    """CTAs that a target runs at a time, where those that share a key tile count as one."""
    return max(target.sm_count // config.column_groups, 1)


@lru_cache(maxsize=4096)
def dealt(problem: BackwardProblem, config: BackwardKernel, target: Target) -> tuple[int, rounds.Dealt]:
    """Choose the order by simulation: (slices, the order and its time)."""
    forward, sms, found = problem.forward, side_by_side(config, target), {}
    gradients, tiles = config.wanted.k + config.wanted.v, tile_steps(problem, config)
    steps = sorted(tiles, reverse=True)
    left = 2 * gradients * config.tile_n * forward.head_dim * FP32_BYTES / JOIN_BYTES_US
    for slices in dealt_slices(problem, config, steps, target):
        costs = rounds.Costs(CTA_US, left, JOIN_US)
        count, all_left = forward.heads_kv * forward.batch, 0.0
        if slices > 1:  # pieces add to sums that stay in L2, one for each key tile
            costs, all_left = rounds.Costs(CTA_US + SLICED_US, 0.0, 0.0), JOIN_US + left * len(tiles) * count
        rows = rounds.Rows(
            tuple(each // slices for each in tiles),
            count * slices,
            lambda ctas, slices=slices: (
                1 if in_rows(config, steps) else section_of(problem, config, target, ctas, slices)
            ),
            lambda ctas, section, slices=slices: step_us(
                problem, config, steps, target, (ctas, section, slices)
            ),
            () if config.heads_inside or in_rows(config, steps) else (2,),
        )
        limit = math.nextafter(min(found.values()).time - all_left, math.inf) if found else math.inf
        dealt = rounds.best(rows, sms, costs, limit)
        found[slices] = dealt._replace(time=dealt.time + all_left)
    slices = min(found, key=found.__getitem__)
    return slices, found[slices]


def main_us(problem: BackwardProblem, config: BackwardKernel, target: Target) -> float:
    """Predict the microseconds of a main kernel in the chosen order."""
    if is_dealt(problem, config, target):
        return dealt(problem, config, target)[1].time
    order = choose_order(problem, config, target)
    steps = [each // order.slices for each in sorted(tile_steps(problem, config), reverse=True)]
    return expected_us(problem, config, steps, target, order.pieces, order.slices)


def step_us(
    problem: BackwardProblem,
    config: BackwardKernel,
    steps: Sequence[int],
    target: Target,
    rows: tuple[int, int, int],
) -> float:
    """Predict the microseconds of a step. What the rows that CTAs work on together read and add to is partly not in L2
    if it is more than L2 holds. steps: of the key tiles, sorted. rows: (CTAs of a row, rows of a section, slices)."""
    forward, (ctas, section, slices) = problem.forward, rows
    together = max(section, -(-side_by_side(config, target) // max(ctas, 1)))
    read = min(together, forward.heads_kv * forward.batch * slices) * row_bytes(problem) / slices
    if in_rows(config, steps):  # key tiles of a row go through the heads in step
        read /= max(forward.group // slices, 1)
    beyond = 0.0 if config.heads_inside else max(1 - L2_SHARE * target.l2_bytes / max(read, 1), 0.0)
    size = config.tile_m * forward.head_dim * (2 * ELEMENT_BYTES + FP32_BYTES) / target.speeds.copy
    return STEP_US[config.heads.qk] + BEYOND_US * H200_SPEEDS.copy * beyond * size / STEP_BYTES


def dealt_slices(
    problem: BackwardProblem, config: BackwardKernel, steps: Sequence[int], target: Target
) -> list[int]:
    """Into how many slices a KV head's query heads may be cut, where the order is simulated."""
    forward, group = problem.forward, problem.forward.group
    most = rounds.MOST_CTAS * target.sm_count // (len(steps) * forward.heads_kv * forward.batch)
    if group <= DEALT_HEADS or not may_slice(problem, config):
        return [1]
    if forward.window_left is not None and even(steps):
        return [1]  # key tiles go through the heads in step
    return [n for n in range(1, min(group, max(most, 1)) + 1) if group % n == 0]


def slices_of(problem: BackwardProblem, config: BackwardKernel, steps: Sequence[int], target: Target) -> int:
    """Into how many slices a KV head's query heads are cut, where the order is not simulated. 1, but where there are
    many heads, and either too few key tiles of packed requests for the SMs, which as many pieces cost more than slices
    of FEW_HEADS heads, or key tiles that run together read SLICES_BEYOND_L2 times as much as L2 holds: then the least
    number that leaves a slice at most SLICE_HEADS heads and little more to read than L2 holds. With a window, key tiles
    go through the heads in step, and read one at a time.

    steps: of each key tile. Slices of packed requests have at least SLICE_STEPS on average, and FEW_HEADS heads, unless
    these do not divide the group and key tiles read ONE_HEAD_BEYOND_L2 times as much as L2 holds."""
    forward, packed = problem.forward, config.requests.packed_k
    group = forward.group
    if forward.window_left is not None and even(steps):
        return 1
    if group <= WHOLE_HEADS or not may_slice(problem, config):
        return 1
    most, rows = group, forward.heads_kv * (1 if packed else forward.batch)
    if packed:
        fraction = min(forward.least_q / (forward.batch * max(forward.seq_q, 1)), 1.0)
        most = int(fraction * sum(steps) / max(len(steps), 1) / SLICE_STEPS)
    few = group // FEW_HEADS
    fewer = rows * ctas_of(problem, config, steps, 1) <= FEW_CTAS * target.sm_count
    if fewer and group % FEW_HEADS == 0 and few <= most:
        return few if packed else 1
    together = read_together(problem, config, steps, target)
    if together < SLICES_BEYOND_L2 * target.l2_bytes:
        return 1
    numbers = [n for n in range(2, group + 1) if group % n == 0 and group // n <= SLICE_HEADS]
    fitting = [n for n in numbers if together <= n * SLICE_BYTES * target.l2_bytes]
    if not packed:
        return next((n for n in fitting or [group] if n <= most), 1)
    several = [n for n in numbers if group // n >= FEW_HEADS]
    found = [n for n in fitting if n in several] or several[-1:]
    if not several and together >= ONE_HEAD_BEYOND_L2 * target.l2_bytes:
        found = [group]
    return next((n for n in found if n <= most), 1)


def run_order(problem: BackwardProblem, config: BackwardKernel, target: Target) -> Order:
    """The order of packed requests whose queries see all of their keys (``guesses``)."""
    forward, sms = problem.forward, side_by_side(config, target)
    guessed = [
        [
            runs.Request(
                -(-length // config.tile_m) * forward.group,
                -(-max(length * forward.seq_k // forward.seq_q, 1) // config.tile_n) * count,
            )
            for length, count in lengths
        ]
        for lengths in guesses.guessed_lengths(forward.batch, forward.seq_q, forward.least_q)
    ]
    numbers = [1]
    if may_slice(problem, config):
        numbers = [n for n in range(1, forward.group + 1) if forward.group % n == 0]
    found = guesses.choose(guessed, forward.heads_kv, numbers, sms, run_costs(problem, config))
    steps = [each // found.slices for each in tile_steps(problem, config)]
    ctas = ctas_of(problem, config, steps, 1)
    section = section_of(problem, config, target, ctas, found.slices)
    return Order(1 + found.cut, section, found.slices)


def run_costs(problem: BackwardProblem, config: BackwardKernel) -> guesses.Costs:
    """Microseconds of packed requests whose queries see all of their keys."""
    sums = 2 * (config.wanted.k + config.wanted.v) * config.tile_n * problem.forward.head_dim * FP32_BYTES
    return guesses.Costs(STEP_US[config.heads.qk] * RUN_STEP, RUN_CTA_US, JOIN_US, sums / JOIN_BYTES_US)


def listed_order(problem: BackwardProblem, config: BackwardKernel, tiles: int, target: Target) -> Order:
    """The order with lists of blocks (``lists``). tiles: key tiles of a row."""
    forward, gradients, sms = problem.forward, config.wanted.k + config.wanted.v, side_by_side(config, target)
    rows, group = forward.heads_kv * forward.batch, forward.group
    sums = 2 * gradients * tiles * rows * config.tile_n * forward.head_dim * FP32_BYTES
    steps = lists.steps_of(forward, config.tile_m, config.tile_n)[:tiles]
    mean = sum(steps) / len(steps)
    found = lists.choose(
        steps,
        (rows, group),
        sorted({-(-group // n) for n in range(1, group + 1)}) if may_slice(problem, config) else [1],
        sms,
        lists.Starts(CTA_US, CTA_US + SLICED_US, JOIN_US + sums / JOIN_BYTES_US),
        lambda slices: section_of(problem, config, target, tiles, slices),
        lambda slices, section: listed_step_us(problem, config, mean, target, (tiles, section, slices)),
    )
    return Order(1, found.section, found.slices, most=found.most)


def listed_step_us(
    problem: BackwardProblem, config: BackwardKernel, mean: float, target: Target, rows: tuple[int, int, int]
) -> float:
    """Predict the microseconds of a step with lists of blocks, as ``step_us``. What is not in L2 any more is read, and
    sums are read and written, once for the key tiles of a row that work on it together. How many these are depends on
    the lists: of tiles with drawn blocks as many as their density says, of neighbouring ones in a window nearly all, up
    to those that visit a block of queries. So it is taken to lie between these. mean: steps of a key tile and head."""
    forward, (tiles, section, slices) = problem.forward, rows
    sms, query_tiles = side_by_side(config, target), -(-forward.seq_q // config.tile_m)
    together = min(max(section, -(-sms // tiles)), forward.heads_kv * forward.batch * slices)
    each = max(sms / together, 1.0)  # key tiles of a row
    density = mean / query_tiles
    size = together * row_bytes(problem) * min(each * density, 1.0) / slices
    missing = min(max(size / (L2_SHARE * target.l2_bytes) - 1, 0.0) * LISTED_MISSES, 1.0)
    visits = mean * config.tile_m / forward.mask.block_size[0]
    shared = math.sqrt(max(each * density, 1.0) * max(min(each, visits), 1.0))
    moved = sms * config.tile_m * forward.head_dim * 2 * (ELEMENT_BYTES + FP32_BYTES)
    return STEP_US[config.heads.qk] + LISTED_BEYOND * missing * moved / (target.speeds.copy * 1e6) / shared


def in_rows(config: BackwardKernel, steps: Sequence[int]) -> bool:
    """Whether sections are single rows, because all key tiles have the same work."""
    unknown = config.requests.packed_q or config.requests.packed_k or config.requests.has_kv_lengths
    unknown = unknown or config.mask.has_blocks
    return not (unknown or config.deterministic) and even(steps)


def reads_beyond_l2(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """Whether key tiles that run together, taking one head of a group after another, read so much more than L2 holds
    that ``heads_inside`` is better, although it allows fewer numbers of pieces."""
    forward = problem.forward
    if forward.group == 1 or forward.requests.packed_q or config.mask.has_blocks:
        return False
    steps = sorted(tile_steps(problem, config), reverse=True)
    if in_rows(config, steps):
        return False
    if forward.group > WHOLE_HEADS and may_slice(problem, config):
        return False
    if read_together(problem, config, steps, target) < BEYOND_L2 * target.l2_bytes:
        return False
    inside = replace(config, heads_inside=True)
    pieces = [choose_pieces(problem, each, steps, target) for each in (config, inside)]
    times = [expected_us(problem, config, steps, target, each) for each in pieces]
    return times[1] < (1 + LEAST_GAIN) * times[0]


def inner_heads_of(problem: BackwardProblem, config: BackwardKernel, section: int, target: Target) -> int:
    """``inner_heads`` of a kernel with heads inside and a fixed order: few if the key tiles of a section, which read
    all of its heads, have more than L2 holds, and all have as many steps, so that nobody waits at the next heads.
    section: rows of it, as in ``Order``."""
    if not config.deterministic or config.mask.has_blocks or problem.forward.group <= INNER_HEADS:
        return 0
    if not even(tile_steps(problem, config)):
        return 0
    return INNER_HEADS if section * row_bytes(problem) > L2_SHARE * target.l2_bytes else 0


def choose_pieces(
    problem: BackwardProblem, config: BackwardKernel, steps: Sequence[int], target: Target, slices: int = 1
) -> int:
    """Choose the number of pieces with the least time; 1 if cutting gains little. If the device cuts: 2 if it may have
    to. steps: of the key tiles of a row, the most first."""
    if is_uncut(problem, config):
        return 1
    if config.requests.packed_k:
        return 2 if slices > 1 else 1 + cuts_packed(problem, config, steps, target)
    numbers = range(1, MOST_PIECES + 1)
    times = {n: expected_us(problem, config, steps, target, n, slices) for n in numbers}
    best = min(times, key=times.__getitem__)
    return best if times[best] < (1 - LEAST_GAIN) * times[1] else 1


def cut_tiles(problem: BackwardProblem, config: BackwardKernel, order: Order) -> CutTiles:
    """The cut that the host makes of key tiles by length, for an order."""
    spans = [(after, steps // order.slices) for after, steps in tile_spans(problem, config)]
    most = max(-(-max((steps for _, steps in spans), default=0) // order.pieces), 1)
    begins = [after % most if config.heads_inside else 0 for after, _ in spans]
    counts = (-(-(begin + steps) // most) for begin, (_, steps) in zip(begins, spans, strict=True) if steps)
    return CutTiles(most, sum(counts) + sum(not steps for _, steps in spans))


def piece_length(
    problem: BackwardProblem,
    config: BackwardKernel,
    target: Target,
    slices: int = 1,
    section: int | None = None,
) -> PieceLength:
    """The numbers by which the device cuts the key tiles of packed requests, where each slice of heads is a row.
    section: rows of a section; None: as they would be chosen."""
    forward, sms = problem.forward, side_by_side(config, target)
    gradients, rows = config.wanted.k + config.wanted.v, forward.heads_kv * slices
    left = 2 * gradients * config.tile_n * forward.head_dim * FP32_BYTES  # there and back
    step, share, cta = STEP_US[config.heads.qk], rows / sms, CTA_US
    if config.keeps_requests:
        step, cta = step * RUN_STEP, RUN_CTA_US
    cost = left / JOIN_BYTES_US * rows / step * (ORDERED_COST if config.deterministic else 1.0)
    requests = max(min(forward.batch, 2 * forward.least_q / forward.seq_q), 1.0)
    total = sum(tile_steps(problem, config)) * requests
    ctas, total = ctas_of(problem, config, tile_steps(problem, config), 1), total / slices
    if config.keeps_requests:
        further = math.ceil(min(runs.FURTHER * sms, max(total * rows, 1.0)))
        return PieceLength(cta / step, share, cost, 1.0, further)
    last = min((section or section_of(problem, config, target, ctas, slices)) / rows, 1.0)
    return PieceLength(cta / step, share, cost, last, most_further(share, last, total))


def cuts_packed(
    problem: BackwardProblem, config: BackwardKernel, steps: Sequence[int], target: Target
) -> bool:
    """Whether to let the device cut, supposing that all requests but the longest are equal."""
    forward = problem.forward
    others = max(forward.batch - 1, 1)
    fraction = min(max(forward.least_q / forward.seq_q - 1, 0.0) / others, 1.0)  # of the longest one's
    most, count = round(fraction * steps[0]), round(fraction * len(steps))
    shorter = [min(each, most) for each in sorted(steps)[:count]]
    length, tiles = piece_length(problem, config, target), [*steps, *shorter * (forward.batch - 1)]
    return may_cut(length, tiles)


def expected_us(
    problem: BackwardProblem,
    config: BackwardKernel,
    steps: Sequence[int],
    target: Target,
    pieces: int,
    slices: int = 1,
) -> float:
    """Predict the microseconds of the busiest SM and of adding up pieces. steps: of the key tiles of a row, the most
    first."""
    forward, sms = problem.forward, side_by_side(config, target)
    requests = forward.batch
    if forward.requests.packed_q:  # more than there are, as in ``ctas_of``
        requests = min(requests, max(1.5 * forward.least_q / forward.seq_q, 1.0))
    rows, step = slices * max(1, round(forward.heads_kv * requests)), STEP_US[config.heads.qk]
    counts = piece_counts(config, steps, pieces)
    sizes = sorted((-(-count // cut) * step + CTA_US, cut) for count, cut in zip(steps, counts, strict=True))
    ctas, longest = rows * sum(counts), sizes[-1][0]
    busiest = rows * sum(size * cut for size, cut in sizes) / sms
    if ctas > sms:  # the longest CTAs of the last section begin when the sections before are done
        section = section_of(problem, config, target, sum(counts), slices) / rows
        busiest += max(LAST_WAIT * longest, longest - section * busiest)
    longer = round_ = 0  # CTAs of a row that take longer; some SM has a CTA more than round_ of those that do
    for size, cut in reversed(sizes):
        longer += cut
        while round_ < COUNTED_ROUNDS and round_ * sms < longer * rows:
            busiest = max(busiest, (round_ + 1) * size)
            round_ += 1
    gradients = config.wanted.k + config.wanted.v
    if (pieces == 1 and slices == 1) or not gradients:
        return busiest
    elements = gradients * rows * config.tile_n * forward.head_dim
    if slices > 1:  # a row's pieces add to sums that stay in L2
        return busiest + JOIN_US + 2 * len(counts) / slices * elements * FP32_BYTES / JOIN_BYTES_US
    parts = sum(cut for cut in counts if cut > 1)
    return busiest + JOIN_US + 2 * parts * elements * FP32_BYTES / JOIN_BYTES_US
