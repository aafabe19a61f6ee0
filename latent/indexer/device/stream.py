"""Score and select in one launch: a CTA a query, whose logits are only in shared memory, a chunk at a time.

It uses the architecture's scores kernel and ``choose``, so the slots are those of the two launches one after the other.
Meant for prefill, where logits would take gigabytes.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32

from warpspec.common.device.host import host_function
from warpspec.common.operands import fakes
from warpspec.latent.indexer.config import StreamConfig
from warpspec.latent.indexer.device.choose import NOTHING, begin, choose, key_of, larger, meet
from warpspec.latent.indexer.device.select import finish
from warpspec.latent.indexer.operands import StreamOperands


class ChunkKeys(NamedTuple):
    """Destination of scores, as ``scores_host.LogitsRow``: the keys of a chunk that begins at ``first``. limit: end of
    its last tile."""

    keys: cute.Tensor
    first: Int32
    limit: Int32

    def put(self, index, value) -> None:
        self.keys[index - self.first] = key_of(value)


class StreamHost:
    """``Stream(config)(...)`` is the host function; an architecture's class adds ``kernel``."""

    def __init__(self, config: StreamConfig):
        self.config = config

    @host_function(StreamOperands)
    def __call__(self, operands: StreamOperands, stream: CUstream):
        """Launch the kernel."""
        self.kernel(operands).launch(
            grid=(operands.inputs.queries.shape[0], 1, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )


@cute.jit
def select_entries(
    config: cutlass.Constexpr,
    query: cutlass.Constexpr,
    shared,
    entries,
    operands,
    token,
):
    """A thread that scores and selects: all chunks of a query's entries, then the slots.

    query: the architecture's scorer (``scores_host.score_split``), whose groups are all threads that select. shared:
    ``choose.SelectStorage``.
    """
    select = config.select
    thread, _, _ = cute.arch.thread_idx()
    k = Int32(operands.slots.shape[1])
    kept, turn, step = Int32(0), Int32(0), Int32(0)
    begin(select, shared)
    for chunk in cutlass.range(cute.ceil_div(entries.length, select.chunk), unroll=1):
        first = chunk * select.chunk
        count = cutlass.min(entries.length - first, select.chunk)
        tile, tiles = first // query.tile_keys, cute.ceil_div(count, query.tile_keys)
        sink = ChunkKeys(shared.keys, first, first + tiles * query.tile_keys)
        query.score(entries, tile + query.group, tile + tiles, Int32(query.groups), sink)
        for i in cutlass.range(tiles * query.tile_keys + thread, select.chunk, select.threads, unroll=1):
            shared.keys[i] = Uint32(NOTHING)
        meet(select)
        maxima = cute.make_rmem_tensor(select.groups + select.kept, Uint32)
        largest_of_groups(select, shared, maxima)
        kept, turn, step = choose(select, shared, maxima, first, kept, turn, step, k)
    size = Int32(config.scores.page_size)
    result = operands.slots[token, None]
    finish(select, shared, operands.inputs, result, operands.counts, size, token, kept, turn, k)


@cute.jit
def largest_of_groups(config: cutlass.Constexpr, shared, maxima: cute.Tensor):
    """Fill maxima as ``select.load_keys`` does, from keys that are in shared memory already."""
    thread, _, _ = cute.arch.thread_idx()
    for group in cutlass.range_constexpr(config.groups):
        largest = Uint32(NOTHING)
        for i in cutlass.range_constexpr(config.group):
            key = shared.keys[(group * config.group + i) * config.threads + thread]
            largest = larger(largest, key)
        maxima[group] = largest


def stream_arguments(host: type, config: StreamConfig) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    return (host(config), *fakes(StreamOperands, config))
