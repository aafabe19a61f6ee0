"""The order in which CTAs take key tiles, and the number of pieces into which a key tile's steps are cut.

A *row* is a KV head of a batch row (or of all packed requests together); every row has the same key tiles. CTAs are
numbered by section (some rows), within it by key tile, then by row, then by piece. ``decode`` is arithmetic that the
host and kernels share; ``choose_order`` is a model of cost on the host.

Under a causal mask a row's first key tiles have the most query tiles. So within a section the longest CTAs come first
and short ones fill the end: with several times as many CTAs as SMs, the busiest SM has no more than the mean plus one
of the shortest CTAs. For this, a section has about twice as many CTAs as there are SMs, and more rows as long as all
that their key tiles read and add to fits L2. If all key tiles have the same work, a section is a row. If dQ is added up
in order, sections are as under a causal mask: CTAs that run at the same time then belong to few key tiles of each row,
and the last of them waits for few others.

One CTA may have too much work: in B1 32/8 S2048, causal, the longest key tile has twice an SM's share, and no order
helps. Then every tile is cut, and one more launch adds up its pieces' dK and dV in the order of the pieces. Each piece
costs a write and a read of dK and dV in fp32, and the start and end of a CTA.

Packed requests are cut by the device (``PieceLength``): it knows their lengths, and cuts only long key tiles. The host
decides only whether cutting is possible.

Worst case: the busiest SM has at most the mean plus the longest CTA. ``choose_order`` expects this if the lengths are
as the problem says; with kv_lengths it does not know the longest CTA; with packed requests the longest CTA is at most
the longest piece.
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
JOIN_BYTES_US = 4e6  # bytes of pieces' sums written or read in a microsecond

MOST_PIECES = 32
MEAN_SHARE = 1.0  # part of an SM's mean steps: shorter key tiles are not cut where SMs have many
PIECE_COST = 2.0  # what a piece costs, times its bytes' time and the start of a CTA
LEAST_GAIN = 0.03  # part of the time that cutting tiles must save
ROUNDS = 2  # CTAs of a section for each SM, about, at least
L2_SHARE = 0.8  # part of the L2 for what a section reads and adds to
BEYOND_L2 = 1.9  # reads of concurrent key tiles, in L2 sizes, from which heads_inside gains
EVEN = 0.85  # mean over maximum of key tiles' steps, from which they count as equal
COUNTED_ROUNDS = 16  # CTAs per SM from which the mean predicts the busiest SM's load


class PieceLength(NamedTuple):
    """How the device cuts. With S the sum of all key tiles' steps for one KV head, a piece has at most
    max(sqrt(``factor`` S), ``share`` S) steps. further: how many pieces fit beside one of each key tile.

    Cutting the steps of all H KV heads, H S, into pieces of t steps costs H S / t times the cost of a piece (its sums
    written and read, the start of a CTA), and SMs wait for the last pieces for t / 2 steps: t = sqrt(2 H S cost / step)
    is best. If SMs have many steps, uncut key tiles of no more than the mean cause little waiting.
    """

    factor: float
    share: float
    further: int


class Order(NamedTuple):
    """pieces: pieces of a key tile. section: rows of a section."""

    pieces: int
    section: int


def decode(tiles, rows, pieces, section, index, minimum=min) -> tuple:
    """(key tile, row, piece) of the index-th CTA. tiles: tiles of a row. Ints or Int32."""
    first = index // (section * tiles * pieces) * section
    index = index - first * tiles * pieces
    size = minimum(section, rows - first) * pieces  # the last section may be short
    rest = index % size
    return index // size, first + rest // pieces, rest % pieces


def choose_order(problem: BackwardProblem, config: BackwardKernel, target: Target) -> Order:
    """Choose the order with the least time by the model above. config: the main kernel's, cut or not."""
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
    """Whether sections are single rows, because all key tiles have the same work."""
    unknown = config.requests.packed_q or config.requests.packed_k or config.requests.has_kv_lengths
    unknown = unknown or config.mask.has_blocks
    return not (unknown or config.deterministic) and sum(steps) >= EVEN * len(steps) * steps[0]


def reads_beyond_l2(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """Whether key tiles that run together, taking one head of a group after another, read so much more than L2 holds
    that ``heads_inside`` is better, although it allows fewer numbers of pieces."""
    forward = problem.forward
    steps = tile_steps(problem, config)
    if forward.group == 1 or in_rows(config, steps) or forward.requests.packed_q or config.mask.has_blocks:
        return False
    together = min(-(-target.sm_count // max(len(steps), 1)), forward.heads_kv * forward.batch)
    if together * bytes_of(forward, forward.seq_q) < BEYOND_L2 * target.l2_bytes:
        return False
    inside = replace(config, heads_inside=True)
    pieces = [choose_pieces(problem, each, steps, target) for each in (config, inside)]
    times = [expected_us(problem, config, steps, target.sm_count, each) for each in pieces]
    return times[1] < (1 + LEAST_GAIN) * times[0]


def row_bytes(problem: BackwardProblem) -> int:
    """Bytes that the key tiles of a row read and add to: Q, dO, dQ's sums."""
    forward = problem.forward
    queries = forward.least_q if forward.requests.packed_q else forward.seq_q
    return bytes_of(forward, queries)


def bytes_of(forward: AttentionProblem, queries: int) -> int:
    """Bytes of Q, dO and dQ's sums of so many queries of one KV head."""
    return forward.group * queries * forward.head_dim * (2 * ELEMENT_BYTES + FP32_BYTES)


def tile_steps(problem: BackwardProblem, config: BackwardKernel) -> list[int]:
    """Steps of each key tile of a row; with packed requests, of one as long as any may be."""
    forward = problem.forward
    bounds = {
        "causal": forward.mask.causal,
        "left": forward.window_left,
        "right": forward.window_right,
        "key_stride": forward.mask.key_stride,
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
    """Choose the number of pieces with the least time; 1 if cutting gains little. If the device cuts: 2 if it may have
    to."""
    if (
        not config.can_cut
        or config.mask.has_blocks
        or (problem.deterministic and config.wanted.bias == "sum")
    ):
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
    """Choose how the device cuts the key tiles of packed requests."""
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
    """Whether some key tile of packed requests may be cut: the longest, supposing that the other requests are equal."""
    forward = problem.forward
    length = piece_length(problem, config, target)
    others = max(forward.least_q / forward.seq_q - 1, 0.0)  # as many as the longest
    total = sum(steps) * (1 + others**2 / max(forward.batch - 1, 1))  # steps grow with the square of a length
    return steps[0] > max((length.factor * total) ** 0.5, length.share * total)


def expected_us(
    problem: BackwardProblem, config: BackwardKernel, steps: list[int], sms: int, pieces: int
) -> float:
    """Predict the microseconds of the busiest SM and of the launch that adds up pieces. steps: the steps of each key
    tile, the most first.
    """
    forward = problem.forward
    requests = forward.batch
    if forward.requests.packed_q:  # of least_q to twice as many queries
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
