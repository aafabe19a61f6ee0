"""The order in which CTAs take the key tiles of packed requests, and how long the pieces of key tiles are."""

from __future__ import annotations

import operator

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward import pieces
from warpspec.fmha.backward.device.blocks import FAR
from warpspec.fmha.backward.device.lengths import Deal, dealt_length, length_of_lane, parts_of
from warpspec.fmha.backward.device.tile import key_tiles_of, load_of
from warpspec.fmha.backward.lengths import LEAST_STEPS, MOST_TILES
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
    launch share the work, each warp some tiles. If there are few, a CTA first finds the steps of all.

    Where the device cuts tiles, it sorts pieces, and ``tile_pieces`` says which belong to a tile. A tile has just
    enough pieces that none is longer than was chosen.

    If dQ's order is fixed, a key tile waits for the tiles of its request with earlier keys, so all their pieces must
    come first: ``load_of`` then gives no tile more weight than an earlier one of its request.
    """
    tiles, place = key_tiles_of(config, operands), (cta, ctas, warps)
    can_find = not (config.deterministic or config.heads_inside)
    if cta * warps < tiles:
        if can_find and tiles <= MOST_TILES:
            smem = cutlass.memory.SmemAllocator()
            steps = smem.allocate_tensor(Int32, cute.make_layout(MOST_TILES), byte_alignment=16)
            sums = find_steps(config, operands, window, slices, steps, smem, warps)
            most, whole = Int32(FAR), Int32(0)
            if cutlass.const_expr(config.cuts_on_device):
                deal = Deal.allocate(smem)
                if sums[0].to(Float32) * length.share >= LEAST_STEPS:
                    rows = operands.k.shape[2] * slices if config.slices else operands.k.shape[2]
                    most, whole = dealt_length(deal, steps, tiles, length, rows, sums)
                else:
                    most = most_steps(config, operands, window, length, slices, steps)
            sort_pieces(config, operands, window, (most, slices), whole, place, steps)
        else:
            most = most_steps(config, operands, window, length, slices)
            sort_pieces(config, operands, window, (most, slices), Int32(0), place)


@cute.jit
def find_steps(
    config: cutlass.Constexpr, operands, window, slices, steps: cute.Tensor, smem, warps: cutlass.Constexpr
) -> tuple:
    """Write the steps of all key tiles into shared memory. Returns (their sum, the most). Called by a whole CTA."""
    thread, _, _ = cute.arch.thread_idx()
    totals = smem.allocate_tensor(Int32, cute.make_layout(2 * warps), byte_alignment=16)
    total, most = Int32(0), Int32(0)
    for tile in cutlass.range(thread, key_tiles_of(config, operands), warps * WARP_THREADS, unroll=1):
        _, its, _ = load_of(config, operands, window, tile, (Int32(FAR), slices))
        steps[tile] = its
        total += its
        most = cutlass.max(most, its)
    total, most = cute.arch.warp_reduction(total, operator.add), cute.arch.warp_reduction(most, cutlass.max)
    if thread % WARP_THREADS == 0:
        totals[thread // WARP_THREADS * 2] = total
        totals[thread // WARP_THREADS * 2 + 1] = most
    cute.arch.sync_threads()
    total, most = totals[0], totals[1]
    for i in cutlass.range_constexpr(1, warps):
        total += totals[2 * i]
        most = cutlass.max(most, totals[2 * i + 1])
    return total, cutlass.max(most, 1)


@cute.jit
def sort_pieces(
    config: cutlass.Constexpr,
    operands,
    window,
    limits: cutlass.Constexpr,
    whole,
    place: cutlass.Constexpr,
    steps: cutlass.Constexpr = None,
):
    """Sort pieces, and whole tiles if some rows' may be whole. limits: (most steps of a piece, slices). whole: rows
    whose tiles are whole. place: (this CTA, CTAs, their warps). steps: of all tiles, if they have been found."""
    thread, _, _ = cute.arch.thread_idx()
    cta, ctas, warps = place
    tiles, lane, most = key_tiles_of(config, operands), thread % WARP_THREADS, limits[0]
    first_piece = tiles if config.cuts_last_rows else 0  # whole tiles come before
    for tile in cutlass.range(cta * warps + thread // WARP_THREADS, tiles, ctas * warps, unroll=1):
        own, own_steps, own_pieces = load_at(config, operands, window, tile, limits, steps)
        before, before_whole, all_pieces = (Int32(0),) * 3
        for other in cutlass.range(lane, tiles, WARP_THREADS, unroll=1):
            its, its_steps, its_pieces = load_at(config, operands, window, other, limits, steps)
            first_of_both = Boolean(its > own) | (Boolean(its == own) & Boolean(other < tile))
            before += Int32(cutlass.select_(first_of_both, its_pieces, Int32(0)))
            longer = Boolean(its_steps > own_steps) | (
                Boolean(its_steps == own_steps) & Boolean(other < tile)
            )
            before_whole += Int32(longer)
            all_pieces += its_pieces
        before, before_whole, all_pieces = (
            cute.arch.warp_reduction(each, operator.add) for each in (before, before_whole, all_pieces)
        )
        request, number = find_request(operands.cu_seqlens_k, tile, config.tile_n, operands.k.shape[1])
        for piece in cutlass.range(lane, own_pieces, WARP_THREADS, unroll=1):
            row = (tile, request, number, piece, own_pieces, most)
            for i, value in enumerate(row):
                operands.tile_order[first_piece + before + piece, i] = value
        if lane == 0:
            if cutlass.const_expr(config.cuts_last_rows):
                for i, value in enumerate((tile, request, number, 0, 1, FAR)):
                    operands.tile_order[before_whole, i] = value
            if cutlass.const_expr(config.cuts_on_device):
                operands.tile_pieces[tile, 0] = before
                operands.tile_pieces[tile, 1] = own_pieces
            if tile == 0:
                operands.tile_order[operands.tile_order.shape[0] - 1, 0] = all_pieces
                operands.tile_order[operands.tile_order.shape[0] - 1, 1] = whole


@cute.jit
def load_at(
    config: cutlass.Constexpr, operands, window, tile, limits: cutlass.Constexpr, steps: cutlass.Constexpr
) -> tuple:
    """``load_of`` of a key tile. steps: of all tiles, or None."""
    if cutlass.const_expr(steps is None):
        weight, its, parts = load_of(config, operands, window, tile, limits)
    else:
        its = steps[tile]
        weight, parts = its, Int32(1)
        if cutlass.const_expr(config.cuts_on_device):
            # As ``lengths.count_pieces`` counts them, so that there is room for all.
            parts = parts_of(its.to(Float32), limits[0].to(Float32))
            weight = (its + parts - 1) // parts
    return weight, its, parts


@cute.jit
def most_steps(
    config: cutlass.Constexpr,
    operands,
    window,
    length: cutlass.Constexpr,
    slices,
    steps: cutlass.Constexpr = None,
) -> Int32:
    """Steps of the longest piece: by the formula of ``pieces`` the best of those that it considers, but enough that
    pieces do not outnumber the places. steps: of all tiles, if they have been found. Called by a whole warp, a lane for
    each length."""
    tiles, lane = key_tiles_of(config, operands), cute.arch.lane_idx()
    total, most, whole = Int32(0), Int32(0), (Int32(FAR), slices)
    if cutlass.const_expr(config.cuts_on_device):
        for tile in cutlass.range(lane, tiles, WARP_THREADS, unroll=1):
            _, its, _ = load_at(config, operands, window, tile, whole, steps)
            total += its
            most = cutlass.max(most, its)
        total = cute.arch.warp_reduction(total, operator.add)
        most = cutlass.max(cute.arch.warp_reduction(most, cutlass.max), 1)
        own = length_of_lane(length, total, most, lane)
        limit, count, cut, long, long_steps, longest = own.to(Float32), *(Float32(0.0),) * 5
        inverse = cute.arch.rcp_approx(limit)
        for first in cutlass.range(0, tiles, WARP_THREADS, unroll=1):
            last = cutlass.min(first + lane, tiles - 1)
            _, held, _ = load_at(config, operands, window, last, whole, steps)
            for i in cutlass.range(cutlass.min(tiles - first, WARP_THREADS), unroll=4):
                its = cute.arch.shuffle_sync(held, i).to(Float32)
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
        most = cutlass.max(chosen, least_length(config, operands, length, total))
    else:
        most = Int32(FAR)
    return most


def least_length(config, operands, length, total) -> Int32:
    """Steps of the longest piece with which pieces do not outnumber the places."""
    tiles = key_tiles_of(config, operands)
    least = 2 * tiles if config.heads_inside and config.ends_early else tiles
    further = operands.tile_order.shape[0] - 1 - least
    if cutlass.const_expr(config.cuts_last_rows):
        further = Int32(length.further)
    further = cutlass.max(further, 1)
    return (total + further - 1) // further
