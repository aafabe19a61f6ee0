"""The load warp: TMA loads of K and V once, then of each step's Q, its rows' statistics, and dO. For every
architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.hardware import FP32_BYTES
from warpspec.fmha.backward.device.tile import own_group
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.tiles import ELEMENT_BYTES


class GradientBuffers(NamedTuple):
    """Pointers to the beginnings of the shared-memory regions: Float32 for statistics, Int32 for visits, Uint8 for the
    others; None where the configuration has no such region."""

    statistics: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    q: cute.Pointer
    do: cute.Pointer
    ds: cute.Pointer
    bias: cute.Pointer | None
    p: cute.Pointer | None
    partial: cute.Pointer | None
    sums: cute.Pointer | None
    results: cute.Pointer | None
    visits: cute.Pointer | None
    dq: cute.Pointer | None

    @classmethod
    def of(cls, config, storage) -> GradientBuffers:
        """storage: ``common.device.storage.allocate``'s."""
        regions = {region.name for region in config.smem_regions}
        return cls(*(getattr(storage, name).data_ptr() if name in regions else None for name in cls._fields))


def ring_of(config, name: str, atom, view, base, dtype, stages: int, first) -> tma.TileRing:
    """A ring of tiles of "q", "k", "v" or "do"; TMA loads the tile that begins at row ``first``. view: (D, ROW,
    BLOCK)."""
    rows, blocks = config.tile_n if name in ("k", "v") else config.tile_m, config.room_of(name) // BLOCK
    if config.rows is not None:  # a span at a time
        box = (BLOCK, rows, 1)
        tiles = cute.local_tile(cute.domain_offset((0, first, 0), view), box, (None, 0, 0))
        return tma.TileRing.make(atom, tiles, tma.shared_tiles(base, dtype, box, stages * blocks))
    box = (BLOCK, rows, blocks)
    tiles = cute.local_tile(cute.domain_offset((0, first, 0), view), box, (0, 0, None))
    return tma.TileRing.make(atom, tiles, tma.shared_tiles(base, dtype, box, stages))


@dataclass(frozen=True)
class TileLoads:
    """Issues the loads of one key tile.

    channels: the barriers by name. shared: where the regions begin. atoms, coordinates: TMA descriptors and their
    coordinate tensors, of K, V, Q and dO in this order; what a kernel loads or stores beside them follows.
    """

    config: object
    channels: dict
    shared: GradientBuffers
    operands: object
    atoms: tuple
    coordinates: tuple
    tile: object

    def load_keys(self, name: str) -> None:
        """Load the tile's K or V: "k", "v". Produces {name}_full."""
        config, tile, i = self.config, self.tile, "kv".index(name)
        full = self.channels[name + "_full"]
        batch = 0 if config.requests.packed_k else tile.request
        keys = self.coordinates[i][None, None, None, tile.kv_head, batch]
        first = tile.place.first_key + tile.first_key
        full.expect_bytes(0, loaded_bytes(config, name, config.tile_n))
        dtype = self.operands.q.element_type
        ring = ring_of(config, name, self.atoms[i], keys, self.shared[i + 1], dtype, 1, first)
        # Nobody else reads the keys of a tile that one CTA has.
        load_tile(config, name, ring, 0, full.barrier(0), evicts_first=not config.cut)

    def load_step(self, step, head, query_tile, waits: bool = True) -> None:
        """Load a step's Q, statistics and dO. Produces q_full and do_full. waits: wait until the buffers are
        released."""
        config, tile, channels = self.config, self.tile, self.channels
        dtype = self.operands.q.element_type
        first = tile.place.first_row + query_tile * config.tile_m
        for i, name, stages in ((2, "q", config.q_stages), (3, "do", config.do_stages)):
            full = channels[name + "_full"]
            queries = self.coordinates[i][None, None, None, head, tile.batch]
            ring = ring_of(config, name, self.atoms[i], queries, self.shared[i + 1], dtype, stages, first)
            if waits and name + "_empty" in channels:
                channels[name + "_empty"].wait_previous(step)
            size = config.statistics_bytes if name == "q" else 0
            full.expect_bytes(step, loaded_bytes(config, name, config.tile_m) + size)
            if name == "q":
                tile_index = tile.index_of(query_tile)
                source = self.operands.statistics[head, tile_index, None, None].iterator
                target = self.shared.statistics + full.stage(step) * (size // FP32_BYTES)
                with cute.arch.elect_one():
                    tma.bulk_load(target, source.toint(), Int32(size), full.barrier(step))
            load_tile(config, name, ring, full.stage(step), full.barrier(step))


@cute.jit
def load(loads):
    """The load warp's role. loads: ``TileLoads``. Produces k_full, v_full, q_full and do_full; consumes q_empty and,
    where there is one, do_empty (otherwise q_empty also releases the dO loaded with Q, in as many stages). Leaves only
    when every buffer has been released."""
    tile, channels = loads.tile, loads.channels
    if tile.steps > 0:
        for name in "kv":
            loads.load_keys(name)
    wait_before(loads.config)
    if tile.steps > 0:
        head, query_tile = tile.first
        for step in cutlass.range(tile.steps, unroll=1):
            loads.load_step(step, head, query_tile)
            head, query_tile = tile.following(head, query_tile)
        for name in ("q_empty", "do_empty"):  # dO's buffers may come back with Q's
            if cutlass.const_expr(name in channels):
                drain((channels[name],), tile.steps)


def wait_first(config) -> None:
    """Wait for the previous launch where it sorts the key tiles. Every thread calls this before it looks up its
    tile."""
    cute.arch.griddepcontrol_launch_dependents()
    if config.requests.packed_k:
        cute.arch.griddepcontrol_wait()


def wait_before(config) -> None:
    """Wait for the previous launch, unless ``wait_first`` did, before reading or adding to what it wrote. Every thread
    calls one of the two, even without a step, so that the next launch begins after the previous one has ended."""
    if not config.requests.packed_k:
        cute.arch.griddepcontrol_wait()


def loaded_group(config):
    """Which columns of K, V, Q and dO the CTA loads, as multiples of ``room``."""
    return own_group(config) if config.clustered else 0


def loaded_bytes(config, name: str, rows: int) -> int:
    """Bytes that the loads of a tile of this many rows complete."""
    return config.spans_of(name) * rows * BLOCK * ELEMENT_BYTES


def load_tile(config, name: str, ring: tma.TileRing, stage, mbarrier, *, evicts_first: bool = False) -> None:
    """Load a tile of "q", "k", "v" or "do". evicts_first: as of ``TileRing.load``."""
    if config.rows is None:
        ring.load(loaded_group(config), stage, mbarrier, evicts_first=evicts_first)
        return
    for span in range(config.spans_of(name)):
        place = stage * (config.room_of(name) // BLOCK) + span
        ring.load(span, place, mbarrier, evicts_first=evicts_first)
