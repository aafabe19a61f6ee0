"""dQ by query tiles, dK and dV by key tiles, by the kernels for sm_90a in the simulator, against float64 autograd."""

import pytest
import torch
from helpers.gradient_cases import KERNEL_TOLERANCE, Case
from helpers.suites import long_but

from warpspec.common.compile import resources
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention
from warpspec.fmha.backward import apart, launch
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.schedule import Order
from warpspec.fmha.backward.sm90.apart import KEYS, QUERIES, KeyConfig, QueryConfig
from warpspec.fmha.problem import AttentionProblem

LENGTHS = {"lengths_q": (1, 150, 0, 200, 64), "lengths_k": (1, 150, 20, 230, 64)}
CASES = {
    "plain": Case("plain", seq_q=70, seq_k=70, heads_q=1, causal=True),
    "groups": Case("groups", batch=2, seq_q=200, seq_k=200, heads_q=4, heads_kv=2, causal=True),
    "sizes": Case("sizes", seq_q=150, seq_k=180, heads_q=2, heads_kv=2, head_dim=96),
    "window": Case("window", seq_q=200, seq_k=250, window=(70, 10), sliced=True),
    "unseen": Case("unseen", seq_q=200, seq_k=70, head_dim=128, causal=True, sink=True, through="o+lse"),
    "lengths": Case("lengths", batch=3, seq_q=140, seq_k=200, heads_q=2, heads_kv=2, head_dim=128, causal=True,
                    kv_lengths=(200, 100, 0), deterministic=True),
    "start": Case("start", batch=2, seq_q=140, seq_k=200, heads_q=1, causal=True, q_start=(30, 50)),
    "wide": Case("wide", seq_q=150, seq_k=150, heads_q=2, heads_kv=2, head_dim=192, v_dim=128, causal=True),
    "fp16": Case("fp16", seq_q=150, seq_k=150, heads_q=2, head_dim=80, causal=True, dtype=torch.float16),
    "packed": Case("packed", **LENGTHS, heads_q=2, head_dim=128, causal=True),
    "packed-full": Case("packed-full", **LENGTHS, heads_q=2, heads_kv=2),
    "packed-wide": Case("packed-wide", **LENGTHS, heads_q=2, heads_kv=2, head_dim=192, v_dim=128),
    "packed-window": Case("packed-window", **LENGTHS, heads_q=2, head_dim=96, causal=True, window=(100, 0)),
}  # fmt: skip


MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (300, 0)}}


@pytest.mark.long
@pytest.mark.parametrize("requests", ["rows", "lengths", "packed"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", [(64, 64), (96, 96), (128, 128), (192, 128)])
def test_no_kernel_spills(sizes, mask, requests):
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    options, rows = MASKS[mask] | {"return_lse": True, "memory": False}, (2, 512)
    if requests == "lengths":
        options["kv_lengths"] = empty(2, dtype=torch.int32)
    if requests == "packed":
        starts, rows = empty(3, dtype=torch.int32), (1024,)
        options |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=512, max_seqlen_k=512)
    tensors = (empty(*rows, n, size) for n, size in ((8, sizes[0]), (2, sizes[0]), (2, sizes[1])))
    problem = BackwardProblem.check(AttentionProblem.of(*tensors, **options), ("k", "v")).padded
    keys, target = KeyConfig.of(problem), SIMULATED["sm_90a"]
    kernels = [(QUERIES, QueryConfig.beside(keys or launch.supported(problem, target)))]
    kernels += [(KEYS, keys)] if keys else []
    for kernel, config in kernels:
        assert not any(each.local_bytes for each in resources(kernel.compiled(config, "sm_90a")).values())


@pytest.mark.parametrize("name", long_but(["plain"], CASES))
def test_gradients(name, monkeypatch, simulate_gradients_as, check_order):
    """Gradients and memory order, with more tiles than CTAs."""
    found, prepare = [], launch.prepare.__wrapped__
    monkeypatch.setattr(apart, "gains", lambda *_: True)
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 1))  # no key tile is cut
    monkeypatch.setattr(launch, "prepare", lambda *args: found.append((args, prepare(*args))) or found[-1][1])
    simulate_gradients_as("sm_90a", sm_count=2, seed=1)
    case = CASES[name]
    tensors = case.tensors()
    case.check(case.gradients(tensors, backend="reference"), tensors, KERNEL_TOLERANCE[case.dtype])
    ((_, prepared),) = found
    assert prepared.queries is not None


@pytest.mark.long
@pytest.mark.parametrize("size", [64, 128])
def test_nan_at_keys_that_nobody_sees(size, monkeypatch, simulate_gradients_as):
    """Steps have two blocks of queries at D 64: in the last step the second one has no queries, whose weights are 0
    without a mask, unless a key has NaN."""
    monkeypatch.setattr(apart, "gains", lambda *_: True)
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 1))
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)
    simulate_gradients_as("sm_90a", sm_count=2, seed=1)
    generator = torch.Generator().manual_seed(1)
    queries, keys = 130, 260  # the queries are the first ones
    q, k, v = (torch.randn(1, n, 1, size, generator=generator).bfloat16() for n in (queries, keys, keys))
    k[:, queries:], v[:, queries:] = torch.nan, torch.nan
    call = [t.requires_grad_() for t in (q, k, v)]
    start = torch.zeros(1, dtype=torch.int32)
    attention(*call, causal=True, q_start=start, backend="reference").sum().backward()
    assert all(t.grad.isfinite().all() for t in call)
    assert not k.grad[:, queries:].any() and not v.grad[:, queries:].any()
    assert k.grad[:, :queries].any(-1).all()
