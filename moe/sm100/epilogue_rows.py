"""Epilogue for tokens as lanes of tensor memory: a thread has one token and takes 32 columns of it at a time."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from warpspec.common.device import tmem
from warpspec.common.device.nvfp4 import largest_magnitude, quantize_block
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.nvfp4 import ATOM_COLUMNS, NVFP4_BLOCK
from warpspec.moe.gate import gated
from warpspec.moe.sm100 import activation
from warpspec.moe.sm100.config import ACCUMULATORS, MMA_ROWS, SWIGLU_COLUMNS
from warpspec.moe.sm100.store import Accumulator, warp_staging, write_scale_word, write_segment
from warpspec.moe.weights import INTERLEAVE

COLUMNS = SWIGLU_COLUMNS  # columns of a step: one block of outputs after gate and up are combined
SCALE_BITS = 8


@cute.jit
def rows_to_result(
    config: cutlass.Constexpr,
    own: Accumulator,
    operands,
    result,
    staging: cute.Pointer,
    features,
    limit,
):
    """Scale, activate, convert and write one accumulator [128 tokens, tile_n]; release it as soon as it has been
    read."""
    use, tile, rank = own.use, own.tile, own.rank
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP_THREADS), thread % WARP_THREADS
    own_rows = tile.rows - rank * MMA_ROWS - warp * WARP_THREADS  # this warp's existing rows; may be negative
    warp_row = tile.first_row + rank * MMA_ROWS + warp * WARP_THREADS
    valid = Boolean(lane < own_rows)
    gate_scale, up_scale = activation.global_scales(config, operands, tile.expert)
    if cutlass.const_expr(config.has_row_scale):
        scale = Float32(0.0)
        if valid:
            scale = operands.row_scale[warp_row + lane]
        gate_scale, up_scale = gate_scale * scale, up_scale * scale
    steps = config.tile_n // COLUMNS
    segment_steps = config.segment_columns // config.step_outputs
    # Begin at the columns that the accumulators share: the first one's end, the second one's start.
    backwards = Boolean(use % ACCUMULATORS == 0)
    words = config.step_words
    staged = warp_staging(config, staging, warp, words)
    codes = Int64(0)
    out_scale = Float32(1.0)
    if cutlass.const_expr(config.quantizes):
        out_scale = operands.out_scale[tile.expert]
    for segment_turn in cutlass.range(steps // segment_steps, unroll=1):
        segment = in_turn(segment_turn, steps // segment_steps, backwards)
        for part_turn in cutlass.range(segment_steps, unroll=1):
            part = in_turn(part_turn, segment_steps, backwards)
            step = segment * segment_steps + part
            values = cute.make_rmem_tensor(COLUMNS, Float32)
            tmem.load_row(own.columns + step * COLUMNS, values, thread)
            tmem.wait_loads()
            if segment_turn * segment_steps + part_turn == config.release_steps - 1:
                tmem.fence_before_arrive()
                own.empty.arrive_behind_collective(own.use, 0 if config.pair else None)
            feature = tile.first_feature + step * COLUMNS
            scale_and_bias(config, operands, values, gate_scale, up_scale, tile.expert, feature, features)
            outputs = activate(config, values, limit)
            packed = cute.make_rmem_tensor(words, Int32)
            if cutlass.const_expr(config.quantizes):
                code, low, high = quantize_block(outputs, largest_magnitude(outputs), out_scale)
                packed[0], packed[1] = Int32(low), Int32(high)
                codes |= Int64(code) << (part * SCALE_BITS)
            else:
                converted = cute.make_rmem_tensor(cute.size(outputs), BFloat16)
                converted.store(outputs.load().to(BFloat16))
                packed = cute.recast_tensor(converted, Int32)
            cute.autovec_copy(packed, staged[None, part, lane])
        vectors = warp_staging(config, staging, warp, config.vector_words)
        first_output = tile.first_feature // (2 if config.gated else 1) + segment * config.segment_columns
        write_segment(config, vectors, result, lane, warp_row, own_rows, first_output)
    if cutlass.const_expr(config.quantizes):
        for word in cutlass.range_constexpr(steps // ATOM_COLUMNS):
            column = tile.first_feature // COLUMNS + word * ATOM_COLUMNS
            four = Int32(codes >> (word * ATOM_COLUMNS * SCALE_BITS))
            write_scale_word(result, valid, tile.atom + rank, warp * WARP_THREADS + lane, column, four)


def in_turn(turn, count: int, backwards) -> Int32:
    """The index visited at ``turn`` of ``count``: ascending or descending."""
    return Int32(cutlass.select_(backwards, count - 1 - turn, turn))


@cute.jit
def scale_and_bias(
    config: cutlass.Constexpr, operands, values, gate_scale, up_scale, expert, feature, features
):
    """Multiply values (32) by the global scales and add the bias of features from ``feature`` on; 0 past the last."""
    bias = bias_of(operands.bias, expert, feature, features) if cutlass.const_expr(config.has_bias) else None
    for i in cutlass.range_constexpr(0, COLUMNS, 2):
        of_up = cutlass.const_expr(config.gated and i // INTERLEAVE % 2 == 1)
        scale = up_scale if of_up else gate_scale
        biases = None if bias is None else (bias[i], bias[i + 1])
        values[i], values[i + 1] = activation.scaled((values[i], values[i + 1]), (scale, scale), biases)


@cute.jit
def bias_of(bias: cute.Tensor, expert, feature, features) -> cute.Tensor:
    """The bias (32) of features from ``feature`` on; 0 past the last."""
    row = bias[expert, None]
    found = cute.make_rmem_tensor(COLUMNS, Float32)
    if feature + COLUMNS <= features:
        cute.autovec_copy(cute.local_tile(row, (COLUMNS,), (feature // COLUMNS,)), found)
    else:
        for i in cutlass.range_constexpr(COLUMNS):
            found[i] = Float32(0.0)
            if feature + i < features:
                found[i] = row[feature + i]
    return found


def activate(config, values, limit) -> cute.Tensor:
    """Outputs of 32 columns: 16 if they are 8 gate, 8 up, 8 gate, 8 up; otherwise the columns themselves."""
    if not config.gated:
        return values
    outputs = cute.make_rmem_tensor(NVFP4_BLOCK, Float32)
    for i in range(NVFP4_BLOCK):
        gate = i // INTERLEAVE * 2 * INTERLEAVE + i % INTERLEAVE
        outputs[i] = gated(config, values[gate], values[gate + INTERLEAVE], limit)
    return outputs
