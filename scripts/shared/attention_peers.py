"""Peers of attention: flash-attn-4, torch's SDPA on one of its backends, and FlexAttention. Tensors are [B, S, H,
D]."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

FLASH, CUDNN, SDPA, FLEX = "flash-attn-4", "cuDNN", "SDPA", "FlexAttention"
FLEX_SHAPES = 256  # kernels that torch may compile of FlexAttention


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


def flash_lists(lists):
    """The lists of a FlexAttention mask as flash-attn-4 takes them: (forward, backward)."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    kv = (lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices)
    q = (lists.q_num_blocks, lists.q_indices, lists.full_q_num_blocks, lists.full_q_indices)
    return tuple(BlockSparseTensorsTorch(*fields, block_size=lists.BLOCK_SIZE) for fields in (kv, q))


@functools.cache
def compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = FLEX_SHAPES
    return torch.compile(flex_attention, dynamic=False)


def flex(q, k, v, mask) -> torch.Tensor:
    """FlexAttention under one of its masks, compiled."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return compiled_flex()(*heads_first, block_mask=mask, enable_gqa=grouped).transpose(1, 2)


def sdpa(q, k, v, *, backend: SDPBackend | None = None, **options) -> torch.Tensor:
    """torch's SDPA, [B, Sq, H, D]. backend: None leaves the choice to torch. options: is_causal, attn_mask."""
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
        o = scaled_dot_product_attention(*heads_first, enable_gqa=q.shape[2] != k.shape[2], **options)
    return o.transpose(1, 2)


def sdpa_shared(q, kv, values: int | None = None, scale: float | None = None) -> torch.Tensor:
    """torch's SDPA of one head of keys that are values, too, with the heads as queries: nothing is causal.
    values: how many numbers of a key, from the first, are its value; None: all."""
    batch, queries, heads, dim = q.shape
    keys = kv.transpose(1, 2)
    rows = q.view(batch, 1, queries * heads, dim)
    return scaled_dot_product_attention(rows, keys, keys[..., :values], scale=scale).view(*q.shape[:3], -1)
