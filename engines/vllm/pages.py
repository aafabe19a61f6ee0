"""Views of vLLM's KV cache of one layer: pages of keys and values, and NVFP4's block scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpspec.common.kv_formats import FORMATS
from warpspec.engines.keys import QUANTIZED

NVFP4 = FORMATS["nvfp4"]


class Pages(NamedTuple):
    """Keys and values of one layer, as pages.

    k, v: [blocks, block, Hkv, row]; rows of keys and of values may differ in length. block_scales: for NVFP4, the
    arguments k_block_scales and v_block_scales of ``attention_varlen`` and ``insert``, [blocks, block, Hkv, D/16];
    otherwise empty.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_scales: dict[str, torch.Tensor]


def slot_bytes(head_size: int) -> int:
    """Bytes of a key or value in NVFP4, with its block scales: the last dimension of vLLM's cache."""
    return NVFP4.row_bytes(head_size) + head_size // NVFP4.block


def format_of(kv_cache_dtype: str) -> str | None:
    """The format that vLLM's name of a cache's dtype stands for; None for 16 bits."""
    return QUANTIZED.get(kv_cache_dtype)


def pages_of(kv_cache: torch.Tensor, head_size: int, fmt: str | None) -> Pages:
    """View a layer's cache as pages, in place.

    kv_cache: [blocks, Hkv, block, D + Dv]; for "nvfp4", bytes [blocks, 2 Hkv, block, 9 D/16]. fmt: from ``format_of``.
    """
    if fmt == "nvfp4":
        return nvfp4_pages(kv_cache, head_size)
    if fmt is not None:
        kv_cache = kv_cache.view(FORMATS[fmt].dtype)
    k, v = kv_cache.transpose(1, 2).tensor_split([head_size], dim=-1)
    return Pages(k, v, {})


def nvfp4_pages(kv_cache: torch.Tensor, head_size: int) -> Pages:
    """``pages_of`` for an NVFP4 cache.

    A page holds K's codes, K's block scales, V's codes and V's block scales, in this order. Each of the four parts is
    [Hkv, block, row] or [block, Hkv, row], depending on the order of the cache's own strides. Raises ValueError for
    pages with gaps.
    """
    blocks, slots, block, size = kv_cache.shape
    heads, found = slots // 2, []
    by_head = kv_cache.stride()[1:] == (block * size, size, 1)
    if not by_head and kv_cache.stride()[1:] != (size, slots * size, 1):
        raise ValueError(f"kv_cache: pages must have no gaps, got strides {kv_cache.stride()}")
    start = kv_cache.storage_offset()
    for _ in range(2):  # K, V
        for row in (NVFP4.row_bytes(head_size), head_size // NVFP4.block):
            head_step, key_step = (block * row, row) if by_head else (row, heads * row)
            strides = (kv_cache.stride(0), key_step, head_step, 1)
            found.append(kv_cache.as_strided((blocks, block, heads, row), strides, start))
            start += heads * block * row
    k, k_scales, v, v_scales = found
    return Pages(k, v, {"k_block_scales": k_scales, "v_block_scales": v_scales})
