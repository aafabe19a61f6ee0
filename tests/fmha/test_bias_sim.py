"""Additive bias in the sm100 kernel, in the simulator, against the reference.

Aligned rows come through TMA; rows of an odd length are read from global memory.
"""

import itertools

import pytest
import torch
from helpers.attention_cases import LSE_TOLERANCE, O_TOLERANCE, relative_error
from helpers.suites import long

from warpspec.common.compile import resources
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import MAX_SMEM_PER_CTA
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention, merge
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm100 import ATTENTION, AttentionConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARED = dict(batch=1, seq_q=3, heads_q=16, head_dim=512, shared_kv=True)


def inputs(
    seq_k, bias_dtype, *, heads=True, batches=True, batch=2, seq_q=20, heads_q=4, head_dim=64, dtype=BF16,
    shared_kv=False, hidden=0.3, **options,
):  # fmt: skip
    """Arguments of ``attention``; a part ``hidden`` of the bias is -inf."""
    generator = torch.Generator().manual_seed(seq_k)
    k, v = (torch.randn(batch, seq_k, 1, head_dim, generator=generator).to(dtype) for _ in range(2))
    bias = 2 * torch.randn(
        batch if batches else 1, heads_q if heads else 1, seq_q, seq_k, generator=generator
    )
    bias[torch.rand(bias.shape, generator=generator) < hidden] = -torch.inf
    return {
        "q": torch.randn(batch, seq_q, heads_q, head_dim, generator=generator).to(dtype),
        "k": k,
        "v": None if shared_kv else v,
        "bias": bias.to(bias_dtype),
        **options,
    }


def check(arguments):
    """Run, compare o and lse with the reference's, return them."""
    o, lse = attention(**arguments, return_lse=True, backend="sim")
    state = attention(**{**arguments, "sink": None}, normalize=False, backend="reference")
    expected, _ = merge([state], arguments.get("sink"))
    torch.testing.assert_close(lse, state.lse, rtol=0, atol=LSE_TOLERANCE)
    undefined = ~expected.isfinite().all(dim=-1, keepdim=True)
    assert not o.isfinite().all(dim=-1, keepdim=True)[undefined].any()
    o_error = relative_error(*(torch.where(undefined, 0.0, t.float()) for t in (o, expected)))
    assert o_error <= O_TOLERANCE[o.dtype]
    assert (o.transpose(1, 2)[state.row_sum == 0] == 0).all()
    return o, lse


@pytest.mark.parametrize(
    "seq_k, heads, batches",
    [long(*case) for case in itertools.product((264, 261), (False, True), (False, True))],
)
def test_broadcasts(seq_k, heads, batches):
    """Through TMA and from global memory; -inf here and there."""
    check(inputs(seq_k, BF16, heads=heads, batches=batches))


@pytest.mark.long
def test_expanded_dimensions_are_broadcast():
    arguments = inputs(264, BF16, heads=False, batches=False)
    whole = attention(**arguments, backend="sim")
    expanded = arguments["bias"].expand(2, 4, -1, -1)
    torch.testing.assert_close(
        attention(**{**arguments, "bias": expanded}, backend="sim"), whole, rtol=0, atol=0
    )


def test_rows_that_the_bias_hides_whole():
    arguments = inputs(
        264, BF16, sink=torch.randn(4), causal=True, kv_lengths=torch.full((2,), 264, dtype=torch.int32)
    )
    arguments["bias"][0, 1, 3] = -torch.inf
    arguments["bias"][1, :, 19] = -torch.inf
    arguments["bias"][1, 2, :19, 128:] = -torch.inf  # whole KV tiles, the first visited ones
    _, lse = check(arguments)
    assert (lse[0, 1, 3], *lse[1, :, 19]) == (-torch.inf,) * 5


@pytest.mark.long
def test_largest_negative_bias_is_not_minus_infinity():
    """Masks made of it: a row of nothing else weighs all keys alike, beside others it counts as 0."""
    arguments = inputs(264, FP32, hidden=0.0)
    arguments["bias"][:, :, :, 100:] = torch.finfo(FP32).min
    arguments["bias"][0, 0, 0] = torch.finfo(FP32).min
    o, _ = attention(**arguments, return_lse=True, backend="sim")
    expected = attention(**arguments, backend="reference")
    assert relative_error(o.float(), expected.float()) <= 2 * O_TOLERANCE[BF16]


@pytest.mark.parametrize("seq_k", [pytest.param(264, marks=pytest.mark.long), 261])
def test_nan_at_keys_that_only_the_bias_hides(seq_k):
    """NaN in K and V at a key hidden from most rows, and one row that sees V's; heads share the bias."""
    arguments = inputs(seq_k, BF16, heads=False, batch=1, seq_q=8, heads_q=2)
    arguments["bias"][..., [7, 150]] = -torch.inf
    arguments["k"][:, 7] = torch.nan
    arguments["v"][:, [7, 150]] = torch.nan
    arguments["bias"][0, 0, 5, 150] = 0.5
    o, _ = check(arguments)
    assert o[0, 5].isnan().all() and int(o.isnan().any(dim=-1).sum()) == o.shape[2]


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize("seq_k", [264, pytest.param(261, marks=pytest.mark.long)])
def test_nan_bias_at_keys_that_are_hidden_anyway(seq_k):
    """Past the KV length and after the row's position."""
    lengths = torch.tensor([seq_k, 140], dtype=torch.int32)
    arguments = inputs(seq_k, BF16, causal=True, kv_lengths=lengths, sink=torch.randn(4))
    for batch, length in enumerate((seq_k, 140)):
        for query in range(20):
            arguments["bias"][batch, :, query, length - 20 + query + 1 :] = torch.nan
    check(arguments)


@pytest.mark.long
def test_states_merge():
    arguments = inputs(264, BF16)
    states = [
        attention(
            arguments["q"],
            *(arguments[name][:, keys] for name in "kv"),
            bias=arguments["bias"][..., keys],
            normalize=False,
            backend="sim",
        )
        for keys in (slice(0, 136), slice(136, 264))
    ]
    o, lse = merge(states)
    expected, expected_lse = attention(**arguments, return_lse=True, backend="reference")
    assert relative_error(o, expected.float()) <= 1.5 * O_TOLERANCE[BF16]
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=LSE_TOLERANCE)


@pytest.mark.long
def test_shared_kv_at_512():
    check(inputs(136, BF16, **SHARED, causal=True))


LONG = {
    "fp32": dict(seq_k=264, bias_dtype=FP32),
    "fp32-global": dict(seq_k=261, bias_dtype=FP32, heads=False),
    "fp16": dict(seq_k=264, bias_dtype=BF16, dtype=FP16, causal=True),
    "fp16-fp32": dict(seq_k=264, bias_dtype=FP32, dtype=FP16, seq_q=140, heads_q=2, batch=1),
    "scale-negative": dict(seq_k=264, bias_dtype=FP32, scale=-0.2),
    "scale-zero": dict(seq_k=264, bias_dtype=BF16, scale=0.0),
    "group-3": dict(seq_k=264, bias_dtype=BF16, heads_q=3, seq_q=50),
    "group-3-shared": dict(seq_k=264, bias_dtype=BF16, heads_q=3, seq_q=50, heads=False),
    "decode-128": dict(seq_k=264, bias_dtype=BF16, heads_q=128, seq_q=1, batch=1),
    "decode-128-shared": dict(seq_k=264, bias_dtype=FP32, heads_q=128, seq_q=1, heads=False),
    "window": dict(seq_k=264, bias_dtype=BF16, seq_q=150, heads_q=2, batch=1, causal=True, window=(90, 0)),
    "splits": dict(seq_k=520, bias_dtype=BF16, seq_q=2, num_splits=3),
    **{
        f"{d}-{'shared-' if shared else ''}{str(dtype)[6:]}": dict(
            seq_k=200, bias_dtype=dtype, seq_q=7, batch=1, head_dim=d, shared_kv=shared, causal=d == 256
        )
        for d in (64, 128, 256, 512)
        for shared in (False, True)
        for dtype in (BF16, FP32)
    },
}


@pytest.mark.long
@pytest.mark.parametrize("arguments", LONG.values(), ids=LONG)
def test_long_case(arguments):
    check(inputs(**arguments))


def problem(head_dim, bias_dtype, shared_kv, seq_q, heads_q, heads, seq_k=264):
    made = inputs(
        seq_k, bias_dtype, heads=heads, batch=1, seq_q=seq_q, heads_q=heads_q, head_dim=head_dim,
        shared_kv=shared_kv,
    )  # fmt: skip
    return AttentionProblem.of(**made)


@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("bias_dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_every_shape_has_room_for_a_bias(head_dim, bias_dtype, shared_kv):
    """Streamed, within the budgets (the configuration asserts them), K and V still double-buffered where they
    were; a bias that heads share takes so little for one query that nothing else changes."""
    config = AttentionConfig.of(problem(head_dim, bias_dtype, shared_kv, 128, 1, True), SIMULATED["sm_100a"])
    plain = AttentionConfig.of(
        problem(head_dim, bias_dtype, shared_kv, 128, 1, True, seq_k=261), SIMULATED["sm_100a"]
    )
    assert config.bias_stages >= 1 and plain.bias_stages == 0
    assert config.kv_stages >= min(plain.kv_stages, 2) and config.smem_bytes <= MAX_SMEM_PER_CTA
    decode = AttentionConfig.of(problem(head_dim, bias_dtype, shared_kv, 1, 128, False), SIMULATED["sm_100a"])
    assert (decode.bias_stages, decode.ctas_per_sm) == (2, plain.ctas_per_sm)
    assert decode.bias_ring_bytes <= 8 * 1024


@pytest.mark.long
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_k", [264, 261])
@pytest.mark.parametrize("shared_kv", [False, True])
@pytest.mark.parametrize("bias_dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_compiles_without_spills(head_dim, bias_dtype, shared_kv, seq_k, causal):
    made = inputs(seq_k, bias_dtype, batch=1, head_dim=head_dim, shared_kv=shared_kv, causal=causal)
    config = AttentionConfig.of(AttentionProblem.of(**made, return_lse=True), SIMULATED["sm_100a"])
    (kernel,) = resources(ATTENTION.compiled(config, "sm_100a")).values()
    assert kernel.local_bytes == 0


def test_rows_with_gaps_between_keys_are_named():
    arguments = inputs(264, BF16)
    arguments["bias"] = arguments["bias"].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(UnsupportedProblem, match="bias: its last dimension must be contiguous"):
        attention(**arguments, backend="sim")
