"""FlashMLA's kernels for sm_90a as the package sgl-flash-mla carries them (``use_legacy=True``), where it is installed.

Its schedule of a call is made once, by the first call, and kept: lengths must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

FLASH_MLA = "FlashMLA"
VALUES = 512
PAGE = 64  # keys of a page, of its kernels for whole caches
HEADS_OF_ROWS = (64, 128)  # that its kernels for selected rows take
SLOT_BYTES = {"v3.2-fp8": 656, "v4-fp8": 584}  # of a row with its scales


def flash_mla() -> ModuleType | None:
    """The package, or None if it is not installed or has no kernels for Hopper."""
    try:
        import flash_mla as found
    except ImportError:
        return None
    return found if found.has_legacy() else None


def dense_decode(
    q: torch.Tensor, kv: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, scale: float
) -> Callable | None:
    """A function without arguments that returns o of ``mla_decode`` of these; None without the package.

    With e4m3 rows the products take queries and weights in e4m3, too: q is rounded here, its result is off by 3e-2.
    """
    found = flash_mla()
    if found is None:
        return None
    codes, causal = kv.dtype == torch.float8_e4m3fn, q.shape[1] > 1
    schedule, _ = found.get_mla_metadata()
    options = {"softmax_scale": scale, "causal": causal, "use_legacy": True}
    if codes:
        q, one = q.to(kv.dtype), torch.ones(1, device=q.device)
        rows = q.shape[1] * q.shape[2]
        schedule.tile_scheduler_metadata, schedule.num_splits = found.get_mla_decoding_metadata(
            lengths, rows, 1, is_fp8_kvcache=True, use_legacy=True
        )
        options |= {"is_fp8_kvcache": True, "descale_q": one, "descale_k": one}
    cache = kv[:, :, None]
    return lambda: found.flash_mla_with_kvcache(q, cache, table, lengths, VALUES, schedule, **options)[0]


def paged_decode(scale: float, causal: bool) -> Callable | None:
    """A function of (q bf16 [B, Sq, H, 576], cache bf16 [pages, 64, 1, 576], table, lengths) to o; None without the
    package."""
    found = flash_mla()
    if found is None:
        return None
    schedule, _ = found.get_mla_metadata()
    options = {"softmax_scale": scale, "causal": causal, "use_legacy": True}
    return lambda q, cache, table, lengths: found.flash_mla_with_kvcache(
        q, cache, table, lengths, VALUES, schedule, **options
    )[0]


def rows_decode(heads: int, row_format: str) -> Callable | None:
    """A function of (q [T, H, D], one or two key sets, sink or None, out) that returns o, as ``gathered_attention``
    with its default scale would put it into out, but in new memory; None where the package has no such kernel."""
    found = flash_mla()
    if found is None or heads not in HEADS_OF_ROWS or row_format not in SLOT_BYTES:
        return None
    schedule, _ = found.get_mla_metadata()
    size = SLOT_BYTES[row_format]

    def call(q, key_sets, sink, out):
        pools = [each.pool.data.view(torch.uint8) for each in key_sets]
        caches = [
            t.as_strided((len(t), each.pool.page_size, 1, size), (t.stride(0), size, size, 1))
            for t, each in zip(pools, key_sets, strict=True)
        ]
        slots = [each.slots[:, None] for each in key_sets]
        more = {}
        if len(caches) > 1:
            more = {"extra_k_cache": caches[1], "extra_indices_in_kvcache": slots[1]}
        o, _ = found.flash_mla_with_kvcache(
            q[:, None], caches[0], None, None, VALUES, schedule, softmax_scale=VALUES**-0.5,
            indices=slots[0], attn_sink=sink, use_legacy=True, **more,
        )  # fmt: skip
        return o[:, 0]

    return call
