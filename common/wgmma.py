"""wgmma (sm_90a): issuing products of a warpgroup, and its fragments in registers.

A warp of the warpgroup has 16 of its 64 rows: a thread has parts of rows g and g + 8 with g = lane / 4, and of every 8
columns those at 2 (lane % 4) and the next. Element i of a fragment (n) belongs to row i // 2 % 2 of the thread and to
column 8 (i // 4) + 2 (lane % 4) + i % 2. PTX ISA: "Register Fragments" of wgmma.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, select_
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from warpspec.common.hardware import QUAD, ROW_DISTANCE, THREAD_ROWS, WARP_ROWS, WARPGROUP_ROWS

__all__ = [
    "COLUMNS",
    "PAIR",
    "QUAD",
    "ROW_DISTANCE",
    "THREAD_ROWS",
    "WARPGROUP_ROWS",
    "WARP_ROWS",
    "flat",
    "multiply",
    "transpose",
]

PAIR = 2  # neighbouring columns of a thread
COLUMNS = QUAD * PAIR  # columns that the four threads of a row share, two each


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """(n): the registers of a fragment in order."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def multiply(tiled_mma: cute.TiledMma, d, a, b, accumulate) -> None:
    """Issue D = A B, plus D where ``accumulate`` (a bool, or a Boolean of the device): one wgmma for every 16 of K; one
    group."""
    warpgroup.fence()
    for k_block in range(cute.size(a, mode=[2])):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate if k_block == 0 else True)
        cute.gemm(tiled_mma, d, a[None, None, k_block], b[None, None, k_block], d)
    warpgroup.commit_group()


@dsl_user_op
def settle(words: cute.Tensor, *, loc=None, ip=None) -> None:
    """Have the values of registers (n), Int32, computed here. The compiler knows of no tie between wgmma.fence and the
    registers of an A operand, and moves what computes them behind the fence, or does it again there."""
    count = cute.size(words)
    values = [Int32(words[i]).ir_value(loc=loc, ip=ip) for i in range(count)]
    settled = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>"),
        values,
        "",
        ",".join(["=r"] * count + [str(i) for i in range(count)]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    for i in range(count):
        words[i] = Int32(llvm.extractvalue(T.i32(), settled, [i], loc=loc, ip=ip))


def transpose(words: list, lane) -> list:
    """4 words of each of 4 threads: thread t gets word t of every thread, in the threads' order. lane: of the quad."""
    for bit in (1, 2):
        upper = Boolean((lane & bit) != 0)
        moved = list(words)
        for low in (i for i in range(QUAD) if not i & bit):
            high = low | bit
            send = Int32(select_(upper, words[low], words[high]))
            keep = Int32(select_(upper, words[high], words[low]))
            got = cute.arch.shuffle_sync_bfly(send, bit)
            moved[low] = Int32(select_(upper, got, keep))
            moved[high] = Int32(select_(upper, keep, got))
        words = moved
    return words
