"""When dQ is made by query tiles and dK and dV by key tiles (``sm90.apart``), and in which order CTAs take these.

CTAs are persistent and take tiles in rounds (``fmha.schedule.place_in_round``), so that nothing balances them but the
order: that of ``schedule.decode``, whose sections are chosen here by dealing the tiles out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from warpspec.common.launch import Target
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.schedule import (
    L2_SHARE,
    Order,
    choose_order,
    ctas_of,
    decode,
    expected_us,
    tile_steps,
)
from warpspec.fmha.backward.sm90.apart import KeyConfig, QueryConfig
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import key_span, place_in_round
from warpspec.fmha.tiles import ELEMENT_BYTES

TILE_STEPS = 1.5  # what a tile costs beside its steps, in steps
ANY_CTAS = (1 << 31) - 1
MOST_ROUNDS = 60  # that are dealt out
LEAST_GAIN = 0.01  # of the time, for which a section is larger than another


class Times(NamedTuple):
    """The time of a call, fitted to 28 calls on an H100 (docs/records/2026-11-28-gradients-apart.md).

    main: of one main kernel, as a multiple of what ``schedule`` expects. sums: bytes that it and the kernels around it
    move, for each byte of Q. key_us, query_us: microseconds of a step of the kernels apart; tile: what a tile costs
    beside its steps, in steps. bytes: that they move for each byte of Q, where nothing hides it. start_us: of a call.
    """

    main: float
    sums: float
    key_us: float
    query_us: float
    tile: float
    bytes: float
    start_us: float


TIMES = {
    64: Times(0.97, 6.8, 0.98, 2.28, 1.5, 0.0, 21.0),
    128: Times(0.655, 12.5, 1.42, 0.84, 3.0, 2.5, 12.0),
    192: Times(0.73, 7.7, 2.09, 0.84, 1.0, 5.2, 10.5),
}
BYTES_US = 3.03e6  # bytes moved in a microsecond, an H100's; an H200 moves more, but was not measured
LONGEST_ROW = 2048  # of the calls that the times were fitted to
LEAST_RATIO = 1.055  # of the expected times, from which the kernels apart are taken
# Packed requests, whose lengths the host does not know: the longest, and the mean of that and of the mean length, that
# gained; with all keys seen these count FULL times. Such a call has CTAS key tiles for each SM.
LONGEST, TYPICAL, FULL, CTAS = 1408, 1024, 1.6, 1.5
FEW_ROUNDS = 6  # rounds of packed requests' tiles, up to which CTAs are not persistent: the GPU balances them


def gains(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """Whether kernels apart are expected to take less time. config: that of a main kernel that makes all gradients."""
    wanted = problem.has_do and {"q", "k", "v"} <= set(problem.wanted)
    if config.heads.qk not in TIMES or target.arch != "sm_90a" or not wanted:
        return False
    return gains_packed(problem, config, target) if config.packed else gains_alike(problem, config, target)


def gains_packed(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """``gains`` for packed requests."""
    forward = problem.forward
    longest = max(forward.seq_q, forward.seq_k) * (1.0 if forward.mask.causal else FULL)
    typical = (longest + longest * packed_share(problem)) / 2
    tiles = forward.heads_kv * ctas_of(problem, config, tile_steps(problem, config), 1)
    fits = longest <= LONGEST and typical <= TYPICAL and tiles >= CTAS * target.sm_count
    return fits and config.heads.qk > BLOCK and forward.window_left is None


def packed_share(problem: BackwardProblem) -> float:
    """Mean length of packed requests over the longest one's."""
    forward = problem.forward
    return min(1.5 * forward.least_q / (forward.batch * max(forward.seq_q, 1)), 1.0)


def gains_alike(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """``gains`` for batch rows."""
    forward, times = problem.forward, TIMES[config.heads.qk]
    if max(forward.seq_q, forward.seq_k) > LONGEST_ROW:
        return False
    order = choose_order(problem, config, target)
    steps = sorted((each // order.slices for each in tile_steps(problem, config)), reverse=True)
    size = forward.batch * forward.seq_q * forward.heads_q * config.sizes.qk * ELEMENT_BYTES
    main = expected_us(problem, config, steps, target, order.pieces, order.slices)
    together = times.main * main + times.sums * size / BYTES_US
    keys = KeyConfig.of(replace(problem, wanted=("k", "v"))) or config
    queries = QueryConfig.beside(keys)
    if queries is None:
        return False
    work = [
        most_work(
            each, rows, balanced_section(each, rows, target.sm_count, most), target.sm_count, times.tile
        )
        for each, rows, most in (key_work(problem, keys, target), query_work(problem, queries, target))
    ]
    apart = times.key_us * work[0] + times.query_us * work[1] + times.bytes * size / BYTES_US + times.start_us
    return together > LEAST_RATIO * apart


def key_work(problem: BackwardProblem, config: BackwardKernel, target: Target) -> tuple:
    """(steps of each key tile of a row, rows, most rows of a section)."""
    forward = problem.forward
    read = (forward.group * forward.seq_q + forward.seq_k) * 2 * config.sizes.qk * ELEMENT_BYTES
    return tile_steps(problem, config), forward.heads_kv * forward.batch, rows_in_l2(read, target)


def query_work(problem: BackwardProblem, config: QueryConfig, target: Target) -> tuple:
    """Like ``key_work``, of query tiles and heads."""
    forward = problem.forward
    read = (forward.seq_q + forward.seq_k / forward.group) * 2 * config.sizes.qk * ELEMENT_BYTES
    steps = query_steps(forward, config.tile_m, config.tile_n)
    return steps, forward.heads_q * forward.batch, rows_in_l2(read, target)


def rows_in_l2(size: float, target: Target) -> int:
    """How many rows of this many bytes stay in L2."""
    return max(int(L2_SHARE * target.l2_bytes // max(size, 1)), 1)


def is_apart(problem: BackwardProblem, config: BackwardKernel) -> bool:
    """Whether a kernel of its own makes dQ. config: the main kernel's."""
    return "q" in problem.wanted and not config.wanted.q


def query_config(problem: BackwardProblem, keys: BackwardKernel) -> QueryConfig | None:
    """The kernel that makes dQ beside one that makes dK and dV (``keys``). It makes the statistics where these are
    plain, unless ``keys`` lets it begin early: to wait for it would take longer than a first kernel."""
    plain = not (problem.has_dlse or problem.forward.has_sink or keys.packed)
    return QueryConfig.beside(keys, makes_statistics=plain and not isinstance(keys, KeyConfig))


def balanced(problem: BackwardProblem, config: BackwardKernel, order: Order, target: Target) -> Order:
    """The order of the kernel that makes dK and dV, with balanced sections. Packed key tiles are sorted."""
    if config.packed:
        return order
    steps, rows, most = key_work(problem, config, target)
    return order._replace(section=balanced_section(steps, rows, target.sm_count, most))


def most_ctas(problem: BackwardProblem, config: BackwardKernel, heads: int, target: Target) -> int:
    """CTAs of a launch, at most. heads: of the rows whose tiles they take."""
    tiles = heads * ctas_of(problem, config, tile_steps(problem, config), 1)
    few = config.packed and tiles < FEW_ROUNDS * target.sm_count
    return ANY_CTAS if few else target.sm_count


def query_numbers(
    problem: BackwardProblem, config: BackwardKernel, target: Target, window: tuple[int, int]
) -> tuple:
    """The numbers of the kernel that makes dQ (``operands.QueryOperands``). config: the main kernel's."""
    forward, own = problem.forward, QueryConfig.beside(config)
    section = forward.heads_q
    if not own.packed:
        steps, rows, most = query_work(problem, own, target)
        section = balanced_section(steps, rows, target.sm_count, most)
    logits, ctas = LogitNumbers.of(forward.logits, signed=True), forward.heads_q
    return (*logits, forward.logits.scale, *window, section, most_ctas(problem, config, ctas, target))


@lru_cache(maxsize=256)
def balanced_section(steps: tuple[int, ...], rows: int, ctas: int, most: int) -> int:
    """Rows of a section, ``most`` at most, with which the CTA with the most work has least. steps: of each tile of a
    row, in their order."""
    tiles = len(steps)
    if max(steps, default=0) == min(steps, default=0):
        return max(min(ctas // max(tiles, 1), rows, most), 1)
    if (
        tiles * rows > MOST_ROUNDS * ctas
    ):  # a few sections are whole rounds, the same for each CTA again and again
        whole = ctas // math.gcd(ctas, tiles)
        return max(min(whole, rows, most), 1)
    near = {ctas * k // tiles for k in (1, 2, 3)} | {
        1,
        4,
        6,
        8,
        12,
        16,
        20,
        24,
        32,
        40,
        48,
        64,
        96,
        128,
        rows,
    }
    best, least = 1, math.inf
    for section in sorted(each for each in near if 0 < each <= min(rows, most)):
        work = most_work(steps, rows, section, ctas)
        if work < least * (1 - LEAST_GAIN):
            best, least = section, work
    return best


def query_steps(forward: AttentionProblem, tile_m: int, tile_n: int) -> tuple[int, ...]:
    """Steps of each query tile of a head, in the order in which CTAs take them; as if no row's length or position were
    given."""
    bounds = {
        "causal": forward.mask.causal,
        "left": forward.window_left,
        "right": forward.window_right,
        "key_stride": forward.mask.key_stride,
    }
    start, found = forward.seq_k - forward.seq_q, []
    for first in range(0, forward.seq_q, tile_m):
        last = min(first + tile_m, forward.seq_q) - 1
        found.append(key_span(start + first, start + last, forward.seq_k, tile_n, bounds).count)
    return tuple(reversed(found)) if forward.mask.causal else tuple(found)


def most_work(steps: Sequence[int], rows: int, section: int, ctas: int, tile: float = TILE_STEPS) -> float:
    """Steps of the CTA with the most of them, that of its tiles' starts included."""
    count = len(steps) * rows
    ctas = min(ctas, count)
    round_, cta = np.divmod(np.arange(-(-count // ctas) * ctas), ctas)
    index = round_ * ctas + place_in_round(round_, cta, ctas)
    there = index < count
    number, _, _ = decode(len(steps), rows, 1, section, index[there], minimum=np.minimum)
    return float(np.bincount(cta[there], tile + np.asarray(steps)[number]).max())
