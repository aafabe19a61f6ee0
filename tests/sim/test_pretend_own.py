"""warpspec's own operations on tensors of a pretended device are launches of the session."""

import pytest
import torch

from warpspec import sim
from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha import attention
from warpspec.softmax import softmax


def test_one_session_after_another():
    for arch in ("sm_100a", "sm_90a"):  # the second must not find the first one's kernels
        with sim.intercept(arch, check="order") as session:
            x = torch.randn(5, 130, device="cuda")
            y = softmax(x)
            assert y.is_cuda and torch.allclose(y, torch.softmax(x, -1), atol=1e-6)
        (launch,) = session.report.launches
        assert session.calls == 1 and "Rows" in launch.kernel and not session.findings
    assert softmax(torch.zeros(1, 4)).eq(0.25).all()  # on the CPU again


def test_the_devices_backend():
    with sim.intercept("sm_90a"):
        with pytest.raises(UnsupportedProblem, match="'sim': the simulator takes CPU tensors"):
            softmax(torch.ones(2, 8, device="cuda"), backend="sim")
        with pytest.raises(UnsupportedProblem, match="cuda:0 runs 'sm90' kernels"):
            softmax(torch.ones(2, 8, device="cuda"), backend="sm100")


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_attention_and_its_gradients(arch):
    with sim.intercept(arch) as session:
        q, k, v = (torch.randn(1, 40, n, 64, dtype=torch.bfloat16, device="cuda") for n in (2, 1, 1))
        found = []
        for backend in ("auto", "reference"):
            leaf = q.detach().clone().requires_grad_()
            o = attention(leaf, k, v, causal=True, backend=backend)
            o.float().square().sum().backward()
            assert leaf.grad.is_cuda
            found.append((o.detach().float().cpu(), leaf.grad.float().cpu()))
    # Attention; two for its gradients, or three if dQ is made by a kernel of its own.
    assert session.calls in (3, 4)
    for got, wanted in zip(*found, strict=True):
        assert (got - wanted).norm() < 6e-3 * wanted.norm()
