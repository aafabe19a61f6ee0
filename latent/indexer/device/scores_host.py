"""Host side of the kernels of index scores, the same for every architecture."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.common.operands import fakes
from warpspec.latent.indexer.operands import ScoresOperands


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

    @host_function(ScoresOperands)
    def __call__(self, operands: ScoresOperands, stream: CUstream):
        """Launch the kernel."""
        queries = operands.inputs.queries
        self.kernel(operands).launch(
            grid=(operands.splits, 1 if self.config.balanced else queries.shape[0], 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=self.config.least_ctas,
            use_pdl=self.config.dependent,
            stream=stream,
        )


class WarpgroupScorer:
    """Base of the architectures' scorers, which have ``config`` and ``thread``; a group is a warpgroup. See
    ``score_split``."""

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
def score_split(query: cutlass.Constexpr, entries, row: cute.Tensor, split, splits):
    """Score every ``splits``-th tile of a query's keys, in one CTA, into a row of logits (N).

    query: the architecture's scorer of the calling threads. These threads form ``groups``, which take tiles of
    ``tile_keys`` keys in turn; ``group`` is the thread's. Its method ``score(entries, first, end, step, sink)`` scores
    the group's tiles first, first + step, ... below end into ``sink``, which has ``limit`` and ``put`` as
    ``LogitsRow``.
    """
    tiles = cute.ceil_div(row.shape[0], query.tile_keys)
    first, step = split * query.groups + query.group, splits * query.groups
    query.score(entries, first, tiles, step, LogitsRow(row, row.shape[0]))


def scores_arguments(host: type, config) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    return (host(config), *fakes(ScoresOperands, config))
