"""FlashMLA's kernels for sm_90a as the package sgl-flash-mla carries them (``use_legacy=True``), where it is installed.

Its schedule of a call is made once, by the first call, and kept: lengths must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

FLASH_MLA = "FlashMLA"
PACKAGE = "sgl-flash-mla"
INSTALL = f"pip install --no-deps {PACKAGE}==1.0.0"
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
    """A function without arguments that returns o of ``mla_decode`` of these; None without the package."""
    codes = kv.dtype == torch.float8_e4m3fn
    rows = q.shape[1] * q.shape[2]
    call = paged_decode(scale, q.shape[1] > 1, (lengths, rows) if codes else None)
    if call is None:
        return None
    q, cache = q.to(kv.dtype), kv[:, :, None]
    return lambda: call(q, cache, table, lengths)


def paged_decode(
    scale: float, causal: bool, codes: tuple[torch.Tensor, int] | None = None
) -> Callable | None:
    """A function of (q [B, Sq, H, 576], cache [pages, 64, 1, 576], table, lengths) to o; None without the package.

    codes: of e4m3 rows the lengths, and the number of queries times heads; None: rows are bf16. q has the rows' type:
    with e4m3 rows the products take queries and weights in e4m3, and the result is off by 3e-2.
    """
    found = flash_mla()
    if found is None:
        return None
    schedule, _ = found.get_mla_metadata()
    options = {"softmax_scale": scale, "causal": causal, "use_legacy": True}
    if codes is not None:
        lengths, rows = codes
        schedule.tile_scheduler_metadata, schedule.num_splits = found.get_mla_decoding_metadata(
            lengths, rows, 1, is_fp8_kvcache=True, use_legacy=True
        )
        one = torch.ones(1, device=lengths.device)
        options |= {"is_fp8_kvcache": True, "descale_q": one, "descale_k": one}
    return lambda q, cache, table, lengths: found.flash_mla_with_kvcache(
        q, cache, table, lengths, VALUES, schedule, **options
    )[0]


def rows_decode(heads: int, row_format: str) -> Callable | None:
    """A function of (q [T, H, D], one or two key sets, sink or None, out) that returns o, as ``gathered_attention``
    with its default scale would put it into out, but in new memory; None where the package has no such kernel. It takes
    no lengths: slots behind a list's end must be -1, and cost as much as others."""
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
