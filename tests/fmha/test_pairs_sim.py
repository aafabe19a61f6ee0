"""Every feature of attention with every other one, by the kernels in the simulator."""

import pytest
from helpers.feature_pairs import Problem, covering, legal

from warpspec import sim

PROBLEMS = [Problem(features, seed) for seed, features in enumerate(covering(2026))]


def test_every_legal_pair_is_there():
    """Also with other draws, which make other problems."""
    for seed in (1, 2):
        found = covering(seed)
        assert all(map(legal, found)) and len(found) < 40
        for pair in (
            {"tree", "softcap"},
            {"ranges", "splits"},
            {"e4m3", "window"},
            {"mla", "pages"},
            {"bias", "d512"},
            {"blocks", "splits"},
            *({"blocks", other} for other in ("packed", "lengths", "pages", "e4m3", "mla")),
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
