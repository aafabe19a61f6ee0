"""The end of a tile of rows whose KV tiles consumers' warps took in turn (``by_warp``): one warp merges their states.

The warps' O^T and statistics go through shared memory. A warp that is not the merger writes its own and begins its next
tile. ``lane`` is a ``by_warp.Lane``.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from warpspec.common.device.mma import MMA_COLUMNS
from warpspec.common.device.wgmma import PAIR, QUAD, flat
from warpspec.common.hardware import FP32_BYTES, WORD_BYTES
from warpspec.fmha.sm90.float8 import STATISTICS

OCTET = 8  # lanes with one t


@cute.jit
def merge(work, lane: cutlass.Constexpr, o, state, merger):
    """Merge the warps' O and states into the form that ``consumer.attend`` leaves: O of the tile's rows in
    ``work.mma.o``, and their state. Shared memory holds O of eight rows of each warp, ``WarpMerge.stages`` times.

    merger: the warp that gets them. The others begin their next tile meanwhile, so each has its turn.

    Produces: o_full, one arrival per warp; o_empty, one by the merger. Consumes: o_empty; the merger also o_full.
    """
    wide = flat(work.mma.o)
    wide.fill(0.0)
    rows = work.config.shape.row_tiles  # of a thread
    nothing = ((-Float32.inf,) * rows, (-Float32.inf,) * rows, (Float32(0.0),) * rows)
    found = nothing
    if work.span.count > 0:
        found = merged(work, lane, o, wide, state, merger)
    return found


@cute.jit
def merged(work, lane: cutlass.Constexpr, o, wide, state, merger):
    """``merge`` for a tile with keys."""
    config, channels, tiles = work.config, work.channels, work.config.shape.row_tiles
    rows = []
    for row_tile in cutlass.range_constexpr(tiles):
        use = work.q_use * tiles + row_tile
        stage = use % config.merge.stages * config.merge.rows
        states, partial = (
            work.shared.states + stage * STATISTICS,
            work.shared.partial + stage * config.merge.row,
        )
        channels["o_empty"].wait_previous(use)
        write_states(lane, states, row_tile, state)
        write_partial(lane, o, partial, row_tile)
        channels["o_full"].arrive_warp(use)
        found = (-Float32.inf, -Float32.inf, Float32(0.0))
        if lane.warp == merger:
            channels["o_full"].wait(use)
            found = read_partial(lane, partial, states, wide, row_tile)
            channels["o_empty"].arrive_warp(use)
        rows.append(found)
    references, maxima, sums = zip(*rows, strict=True)
    sums = tuple(Float32(cutlass.select_(Boolean(lane.t == 0), total, Float32(0.0))) for total in sums)
    return references, maxima, sums


@cute.jit
def write_states(lane: cutlass.Constexpr, states, row_tile: cutlass.Constexpr, state):
    """Write the warp's states of eight rows to shared memory, (STATISTICS) per row."""
    references, maxima, sums = state
    for e in cutlass.range_constexpr(PAIR):
        c = row_tile * PAIR + e
        total, highest = over_keys(sums[c], lambda a, b: a + b), over_keys(maxima[c], cute.arch.fmax)
        if lane.g == 0:
            at = (lane.warp * MMA_COLUMNS + PAIR * lane.t + e) * STATISTICS
            for i, value in enumerate((references[c], highest, total)):
                states[at + i] = value


@cute.jit
def write_partial(lane: cutlass.Constexpr, o, partial, row_tile: cutlass.Constexpr):
    """Write the warp's O of eight rows to shared memory, (D) per row."""
    config = lane.config
    for e in cutlass.range_constexpr(PAIR):
        row = (lane.warp * MMA_COLUMNS + PAIR * lane.t + e) * config.merge.row
        for span in cutlass.range_constexpr(lane.spans):
            for w in cutlass.range_constexpr(lane.vector):
                first = ((span * OCTET + lane.g) * lane.vector + w) * lane.codes.WORD
                for word in cutlass.range_constexpr(lane.codes.WORD // WORD_BYTES):
                    four = cute.make_rmem_tensor(WORD_BYTES, Float32)
                    for i in cutlass.range_constexpr(WORD_BYTES):
                        place = lane.codes.COLUMNS.index(word * WORD_BYTES + i)
                        at = (span * lane.vector + w) * lane.mmas + place // PAIR
                        four[i] = o[place % PAIR * PAIR + e, at, row_tile]
                    cute.autovec_copy(four, vector_at(partial, row + first + word * WORD_BYTES, WORD_BYTES))


@cute.jit
def read_partial(lane: cutlass.Constexpr, partial, states, wide, row_tile: cutlass.Constexpr) -> tuple:
    """Merge the warps' states of row g; the lanes t add up their O in ``wide``, in the layout of wgmma's fragment."""
    config, found = lane.config, []
    for warp in cutlass.range_constexpr(config.consumer_warps):
        at = (warp * MMA_COLUMNS + lane.g) * STATISTICS
        found.append(tuple(states[at + i] for i in range(STATISTICS)))
    reference, highest, total = found[0][0], found[0][1], Float32(0.0)
    for other in found[1:]:
        reference, highest = cute.arch.fmax(reference, other[0]), cute.arch.fmax(highest, other[1])
    factors = []
    for own, _, share in found:
        lag = own - reference
        factor = Float32(
            cutlass.select_(Boolean(own == -Float32.inf), Float32(0.0), cute.math.exp2(lag, fastmath=True))
        )
        factors.append(factor)
        total = total + share * factor
    for n in cutlass.range_constexpr(config.heads.qk // (QUAD * PAIR)):
        for warp in cutlass.range_constexpr(config.consumer_warps):
            at = (warp * MMA_COLUMNS + lane.g) * config.merge.row + n * QUAD * PAIR + PAIR * lane.t
            pair = cute.make_rmem_tensor(PAIR, Float32)
            cute.autovec_copy(vector_at(partial, at, PAIR), pair)
            for i in cutlass.range_constexpr(PAIR):
                to = (n * 2 + row_tile) * PAIR + i
                wide[to] = wide[to] + pair[i] * factors[warp]
    return reference, highest, total


def vector_at(memory: cute.Pointer, index, count: int) -> cute.Tensor:
    """(count): fp32 numbers of shared memory, aligned to as many."""
    pointer = (memory + index).align(count * FP32_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(count))


def over_keys(value, combine):
    """Reduce a query row's values over the eight lanes that share it."""
    for distance in (4, 8, 16):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
    return value
