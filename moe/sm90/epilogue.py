"""Turn sums into results: global scales, biases, activation; store pairs of adjacent features as one word.

A thread has rows g and g + 8 of its warp's 16 features, and tokens 2 q and 2 q + 1 of every 8. Gate and up alternate by
8 rows, so the two rows of a thread are a gate and its up.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from warpspec.common.device.wgmma import COLUMNS, PAIR
from warpspec.common.hardware import (
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    WARP_THREADS,
    WARPGROUP_ROWS,
)
from warpspec.moe.gate import gated
from warpspec.moe.sm90.tiles import StreamOperands, StreamTile
from warpspec.moe.streamed import CODE_POWER
from warpspec.moe.weights import GATE, UP


class Terms(NamedTuple):
    """Factors and biases of a thread's two rows."""

    scales: tuple
    biases: tuple


def terms_of(config, ops: StreamOperands, tile: StreamTile, group, thread) -> Terms:
    """Load the thread's terms; called before the products, which hide the latency."""
    last = UP if config.gated else GATE
    scales = tuple(
        ops.global_scale[tile.expert, column] * Float32(2.0**CODE_POWER) for column in (GATE, last)
    )
    biases = (Float32(0.0),) * THREAD_ROWS
    if config.has_bias:
        biases = bias_of(ops, tile.expert, first_row(tile, group, thread))
    return Terms(scales, biases)


@cute.jit
def bias_of(ops, expert, row) -> tuple:
    """Biases of a thread's two rows; 0 past the last."""
    found = []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        value = Float32(0.0)
        if row + r * ROW_DISTANCE < ops.bias.shape[1]:
            value = Float32(ops.bias[expert, row + r * ROW_DISTANCE])
        found.append(value)
    return tuple(found)


def first_row(tile: StreamTile, group, thread) -> Int32:
    """The thread's first row of the weights."""
    row = (tile.row_tile + group) * WARPGROUP_ROWS + thread // WARP_THREADS * WARP_ROWS
    return row + thread % WARP_THREADS // QUAD


@cute.jit
def store(
    config: cutlass.Constexpr, width: cutlass.Constexpr, ops, tile, group, thread, sums: cute.Tensor, terms
):
    """Store the results of a tile of at most ``width`` tokens. sums (n): the fragment's registers."""
    row = first_row(tile, group, thread)
    member = thread % QUAD
    odd = Boolean(thread // QUAD % 2 == 1)
    for block in cutlass.range_constexpr(width // COLUMNS):
        if block * COLUMNS < tile.count:
            token = block * COLUMNS + member * PAIR + Int32(odd)
            values = cute.make_rmem_tensor((PAIR, THREAD_ROWS), Float32)
            factors = token_scales(config, ops, tile, block * COLUMNS + member * PAIR)
            for r in cutlass.range_constexpr(THREAD_ROWS):
                for j in cutlass.range_constexpr(PAIR):
                    i = (block * THREAD_ROWS + r) * PAIR + j
                    scale = terms.scales[r] * factors[j] if config.keeps_fp32 else terms.scales[r]
                    values[j, r] = cute.math.fma(sums[i], scale, terms.biases[r])
            if cutlass.const_expr(config.gated):
                results = [(gated(config, values[j, 0], values[j, 1], ops.limit)) for j in range(PAIR)]
                # the warp's 8 features: its rows without those of up
                feature = row // WARP_ROWS * ROW_DISTANCE + row % ROW_DISTANCE
                store_pair(config, ops, tile, feature, token, odd, results)
            else:
                for r in cutlass.range_constexpr(THREAD_ROWS):
                    results = [values[j, r] for j in range(PAIR)]
                    store_pair(config, ops, tile, row + r * ROW_DISTANCE, token, odd, results)


@cute.jit
def token_scales(config: cutlass.Constexpr, ops, tile, token) -> tuple:
    """Scales of ``token`` and of the next one, if the configuration rounds; 0 past the tile's last."""
    found = []
    if cutlass.const_expr(config.keeps_fp32):
        for j in cutlass.range_constexpr(PAIR):
            scale = Float32(0.0)
            if token + j < tile.count:
                scale = Float32(ops.row_scale[Int32(ops.source[tile.first + token + j]) // config.choices])
            found.append(scale)
    return tuple(found)


@cute.jit
def store_pair(config: cutlass.Constexpr, ops, tile, feature, token, odd, results: cutlass.Constexpr):
    """Exchange between threads of adjacent features (even and odd g), so that each stores both features of one
    token."""
    low, high = results
    got = cute.arch.shuffle_sync_bfly(Float32(cutlass.select_(odd, low, high)), QUAD)
    kept = Float32 if config.keeps_fp32 else BFloat16
    pair = cute.make_rmem_tensor(PAIR, kept)
    pair[0] = Float32(cutlass.select_(odd, got, low)).to(kept)
    pair[1] = Float32(cutlass.select_(odd, high, got)).to(kept)
    column = feature - feature % 2
    if (token < tile.count) & (column < ops.out.shape[1]):
        target = ops.out[tile.first + token, None]
        cute.autovec_copy(pair, cute.local_tile(target, (PAIR,), (column // PAIR,)))
