"""A case of trees or ranges, called and judged by the reference."""

import torch

from helpers.attention_cases import LSE_TOLERANCE, O_TOLERANCE, relative_error
from warpspec.fmha import attention, attention_varlen


def run(case, inputs: dict, **where):
    """(o, lse) of a call, o over a poisoned ``out``."""
    call = attention_varlen if case.packed else attention
    normalize = inputs.get("normalize", True)
    out = torch.full_like(inputs["q"], torch.nan, dtype=None if normalize else torch.float32)
    result = call(**inputs, out=out, return_lse=normalize, **where)
    if normalize:
        return result
    sums = result.row_sum.transpose(-1, -2)[..., None]
    return torch.where(sums == 0, 0.0, result.o / sums), result.lse


def check(case, got, inputs: dict) -> None:
    """Assert that a result is the reference's, NaN and Inf at the same places."""
    o, lse = (t.cpu() for t in got)
    expected, expected_lse = run(case, inputs, backend="reference")
    if case.packed:
        o, expected = o[None], expected[None]
    seen = expected.isfinite()
    assert not o[~seen].isfinite().any()
    assert case.poisoned == (not seen.all())
    o, expected = (torch.where(seen, t.float(), 0.0) for t in (o, expected))
    error = relative_error(o, expected)
    assert error <= O_TOLERANCE[case.dtype], error
    torch.testing.assert_close(lse, expected_lse, rtol=0.0, atol=LSE_TOLERANCE)  # -inf where rows see no key
