"""The order in which CTAs take the key tiles of packed requests, and how long the pieces of key tiles are."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward import pieces
from warpspec.fmha.backward.device.blocks import FAR
from warpspec.fmha.backward.device.tile import key_tiles_of, load_of
from warpspec.fmha.device.packed import find_request


@cute.jit
def sort_key_tiles(
    config: cutlass.Constexpr,
    operands,
    window,
    length: cutlass.Constexpr,
    slices,
    cta,
    ctas,
    warps: cutlass.Constexpr,
):
    """Sort the key tiles of packed requests into ``tile_order``: the most steps first, ties in order. All CTAs of a
    launch share the work, each warp some tiles.

    Where the device cuts tiles, it sorts pieces, and ``tile_pieces`` says which belong to a tile. A tile has just
    enough pieces that none exceeds ``most_steps``.

    If dQ's order is fixed, a key tile waits for the tiles of its request with earlier keys, so all their pieces must
    come first: ``load_of`` then gives no tile more weight than an earlier one of its request.
    """
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    tiles = key_tiles_of(config, operands)
    first = cta * warps + warp
    if first < tiles:
        limits = (Int32(FAR), slices)
        if cutlass.const_expr(config.cuts_on_device):
            limits = (most_steps(config, operands, window, length, slices), slices)
        for tile in cutlass.range(first, tiles, ctas * warps, unroll=1):
            own, _, own_pieces = load_of(config, operands, window, tile, limits)
            before, all_pieces = (Int32(0),) * 2
            for other in cutlass.range(lane, tiles, WARP_THREADS, unroll=1):
                its, _, its_pieces = load_of(config, operands, window, other, limits)
                first_of_both = Boolean(its > own) | (Boolean(its == own) & Boolean(other < tile))
                before += Int32(cutlass.select_(first_of_both, its_pieces, Int32(0)))
                all_pieces += its_pieces
            before, all_pieces = (
                cute.arch.warp_reduction(each, operator.add) for each in (before, all_pieces)
            )
            request, number = find_request(operands.cu_seqlens_k, tile, config.tile_n, operands.k.shape[1])
            for piece in cutlass.range(lane, own_pieces, WARP_THREADS, unroll=1):
                row = (tile, request, number, piece, own_pieces, limits[0])
                for i, value in enumerate(row):
                    operands.tile_order[before + piece, i] = value
            if lane == 0:
                if cutlass.const_expr(config.cuts_on_device):
                    operands.tile_pieces[tile, 0] = before
                    operands.tile_pieces[tile, 1] = own_pieces
                if tile == 0:
                    operands.tile_order[operands.tile_order.shape[0] - 1, 0] = all_pieces


@cute.jit
def most_steps(config: cutlass.Constexpr, operands, window, length: cutlass.Constexpr, slices) -> Int32:
    """Steps of the longest piece: the best of those that ``pieces`` considers, but enough that pieces do not outnumber
    the places. Called by a whole warp, a lane for each."""
    tiles, lane = key_tiles_of(config, operands), cute.arch.lane_idx()
    total, most, whole = Int32(0), Int32(0), (Int32(FAR), slices)
    for tile in cutlass.range(lane, tiles, WARP_THREADS, unroll=1):
        _, steps, _ = load_of(config, operands, window, tile, whole)
        total += steps
        most = cutlass.max(most, steps)
    total = cute.arch.warp_reduction(total, operator.add)
    most = cutlass.max(cute.arch.warp_reduction(most, cutlass.max), 1)
    own = Int32(pieces.limit_of(length, total.to(Float32), lane.to(Float32), exp2=cute.math.exp2)) + 1
    own = cutlass.max(own, lane + 1)
    own = Int32(cutlass.select_(Boolean(lane == pieces.LENGTHS - 1), most, cutlass.min(own, most)))
    limit, count, cut, long, long_steps, longest = own.to(Float32), *(Float32(0.0),) * 5
    inverse = cute.arch.rcp_approx(limit)
    for first in cutlass.range(0, tiles, WARP_THREADS, unroll=1):
        _, steps, _ = load_of(config, operands, window, cutlass.min(first + lane, tiles - 1), whole)
        for i in cutlass.range(cutlass.min(tiles - first, WARP_THREADS), unroll=4):
            its = cute.arch.shuffle_sync(steps, i).to(Float32)
            own_pieces = cute.arch.fmax(cute.math.ceil(its * inverse - pieces.NEARLY), 1.0)
            size = its * cute.arch.rcp_approx(own_pieces)
            zero = Float32(0.0)
            count += own_pieces
            cut += cutlass.select_(Boolean(own_pieces > 1.0), own_pieces, zero)
            is_long = Boolean(size >= limit * pieces.LONG)
            long += cutlass.select_(is_long, own_pieces, zero)
            long_steps += cutlass.select_(is_long, its, zero)
            longest = cute.arch.fmax(longest, size)
    load = pieces.Load(count, cut, long, long_steps, longest)
    extremes = {"maximum": cute.arch.fmax, "minimum": cute.arch.fmin, "ceil": cute.math.ceil}
    tail = pieces.ORDERED_TAIL if cutlass.const_expr(config.deterministic) else pieces.TAIL
    expected = pieces.expected_steps(length, total.to(Float32), load, tail, **extremes)
    best = cute.arch.warp_reduction(expected, cute.arch.fmin)
    chosen = Int32(cutlass.select_(Boolean(expected == best), own, Int32(0)))
    chosen = cute.arch.warp_reduction(chosen, cutlass.max)
    least = 2 * tiles if cutlass.const_expr(config.heads_inside and config.ends_early) else tiles
    further = cutlass.max(operands.tile_order.shape[0] - 1 - least, 1)
    return cutlass.max(chosen, (total + further - 1) // further)
