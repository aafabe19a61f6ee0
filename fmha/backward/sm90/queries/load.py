"""The load warp: for each tile Q and dO, and the K and V of its key tiles."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.common.device.pipeline import drain
from warpspec.fmha.backward.device.load import load_tile, loaded_bytes, ring_of
from warpspec.fmha.backward.sm90.queries.tile import index_of, rounds_of, tile_at

NAMES = ("k", "v", "q", "do")  # in the order of the TMA descriptors


@dataclass(frozen=True)
class QueryLoads:
    """Issues loads. shared: addresses of the regions, by name. atoms, coordinates: TMA descriptors and their coordinate
    tensors, of K, V, Q and dO."""

    config: object
    channels: dict
    shared: dict
    operands: object
    atoms: tuple
    coordinates: tuple

    def issue(self, name: str, use, tile, number) -> None:
        """Issue the load of a tile of "q", "do", "k" or "v" when its buffer is free. use: the buffer's use count.
        number: the tile's, among those of its request. Produces {name}_full."""
        config, channels, i = self.config, self.channels, NAMES.index(name)
        full, keys = channels[name + "_full"], name in ("k", "v")
        head, rows = (tile.kv_head, config.tile_n) if keys else (tile.head, config.tile_m)
        packed = config.requests.packed_k if keys else config.requests.packed_q
        view = self.coordinates[i][None, None, None, head, 0 if packed else tile.request]
        first = (tile.place.first_key if keys else tile.place.first_row) + number * rows
        dtype, stages = self.operands.q.element_type, config.stages if keys else 1
        ring = ring_of(config, name, self.atoms[i], view, self.shared[name], dtype, stages, first)
        channels[name + "_empty"].wait_previous(use)
        full.expect_bytes(use, loaded_bytes(config, name, rows))
        load_tile(config, name, ring, full.stage(use), full.barrier(use))


@cute.jit
def load(loads: cutlass.Constexpr, launch):
    """The load warp's role. Produces q_full, do_full, k_full and v_full; consumes their empties. Leaves only when every
    buffer has been released."""
    config, tiles, keys = loads.config, Int32(0), Int32(0)
    for round_ in cutlass.range(rounds_of(launch), unroll=1):
        index = index_of(launch, round_)
        if index < launch.tiles * launch.rows:
            tile = tile_at(config, loads.operands, launch, index)
            for step in cutlass.range(tile.span.count, unroll=1):
                number = tile.span.begin + step
                if step == 0:
                    loads.issue("q", tiles, tile, tile.number)
                loads.issue("k", keys, tile, number)
                if step == 0:
                    loads.issue("do", tiles, tile, tile.number)
                loads.issue("v", keys, tile, number)
                keys += 1
            tiles += Int32(Boolean(tile.span.count > 0))
    drain((loads.channels["q_empty"], loads.channels["do_empty"]), tiles)
    drain((loads.channels["k_empty"], loads.channels["v_empty"]), keys)
