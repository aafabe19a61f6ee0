"""A kernel of index scores: what is the same for every architecture."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from warpspec.indexer.device.keys import LogitsRow, entries_of
from warpspec.indexer.scores_config import ScoresConfig


class ScoresHost:
    """``Scores(config)(...)`` is the host function. An architecture's class adds ``scorer``, which prepares a query,
    and ``score``, by which a group of threads goes along its tiles of keys."""

    def __init__(self, config: ScoresConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        queries: cute.Tensor,
        weights: cute.Tensor,
        pool: cute.Tensor,
        page_table: cute.Tensor,
        requests: cute.Tensor,
        lengths: cute.Tensor,
        logits: cute.Tensor,
        parts: Int32,
        stream: CUstream,
    ):
        """queries: [T, words], a page of H rows each. weights: fp32 [T, H]. pool: [pages, words]. page_table: int32
        [R, pages]. requests, lengths: int32 [T]. logits: fp32 [T, N]. parts: CTAs of a query."""
        arguments = (queries, weights, pool, page_table, requests, lengths, logits, parts)
        self.kernel(*arguments).launch(
            grid=(parts, queries.shape[0], 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, queries, weights, pool, page_table, requests, lengths, logits, parts):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        part, token, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        query = self.scorer(config, smem, queries[token, None], weights[token, None], thread)
        entries = entries_of(config, pool, page_table, requests, lengths, token)
        tiles = cute.ceil_div(logits.shape[1], query.tile_keys)
        first, step = part * query.groups + query.group, parts * query.groups
        self.score(query, entries, first, tiles, step, LogitsRow(logits[token, None]))
