"""P and dS on wgmma's register fragments, a row a key and a column a query; the bias, and its gradient."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.wgmma import COLUMNS, PAIR, THREAD_ROWS, column, elements, flat
from warpspec.fmha.device.bias import TYPES
from warpspec.fmha.device.softmax import LOG2_E
from warpspec.fmha.features import BLOCK


@cute.jit
def weigh(work, step, block: cutlass.Constexpr, place, masked):
    """S^T becomes P^T = 2 ** (scale_log2 * s + log2(e) * bias - lse'), in place; 0 where a row does not see a key.

    block: of 64 queries. place: (query head, query tile). masked: some row may not see some key.
    """
    config, scores = work.config, flat(work.mma.s)
    scale_log2, _ = work.scales
    statistics, first = work.statistics(step), block * BLOCK // PAIR
    for n in cutlass.range_constexpr(BLOCK // COLUMNS):
        lse = cute.make_rmem_tensor(PAIR, Float32)
        cute.autovec_copy(statistics[None, 0, first + n * (COLUMNS // PAIR) + work.member], lse)
        for r in cutlass.range_constexpr(THREAD_ROWS):
            for j in cutlass.range_constexpr(PAIR):
                i = (n * THREAD_ROWS + r) * PAIR + j
                scores[i] = scores[i] * scale_log2 - lse[j]
    if cutlass.const_expr(config.bias is not None):
        add_bias(work, block, place)
    if masked:
        hide(work, block, place)
    for i in cutlass.range_constexpr(cute.size(scores)):
        scores[i] = cute.math.exp2(scores[i], fastmath=True)


@cute.jit
def hide(work, block: cutlass.Constexpr, place):
    """Powers of hidden pairs become -inf."""
    config, scores = work.config, flat(work.mma.s)
    origin = place[1] * config.tile_m + block * BLOCK + PAIR * work.member  # query of element 0
    for r in cutlass.range_constexpr(THREAD_ROWS):
        first, end = work.bounds[r]
        first, end = first - origin, end - origin
        for i in elements(scores, r):
            seen = Boolean(first <= column(i))
            if cutlass.const_expr(config.has_left):
                seen = seen & Boolean(end > column(i))
            scores[i] = Float32(cutlass.select_(seen, scores[i], -Float32.inf))


@cute.jit
def derive(work, step, block: cutlass.Constexpr, place, masked):
    """dP^T becomes dS^T = P^T (dP^T - delta), in place; dbias is stored, or added to."""
    config, scores, ds = work.config, flat(work.mma.s), flat(work.mma.dp)
    statistics, first = work.statistics(step), block * BLOCK // PAIR
    for n in cutlass.range_constexpr(BLOCK // COLUMNS):
        delta = cute.make_rmem_tensor(PAIR, Float32)
        cute.autovec_copy(statistics[None, 1, first + n * (COLUMNS // PAIR) + work.member], delta)
        for r in cutlass.range_constexpr(THREAD_ROWS):
            for j in cutlass.range_constexpr(PAIR):
                i = (n * THREAD_ROWS + r) * PAIR + j
                ds[i] = scores[i] * (ds[i] - delta[j])
    if masked | Boolean(config.bias is not None):
        for i in cutlass.range_constexpr(cute.size(scores)):  # dP of a hidden pair may be NaN
            ds[i] = Float32(cutlass.select_(Boolean(scores[i] == Float32(0.0)), Float32(0.0), ds[i]))
    if cutlass.const_expr(config.bias_gradient is not None):
        write_bias(work, block, place)


def keep(values: cute.Tensor, operand: cute.Tensor) -> None:
    """Values in 16 bits in the registers of an operand: the same order.

    By inline PTX, which stays behind the wait in front of it: otherwise the compiler converts earlier, into registers
    of their own while the operand's are still being read, and there are not enough for both.
    """
    source, words = flat(values), cute.recast_tensor(flat(operand), Int32)
    kind = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[operand.element_type]
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[source[PAIR * i + 1], source[PAIR * i]],
        )


def bias_rows(work, tensor, head):
    """(QUERY, KEY) of a bias, or of its gradient."""
    config = work.config
    batch = work.tile.request if config.bias_batches else 0
    return tensor[batch, head if config.bias_heads else 0, None, None]


@cute.jit
def add_bias(work, block: cutlass.Constexpr, place):
    """Powers plus log2(e) times the bias; what lies outside of it, the mask or the statistics hide."""
    config, scores = work.config, flat(work.mma.s)
    bias = bias_rows(work, work.operands.bias, place[0])
    queries, keys = bias.shape
    query = place[1] * config.tile_m + block * BLOCK + PAIR * work.member
    for r in cutlass.range_constexpr(THREAD_ROWS):
        key = work.tile.first_key + work.key(r)
        key = cutlass.min(key, keys - 1)
        for i in elements(scores, r):
            at = cutlass.min(query + column(i), queries - 1)
            value = bias[at, key].to(Float32)
            total = scores[i] + value * LOG2_E
            scores[i] = Float32(cutlass.select_(Boolean(value == -Float32.inf), -Float32.inf, total))


@cute.jit
def write_bias(work, block: cutlass.Constexpr, place):
    """dS of the pairs that there are, to dbias."""
    config, ds = work.config, flat(work.mma.dp)
    target = bias_rows(work, work.operands.dbias, place[0])
    queries, keys = target.shape
    query = place[1] * config.tile_m + block * BLOCK + PAIR * work.member
    for r in cutlass.range_constexpr(THREAD_ROWS):
        key = work.tile.first_key + work.key(r)
        if key < keys:
            for i in elements(ds, r):
                if query + column(i) < queries:
                    if cutlass.const_expr(config.bias_gradient == "sum"):
                        pointer = target.iterator + target.layout((query + column(i), key))
                        cute.arch.red(pointer, ds[i], op="add", dtype="f32", sem="relaxed", scope="gpu")
                    else:
                        target[query + column(i), key] = ds[i].to(TYPES[config.bias_gradient])
