"""Checks of the indexer's operations: each argument once, by name, before anything is launched or written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.checks import check_range, check_tensor
from warpspec.latent.cache.pools import IndexPool, check_page_size
from warpspec.latent.cache.problem import ROPE_DIM, check_count, check_pool
from warpspec.latent.indexer.config import K_LIMIT

HEADS_STEP = 4  # a multiple of 4 heads has scales in multiples of 16 bytes
LENGTH_LIMIT = 2**30  # most logits of a row


@dataclass(frozen=True, eq=False)
class IndexQueries:
    """Quantised queries of the indexer.

    pool: an ``IndexPool`` whose page t is query t; the page's rows are its heads. weights: fp32 [T, H].
    """

    pool: IndexPool
    weights: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """fp32 [T, H, 128]: the queries, dequantised."""
        tokens, heads = self.weights.shape
        return self.pool.read(torch.arange(tokens * heads, device=self.weights.device).view(tokens, heads))


def check_queries(q, weights, cos_sin, positions, hadamard) -> None:
    """Check the arguments of ``index_queries``."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: must be a torch.Tensor, got {type(q).__name__}")
    device = q.device
    check_tensor("q", q, (torch.bfloat16,), (-1, -1, 128), device, aligned=True)
    tokens, heads = q.shape[:2]
    if heads < 1 or heads % HEADS_STEP:
        raise ValueError(f"q: heads must be a multiple of {HEADS_STEP}, got {heads}")
    if not q.is_contiguous():
        raise ValueError(f"q: must be contiguous, got strides {list(q.stride())}")
    check_count("q", tokens * heads)
    check_tensor("weights", weights, (torch.float32,), (tokens, heads), device)
    check_tensor("cos_sin", cos_sin, (torch.float32,), (-1, ROPE_DIM), device, aligned=True)
    check_tensor("positions", positions, (torch.int32,), (tokens,), device)
    if not isinstance(hadamard, bool):
        raise TypeError(f"hadamard: must be a bool, got {hadamard!r}")


def check_scores(queries, pool, page_table, requests, lengths) -> None:
    """Check the arguments of ``index_scores``."""
    check_asked(queries)
    device = queries.weights.device
    check_pool(pool, (IndexPool,), device)
    check_table(len(queries.weights), page_table, requests, device)
    check_tensor("lengths", lengths, (torch.int32,), (len(queries.weights),), device)
    columns = page_table.shape[1] * pool.page_size
    if columns > LENGTH_LIMIT:
        raise ValueError(f"page_table: at most {LENGTH_LIMIT} entries of a request, got {columns}")
    if device.type == "cpu":
        check_range("lengths", lengths, 0, columns, "entries that the page table has")


def check_asked(queries) -> None:
    """Check that queries are ``IndexQueries`` whose pool and weights match."""
    if not isinstance(queries, IndexQueries):
        raise TypeError(f"queries: must be IndexQueries, got {type(queries).__name__}")
    pool, weights = queries.pool, queries.weights
    if not isinstance(pool, IndexPool):
        raise TypeError(f"queries: pool must be an IndexPool, got {type(pool).__name__}")
    check_tensor("queries: weights", weights, (torch.float32,), (-1, -1), pool.device)
    if (len(pool.data), pool.page_size) != weights.shape:
        raise ValueError(
            f"queries: the pool must have a page of as many heads for each of the weights' {list(weights.shape)}, got "
            f"{len(pool.data)} pages of {pool.page_size}"
        )


def check_table(tokens, page_table, requests, device) -> None:
    check_tensor("page_table", page_table, (torch.int32,), (-1, -1), device)
    check_tensor("requests", requests, (torch.int32,), (tokens,), device)
    if device.type == "cpu":
        check_range("requests", requests, 0, len(page_table) - 1, "rows of page_table")


def check_topk(logits, k, lengths, page_table, requests, page_size) -> None:
    """Check the arguments of ``index_topk``."""
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits: must be a torch.Tensor, got {type(logits).__name__}")
    device = logits.device
    check_tensor("logits", logits, (torch.float32,), (-1, -1), device)
    tokens, columns = logits.shape
    if columns > LENGTH_LIMIT:
        raise ValueError(f"logits: at most {LENGTH_LIMIT} columns, got {columns}")
    check_count("logits", tokens)
    if type(k) is not int:
        raise TypeError(f"k: must be an int, got {k!r} ({type(k).__name__})")
    if not 1 <= k <= K_LIMIT:
        raise ValueError(f"k: must be within 1..{K_LIMIT}, got {k}")
    if lengths is not None:
        check_tensor("lengths", lengths, (torch.int32,), (tokens,), device)
        if device.type == "cpu":
            check_range("lengths", lengths, 0, columns, "columns of logits")
    given = [
        name
        for name, t in (("page_table", page_table), ("requests", requests), ("page_size", page_size))
        if t is not None
    ]
    if given and len(given) < 3:
        raise ValueError(
            f"page_table, requests, page_size: must be given together, got {', '.join(given)} only"
        )
    if given:
        check_page_size(page_size)
        check_table(tokens, page_table, requests, device)
