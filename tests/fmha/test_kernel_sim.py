"""The sm100 attention kernel in the simulator, on every case, against the reference and torch."""

import pytest
import torch
from attention_cases import CASES, PARTLY_POISONED, arguments, check, poisoned_out

from warpspec.fmha import attention

BACKEND = "sim"


def run(case, seed=0):
    """Run the case into an output full of NaN and judge it; inputs must come back as they were."""
    inputs = arguments(case, seed)
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    out = poisoned_out(case)
    result = attention(**inputs, out=out, return_lse=case.normalize, backend=BACKEND)
    assert (result[0] if isinstance(result, tuple) else result) is out
    check(case, result, inputs)
    for name, t in before.items():
        torch.testing.assert_close(
            inputs[name], t, rtol=0, atol=0, equal_nan=True, msg=f"{name} was modified"
        )


@pytest.mark.parametrize("case", [case for case in CASES if not case.long], ids=lambda case: case.id)
def test_case(case):
    run(case)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case.long], ids=lambda case: case.id)
def test_long_case(case):
    run(case)


@pytest.mark.parametrize("case", PARTLY_POISONED, ids=lambda case: case.id)
def test_nan_and_inf_reach_only_rows_that_see_them(case):
    run(case)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_with_other_data(case, seed):
    run(case, seed)
