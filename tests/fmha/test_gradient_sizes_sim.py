"""Gradients of head sizes between the tuned ones, in the simulator: key tiles of several steps, whose exchange of dS
and whose stages of Q and dO are used more than once; memory order is checked."""

from dataclasses import replace

import pytest
from helpers.gradient_cases import KERNEL_TOLERANCE, Case

from warpspec.common.architecture import architecture
from warpspec.common.compile import resources
from warpspec.fmha.backward import launch
from warpspec.fmha.backward.schedule import Order

# A step; four; several of two heads; requests that begin and end within tiles; pieces of key tiles, and of sliced
# heads, whose sums are read as far as rows have columns.
WHOLE = Order(pieces=1, section=1)
CASES = {
    "one": (Case("one-step", seq_q=40, seq_k=130, heads_q=1, through="o+lse"), WHOLE),
    "four": (Case("steps", seq_q=250, seq_k=128, heads_q=1), WHOLE),
    "heads": (Case("heads", seq_q=200, seq_k=150, heads_q=2, causal=True, sink=True), WHOLE),
    "packed": (
        Case("packed", lengths_q=(150, 0, 90), lengths_k=(150, 5, 200), heads_q=1, window=(70, 20)),
        WHOLE,
    ),
    "packed-full": (Case("packed-full", lengths_q=(150, 0, 90), lengths_k=(150, 5, 200), heads_q=1), WHOLE),
    "pieces": (Case("pieces", seq_q=250, seq_k=150, heads_q=2, causal=True), Order(pieces=2, section=1)),
    "slices": (
        Case("slices", seq_q=130, seq_k=140, heads_q=4, causal=True),
        Order(pieces=1, section=1, slices=2),
    ),
}
SIZES = ((80, None), (96, None), (192, 128), (72, 40))


@pytest.mark.long
@pytest.mark.parametrize(("qk", "v"), SIZES)
@pytest.mark.parametrize("name", CASES)
def test_steps(name, qk, v, monkeypatch, simulate_gradients_as, check_order):
    (case, order), prepared, prepare = CASES[name], [], launch.prepare.__wrapped__
    monkeypatch.setattr(launch, "prepare", lambda *args: prepared.append(prepare(*args)) or prepared[-1])
    monkeypatch.setattr(launch, "choose_order", lambda *_: order)
    monkeypatch.setattr(launch.apart, "gains", lambda *_: False)
    simulate_gradients_as("sm_90a", seed=5)
    case = replace(case, head_dim=qk, v_dim=v)
    tensors = case.tensors()
    case.check(case.gradients(tensors, backend="reference"), tensors, KERNEL_TOLERANCE[case.dtype])
    config = prepared[-1].config
    assert config.cut == (order != WHOLE)
    compiled = launch.GRADIENTS.of(architecture("sm_90a")).MAIN.compiled(config, "sm_90a")
    assert all(kernel.local_bytes == 0 for kernel in resources(compiled).values())
