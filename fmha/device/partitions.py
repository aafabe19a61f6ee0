"""Partitions of the keys of unequal requests, which CTAs take from a queue.

If only the device knows the lengths of keys, equal splits of every request would be long for some requests and short
for others. Here all partitions have the same length, in KV tiles: the longest request has as many as there are splits,
or fewer if they would be shorter than LEAST_PARTITION, and others have fewer. Partition number s of a request is its
split s in the workspace; the CTA with the last partition says of the splits after it that they saw no key.

If all requests have equally many KV tiles, each is one partition where whole ones fill most of one round of CTAs
(``schedule.stay_whole``): the host's number of splits suits unequal lengths. So the bits of such calls depend on the
number of CTAs.

A request has one query tile. Its partition 0 may be shorter than the others. CTAs take the partitions with the highest
numbers first, so that all short partitions come last (``device.longest``, where a partition is a query tile). Which CTA
computes a partition does not change it. If a packed request has more queries than the host was told, its query tiles
stand for partitions, each with all of its keys as split 0; its word has a level more than partitions, which tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.device.grid import heads_of_tiles, requests_of
from warpspec.fmha.device.longest import HALF_BITS, Order, level_of, nth_longest
from warpspec.fmha.device.request import request_at
from warpspec.fmha.device.tile import INTEGERS, positions_of, tile_of
from warpspec.fmha.schedule import LEAST_PARTITION, SORTED_REQUESTS, key_span, stay_whole


@dataclass(frozen=True)
class Partitions:
    """order: the order of the partitions. size: KV tiles of a partition. heads: (KV head, head tile) pairs of a
    request."""

    order: Order
    size: Int32
    heads: Int32

    @property
    def count(self) -> Int32:
        """Partitions of all requests and heads."""
        return self.order.tiles * self.heads


def partitions_of(config, operands, where, words: cute.Tensor) -> Partitions:
    """The partitions of a call; writes the words of their order. Called by a whole warp. where: ``grid.Where``."""
    size, highest, partitions = write_words(config, operands, where, words)
    requests = Int32(requests_of(config.requests, operands))
    order = Order(words, requests, highest, partitions, Boolean(True))
    return Partitions(order, size, where.grid.head_tiles * heads_of_tiles(config, operands))


@cute.jit
def write_words(config: cutlass.Constexpr, operands, where, words: cute.Tensor) -> tuple:
    """(KV tiles of a partition, the highest number of a partition, partitions of all requests). Called by a whole
    warp."""
    requests, lane = Int32(requests_of(config.requests, operands)), cute.arch.lane_idx()
    longest, highest, partitions = Int32(1), Int32(0), Int32(0)
    for first in cutlass.range(0, cutlass.min(requests, SORTED_REQUESTS), WARP_THREADS, unroll=1):
        found = request_at(config.requests, operands, cutlass.min(first + lane, requests - 1))
        positions = positions_of(config, found.start, 0, cutlass.min(config.rows.queries, found.seq_q) - 1)
        span = key_span(*positions, found.length, config.tile_n, config.mask.bounds(where.window), **INTEGERS)
        tiles = (found.seq_q + config.rows.queries - 1) // config.rows.queries
        some = Boolean(first + lane < requests) & Boolean(tiles > 0)
        count = Int32(cutlass.select_(Boolean(tiles > 1), -tiles, span.count))
        count = Int32(cutlass.select_(some, count, Int32(-1)))  # without queries there is no partition
        words[first + lane] = count
        longest = cutlass.max(longest, count)
    longest = Int32(cute.arch.warp_redux_sync(longest, "max"))
    size = cutlass.max((longest + where.grid.splits - 1) // where.grid.splits, LEAST_PARTITION)
    ctas, _, _ = cute.arch.grid_dim()
    tiles = requests * where.grid.head_tiles * heads_of_tiles(config, operands)
    if stay_whole(tiles, where.grid.splits, ctas) & are_equal(words, requests, longest):
        size = longest
    for first in cutlass.range(0, cutlass.min(requests, SORTED_REQUESTS), WARP_THREADS, unroll=1):
        count = words[first + lane]
        own = cutlass.max((count + size - 1) // size, 1)
        own = Int32(cutlass.select_(Boolean(count >= 0), own, cutlass.max(-count, 1)))
        top = Int32(cutlass.select_(Boolean(count < -1), own, own - 1))
        own = Int32(cutlass.select_(Boolean(count == -1), Int32(0), own))
        words[first + lane] = (top << HALF_BITS) | own
        highest, partitions = cutlass.max(highest, top), partitions + own
    cute.arch.sync_warp()
    highest = Int32(cute.arch.warp_redux_sync(highest, "max"))
    return size, highest, Int32(cute.arch.warp_redux_sync(partitions, "add"))


@cute.jit
def are_equal(words: cute.Tensor, requests, longest) -> Boolean:
    """Whether all requests with queries have ``longest`` KV tiles. Called by a whole warp, each lane of which has
    written its own words."""
    lane, others = cute.arch.lane_idx(), Int32(0)
    for first in cutlass.range(0, cutlass.min(requests, SORTED_REQUESTS), WARP_THREADS, unroll=1):
        count = words[first + lane]
        others += Int32(Boolean(count != longest) & Boolean(count != -1))
    return Int32(cute.arch.warp_redux_sync(others, "max")) == 0


def partition_at(config, operands, where, partitions: Partitions, number):
    """The ``Tile`` for partition ``number`` of the launch. Called by a whole warp."""
    rank, head = number // partitions.heads, number % partitions.heads
    request, partition = nth_longest(partitions.order, rank)
    head_tiles, grid = where.grid.head_tiles, where.grid
    top, own = level_of(partitions.order.words[request])
    several = Boolean(top >= own)  # query tiles
    query_tile = Int32(cutlass.select_(several, partition, Int32(0)))
    place = head % head_tiles, head // head_tiles, request
    tile = tile_of(config, operands, grid.group, where.window, query_tile, *place)
    size = Int32(cutlass.select_(several, cutlass.max(tile.span.count, 1), partitions.size))
    split = Int32(cutlass.select_(several, Int32(0), partition))
    return replace(tile, split=split, span=tile.span.partition_of_size(split, size, **INTEGERS))


@cute.jit
def write_unused(config: cutlass.Constexpr, tile, index: cutlass.Constexpr, operands):
    """Write, with the last partition of a row's keys, that the splits after it saw no key. index: (batch, head,
    query)."""
    span = tile.span
    if Boolean(span.count == 0) | Boolean((span.begin + span.count) * config.tile_n >= span.end):
        for split in cutlass.range(tile.split + 1, operands.row_max.shape[0], unroll=1):
            operands.row_max[(split, *index)] = -cutlass.Float32.inf
            operands.row_sum[(split, *index)] = cutlass.Float32(0.0)
