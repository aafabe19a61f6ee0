"""Checks of the indexer's operations: each argument once, by name, before anything is launched or written."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.checks import (
    check_bool,
    check_int,
    check_kind,
    check_operand,
    check_range,
    check_strided,
    shape_of,
)
from warpspec.latent.cache.pools import IndexPool, check_page_size
from warpspec.latent.cache.problem import ROPE_DIM, check_count, check_pool
from warpspec.latent.indexer.config import K_LIMIT

HEADS_STEP = 4  # a multiple of 4 heads has scales in multiples of 16 bytes
LENGTH_LIMIT = 2**30  # most logits of a row


@dataclass(frozen=True, eq=False)
class IndexQueries:
    """Quantised queries of the indexer.

    pool: an ``IndexPool`` whose page t is query t; the page's rows are its heads. weights: fp32 [T, H]. Raises
    TypeError or ValueError naming the field.
    """

    pool: IndexPool
    weights: torch.Tensor

    def __post_init__(self):
        check_kind("pool", self.pool, IndexPool)
        check_operand("weights", self.weights, (torch.float32,), (-1, -1), self.pool.device)
        if (len(self.pool.data), self.pool.page_size) != self.weights.shape:
            raise ValueError(
                f"pool: must have a page of as many heads for each of the weights' {shape_of(self.weights)}, got "
                f"{len(self.pool.data)} pages of {self.pool.page_size}"
            )

    @property
    def values(self) -> torch.Tensor:
        """fp32 [T, H, 128]: the queries, dequantised."""
        tokens, heads = self.weights.shape
        return self.pool.read(torch.arange(tokens * heads, device=self.weights.device).view(tokens, heads))


def check_queries(q, weights, cos_sin, positions, hadamard) -> None:
    """Check the arguments of ``index_queries``."""
    check_strided("q", q)
    device = q.device
    check_operand("q", q, (torch.bfloat16,), (-1, -1, 128), device, aligned=True)
    tokens, heads = q.shape[:2]
    if heads < 1 or heads % HEADS_STEP:
        raise ValueError(f"q: heads must be a multiple of {HEADS_STEP}, got {heads}")
    if not q.is_contiguous():
        raise ValueError(f"q: must be contiguous, got strides {list(q.stride())}")
    check_count("q", tokens * heads)
    check_operand("weights", weights, (torch.float32,), (tokens, heads), device)
    check_operand("cos_sin", cos_sin, (torch.float32,), (-1, ROPE_DIM), device, aligned=True)
    check_operand("positions", positions, (torch.int32,), (tokens,), device)
    check_bool("hadamard", hadamard)


def check_scores(queries, pool, page_table, requests, lengths) -> None:
    """Check the arguments of ``index_scores``."""
    check_kind("queries", queries, IndexQueries)
    device = queries.weights.device
    check_pool(pool, (IndexPool,), device)
    check_table(len(queries.weights), page_table, requests, device)
    check_operand("lengths", lengths, (torch.int32,), (len(queries.weights),), device)
    columns = page_table.shape[1] * pool.page_size
    if columns > LENGTH_LIMIT:
        raise ValueError(f"page_table: at most {LENGTH_LIMIT} entries of a request, got {columns}")
    check_range("lengths", lengths, 0, columns, "entries that the page table has")


def check_table(tokens, page_table, requests, device) -> None:
    check_operand("page_table", page_table, (torch.int32,), (-1, -1), device)
    check_operand("requests", requests, (torch.int32,), (tokens,), device)
    check_range("requests", requests, 0, len(page_table) - 1, "rows of page_table")


def check_topk(logits, k, lengths, page_table, requests, page_size) -> None:
    """Check the arguments of ``index_topk``."""
    check_strided("logits", logits)
    device = logits.device
    check_operand("logits", logits, (torch.float32,), (-1, -1), device)
    tokens, columns = logits.shape
    if columns > LENGTH_LIMIT:
        raise ValueError(f"logits: at most {LENGTH_LIMIT} columns, got {columns}")
    check_count("logits", tokens)
    check_int("k", k, 1, K_LIMIT)
    if lengths is not None:
        check_operand("lengths", lengths, (torch.int32,), (tokens,), device)
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
