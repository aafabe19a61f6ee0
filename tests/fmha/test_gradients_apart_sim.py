"""dQ by query tiles, dK and dV by key tiles, by the kernels for sm_90a in the simulator, against float64 autograd."""

import pytest
import torch
from helpers.gradient_cases import KERNEL_TOLERANCE, Case
from helpers.suites import long_but

from warpspec.common.compile import resources
from warpspec.fmha.backward import apart, launch
from warpspec.fmha.backward.schedule import Order

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


@pytest.mark.parametrize("name", long_but([], CASES))
def test_gradients(name, monkeypatch, simulate_gradients_as, check_order):
    """Gradients, memory order, and that no register spills; with more tiles than CTAs."""
    found, prepare = [], launch.prepare.__wrapped__
    monkeypatch.setattr(apart, "gains", lambda *_: True)
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 1))  # no key tile is cut
    monkeypatch.setattr(launch, "prepare", lambda *args: found.append((args, prepare(*args))) or found[-1][1])
    simulate_gradients_as("sm_90a", sm_count=2, seed=1)
    case = CASES[name]
    tensors = case.tensors()
    case.check(case.gradients(tensors, backend="reference"), tensors, KERNEL_TOLERANCE[case.dtype])
    (((problem, target), prepared),) = found
    assert prepared.queries is not None
    for kernel, config in launch.kernels(problem, target, prepared.config)[1:]:
        assert not any(each.local_bytes for each in resources(kernel.compiled(config, "sm_90a")).values())
