"""Soft caps: results and gradients of the kernels in the simulator, with logits of up to three times the cap and more.

Judged by the reference, which ``test_backward_reference`` and ``test_the_definition`` compare with float64.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import Case, arguments, check, poisoned_out
from helpers.gradient_cases import KERNEL_TOLERANCE, definition
from helpers.gradient_cases import Case as Gradients
from helpers.suites import long_but
from helpers.varlen_cases import Packed

from warpspec import sim
from warpspec.fmha import UnsupportedProblem, attention, attention_varlen, merge

# q.k of normal rows has a deviation of 8 at D 64: logits here have one of 1.6 to 2 times the cap.
STEEP = dict(scale=1.0, softcap=5.0)
PACKED = Packed(
    "packed",
    seq_q=(3, 0, 1, 70, 5),
    seq_k=(100, 20, 0, 170, 5),
    causal=True,
    window=(60, 0),
    sink=True,
    **STEEP,
)
PAGED = Packed(
    "paged-splits", seq_q=(1,) * 5, seq_k=(300, 0, 37, 150, 64), heads_q=8, head_dim=128, page_size=32, num_splits=3,
    scale=0.7, softcap=5.0, poisoned=(2,),
)  # fmt: skip
STATE = Packed(
    "state", seq_q=(150, 2), seq_k=(150, 260), heads_q=2, heads_kv=1, causal=True, normalize=False, **STEEP
)
WIDE = Packed("wide-fp16", seq_q=(70,), seq_k=(140,), heads_q=1, heads_kv=1, head_dim=256, causal=True, scale=-0.5,
              softcap=4.0, dtype=torch.float16)  # fmt: skip
SPILLED = 16  # bytes that ptxas keeps on the stack, once a tile
EVERY = [(batch, arch) for batch in (PACKED, PAGED, WIDE, STATE) for arch in ("sm_90a", "sm_100a")]


@pytest.mark.long  # by default test_head_sizes_sim has a packed batch with a soft cap
@pytest.mark.parametrize(("batch", "arch"), EVERY, ids=lambda v: getattr(v, "id", v))
def test_packed(batch, arch, simulate_as):
    """NaN and Inf at hidden keys and in whole requests; pages, splits, windows, sinks, states; no more
    spills than that."""
    simulate_as(arch, small=True)
    options = batch.arguments()
    result = attention_varlen(**options, out=batch.poisoned_out(), return_lse=batch.normalize, backend="sim")
    batch.check(result)
    assert all(found.local_bytes <= SPILLED for found in sim.last_report().launches)


@pytest.mark.parametrize("arch", long_but(["sm_90a"], ["sm_90a", "sm_100a"]))
def test_bias_is_not_capped(arch, simulate_as):
    """A bias that is large against the cap, and hides keys; a lower cap than its logits."""
    simulate_as(arch, small=True)
    case = Case("bias", seq_q=40, seq_k=150, heads_q=2, causal=True, scale=1.0, softcap=2.0, sink=True)
    inputs = arguments(case)
    bias = 20 * torch.randn(1, 1, 40, 150, generator=torch.Generator().manual_seed(1))
    bias[..., 7::9] = -torch.inf
    inputs["bias"] = bias
    check(
        case,
        attention(**inputs, out=poisoned_out(case), return_lse=True, backend="sim"),
        inputs,
        against_torch=False,
    )


@pytest.mark.parametrize("scale", [0.125, -0.125, 2.0**-60])
def test_small_and_large_scores(scale, simulate_as):
    """Warps cap small scores by a polynomial: those of every second warp are, just within its range and beyond."""
    simulate_as("sm_90a", small=True)
    case = Case("small", seq_q=64, seq_k=320, scale=scale, softcap=16.0)
    inputs = arguments(case)
    inputs["q"] *= 0.125 / abs(scale) if abs(scale) < 0.1 else 1.0
    inputs["q"][:, 16:32] *= 20
    inputs["q"][:, 48:64] *= torch.linspace(1, 2, 16).bfloat16()[:, None, None]
    check(case, attention(**inputs, out=poisoned_out(case), return_lse=True, backend="sim"), inputs)


def test_the_definition():
    """The reference against float64; a cap of 0 is none, a large one hardly any; the union of two states."""
    case = Gradients("definition", seq_q=30, seq_k=50, causal=True, sink=True, scale=1.5, softcap=4.0)
    tensors = {name: t.detach() for name, t in case.tensors().items()}
    o, lse = case.call(tensors, backend="reference")
    leaves = [tensors[name][0].double() for name in "qkv"]
    expected, expected_lse = definition(case, *leaves, tensors["sink"].double(), None, None)
    assert (o[0] - expected).norm() <= 3e-3 * expected.norm()
    assert (lse[0] - expected_lse).abs().max() <= 1e-5
    assert expected_lse.max() < 4.0 + 4.0  # ln(50 e**cap), which the logits without a cap exceed by far
    plain = replace(case, softcap=None).call(tensors, backend="reference")
    for none in (0, 0.0):
        assert torch.equal(replace(case, softcap=none).call(tensors, backend="reference")[0], plain[0])
    assert (plain[1] - lse).abs().max() > 1
    huge = replace(case, softcap=10000.0).call(tensors, backend="reference")
    assert (huge[1] - plain[1]).abs().max() <= 1e-3
    q, k, v = (tensors[name] for name in "qkv")
    options = dict(scale=1.5, softcap=4.0, normalize=False, backend="reference")
    union = merge([attention(q, k[:, rows], v[:, rows], **options) for rows in (slice(20), slice(20, None))])
    whole = attention(q, k, v, scale=1.5, softcap=4.0, return_lse=True, backend="reference")
    assert (union[1] - whole[1]).abs().max() <= 1e-5


REFUSED = r"^sm90 attention's gradients: softcap: must be at least 1 at head sizes above 128, got 0\.9$"
GRADIENTS = {
    128: Gradients("window-sink-lse", seq_q=70, seq_k=140, heads_q=1, head_dim=128, causal=True, window=(50, 0),
                   sink=True, through="o+lse", scale=0.5, softcap=3.0),
    64: Gradients("packed-bf16", lengths_q=(20, 0, 3), lengths_k=(20, 5, 9), heads_q=1, causal=True, **STEEP),
    256: Gradients("bias", seq_q=20, seq_k=65, heads_q=1, head_dim=256, bias=(False, True), scale=-0.3, softcap=3.0,
                   dtype=torch.float16),
}  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "arch"),
    long_but([(128, "sm_90a")], [(d, a) for d in (64, 128, 256) for a in ("sm_90a", "sm_100a")]),
)
def test_gradients(dim, arch, simulate_gradients_as):
    simulate_gradients_as(arch)
    case = GRADIENTS[dim]
    case.judge(KERNEL_TOLERANCE, backend="reference")


@pytest.mark.parametrize(("dim", "v_dim"), [(256, 256), (192, 128)])
def test_caps_that_gradients_do_not_take(dim, v_dim, simulate_gradients_as):
    """At large heads P, of which the cap's derivative is made, is exchanged in fp16."""
    simulate_gradients_as("sm_90a")
    q, k = (torch.zeros(1, 0, 1, dim).bfloat16().requires_grad_() for _ in "qk")  # no kernel is needed
    v = torch.zeros(1, 0, 1, v_dim).bfloat16()
    for cap, refusal in (
        (1.0, contextlib.nullcontext()),
        (0.9, pytest.raises(UnsupportedProblem, match=REFUSED)),
    ):
        o = attention(q, k, v, softcap=cap, backend="reference")
        with refusal:
            o.sum().backward()
