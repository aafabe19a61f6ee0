"""Keep NaN in keys that only some rows of a task see from its other rows: there P is 0, and its product NaN.

``fmha.device.unseen`` sums such rows again. That is not needed here, because K is V: a key with a NaN makes the logit
NaN in every row that sees it, and with it the row's whole O, whatever is in V. So such numbers are cleared in V. Only
queries that a page table's keys are for share a task; those keys are e4m3, which has no Inf, so that an Inf, which a
row might see with weight 0, cannot be lost.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.device import tma
from warpspec.common.hardware import BF16_BYTES, VECTOR_BYTES, WARPGROUP_THREADS, WORD_BYTES

EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}  # all ones, which only NaN has among e4m3's numbers


@cute.jit
def clear_nan(config: cutlass.Constexpr, span, first_key, thread, tile: cute.Pointer):
    """Zero 16 bytes of V of a KV tile wherever one of their numbers is NaN, in keys that some rows do not see.

    span: ``SparseTiles``. first_key: the tile's first key. thread: 0..127. tile: Uint8 pointer to the stage. What has
    to follow is as in ``fmha.device.unseen.clear``.
    """
    vectors, words = tma.ROW_BYTES // VECTOR_BYTES, VECTOR_BYTES // WORD_BYTES
    of_key = config.heads.v_blocks * vectors
    begin = cutlass.max(span.all_end - first_key, 0)
    end = cutlass.min(span.some_end - first_key, config.tile_n)
    for number in cutlass.range(begin * of_key + thread, end * of_key, WARPGROUP_THREADS, unroll=1):
        key, vector = number // of_key, number % of_key
        start = (vector // vectors * config.tile_n + key) * tma.ROW_BYTES + vector % vectors * VECTOR_BYTES
        place = cute.make_tensor(
            cute.recast_ptr((tile + start).align(VECTOR_BYTES), dtype=Int32), cute.make_layout(words)
        )  # (WORD)
        loaded, exponent, bad = cute.make_rmem_tensor(words, Int32), EXPONENTS[config.p_dtype], Boolean(False)
        cute.autovec_copy(place, loaded)
        for i in cutlass.range_constexpr(words):
            for shift in cutlass.range_constexpr(0, 8 * WORD_BYTES, 8 * BF16_BYTES):
                bad = bad | Boolean(((loaded[i] >> shift) & exponent) == exponent)
        if bad:
            loaded.fill(0)
            cute.autovec_copy(loaded, place)
