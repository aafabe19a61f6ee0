"""The host's decisions before a launch: kernel, splits of the keys, order of tiles.

``make_plan`` takes the candidate (``candidates``) with the least predicted time (``cost``), averaged over the lengths
that the call's requests may have (``scenarios``). ``sections`` decides how many heads CTAs work on at a time,
``expanding`` whether keys in codes are dequantised first. Nothing here looks at a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import Target
from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.plan.candidates import Candidate, candidates
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.plan.cost import Way, microseconds
from warpspec.fmha.plan.scenarios import scenarios
from warpspec.fmha.plan.sections import choose_section
from warpspec.fmha.plan.work import Tiling, work_of
from warpspec.fmha.problem import AttentionProblem

ANY_CTAS = 1 << 30  # as many CTAs as there are tiles


class Plan(NamedTuple):
    """The host's decisions for a problem on a target.

    config: the kernel's configuration. splits: splits of the keys. ctas: most CTAs to launch if they are persistent.
    section: heads that CTAs work on at a time (``TileGrid.decode``).
    """

    config: AttentionKernel
    splits: int
    ctas: int
    section: int


def make_plan(choices: Choices, problem: AttentionProblem, target: Target) -> Plan:
    """The plan for a problem. choices: the target architecture's.

    Raises UnsupportedProblem naming what the kernel does not support.
    """
    choices.config.check(problem, target)
    return plan_of(choices, problem, target, best_candidate(choices, problem, target))


def plan_of(choices: Choices, problem: AttentionProblem, target: Target, found: Candidate) -> Plan:
    """The plan of a candidate."""
    config = config_of(choices, problem, target, found)
    resident = target.sm_count * config.shape.ctas_per_sm
    section = choose_section(problem, config, target, resident)
    if config.scheduler.in_step:
        together = problem.heads_kv * -(-problem.group // config.rows.pack)
        if config.scheduler.queries_in_step:
            together *= -(-problem.seq_q // config.rows.queries)
        resident -= resident % together
    each = has_cta_each(problem, found.way, found.tiling)
    return Plan(config, found.splits, ANY_CTAS if each else resident, section)


def has_cta_each(problem: AttentionProblem, way: Way, tiling: Tiling) -> bool:
    """Whether each query tile, or each of its splits, has a CTA of its own: with idle tiles between the others, splits
    take the SMs that idle ones leave at once."""
    between = problem.requests.packed_q and problem.seq_q > tiling.queries
    return way is Way.SINGLE or (way is Way.SPLIT and between)


def config_of(
    choices: Choices, problem: AttentionProblem, target: Target, found: Candidate
) -> AttentionKernel:
    """The kernel of a candidate."""
    return choices.config.of(
        problem,
        target,
        shape=found.shape,
        pack=found.tiling.pack,
        splits=found.splits > 1,
        schedule=choices.schedules[found.way],
    )


def likely_kernels(
    choices: Choices, problem: AttentionProblem, target: Target, margin: float
) -> Iterator[tuple[AttentionKernel, int]]:
    """Kernels of the candidates whose expected time is at most ``1 + margin`` times the least, with their number of
    splits; the plan's kernel is among them. Arguments as for ``make_plan``."""
    choices.config.check(problem, target)
    found, time = list(candidates(choices, problem, target)), expectation(choices, problem, target)
    times = [time(candidate) for candidate in found]
    for candidate, expected in zip(found, times, strict=True):
        if expected <= (1 + margin) * min(times):
            yield config_of(choices, problem, target, candidate), candidate.splits


def best_candidate(choices: Choices, problem: AttentionProblem, target: Target) -> Candidate:
    """The candidate with the least expected time; the first of equals."""
    found = list(candidates(choices, problem, target))
    if not found:
        queries, keys = problem.mask.block_size
        raise UnsupportedProblem(
            f"{target.architecture.backend} attention: block_mask: no tile fits blocks of {queries} queries and "
            f"{keys} keys at head size {problem.head_dim}; 128 and 128 fit every one"
        )
    return min(found, key=expectation(choices, problem, target))


def least_time(choices: Choices, problem: AttentionProblem, target: Target) -> float:
    """The expected microseconds of the best candidate; infinite if there is none."""
    return min(
        map(expectation(choices, problem, target), candidates(choices, problem, target)), default=math.inf
    )


def expectation(choices: Choices, problem: AttentionProblem, target: Target):
    """A function of candidates: the geometric mean of a candidate's microseconds over the problem's scenarios, of which
    those after the first weigh ``Constants.uneven``."""
    cases, works, constants = scenarios(problem), {}, choices.constants(problem)
    weights = [1.0, *[constants.uneven] * (len(cases) - 1)]

    def time(candidate: Candidate) -> float:
        found = works.get(candidate.tiling)
        if found is None:
            found = works[candidate.tiling] = [work_of(problem, candidate.tiling, case) for case in cases]
        product = 1.0
        for work, weight in zip(found, weights, strict=True):
            one = microseconds(work, candidate.tiling, candidate.way, candidate.splits, target, constants)
            product *= one**weight
        return product ** (1 / sum(weights))

    return time


def launch_numbers(problem: AttentionProblem, plan: Plan) -> tuple:
    """The fields of ``numbers.LaunchNumbers``, one by one; an unbounded window side is not read."""
    window = (problem.window_left or 0, problem.window_right or 0)
    logits = LogitNumbers.of(problem.logits, scaled=problem.format.has_k_scale)
    return (*logits, *window, plan.ctas, plan.section)
