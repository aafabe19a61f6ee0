"""The exact path of ``sm100.recompute`` for a row whose columns four threads share."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.fmha.exact import dot
from warpspec.fmha.pages import locate_key
from warpspec.fmha.row_bias import row_of, unit
from warpspec.fmha.sm90 import bias, softmax
from warpspec.fmha.sm90.rows import QUAD

DOT_PART = 16  # elements of q and k in registers at a time: the rows of O take most of them


def tainted(o: cute.Tensor, half: int, row_sum) -> Boolean:
    """True where some of the thread's o (n) of one row is NaN or Inf and the row has a finite, positive sum."""
    probe = Float32(0.0)
    for i in softmax.elements(o, half):
        probe = probe + o[i] * Float32(0.0)  # 0, or NaN from the first that is not finite
    finite_sum = Boolean(row_sum > Float32(0.0)) & Boolean(row_sum < Float32.inf)
    return Boolean(probe != probe) & finite_sum


@cute.jit
def recompute(
    config: cutlass.Constexpr,
    row,
    place,
    part,
    operands,
    reference,
    scale_log2,
    o: cute.Tensor,
    half: cutlass.Constexpr,
):
    """The thread's o (n) of one row, in its part of the columns, = sum over the row's visible keys of
    2**(scale_log2 * (q.k - reference)) v."""
    own = softmax.elements(o, half)
    q = operands.q[place.batch, place.query, place.head, None]  # (D)
    for at in cutlass.range_constexpr(len(own)):
        o[own[at]] = Float32(0.0)
    for key in cutlass.range(Int32(row.first), row.end, unroll=1):
        where, exists = locate_key(config, operands, place.batch, key)
        score = dot(config, q, operands.k[(*where, place.kv_head, None)], DOT_PART)
        if cutlass.const_expr(config.page_size > 0):
            score = Float32(cutlass.select_(exists, score, Float32(0.0)))
        if cutlass.const_expr(config.negate):
            score = -score
        if cutlass.const_expr(config.bias is not None):
            score = bias.of_key(row_of(config, operands.bias, place), key, score, scale_log2)
            exists = exists & Boolean(score != -Float32.inf)
        weight = cute.math.exp2((score - reference) * unit(config, scale_log2), fastmath=True)
        v = operands.v[(*where, place.kv_head, None)]  # (D)
        v = cute.local_tile(v, (config.o_columns,), (part,))
        if exists:
            for block in cutlass.range_constexpr(len(own) // softmax.PAIR):
                pair = cute.make_rmem_tensor(softmax.PAIR, v.element_type)
                cute.autovec_copy(cute.local_tile(v, (softmax.PAIR,), (block * QUAD + row.half,)), pair)
                for i in cutlass.range_constexpr(softmax.PAIR):
                    at = own[block * softmax.PAIR + i]
                    o[at] = o[at] + weight * pair[i].to(Float32)
