"""The kernel of debug_a_kernel.md: doubles the rows of a matrix, and has three defects, of which `mended` are mended.

Warp 0 copies rows to a ring in shared memory; warp 1 doubles them and copies them out.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass.cute.nvgpu import cpasync

WIDTH = 128  # columns of a row
STAGES = 2  # of the ring
LANES = 32


@cute.struct
class Storage:
    full: cute.struct.MemRange[Int64, STAGES]
    empty: cute.struct.MemRange[Int64, STAGES]
    rows: cute.struct.Align[cute.struct.MemRange[Float32, STAGES * WIDTH], 128]
    result: cute.struct.Align[cute.struct.MemRange[Float32, WIDTH], 128]


@cute.jit
def load(x: cute.Tensor, rows: cute.Tensor, full, empty):
    """Warp 0 fills a stage as soon as it is empty."""
    copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
    for row in cutlass.range(x.shape[0], unroll=1):
        stage, use = row % STAGES, row // STAGES
        cute.arch.mbarrier_wait(empty + stage, (use + 1) % 2)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, WIDTH * Float32.width // 8)
            cute.copy(copy, x[row, None], rows[stage, None], mbar_ptr=full + stage)


@cute.jit
def double(y: cute.Tensor, rows: cute.Tensor, result: cute.Tensor, full, empty, mended: cutlass.Constexpr):
    """Warp 1 doubles a row into a buffer, hands its stage back and copies the buffer out."""
    lane = cute.arch.lane_idx()
    copy = cute.make_copy_atom(cpasync.CopyBulkS2GOp(), Float32)
    for row in cutlass.range(y.shape[0], unroll=1):
        stage, use = row % STAGES, row // STAGES
        cute.arch.mbarrier_wait(full + stage, use % 2)
        if cutlass.const_expr(mended < 2):
            release(empty + stage)
        for i in cutlass.range_constexpr(WIDTH // LANES):
            result[i * LANES + lane] = 2.0 * rows[stage, i * LANES + lane]
        if cutlass.const_expr(mended >= 3):
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        if cutlass.const_expr(mended >= 2):
            release(empty + stage)
        with cute.arch.elect_one():
            cute.copy(copy, result, y[row, None])
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


@cute.jit
def release(barrier):
    """One lane arrives."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cute.kernel
def double_rows(x: cute.Tensor, y: cute.Tensor, mended: cutlass.Constexpr):
    """See the module."""
    storage = cutlass.memory.SmemAllocator().allocate(Storage)
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    rows = storage.rows.get_tensor(cute.make_layout((STAGES, WIDTH), stride=(WIDTH, 1)))
    result = storage.result.get_tensor(cute.make_layout(WIDTH))
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, LANES if mended < 1 else 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 0:
        load(x, rows, full, empty)
    else:
        double(y, rows, result, full, empty, mended)
    cute.arch.sync_threads()


@cute.jit
def host(x: cute.Tensor, y: cute.Tensor, mended: cutlass.Constexpr = 0):
    """y = 2 x."""
    double_rows(x, y, mended).launch(grid=(1, 1, 1), block=(2 * LANES, 1, 1))
