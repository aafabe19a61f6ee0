"""Every feature of attention and of its gradients with every other one, on the GPU of this machine."""

import pytest
from helpers.feature_pairs import Problem, covering
from helpers.gpu_tensors import moved
from helpers.gradient_cases import KERNEL_TOLERANCE
from helpers.gradient_pairs import RULES, case_of

pytestmark = pytest.mark.gpu
PROBLEMS = [
    Problem(features, 100 * seed + i) for seed in (11, 12) for i, features in enumerate(covering(seed))
]
GRADIENTS = [case_of(features, seed) for seed, features in enumerate(covering(13, RULES))]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.seed}-{problem.id}")
def test_problem(problem):
    arguments = problem.arguments()
    problem.check(problem.run(moved(arguments)), arguments)


@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.id)
def test_gradients(case):
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])
