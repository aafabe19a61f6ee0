"""Host side of the kernels of index scores, the same for every architecture."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import VECTOR_BYTES, WARPGROUP_THREADS


class LogitsRow(NamedTuple):
    """Destination of scores: a row of logits (N). Scores of keys from ``limit`` on are dropped."""

    row: cute.Tensor
    limit: Int32

    def put(self, index, value) -> None:
        self.row[index] = value


class ScoresHost:
    """``Scores(config)(...)`` is the host function; an architecture's class adds ``kernel``."""

    def __init__(self, config):
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
        """Launch the kernel.

        queries: [T, words], each query a page of H rows. weights: fp32 [T, H]. pool: [pages, words]. page_table: int32
        [R, pages]. requests, lengths: int32 [T]. logits: fp32 [T, N]. parts: CTAs of a query, or of the whole launch if
        the configuration is balanced.
        """
        arguments = (queries, weights, pool, page_table, requests, lengths, logits, parts)
        self.kernel(*arguments).launch(
            grid=(parts, 1 if self.config.balanced else queries.shape[0], 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=self.config.least_ctas,
            use_pdl=self.config.dependent,
            stream=stream,
        )


class WarpgroupScorer:
    """Base of the architectures' scorers, which have ``config`` and ``thread``; a group is a warpgroup. See
    ``score_part``."""

    @property
    def tile_keys(self) -> int:
        return self.config.tile_keys

    @property
    def groups(self) -> int:
        return self.config.warpgroups

    @property
    def group(self) -> Int32:
        return self.thread // WARPGROUP_THREADS


@cute.jit
def score_part(query: cutlass.Constexpr, entries, row: cute.Tensor, part, parts):
    """Score every ``parts``-th tile of a query's keys, in one CTA, into a row of logits (N).

    query: the architecture's scorer of the calling threads. These threads form ``groups``, which take tiles of
    ``tile_keys`` keys in turn; ``group`` is the thread's. Its method ``score(entries, first, end, step, sink)`` scores
    the group's tiles first, first + step, ... below end into ``sink``, which has ``limit`` and ``put`` as
    ``LogitsRow``.
    """
    tiles = cute.ceil_div(row.shape[0], query.tile_keys)
    first, step = part * query.groups + query.group, parts * query.groups
    query.score(entries, first, tiles, step, LogitsRow(row, row.shape[0]))


def operand_arguments() -> tuple:
    """The inputs of a host function that scores: queries, weights, pages of keys, and which keys each query sees."""

    def words():
        return fake_rows(Uint32, 2, alignment=VECTOR_BYTES)

    numbers = (fake_rows(Int32, 2), fake_rows(Int32, 1), fake_rows(Int32, 1))
    return (words(), fake_rows(Float32, 2), words(), *numbers)


def scores_arguments() -> tuple:
    """Arguments of a scores kernel's host function without the stream."""
    return (*operand_arguments(), fake_rows(Float32, 2), Int32(1))
