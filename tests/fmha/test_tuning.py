"""Plans that were timed are kept on disk, and chosen from then on."""

import json
from dataclasses import replace

import pytest
import torch

from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.common.launch import SIMULATED
from warpspec.fmha import launch
from warpspec.fmha.plan import candidates, expectation, kept, plan_of
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90 import CHOICES
from warpspec.fmha.tuning import tuning

GPU = replace(SIMULATED["sm_90a"], device=0)


@pytest.fixture
def problem(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    kept.kept_plan.cache_clear()
    launch.prepare.cache_clear()
    q, k = torch.empty(7, 1, 32, 128, device="meta"), torch.empty(7, 3000, 8, 128, device="meta")
    found = AttentionProblem.of(q.bfloat16(), k.bfloat16(), k.bfloat16(), memory=False)
    yield found
    kept.kept_plan.cache_clear()


def likely(problem, count):
    time = expectation(CHOICES, problem, GPU)
    found = sorted(candidates(CHOICES, problem, GPU), key=time)
    return list(dict.fromkeys(plan_of(CHOICES, problem, GPU, one) for one in found))[:count]


def test_the_fastest_plan_is_kept_and_chosen(problem, monkeypatch):
    timed, first = likely(problem, 3), launch.plan(problem, GPU)
    assert first == timed[0]
    launched = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kept, "launch_times", lambda launches, _: [launch() for launch in launches])
    with tuning(3):
        assert kept.plans_to_time(problem, GPU) == 3
        assert kept.plans_to_time(problem, SIMULATED["sm_90a"]) == 0

        def launching(plan):
            launched.append(plan)
            return lambda: [5.0, 3.0, 4.0][timed.index(plan)]

        kept.keep_fastest(CHOICES, problem, GPU, 3, launching)
        assert launched == timed
        assert kept.plans_to_time(problem, GPU) == 0
    assert launch.plan(problem, GPU) == timed[1]
    # Another problem, another GPU, the simulator.
    assert launch.plan(replace(problem, seq_k=3001), GPU) != timed[1]
    assert launch.plan(problem, replace(GPU, sm_count=114)) != timed[1]
    assert launch.plan(problem, SIMULATED["sm_90a"]) == first


def test_a_kept_plan_that_is_no_candidate_is_ignored(problem):
    fields = kept.fields_of(next(candidates(CHOICES, problem, GPU)))
    fields[1][0] += 7  # row groups
    kept.KEPT.write(kept.name_of(problem, GPU), json.dumps(fields).encode())
    assert kept.kept_plan(CHOICES, problem, GPU) is None
    assert launch.plan(problem, GPU) == likely(problem, 1)[0]


@pytest.mark.parametrize("plans", [0, 33, True, 2.0, None])
def test_numbers_of_plans(plans):
    with pytest.raises(ValueError, match=f"^plans: must be an int from 1 to 32, got {plans}"), tuning(plans):
        pass
