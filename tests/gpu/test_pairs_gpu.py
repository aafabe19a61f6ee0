"""Every feature of attention with every other one, on the GPU of this machine."""

import pytest
from helpers.feature_pairs import Problem, covering
from helpers.gpu_tensors import moved

pytestmark = pytest.mark.gpu
PROBLEMS = [
    Problem(features, 100 * seed + i) for seed in (11, 12) for i, features in enumerate(covering(seed))
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.seed}-{problem.id}")
def test_problem(problem):
    arguments = problem.arguments()
    problem.check(problem.run(moved(arguments)), arguments)
