"""Every feature of attention and of its gradients with every other one, by the kernels in the simulator."""

import pytest
from helpers.feature_pairs import FORWARD, Problem, covering
from helpers.gradient_cases import KERNEL_TOLERANCE
from helpers.gradient_pairs import RULES, case_of

from warpspec import sim

PROBLEMS = [Problem(features, seed) for seed, features in enumerate(covering(2026))]
GRADIENTS = [case_of(features, seed) for seed, features in enumerate(covering(2026, RULES))]


def test_every_legal_pair_is_there():
    """Also with other draws, which make other problems."""
    for seed in (1, 2):
        found = covering(seed)
        assert all(map(FORWARD.legal, found)) and len(found) < 40
        for pair in (
            {"tree", "softcap"},
            {"ranges", "splits"},
            {"e4m3", "window"},
            {"mla", "pages"},
            {"bias", "d512"},
            {"blocks", "splits"},
            *({"blocks", other} for other in ("packed", "lengths", "pages", "e4m3", "nvfp4", "mla")),
        ):
            assert any(pair <= features for features in found)
        found = covering(seed, RULES)
        assert all(map(RULES.legal, found)) and len(found) < 30
        for pair in (
            {"softcap", "d512"},
            {"ranges", "packed"},
            {"blocks", "deterministic"},
            {"d192/128", "window"},
        ):
            assert any(pair <= features for features in found)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.id)
def test_problem(problem, arch, simulate_as, check_order):
    simulate_as(arch, small=problem.seed % 2 == 0, sm_count=2)
    arguments = problem.arguments()
    problem.check(problem.run(arguments, backend="sim"), arguments)
    assert sim.last_report() is not None


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.id)
def test_gradients(case, arch, simulate_gradients_as, check_order):
    simulate_gradients_as(arch)
    case.judge(KERNEL_TOLERANCE, backend="reference")
