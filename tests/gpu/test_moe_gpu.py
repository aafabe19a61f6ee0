"""What of the layer runs on any GPU: sorting, routing and un-permuting without a word from the host."""

import pytest
import torch
from moe_cases import make_experts, randn

from warpspec.moe import moe_ffn, ops, route
from warpspec.moe.permute import sort_tokens
from warpspec.moe.unpermute import unpermute

pytestmark = pytest.mark.gpu

TOKENS, CHOICES, EXPERTS, WIDTH = 700, 6, 40, 2880


@pytest.fixture
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def case():
    """(logits, rows, weights) on the GPU."""
    rows = randn(TOKENS * CHOICES, WIDTH, seed=2).bfloat16()
    return randn(TOKENS, EXPERTS).cuda(), rows.cuda(), randn(TOKENS, CHOICES, seed=1).cuda()


def test_no_synchronisation(no_synchronisation):
    torch.cuda.set_sync_debug_mode("default")
    logits, rows, weights = case()
    out = torch.full((TOKENS, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
    unpermute(rows, sort_tokens(route(logits, CHOICES)[0], EXPERTS).position, weights, out)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    ids, _ = route(logits, CHOICES, scoring="sigmoid", bias=logits[0])
    tokens = sort_tokens(torch.where(ids == 3, -1, ids), EXPERTS)
    ops.sorted_rows(TOKENS * CHOICES, tokens.offsets)
    unpermute(rows, tokens.position, weights, out)


def test_same_as_on_the_cpu():
    logits, rows, weights = case()
    ids, _ = route(logits, CHOICES)
    ids[::7, 2] = -1
    tokens, expected = sort_tokens(ids, EXPERTS), sort_tokens(ids.cpu(), EXPERTS)
    for name in ("source", "position", "offsets"):
        assert torch.equal(getattr(tokens, name).cpu(), getattr(expected, name))
    rows[int(tokens.offsets[-1]) :] = torch.nan
    out = torch.full((TOKENS, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
    unpermute(rows, tokens.position, weights, out)
    exact = torch.zeros(TOKENS, WIDTH, dtype=torch.double, device="cuda")
    for j in range(CHOICES):
        taken = tokens.position[:, j] >= 0
        exact[taken] += weights[taken, j, None].double() * rows[tokens.position[taken, j].long()].double()
    assert (out.double() - exact).abs().le(exact.abs() * 2**-8 * 1.01 + 1e-4).all()
    again = torch.full_like(out, torch.nan)
    unpermute(rows, tokens.position, weights, again)
    assert torch.equal(again, out)


def test_under_graph_capture():
    logits, rows, weights = case()
    out = torch.full((TOKENS, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")

    def layer():
        unpermute(rows, sort_tokens(route(logits, CHOICES)[0], EXPERTS).position, weights, out)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    logits.copy_(randn(TOKENS, EXPERTS, seed=9))
    layer()
    expected = out.clone()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_reference_on_the_gpu():
    layer, _ = make_experts(5, 64, 40, biases=True, shared=1)
    x = randn(30, 64).bfloat16()
    ids, weights = route(randn(30, 4), 2)
    expected = moe_ffn(x, layer, ids, weights, backend="reference")
    on_gpu = (tensor.cuda() for tensor in (ids, weights))
    got = moe_ffn(x.cuda(), layer.to("cuda"), *on_gpu, backend="reference")
    torch.testing.assert_close(got.cpu(), expected, rtol=2e-2, atol=2e-2)
