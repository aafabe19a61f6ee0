"""Clear rows in shared memory that nobody sees: 0 times a NaN stored there would reach the other rows.

work: a thread's state, with config, shared, tile, and for threads that clear together ``threads``, ``index`` and
``fence``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.device import tma
from warpspec.common.hardware import VECTOR_BYTES, WORD_BYTES

ROW_VECTORS = tma.ROW_BYTES // VECTOR_BYTES


@cute.jit
def clear_unseen_keys(work):
    """Clear rows of K (for dQ) and of V whose key no query sees. If there are such keys, K and V must be loaded."""
    config, tile = work.config, work.tile
    if cutlass.const_expr(config.scatters):
        first, end = tile.seen_first - tile.first_key, tile.seen_end - tile.first_key
        if tile.has_unseen_keys:
            clear_rows(work, "k", work.shared.k, first, end)
            clear_rows(work, "v", work.shared.v, first, end)
            work.fence()


@cute.jit
def clear_unseen_rows(work, query_tile, step):
    """Clear rows of Q and dO that see no key or belong to another request, for dK and dV. Q must be loaded."""
    config, tile = work.config, work.tile
    if cutlass.const_expr(config.scatters):  # noqa: SIM102
        if tile.has_unseen_rows(query_tile):
            clear_queries(work, query_tile, step)
            work.fence()


@cute.jit
def clear_queries(work, query_tile, step):
    """``clear_unseen_rows`` of a tile that has such rows, without making them visible to products."""
    config, tile = work.config, work.tile
    work.channels["do_full"].wait(step)
    first = query_tile * config.tile_m
    rows_first, rows_end = tile.rows_first - first, tile.rows_end - first
    for name, stages in (("q", config.q_stages), ("do", config.do_stages)):
        stage = getattr(work.shared, name) + step % stages * config.tile_bytes(name)
        clear_rows(work, name, stage, rows_first, rows_end)


@cute.jit
def clear_rows(work, name: cutlass.Constexpr, base, first, end):
    """Clear rows of a tile of "q", "k", "v" or "do" outside [first, end). Blocks of 64 columns lie one after another,
    128 bytes a row."""
    rows = work.config.tile_n if cutlass.const_expr(name in ("k", "v")) else work.config.tile_m
    if cutlass.const_expr(work.config.clears_in_two_loops):
        clear_in_two_loops(work, name, base, first, end, rows)
        return
    vectors = work.config.tile_bytes(name) // VECTOR_BYTES
    for i in cutlass.range(work.index, vectors, work.threads, unroll=1):
        row = i // (tma.ROW_BYTES // VECTOR_BYTES) % rows
        if Boolean(row < first) | Boolean(row >= end):
            clear_vector(base.toint() + i * VECTOR_BYTES)


@cute.jit
def clear_in_two_loops(work, name: cutlass.Constexpr, base, first, end, rows: cutlass.Constexpr):
    """``clear_rows`` by a loop over the rows before ``first``, and one over those from ``end`` on."""
    own = work.index // ROW_VECTORS
    each = work.threads // ROW_VECTORS  # rows that all threads clear at a time
    before = cutlass.min(cutlass.max(first, 0), rows)
    column = base.toint() + work.index % ROW_VECTORS * VECTOR_BYTES
    spans = work.config.tile_bytes(name) // (rows * tma.ROW_BYTES)
    for begin, stop in ((Int32(0), before), (cutlass.max(end, before), Int32(rows))):
        for row in cutlass.range(begin + own, stop, each, unroll=1):
            for span in range(spans):
                clear_vector(column + row * tma.ROW_BYTES + span * rows * tma.ROW_BYTES)


def clear_vector(address) -> None:
    """Clear 16 bytes."""
    zeros = cute.make_rmem_tensor(VECTOR_BYTES // WORD_BYTES, Int32)
    zeros.fill(0)
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    cute.autovec_copy(zeros, cute.make_tensor(pointer, zeros.layout))
