"""The indexer of sparse attention (DeepSeek-V4's CSA layers): quantise queries, score index keys, select the top k."""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents, resolve_backend
from warpspec.common.checks import check_int, refuse_gradients
from warpspec.latent.cache.formats import INDEX_FORMATS, format_named
from warpspec.latent.cache.pools import IndexPool
from warpspec.latent.indexer import ops
from warpspec.latent.indexer.config import K_LIMIT
from warpspec.latent.indexer.problem import IndexQueries, check_queries, check_scores, check_table, check_topk

__all__ = ["IndexQueries", "index_queries", "index_scores", "index_topk", "select_entries"]


def index_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    format: str = "mxfp4",
    hadamard: bool = True,
    backend: str = "auto",
) -> IndexQueries:
    """Rotate the indexer's queries by position and quantise them in the format of the index keys. One launch.

    q: bf16 [T, H, 128], contiguous, H a multiple of 4. weights: fp32 [T, H], the weights of the heads' scores,
    including all constant factors. cos_sin: fp32 [N, 64] and positions: int32 [T], as in ``cache.insert_window``; the
    last 64 numbers of a head are rotated. hadamard: apply the Hadamard transform afterwards, as ``cache.compress`` has
    done to the keys. format: an ``IndexPool``'s.

    A position beyond the table raises ValueError on the CPU. On a GPU the rotated numbers become NaN, or all numbers
    with ``hadamard``. Raises TypeError or ValueError naming the argument, and UnsupportedProblem as ``insert_window``
    does. Forward only.
    """
    format_named(INDEX_FORMATS, format)
    refuse_gradients(q=q, weights=weights, cos_sin=cos_sin)
    check_queries(q, weights, cos_sin, positions, hadamard)
    return ops.index_queries(q, weights, cos_sin, positions, format, hadamard, backend)


def index_scores(
    queries: IndexQueries,
    pool: IndexPool,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """fp32 [T, N]: each query's score for every entry of its request; -inf from the query's length on.

    N is pages * page_size. A score is sum over heads of weight * ReLU(q . k), with the quantised queries and keys.
    page_table: int32 [R, pages]. requests: int32 [T], the request of each query. lengths: int32 [T], how many entries a
    query sees, from the first. Missing pages give -inf. For requests out of range a GPU gives -inf, and it clamps
    lengths; the CPU raises ValueError for both. Kernels take "mxfp4" or "fp8" keys, queries of the same format, and a
    multiple of 8 heads up to 64. Raises TypeError or ValueError naming the argument, and UnsupportedProblem. Forward
    only.
    """
    check_scores(queries, pool, page_table, requests, lengths)
    refuse_gradients(**{"queries.weights": queries.weights})
    return ops.index_scores(ops.ScoresCall(queries, pool, page_table, requests, lengths, backend))


def index_topk(
    logits: torch.Tensor,
    k: int,
    *,
    lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    requests: torch.Tensor | None = None,
    page_size: int | None = None,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots int32 [T, k], counts int32 [T]): the k largest logits of each row, in order of index.

    One launch, or two where rows are few and long. logits: fp32 [T, N]. k: 1 to 2048. lengths: int32 [T], how many
    logits of a row count, from the first (None: all); outside 0..N they are clamped on a GPU and raise ValueError on
    the CPU. The selection is exact: if logits are equal the lower index wins, NaN ranks above all numbers, and -inf is
    never taken. counts: how many were taken; the slots after them are -1. page_table: int32 [R, pages], given together
    with requests: int32 [T] and page_size, turns index i into the slot page_table[request, i // page_size] * page_size
    + i % page_size, or -1 where the page or request does not exist. Raises TypeError or ValueError naming the argument.
    """
    refuse_tangents(logits=logits)
    check_topk(logits, k, lengths, page_table, requests, page_size)
    return ops.index_topk(logits, k, lengths, page_table, requests, page_size, backend)


def select_entries(
    queries: IndexQueries,
    pool: IndexPool,
    page_table: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    *,
    workspace_bytes: int = 1 << 30,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the entries that each query attends to: (slots int32 [T, k], counts int32 [T]).

    The result is ``index_topk`` of ``index_scores``, whose arguments these are. page_table: the index pool's; the slots
    number its rows, and equally the rows of any other pool that shares its pages. workspace_bytes: queries are computed
    in batches whose logits take at most this many bytes, at least one query at a time. With 0, logits never reach
    memory: one launch, with a CTA for each query, scores and selects, with the same result. This is meant for prefill.
    Raises TypeError or ValueError naming the argument, and UnsupportedProblem as ``index_scores`` does. Forward only.
    """
    check_scores(queries, pool, page_table, requests, lengths)
    check_table(len(requests), page_table, requests, page_table.device)
    check_int("workspace_bytes", workspace_bytes, 0)
    check_int("k", k, 1, K_LIMIT)
    if workspace_bytes == 0 and resolve_backend(backend, page_table.device) != "reference":
        return ops.stream_entries(queries, pool, page_table, requests, lengths, k)
    columns = max(1, page_table.shape[1] * pool.page_size)
    step = max(1, workspace_bytes // (4 * columns))
    parts = []
    for first in range(0, max(1, len(requests)), step):
        at = slice(first, first + step)
        size = queries.pool.page_size
        some = IndexQueries(IndexPool(queries.pool.data[at], size, queries.pool.format), queries.weights[at])
        logits = index_scores(some, pool, page_table, requests[at], lengths[at], backend=backend)
        table = dict(page_table=page_table, requests=requests[at], page_size=pool.page_size)
        parts.append(index_topk(logits, k, lengths=lengths[at], **table, backend=backend))
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
