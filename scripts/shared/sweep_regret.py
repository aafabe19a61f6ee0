"""What a sweep's attention calls lose by the choice of their plans, and what no plan of ours reaches.

For every call the plans that the model likes best beside the chosen one are timed in turn with it (``--regret`` of
bench_sweep.py). The choice loses what the best of them would save; what then is still missing to the best peer, no
candidate reaches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence

import torch

from warpspec.aot.models import kernels
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.fmha.expand import EXPAND, expand_config, expanded
from warpspec.fmha.launch import ATTENTION, prepare_expanded, second_kernel
from warpspec.fmha.plan import Plan, candidates, expectation, make_plan, plan_of
from warpspec.fmha.plan.expanding import expected_times
from warpspec.fmha.problem import AttentionProblem

from . import sweep_calls
from .gpu_bench import table
from .plan_calls import FIRST, describe, planned_call, prepared_call
from .sweep_calls import OURS, attention_inputs
from .sweep_report import LEVEL, best_peer, geometric_mean, text
from .sweep_shapes import BACKWARD, KINDS, AttentionShape, Shape

PLAN = "plan "  # in front of a plan's name among a result's times


def planned(shape: Shape) -> bool:
    """Whether the shape's plans are ``fmha.plan``'s."""
    return isinstance(shape, AttentionShape) and shape.kind not in BACKWARD


def problem_of(shape: AttentionShape, device: str = "meta") -> AttentionProblem:
    problem = sweep_calls.problem_of(attention_inputs(shape, "meta", values=False))
    if device != "meta":
        object.__setattr__(problem, "device", torch.device(device, 0))
    return problem


def other_plans(problem: AttentionProblem, target: Target, most: int) -> list[Plan]:
    """The best plans by the model, each of another kernel, without the chosen one; at most ``most``."""
    choices = ATTENTION.of(target.architecture).CHOICES
    chosen, time = make_plan(choices, problem, target), expectation(choices, problem, target)
    found = {}
    for candidate in sorted(candidates(choices, problem, target), key=time):
        plan = plan_of(choices, problem, target, candidate)
        if plan != chosen:
            found.setdefault((plan.config, plan.ctas, plan.splits > 1 and plan.splits), plan)
        if len(found) == most:
            break
    return list(found.values())


def other_kernels(shape: Shape, target: Target, most: int) -> list[tuple[Kernel, Hashable]]:
    """The kernels of ``other_plans``, each with its configuration."""
    if not planned(shape):
        return []
    problem, found = problem_of(shape), {}
    if may_be_first(problem, target):
        found = dict.fromkeys(kernels([expanded(problem)], target))
        found[EXPAND, expand_config(problem)] = None
    for plan in other_plans(problem, target, most):
        found[ATTENTION.of(target.architecture).ATTENTION, plan.config] = None
        second = second_kernel(problem, plan.config, plan.splits)
        if second is not None:
            found[second] = None
    return list(found)


def other_calls(shape: AttentionShape, most: int) -> tuple[dict[str, Callable], list]:
    """(Functions of the shape's inputs by the names of their plans, the chosen plan as ``describe`` says it)."""
    problem, target = problem_of(shape, "cuda"), target_of(torch.device("cuda", 0))
    plans = other_plans(problem, target, most)
    calls = {PLAN + json.dumps(describe(plan)): planned_call(problem, target, plan) for plan in plans}
    if may_be_first(problem, target):
        calls[PLAN + FIRST] = prepared_call(problem, prepare_expanded(problem, target))
    return calls, describe(make_plan(ATTENTION.of(target.architecture).CHOICES, problem, target))


def may_be_first(problem: AttentionProblem, target: Target) -> bool:
    """Whether a call's keys and values could be dequantised first."""
    return expected_times(ATTENTION.of(target.architecture).CHOICES, problem, target) is not None


def losses(result: dict) -> tuple[float, float | None] | None:
    """(our time over the best plan's, the best peer's time over the best plan's); None where no other plan was timed,
    the second None where there is no peer."""
    plans = [result["plans"][name] for name in result.get("plans", {})]
    if not plans or OURS not in result["times"]:
        return None
    best, peer = min(*plans, result["times"][OURS]), best_peer(result)
    return result["times"][OURS] / best, None if peer is None else result["times"][peer] / best


def regret_table(results: Sequence[dict], markdown: bool = False) -> str:
    """A table by kind of what the choice loses, and of the best plan against the best peer."""
    rows = []
    for kind in (*KINDS, "all"):
        found = [
            loss
            for result in results
            if kind in ("all", result["kind"])
            for loss in [losses(result)]
            if loss is not None
        ]
        if not found:
            continue
        lost, reached = [loss for loss, _ in found], [ratio for _, ratio in found if ratio is not None]
        rows.append(
            [
                *(kind, len(found), text(geometric_mean(lost)), text(max(lost))),
                sum(loss * LEVEL > 1 for loss in lost),
                *(text(geometric_mean(reached)), text(min(reached, default=None))),
                sum(ratio < LEVEL for ratio in reached),
            ]
        )
    columns = ("kind", "shapes", "ours / best plan", "most", f"above 1 / {LEVEL}")
    columns += ("peer / best plan", "least", f"below {LEVEL}")
    return table(columns, rows, markdown=markdown)


def worst_choices(results: Sequence[dict], number: int = 12) -> str:
    """The shapes whose choice loses most, with the plan that would be best."""
    found = [(losses(result)[0], result) for result in results if losses(result) is not None]
    lines = []
    for loss, result in sorted(found, key=lambda one: -one[0])[:number]:
        best = min(result["plans"], key=result["plans"].get)
        times = f"{result['times'][OURS]:.1f}, best plan {result['plans'][best]:.1f} us"
        lines.append(
            f"{loss:.2f}  {result['kind']} {result['name']}: {times} {best}; chosen {result.get('chosen')}"
        )
    return "\n".join(lines)
