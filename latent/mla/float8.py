"""MLA decode over pages of e4m3 rows with one scale: gathered attention, which finds rows by the page table."""

from __future__ import annotations

import math

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.checks import check_operand
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import target_of
from warpspec.common.outputs import check_output, note_written
from warpspec.common.repeated import traced
from warpspec.fmha import attention
from warpspec.fmha.logits import LogitOptions
from warpspec.fmha.state import AttentionState
from warpspec.fmha.values import are_checked, check_scale, check_values
from warpspec.latent.gathered.config import E4M3_ROWS, PAGE_ROWS
from warpspec.latent.gathered.problem import VALUE_DIM, GatheredProblem

INPUTS = ("q", "kv", "page_table", "kv_lengths", "kv_scale", "q_scale")


def decode(
    q,
    kv,
    page_table,
    kv_lengths,
    kv_scale,
    q_scale,
    *,
    scale,
    normalize,
    return_lse,
    num_splits,
    out,
    schedule,
    backend,
):
    """Run ``mla_decode`` on e4m3 rows; through the operator where torch.compile, a mode or a subclass watches.

    The caller has made the checks that bf16 rows share.
    """
    inputs = (q, kv, page_table, kv_lengths, kv_scale, q_scale)
    results = outputs(q, out, inputs, normalize=normalize, return_lse=return_lse)
    cuts = (None, None) if schedule is None else schedule.operand
    if traced(*(t for t in inputs if t is not None)):
        decode_operator(*inputs, float(scale), num_splits or 0, *cuts, *results, backend)
    else:
        compute(inputs, float(scale), num_splits, cuts, results, backend)
        note_written(out)
    o, *statistics = results
    lse, row_max, row_sum = (by_request(t, *q.shape[:2]) for t in statistics)
    if not normalize:
        return AttentionState(o, row_max, row_sum)
    return (o, lse) if return_lse else o


def outputs(q, out, inputs, *, normalize: bool, return_lse: bool) -> tuple:
    """(o [B, Sq, H, 512], lse, row_max, row_sum [H, B * Sq]): out, checked, and uninitialised memory; None for results
    that are not wanted."""
    batch, queries, heads, _ = q.shape
    of_results = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    shape, dtype = (batch, queries, heads, VALUE_DIM), of_results if normalize else torch.float32
    if out is not None:
        check_operand("out", out, (dtype,), shape, q.device, aligned=True)
        check_output("out", out, dict(zip(INPUTS, inputs, strict=True)))
    wanted = (normalize and return_lse, not normalize, not normalize)
    statistics = {"size": (heads, batch * queries), "dtype": torch.float32, "device": q.device}
    o = torch.empty(shape, dtype=dtype, device=q.device) if out is None else out
    return o, *(torch.empty(**statistics) if each else None for each in wanted)


def compute(
    inputs: tuple, scale: float, num_splits: int | None, schedule: tuple, results: tuple, backend: str
) -> None:
    """Compute a call into ``results``, which ``outputs`` has made. inputs: those of INPUTS. schedule:
    ``DecodeSchedule.operand``."""
    (q, kv, page_table, kv_lengths, kv_scale, q_scale), (o, lse, row_max, row_sum) = inputs, results
    if are_checked(q.device):
        check_scale("kv_scale", kv_scale)
        if q_scale is not None:
            check_scale("q_scale", q_scale)
    if resolve_backend(backend, q.device) == "reference":
        define(inputs, scale, results)
        return
    target, scale = target_of(q.device), LogitOptions(scale).checked(q.shape[3]).scale
    check_for_kernels(q, kv, o, scale)
    rows = page_table.shape[1] * PAGE_ROWS
    if are_checked(q.device):
        check_values(kv_lengths, None, page_table, seq_k=rows, pages=len(kv), page_size=PAGE_ROWS)
    batch, queries, heads, _ = q.shape
    tokens = batch * queries
    if tokens == 0 or rows == 0 or len(kv) == 0:
        for result, value in zip(results, (0.0, -torch.inf, -torch.inf, 0.0), strict=True):
            if result is not None:
                result.fill_(value)
        return
    from warpspec.latent.gathered import launch

    problem = problem_of(
        batch, queries, heads, rows, scale, normalize=row_max is None, return_lse=lse is not None,
        num_splits=num_splits, cut_for=schedule[1], has_q_scale=q_scale is not None,
    )  # fmt: skip
    page_bytes = PAGE_ROWS * kv.shape[2]
    step = kv.stride(0) if len(kv) > 1 else page_bytes
    words = kv.as_strided((len(kv), page_bytes), (step, 1)).view(torch.uint8).view(torch.uint32)
    queries_of = q if q_scale is None else q.view(torch.uint8)
    if q_scale is not None:
        q_scale = q_scale.reshape(1)
    tensors = {
        "q": queries_of.reshape(tokens, heads, -1), "o": o.view(tokens, heads, VALUE_DIM), "scales": None, "sink": None,
        "lse": lse, "row_max": row_max, "row_sum": row_sum, "cos_sin": None, "positions": None,
        "kv_scale": kv_scale.reshape(1), "q_scale": q_scale, "cuts": schedule[0],
        "key_sets": [(words, page_table.contiguous(), kv_lengths.contiguous(), PAGE_ROWS)],
    }  # fmt: skip
    launch.run(problem, target, tensors)


def check_for_kernels(q, kv, o, scale: float) -> None:
    """Raise UnsupportedProblem or ValueError for what the definition takes and kernels do not."""
    if kv.shape[1] != PAGE_ROWS:
        raise UnsupportedProblem(f"kv: kernels read pages of {PAGE_ROWS} e4m3 rows, got {kv.shape[1]}")
    if q.dtype == torch.float16:
        raise UnsupportedProblem(f"q: must be torch.bfloat16 or e4m3 with e4m3 rows, got {q.dtype}")
    overlap = len(kv) > 1 and kv.stride(0) < PAGE_ROWS * kv.shape[2]
    if len(kv) and (kv.stride(1) != kv.shape[2] or overlap):
        raise ValueError(
            f"kv: e4m3 rows of a page must be contiguous, and pages apart, got strides {tuple(kv.stride())}"
        )
    if scale < 0:
        raise UnsupportedProblem(f"scale: kernels take one of at least 0 with e4m3 rows, got {scale}")
    if not o.is_contiguous():
        raise ValueError(f"out: must be contiguous with e4m3 rows, got strides {tuple(o.stride())}")


def define(inputs: tuple, scale: float, results: tuple) -> None:
    """Write what ``attention``'s definition gives into ``results``."""
    (q, kv, page_table, kv_lengths, kv_scale, q_scale), (o, lse, row_max, row_sum) = inputs, results
    normalize, k_scale = row_max is None, kv_scale
    if q_scale is not None:  # codes are exact in bf16; a product of two scales may be beyond fp32
        q, k_scale = q.to(torch.bfloat16), (kv_scale.double() * q_scale.double() * abs(scale)).float()
        scale = math.copysign(1.0, scale)
    found = attention(
        q, kv[:, :, None], k_scale=k_scale, v_scale=kv_scale, scale=scale, causal=q.shape[1] > 1,
        kv_lengths=kv_lengths, page_table=page_table, normalize=normalize, return_lse=lse is not None,
        v_dim=VALUE_DIM, out=o, backend="reference",
    )  # fmt: skip
    statistics = (found[1],) if lse is not None else () if normalize else found[1:]
    kept = [t for t in (lse, row_max, row_sum) if t is not None]
    for target, source in zip(kept, statistics, strict=True):
        by_request(target, *q.shape[:2]).copy_(source)


@torch.library.custom_op(
    "warpspec::mla_decode_float8",
    mutates_args=("o", "lse", "row_max", "row_sum"),
    schema="(Tensor q, Tensor kv, Tensor page_table, Tensor kv_lengths, Tensor kv_scale, Tensor? q_scale, float scale, "
    "SymInt num_splits, Tensor? cuts, str? cut_for, Tensor(a!) o, Tensor(b!)? lse, Tensor(c!)? row_max, "
    "Tensor(d!)? row_sum, str backend) -> ()",
)
def decode_operator(*arguments) -> None:
    """Operator of ``mla_decode`` on e4m3 rows; num_splits 0: choose it."""
    *inputs, scale, num_splits, cuts, cut_for, o, lse, row_max, row_sum, backend = arguments
    results = o, lse, row_max, row_sum
    compute(tuple(inputs), scale, num_splits or None, (cuts, cut_for), results, backend)


@decode_operator.register_fake
def _(*arguments):
    return None


def problem_of(batch: int, queries: int, heads: int, rows: int, scale: float, **results) -> GatheredProblem:
    """The problem of a call.

    batch, queries: requests, and queries of each. rows: rows of the longest request that the page table has room for.
    results: fields of the problem that say which results are wanted, and how the keys are shared out.
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
