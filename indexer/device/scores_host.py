"""The host side of a kernel of index scores, the same for every architecture."""

from __future__ import annotations

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from warpspec.indexer.scores_config import ScoresConfig


class ScoresHost:
    """``Scores(config)(...)`` is the host function; an architecture's class adds ``kernel``."""

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
