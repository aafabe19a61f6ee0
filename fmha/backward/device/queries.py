"""dQ from its sums in fp32: scaled, rounded, put in the order of q. Of no architecture.

A warp has 16 rows and 64 columns (``features``), which come in the order of wgmma's registers.
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
from warpspec.fmha.backward.features import PART_ROWS, THREAD_ELEMENTS, WARP_ELEMENTS, WARPS
from warpspec.fmha.backward.operands import QueryOperands
from warpspec.fmha.features import BLOCK

VECTOR = 4  # fp32 numbers of a 16-byte load


class Queries:
    """The kernel of one ``rows.QueryConfig``."""

    def __init__(self, config):
        self.config = config

    @host_function(QueryOperands)
    def __call__(self, operands: QueryOperands, stream: CUstream):
        threads = self.config.parts * WARPS * WARP_THREADS
        grid = (operands.dq_sums.shape[1], operands.dq.shape[2], 1)
        self.kernel(operands).launch(grid=grid, block=(threads, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, operands):
        config, dq = self.config, operands.dq
        slot, head, _ = cute.arch.block_idx()
        batch, number, first, rows = place_of(config, operands.cu_seqlens_q, dq, slot)
        sums, place = operands.dq_sums[head, slot, None], (batch, number, first, rows)
        write_tile(config, sums, place, dq, head, operands.scale)


@cute.jit
def write_tile(
    config: cutlass.Constexpr, sums: cute.Tensor, place: cutlass.Constexpr, target: cute.Tensor, head, scale
):
    """Sums, times the scale, to the rows of a tile of ``target`` [B, S, H, D], rounded. A thread has rows and columns
    as of wgmma.

    sums: (ELEMENT) of the tile, or (PIECE, ELEMENT), which are added up in order. place: (batch row, tile, first row,
    rows) of the request, see ``rows.place_of``.
    """
    batch, number, first, rows = place
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    part, piece = warp // WARPS, warp % WARPS
    values = cute.make_rmem_tensor(THREAD_ELEMENTS, Float32)
    if cutlass.const_expr(cute.rank(sums) == 1):
        read(sums, warp, lane, values)
    else:
        read(sums[0, None], warp, lane, values)
        for other in cutlass.range(1, sums.shape[0], unroll=1):
            more = cute.make_rmem_tensor(THREAD_ELEMENTS, Float32)
            read(sums[other, None], warp, lane, more)
            for i in cutlass.range_constexpr(THREAD_ELEMENTS):
                values[i] = values[i] + more[i]
    for i in cutlass.range_constexpr(THREAD_ELEMENTS):
        values[i] = values[i] * scale
    columns = config.head_dim // BLOCK
    row_block, column_block = part // columns, part % columns
    own_first = number * config.tile_m + row_block * PART_ROWS + piece * WARP_ROWS + lane // QUAD
    for r in cutlass.range_constexpr(THREAD_ROWS):
        own = own_first + r * ROW_DISTANCE
        in_range = Boolean(own < rows)
        row = first + cutlass.max(cutlass.min(own, rows - 1), 0)
        row = cutlass.min(row, target.shape[1] - 1)
        line = cute.local_tile(target[batch, row, head, None], (BLOCK,), (column_block,))
        store_row(values, r, lane % QUAD, line, in_range)


def read(sums: cute.Tensor, warp, lane, values: cute.Tensor) -> None:
    """A thread's elements of the sums of a tile."""
    own = cute.local_tile(sums, (WARP_ELEMENTS,), (warp,))
    for i in range(THREAD_ELEMENTS // VECTOR):
        source = cute.local_tile(own, (VECTOR,), (i * WARP_THREADS + lane,))
        cute.autovec_copy(source, cute.local_tile(values, (VECTOR,), (i,)))
