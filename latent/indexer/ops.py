"""The torch operators behind the indexer's functions: backend choice, outputs, launches."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import target_of
from warpspec.common.repeated import watched
from warpspec.latent.cache.config import InsertConfig
from warpspec.latent.cache.pools import IndexPool, pages_of, table_slots
from warpspec.latent.cache.problem import check_positions
from warpspec.latent.indexer import reference
from warpspec.latent.indexer.config import SelectConfig, StreamConfig, choose_splits
from warpspec.latent.indexer.kernels import INDEX
from warpspec.latent.indexer.problem import IndexQueries
from warpspec.latent.indexer.scores_config import FORMATS, HEADS_STEP, MAX_HEADS

MOST_QUERIES = 2**16 - 1  # of a launch of scores: the second dimension of a grid


def index_queries(q, weights, cos_sin, positions, format, hadamard, backend) -> IndexQueries:
    """K3 on checked arguments, through the torch operator while something records it."""
    tokens, heads = q.shape[:2]
    pool = IndexPool.empty(tokens, heads, format, device=q.device)
    arguments = (q, cos_sin, positions, pool.data, format, hadamard, backend)
    if watched(q, cos_sin, positions):
        queries_operator(*arguments)
    else:
        check_positions("positions", positions, cos_sin)
        run_queries(*arguments)
    return IndexQueries(pool, weights)


def run_queries(q, cos_sin, positions, data, format, hadamard, backend) -> None:
    """Run K3; writes the pages ``data``."""
    tokens, heads = q.shape[:2]
    pool, backend = IndexPool(data, heads, format), resolve_backend(backend, q.device)
    if backend == "reference":
        rows = reference.query_rows(q, cos_sin, positions, hadamard)
        pool.write(torch.arange(tokens * heads, device=q.device), rows.flatten(0, 1))
    elif tokens:
        from warpspec.latent.cache.device.insert import INSERT

        config = InsertConfig("index", format, queries=False, weight=None, hadamard=hadamard, share=heads)
        slots = torch.arange(tokens * heads, dtype=torch.int32, device=q.device)
        words = q.detach().flatten(0, 1).view(torch.uint32)
        arguments = (None, None, words, None, cos_sin, positions, slots, pool.words, heads, 0.0)
        INSERT.run(config, target_of(q.device), *arguments)


@torch.library.custom_op(
    "warpspec::index_queries",
    mutates_args=("data",),
    schema="(Tensor q, Tensor cos_sin, Tensor positions, Tensor(a!) data, str format, bool hadamard, "
    "str backend) -> ()",
)
def queries_operator(q, cos_sin, positions, data, format, hadamard, backend) -> None:
    """Operator of ``index_queries``."""
    check_positions("positions", positions, cos_sin)
    run_queries(q, cos_sin, positions, data, format, hadamard, backend)


@queries_operator.register_fake
def _(q, cos_sin, positions, data, format, hadamard, backend):
    return None


class ScoresCall(NamedTuple):
    """A checked call of ``index_scores``."""

    queries: IndexQueries
    pool: IndexPool
    page_table: torch.Tensor
    requests: torch.Tensor
    lengths: torch.Tensor
    backend: str

    @property
    def flat(self) -> tuple:
        """The arguments of an operator."""
        asked, pool = self.queries.pool, self.pool
        queries = (asked.data, asked.page_size, asked.format, self.queries.weights)
        return (*queries, pool.data, pool.page_size, pool.format, *self[2:])

    @classmethod
    def of_flat(cls, arguments: tuple) -> ScoresCall:
        """The call of ``flat``."""
        queries = IndexQueries(IndexPool(*arguments[:3]), arguments[3])
        return cls(queries, IndexPool(*arguments[4:7]), *arguments[7:])


def index_scores(call: ScoresCall) -> torch.Tensor:
    """K4 on checked arguments, through the torch operator while something records it."""
    if watched(call.queries.pool.data, call.pool.data, call.queries.weights):
        return scores_operator(*call.flat)
    return run_scores(call)


def run_scores(call: ScoresCall) -> torch.Tensor:
    """Run K4: logits fp32 [T, N]."""
    queries, pool, page_table, requests, lengths, backend = call
    asked, weights = queries.pool, queries.weights
    tokens, columns = len(weights), page_table.shape[1] * pool.page_size
    if resolve_backend(backend, page_table.device) == "reference":
        return reference_scores(queries, pool, page_table, requests, lengths)
    target = target_of(page_table.device)
    check_scores_kernels(pool.format, asked.format, asked.page_size)
    logits = torch.empty(tokens, columns, dtype=torch.float32, device=page_table.device)
    if logits.numel() == 0:
        return logits
    kernels = INDEX.of(target.architecture)
    config = kernels.config.of(pool.format, asked.page_size, pool.page_size, tokens, columns, target.sm_count)
    splits = config.choose_splits(tokens, columns, target.sm_count)
    by_query = (asked.words, weights.detach(), requests, lengths, logits)
    for first in range(0, tokens, MOST_QUERIES):
        if tokens > MOST_QUERIES:
            words, factors, *batch = (t[first : first + MOST_QUERIES] for t in by_query)
        else:
            words, factors, *batch = by_query
        kernels.scores.run(config, target, words, factors, pool.words, page_table, *batch, splits)
    return logits


def check_scores_kernels(name: str, asked_format: str, heads: int) -> None:
    """Raise UnsupportedProblem for formats and head counts that no scores kernel computes."""
    if name not in FORMATS or asked_format != name:
        raise UnsupportedProblem(
            f"index_scores: kernels take keys and queries both of {' or '.join(FORMATS)}, got {name!r} and "
            f"{asked_format!r}"
        )
    if heads % HEADS_STEP or heads > MAX_HEADS:
        raise UnsupportedProblem(
            f"index_scores: kernels take a multiple of {HEADS_STEP} heads up to {MAX_HEADS}, got {heads}"
        )


def stream_entries(queries: IndexQueries, pool: IndexPool, page_table, requests, lengths, k: int) -> tuple:
    """K4 and K5 in one launch, on checked arguments: (slots, counts).

    Through the operator while something records it.
    """
    asked = queries.pool
    check_scores_kernels(pool.format, asked.format, asked.page_size)
    arguments = (
        asked.data, asked.page_size, queries.weights, pool.data, pool.page_size, pool.format, page_table, requests,
        lengths, k,
    )  # fmt: skip
    return (stream_operator if watched(asked.data, pool.data, queries.weights) else run_stream)(*arguments)


def run_stream(asked, heads, weights, data, page_size, name, page_table, requests, lengths, k) -> tuple:
    """Run K4 and K5 in one launch."""
    target = target_of(page_table.device)
    slots, counts = new_outputs(weights, k)
    if len(slots) == 0:
        return slots, counts
    kernels = INDEX.of(target.architecture)
    config = StreamConfig.of(kernels.config, name, heads, page_size)
    queries, pool = IndexPool(asked, heads, name).words, IndexPool(data, page_size, name).words
    batch = (page_table, requests, lengths, slots, counts)
    kernels.stream.run(config, target, queries, weights.detach(), pool, *batch)
    return slots, counts


@torch.library.custom_op(
    "warpspec::select_entries",
    mutates_args=(),
    schema="(Tensor asked, SymInt heads, Tensor weights, Tensor data, SymInt page_size, str name, Tensor page_table, "
    "Tensor requests, Tensor lengths, SymInt k) -> (Tensor, Tensor)",
)
def stream_operator(asked, heads, weights, data, page_size, name, page_table, requests, lengths, k):
    """Operator of ``select_entries`` when logits never reach memory."""
    return run_stream(asked, heads, weights, data, page_size, name, page_table, requests, lengths, k)


@stream_operator.register_fake
def _(asked, heads, weights, data, page_size, name, page_table, requests, lengths, k):
    return new_outputs(weights, k)


def reference_scores(queries: IndexQueries, pool: IndexPool, page_table, requests, lengths) -> torch.Tensor:
    """K4 by its definition, one query at a time."""
    tokens, columns = len(queries.weights), page_table.shape[1] * pool.page_size
    values = queries.values
    logits = torch.full((tokens, columns), -torch.inf, dtype=torch.float32, device=page_table.device)
    rows = torch.arange(columns, device=page_table.device)
    for t in range(tokens):
        slots = table_slots(pages_of(page_table, requests[t : t + 1]), rows[None], pool.page_size)[0]
        seen = (rows < lengths[t]) & (slots >= 0) & (slots < pool.capacity)
        scores = reference.index_scores(values[t : t + 1], queries.weights[t : t + 1], pool.read(slots))[0]
        logits[t] = torch.where(seen, scores, -torch.inf)
    return logits


@torch.library.custom_op(
    "warpspec::index_scores",
    mutates_args=(),
    schema="(Tensor asked, SymInt heads, str asked_format, Tensor weights, Tensor data, SymInt page_size, str name, "
    "Tensor page_table, Tensor requests, Tensor lengths, str backend) -> Tensor",
)
def scores_operator(*arguments):
    """Operator of ``index_scores``."""
    return run_scores(ScoresCall.of_flat(arguments))


@scores_operator.register_fake
def _(*arguments):
    weights, page_size, page_table = arguments[3], arguments[5], arguments[7]
    columns = page_table.shape[1] * page_size
    return torch.empty(weights.shape[0], columns, dtype=torch.float32, device=page_table.device)


def index_topk(
    logits, k, lengths, page_table, requests, page_size, backend
) -> tuple[torch.Tensor, torch.Tensor]:
    """K5 on checked arguments, through the torch operator while something records it."""
    arguments = (logits, k, lengths, page_table, requests, page_size or 1, backend)
    return topk_operator(*arguments) if watched(logits) else run_topk(*arguments)


def run_topk(logits, k, lengths, page_table, requests, page_size, backend):
    """Run K5: (slots, counts)."""
    backend = resolve_backend(backend, logits.device)
    if backend == "reference":
        return reference.index_topk(logits.detach(), k, lengths, page_table, requests, page_size)
    slots, counts = new_outputs(logits, k)
    if logits.shape[0] == 0:
        return slots, counts
    from warpspec.latent.indexer.device.select import SELECT

    logits, target = logits.detach(), target_of(logits.device)
    table, results = (page_table, requests), (slots, counts, None)
    splits = choose_splits(*logits.shape, target.sm_count)
    if splits == 1:
        config = SelectConfig(lengths is not None, page_table is not None)
        SELECT.run(config, target, logits, lengths, *table, *results, None, page_size, 1)
    else:
        indices, _ = new_outputs(logits, splits * k)
        values = torch.empty(indices.shape, dtype=torch.float32, device=logits.device)
        first = SelectConfig(lengths is not None, False, is_split=True)
        SELECT.run(first, target, logits, lengths, None, None, indices, None, values, None, 1, splits)
        second = SelectConfig(False, page_table is not None, mapped=True)
        SELECT.run(second, target, values, None, *table, *results, indices, page_size, 1)
    return slots, counts


def new_outputs(logits, k) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised (slots, counts)."""
    integers = {"dtype": torch.int32, "device": logits.device}
    return torch.empty(logits.shape[0], k, **integers), torch.empty(logits.shape[0], **integers)


@torch.library.custom_op(
    "warpspec::index_topk",
    mutates_args=(),
    schema="(Tensor logits, SymInt k, Tensor? lengths, Tensor? page_table, Tensor? requests, SymInt page_size, "
    "str backend) -> (Tensor, Tensor)",
)
def topk_operator(logits, k, lengths, page_table, requests, page_size, backend):
    """Operator of ``index_topk``."""
    return run_topk(logits, k, lengths, page_table, requests, page_size, backend)


@topk_operator.register_fake
def _(logits, k, lengths, page_table, requests, page_size, backend):
    return new_outputs(logits, k)
