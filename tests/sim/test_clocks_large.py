"""Recordings of large grids: what is only counted, and what a prediction costs."""

import time

import pytest
import torch

from warpspec import sim
from warpspec.common.hardware import MODELS
from warpspec.common.launch import Target, simulating
from warpspec.fmha import attention
from warpspec.sim.clocks import record
from warpspec.sim.clocks.answer import clocks_of

H200 = Target.of_model(next(gpu for gpu in MODELS if gpu.name == "H200"))


def trace_of(batch: int, length: int, heads: int, dim: int):
    """The trace of a causal call, whose inputs are zeros."""
    q, k, v = (torch.zeros(batch, length, heads, dim, dtype=torch.bfloat16) for _ in "qkv")
    with simulating(H200), sim.recording(2), record.captured() as traces:
        attention(q, k, v, causal=True)
    return traces[0]


def test_steps_that_are_only_counted_are_as_many(monkeypatch):
    """Products are left out once there is enough of a trace; the warps' steps are the same."""
    whole = trace_of(1, 512, 2, 64)
    assert not any(cta.more_steps for cta in whole.ctas)
    for enough in (45, 70):  # steps of the first CTA
        monkeypatch.setattr(record, "ENOUGH", enough)
        cut = trace_of(1, 512, 2, 64).ctas
        assert [cta.steps + cta.more_steps for cta in cut] == [cta.steps for cta in whole.ctas[: len(cut)]]
        assert cut[0].more_steps


@pytest.mark.long
def test_a_large_call_is_predicted_within_a_minute():
    """B2 H32 S8192 D128: 4096 tiles from a queue, of which one CTA takes its share."""
    began = time.process_time()
    trace = trace_of(2, 8192, 32, 128)
    launch = clocks_of([trace], "h200").launches[0]
    assert time.process_time() - began < 60
    assert trace.stride == 132 and len(trace.ctas) <= 2
    # The tensor core of an SM needs 2.1 million clocks for its part.
    assert launch.low <= launch.clocks <= launch.high and 2.1e6 < launch.clocks < 2.8e6
