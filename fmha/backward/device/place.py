"""Which key tile, or piece of one, a CTA works on."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.device.warp import running_sum
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward.device.blocks import FAR, key_block_of, ordered_tile
from warpspec.fmha.backward.device.runs import find_run, slot_of
from warpspec.fmha.backward.device.tile import KeyTile, key_tile, key_tiles_of, load_of, own_group
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.lists import heads_of
from warpspec.fmha.backward.operands import (
    MOST,
    NUMBER,
    PIECE,
    PIECES,
    PLACE_NUMBERS,
    REQUEST,
    TILE,
)
from warpspec.fmha.backward.runs import FIRST_CTA
from warpspec.fmha.backward.schedule import decode
from warpspec.fmha.device.grid import requests_of


def own_tile(config: BackwardKernel, operands, window, order) -> KeyTile:
    """The key tile, or piece, that this CTA works on. Called by a whole warp."""
    index, _, _ = cute.arch.block_idx()
    return key_tile_at(config, operands, window, order, index // config.column_groups)


def places_of(config: BackwardKernel, operands, pieces):
    """Number of places in each row's CTA order, if its key tiles are cut. pieces: the launch's number."""
    if cutlass.const_expr(config.cuts_on_device):
        return operands.tile_order.shape[0] - 1
    if cutlass.const_expr(config.cuts_by_length):
        return pieces
    return key_tiles_of(config, operands) * pieces


def ctas_of(config: BackwardKernel, operands, pieces, slices, whole):
    """CTAs of a launch, if those that share a key tile count as one. pieces, slices, whole: the launch's numbers."""
    rows = operands.k.shape[2] * (slices if config.slices else 1)
    if cutlass.const_expr(config.keeps_requests or config.cuts_last_rows):
        return key_tiles_of(config, operands) * rows + pieces
    rows *= requests_of(config.requests, operands) if not config.requests.packed_k else 1
    ctas = places_of(config, operands, pieces) * rows
    if cutlass.const_expr(config.cuts_on_host):
        ctas -= (places_of(config, operands, pieces) - key_tiles_of(config, operands)) * whole
    return ctas


def key_tile_at(config: BackwardKernel, operands, window, order, index) -> KeyTile:
    """The key tile, or piece, of the index-th CTA of the launch. order: (pieces, rows of a section, most steps of a
    piece, slices, rows that are not cut), see ``operands.BackwardNumbers``. Called by a whole warp."""
    if cutlass.const_expr(config.keeps_requests):
        return run_tile_at(config, operands, window, order, index)
    if cutlass.const_expr(config.requests.packed_k):
        return packed_tile_at(config, operands, window, order, index)
    tiles, heads = key_tiles_of(config, operands), operands.k.shape[2]
    pieces, section, most, slices, whole = order
    first_row, first = Int32(0), whole * tiles  # CTA of the first row that is cut
    if cutlass.const_expr(config.cuts_by_length):
        tiles, pieces = places_of(config, operands, pieces), 1
    if cutlass.const_expr(config.cuts_on_host):
        cut = Boolean(index >= first)
        tiles = Int32(cutlass.select_(cut, tiles, key_tiles_of(config, operands)))
        most = Int32(cutlass.select_(cut, most, Int32(FAR)))
        first_row = Int32(cutlass.select_(cut, whole, Int32(0)))
        index -= Int32(cutlass.select_(cut, first, Int32(0)))
    rows = heads * requests_of(config.requests, operands)
    part = Int32(0)
    if cutlass.const_expr(config.slices):
        rows *= slices
    number, rest, piece = decode(tiles, rows - first_row, pieces, section, index, minimum=cutlass.min)
    rest += first_row
    if cutlass.const_expr(config.slices):
        rest, part = rest // slices, rest % slices
    kv_head, request = rest % heads, rest // heads
    query_heads = heads_of_slice(config, operands, part, slices)
    if cutlass.const_expr(config.mask.has_blocks):
        group = operands.q.shape[2] // heads
        number = ordered_tile(config, operands, request, kv_head * group, tiles, number)
        if cutlass.const_expr(config.slices):
            query_heads = listed_heads(
                config, operands, (request, number), kv_head * group, (part, slices, most)
            )
            pieces = Int32(Boolean(query_heads[1] > 0))
    tile_index = request * tiles + number
    sums_place = (kv_head, tile_index, piece)
    if cutlass.const_expr(config.cuts_by_length):
        sums_place = (kv_head, request * places_of(config, operands, order[0]) + number, 0)
        number, piece, pieces = find_piece(config, operands, window, (most, slices), number)
        tile_index = request * key_tiles_of(config, operands) + number
        if cutlass.const_expr(not config.slices):
            notes = Boolean(most != FAR) & Boolean(kv_head == heads - 1) & Boolean(piece == 0)
            note_pieces(config, operands, tile_index, sums_place[1], pieces, notes)
    if cutlass.const_expr(config.slices):
        sums_place = (kv_head, tile_index, 0)
    own, cut = (request, number), (piece, pieces, most)
    return key_tile(config, operands, window, own, kv_head, cut, sums_place, query_heads)


def heads_of_slice(config: BackwardKernel, operands, part, slices) -> tuple | None:
    """(first, how many) of a KV head's query heads that a slice of them has; None: all, without slices."""
    if not config.slices:
        return None
    group = operands.q.shape[2] // operands.k.shape[2] // slices
    return part * group, group


def listed_heads(config: BackwardKernel, operands, own, first_head, cut) -> tuple:
    """(first, how many) of a KV head's query heads that a CTA has with lists of blocks: as few as a slice's in the
    longest tiles, more in others. So some CTAs have none.

    own: (batch row, key tile). first_head: the KV head's first query head, whose list stands for all of its heads'.
    cut: (number of the CTA among the tile's, slices, steps up to which a CTA has more heads).
    """
    request, number = own
    part, slices, most = cut
    group = operands.q.shape[2] // operands.k.shape[2]
    tiles_q = cute.ceil_div(operands.q.shape[1], config.tile_m)
    block = key_block_of(
        config, operands, request, number * config.tile_n, tiles_q, (first_head, first_head + group)
    )
    each = heads_of(block.tiles_of(first_head), group, slices, most, minimum=cutlass.min, maximum=cutlass.max)
    first = cutlass.min(part * each, group)
    return first, cutlass.min(each, group - first)


def packed_tile_at(config: BackwardKernel, operands, window, order, index) -> KeyTile:
    """``key_tile_at`` for packed requests, whose order the first kernel has made. CTAs without a piece come last."""
    _, section, _, slices, _ = order
    end = operands.tile_order.shape[0] - 1
    heads, places = operands.k.shape[2], operands.tile_order[end, 0]
    rows = heads * slices if config.slices else heads
    first_row, first_place = Int32(0), Int32(0)
    if cutlass.const_expr(config.cuts_last_rows):
        tiles, whole = key_tiles_of(config, operands), operands.tile_order[end, 1]
        cut = Boolean(index >= whole * tiles)
        index -= Int32(cutlass.select_(cut, whole * tiles, Int32(0)))
        rows = Int32(cutlass.select_(cut, rows - whole, whole))
        places = Int32(cutlass.select_(cut, places, tiles))
        first_row = Int32(cutlass.select_(cut, whole, Int32(0)))
        first_place = Int32(cutlass.select_(cut, tiles, Int32(0)))
    used = Boolean(index < places * rows)
    index = cutlass.min(index, places * rows - 1)
    place, rest, _ = decode(places, rows, 1, section, index, minimum=cutlass.min)
    rest += first_row
    tile_index, request, number, piece, pieces, most = (
        operands.tile_order[first_place + place, which]
        for which in (TILE, REQUEST, NUMBER, PIECE, PIECES, MOST)
    )
    pieces = Int32(cutlass.select_(used, pieces, Int32(0)))
    part, kv_head = (rest % slices, rest // slices) if config.slices else (Int32(0), rest)
    sums_place = (kv_head, place if config.cuts_on_device and not config.slices else tile_index, 0)
    if cutlass.const_expr(config.cuts_last_rows and not config.slices):
        sums_place = (Int32(0), (kv_head - first_row) * places + place, 0)
    own, cut = (request, number), (piece, pieces, most)
    query_heads = heads_of_slice(config, operands, part, slices)
    return key_tile(config, operands, window, own, kv_head, cut, sums_place, query_heads)


def run_tile_at(config: BackwardKernel, operands, window, order, index) -> KeyTile:
    """``key_tile_at`` for packed requests of which the first kernel has laid out the runs. CTAs without a piece come
    last: they have a key tile beyond the last."""
    table, slices, zero = operands.tile_order, order[3], Int32(0)
    used = Boolean(index < table[table.shape[0] - 1, 0])
    run = find_run(table, FIRST_CTA, index, zero, table[table.shape[0] - 1, 1])
    cta, request, tile, pieces, place, tiles = (table[run, which] for which in range(PLACE_NUMBERS))
    within = Int32(cutlass.select_(used, index - cta, zero))
    tiles, parts = cutlass.max(tiles, 1), cutlass.max(pieces, 1)
    tile += within // parts
    row, number = tile // tiles, Int32(cutlass.select_(used, tile % tiles, tiles))
    piece, pieces = within % parts, Int32(cutlass.select_(used, parts, zero))
    part, kv_head = (row % slices, row // slices) if config.slices else (zero, row)
    kv_head = cutlass.min(kv_head, operands.k.shape[2] - 1)
    sums_place = (zero, place + within, zero)
    if cutlass.const_expr(config.slices):
        sums_place = (kv_head, slot_of(config, operands, request, number), zero)
    cut, query_heads = (piece, pieces, Int32(1)), heads_of_slice(config, operands, part, slices)
    return key_tile(config, operands, window, (request, number), kv_head, cut, sums_place, query_heads)


@cute.jit
def find_piece(config: cutlass.Constexpr, operands, window, limits, place) -> tuple:
    """(key tile, piece, pieces of the tile) of a place of a row, where the host cuts by length. limits: (most steps of
    a piece, slices). Called by a whole warp."""
    tiles, lane = key_tiles_of(config, operands), cute.arch.lane_idx()
    number, piece, pieces, before = (Int32(0),) * 4
    first = Int32(0)
    while (pieces == 0) & (first < tiles):
        _, _, own = load_of(config, operands, window, cutlass.min(first + lane, tiles - 1), limits)
        own = Int32(cutlass.select_(Boolean(first + lane < tiles), own, Int32(0)))
        through = before + running_sum(own, lane)
        passed = cute.arch.popc(cute.arch.vote_ballot_sync(Boolean(through <= place)))
        source = cutlass.min(passed, WARP_THREADS - 1)
        its_pieces, its_through = (cute.arch.shuffle_sync(each, source) for each in (own, through))
        if passed < WARP_THREADS:
            number, pieces = first + passed, its_pieces
            piece = place - (its_through - its_pieces)
        before = its_through
        first += WARP_THREADS
    return number, piece, pieces


@cute.jit
def note_pieces(config: cutlass.Constexpr, operands, tile_index, place, pieces, notes):
    """Leave word of a tile's pieces for the kernel that adds them up. notes: whether this CTA does; one thread of one
    CTA of its cluster writes it."""
    thread, _, _ = cute.arch.thread_idx()
    if notes & Boolean(thread == 0) & Boolean(own_group(config) == 0):
        operands.tile_pieces[tile_index, 0] = place
        operands.tile_pieces[tile_index, 1] = pieces
