"""The decision whether keys and values in codes are dequantised by a launch of their own (``expand``), or by a
converter in the attention kernel."""

from __future__ import annotations

from warpspec.common.launch import Target
from warpspec.fmha.expand import expanded, expanding_bytes, may_expand
from warpspec.fmha.plan import least_time
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.plan.scenarios import scenarios
from warpspec.fmha.problem import AttentionProblem

SLOWER = 1.4  # bytes of the first launch take so many times as long as those of a copy


def expands(choices: Choices, problem: AttentionProblem, target: Target) -> bool:
    """Whether keys and values are dequantised first: whether that launch and attention to 16-bit keys are expected to
    take less time than attention to codes. choices: the target architecture's.

    Raises UnsupportedProblem naming what the kernel does not support.
    """
    if choices.expanding is None or not may_expand(problem):
        return False
    choices.config.check(problem, target)
    if not choices.converts(problem):
        return False
    cases = scenarios(problem)
    keys = sum(requests.count * requests.keys for case in cases for requests in case) / len(cases)
    first = choices.expanding + SLOWER * expanding_bytes(problem, keys) / (target.speeds.copy * 1e6)
    return first + least_time(choices, expanded(problem), target) < least_time(choices, problem, target)
