"""Score and select in one launch on sm_100a.

While the threads that score select from a chunk, the load warps and the MMA warp run ahead as far as there are
accumulators.
"""

from __future__ import annotations

from cutlass import Int32, cute

from warpspec.latent.indexer.config import StreamConfig
from warpspec.latent.indexer.device.choose import allocate
from warpspec.latent.indexer.device.entries import entries_of
from warpspec.latent.indexer.device.stream import StreamHost, select_entries, stream_arguments
from warpspec.latent.indexer.sm100.load import ScoresWork, load_tiles
from warpspec.latent.indexer.sm100.mma import multiply_tiles
from warpspec.latent.indexer.sm100.scores import prepare, release, scorer


class Stream(StreamHost):
    """The kernel of one ``StreamConfig``."""

    @cute.kernel
    def kernel(self, operands):
        config = self.config.scores
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        token, _, _ = cute.arch.block_idx()
        channels, shared, columns = prepare(config, *operands.inputs.of_query(token), thread, warp)
        chosen = allocate(self.config.select)
        entries = entries_of(config, operands.inputs, token)
        work = ScoresWork(Int32(0), cute.ceil_div(entries.length, config.tile_keys), Int32(1))
        if warp == config.mma_warp:
            multiply_tiles(config, channels, shared, columns, work)
        elif warp >= config.first_loader:
            load_tiles(config, channels, shared, entries, work, warp - config.first_loader)
        else:
            query = scorer(config, channels, shared, columns, work, thread)
            select_entries(self.config, query, chosen, entries, operands, token)
            release(config, columns, warp)


def host_and_arguments(config: StreamConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return stream_arguments(Stream, config)
