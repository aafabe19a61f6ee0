"""MLA's decode in its absorbed form: attention of latent queries over paged latent rows (DeepSeek V2 and V3, Kimi K2).

A token's row has 512 latent numbers, from which the up-projections of keys and values are absorbed into the query and
the output, and 64 rotated ones. All heads share it: it is the key as a whole, and its first 512 numbers are the value.
"""

from __future__ import annotations

import math

import torch

from warpspec.common.checks import (
    check_bool,
    check_int,
    check_kind,
    check_number,
    check_operand,
    check_tensor,
    kind_of,
    refuse_gradients,
)
from warpspec.fmha import attention
from warpspec.fmha.checks import MOST_SPLITS, check_splits
from warpspec.fmha.cuts import DecodeSchedule
from warpspec.fmha.heads import LATENT
from warpspec.fmha.state import AttentionState
from warpspec.latent.mla import float8
from warpspec.latent.mla.schedule import HEAD_LIMIT, mla_schedule

__all__ = ["mla_decode", "mla_schedule"]

ROW, VALUES = LATENT
DTYPES = (torch.bfloat16, torch.float16)
CODES = torch.float8_e4m3fn


def mla_decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    scale: float,
    kv_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    normalize: bool = True,
    return_lse: bool = False,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    schedule: DecodeSchedule | None = None,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | AttentionState:
    """MLA decode 576/512: each of a request's last queries over the rows of its pages, causally, in one launch.

    With r[j] the j-th row of request b: logit[j] = scale * q.r[j], for j up to the query's own position, and
    o = sum of exp(logit[j]) r[j][:512] / sum of exp(logit[j]). (DeepSeek-V2, arXiv 2405.04434, section 2.1 and
    appendix C: W_UK absorbed into q, W_UV into what follows o.) One request's queries and heads fill the rows of a tile
    together; few heads cost no more memory traffic than many. Lengths and page numbers are read on the device, so a
    call can be captured in a CUDA graph and replayed with others. Forward only.

    Args:
        q: bf16 or fp16 [B, Sq, H, 576], 1 to 128 heads; over e4m3 rows also e4m3, with ``q_scale``. A head has 512
            numbers (q_nope W_UK), then 64 rotated ones. Query i of request b stands at position
            kv_lengths[b] - Sq + i. Rows aligned to 16 bytes.
        kv: the cache, [pages, page_size, 576], in q's dtype or e4m3 (torch.float8_e4m3fn). Pages have 64 rows; in q's
            dtype they may have any other size that ``attention`` takes. The distance between pages is a multiple of 16
            bytes, and so is the distance between rows in q's dtype.
        page_table: int32 [B, max_pages], page numbers in kv. Entries past a request's length may hold anything.
        kv_lengths: int32 [B], rows of each request, the new tokens' own included. 0: no rows.
        scale: finite float that multiplies the logits: (d_nope + d_rope)**-0.5 of the model's heads (192**-0.5 for
            DeepSeek V3), times the square of its RoPE scaling's factor. There is no default, because the absorbed sizes
            do not tell these head sizes. Kernels take none below 0 with e4m3 rows.
        kv_scale: fp32 [] or [1] on q's device, only with e4m3 rows, whose numbers are codes times this scale; None: 1.
            The kernel reads it, and converts codes exactly; q must be bf16 or e4m3.
        q_scale: fp32 [] or [1] on q's device, asked for with e4m3 q and only then: numbers of q are codes times this
            scale. On sm_90a the kernel multiplies codes of q and rows as they are, and the tensor core adds the
            products of 64 columns to 14 bits. A logit is then off by up to 3e-4 of the logits' deviation, so that lse
            keeps 1e-3 with a deviation up to 2, and nearly always 3. On sm_100a q becomes bf16, exactly.
        normalize: False returns an ``AttentionState``, which ``warpspec.fmha.merge`` combines with others.
        return_lse: also return lse.
        num_splits: number of splits of the keys, as in ``attention``. A second launch combines them.
        out: memory for o that no other argument uses.
        schedule: made by ``mla_schedule`` for calls of these sizes, once a step; the call then begins at once, without
            a scan of the lengths.
        backend: as in ``warpspec.fmha.attention``.

    Returns:
        o [B, Sq, H, 512] in q's dtype, bf16 if that is e4m3; with return_lse (o, lse), lse fp32 [B, H, Sq] = ln(sum of
        exp(logit)); with normalize=False an AttentionState, fp32. A query that sees no row gives 0 and lse -inf
        (FlashMLA: +inf). NaN in rows that a query does not see never reaches it.

    Raises:
        TypeError, ValueError: naming the argument. UnsupportedProblem: the backend cannot run it.
        NotImplementedError: a gradient is asked for.
    """
    check_operand("q", q, (*DTYPES, CODES), (-1, -1, -1, ROW), None, aligned=True)
    dtypes = (CODES,) if q.dtype == CODES else (q.dtype, CODES)
    check_operand("kv", kv, dtypes, (-1, -1, ROW), q.device, aligned=True)
    check_tensor("page_table", page_table, (torch.int32,), (len(q), -1), q.device)
    check_tensor("kv_lengths", kv_lengths, (torch.int32,), (len(q),), q.device)
    refuse_gradients(q=q, kv=kv, kv_scale=kv_scale, q_scale=q_scale, out=out)
    if kv.shape[1] == 0:
        raise ValueError(f"kv: pages must hold at least one row, got shape {list(kv.shape)}")
    if not 1 <= q.shape[2] <= HEAD_LIMIT:
        raise ValueError(f"q: must have 1 to {HEAD_LIMIT} heads, got {q.shape[2]}")
    check_number("scale", scale, signed=True)
    for name, flag in (("normalize", normalize), ("return_lse", return_lse)):
        check_bool(name, flag)
    if num_splits is not None:
        check_int("num_splits", num_splits, 1, MOST_SPLITS)
        check_splits(num_splits, math.prod(q.shape[:3]), VALUES)
    check_kind("backend", backend, str)
    if schedule is not None:
        check_kind("schedule", schedule, DecodeSchedule)
        if num_splits is not None:
            raise ValueError(f"num_splits: must be None with a schedule, got {num_splits}")
        schedule.check(q, kv, page_table)
    codes = kv.dtype == CODES
    for name, scale_of in (("kv_scale", kv_scale), ("q_scale", q_scale)):
        if scale_of is not None and not codes:
            raise ValueError(f"{name}: must be None with rows of {kv.dtype}")
    if codes:
        return float8.decode(
            q, kv, page_table, kv_lengths, checked_scale("kv_scale", kv_scale, q.device),
            checked_q_scale(q_scale, q), scale=scale, normalize=normalize, return_lse=return_lse,
            num_splits=num_splits, out=out, schedule=schedule, backend=backend,
        )  # fmt: skip
    return attention(
        q,
        kv[:, :, None],
        scale=float(scale),
        causal=q.shape[1] > 1,
        kv_lengths=kv_lengths,
        page_table=page_table,
        normalize=normalize,
        return_lse=return_lse,
        num_splits=num_splits,
        out=out,
        v_dim=VALUES,
        schedule=schedule,
        backend=backend,
    )


def checked_scale(name: str, scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """fp32 [] or [1]: the scale of all codes of a call's rows, or of its queries; 1 if there is none."""
    if scale is None:
        return torch.ones(1, dtype=torch.float32, device=device)
    check_tensor(name, scale, (torch.float32,), None, device)
    if scale.shape not in ((), (1,)):
        raise ValueError(f"{name}: must be one number, [] or [1], got shape {list(scale.shape)}")
    return scale


def checked_q_scale(q_scale: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """The scale of q's codes, or None with q in 16 bits."""
    if (q_scale is None) == (q.dtype == CODES):
        wanted = "a scale with q in e4m3" if q_scale is None else f"None with q of {q.dtype}"
        raise ValueError(f"q_scale: must be {wanted}, got {kind_of(q_scale)}")
    return None if q_scale is None else checked_scale("q_scale", q_scale, q.device)
