"""Two load warps: each fetches one of the two operands of a tile that stay, and one of those of its steps, so that
neither waits until the other's loads have been issued."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.hardware import FP32_BYTES
from warpspec.fmha.backward.device.load import load_tile, loaded_bytes, ring_of
from warpspec.fmha.backward.device.place import ctas_of, key_tile_at
from warpspec.fmha.backward.sm90.apart.tile import index_of, rounds_of, tile_at

NAMES = ("k", "v", "q", "do")  # in the order of the TMA descriptors


@dataclass(frozen=True)
class Loads:
    """Issues loads. shared: addresses of the regions, by name. atoms, coordinates: TMA descriptors and their coordinate
    tensors, of K, V, Q and dO, of gradients, and of O where it is prefetched."""

    config: object
    channels: dict
    shared: dict
    operands: object
    atoms: tuple
    coordinates: tuple

    def issue(self, name: str, use, place, further: int = 0) -> None:
        """Issue the load of rows of "q", "do", "k" or "v" when their buffer is free. use: the buffer's use count.
        place: (head, batch row, first row). further: bytes of other loads that the barrier waits for. Produces
        {name}_full."""
        config, channels = self.config, self.channels
        full, ring = channels[name + "_full"], self.ring(name, place)
        channels[name + "_empty"].wait_previous(use)
        full.expect_bytes(use, loaded_bytes(config, name, config.rows_of(name)) + further)
        load_tile(config, name, ring, full.stage(use), full.barrier(use))

    def ring(self, name: str, place, copy: int | None = None) -> tma.TileRing:
        """The tiles of an operand from a place on. copy: which of the TMA descriptors, if not the operand's."""
        config, (head, batch, first) = self.config, place
        i = NAMES.index(name) if copy is None else copy
        view = self.coordinates[i][None, None, None, head, batch]
        dtype, stages = self.operands.q.element_type, config.stages_of(name)
        return ring_of(config, name, self.atoms[i], view, self.shared[name], dtype, stages, first)

    def names(self, number: int) -> tuple[str, str]:
        """The operands that one of the load warps loads: one that stays, one of a step."""
        return self.config.kept[number], self.config.streamed[number]

    def prefetch(self, name: str, place) -> None:
        """Prefetch an operand of a tile into L2, and with dO also O, if consumers make the statistics."""
        rings = [self.ring(name, place)]
        if name == "do" and self.config.makes_statistics:
            rings.append(self.ring(name, place, -1))
        for ring in rings:
            for span in range(1 if self.config.rows is None else self.config.spans_of(name)):
                ring.prefetch(span)

    def issue_statistics(self, use, head, index, further: int = 0) -> None:
        """Issue the load of a row tile's statistics, behind that of its Q. index: the tile's, among all. further: row
        tiles of the same Q before it."""
        config, full = self.config, self.channels["q_full"]
        size, stage = row_bytes(config), config.statistics_bytes
        source = self.operands.statistics[head, index, None, None].iterator
        place = full.stage(use) * (stage // FP32_BYTES) + further * (size // FP32_BYTES)
        with cute.arch.elect_one():
            tma.bulk_load(self.shared["statistics"] + place, source.toint(), Int32(size), full.barrier(use))


def wait_and_launch() -> None:
    """Wait for the first kernel, then let the launch that follows begin, which relies on that (``kernel.Queries``)."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


def row_bytes(config) -> int:
    """Bytes of the statistics of a row tile."""
    return config.statistics_bytes // config.row_tiles


@cute.jit
def load_own(loads: cutlass.Constexpr, tile: cutlass.Constexpr, use, place: cutlass.Constexpr):
    """Issue the loads of a query tile's Q and statistics. The last row tiles may not be there."""
    config, size = loads.config, row_bytes(loads.config)
    if cutlass.const_expr(config.makes_statistics):
        loads.issue("q", use, place)
    else:
        there = tile.row_tiles_there()
        loads.issue("q", use, place, there * size)
        for i in cutlass.range_constexpr(config.row_tiles):
            if i < there:
                loads.issue_statistics(use, tile.head, tile.row_tile(loads.operands, i), i)


@cute.jit
def load_queries(loads: cutlass.Constexpr, number: cutlass.Constexpr, launch):
    """A load warp of the kernel that makes dQ. number: 0 loads Q and K, 1 dO and V. Produces their full barriers;
    consumes their empties. Leaves only when every buffer has been released."""
    config, tiles, steps = loads.config, Int32(0), Int32(0)
    kept, streamed = loads.names(number)
    for round_ in cutlass.range(rounds_of(launch.count), unroll=1):
        index = index_of(round_)
        if index < launch.count:
            tile = tile_at(config, loads.operands, launch, index)
            own = (tile.head, tile.batch, tile.place.first_row + tile.first_query)
            batch = 0 if cutlass.const_expr(config.requests.packed_k) else tile.request
            for step in cutlass.range(tile.span.count, unroll=1):
                if step == 0:
                    if cutlass.const_expr(kept == "q"):
                        load_own(loads, tile, tiles, own)
                    else:
                        loads.issue(kept, tiles, own)
                first = tile.place.first_key + (tile.span.begin + step) * config.tile_n
                loads.issue(streamed, steps, (tile.kv_head, batch, first))
                steps += 1
            tiles += Int32(Boolean(tile.span.count > 0))
        following = index_of(round_ + 1)
        if following < launch.count:
            tile = tile_at(config, loads.operands, launch, following)
            loads.prefetch(kept, (tile.head, tile.batch, tile.place.first_row + tile.first_query))
    drain((loads.channels[kept + "_empty"],), tiles)
    drain((loads.channels[streamed + "_empty"],), steps)


@cute.jit
def load_keys(loads: cutlass.Constexpr, number: cutlass.Constexpr, window, order):
    """A load warp of the kernel that makes dK and dV: 0 loads K, Q and the statistics, 1 V and dO; see
    ``load_queries``."""
    config, tiles, steps = loads.config, Int32(0), Int32(0)
    kept, streamed = loads.names(number)
    count = ctas_of(config, loads.operands, order[0], *order[3:])
    for round_ in cutlass.range(rounds_of(count), unroll=1):
        index = index_of(round_)
        if index < count:
            tile = key_tile_at(config, loads.operands, window, order, index)
            batch = 0 if cutlass.const_expr(config.requests.packed_k) else tile.request
            head, query_tile = tile.first
            for step in cutlass.range(tile.steps, unroll=1):
                if step == 0:
                    own = (tile.kv_head, batch, tile.place.first_key + tile.first_key)
                    loads.issue(kept, tiles, own)
                rows = (head, tile.batch, tile.place.first_row + query_tile * config.tile_m)
                if cutlass.const_expr(streamed == "q"):
                    loads.issue("q", steps, rows, config.statistics_bytes)
                    if steps == 0:  # all else was there before the first kernel
                        wait_and_launch()
                    loads.issue_statistics(steps, head, tile.index_of(query_tile))
                else:
                    loads.issue("do", steps, rows)
                steps += 1
                head, query_tile = tile.following(head, query_tile)
            tiles += Int32(Boolean(tile.steps > 0))
        following = index_of(round_ + 1)
        if following < count:
            tile = key_tile_at(config, loads.operands, window, order, following)
            batch = 0 if cutlass.const_expr(config.requests.packed_k) else tile.request
            loads.prefetch(kept, (tile.kv_head, batch, tile.place.first_key + tile.first_key))
    if cutlass.const_expr(streamed == "q"):
        wait_and_launch()  # of a CTA without steps
    drain((loads.channels[kept + "_empty"],), tiles)
    drain((loads.channels[streamed + "_empty"],), steps)
