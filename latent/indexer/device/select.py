"""Select: the k largest logits of a row, as slots in order of index; ties go to the lower index. One CTA a row.

The row passes through shared memory in chunks; the best keys so far are kept from chunk to chunk (``choose``). Where a
row has several CTAs, each writes the largest of its split, and a second launch selects from those.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint32

from warpspec.common.device.host import host_function
from warpspec.common.launch import Kernel
from warpspec.common.operands import fakes
from warpspec.latent.cache.pools import NO_SLOT, SLOT_LIMIT
from warpspec.latent.indexer.config import SelectConfig
from warpspec.latent.indexer.device.choose import (
    NOTHING,
    allocate,
    begin,
    choose,
    key_of,
    larger,
    value_of,
)
from warpspec.latent.indexer.operands import SelectOperands

BATCH = 8  # loads in flight together


class Select:
    """``Select(config)(...)`` is the host function."""

    def __init__(self, config: SelectConfig):
        self.config = config

    @host_function(SelectOperands)
    def __call__(self, operands: SelectOperands, stream: CUstream):
        """Launch the kernel."""
        self.kernel(operands).launch(
            grid=(operands.logits.shape[0], operands.splits, 1),
            block=(self.config.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands):
        config, logits, slots, splits = self.config, operands.logits, operands.slots, operands.splits
        token, split, _ = cute.arch.block_idx()
        shared = allocate(config)
        length = Int32(logits.shape[1])
        if cutlass.const_expr(config.lengths):
            length = cutlass.max(cutlass.min(Int32(operands.lengths[token]), length), 0)
        k = Int32(slots.shape[1])
        row, result = logits[token, None], slots[token, None]
        start = Int32(0)
        if cutlass.const_expr(config.is_split):
            k = k // splits
            size = cute.ceil_div(Int32(logits.shape[1]), splits)
            start = split * size
            length = cutlass.min(length, start + size)
        kept, turn, step = Int32(0), Int32(0), Int32(0)
        begin(config, shared)
        for chunk in cutlass.range(cute.ceil_div(cutlass.max(length - start, 0), config.chunk), unroll=1):
            first = start + chunk * config.chunk
            maxima = cute.make_rmem_tensor(config.groups + config.kept, Uint32)
            load_keys(config, shared, row, first, cutlass.min(length - first, config.chunk), maxima)
            kept, turn, step = choose(config, shared, maxima, first, kept, turn, step, k)
        if cutlass.const_expr(config.is_split):
            finish_split(config, shared, result, operands.values[token, None], split * k, kept, turn, k)
        else:
            if cutlass.const_expr(config.mapped):
                map_back(config, shared, operands.indices[token, None], kept, turn)
            finish(
                config, shared, operands, result, operands.counts, operands.page_size, token, kept, turn, k
            )


@cute.jit
def load_keys(config: cutlass.Constexpr, shared, row, first, count, maxima: cute.Tensor):
    """Load the chunk's logits as keys, and keep the largest key of every ``group`` of a thread in maxima."""
    thread, _, _ = cute.arch.thread_idx()
    for batch in cutlass.range_constexpr(config.per_thread // BATCH):
        largest = Uint32(NOTHING)
        if batch * BATCH * config.threads < count:
            values = cute.make_rmem_tensor(BATCH, Float32)
            for i in cutlass.range_constexpr(BATCH):
                at = (batch * BATCH + i) * config.threads + thread
                values[i] = -Float32.inf
                if at < count:
                    values[i] = row[first + at].to(Float32)
            for i in cutlass.range_constexpr(BATCH):
                key = key_of(values[i])
                shared.keys[(batch * BATCH + i) * config.threads + thread] = key
                largest = larger(largest, key)
        else:
            for i in cutlass.range_constexpr(BATCH):
                shared.keys[(batch * BATCH + i) * config.threads + thread] = Uint32(NOTHING)
        maxima[batch] = largest


@cute.jit
def finish(config: cutlass.Constexpr, shared, inputs, result, counts, page_size, token, kept, turn, k):
    """Write what is kept as slots, followed by NO_SLOT. inputs: have page_table and requests."""
    page_table = inputs.page_table
    thread, _, _ = cute.arch.thread_idx()
    pages = (SLOT_LIMIT - 1) // page_size  # pages that have slots
    for at in cutlass.range(thread, k, config.threads, unroll=1):
        slot = Int32(NO_SLOT)
        if at < kept:
            slot = shared.kept[at, turn]
            if cutlass.const_expr(config.table):
                request = Int32(inputs.requests[token])
                page, within = slot // page_size, slot % page_size
                slot = Int32(NO_SLOT)
                if (request >= 0) & (request < page_table.shape[0]) & (page < page_table.shape[1]):
                    number = Int32(page_table[request, page])
                    if (number >= 0) & (number < pages):
                        slot = number * page_size + within
        result[at] = slot
    if thread == 0:
        counts[token] = kept


@cute.jit
def finish_split(config: cutlass.Constexpr, shared, result, values, first, kept, turn, k):
    """Write the indices and logits kept of a split, from ``first`` on, followed by NO_SLOT and -inf."""
    thread, _, _ = cute.arch.thread_idx()
    for at in cutlass.range(thread, k, config.threads, unroll=1):
        index, value = Int32(NO_SLOT), -Float32.inf
        if at < kept:
            index, value = shared.kept[at, turn], value_of(shared.kept_keys[at, turn])
        result[first + at], values[first + at] = index, value


@cute.jit
def map_back(config: cutlass.Constexpr, shared, indices, kept, turn):
    """Replace each kept index by what ``indices`` (N) holds there. The thread that reads an entry replaces it."""
    thread, _, _ = cute.arch.thread_idx()
    for at in cutlass.range(thread, kept, config.threads, unroll=1):
        shared.kept[at, turn] = Int32(indices[shared.kept[at, turn]])


def host_and_arguments(config: SelectConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return (Select(config), *fakes(SelectOperands, config))


SELECT = Kernel("indexer.select", host_and_arguments)  # by SelectConfig
