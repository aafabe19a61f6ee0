"""The kernel of index scores on sm_90a."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.latent.indexer.device.entries import entries_of
from warpspec.latent.indexer.device.scores_host import LogitsRow, ScoresHost, score_split, scores_arguments
from warpspec.latent.indexer.scores_config import TILE_KEYS, ScoresConfig
from warpspec.latent.indexer.sm90.balanced import score_shares
from warpspec.latent.indexer.sm90.keys import load_asked
from warpspec.latent.indexer.sm90.query import (
    allocate_table,
    begin_loads,
    in_registers,
    score_copied,
    score_tiles,
    scorer,
)
from warpspec.latent.indexer.sm90.ring import Ring, allocate_ring


class Scores(ScoresHost):
    """The kernel of one ``ScoresConfig``."""

    @cute.kernel
    def kernel(self, operands):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        if cutlass.const_expr(config.dependent):
            cute.arch.griddepcontrol_wait()  # wait for the previous launch's results; nothing is read before
            cute.arch.griddepcontrol_launch_dependents()  # let the next launch start; it waits likewise
        if cutlass.const_expr(config.balanced):
            table, ones = allocate_table(config, smem, thread)
            score_shares(config, operands, smem, table, ones)
        else:
            score_splits(config, operands, smem)


@cute.jit
def score_splits(config: cutlass.Constexpr, operands, smem: cutlass.Constexpr):
    """Compute a CTA's scores: every ``splits``-th tile of a query."""
    inputs, splits = operands.inputs, operands.splits
    thread, _, _ = cute.arch.thread_idx()
    split, token, _ = cute.arch.block_idx()
    row = operands.logits[token, None]
    asked = load_asked(config, *inputs.of_query(token), thread)
    if cutlass.const_expr(config.early):
        entries = entries_of(config, inputs, token)
        score_seen(config, smem, asked, entries, row, split, splits, thread)
    else:  # tiles without keys, too: a different loop end would need registers that are not there
        query = scorer(config, smem, asked, thread)
        entries = entries_of(config, inputs, token)
        score_split(query, entries, row, split, splits)


@cute.jit
def score_seen(
    config: cutlass.Constexpr, smem: cutlass.Constexpr, asked, entries, row, split, splits, thread
):
    """Score every ``splits``-th tile that has keys, and write -inf to as large a share of what lies after them.

    The first keys are requested before the query is prepared.
    """
    tiles = cute.ceil_div(cutlass.min(entries.length, row.shape[0]), TILE_KEYS)
    seen = cutlass.min(tiles * TILE_KEYS, row.shape[0])
    first = split * config.warpgroups + thread // WARPGROUP_THREADS
    step = splits * config.warpgroups
    if cutlass.const_expr(config.copied):
        ring = Ring.of(config, allocate_ring(config, smem), entries, thread, first, step)
        begun = ring.begin(ring.first_pages())
        query = scorer(config, smem, asked, thread)
        score_copied(query, ring, begun, tiles, LogitsRow(in_registers(row), seen))
    else:
        loads = begin_loads(config, thread, entries, first, step)
        query = scorer(config, smem, asked, thread)
        score_tiles(query, entries, first, tiles, step, LogitsRow(row, seen), loads)
    begin, lap = seen + split * config.threads + thread, splits * config.threads
    for column in cutlass.range(begin, row.shape[0], lap, unroll=1):
        row[column] = -Float32.inf


def host_and_arguments(config: ScoresConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return scores_arguments(Scores, config)
