"""wgmma (sm_90a): issues products of a warpgroup, and describes its fragments in registers.

A warp of the warpgroup has 16 of its 64 rows. A thread has parts of rows g and g + 8 with g = lane / 4, and of every 8
columns those at 2 (lane % 4) and 2 (lane % 4) + 1. Element i of a fragment (n) belongs to row i // 2 % 2 of the thread
and to column 8 (i // 4) + 2 (lane % 4) + i % 2. PTX ISA: "Register Fragments" of wgmma.
"""

from __future__ import annotations

import cutlass
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

PAIR = 2  # adjacent columns of a thread
COLUMNS = QUAD * PAIR  # columns shared by the four threads of a row, two each
VECTOR = 8  # 16-bit elements of one 16-byte store


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """(n): the registers of a fragment in order."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def multiply(
    tiled_mma: cute.TiledMma, d, a, b, accumulate, first: int = 0, count: int | None = None, more: tuple = ()
) -> None:
    """Issue D = A B, plus D where ``accumulate`` (a bool, or a Boolean of the device): one wgmma for every 16 of K, as
    one group. first: where to begin in B's K, counted in wgmmas. count: how many of these; None: all of A's. more:
    further products (tiled MMA, A, B), each of one wgmma, that are added to D."""
    warpgroup.fence()
    for k_block in range(cute.size(a, mode=[2]) if count is None else count):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate if k_block == 0 else True)
        cute.gemm(tiled_mma, d, a[None, None, k_block], b[None, None, first + k_block], d)
    for further_mma, further_a, further_b in more:
        further_mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.gemm(further_mma, d, further_a, further_b, d)
    warpgroup.commit_group()


@dsl_user_op
def settle(words: cute.Tensor, *, loc=None, ip=None) -> None:
    """Force the values of registers (n), Int32, to be computed here.

    The compiler sees no dependence between wgmma.fence and the registers of an A operand. It would move their
    computation after the fence, or repeat it there.
    """
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
    """Transpose 4 words of each of 4 threads: thread t gets word t of every thread, in thread order.

    lane: number in the quad.
    """
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


def elements(fragment: cute.Tensor, r: int) -> list[int]:
    """The elements of a fragment that belong to row r of the thread, in column order."""
    return [i for i in range(cute.size(fragment)) if i // PAIR % THREAD_ROWS == r]


def column(i: int) -> int:
    """Column of element i in the first thread of a quad."""
    return i // (PAIR * THREAD_ROWS) * COLUMNS + i % PAIR


@cute.jit
def store_row(o: cute.Tensor, r: cutlass.Constexpr, lane, target: cute.Tensor, in_range, end=None):
    """Store row r (D) as 16-bit elements; its four threads exchange words so that each stores 8 columns at a time.

    lane: number in the quad. end: how many blocks of 8 columns there are to write; None: all. Thread t ends up with
    block t of every four blocks of 8 columns, by a transposition of 4 x 4 words.
    """
    own = elements(o, r)
    blocks = len(own) // PAIR
    words = []
    for block in cutlass.range_constexpr(blocks):
        pair = cute.make_rmem_tensor(PAIR, target.element_type)
        for place_ in cutlass.range_constexpr(PAIR):
            pair[place_] = o[own[block * PAIR + place_]].to(target.element_type)
        words.append(cute.recast_tensor(pair, Int32)[0])
    for first in cutlass.range_constexpr(0, blocks, QUAD):
        group = words[first : first + QUAD]
        writes = in_range
        if cutlass.const_expr(len(group) < QUAD):
            writes = in_range & Boolean(lane < len(group))
            group = group + [Int32(0)] * (QUAD - len(group))
        if cutlass.const_expr(end is not None):
            writes &= Boolean(first + lane < end)
        moved = transpose(group, lane)
        if writes:
            vector = cute.make_rmem_tensor(QUAD, Int32)
            for i in cutlass.range_constexpr(QUAD):
                vector[i] = moved[i]
            part = cute.local_tile(target, (VECTOR,), (first + lane,))
            cute.autovec_copy(cute.recast_tensor(vector, target.element_type), part)
