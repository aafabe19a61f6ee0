"""Head sizes between the tuned ones, and V's own: kernels of both architectures in the simulator, and what is
refused."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers.attention_cases import Case, arguments, check
from helpers.gradient_cases import Case as Gradients
from helpers.suites import long, long_but
from helpers.varlen_cases import Packed

from warpspec import sim
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention, attention_varlen, launch, merge
from warpspec.fmha.backward import call as backward_call
from warpspec.fmha.backward import launch as backward_launch
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.features import Mask
from warpspec.fmha.heads import HeadSizes, class_of, supported
from warpspec.fmha.logits import BiasLayout, LogitOptions
from warpspec.fmha.problem import AttentionProblem

ARCHS = ("sm_90a", "sm_100a")
# MiMo's: sinks, a window that counts the own key; DeepSeek V3's prefill in chunks.
MIMO = Packed("mimo", seq_q=(3, 0, 70), seq_k=(100, 20, 150), heads_q=4, heads_kv=1, head_dim=192, v_dim=128,
              causal=True, window=(40, 0), sink=True, layout="sliced")  # fmt: skip
# Rows of 144 and 160 bytes in pages; split keys, whose partial results have wider rows.
PAGED = Packed("paged", seq_q=(1,) * 4, seq_k=(300, 0, 37, 150), heads_q=8, head_dim=72, page_size=16, num_splits=3,
               poisoned=(2,))  # fmt: skip
LINE = Packed("line-state", seq_q=(150, 2), seq_k=(150, 260), heads_q=2, heads_kv=1, head_dim=80, causal=True,
              normalize=False)  # fmt: skip
WIDE = Packed(
    "wide", seq_q=(70,), seq_k=(140,), heads_q=1, heads_kv=1, head_dim=200, causal=True, dtype=torch.float16
)
TOWER = Packed("tower", seq_q=(90, 40), seq_k=(90, 40), head_dim=96, sink=True, softcap=3.0, scale=1.0)
RUNS = [(MIMO, "sm_90a"), (PAGED, "sm_90a"), (TOWER, "sm_100a")]
EVERY = [(batch, arch) for batch in (MIMO, PAGED, LINE, WIDE, TOWER) for arch in ARCHS]


@pytest.mark.parametrize(("batch", "arch"), long_but(RUNS, EVERY), ids=lambda v: getattr(v, "id", v))
def test_packed(batch, arch, simulate_as):
    """NaN at hidden keys, between heads and after them: what a row's end is, TMA must know."""
    simulate_as(arch, small=True)
    options = batch.arguments()
    result = attention_varlen(**options, out=batch.poisoned_out(), return_lse=batch.normalize, backend="sim")
    batch.check(result)
    assert all(found.local_bytes <= 16 for found in sim.last_report().launches)


@pytest.mark.parametrize("size", long_but([40], range(8, 257, 24)))
def test_against_torch(size, simulate_as):
    simulate_as("sm_90a", small=True)
    case = Case("sizes", seq_q=40, seq_k=150, heads_q=2, head_dim=size, causal=True, layout="padded")
    inputs = arguments(case)
    check(case, attention(**inputs, return_lse=True, backend="sim"), inputs)


def test_the_definition():
    """Unequal sizes in the reference, states of two sets of keys, against float64; the default scale is Q's."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 2, 24, generator=generator).bfloat16() for n in (9, 30))
    v = torch.randn(1, 30, 2, 40, generator=generator).bfloat16()
    logits = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 24**-0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.double())
    o, lse = attention(q, k, v, return_lse=True, backend="reference")
    assert o.shape == (1, 9, 2, 40) and (o - expected).norm() <= 3e-3 * expected.norm()
    parts = [slice(13), slice(13, None)]
    union = merge([attention(q, k[:, at], v[:, at], normalize=False, backend="reference") for at in parts])
    assert (union[0] - expected).norm() <= 1e-5 * expected.norm() and (union[1] - lse).abs().max() <= 1e-5


def test_every_size_has_tiles():
    """Every size and pair of sizes fits the budgets of both kernels, for prefill, decode, split keys, biases, pages."""
    sizes = [(size, size) for size in range(8, 257, 8)] + [
        (192, 128),
        (256, 128),
        (64, 256),
        (8, 256),
        (256, 8),
    ]
    for qk, v in sizes:
        for options in (
            {},
            {"seq_q": 1},
            {"seq_q": 1, "batch": 1, "num_splits": 4},
            {"bias": BiasLayout("bfloat16"), "bias_rows": "aligned"},
            {"seq_k": 600},
        ):
            sizes_of = dict(batch=8, seq_q=4096, seq_k=4096, heads_q=8, heads_kv=8, head_dim=qk, v_dim=v)
            problem = AttentionProblem(
                **{**sizes_of, **options},
                device=torch.device("meta"),
                logits=LogitOptions(1.0),
            )
            for arch in ARCHS:
                config = launch.plan(problem, SIMULATED[arch]).config
                assert config.heads == HeadSizes(qk, v) and config.heads.qk_steps * 16 - qk < 16


def test_sizes_that_are_refused():
    assert [size for size in (0, 4, 8, 72, 100, 256, 264, 384, 512) if supported(size)] == [8, 72, 256, 512]
    assert [class_of(size) for size in (8, 64, 72, 192, 256, 512)] == [64, 64, 128, 256, 256, 512]
    q, k = torch.zeros(1, 4, 2, 192).bfloat16(), torch.zeros(1, 4, 2, 192).bfloat16()
    for wrong in (torch.zeros(1, 4, 2, 264).bfloat16(), torch.zeros(1, 4, 2, 512).bfloat16()):
        with pytest.raises(ValueError, match=r"^v: head size must be a multiple of 8 up to 256"):
            attention(q, k, wrong.contiguous())
    with pytest.raises(ValueError, match=r"^v: shape must be k's but for the head size"):
        attention(q, k, k[:, :3])
    with pytest.raises(ValueError, match=r"^out: shape must be \[B, Sq, Hq, D\] = \[1, 4, 2, 128\]"):
        attention(q, k, k[..., :128].contiguous(), out=torch.empty_like(q))


@pytest.mark.parametrize(
    ("qk", "v", "arch", "through"),
    [
        (40, 24, "sm_90a", "o+lse"),
        long(40, 24, "sm_90a", "lse"),
        long(192, 128, "sm_90a", "o+lse"),
        long(192, 192, "sm_90a", "o+lse"),
        long(96, 96, "sm_90a", "o+lse"),
        long(72, 72, "sm_100a", "o+lse"),
    ],
)
def test_gradients(qk, v, arch, through, simulate_gradients_as):
    """Gradients of sizes between the tuned ones, packed, with a sink, rows of no request and lse's gradient."""
    simulate_gradients_as(arch)
    case = Gradients("between", lengths_q=(20, 3), lengths_k=(20, 30), heads_q=2, head_dim=qk, causal=True, sink=True,
                     through=through)  # fmt: skip
    tensors = case.tensors()
    tensors["v"] = tensors["v"].detach()[..., :v].contiguous()
    tensors["v"].requires_grad_()
    mine = case.gradients(tensors, backend="reference")
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    with mock.patch.object(backward_call, "resolve_backend", lambda backend, device: "reference"):
        right = case.gradients(leaves, backend="reference")
    for name, got in mine.items():
        rows = slice(None) if name == "sink" else slice(-2)
        assert got.shape == right[name].shape and got[rows].isfinite().all()
        error, norm = (got[rows].float() - right[name][rows].float()).norm(), right[name][rows].float().norm()
        assert error <= 4.2e-3 * (4 if name == "sink" else 1) * norm, (
            f"d{name} is off by {error:.1e} of {norm:.1e}"
        )


def test_gradient_tiles():
    """Every pair of sizes fits a kernel of gradients, whose consumers together make all columns of dQ, dK and dV."""
    sizes = [(qk, v) for qk in (8, 40, 64, 72, 96, 128, 136, 192, 200, 256) for v in {8, 96, 128, qk, 256}]
    for (qk, v), order in itertools.product(sizes, (False, True)):
        made = dict(
            batch=1, seq_q=256, seq_k=256, heads_q=1, heads_kv=1, head_dim=qk, v_dim=v, return_lse=True
        )
        problem = AttentionProblem(**made, device=torch.device("meta"), logits=LogitOptions(1.0))
        wanted = BackwardProblem(problem, ("q", "k", "v"), deterministic=order).padded
        config = backward_launch.plan_main(wanted, SIMULATED["sm_90a"])
        assert config.wide == (128 < qk <= 192 and v <= 128 and not order)
        assert config.makes_dq_alone == (64 < qk <= 96 and v <= 128 and not order)
        parts = [config.dq_size(number) for number in range(config.heads.qk // config.dq_columns)]
        assert 0 <= sum(parts) - qk < (64 if config.paired or config.heads.qk == 64 else 16)
        assert config.dq_columns * len(parts) == config.heads.qk and (
            config.has_own_code or len(set(parts)) == 1
        )
        for name, size in (("k", qk), ("v", v)):
            assert 0 <= config.sum_columns(name) - size < (64 if config.paired else 16)
        assert config.room_of("k") >= qk and config.room_of("v") >= v
        backward_launch.plan(wanted, SIMULATED["sm_100a"])


def test_lists_of_small_blocks_have_a_smaller_tile():
    """Blocks of 64 keys, which gradients of 192 with 128 had before they got a tile of 128 keys."""
    made = dict(
        batch=1, seq_q=256, seq_k=256, heads_q=1, heads_kv=1, head_dim=192, v_dim=128, return_lse=True
    )
    for keys, wide in ((64, False), (128, True)):
        problem = AttentionProblem(
            **made, device=torch.device("meta"), logits=LogitOptions(1.0), mask=Mask(block_size=(128, keys))
        )
        config = backward_launch.plan(BackwardProblem(problem, ("q", "k", "v")).padded, SIMULATED["sm_90a"])
        assert config.wide == wide and keys % config.tile_n == 0


def test_reference_gradients():
    case = replace(Case("sizes"), head_dim=24)
    q, k = (torch.randn(1, 5, 1, case.head_dim).bfloat16().requires_grad_() for _ in range(2))
    v = torch.randn(1, 5, 1, 40).bfloat16().requires_grad_()
    o = attention(q, k, v, backend="reference")
    got = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    weights = (torch.einsum("bqhd,bkhd->bhqk", *leaves[:2]) * 24**-0.5).softmax(-1)
    expected = torch.autograd.grad(torch.einsum("bhqk,bkhd->bqhd", weights, leaves[2]).sum(), leaves)
    for mine, right in zip(got, expected, strict=True):
        assert (mine - right).norm() <= 5e-3 * right.norm() + 1e-3
