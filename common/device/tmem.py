"""Tensor memory: allocation sizes, row-wise loads and stores, fences (PTX ISA, "Tensor Memory",
tcgen05.ld/st).

Tensor memory is 128 lanes by 512 columns of 32 bits. An address is lane * 2**16 + column. In the 32x32b shape, warp w
of a warpgroup reaches lanes 32 w to 32 w + 31, and thread t of the warp reads or writes a whole row: register i is
column i.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from warpspec.common.memory import TMEM_LANES

LANE_STRIDE = 1 << 16
ALLOCATION_ALIGNMENT = 16  # alignment of a pointer to the first column

SCALE_LINE_BYTES = 16  # bytes of a scale atom that one lane gets
# Shared memory descriptor of a scale atom, all but its address: lines of 16 bytes, eight of them 128 bytes, no swizzle
# (PTX ISA, "Shared memory descriptor": address and offsets in units of 16 bytes, version 1 at bit 46).
SCALE_DESCRIPTOR = 1 << 46 | (8 * SCALE_LINE_BYTES >> 4) << 32 | (SCALE_LINE_BYTES >> 4) << 16
DESCRIPTOR_ADDRESS_MASK = 0x3FFFF


@cute.jit
def allocate(warp, columns: cutlass.Constexpr, address, pair: cutlass.Constexpr = False):
    """Warp 0 allocates ``columns`` columns, whose address appears at ``address`` in shared memory.

    The caller synchronises the CTA before anyone reads it (``base``). pair: both CTAs of a pair allocate.
    """
    if warp == 0:
        cute.arch.alloc_tmem(columns, address, is_two_cta=pair)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=pair)


def base(address) -> cute.Pointer:
    """Pointer to lane 0 of the first allocated column, Float32."""
    return cute.arch.retrieve_tmem_ptr(Float32, ALLOCATION_ALIGNMENT, address)


@cute.jit
def free(warp, columns: cute.Pointer, count: cutlass.Constexpr, pair: cutlass.Constexpr = False):
    """Warp 0 frees what it allocated. No thread may use it any more."""
    if warp == 0:
        cute.arch.dealloc_tmem(columns, count, is_two_cta=pair)


@dsl_user_op
def fence_before_arrive(*, loc=None, ip=None):
    """Order this thread's tcgen05 work before the arrival that follows (fence::before_thread_sync)."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after_wait(*, loc=None, ip=None):
    """Order tcgen05 work that follows after the wait just done (fence::after_thread_sync)."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


def load_row(columns: cute.Pointer, registers: cute.Tensor, thread, most: int = 128) -> None:
    """Issue tcgen05.ld of this thread's row into ``registers`` (n), 32-bit, n a power of two up to 128.

    columns: TMEM pointer to lane 0 of the first column. thread: 0..127 in the warpgroup. most: columns of one
    instruction, whose result ptxas wants to fit the registers that a thread has at launch. Asynchronous: the registers
    hold the row only after ``wait_loads``.
    """
    count = min(cute.size(registers), most)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(_REPETITIONS[count]), registers.element_type)
    for first in range(0, cute.size(registers), count):
        source, row = _row_partition(atom, columns + first, count, thread, loading=True)
        cute.copy(atom, source, cute.make_tensor(registers.iterator + first, row))


def store_row(registers: cute.Tensor, columns: cute.Pointer, thread) -> None:
    """Issue tcgen05.st of ``registers`` (n), 32-bit, to this thread's row; complete after ``wait_stores``."""
    count = cute.size(registers)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(_REPETITIONS[count]), registers.element_type)
    target, row = _row_partition(atom, columns, count, thread, loading=False)
    cute.copy(atom, cute.make_tensor(registers.iterator, row), target)


def wait_loads() -> None:
    """Wait until this thread's tcgen05.ld are complete (tcgen05.wait::ld)."""
    cute.arch.fence_view_async_tmem_load()


def wait_stores() -> None:
    """Wait until this thread's tcgen05.st are complete (tcgen05.wait::st)."""
    cute.arch.fence_view_async_tmem_store()


_REPETITIONS = {int(r.value): r for r in tcgen05.Repetition}


def _row_partition(atom, columns, count, thread, *, loading):
    """This thread's part of (128 lanes, count columns), and the matching register layout."""
    block = cute.make_tensor(
        columns, cute.make_layout((TMEM_LANES, count), stride=(LANE_STRIDE, 1))
    )  # (LANE, COLUMN)
    mine = tcgen05.make_tmem_copy(atom, block).get_slice(thread)
    part = mine.partition_S(block) if loading else mine.partition_D(block)
    coordinates = cute.make_identity_tensor((TMEM_LANES, count))
    row = mine.partition_D(coordinates) if loading else mine.partition_S(coordinates)
    shape = row.shape
    if cutlass.const_expr(cute.size(shape) != count):
        raise ValueError(f"a row of {count} columns does not make one tcgen05 access")
    return part, cute.make_layout(shape)


@dsl_user_op
def copy_scale_atom(source: cute.Pointer, columns: cute.Pointer, *, pair: bool = False, loc=None, ip=None):
    """Issue tcgen05.cp.32x128b.warpx4: copies 32 lines of 16 bytes from shared memory to 4 columns, for all four warps.

    It turns an atom of the 128x4 scale layout into what a block-scaled MMA reads: row r's 4 scales are in lane r % 32,
    column r / 32. Executed by one lane; ordered with the MMAs of the same warp. source: the lines, 16-byte aligned.
    columns: TMEM. pair: do it in both CTAs of a pair, each from its own shared memory.
    """
    address = source.toint(loc=loc, ip=ip) & DESCRIPTOR_ADDRESS_MASK
    descriptor = Int64(address >> 4) | SCALE_DESCRIPTOR
    cute.arch.inline_ptx(
        f"tcgen05.cp.cta_group::{2 if pair else 1}.32x128b.warpx4 [{{$r0}}], {{$r1}};",
        read_only_args=[columns.toint(loc=loc, ip=ip), descriptor],
        loc=loc,
        ip=ip,
    )
