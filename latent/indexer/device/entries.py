"""A query's index keys in their pool: which ones exist, where they are, and loads that skip missing ones."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common.device.words import load_present
from warpspec.common.hardware import WORD_BYTES
from warpspec.latent.cache.pools import NO_PAGE


class Entries(NamedTuple):
    """Keys of one query.

    pool: [pages, words]. pages: its request's row of the page table. length: how many keys count.
    """

    pool: cute.Tensor
    pages: cute.Tensor
    length: Int32


def request_of(config, inputs, token) -> tuple:
    """(row of the page table, length) of a query. The length is clamped to what the table holds, and 0 for a request
    out of range."""
    page_table, request = inputs.page_table, Int32(inputs.requests[token])
    known = Boolean(request >= 0) & Boolean(request < page_table.shape[0])
    length = cutlass.max(cutlass.min(Int32(inputs.lengths[token]), page_table.shape[1] * config.page_size), 0)
    length = Int32(cutlass.select_(known, length, Int32(0)))
    return Int32(cutlass.select_(known, request, Int32(0))), length


def entries_of(config, inputs, token) -> Entries:
    """The entries that a query sees. inputs: ``operands.ScoreInputs``."""
    request, length = request_of(config, inputs, token)
    return Entries(inputs.pool, inputs.page_table[request, None], length)


@cute.jit
def find_page(config: cutlass.Constexpr, entries, index) -> Int32:
    """The page of the index-th entry, or -1. Call it ahead of the entry's own load, which needs the page."""
    page = Int32(NO_PAGE)
    if index < entries.length:
        page = Int32(entries.pages[divided(index, config.page_size)[0]])
    return page


@cute.jit
def locate(config: cutlass.Constexpr, entries, index, page) -> tuple:
    """(address of the index-th entry, address of its scales); both 0 if it does not exist. page: from ``find_page``."""
    fmt, pool = config.fmt, entries.pool
    row, scales = Int64(0), Int64(0)
    if (page >= 0) & (page < pool.shape[0]):
        within = divided(index, config.page_size)[1]
        start = pool.iterator.toint() + Int64(page) * Int64(pool.stride[0] * WORD_BYTES)
        row = start + Int64(within * fmt.data_bytes)
        scales = start + Int64(config.page_size * fmt.data_bytes + within * fmt.scale_bytes)
    return row, scales


def divided(index: Int32, size: int) -> tuple:
    """(index // size, index % size) of a non-negative index."""
    if size & (size - 1) == 0:
        return index >> (size.bit_length() - 1), index & (size - 1)
    quotient = Int32(Uint32(index) // size)
    return quotient, index - quotient * size


def load_global(address: Int64, present: Int32, count: int) -> list:
    """Load ``count`` words at address, which are read once; zeros if not present."""
    return load_present(address, present, count, cached=".nc.L1::no_allocate")
