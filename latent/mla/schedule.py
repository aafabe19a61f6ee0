"""Schedules of MLA's decode (``mla_schedule``)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.checks import check_choice, check_int, check_kind, check_tensor
from warpspec.common.launch import target_of
from warpspec.fmha.cuts import DecodeSchedule, LineSizes, can_read
from warpspec.fmha.heads import LATENT
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.values import POSITION_LIMIT
from warpspec.latent.gathered.config import PAGE_ROWS
from warpspec.latent.gathered.problem import GatheredProblem
from warpspec.latent.mla import float8

HEAD_LIMIT = 128
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def mla_schedule(
    kv_lengths: torch.Tensor,
    *,
    heads: int,
    queries: int = 1,
    max_pages: int,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    q_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> DecodeSchedule:
    """Schedule the calls of ``mla_decode`` of one decoding step, which all layers make with the same lengths.

    Without a schedule, a call that is cut by length (docs/kernels.md) begins with a scan of the lengths, from which
    each CTA finds its share of the work. A schedule is what they find, computed once by a launch of its own.
    ``update`` computes it again for the lengths of the next step, in place, so that CUDA graphs can hold the update or
    the calls or both.

    Its calls must have q [B, queries, heads, 576], a page table [B, max_pages], pages of ``page_size`` rows of
    ``dtype``, and no num_splits; ``mla_decode`` raises ValueError for others before anything is launched. Results have
    the same bits as without a schedule. Lengths that differ from those of the last update cost time, no more: results
    are then right up to rounding.

    The schedule of calls that are not cut by length has no cuts (``cuts`` is None): such calls take it, check that it
    is theirs, and run as they would without. Which calls are cut follows from the sizes alone, not from lengths: those
    on sm_90a for which that is expected to be the fastest, whatever plans have been timed and kept. On sm_100a and with
    backend "reference" none are.

    Args:
        kv_lengths: int32 [B], read on the device.
        heads, queries: of q; 1 to 128 heads.
        max_pages: columns of the page table.
        page_size, dtype: of the cache; dtype is bf16, fp16 or e4m3, as in ``mla_decode``.
        q_dtype: e4m3 for queries in e4m3, over e4m3 rows; None: they are in 16 bits.
        backend: as in ``mla_decode``.

    Raises:
        TypeError, ValueError: naming the argument. UnsupportedProblem: the backend does not run on the device.
    """
    check_tensor("kv_lengths", kv_lengths, (torch.int32,), (-1,))
    check_int("heads", heads, 1, HEAD_LIMIT)
    check_int("queries", queries, 0, POSITION_LIMIT)
    check_int("page_size", page_size, 1, POSITION_LIMIT)
    check_int("max_pages", max_pages, 0, POSITION_LIMIT // page_size)
    check_kind("dtype", dtype, torch.dtype)
    check_choice("dtype", str(dtype), tuple(map(str, ROW_DTYPES)))
    if q_dtype is not None:
        check_kind("q_dtype", q_dtype, torch.dtype)
    if q_dtype is not None and not q_dtype == dtype == torch.float8_e4m3fn:
        raise ValueError(f"q_dtype: must be None, or torch.float8_e4m3fn as dtype is, got {q_dtype}")
    check_kind("backend", backend, str)
    sizes = LineSizes(len(kv_lengths), queries, heads, 1, max_pages)
    about = (dtype, page_size) if q_dtype is None else (dtype, page_size, q_dtype)
    if resolve_backend(backend, kv_lengths.device) == "reference" or 0 in sizes:
        return DecodeSchedule(sizes, about, kv_lengths)
    target = target_of(kv_lengths.device)
    if dtype == torch.float8_e4m3fn:
        from warpspec.latent.gathered import launch

        found = launch.make_plan(codes_problem(sizes, q_dtype is not None), target)
    else:
        from warpspec.fmha import launch

        found = launch.expected_plan(rows_problem(sizes, about, kv_lengths.device), target)
    return DecodeSchedule(sizes, about, kv_lengths, found if can_read(found.config) else None, target)


def codes_problem(sizes: LineSizes, q_codes: bool) -> GatheredProblem:
    """Calls over e4m3 rows. q_codes: whether queries are in e4m3, too."""
    requests, queries, heads, _, pages = sizes
    call = (requests, queries, heads, pages * PAGE_ROWS, 1.0)
    return float8.problem_of(*call, normalize=True, return_lse=False, num_splits=None, has_q_scale=q_codes)


@lru_cache(maxsize=4096)
def rows_problem(sizes: LineSizes, about: tuple, device: torch.device) -> AttentionProblem:
    """Calls over 16-bit rows. about: (dtype, page size)."""
    dtype, page_size = about
    requests, queries, heads, _, pages = sizes
    size, values = LATENT

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    problem = AttentionProblem.of(
        meta(requests, queries, heads, size, dtype=dtype),
        meta(1, page_size, 1, size, dtype=dtype),
        causal=queries > 1,
        kv_lengths=meta(requests, dtype=torch.int32),
        page_table=meta(requests, pages, dtype=torch.int32),
        v_dim=values,
        memory=False,
    )
    return replace(problem, device=device)
