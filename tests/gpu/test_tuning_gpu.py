"""Timing plans of attention on the GPU of this machine."""

import pytest
import torch
from helpers.gpu_tensors import random

from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.fmha import attention_varlen
from warpspec.fmha.plan import kept
from warpspec.fmha.tuning import tuning

pytestmark = pytest.mark.gpu


def test_a_call_is_timed_once_and_keeps_its_result(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    lengths = torch.tensor([0, 1, 130, 900], device="cuda").cumsum(0).int()
    q, k, v = random(900, 8, 128), random(900, 2, 128), random(900, 2, 128)
    arguments = dict(
        cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=800, max_seqlen_k=800, causal=True
    )
    expected = attention_varlen(q, k, v, **arguments)
    timed = []
    times = kept.launch_times
    monkeypatch.setattr(kept, "launch_times", lambda *given: timed.append(times(*given)) or timed[-1])
    with tuning(3):
        results = [attention_varlen(q, k, v, **arguments) for _ in range(2)]
        with torch.no_grad():
            other = attention_varlen(q * 2, k, v, **arguments)
    assert len(timed) == 1 and len(timed[0]) == 3 and all(1e-3 < ms < 1 for ms in timed[0])
    results.append(attention_varlen(q, k, v, **arguments))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(other, expected)
