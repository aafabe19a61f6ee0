"""Fresh pairs in the simulator, forward and gradients, both architectures."""

import os
import random

import pytest
from helpers.feature_pairs import Problem, covering
from helpers.gradient_cases import KERNEL_TOLERANCE
from helpers.gradient_pairs import RULES, case_of

from warpspec import sim

SEEDS = [int(s) for s in os.environ["SEEDS"].split()]
PROBLEMS = [
    (Problem(f, 1000 * s + i), a)
    for s in SEEDS
    for i, f in enumerate(covering(s))
    for a in ("sm_90a", "sm_100a")
]
CASES = [
    (case_of(f, 1000 * s + i), a)
    for s in SEEDS
    for i, f in enumerate(covering(s, RULES))
    for a in ("sm_90a", "sm_100a")
]
random.Random(1).shuffle(PROBLEMS)
random.Random(2).shuffle(CASES)


@pytest.mark.parametrize(("problem", "arch"), PROBLEMS, ids=lambda v: getattr(v, "id", v))
def test_forward(problem, arch, simulate_as, check_order):
    simulate_as(arch, small=problem.seed % 2 == 0, sm_count=2)
    arguments = problem.arguments()
    problem.check(problem.run(arguments, backend="sim"), arguments)
    assert sim.last_report() is not None


@pytest.mark.parametrize(("case", "arch"), CASES, ids=lambda v: getattr(v, "id", v))
def test_gradients(case, arch, simulate_gradients_as, check_order):
    simulate_gradients_as(arch)
    case.judge(KERNEL_TOLERANCE, backend="reference")
