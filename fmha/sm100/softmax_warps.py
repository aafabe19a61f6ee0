"""The softmax warps: S to P, the correction of O, and keys past the KV length."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common import tma, tmem
from warpspec.fmha.device_mask import hide
from warpspec.fmha.sm100.config import HEAD_DIM, POLYNOMIAL_EVERY, RESCALE_THRESHOLD, TILE_N
from warpspec.fmha.softmax import exponentiate, maximum, move_reference, scale_by

O_PART = 32  # columns of O in registers at a time while it is rescaled
WORD_BYTES = 4


@dataclass(frozen=True)
class Columns:
    """Tensor memory: pointers to the first columns of S (fp32), P (32 bits, two keys) and O (fp32)."""

    s: cute.Pointer
    p: cute.Pointer
    o: cute.Pointer


@cute.jit
def softmax(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    row,
    span,
    columns,
    v_base,
    scale_log2,
    dtype: cutlass.Constexpr,
):
    """One thread a row: for every KV tile of ``span`` read S, make P, and keep O in the units of the row's
    reference.

    v_base: first V stage. dtype: of P. Returns (reference, maximum, row_sum) of the row, raw score units.
    Consumes: s_full; pv_done of the tile before, before it touches O or P; v_full when it clears rows of V.
    Produces: s_empty once S is in registers; p_full once P, O and V are as PV of this tile wants them.
    """
    reference, row_maximum, row_sum = -Float32.inf, -Float32.inf, Float32(0.0)
    for step in cutlass.range(span.count, unroll=1):
        state = (reference, row_maximum, row_sum)
        # Two bodies, not a branch around the mask: that would become predicated selections in every tile.
        if span.needs_mask(span.tile(step), TILE_N):
            reference, row_maximum, row_sum = tile_step(
                config, channels, row, span, columns, v_base, scale_log2, dtype, step, state, True
            )
        else:
            reference, row_maximum, row_sum = tile_step(
                config, channels, row, span, columns, v_base, scale_log2, dtype, step, state, False
            )
    return reference, row_maximum, row_sum


@cute.jit
def tile_step(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    row,
    span,
    columns,
    v_base,
    scale_log2,
    dtype: cutlass.Constexpr,
    step,
    state,
    masked: cutlass.Constexpr,
):
    """The step-th KV tile: wait for S, work, signal; see ``softmax``.

    masked: some row does not see some key.
    """
    reference, row_maximum, row_sum = state
    first_key = span.tile(step) * TILE_N
    scores = cute.make_rmem_tensor(TILE_N, Float32)  # (KEY)
    channels["s_full"].wait(step)
    tmem.fence_after_wait()
    tmem.load_row(columns.s, scores, row.thread)
    tmem.wait_loads()
    tmem.fence_before_arrive()
    channels["s_empty"].arrive(step)

    if cutlass.const_expr(masked):
        hide(scores, row.first - first_key if config.has_left else None, row.end - first_key)
    row_maximum = cute.arch.fmax(row_maximum, maximum(scores))
    reference, factor, moved = move_reference(reference, row_maximum, scale_log2, RESCALE_THRESHOLD)
    polynomial_every = 0 if masked else POLYNOMIAL_EVERY
    row_sum = row_sum * factor + exponentiate(scores, reference, scale_log2, polynomial_every)
    weights = cute.make_rmem_tensor(TILE_N, dtype)  # (KEY)
    weights.store(scores.load().to(dtype))

    channels["pv_done"].wait_previous(step)
    tmem.fence_after_wait()
    if (step > 0) & cute.arch.vote_any_sync(moved):
        rescale(columns.o, factor, row.thread)
    tmem.store_row(cute.recast_tensor(weights, Int32), columns.p, row.thread)
    # A tile that every row sees whole has nothing to clear, and past Sk TMA fills in zeros.
    if masked and (config.band or config.has_kv_lengths) and span.has_unseen(span.tile(step), TILE_N):
        channels["v_full"].wait(step)
        stage = channels["v_full"].stage(step)
        clear_unseen(row, span, first_key, v_base + stage * config.kv_tile_bytes)
    tmem.wait_stores()
    tmem.fence_before_arrive()
    channels["p_full"].arrive(step)
    return reference, row_maximum, row_sum


@cute.jit
def rescale(o, factor, thread):
    """O of every row of the warp times its factor (1 where the reference stayed), in tensor memory."""
    for part in cutlass.range_constexpr(HEAD_DIM // O_PART):
        values = cute.make_rmem_tensor(O_PART, Float32)  # (D part)
        tmem.load_row(o + part * O_PART, values, thread)
        tmem.wait_loads()
        scale_by(values, factor)
        tmem.store_row(values, o + part * O_PART, thread)


@cute.jit
def clear_unseen(row, span, first_key, tile: cute.Pointer):
    """Zero the V rows of a tile that no row of the M tile sees: 0 times a NaN left there would be NaN.

    tile: Uint8 pointer to the stage. Thread t does V row t; the fence makes it visible to tcgen05.mma.
    """
    key = first_key + row.thread
    if (key < span.first) | (key >= span.end):
        words = cute.make_tensor(
            cute.recast_ptr((tile + row.thread * tma.ROW_BYTES).align(tma.ROW_BYTES), dtype=Int32),
            cute.make_layout(tma.ROW_BYTES // WORD_BYTES),
        )  # (WORD)
        words.fill(0)
    cute.arch.fence_view_async_shared()
