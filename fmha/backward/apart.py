"""When dQ is made by query tiles and dK and dV by key tiles (``sm90.apart``), and in which order CTAs take these.

CTAs are persistent and take tiles in rounds (``fmha.schedule.place_in_round``), so that nothing balances them but the
order: that of ``schedule.decode``, whose sections are chosen here by dealing the tiles out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from warpspec.common.launch import Target
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.schedule import Order, decode, tile_steps
from warpspec.fmha.backward.sm90.apart import QueryConfig
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import key_span, place_in_round

TILE_STEPS = 1.0  # what a tile costs beside its steps, in steps
MOST_ROUNDS = 60  # from which any order is balanced
LEAST_GAIN = 0.01  # of the time, for which a section is larger than another


def gains(problem: BackwardProblem, target: Target) -> bool:
    """Whether these kernels, if there are some for the problem, are expected to take less time."""
    return False


def is_apart(problem: BackwardProblem, config: BackwardKernel) -> bool:
    """Whether a kernel of its own makes dQ. config: the main kernel's."""
    return "q" in problem.wanted and not config.wanted.q


def balanced(problem: BackwardProblem, config: BackwardKernel, order: Order, target: Target) -> Order:
    """The order of the kernel that makes dK and dV, with balanced sections. Packed key tiles are sorted."""
    if config.packed:
        return order
    rows = problem.forward.heads_kv * problem.forward.batch
    return order._replace(section=balanced_section(tile_steps(problem, config), rows, target.sm_count))


def query_numbers(
    problem: BackwardProblem, config: BackwardKernel, target: Target, window: tuple[int, int]
) -> tuple:
    """The numbers of the kernel that makes dQ (``operands.QueryOperands``). config: the main kernel's."""
    forward, own = problem.forward, QueryConfig.beside(config)
    section = forward.heads_q
    if not own.packed:
        steps = query_steps(forward, own.tile_m, own.tile_n)
        section = balanced_section(steps, forward.heads_q * forward.batch, target.sm_count)
    logits = LogitNumbers.of(forward.logits, signed=True)
    return (*logits, forward.logits.scale, *window, section, target.sm_count)


@lru_cache(maxsize=256)
def balanced_section(steps: tuple[int, ...], rows: int, ctas: int) -> int:
    """Rows of a section with which the CTA with the most work has least. steps: of each tile of a row, in their
    order."""
    tiles = len(steps)
    if max(steps, default=0) == min(steps, default=0) or tiles * rows > MOST_ROUNDS * ctas:
        return max(min(ctas // max(tiles, 1), rows), 1)
    near = {ctas * k // tiles for k in (1, 2, 3)} | {8, 16, 20, 32, 40, 64, 96, 128, rows, 1}
    best, least = 1, math.inf
    for section in sorted(each for each in near if 0 < each <= rows):
        most = most_work(steps, rows, section, ctas)
        if most < least * (1 - LEAST_GAIN):
            best, least = section, most
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
    count = len(steps) * rows
    ctas = min(ctas, count)
    work = [0.0] * ctas
    for round_ in range(-(-count // ctas)):
        for cta in range(ctas):
            index = round_ * ctas + place_in_round(round_, cta, ctas)
            if index < count:
                work[cta] += TILE_STEPS + steps[decode(len(steps), rows, 1, section, index)[0]]
    return max(work)
