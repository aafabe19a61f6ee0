"""Rows of tensors with one token, one head or one page: strides of such dimensions mean nothing, whatever they are."""

import math

import pytest
import torch

from warpspec import cache
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.launch import Kernel
from warpspec.fmha import attention
from warpspec.latent.cache import LatentPool, insert_window, rope_table
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.mla import mla_decode
from warpspec.latent.projection import output_projection, quantize_output

ZERO = torch.zeros(1, dtype=torch.int32)
TABLE = rope_table(1e4 ** (-torch.arange(32) / 32), 16)


def odd(*shape: int) -> torch.Tensor:
    """bf16, with an odd stride in each dimension of one element."""
    strides = torch.empty(shape, device="meta").stride()
    strides = [step + (step % 2 == 0) if n == 1 else step for n, step in zip(shape, strides, strict=True)]
    return torch.randn(2 * math.prod(shape)).bfloat16().as_strided(shape, strides)


def window(q, kv):
    rest = dict(weight=torch.ones(512), pool=LatentPool.empty(2, 4, "v4-fp8"), slots=ZERO)
    insert_window(q, kv, TABLE, ZERO, **rest)


def gathered(q, out):
    gathered_attention(q, [KeySet(LatentPool.empty(2, 4, "v4-fp8"), ZERO[:, None])], out=out)


CALLS = {
    "insert": lambda: cache.insert(*(odd(1, 1, 64) for _ in "kv"), *(odd(1, 1, 1, 64) for _ in "kv"), ZERO),
    "window": lambda: window(odd(1, 2, 512), odd(1, 512)),
    "gathered": lambda: gathered(odd(1, 2, 512), odd(1, 2, 512)),
    "mla": lambda: mla_decode(
        odd(1, 1, 1, 576), torch.zeros(2, 64, 576).to(torch.float8_e4m3fn), ZERO[:, None], ZERO, scale=0.1
    ),
    "project": lambda: output_projection(odd(1, 2, 512), torch.zeros(2, 512, 512).bfloat16(), out=odd(1, 2, 512)),
    "quantize": lambda: quantize_output(odd(1, 2, 512)),
    "attention": lambda: attention(odd(1, 1, 4, 64), odd(1, 9, 1, 64), odd(1, 9, 1, 64)),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_kernels_get_strides_that_tma_takes(call, monkeypatch):
    seen = []
    monkeypatch.setattr(Kernel, "launcher", lambda *_, **__: lambda *tensors: seen.extend(tensors))
    call()
    rows = [t for t in seen if isinstance(t, torch.Tensor) and t.element_size() * t.shape[-1] >= 64]
    assert len(rows) > 1
    for tensor in rows:
        assert all(step * tensor.element_size() % TMA_ALIGNMENT == 0 for step in tensor.stride()[:-1])
