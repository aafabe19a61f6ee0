"""The shared attention cases and their judge: the reference passes, subtly wrong results do not."""

import pytest
import torch
from helpers.attention_cases import CASES, PARTLY_POISONED, arguments, check, poisoned_out

from warpspec.fmha import AttentionState, attention

BY_ID = {case.id: case for case in CASES}


def test_ids_are_unique():
    assert len(BY_ID) == len(CASES)


@pytest.mark.parametrize("case", CASES + PARTLY_POISONED, ids=lambda case: case.id)
def test_reference_passes(case):
    inputs = arguments(case)
    out = poisoned_out(case)
    check(case, attention(**inputs, out=out, return_lse=case.normalize, backend="reference"), inputs)


def result(case_id, **changes):
    """The case, its inputs and the reference's result for changed inputs."""
    case = BY_ID[case_id]
    inputs = arguments(case)
    return case, inputs, attention(**{**inputs, **changes}, return_lse=case.normalize, backend="reference")


def fails(case, wrong, inputs):
    with pytest.raises(AssertionError):
        check(case, wrong, inputs)


def test_mask_off_by_one_key_fails():
    case, inputs, wrong = result("window-both", window=(18, 33))
    fails(case, wrong, inputs)
    case, inputs, wrong = result("causal-square", q_start=torch.tensor([1], dtype=torch.int32))
    fails(case, wrong, inputs)


def test_forgotten_sink_fails():
    fails(*reorder(result("gpt-oss-layer", sink=None)))


def test_sink_counted_in_lse_fails():
    case, inputs, (o, lse) = result("sink")
    fails(case, (o, torch.logaddexp(lse, inputs["sink"].float()[None, :, None].expand_as(lse))), inputs)


def test_base_2_lse_fails():
    case, inputs, (o, lse) = result("one-tile")
    fails(case, (o, lse / torch.log(torch.tensor(2.0))), inputs)


def test_element_never_written_fails():
    case, inputs, (o, lse) = result("past-a-tile")
    o[0, 128, 1, 63] = torch.nan
    fails(case, (o, lse), inputs)


def test_one_wrong_row_fails():
    case, inputs, (o, lse) = result("causal-square")
    o[0, 200] = 0
    fails(case, (o, lse), inputs)


def test_two_heads_exchanged_fails():
    case, inputs, (o, lse) = result("decode-8-to-1")
    fails(case, (o.flip(2), lse), inputs)


def test_precision_of_a_coarser_dtype_fails():
    case, inputs, (o, lse) = result("one-tile-fp16")
    fails(case, (o.bfloat16().half(), lse), inputs)


def test_nonzero_empty_row_fails():
    case, inputs, (o, lse) = result("causal-fewer-keys")
    o[0, 0] = 1e-3
    fails(case, (o, lse), inputs)


def test_state_against_any_row_max_passes_and_wrong_sum_fails():
    case, inputs, state = result("state")
    shift = torch.where(state.row_max == -torch.inf, 0.0, 1.5)
    factor = shift.exp()
    moved = AttentionState(
        state.o * factor.transpose(1, 2)[..., None], state.row_max - shift, state.row_sum * factor
    )
    check(case, moved, inputs)
    fails(case, AttentionState(state.o, state.row_max, state.row_sum * 1.01), inputs)


def reorder(case_inputs_wrong):
    case, inputs, wrong = case_inputs_wrong
    return case, wrong, inputs
