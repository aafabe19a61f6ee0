"""Calls that nobody watches go past torch's operators, which import torch._dynamo at the first of them, for seconds."""

import subprocess
import sys

import pytest
import torch
from helpers.recorder import Recorder

from warpspec.common.forward_only import forward_only

# What a process of its own does, on backend "reference"; gradients are asked for where there are any.
SCRIPT = """
import os, sys
sys.path[:] = {path!r}
os.environ["WARPSPEC_BACKEND"] = "reference"
import torch
from helpers.moe_cases import make_experts
from helpers.swap_cases import small
from warpspec.fmha import attention, attention_varlen, merge
from warpspec.fmha.flash_attn import flash_attn_func, flash_attn_varlen_func
from warpspec.latent.projection import output_projection
from warpspec.moe import grouped_swiglu, moe_ffn, route
from warpspec.softmax import softmax, softmax_topk
from warpspec.swap import swap_ffn_decode

def nothing_came_by(name):
    assert "torch._dynamo" not in sys.modules, name

nothing_came_by("import")
q, k, v = (torch.randn(1, 6, 2, 64).bfloat16().requires_grad_() for _ in range(3))
starts = torch.tensor([0, 2, 6], dtype=torch.int32)
rows = [t[0] for t in (q, k, v)]
for o in (
    attention(q, k, v, causal=True),
    attention(q, k, v, return_lse=True)[1],
    attention(q, k),
    attention_varlen(*rows, starts, max_seqlen_q=4, cu_seqlens_k=starts),
    flash_attn_func(q, k, v, causal=True),
    flash_attn_varlen_func(*rows, starts, starts, 4, 4),
):
    o.sum().backward()
assert q.grad is not None and v.grad is not None
torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
merge([attention(q, k, v, normalize=False)])
nothing_came_by("attention")

x = torch.randn(5, 32, requires_grad=True)
softmax(x).square().sum().backward()
assert x.grad.norm() > 0
nothing_came_by("softmax")
assert softmax_topk(x, 2)[0].requires_grad
nothing_came_by("softmax_topk")

experts = make_experts(4, 32, 32)[0]
ids, weights = route(torch.randn(5, 4), 2)
for layer in (experts, experts.for_backend("sm90")):
    for tokens in (x.bfloat16(), x.detach().bfloat16()):
        assert moe_ffn(tokens, layer, ids, weights).requires_grad == tokens.requires_grad
        grouped_swiglu(tokens, layer.w13, torch.tensor([1, 1, 4, 5], dtype=torch.int32))
nothing_came_by("moe")

token, state, weights = small(1, cores=4, d_model=32, d_ff=16)
swap_ffn_decode(token, state, weights, events=1, k_ffn=1)
nothing_came_by("swap")

with torch.no_grad():
    output_projection(torch.randn(3, 2, 512).bfloat16(), torch.randn(2, 64, 512).bfloat16().requires_grad_())
nothing_came_by("latent")
"""


def test_nothing_imports_dynamo():
    script = SCRIPT.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestForwardOnly:
    def test_backward_is_refused(self):
        x = torch.ones(3, requires_grad=True)
        values, count = forward_only("none of these", lambda x, n: (x * n, torch.tensor(n)), x, 2)
        assert values.requires_grad and not count.requires_grad and values.tolist() == [2, 2, 2]
        with pytest.raises(NotImplementedError, match=r"^none of these$"):
            values.sum().backward()

    def test_nothing_is_recorded_without_need(self):
        assert not forward_only("", torch.neg, torch.ones(3)).requires_grad


def test_modes_see_operators():
    from helpers.moe_cases import make_experts
    from helpers.swap_cases import small

    from warpspec.moe import moe_ffn, route
    from warpspec.softmax import softmax, softmax_topk
    from warpspec.swap import swap_ffn_decode

    options = {"backend": "reference"}
    x = torch.randn(5, 32, requires_grad=True)
    layer, (token, state, weights) = make_experts(4, 32, 32)[0], small(1, cores=4, d_model=32, d_ff=16)
    with Recorder() as seen:
        softmax(x, **options).sum().backward()
        softmax_topk(x, 2, **options)
        moe_ffn(x.bfloat16(), layer, *route(torch.randn(5, 4), 2), **options)
        swap_ffn_decode(token, state, weights, events=1, k_ffn=1, **options)
    assert seen.names == ["softmax", "softmax_topk", "moe_ffn", "swap_ffn"]


def test_swap_states_count_as_written():
    from helpers.swap_cases import small

    from warpspec.swap import swap_ffn_decode

    x, state, weights = small(1, cores=4, d_model=32, d_ff=16)
    before = state.ram._version, state.map._version
    swap_ffn_decode(x, state, weights, events=1, k_ffn=1, in_place=True, backend="reference")
    assert state.ram._version > before[0] and state.map._version > before[1]
