"""Negated views (``z.conj().imag``) hold the opposite of their numbers: kernels get plain memory or the call raises."""

import pytest
import torch

from warpspec.common.launch import Kernel
from warpspec.latent.cache import LatentPool, rope_table
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.mla import mla_decode

ZERO = torch.zeros(1, dtype=torch.int32)
ROWS = {
    "sink": torch.randn(2),
    "q": torch.randn(1, 2, 512).bfloat16(),
    "cos_sin": rope_table(torch.rand(32), 16),
}


def gathered(q, sink, cos_sin):
    key_sets = [KeySet(LatentPool.empty(2, 4, "v4-fp8"), ZERO[:, None])]
    gathered_attention(q, key_sets, sink=sink, rotate_back=(cos_sin, ZERO))


def decode(kv_scale):
    rows = torch.zeros(2, 64, 576).to(torch.float8_e4m3fn)
    mla_decode(
        torch.zeros(1, 1, 1, 576).bfloat16(), rows, ZERO[:, None], ZERO + 1, scale=0.1, kv_scale=kv_scale
    )


@pytest.mark.parametrize("negated", ROWS)
def test_gathered(negated, monkeypatch):
    given, wanted = [], ROWS[negated]
    monkeypatch.setattr(Kernel, "launcher", lambda *_, **__: lambda *tensors: given.extend(tensors))
    gathered(**ROWS | {negated: torch._neg_view(-wanted)})
    given = [t for t in given if isinstance(t, torch.Tensor)]
    assert given and not any(t.is_neg() for t in given)
    assert any(t.numel() == wanted.numel() and torch.equal(t.view_as(wanted), wanted) for t in given)


def test_decode_of_codes(monkeypatch):
    given = []
    monkeypatch.setattr(Kernel, "launcher", lambda *_, **__: lambda *tensors: given.extend(tensors))
    decode(torch._neg_view(torch.tensor([-0.5])))
    given = [t for t in given if isinstance(t, torch.Tensor)]
    assert given and not any(t.is_neg() for t in given)
    assert any(t.shape == (1,) and t == 0.5 for t in given if t.dtype == torch.float32)
