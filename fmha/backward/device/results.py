"""Make dQ from its fp32 sums, and dK and dV from the sums that pieces of cut key tiles left. For every architecture.

The kernel adds the sums in the order of the pieces, scales and rounds them, and writes them in the layout of q or k. It
reads them in the order of wgmma's registers (``features``): a warp takes 16 rows and 64 columns, a CTA some parts of a
tile of one head. The first CTAs make dQ, the next dK, the last dV. It is a programmatic dependent launch after the main
kernel.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32

from warpspec.common.device.host import host_function
from warpspec.common.device.wgmma import QUAD, ROW_DISTANCE, THREAD_ROWS, WARP_ROWS, store_row
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward.device.rows import place_of
from warpspec.fmha.backward.features import (
    PART_ELEMENTS,
    PART_ROWS,
    THREAD_ELEMENTS,
    WARP_ELEMENTS,
    WARPS,
)
from warpspec.fmha.backward.operands import ResultOperands
from warpspec.fmha.heads import BLOCK

VECTOR = 4  # fp32 numbers of a 16-byte load
LOADS = 2  # pieces whose loads are in flight together; four run out of registers
CTA_PARTS = 2  # parts of a tile that a CTA has
THREADS = CTA_PARTS * WARPS * WARP_THREADS


class GradientResults:
    """The kernel of one ``rows.ResultConfig``."""

    def __init__(self, config):
        self.config = config

    @host_function(ResultOperands)
    def __call__(self, operands: ResultOperands, stream: CUstream):
        config = self.config
        gradients = [
            each
            for each in (
                (operands.dq_sums, None, operands.dq, config.tile_m, operands.cu_seqlens_q, operands.scale),
                (
                    operands.dk_sums,
                    operands.dv_sums if cutlass.const_expr(config.joins) else None,
                    operands.dk,
                    config.tile_n,
                    operands.cu_seqlens_k,
                    operands.scale,
                ),
                (operands.dv_sums, None, operands.dv, config.tile_n, operands.cu_seqlens_k, Float32(1.0)),
            )
            if each[2] is not None
        ]
        ctas = 0
        for sums, _, _, rows, _, _ in gradients:
            ctas += (
                sums.shape[0]
                * tiles_of(sums, operands.tile_pieces)
                * (rows * config.heads.qk // (CTA_PARTS * PART_ELEMENTS))
            )
        self.kernel(gradients, operands.tile_pieces).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(self, gradients, tile_pieces):
        config = self.config
        index, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        begin = 0
        for number in cutlass.range_constexpr(len(gradients)):
            sums, more, target, rows, cu_seqlens, factor = gradients[number]
            shares = rows * config.heads.qk // (CTA_PARTS * PART_ELEMENTS)  # CTAs of a tile
            tile_count, own = tiles_of(sums, tile_pieces), index - begin
            end = begin + sums.shape[0] * tile_count * shares
            if (index >= begin) & (index < end):
                head, tile_index, share = (
                    own // (tile_count * shares),
                    own // shares % tile_count,
                    own % shares,
                )
                batch, tile, first, length = place_of(config.packed, rows, cu_seqlens, target, tile_index)
                place = (batch, tile * rows, first, length)
                both = tuple(tile_of(each, tile_pieces, head, tile_index) for each in (sums, more))
                if (
                    cutlass.const_expr(cute.rank(sums) == 3 or tile_pieces is None)
                    or tile_pieces[tile_index, 1] > 1
                ):
                    write_tile(config, both, place, target, head, share, factor)
            begin = end


def tiles_of(sums: cute.Tensor, tile_pieces: cute.Tensor | None):
    """Number of tiles of a head, in dQ's sums or in the pieces'."""
    return sums.shape[1] if cute.rank(sums) == 3 or tile_pieces is None else tile_pieces.shape[0]


def tile_of(sums: cute.Tensor | None, tile_pieces: cute.Tensor | None, head, tile_index) -> tuple | None:
    """(sums, pieces) of a tile of one head; the sums are (ELEMENT), or (PIECE, ELEMENT) of so many pieces."""
    if sums is None:
        return None
    if cute.rank(sums) == 3:
        return sums[head, tile_index, None], 1
    if tile_pieces is None:
        return sums[head, tile_index, None, None], sums.shape[2]
    return cute.domain_offset((tile_pieces[tile_index, 0], 0), sums[head, None, 0, None]), tile_pieces[
        tile_index, 1
    ]


@cute.jit
def write_tile(
    config: cutlass.Constexpr,
    both: cutlass.Constexpr,
    place: cutlass.Constexpr,
    target: cute.Tensor,
    head,
    share,
    scale,
):
    """Write the sums of a tile, times the scale and rounded, to its rows of ``target`` [B, S, H, D]. A thread writes
    the rows and columns of its wgmma fragment.

    both: sums (see ``tile_of``) to add up in order, and sums to add without the scale, or None.
    place: (batch row, first row of the tile, first row of the request, rows of the request), from ``rows.place_of``.
    share: which CTA_PARTS of the tile's parts this CTA writes.
    """
    batch, tile_first, first, rows = place
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = share * (CTA_PARTS * WARPS) + thread // WARP_THREADS, thread % WARP_THREADS
    part, piece = warp // WARPS, warp % WARPS
    values = cute.make_rmem_tensor(THREAD_ELEMENTS, Float32)
    add_up(*both[0], warp, lane, values)
    for i in cutlass.range_constexpr(THREAD_ELEMENTS):
        values[i] = values[i] * scale
    if cutlass.const_expr(both[1] is not None):
        unscaled = cute.make_rmem_tensor(THREAD_ELEMENTS, Float32)
        add_up(*both[1], warp, lane, unscaled)
        for i in cutlass.range_constexpr(THREAD_ELEMENTS):
            values[i] = values[i] + unscaled[i]
    columns = config.heads.qk // BLOCK
    row_block, column_block = part // columns, part % columns
    own_first = tile_first + row_block * PART_ROWS + piece * WARP_ROWS + lane // QUAD
    for r in cutlass.range_constexpr(THREAD_ROWS):
        own = own_first + r * ROW_DISTANCE
        in_range = Boolean(own < rows)
        row = first + cutlass.max(cutlass.min(own, rows - 1), 0)
        row = cutlass.min(row, target.shape[1] - 1)
        line = cute.local_tile(target[batch, row, head, None], (BLOCK,), (column_block,))
        store_row(values, r, lane % QUAD, line, in_range)


@cute.jit
def add_up(sums: cute.Tensor, pieces, warp, lane, values: cute.Tensor):
    """Add a thread's elements of all pieces."""
    if cutlass.const_expr(cute.rank(sums) == 1):
        read(sums, warp, lane, values)
    else:
        read(sums[0, None], warp, lane, values)
        for other in cutlass.range(1, pieces, unroll=LOADS):
            more = cute.make_rmem_tensor(THREAD_ELEMENTS, Float32)
            read(sums[other, None], warp, lane, more)
            for i in cutlass.range_constexpr(THREAD_ELEMENTS):
                values[i] = values[i] + more[i]


def read(sums: cute.Tensor, warp, lane, values: cute.Tensor) -> None:
    """Read a thread's elements of a tile's sums."""
    own = cute.local_tile(sums, (WARP_ELEMENTS,), (warp,))
    for i in range(THREAD_ELEMENTS // VECTOR):
        source = cute.local_tile(own, (VECTOR,), (i * WARP_THREADS + lane,))
        cute.autovec_copy(source, cute.local_tile(values, (VECTOR,), (i,)))
