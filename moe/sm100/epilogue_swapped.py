"""Epilogue for weights as lanes of tensor memory and tokens as its columns.

A thread has one feature of every token. Gate and up alternate by 8, so lanes l and l + 8 have matching rows. They share
the work on two tokens: the lower lane computes the first, the upper one the second. A warp's 32 lanes thus hold one
block of 16 outputs of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint8

from warpspec.common.device import tmem
from warpspec.common.device.nvfp4 import absolute, block_scale, quantize_lane
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.nvfp4 import NVFP4_BLOCK
from warpspec.moe.gate import gated
from warpspec.moe.sm100 import activation
from warpspec.moe.sm100.store import Accumulator, warp_staging, write_scale, write_segment
from warpspec.moe.weights import INTERLEAVE

CODE_BITS = 4
BLOCK_LANES = (1, 2, 4, 2 * INTERLEAVE)  # lane distances between the 16 outputs of a block


class Feature(NamedTuple):
    """A thread's row of the weights.

    upper: whether its lane holds up, or takes the second of two tokens. place: the place of its output among the
    warp's. column: the warp's first output. scale: the global scale. bias: 0 if there is none.
    """

    upper: Boolean
    place: Int32
    column: Int32
    scale: Float32
    bias: Float32


@cute.jit
def columns_to_result(
    config: cutlass.Constexpr,
    own: Accumulator,
    operands,
    result,
    staging: cute.Pointer,
    features,
    limit,
):
    """Scale, activate, convert and write one accumulator [128 features, tile_n tokens]; release it once it is read."""
    tile = own.tile
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // WARP_THREADS), thread % WARP_THREADS
    feature = feature_of(config, operands, tile, warp, lane, features)
    staged = staged_values(config, staging, warp)
    count = config.step_tokens
    for first in cutlass.range(0, config.tile_n, count, unroll=1):
        values = cute.make_rmem_tensor(count, Float32)
        tmem.load_row(own.columns + first, values, thread)
        tmem.wait_loads()
        if first == config.tile_n - count:
            tmem.fence_before_arrive()
            own.empty.arrive_behind_collective(own.use)
        for token in cutlass.range_constexpr(0, count, 2):
            scales = tuple(token_scale(config, operands, feature, tile, first + token + i) for i in range(2))
            biases = (feature.bias, feature.bias) if cutlass.const_expr(config.has_bias) else None
            pair = activation.scaled((values[token], values[token + 1]), scales, biases)
            values[token], values[token + 1] = pair
        if cutlass.const_expr(config.quantizes):
            quantize_tokens(config, operands, result, values, staged, feature, first, tile, limit)
        elif cutlass.const_expr(config.gated):
            for token in cutlass.range_constexpr(0, count, 2):
                output = paired_output(config, values, token, feature.upper, limit)
                staged[feature.place, first + token + Int32(feature.upper)] = output.to(BFloat16)
        else:
            for token in cutlass.range_constexpr(count):
                staged[lane, first + token] = values[token].to(BFloat16)
    vectors = warp_staging(config, staging, warp, config.vector_words)
    write_segment(config, vectors, result, lane, tile.first_row, tile.rows, feature.column)


def token_scale(config, operands, feature, tile, token) -> Float32:
    """Global scale of a feature times that of the tile's token; past the last token, that of the last token."""
    if not config.has_row_scale:
        return feature.scale
    return feature.scale * operands.row_scale[tile.first_row + cutlass.min(token, tile.rows - 1)]


@cute.jit
def feature_of(config: cutlass.Constexpr, operands, tile, warp, lane, features) -> Feature:
    """This thread's feature. Its row may lie past the weights' last; it then has another row's scale and bias 0."""
    upper = Boolean(lane // INTERLEAVE % 2 == 1)
    gate_scale, up_scale = activation.global_scales(config, operands, tile.expert)
    bias = Float32(0.0)
    if cutlass.const_expr(config.has_bias):
        row = tile.first_feature + warp * WARP_THREADS + lane
        if row < features:
            bias = operands.bias[tile.expert, row]
    return Feature(
        upper=upper,
        place=lane // (2 * INTERLEAVE) * INTERLEAVE + lane % INTERLEAVE,
        column=tile.first_feature // (2 if config.gated else 1) + warp * config.segment_columns,
        scale=Float32(cutlass.select_(upper, up_scale, gate_scale)),
        bias=bias,
    )


@cute.jit
def quantize_tokens(config: cutlass.Constexpr, operands, result, values, staged, feature, first, tile, limit):
    """Compute outputs two tokens at a time; the block's scale by a reduction over its lanes, codes by pairs of
    lanes."""
    out_scale = operands.out_scale[tile.expert]
    for token in cutlass.range_constexpr(0, cute.size(values), 2):
        output = paired_output(config, values, token, feature.upper, limit)
        amax = absolute(output)
        for distance in BLOCK_LANES:
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, distance), nan=True)
        code, divisor = block_scale(amax, out_scale)
        mine = quantize_lane(output, divisor)
        both = mine | cute.arch.shuffle_sync_bfly(mine, 1) << CODE_BITS
        own = first + token + Int32(feature.upper)
        if feature.place % 2 == 0:
            staged[feature.place // 2, own] = Uint8(both)
        valid = Boolean(feature.place == 0) & (own < tile.rows)
        write_scale(result, valid, tile.atom, tile.atom_row + own, feature.column // NVFP4_BLOCK, code)


def staged_values(config, staging, warp) -> cute.Tensor:
    """This warp's staging as outputs (OUTPUT, TOKEN), or, if they are quantised, as bytes of two outputs each."""
    dtype = Uint8 if config.quantizes else BFloat16
    words = warp_staging(config, staging, warp, config.vector_words)
    size = dtype.width // 8
    layout = cute.make_layout(
        (config.staging_pitch // size, config.staging_tokens), stride=(1, config.staging_pitch // size)
    )
    return cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), layout)


def paired_output(config, values, token: int, upper, limit) -> Float32:
    """The output of this lane's pair of features, gate and up, one of which another lane holds.

    The lower lanes compute that of ``token``, the upper lanes that of the next token.
    """
    first, second = values[token], values[token + 1]
    sent = Float32(cutlass.select_(upper, first, second))
    received = cute.arch.shuffle_sync_bfly(sent, INTERLEAVE)
    gate = Float32(cutlass.select_(upper, received, first))
    up = Float32(cutlass.select_(upper, second, received))
    return gated(config, gate, up, limit)
