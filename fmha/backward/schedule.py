"""In what order CTAs take key tiles, and into how many pieces a key tile's steps are cut.

A *row* is a KV head of a batch row (of packed requests, of all); each has the same key tiles. CTAs go through sections
of so many rows, in a section through the key tiles in order, of each key tile through the rows, of each row through the
pieces. ``decode`` is arithmetic that the host and kernels share; ``choose_order`` is a model of cost on the host.

Under a causal mask a row's first key tiles have the most query tiles. So in a section, CTAs come in the order of their
work, the longest first, and short ones fill the end: with several times as many CTAs as SMs, the busiest SM has no more
than the mean and one of the shortest CTAs. A section has about twice as many CTAs as there are SMs, for this, and
beyond these as many rows as have what all of their key tiles read and add to in L2. Where all key tiles have the same
work, a section is a row. Where dQ is added up in order, sections are those of a causal mask: CTAs that run at the same
time are then of few key tiles of each row, and the last of them waits for few others.

A CTA may have too much: of B1 32/8 S2048, causal, the longest key tile has twice an SM's share, and no order helps.
Then every tile is cut, and its pieces' dK and dV are added up by one more launch in the order of the pieces. This
costs, for each piece, dK and dV in fp32 there and back, and the start and end of a CTA.

Of packed requests the device cuts (``PieceLength``): it knows their lengths, and cuts those key tiles alone that are
long. The host says only that some may be.

Worst case: at most what ``choose_order`` expects, the longest CTA with the mean, where lengths are as the problem says;
with kv_lengths they are not known, and the busiest SM has at most the mean and the longest CTA; of packed requests that
is at most the longest piece.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from warpspec.common.hardware import FP32_BYTES
from warpspec.common.launch import Target
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.mask import position_range
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.tiles import ELEMENT_BYTES

# Microseconds on an H200.
STEP_US = {64: 2.4, 128: 2.25, 256: 3.1, 512: 4.2}  # a step, by D
CTA_US = 5.0  # start and end of a CTA, beside its steps
JOIN_US = 3.0  # a further launch
JOIN_BYTES_US = 4e6  # bytes that a microsecond writes or reads of what pieces leave

MOST_PIECES = 32
MEAN_SHARE = 1.0  # of an SM's mean steps: key tiles with fewer are not cut where SMs have many
PIECE_COST = 2.0  # what a piece costs, times its bytes' time and the start of a CTA
LEAST_GAIN = 0.03  # of the time, for which tiles are cut
ROUNDS = 2  # CTAs of a section for each SM, about, at least
L2_SHARE = 0.8  # of the L2 for what a section reads and adds to
BEYOND_L2 = 1.9  # times the L2 that key tiles read together, from which on heads inside of query tiles gain
EVEN = 0.85  # the mean of key tiles' steps as a part of the most, from which on they count as equal
COUNTED_ROUNDS = 16  # of CTAs, after which the mean says what the busiest SM has


class PieceLength(NamedTuple):
    """What the device cuts by. A piece has at most the square root of ``factor`` S steps, or ``share`` S, whichever is
    more, of the sum S of all key tiles' steps for one KV head. further: pieces there is room for beside one of each key
    tile.

    Cutting the steps of all KV heads, H S, into pieces of t costs H S / t times what a piece costs (its sums there and
    back, the start of a CTA), and the last pieces keep SMs waiting for half of t steps: t = sqrt(2 H S cost / step) is
    best. Where SMs have many steps, key tiles of no more than the mean leave little to wait for, uncut.
    """

    factor: float
    share: float
    further: int


class Order(NamedTuple):
    """pieces: of a key tile. section: rows."""

    pieces: int
    section: int


def decode(tiles, rows, pieces, section, index, minimum=min) -> tuple:
    """(key tile, row, piece) of the index-th CTA. tiles: of a row. Ints or Int32."""
    first = index // (section * tiles * pieces) * section
    index = index - first * tiles * pieces
    size = minimum(section, rows - first) * pieces  # the last section may be short
    rest = index % size
    return index // size, first + rest // pieces, rest % pieces


def choose_order(problem: BackwardProblem, config: BackwardKernel, target: Target) -> Order:
    """The order with the least time, by the model above. config: the main kernel's, cut or not."""
    steps = sorted(tile_steps(problem, config), reverse=True)
    rows = problem.forward.heads_kv * (1 if config.requests.packed_k else problem.forward.batch)
    pieces = choose_pieces(problem, config, steps, target)
    if in_rows(config, steps):
        return Order(pieces, 1)
    least = -(-ROUNDS * target.sm_count // (len(steps) * pieces))
    fit = int(L2_SHARE * target.l2_bytes // row_bytes(problem))
    sections = max(1, round(rows / max(least, fit)))
    return Order(pieces, -(-rows // sections))


def in_rows(config: BackwardKernel, steps: list[int]) -> bool:
    """Key tiles have the same work: one row after another."""
    unknown = config.requests.packed_q or config.requests.packed_k or config.requests.has_kv_lengths
    return not (unknown or config.deterministic) and sum(steps) >= EVEN * len(steps) * steps[0]


def reads_beyond_l2(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """Whether key tiles that run together read so much more than L2 holds, if each takes one head of a group after
    another, that heads inside of query tiles are better: they may be cut into fewer numbers of pieces."""
    forward = problem.forward
    steps = tile_steps(problem, config)
    if forward.group == 1 or in_rows(config, steps) or forward.packed_q:
        return False
    together = min(-(-target.sm_count // max(len(steps), 1)), forward.heads_kv * forward.batch)
    if together * bytes_of(forward, forward.seq_q) < BEYOND_L2 * target.l2_bytes:
        return False
    inside = replace(config, heads_inside=True)
    pieces = [choose_pieces(problem, each, steps, target) for each in (config, inside)]
    times = [expected_us(problem, config, steps, target.sm_count, each) for each in pieces]
    return times[1] < (1 + LEAST_GAIN) * times[0]


def row_bytes(problem: BackwardProblem) -> int:
    """What the key tiles of a row read and add to: Q, dO, dQ's sums."""
    forward = problem.forward
    queries = forward.least_q if forward.packed_q else forward.seq_q
    return bytes_of(forward, queries)


def bytes_of(forward: AttentionProblem, queries: int) -> int:
    """Q, dO and dQ's sums of so many queries of one KV head."""
    return forward.group * queries * forward.head_dim * (2 * ELEMENT_BYTES + FP32_BYTES)


def tile_steps(problem: BackwardProblem, config: BackwardKernel) -> list[int]:
    """Steps of each key tile of a row; of packed requests, of one that is as long as any may be."""
    forward = problem.forward
    bounds = {
        "causal": forward.causal,
        "left": forward.window_left,
        "right": forward.window_right,
        "key_stride": forward.key_stride,
    }
    found, start = [], forward.seq_k - forward.seq_q  # as if no row's length or position were given
    for first_key in range(0, max(forward.seq_k, 1), config.tile_n):
        last_key = min(first_key + config.tile_n, forward.seq_k) - 1
        first, _ = position_range(first_key, **bounds, maximum=max)
        _, end = position_range(last_key, **bounds, maximum=max)
        low = 0 if first is None else max(first - start, 0)
        high = forward.seq_q if end is None else min(end - start, forward.seq_q)
        count = -(-high // config.tile_m) - low // config.tile_m if high > low else 0
        found.append(count * forward.group)
    return found


def choose_pieces(problem: BackwardProblem, config: BackwardKernel, steps: list[int], target: Target) -> int:
    """Pieces with the least time; 1 where cutting gains little. Where the device cuts: 2 if it may have to."""
    if not config.can_cut or (problem.deterministic and config.wanted.bias == "sum"):
        return 1
    if replace(config, cut=True).cuts_by_length:
        return 1 + may_cut(problem, config, steps, target)
    sms = target.sm_count // config.column_parts
    group = problem.forward.group
    times = {
        pieces: expected_us(problem, config, steps, sms, pieces)
        for pieces in range(1, MOST_PIECES + 1)
        if not config.heads_inside or group % pieces == 0 or pieces % group == 0
    }
    best = min(times, key=times.__getitem__)
    return best if times[best] < (1 - LEAST_GAIN) * times[1] else 1


def piece_length(problem: BackwardProblem, config: BackwardKernel, target: Target) -> PieceLength:
    """How the device cuts the key tiles of packed requests."""
    forward, sms = problem.forward, target.sm_count // config.column_parts
    gradients = config.wanted.k + config.wanted.v
    left = 2 * gradients * config.tile_n * forward.head_dim * FP32_BYTES  # there and back
    cost = left / JOIN_BYTES_US + CTA_US / sms
    factor = 2 * PIECE_COST * cost * forward.heads_kv / STEP_US[forward.head_dim]
    share = MEAN_SHARE * forward.heads_kv / sms
    steps = tile_steps(problem, config)
    total = sum(steps) * max(min(forward.batch, 2 * forward.least_q / forward.seq_q), 1.0)
    further = min(total / max((factor * total) ** 0.5, 1.0), 1 / share)
    return PieceLength(factor, share, math.ceil(further) + 1)


def may_cut(problem: BackwardProblem, config: BackwardKernel, steps: list[int], target: Target) -> bool:
    """Whether some key tile of packed requests may be cut: the longest, if the other requests are equal."""
    forward = problem.forward
    length = piece_length(problem, config, target)
    others = max(forward.least_q / forward.seq_q - 1, 0.0)  # as many as the longest
    total = sum(steps) * (1 + others**2 / max(forward.batch - 1, 1))  # steps grow with the square of a length
    return steps[0] > max((length.factor * total) ** 0.5, length.share * total)


def expected_us(
    problem: BackwardProblem, config: BackwardKernel, steps: list[int], sms: int, pieces: int
) -> float:
    """Predict the microseconds of the busiest SM and of the launch that adds up pieces. steps: of each key tile, the
    most first.
    """
    forward = problem.forward
    requests = forward.batch
    if forward.packed_q:  # of least_q to twice as many queries
        requests = min(requests, max(1.5 * forward.least_q / forward.seq_q, 1.0))
    copies = max(1, round(forward.heads_kv * requests)) * pieces
    sizes = [STEP_US[forward.head_dim] * -(-count // pieces) + CTA_US for count in steps]
    busiest = sum(sizes) * copies / sms
    for round_ in range(min(COUNTED_ROUNDS, -(-len(sizes) * copies // sms))):
        busiest = max(busiest, (round_ + 1) * sizes[round_ * sms // copies])
    gradients = config.wanted.k + config.wanted.v
    if pieces == 1 or not gradients:
        return busiest
    keys = forward.heads_kv * requests * forward.seq_k
    left = gradients * pieces * keys * forward.head_dim * FP32_BYTES
    return busiest + JOIN_US + 2 * left / JOIN_BYTES_US
