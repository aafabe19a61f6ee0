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
from warpspec.fmha.backward.schedule import Order, decode, main_us
from warpspec.fmha.backward.sections import L2_SHARE, ctas_of
from warpspec.fmha.backward.sm90.apart import KeyConfig, QueryConfig
from warpspec.fmha.backward.work import tile_steps
from warpspec.fmha.features import RequestLayout
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import key_span, place_in_round
from warpspec.fmha.tiles import ELEMENT_BYTES

TILE_STEPS = 1.5  # what a tile costs beside its steps, in steps, where only the order is chosen
ANY_CTAS = (1 << 31) - 1
MOST_ROUNDS = 60  # that are dealt out
LEAST_GAIN = 0.01  # of the time, for which a section is larger than another


class Times(NamedTuple):
    """The time of a call, fitted to calls on both GPUs (docs/records/2026-11-28-gradients-apart.md).

    main: of one main kernel, as a multiple of what ``schedule`` expects. sums: bytes that it and the kernels around it
    move, for each byte of Q. main_start: microseconds of a call. key_us, query_us: microseconds of a step of the
    kernels apart; key_tile, query_tile: what a tile costs beside its steps, in steps. bytes: that they move for each
    byte of Q, where nothing hides it. start: of a call.
    """

    main: float
    sums: float
    main_start: float
    key_us: float
    query_us: float
    key_tile: float
    query_tile: float
    bytes: float
    start: float


# By columns of the widest operand, up to so many.
TIMES = {
    64: Times(0.896, 8.83, 4.45, 1.66, 1.4, 0.562, 1.03, 6.99, 8.73),
    96: Times(0.748, 9.83, 4.5, 0.713, 1.49, 1.25, 0.374, 7.26, 7.07),
    128: Times(0.808, 10.0, 4.06, 1.3, 1.05, 1.77, 0.564, 4.95, 11.4),
    192: Times(0.909, 7.56, 4.16, 2.09, 1.02, 3.67, 0.222, 4.5, 4.24),
}
LEAST_TOKENS = 1.5  # that packed requests count as, for each of ``least_q``: long ones have more steps
LONGEST_ROW, LONGEST_REQUEST = 2048, 6144  # of the calls that were timed; of packed ones at D 192
# Of the expected times, from which the kernels apart are taken: up to D 128; at D 192 and of packed requests.
LEAST_RATIO, LEAST_OTHER_RATIO = 1.02, 0.97
# The same of packed requests with grouped heads of D 128: one main kernel cuts key tiles, which ``as_alike`` does not.
GROUPED_RATIO = 1.05
SECTIONS = (1, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)  # rows of a section that are tried
COUNTED_ROUNDS = 64  # from which CTAs have the mean load, about
FEW_ROUNDS = 6  # rounds of packed requests' tiles, up to which CTAs are not persistent: the GPU balances them


def gains(problem: BackwardProblem, config: BackwardKernel, target: Target) -> bool:
    """Whether kernels apart are expected to take less time. config: that of a main kernel that makes all gradients."""
    wanted = problem.has_do and {"q", "k", "v"} <= set(problem.wanted)
    if max(config.sizes.qk, config.sizes.v) > max(TIMES) or target.arch != "sm_90a" or not wanted:
        return False
    wide = max(config.sizes.qk, config.sizes.v) > 2 * BLOCK
    longest = LONGEST_REQUEST if config.packed and wide else LONGEST_ROW
    if max(problem.forward.seq_q, problem.forward.seq_k) > longest:
        return False
    least = LEAST_OTHER_RATIO if config.packed or wide else LEAST_RATIO
    if config.packed and problem.forward.group > 1 and config.heads.qk == 2 * BLOCK:
        least = GROUPED_RATIO
    if config.packed:
        if problem.forward.window_left is not None:
            return False
        problem = as_alike(problem)
        config = plan_alike(problem, config)
    found = expected_times(problem, config, target)
    return found is not None and found[0] > least * found[1]


def as_alike(problem: BackwardProblem) -> BackwardProblem:
    """As many batch rows in place of packed requests, whose lengths the host does not know: each as long as the mean
    one, about."""
    forward = problem.forward
    part = min(LEAST_TOKENS * forward.least_q / (forward.batch * max(forward.seq_q, 1)), 1.0)
    queries, keys = (max(math.ceil(part * longest), 1) for longest in (forward.seq_q, forward.seq_k))
    forward = replace(forward, seq_q=queries, seq_k=keys, requests=RequestLayout(), least_q=None)
    return replace(problem, forward=forward)


def plan_alike(problem: BackwardProblem, config: BackwardKernel) -> BackwardKernel:
    """A main kernel for batch rows instead of packed requests (``as_alike``)."""
    return replace(config, requests=problem.forward.requests, keeps_requests=False, cut=False, slices=False)


def expected_times(
    problem: BackwardProblem, config: BackwardKernel, target: Target
) -> tuple[float, float] | None:
    """Microseconds of batch rows by one main kernel, and by kernels apart; None where these are not made for them.
    config: as for ``gains``."""
    forward, columns = problem.forward, max(config.sizes.qk, config.sizes.v)
    times = next(TIMES[size] for size in TIMES if columns <= size)
    size = forward.batch * forward.seq_q * forward.heads_q * config.sizes.qk * ELEMENT_BYTES
    bytes_us = size / (target.speeds.copy * 1e6)
    keys = KeyConfig.of(replace(problem, wanted=("k", "v"))) or config
    queries = query_config(problem, keys)
    if queries is None:
        return None
    work = (
        (key_work(problem, keys, target), times.key_tile),
        (query_work(problem, queries, target), times.query_tile),
    )
    loads = [
        loads_of(each, rows, balanced_section(each, rows, target.sm_count, most), target.sm_count, tile)
        for (each, rows, most), tile in work
    ]
    apart = last_end(times.key_us * loads[0], times.query_us * loads[1], target, not queries.makes_statistics)
    return (
        times.main * main_us(problem, config, target) + times.sums * bytes_us + times.main_start,
        apart + times.bytes * bytes_us + times.start,
    )


def last_end(keys: np.ndarray, queries: np.ndarray, target: Target, together: bool) -> float:
    """When two kernels are done, whose CTAs take as long as given. together: those of the second begin where the first
    one's have ended, on the SMs that are free first."""
    if not together:
        return float(keys.max() + queries.max())
    ends = np.zeros(target.sm_count)
    ends[: len(keys)] = keys
    ends.sort()
    return float(max(ends[-1], (ends[: len(queries)] + queries).max()))


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
    """CTAs of a launch, at most. heads: of the rows whose tiles they take. Where the tiles of one head fill the SMs,
    those of packed requests differ most from round to round, which persistent CTAs balance less well than the GPU does;
    up to D 128 it does not pay for their starts."""
    tiles = ctas_of(problem, config, tile_steps(problem, config), 1)
    few = heads * tiles < FEW_ROUNDS * target.sm_count
    uneven = tiles >= target.sm_count and not isinstance(config, KeyConfig)
    return ANY_CTAS if config.packed and (few or uneven) else target.sm_count


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
    # A few sections are whole rounds, the same for each CTA again and again.
    if tiles * rows > MOST_ROUNDS * ctas:
        whole = ctas // math.gcd(ctas, tiles)
        return max(min(whole, rows, most), 1)
    near = {ctas * k // tiles for k in (1, 2, 3)} | {*SECTIONS, rows}
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


def most_work(steps: Sequence[int], rows: int, section: int, ctas: int) -> float:
    """Steps of the CTA with the most of them, that of its tiles' starts included."""
    return float(loads_of(steps, rows, section, ctas, TILE_STEPS).max())


def loads_of(steps: Sequence[int], rows: int, section: int, ctas: int, tile: float) -> np.ndarray:
    """Steps of each CTA, ``tile`` for each of its tiles included. Where there are many rounds, whole sections of the
    first COUNTED_ROUNDS, about, stand for all."""
    counted = max(round(COUNTED_ROUNDS * ctas / max(len(steps) * section, 1)), 1) * section
    if counted < rows:
        return loads_of(steps, counted, section, ctas, tile) * (rows / counted)
    count = len(steps) * rows
    ctas = min(ctas, count)
    round_, cta = np.divmod(np.arange(-(-count // ctas) * ctas), ctas)
    index = round_ * ctas + place_in_round(round_, cta, ctas)
    there = index < count
    number, _, _ = decode(len(steps), rows, 1, section, index[there], minimum=np.minimum)
    return np.bincount(cta[there], tile + np.asarray(steps)[number], minlength=ctas)
