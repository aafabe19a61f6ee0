"""Score and select in one launch on sm_90a: all warps score, then all select."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from warpspec.latent.indexer.config import StreamConfig
from warpspec.latent.indexer.device.choose import allocate
from warpspec.latent.indexer.device.entries import entries_of
from warpspec.latent.indexer.device.stream import StreamHost, select_entries, stream_arguments
from warpspec.latent.indexer.sm90.keys import load_asked
from warpspec.latent.indexer.sm90.query import scorer


class Stream(StreamHost):
    """The kernel of one ``StreamConfig``."""

    @cute.kernel
    def kernel(self, operands):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        shared = allocate(config.select)
        smem = cutlass.memory.SmemAllocator()
        asked = load_asked(config.scores, *operands.inputs.of_query(token), thread)
        query = scorer(config.scores, smem, asked, thread)
        entries = entries_of(config.scores, operands.inputs, token)
        select_entries(config, query, shared, entries, operands, token)


def host_and_arguments(config: StreamConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return stream_arguments(Stream, config)
