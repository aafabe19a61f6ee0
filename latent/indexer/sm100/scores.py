"""Scores of index keys on sm_100a: products by tcgen05 (``mma``), then a weighted sum of ReLUs over the heads.

Load warps (``load``) bring keys and queries unchanged from their pools to the tensor core. A thread that scores has one
key of a tile. It adds up the heads in the order of sm_90a's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.device import tmem
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.common.memory import tmem_allocation
from warpspec.latent.indexer.device.entries import entries_of, find_page, load_global, locate
from warpspec.latent.indexer.device.scores_host import (
    ScoresHost,
    WarpgroupScorer,
    score_split,
    scores_arguments,
)
from warpspec.latent.indexer.sm100.config import ATOM_BYTES, SCORE_BARRIER, Sm100ScoresConfig
from warpspec.latent.indexer.sm100.load import ScoresStorage, ScoresWork, load_tiles, stage_query
from warpspec.latent.indexer.sm100.mma import multiply_tiles

READ_COLUMNS = 16  # columns of an accumulator read at a time
MEMBERS, PAIR = 4, 2  # partial sums over heads, each of two of every eight heads


@dataclass(frozen=True)
class Scorer(WarpgroupScorer):
    """State of a thread that scores; see ``scores_host.score_split``.

    columns: tensor memory. weights: fp32 (HEAD). work: the CTA's tiles.
    """

    config: Sm100ScoresConfig
    channels: dict
    columns: cute.Pointer
    weights: cute.Tensor
    work: ScoresWork
    thread: Int32

    def score(self, entries, first, end, step, sink) -> None:
        score_tiles(self, entries, first, end, step, sink)


@cute.jit
def score_tiles(query: cutlass.Constexpr, entries, first, end, step, sink):
    """A thread that scores: its key of tiles first, first + step, ... below ``end``, to ``sink``.

    query: ``Scorer``. ``step`` is the step of its work times the number of groups. Consumes sum_full; produces
    sum_empty.
    """
    config, channels = query.config, query.channels
    own = query.thread % WARPGROUP_THREADS
    use = (first - query.work.first) // query.work.step
    page = find_page(config, entries, first * config.tile_keys + own)
    for tile in cutlass.range(first, end, step, unroll=1):
        index = tile * config.tile_keys + own
        address, scale = locate(config, entries, index, page)
        page = find_page(config, entries, index + step * config.tile_keys)
        factor = Float32(1.0)
        if cutlass.const_expr(not config.scaled):
            factor = load_global(scale, Int32(address != 0), 1)[0].bitcast(Float32)
        channels["sum_full"].wait(use)
        tmem.fence_after_wait()
        sums = weighted_sums(config, query, use % config.accumulators, own)
        tmem.fence_before_arrive()
        channels["sum_empty"].arrive(use)
        total = (sums[0] + sums[1]) + (sums[2] + sums[3])
        if cutlass.const_expr(not config.scaled):
            total = total * factor
        if index < sink.limit:
            sink.put(index, Float32(cutlass.select_(Boolean(address != 0), total, -Float32.inf)))
        use += config.warpgroups


def weighted_sums(config: Sm100ScoresConfig, query: Scorer, accumulator, own) -> list:
    """fp32 [MEMBERS]: sums over heads of weight * ReLU(product), for the thread's row of an accumulator.

    Computed as half of weight * x + weight * |x|, like in sm_90a's kernel.
    """
    plain, magnitudes = [Float32(0.0)] * MEMBERS, [Float32(0.0)] * MEMBERS
    for first in range(0, config.columns, READ_COLUMNS):
        read = cute.make_rmem_tensor(READ_COLUMNS, Float32)
        tmem.load_row(query.columns + (accumulator * config.columns + first), read, own)
        weight = cute.make_rmem_tensor(READ_COLUMNS, Float32)
        source = cute.local_tile(query.weights, (READ_COLUMNS,), (first // READ_COLUMNS,))
        cute.autovec_copy(source, weight)
        tmem.wait_loads()
        for i in range(min(READ_COLUMNS, config.heads - first)):
            member = (first + i) // PAIR % MEMBERS
            plain[member] = plain[member] + weight[i] * read[i]
            magnitudes[member] = magnitudes[member] + weight[i] * cute.math.absf(read[i])
    return [0.5 * (one + other) for one, other in zip(plain, magnitudes, strict=True)]


@cute.jit
def prepare(config: cutlass.Constexpr, query, weights, thread, warp) -> tuple:
    """(channels, ``ScoresStorage``, tensor memory): initialise barriers, allocate tensor memory, copy the query to
    shared memory.

    Executed by all threads; ends with a barrier.
    """
    storage = allocate(config.smem_regions)
    channels = init_barriers(config.barriers, storage.barriers.data_ptr())
    tmem.allocate(warp, tmem_allocation(config.tmem_columns), storage.tmem_address.data_ptr())
    key_scales, query_scales = None, None
    if cutlass.const_expr(config.scaled):
        key_scales = storage.scales.data_ptr()
        query_scales = key_scales + config.stages * ATOM_BYTES
    shared = ScoresStorage(
        storage.keys.data_ptr(),
        storage.query.data_ptr(),
        key_scales,
        query_scales,
        storage.weights.get_tensor(cute.make_layout(config.columns)),
    )
    stage_query(config, shared, query, weights, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    return channels, shared, tmem.base(storage.tmem_address.data_ptr())


def scorer(
    config: Sm100ScoresConfig, channels, shared: ScoresStorage, columns, work: ScoresWork, thread
) -> Scorer:
    """The state of a thread that scores."""
    weights = shared.weights
    if config.weights_in_registers:
        weights = cute.make_rmem_tensor(config.columns, Float32)
        cute.autovec_copy(shared.weights, weights)
    return Scorer(config, channels, columns, weights, work, thread)


@cute.jit
def release(config: cutlass.Constexpr, columns, warp):
    """Free tensor memory once all threads that score have read theirs; they wait here."""
    cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=config.score_threads)
    tmem.free(warp, columns, tmem_allocation(config.tmem_columns))


class Scores(ScoresHost):
    """The kernel of one ``Sm100ScoresConfig``."""

    @cute.kernel
    def kernel(self, operands):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        split, token, _ = cute.arch.block_idx()
        logits, splits = operands.logits, operands.splits
        channels, shared, columns = prepare(config, *operands.inputs.of_query(token), thread, warp)
        entries = entries_of(config, operands.inputs, token)
        work = ScoresWork(split, cute.ceil_div(logits.shape[1], config.tile_keys), splits)
        if warp == config.mma_warp:
            multiply_tiles(config, channels, shared, columns, work)
        elif warp >= config.first_loader:
            load_tiles(config, channels, shared, entries, work, warp - config.first_loader)
        else:
            query = scorer(config, channels, shared, columns, work, thread)
            score_split(query, entries, logits[token, None], split, splits)
            release(config, columns, warp)


def host_and_arguments(config: Sm100ScoresConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return scores_arguments(Scores, config)
