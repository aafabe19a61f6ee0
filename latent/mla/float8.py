"""MLA decode over pages of e4m3 rows with one scale: gathered attention, which finds rows by the page table."""

from __future__ import annotations

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.checks import check_operand
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import target_of
from warpspec.common.outputs import check_output, note_written
from warpspec.common.repeated import traced
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.state import AttentionState
from warpspec.fmha.values import are_checked, check_values
from warpspec.latent.gathered.config import E4M3_ROWS, PAGE_ROWS
from warpspec.latent.gathered.problem import VALUE_DIM, GatheredProblem


def decode(
    q, kv, page_table, kv_lengths, kv_scale, *, scale, normalize, return_lse, num_splits, out, backend
):
    """Run ``mla_decode`` on e4m3 rows by a kernel. backend: any but "reference".

    The caller has made the checks that bf16 rows share.
    """
    if traced(q, kv, page_table, kv_lengths, kv_scale):
        raise UnsupportedProblem(
            "kv: e4m3 rows are not supported under torch.compile or torch's dispatch modes, nor with subclasses of "
            "tensors or negated views"
        )
    target = target_of(q.device)
    resolve_backend(backend, q.device)
    if kv.shape[1] != PAGE_ROWS:
        raise UnsupportedProblem(f"kv: kernels read pages of {PAGE_ROWS} e4m3 rows, got {kv.shape[1]}")
    if q.dtype != torch.bfloat16:
        raise UnsupportedProblem(f"q: must be torch.bfloat16 with e4m3 rows, got {q.dtype}")
    page_bytes = PAGE_ROWS * kv.shape[2]
    step = kv.stride(0) if len(kv) > 1 else page_bytes
    if len(kv) and (kv.stride(1) != kv.shape[2] or step < page_bytes):
        raise ValueError(f"kv: rows of a page must be contiguous, got strides {tuple(kv.stride())}")
    if are_checked(q.device):
        most = page_table.shape[1] * PAGE_ROWS
        check_values(kv_lengths, None, page_table, seq_k=most, pages=len(kv), page_size=PAGE_ROWS)
    scale = LogitOptions(scale).checked(q.shape[3]).scale
    if scale < 0:
        raise UnsupportedProblem(f"scale: kernels take one of at least 0 with e4m3 rows, got {scale}")
    batch, queries, heads, _ = q.shape
    shape = (batch, queries, heads, VALUE_DIM)
    if out is not None:
        check_operand(
            "out", out, (torch.bfloat16 if normalize else torch.float32,), shape, q.device, aligned=True
        )
        inputs = (q, kv, page_table, kv_lengths, kv_scale)
        check_output(
            "out", out, dict(zip(("q", "kv", "page_table", "kv_lengths", "kv_scale"), inputs, strict=True))
        )
        if not out.is_contiguous():
            raise ValueError(f"out: must be contiguous with e4m3 rows, got strides {tuple(out.stride())}")
        note_written(out)
    tokens, fp32 = batch * queries, {"dtype": torch.float32, "device": q.device}
    o = (
        torch.empty(shape, dtype=torch.bfloat16 if normalize else torch.float32, device=q.device)
        if out is None
        else out
    )
    lse = torch.empty(heads, tokens, **fp32) if return_lse and normalize else None
    row_max, row_sum = (None if normalize else torch.empty(heads, tokens, **fp32) for _ in range(2))
    found = (o, *(by_request(t, batch, queries) for t in (lse, row_max, row_sum)))
    rows = page_table.shape[1] * PAGE_ROWS
    if tokens == 0 or rows == 0 or len(kv) == 0:
        for result, value in zip((o, lse, row_max, row_sum), (0.0, -torch.inf, -torch.inf, 0.0), strict=True):
            if result is not None:
                result.fill_(value)
    else:
        problem = problem_of(
            batch, queries, heads, rows, scale, normalize=normalize, return_lse=lse is not None,
            num_splits=num_splits,
        )  # fmt: skip
        bytes_of = kv.as_strided((len(kv), page_bytes), (step, 1)).view(torch.uint8)
        tensors = {
            "q": q.reshape(tokens, heads, -1), "o": o.view(tokens, heads, VALUE_DIM), "scales": None, "sink": None,
            "lse": lse, "row_max": row_max, "row_sum": row_sum, "cos_sin": None, "positions": None,
            "kv_scale": kv_scale.reshape(1),
            "key_sets": [(bytes_of.view(torch.uint32), page_table.contiguous(), kv_lengths.contiguous(), PAGE_ROWS)],
        }  # fmt: skip
        from warpspec.latent.gathered import launch

        launch.run(problem, target, tensors)
    o, lse, row_max, row_sum = found
    if not normalize:
        return AttentionState(o, row_max, row_sum)
    return (o, lse) if return_lse else o


def problem_of(batch: int, queries: int, heads: int, rows: int, scale: float, **results) -> GatheredProblem:
    """The problem of a call.

    batch, queries: requests, and queries of each. rows: rows of the longest request that the page table has room for.
    results: fields of the problem that say which results are wanted, and in how many parts.
    """
    return GatheredProblem(
        batch * queries,
        heads,
        E4M3_ROWS.name,
        (rows,),
        (True,),
        scale,
        paged=True,
        has_kv_scale=True,
        queries=queries,
        **results,
    )


def by_request(statistics: torch.Tensor | None, batch: int, queries: int) -> torch.Tensor | None:
    """[B, H, Sq], a view of [H, B * Sq]."""
    return None if statistics is None else statistics.unflatten(1, (batch, queries)).transpose(0, 1)
