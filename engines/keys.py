"""Code that all engines use: page tables of a batch's keys, windows, and checks that name the engine's setting.

Engines keep keys and values in slots, one for each token and layer. A page is page_size consecutive slots. cu_seqlens
delimits requests: request b has rows cu_seqlens[b] to cu_seqlens[b + 1] of the tensor in question.
"""

from __future__ import annotations

import torch

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.kv_formats import EIGHT_BITS
from warpspec.fmha.checks import DTYPES
from warpspec.fmha.heads import CLASSES, LARGEST, STEP, supported
from warpspec.fmha.tiles import PAGE_LARGE, PAGE_STEP, takes_pages

HEAD_DIMS = tuple(size for size in range(STEP, CLASSES[-1] + 1) if supported(size))


def check_page_size(page_size: int, setting: str) -> None:
    """Raise UnsupportedProblem unless pages of this many keys can be read. `setting`: the engine's name for it."""
    if not takes_pages(page_size):
        raise UnsupportedProblem(
            f"{setting}: must be a multiple of {PAGE_STEP} up to {PAGE_LARGE}, or a multiple of {PAGE_LARGE}, "
            f"got {page_size}; set it to 16, 32, 64 or 128"
        )


def check_head_size(head_dim: int, engine: str) -> None:
    """Raise UnsupportedProblem unless heads of this size can be computed. `engine`: words for the message."""
    if head_dim not in HEAD_DIMS:
        raise UnsupportedProblem(
            f"head size: must be a multiple of {STEP} up to {LARGEST}, or {CLASSES[-1]}, got {head_dim}; {engine}"
        )


# Formats of quantised caches (``common.kv_formats``) by engines' names for them.
QUANTIZED = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "nvfp4": "nvfp4"}
QUANTIZED_HEAD_DIMS = (64, 128, 256)


def check_quantized_head(head_dim: int, setting: str) -> None:
    """Raise UnsupportedProblem unless heads of this size can be cached in FP8 and NVFP4. `setting`: the engine's name
    for it."""
    if head_dim not in QUANTIZED_HEAD_DIMS:
        raise UnsupportedProblem(
            f"{setting}: FP8 and NVFP4 need a head size of {', '.join(map(str, QUANTIZED_HEAD_DIMS))}, got {head_dim}; "
            "set it to auto"
        )


def check_cache_dtype(dtype: torch.dtype, head_dim: int, setting: str) -> None:
    """Raise UnsupportedProblem unless attention reads caches of the dtype. `setting`: the engine's name for it."""
    if dtype in EIGHT_BITS.values():
        check_quantized_head(head_dim, setting)
    elif dtype not in DTYPES:
        raise UnsupportedProblem(
            f"{setting}: must be bfloat16, float16, fp8_e4m3 or fp8_e5m2, got {dtype}; set it to auto"
        )


def check_dtype(dtype: torch.dtype, setting: str) -> None:
    """Raise UnsupportedProblem unless attention takes the dtype. `setting`: the engine's name for it."""
    if dtype not in DTYPES:
        raise UnsupportedProblem(f"{setting}: must be bfloat16 or float16, got {dtype}; set it to bfloat16")


def pages_of(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """View slots [pages * page_size (or more), Hkv, D] as [pages, page_size, Hkv, D]."""
    return slots[: len(slots) // page_size * page_size].unflatten(0, (-1, page_size))


def page_table(slots: torch.Tensor, cu_seqlens: torch.Tensor, page_size: int, most_keys: int) -> torch.Tensor:
    """The page table of requests, made from a list of their keys' slots.

    Args:
        slots: [N] integer, N >= 1: where each key lies, request after request. A request's keys lie in order in its
            pages, from the start of the first page on.
        cu_seqlens: [B + 1] int32.
        most_keys: the most keys of any request, known to the host.

    Returns:
        [B, pages of most_keys] int32. Entries past a request's end name some page that exists.
    """
    width = max(1, -(-most_keys // page_size))
    first_of_page = torch.arange(0, width * page_size, page_size, device=slots.device, dtype=cu_seqlens.dtype)
    index = (cu_seqlens[:-1, None] + first_of_page).clamp_(max=len(slots) - 1)
    return (slots[index] // page_size).int()


def slots_of_last(table: torch.Tensor, kv_lengths: torch.Tensor, page_size: int, trash: int) -> torch.Tensor:
    """[B] int64: the slot of each request's last key; `trash` for requests without keys."""
    last = (kv_lengths - 1).clamp_(min=0).long()
    page = table.gather(1, (last // page_size)[:, None])[:, 0].long()
    return torch.where(kv_lengths > 0, page * page_size + last % page_size, trash)


def window_of(sliding_window: int | None, counts_own: bool) -> tuple[int, int] | None:
    """Convert an engine's sliding window to `attention`'s ``window``.

    sliding_window: number of keys; None, or a number that is not positive, means no window. counts_own: whether it
    counts the query's own position.
    """
    if sliding_window is None or sliding_window <= 0:
        return None
    return (sliding_window - counts_own, 0)
