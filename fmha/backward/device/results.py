"""Make dQ from its fp32 sums, and dK and dV from the sums that pieces of cut key tiles left. For every architecture.

The kernel adds the sums in the order of the pieces, scales and rounds them, and writes them in the layout of q or k. It
reads them in the order of wgmma's registers (``features``): a warp takes 16 rows and up to 64 columns, a CTA some
subtiles of a tile of one head. The first CTAs make dQ, the next dK, the last dV. A warp takes fewer columns of dK and
dV: few CTAs then have many pieces to read, and each thread has loads of more pieces in flight.

It is a programmatic dependent launch after the main kernel.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.common.device.wgmma import QUAD, ROW_DISTANCE, THREAD_ROWS, WARP_ROWS, store_row
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward.device.host import batched
from warpspec.fmha.backward.device.rows import place_of
from warpspec.fmha.backward.device.runs import pieces_of
from warpspec.fmha.backward.features import (
    SUBTILE_ROWS,
    THREAD_ELEMENTS,
    WARPS,
)
from warpspec.fmha.backward.operands import ResultOperands
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT
from warpspec.fmha.device.packed import query_tiles, request_of
from warpspec.fmha.heads import BLOCK, STEP

VECTOR = 4  # fp32 numbers of a 16-byte load
VECTORS = THREAD_ELEMENTS // VECTOR  # vectors of a thread in a warp's share of a subtile
KEY_VECTORS = 2  # vectors of a thread of dK and dV
LOADS = 6  # pieces whose loads are in flight together
THREADS = 2 * WARPS * WARP_THREADS
MOST_CTAS = 2048  # where most shares of dK and dV have nothing to do


class GradientResults:
    """The kernel of one ``rows.ResultConfig``."""

    def __init__(self, config):
        self.config = config

    @host_function(ResultOperands)
    def __call__(self, operands: ResultOperands, stream: CUstream):
        config, operands = self.config, batched(self.config, operands)
        whole = config.tile_m * config.heads.qk % (THREADS * THREAD_ELEMENTS) == 0
        dq, keys = (config.tile_m, VECTORS if whole else VECTORS // 2), (config.tile_n, KEY_VECTORS)
        dk_sums, dv_sums = operands.dk_sums, operands.dv_sums
        if cutlass.const_expr(config.added):
            dk_sums, dv_sums = (each and each[None, None, 0, None] for each in (dk_sums, dv_sums))
        more = dv_sums if cutlass.const_expr(config.joins) else None
        found = (
            (dq, operands.dq_sums, None, operands.dq, operands.cu_seqlens_q, operands.scale),
            (keys, dk_sums, more, operands.dk, operands.cu_seqlens_k, operands.scale),
            (keys, dv_sums, None, operands.dv, operands.cu_seqlens_k, Float32(1.0)),
        )
        gradients = [rest for _, *rest in found if rest[2] is not None]
        sizes = [size for size, *rest in found if rest[2] is not None]
        tables, count = (operands.tile_order, operands.tile_pieces), 0
        for size, gradient in zip(sizes, gradients, strict=True):
            count += (
                tiles_of(config, gradient, size, tables) * gradient[2].shape[2] * shares_of(config, *size)
            )
        ctas = cutlass.min(count, MOST_CTAS) if config.by_length else count
        self.kernel(gradients, sizes, tables, operands.whole, count).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, gradients, sizes: cutlass.Constexpr, tables, whole, count):
        first, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        for index in cutlass.range(first, count, ctas, unroll=1):
            begin = 0
            for number in cutlass.range_constexpr(len(gradients)):
                shares, heads = shares_of(self.config, *sizes[number]), gradients[number][2].shape[2]
                tiles = heads * tiles_of(self.config, gradients[number], sizes[number], tables)
                end = begin + tiles * shares
                if (index >= begin) & (index < end):
                    cut = (*tables, whole)
                    write_share(self.config, gradients[number], sizes[number], cut, index - begin)
                begin = end


def shares_of(config, rows: int, vectors: int) -> int:
    """Number of CTAs for a tile of this many rows, where a thread has this many vectors."""
    return rows * config.heads.qk // (THREADS * vectors * VECTOR)


@cute.jit
def write_share(
    config: cutlass.Constexpr,
    gradient: cutlass.Constexpr,
    size: cutlass.Constexpr,
    cut: cutlass.Constexpr,
    index,
):
    """Write the index-th share of a gradient. size: (rows of a tile, vectors of a thread). cut: (tile_order,
    tile_pieces, rows that are not cut)."""
    sums, more, target, cu_seqlens, factor = gradient
    tile_order, tile_pieces, whole = cut
    places = Int32(0)  # of each head that is cut
    if cutlass.const_expr(config.last_rows and tile_pieces is not None):
        places, whole = (tile_order[tile_order.shape[0] - 1, i] for i in range(2))
    rows, vectors = size
    shares, tile_count = shares_of(config, rows, vectors), tiles_of(config, gradient, size, cut)
    head, tile_index = index // (tile_count * shares), index // shares % tile_count
    batch, tile, first, length = place_of(config.packed, rows, cu_seqlens, target, tile_index)
    place = (batch, tile * rows, first, length)
    thread, _, _ = cute.arch.thread_idx()
    own = index % shares * (THREADS // WARP_THREADS) + thread // WARP_THREADS
    if cutlass.const_expr(cute.rank(sums) == 3 or tile_pieces is None):
        both = tuple(tile_of(each, head, tile_index) for each in (sums, more))
        write_tile(config, both, place, target, head, own, vectors, factor)
    elif Boolean(batch * target.shape[2] + head >= whole) & Boolean(place[1] < length):
        if cutlass.const_expr(config.by_request):
            request, _ = request_of(cu_seqlens, tile_index, rows, target.shape[1])
            first, pieces = pieces_of(
                tile_order, tile_pieces, request, head * ((length + rows - 1) // rows) + tile
            )
        else:
            first, pieces = tile_pieces[tile_index, 0], tile_pieces[tile_index, 1]
            if cutlass.const_expr(config.last_rows):
                first += (head - whole) * places
        if pieces > 1:
            own_head = 0 if cutlass.const_expr(config.by_request or config.last_rows) else head
            both = tuple(pieces_at(each, own_head, first, pieces) for each in (sums, more))
            write_tile(config, both, place, target, head, own, vectors, factor)


def tiles_of(config, gradient: tuple, size: tuple, tables: tuple):
    """Number of tiles of a head. tables: (tile_order, tile_pieces)."""
    sums, _, target, cu_seqlens, _ = gradient
    if cute.rank(sums) == 3 or tables[1] is None:
        return sums.shape[1]
    return (
        query_tiles(size[0], target.shape[1], cute.size(cu_seqlens) - 1)
        if config.by_request
        else tables[1].shape[0]
    )


def tile_of(sums: cute.Tensor | None, head, tile_index) -> tuple | None:
    """(sums, pieces) of a tile of one head; the sums are (ELEMENT), or (PIECE, ELEMENT) of this many pieces."""
    if sums is None:
        return None
    if cute.rank(sums) == 3:
        return sums[head, tile_index, None], 1
    return sums[head, tile_index, None, None], sums.shape[2]


def pieces_at(sums: cute.Tensor | None, head, first, pieces) -> tuple | None:
    """Like ``tile_of``, of pieces from a place on. With cu_seqlens that go down, places may not be there."""
    if sums is None:
        return None
    first = cutlass.max(cutlass.min(first, sums.shape[1] - 1), 0)
    return cute.domain_offset((first, 0), sums[head, None, 0, None]), cutlass.min(
        pieces, sums.shape[1] - first
    )


@cute.jit
def write_tile(
    config: cutlass.Constexpr,
    both: cutlass.Constexpr,
    place: cutlass.Constexpr,
    target: cute.Tensor,
    head,
    own,
    vectors: cutlass.Constexpr,
    scale,
):
    """Write the sums of a tile, times the scale and rounded, to its rows of ``target`` [B, S, H, D]. A thread writes
    the rows and columns of its wgmma fragment.

    both: sums (see ``tile_of``) to add up in order, and sums to add without the scale, or None.
    place: (batch row, first row of the tile, first row of the request, rows of the request), from ``rows.place_of``.
    own: which of the tile's warp shares this warp writes. vectors: vectors of a thread.
    """
    values = cute.make_rmem_tensor(vectors * VECTOR, Float32)
    add_shares(both, own, scale, values, end_of(config, target, own, vectors))
    store_share(config, place, target, head, own, vectors, values)


def end_of(config, target: cute.Tensor, own, vectors: int) -> Int32 | None:
    """End of the rows of ``target`` in blocks of 8 columns, counted from the first column of a warp's share; None: past
    it. A thread's n-th vector is of the n-th block."""
    if config.rows is None:
        return None
    slices = VECTORS // vectors
    first = own // slices // WARPS % (config.heads.qk // BLOCK) * slices + own % slices
    return target.shape[3] // STEP - first * (BLOCK // slices // STEP)


@cute.jit
def add_shares(both: cutlass.Constexpr, own, scale, values: cute.Tensor, end: cutlass.Constexpr):
    """Add up a warp's share of a tile. The arguments are those of ``write_tile``, and what ``end_of`` returned."""
    lane = cute.arch.lane_idx()
    add_up(*both[0], own, lane, values, end)
    for i in cutlass.range_constexpr(cute.size(values)):
        values[i] = values[i] * scale
    if cutlass.const_expr(both[1] is not None):
        unscaled = cute.make_rmem_tensor(cute.size(values), Float32)
        add_up(*both[1], own, lane, unscaled, end)
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = values[i] + unscaled[i]


@cute.jit
def store_share(
    config: cutlass.Constexpr,
    place: cutlass.Constexpr,
    target: cute.Tensor,
    head,
    own,
    vectors: cutlass.Constexpr,
    values: cute.Tensor,
):
    """Write a warp's share of a tile. The arguments are those of ``write_tile``."""
    batch, tile_first, first, rows = place
    lane, slices = cute.arch.lane_idx(), VECTORS // vectors  # slices of 64 columns
    warp, column = own // slices, own % slices
    subtile, own_warp = warp // WARPS, warp % WARPS
    columns = config.heads.qk // BLOCK
    row_block, column_block = subtile // columns, subtile % columns
    end = end_of(config, target, own, vectors)
    own_first = tile_first + row_block * SUBTILE_ROWS + own_warp * WARP_ROWS + lane // QUAD
    for r in cutlass.range_constexpr(THREAD_ROWS):
        own = own_first + r * ROW_DISTANCE
        in_range = Boolean(own < rows)
        row = first + cutlass.max(cutlass.min(own, rows - 1), 0)
        row = cutlass.min(row, target.shape[1] - 1)
        line = cute.local_tile(
            target[batch, row, head, None], (BLOCK // slices,), (column_block * slices + column,)
        )
        store_row(values, r, lane % QUAD, line, in_range, end)


@cute.jit
def add_up(sums: cute.Tensor, pieces, own, lane, values: cute.Tensor, end: cutlass.Constexpr):
    """Add a thread's elements of all pieces."""
    if cutlass.const_expr(cute.rank(sums) == 1):
        read(sums, own, lane, values, end)
    else:
        values.fill(0.0)
        for first in cutlass.range(0, pieces, LOADS, unroll=1):
            found = [cute.make_rmem_tensor(cute.size(values), Float32) for _ in range(LOADS)]
            for i in cutlass.range_constexpr(LOADS):
                read(sums[cutlass.min(first + i, pieces - 1), None], own, lane, found[i], end)
            for i in cutlass.range_constexpr(LOADS):
                if first + i < pieces:
                    for j in cutlass.range_constexpr(cute.size(values)):
                        values[j] = values[j] + found[i][j]


@cute.jit
def read(sums: cute.Tensor, own, lane, values: cute.Tensor, end: cutlass.Constexpr):
    """Read a thread's elements of a tile's sums. own: the warp's number, of as many elements each. Vectors past the
    rows' end (``end_of``) are not read: nobody has cleared them."""
    elements = cute.local_tile(sums, (cute.size(values) * WARP_THREADS,), (own,))
    if cutlass.const_expr(end is not None):
        values.fill(0.0)
    for i in cutlass.range_constexpr(cute.size(values) // VECTOR):
        source = cute.local_tile(elements, (VECTOR,), (i * WARP_THREADS + lane,))
        if cutlass.const_expr(end is None):  # noqa: SIM114
            cute.autovec_copy(source, cute.local_tile(values, (VECTOR,), (i,)))
        elif i < end:
            cute.autovec_copy(source, cute.local_tile(values, (VECTOR,), (i,)))
