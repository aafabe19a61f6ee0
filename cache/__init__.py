"""Caches of keys and values: the formats that they are stored in, and the kernel that fills them."""

from __future__ import annotations

import torch

from warpspec.cache import ops
from warpspec.cache.operands import Operands, Options
from warpspec.cache.problem import check_insert
from warpspec.common.checks import refuse_gradients
from warpspec.common.kv_formats import FORMATS, CacheFormat

__all__ = ["FORMATS", "CacheFormat", "insert"]


def insert(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    format: str | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_block_scales: torch.Tensor | None = None,
    v_block_scales: torch.Tensor | None = None,
    swizzled: bool = False,
    backend: str = "auto",
) -> torch.Tensor | None:
    """Normalise and rotate queries and keys of new tokens, quantise keys and values, store them by slot. One launch.

    k: bf16 or fp16 [T, H, D]. v: k's dtype, [T, H, Dv]. k_cache, v_cache: [slots, H, row] or [pages, page_size, H,
    row], any strides but 1 in the last dimension, so that every layout of an engine is a view: for vLLM's
    [blocks, H, block, 2 D] ``cache[..., :D].transpose(1, 2)``. A row is D numbers of k's dtype, of torch.float8_e4m3fn
    or of torch.float8_e5m2; or bytes (uint8), D of them with format "e4m3" or "e5m2" and D/2 with format "nvfp4".
    A cache's rows are aligned to 16 bytes, in FP8 up to D 256 and in NVFP4 to 8; rows of k, v, q and out to 16.
    Tensors of one dimension are contiguous.
    slots: int32 or int64 [S], S <= T: token t goes to slot slots[t], which is row slots[t] % page_size of page
    slots[t] // page_size. A slot below 0 or beyond the cache stores nothing, and so do tokens from S on. If a slot is
    given twice, a GPU may store a mixture of the two tokens; the CPU raises ValueError.

    q: k's dtype [T, Hq, D]. out: receives the queries; it has the shape of q and is q itself, or memory that no other
    argument uses. None: a new tensor. cos_sin: fp32, bf16 or fp16 [N, R], for each position R/2 cosines, then R/2
    sines; the first R numbers of a head are rotated. positions: int32 or int64 [T]. Number i is paired with number
    i + R/2 (GPT-NeoX), or with ``interleaved`` number 2 i with 2 i + 1. q_weight, k_weight: fp32, bf16 or fp16 [D], of
    an RMS norm of each head before the rotation; eps is added to its mean square. None: no norm. Without cos_sin and
    positions nothing is rotated.

    k_scale, v_scale: fp32 [], [1] or [H], finite and above 0, on k's device, where the kernel reads them; None: 1. The
    CPU raises ValueError for other values; a GPU, on which the host would have to wait for them, stores the codes that
    x / scale gives. k_block_scales, v_block_scales: for "nvfp4", uint8 or float8_e4m3fn [slots, H, D/16] or [pages,
    page_size, H, D/16], any strides but 1 in the last dimension. swizzled: the block scales of values are laid out for
    sm_100 (``warpspec.common.kv_formats.swizzled_place``). Nothing in the bytes tells the two layouts apart: read as
    linear, a swizzled cache gives scales of other tokens, and results are off by more than half. vLLM and SGLang
    swizzle on sm_100 and not on sm_90.

    The norm is computed in fp32 and rounded to k's dtype, then the rotation is, each product rounded before the two are
    added. What is stored is quantised from that (``quantize``): the code of x is x / scale in fp32, rounded to nearest,
    ties to even, saturated. Returns the queries, or None without q. For a position beyond the table a GPU makes the
    rotated numbers NaN; the CPU raises ValueError.

    Raises TypeError or ValueError naming the argument, and UnsupportedProblem for a backend that does not run on the
    device. Forward only.
    """
    operands = Operands(
        k, v, k_cache, v_cache, slots, q, out, cos_sin, positions, q_weight, k_weight, k_scale, v_scale,
        k_block_scales, v_block_scales,
    )  # fmt: skip
    refuse_gradients(**operands._asdict())
    options = Options(format, interleaved, swizzled, eps)
    check_insert(operands, options)
    if q is not None and out is None:
        operands = operands._replace(out=torch.empty(q.shape, dtype=q.dtype, device=q.device))
    ops.insert(operands, options, backend)
    return operands.out
