"""The softmax warps: S to P, the correction of O, and keys past the KV length."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device import tma, tmem
from warpspec.common.hardware import VECTOR_BYTES, WORD_BYTES
from warpspec.fmha.device import unseen
from warpspec.fmha.device.logits import map_scores, unit
from warpspec.fmha.device.mask import hide, keys_of
from warpspec.fmha.device.softmax import exponentiate, maximum, move_reference, scale_by
from warpspec.fmha.sm100 import bias
from warpspec.fmha.sm100.config import QUARTER_LANES

O_SEGMENT = 32  # columns of O in registers at a time while it is rescaled
SWIZZLE_ROWS = 8  # rows after which the swizzle repeats


@dataclass(frozen=True)
class Columns:
    """The places of a softmax thread's operands.

    thread: 0..127, its lane of tensor memory. s, p, o: TMEM pointers to the first columns of S (fp32), P (32 bits, two
    keys) and O (fp32). p_smem, v_smem: shared memory (Uint8) of P, where it lies there, and of the first V stage. bias:
    see ``bias.add``. use: KV tiles that the CTA has finished before this M tile.
    """

    thread: Int32
    s: cute.Pointer
    p: cute.Pointer
    o: cute.Pointer
    p_smem: cute.Pointer
    v_smem: cute.Pointer
    bias: cute.Pointer | cute.Tensor | None
    use: Int32 | int

    def hide(self, config, channels, row, step, first_key, scores: cute.Tensor) -> None:
        """Set scores (KEY) of the KV tile of visit ``step`` to -inf where the row does not see the key."""
        drafts = row.drafts.read(first_key) if row.drafts else None
        interval, pattern = keys_of(config, row, step, first_key)
        hide(scores, range(config.tile_n), 1, 1, *interval, drafts, pattern)

    def clear(self, config, span, first_key, stage) -> None:
        """Clear V of a KV tile's keys that no row sees (``unseen.clear``). stage: Uint8 pointer to it."""
        unseen.clear(config, span, first_key, self.thread, stage)

    def finish(self, config, row, first: int, values: cute.Tensor) -> None:
        """Hook for columns (n) of the thread's O from number ``first`` on, before they are scaled: does nothing
        here."""


@cute.jit
def softmax(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    row,
    span,
    columns,
    numbers,
    dtype: cutlass.Constexpr,
):
    """One thread per row: for every KV tile of ``span`` read S, make P, and keep O in the units of the row's reference.
    With 64 rows, the threads of lanes 16 to 31 of each warp only keep the second half of O.

    columns: ``Columns``. numbers: the numbers of the map between S and P. dtype: P's dtype. Returns (reference,
    maximum, row_sum) of the row, in the unit of mapped scores. Consumes: s_full; pv_done of the tile before, before it
    touches O or P; v_full when it clears rows of V. Produces: s_empty once S is in registers; p_full once P, O and V
    are ready for PV of this tile.
    """
    reference, row_maximum, row_sum = -Float32.inf, -Float32.inf, Float32(0.0)
    for step in cutlass.range(span.count, unroll=1):
        state = (reference, row_maximum, row_sum)
        # Two bodies, not a branch around the mask: that would become predicated selections in every tile.
        if cutlass.const_expr(config.mask.sparse) or span.needs_mask(step, config.tile_n):
            reference, row_maximum, row_sum = tile_step(
                config, channels, row, span, columns, numbers, dtype, step, state, True
            )
        else:
            reference, row_maximum, row_sum = tile_step(
                config, channels, row, span, columns, numbers, dtype, step, state, False
            )
    return (
        reference,
        share(config, columns.thread, row_maximum),
        share(config, columns.thread, row_sum),
    )


def share(config, thread, value):
    """Broadcast the value of the thread with the row's first column group to the threads of all its groups."""
    if config.column_groups == 1:
        return value
    return cute.arch.shuffle_sync(value, thread % (QUARTER_LANES // config.column_groups))


@cute.jit
def tile_step(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    row,
    span,
    columns,
    numbers,
    dtype: cutlass.Constexpr,
    step,
    state,
    masked: cutlass.Constexpr,
):
    """The KV tile of visit ``step``: wait for S, work, signal; see ``softmax``.

    masked: some row does not see some key.
    """
    use = columns.use + step
    first_key = span.tile(step) * config.tile_n
    scores = cute.make_rmem_tensor(config.tile_n, Float32)  # (KEY)
    channels["s_full"].wait(use)
    tmem.fence_after_wait()
    tmem.load_row(columns.s, scores, columns.thread, config.load_columns)
    tmem.wait_loads()
    tmem.fence_before_arrive()
    channels["s_empty"].arrive(use)

    if cutlass.const_expr(config.logits.bias is not None):
        bias.add(config, channels, row, columns.bias, scores, first_key, step, numbers, masked)
    elif cutlass.const_expr(config.logits.in_powers):
        map_scores(config.logits, scores, range(config.tile_n), numbers)
    if cutlass.const_expr(masked):
        columns.hide(config, channels, row, step, first_key, scores)
    state, factor, moved = weigh(config, columns.thread, scores, unit(config.logits, numbers), state, masked)
    weights = cute.make_rmem_tensor(config.tile_n, dtype)  # (KEY)
    weights.store(scores.load().to(dtype))

    channels["pv_done"].wait_previous(use)
    tmem.fence_after_wait()
    if (step > 0) & cute.arch.vote_any_sync(moved):
        rescale(config, columns.o, factor, columns.thread)
    if cutlass.const_expr(config.p_in_smem):
        store_weights(config, row, cute.recast_tensor(weights, Int32), columns.p_smem)
    else:
        tmem.store_row(cute.recast_tensor(weights, Int32), columns.p, columns.thread)
    # A tile that every row sees in full has nothing to clear, and past Sk TMA fills in zeros.
    if cutlass.const_expr(masked and config.clears_unseen):  # noqa: SIM102
        if span.has_unseen(first_key // config.tile_n, config.tile_n):
            full = channels[config.format.v_ring + "_full"]
            full.wait(use)
            stage = columns.v_smem + full.stage(use) * config.kv.v_stage_bytes
            columns.clear(config, span, first_key, stage)
            if cutlass.const_expr(not config.p_in_smem):  # P's fence is for it, too
                cute.arch.fence_view_async_shared()
    tmem.wait_stores()
    if cutlass.const_expr(config.p_in_smem):
        cute.arch.fence_view_async_shared()
    tmem.fence_before_arrive()
    channels["p_full"].arrive(use)
    return state


def weigh(config, thread, scores: cute.Tensor, score_unit, state: tuple, masked: bool) -> tuple:
    """Replace scores (KEY) by their exponentials, and return the row's state with them, what the row of O is to be
    multiplied by, and whether the reference has moved."""
    reference, row_maximum, row_sum = state
    row_maximum = cute.arch.fmax(row_maximum, maximum(scores))
    reference, factor, moved = move_reference(
        reference, row_maximum, score_unit, config.output.rescale_threshold
    )
    reference, factor = share(config, thread, reference), share(config, thread, factor)
    polynomial_every = 0 if masked else config.shape.polynomial_every
    degree = 3 if config.p_dtype == "bfloat16" else 4
    row_sum = row_sum * factor + exponentiate(scores, reference, score_unit, polynomial_every, degree=degree)
    return (reference, row_maximum, row_sum), factor, moved


@cute.jit
def store_weights(config: cutlass.Constexpr, row, weights: cute.Tensor, p: cute.Pointer):
    """Store P of this thread's row to shared memory as tcgen05.mma reads it: in blocks of 64 keys, where the row has
    128 bytes and the swizzle permutes their 16-byte vectors by the row's number.

    weights: (tile_n / 2) 32 bits, two keys each. p: Uint8. The caller fences before it signals.
    """
    if row.member == 0:
        vectors = tma.ROW_BYTES // VECTOR_BYTES
        words = VECTOR_BYTES // WORD_BYTES
        blocks = cute.size(weights) // (vectors * words)
        for place in cutlass.range_constexpr(vectors):
            # One address a place; blocks lie at constant distances from it, which cost no register.
            offset = row.index * tma.ROW_BYTES + (place ^ row.index % SWIZZLE_ROWS) * VECTOR_BYTES
            base = cute.recast_ptr((p + offset).align(VECTOR_BYTES), dtype=Int32)
            for block in cutlass.range_constexpr(blocks):
                target = cute.make_tensor(
                    base + block * config.tile_m * tma.ROW_BYTES // WORD_BYTES, cute.make_layout(words)
                )  # (WORD)
                cute.autovec_copy(cute.local_tile(weights, (words,), (block * vectors + place,)), target)


@cute.jit
def rescale(config: cutlass.Constexpr, o, factor, thread):
    """Multiply O of every row of the warp by its factor (1 if the reference stayed), in tensor memory."""
    for start, size in config.o_segments(O_SEGMENT):
        values = cute.make_rmem_tensor(size, Float32)  # (D segment)
        tmem.load_row(o + start, values, thread)
        tmem.wait_loads()
        scale_by(values, factor)
        tmem.store_row(values, o + start, thread)
