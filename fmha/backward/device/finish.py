"""The last CTAs of a main kernel make dQ from its sums, and dK and dV from the sums of cut key tiles.

While the last key tiles are at work, most SMs have none left. A kernel of its own would have to wait for all of them;
these CTAs come after all others in the same launch, begin on the SMs that are free, and make the gradients of each
*row*, a KV head of a batch row, as soon as it is done: each CTA with a key tile, or a piece of one, counts itself
(``report``) when all that it adds is there. CTAs begin in order, so that whoever is waited for has begun.

Each warp takes *items* from a counter: its share of UNITS query tiles of a row, whose loads are in flight together, or
of a key tile. Where key tiles are cut, it takes the next one while it makes one.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.backward.device.load import wait_before
from warpspec.fmha.backward.device.place import places_of
from warpspec.fmha.backward.device.results import (
    VECTOR,
    VECTORS,
    add_shares,
    end_of,
    pieces_at,
    store_share,
    tile_of,
    write_tile,
)
from warpspec.fmha.backward.device.tile import key_tiles_of
from warpspec.fmha.backward.device.turns import end_turn
from warpspec.fmha.backward.features import KEY_ELEMENTS, UNITS
from warpspec.fmha.device.grid import requests_of

KEY_VECTORS = KEY_ELEMENTS // (WARP_THREADS * VECTOR)  # of a thread of dK and dV
POLL_NS = 300  # between two looks at a row that is not done


@cute.jit
def report(work):
    """Count this CTA among those of its row that are done. Every thread of it has added what it adds."""
    cute.arch.sync_threads()
    if work.index == 0:
        row = work.tile.request * work.operands.k.shape[2] + work.tile.kv_head
        end_turn(work.operands.done.iterator + row)


class Items(NamedTuple):
    """How the items are numbered. rows: of all. first: rows that come first, whose key tiles are whole. queries, keys:
    items of a row's dQ, and of its dK and dV. query_tiles: of a head."""

    rows: Int32
    first: Int32
    queries: Int32
    keys: Int32
    query_tiles: Int32

    @classmethod
    def of(cls, config, operands, whole) -> Items:
        heads = operands.k.shape[2]
        group, query_tiles = operands.q.shape[2] // heads, cute.ceil_div(operands.q.shape[1], config.tile_m)
        gradients = key_gradients(config, operands, Float32(1.0))
        return cls(
            heads * requests_of(config.requests, operands),
            whole if config.cuts_on_host else Int32(0),
            cute.ceil_div(group * query_tiles, UNITS) * config.query_shares,
            key_tiles_of(config, operands) * config.key_shares * len(gradients),
            query_tiles,
        )

    @property
    def count(self):
        return self.rows * self.queries + (self.rows - self.first) * self.keys

    def place_of(self, item) -> tuple:
        """(row, number in the row) of an item."""
        ahead = self.first * self.queries
        early, each = Boolean(item < ahead), self.queries + self.keys
        row = cutlass.select_(early, item // self.queries, self.first + (item - ahead) // each)
        return Int32(row), Int32(cutlass.select_(early, item % self.queries, (item - ahead) % each))


def key_gradients(config, operands, scale) -> list[tuple]:
    """(sums, sums that are added to them without the factor or None, gradient, factor) of dK and dV, where cut key
    tiles leave sums."""
    dk_sums, dv_sums = operands.dk_sums, operands.dv_sums
    joins, found = config.wanted.joins_keys, []
    if config.leaves_k:
        found.append((dk_sums, dv_sums if joins else None, operands.dk, scale))
    if config.leaves_v and not joins:
        found.append((dv_sums, None, operands.dv, Float32(1.0)))
    return found


@cute.jit
def finish(config: cutlass.Constexpr, operands, scale, order):
    """Run a CTA that makes gradients from sums. order: the launch's (``place.key_tile_at``)."""
    wait_before(config)
    items, lane, heads = Items.of(config, operands, order[4]), cute.arch.lane_idx(), operands.k.shape[2]
    item = cute.arch.shuffle_sync(take_item(operands, items.rows, lane), 0)
    while item < items.count:
        following = Int32(0)
        if cutlass.const_expr(config.cut):
            following = take_item(operands, items.rows, lane)  # arrives while this one is made
        row, number = items.place_of(item)
        rows = (row,)
        if cutlass.const_expr(config.cuts_on_host):  # the last head's CTAs leave notes of pieces
            noted = row // heads * heads + heads - 1
            rows = (row, Int32(cutlass.select_(Boolean(number < items.queries), row, noted)))
        wait_rows(config, operands, order, rows, lane)
        if number < items.queries:
            finish_queries(config, operands, scale, items, row, number)
        else:
            finish_keys(config, operands, scale, items, row, number - items.queries)
        if cutlass.const_expr(not config.cut):
            following = take_item(operands, items.rows, lane)
        item = cute.arch.shuffle_sync(following, 0)


@cute.jit
def take_item(operands, rows, lane) -> Int32:
    """Take an item for this warp; its number is lane 0's."""
    item = Int32(0)
    if lane == 0:
        item = cute.arch.atomic_add(operands.done.iterator + rows, Int32(1), sem="relaxed", scope="gpu")
    return item


@cute.jit
def wait_rows(config: cutlass.Constexpr, operands, order: cutlass.Constexpr, rows: cutlass.Constexpr, lane):
    """Wait until all CTAs of one or two rows have reported: a lane looks at each."""
    pieces, *_, whole = order
    row = rows[0] if len(rows) == 1 else Int32(cutlass.select_(Boolean(lane == 0), *rows))
    expected = places_of(config, operands, pieces)
    if cutlass.const_expr(config.cuts_on_host):
        tiles = key_tiles_of(config, operands)
        expected = Int32(cutlass.select_(Boolean(row < whole), tiles, expected))
    if lane < len(rows):
        seen = cute.arch.load(operands.done.iterator + row, Int32, sem="acquire", scope="gpu")
        while seen < expected:
            cute.arch.inline_ptx(f"nanosleep.u32 {POLL_NS};")
            seen = cute.arch.load(operands.done.iterator + row, Int32, sem="acquire", scope="gpu")
    cute.arch.sync_warp()


@cute.jit
def finish_queries(config: cutlass.Constexpr, operands, scale, items: cutlass.Constexpr, row, number):
    """Write an item of dQ."""
    heads = operands.k.shape[2]
    group, request, kv_head = operands.q.shape[2] // heads, row // heads, row % heads
    share, first = number % config.query_shares, number // config.query_shares * UNITS
    found = []
    for i in cutlass.range_constexpr(UNITS):
        unit = cutlass.min(first + i, group * items.query_tiles - 1)
        head, tile = kv_head * group + unit // items.query_tiles, unit % items.query_tiles
        values = cute.make_rmem_tensor(VECTORS * VECTOR, Float32)
        sums = operands.dq_sums[head, request * items.query_tiles + tile, None]
        add_shares(((sums, 1), None), share, scale, values, end_of(config, operands.dq, share, VECTORS))
        found.append((head, tile, values))
    for head, tile, values in found:  # a tile that was clamped to the last is written more than once
        place = (request, tile * config.tile_m, Int32(0), operands.q.shape[1])
        store_share(config, place, operands.dq, head, share, VECTORS, values)


@cute.jit
def finish_keys(config: cutlass.Constexpr, operands, scale, items: cutlass.Constexpr, row, number):
    """Write an item of dK or dV."""
    heads, tiles = operands.k.shape[2], key_tiles_of(config, operands)
    request, kv_head = row // heads, row % heads
    each, gradients = tiles * config.key_shares, key_gradients(config, operands, scale)
    tile, share = number % each // config.key_shares, number % config.key_shares
    index = request * tiles + tile
    place = (request, tile * config.tile_n, Int32(0), operands.k.shape[1])
    for i in cutlass.range_constexpr(len(gradients)):
        sums, more, target, factor = gradients[i]
        if number // each == i:
            if cutlass.const_expr(config.cuts_on_host):
                first, pieces = operands.tile_pieces[index, 0], operands.tile_pieces[index, 1]
                if pieces > 1:
                    both = tuple(pieces_at(t, kv_head, first, pieces) for t in (sums, more))
                    write_tile(config, both, place, target, kv_head, share, KEY_VECTORS, factor)
            else:
                both = tuple(tile_of(t, kv_head, index) for t in (sums, more))
                write_tile(config, both, place, target, kv_head, share, KEY_VECTORS, factor)
