"""The exact path for rows that a non-finite V value at a hidden key may have reached.

PV multiplies every key of a tile with every row: a key hidden from a row has P = 0 there, but 0 times NaN or
Inf is NaN. Keys that no row of the M tile sees are cleared in shared memory before PV
(softmax_warps.clear_unseen). Of the others, one may be hidden from one row (causal, window) and visible to
another, which must get its NaN. So the epilogue looks at the finished O: a row whose O is not finite although
its row sum is was reached by a non-finite V value; it is summed again from global memory over exactly the
keys it sees. Finite data never comes here.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.fmha.exact import dot, load_part
from warpspec.fmha.features import BLOCK
from warpspec.fmha.pages import locate_key
from warpspec.fmha.row_bias import unit
from warpspec.fmha.sm100 import bias


def tainted(values: cute.Tensor, row_sum) -> Boolean:
    """True where some of values (D block) fp32 is NaN or Inf and the row has a finite, positive sum."""
    probe = Float32(0.0)
    for i in range(BLOCK):
        probe = probe + values[i] * Float32(0.0)  # 0, or NaN from the first that is not finite
    finite_sum = Boolean(row_sum > Float32(0.0)) & Boolean(row_sum < Float32.inf)
    return Boolean(probe != probe) & finite_sum


@cute.jit
def recompute(
    config: cutlass.Constexpr, row, place, operands, block, reference, scale_log2, values: cute.Tensor
):
    """values (D block) = sum over the row's visible keys of 2**(scale_log2 * (q.k - reference)) v, in fp32.

    block: which block of D.
    """
    q = operands.q[place.batch, place.query, place.head, None]  # (D)
    values.fill(0.0)
    for key in cutlass.range(Int32(row.first), row.end, unroll=1):
        where, exists = locate_key(config, operands, place.batch, key)
        score = dot(config, q, operands.k[(*where, place.kv_head, None)])
        if cutlass.const_expr(config.page_size > 0):
            score = Float32(cutlass.select_(exists, score, Float32(0.0)))
        if cutlass.const_expr(config.negate):
            score = -score
        if cutlass.const_expr(config.bias is not None):
            score = bias.power(config, operands, place, key, score, scale_log2)
            exists = exists & Boolean(score != -Float32.inf)
        weight = cute.math.exp2((score - reference) * unit(config, scale_log2), fastmath=True)
        v = operands.v[(*where, place.kv_head, None)]  # (D)
        loaded = load_part(cute.local_tile(v, (BLOCK,), (block,)))
        if exists:
            _accumulate(values, weight, loaded)


def _accumulate(values: cute.Tensor, weight, v: cute.Tensor) -> None:
    for i in range(BLOCK):
        values[i] = values[i] + weight * v[i].to(Float32)
