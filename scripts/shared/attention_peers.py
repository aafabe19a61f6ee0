"""Peers of attention: flash-attn-4, and torch's SDPA on one of its backends. Tensors are [B, S, H, D]."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

FLASH, CUDNN, SDPA = "flash-attn-4", "cuDNN", "SDPA"


def flash_attention() -> SimpleNamespace | None:
    """flash-attn-4's functions ``dense`` and ``varlen``, or None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return None
    return SimpleNamespace(dense=flash_attn_func, varlen=flash_attn_varlen_func)


def result_of(found):
    """flash-attn-4's result, without what some versions return beside it."""
    return found[0] if isinstance(found, tuple) else found


def sdpa(q, k, v, *, backend: SDPBackend | None = None, **options) -> torch.Tensor:
    """torch's SDPA, [B, Sq, H, D]. backend: None leaves the choice to torch. options: is_causal, attn_mask."""
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        o = scaled_dot_product_attention(*heads_first, enable_gqa=q.shape[2] != k.shape[2], **options)
    return o.transpose(1, 2)


def sdpa_shared(q, kv, values: int | None = None, scale: float | None = None) -> torch.Tensor:
    """torch's SDPA of one head of keys that are values, too, with the heads as so many queries: nothing is causal.
    values: how many numbers of a key, from the first, are its value; None: all."""
    batch, queries, heads, dim = q.shape
    keys = kv.transpose(1, 2)
    rows = q.view(batch, 1, queries * heads, dim)
    return scaled_dot_product_attention(rows, keys, keys[..., :values], scale=scale).view(*q.shape[:3], -1)
