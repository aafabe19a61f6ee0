"""Forward-mode derivatives are refused by name: torch drops a tangent that an operator does not pass on."""

import pytest
import torch
from torch.autograd import forward_ad

from warpspec.fmha import attention
from warpspec.softmax import softmax, softmax_topk

K = torch.ones(1, 3, 2, 64, dtype=torch.bfloat16)
CALLS = {
    "q": lambda x: attention(x.view(1, 1, 2, 64).bfloat16(), K),
    "x": softmax,
    "logits": lambda x: softmax_topk(x, 2)[0],
}


@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_refused(name):
    x = torch.randn(128)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"^{name}: forward-mode"):
        CALLS[name](forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(NotImplementedError, match=f"^{name}: forward-mode"):
        torch.func.jvp(CALLS[name], (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():  # nobody's derivative
        assert CALLS[name](x).isfinite().all()
