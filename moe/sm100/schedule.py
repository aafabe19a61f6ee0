"""The scheduler warp: finds the tiles of this CTA and hands them to its other warps through a ring in shared memory.

The schedule is static and persistent: with G groups of CTAs in the grid, group g takes tiles g, g + G, g + 2 G, ... of
one numbering over all experts. The numbering follows from the running ends ``offsets``, which only the device knows.
The warp's lanes count the tiles and scale atoms of 32 experts at a time, and prefix sums over the lanes tell which
expert a tile number belongs to. An expert without tokens has no tile. An expert's tiles of tokens are numbered first,
so that CTAs that work at the same time share a tile of weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device.warp import running_sum
from warpspec.common.hardware import WARP_THREADS
from warpspec.common.nvfp4 import ATOM_ROWS
from warpspec.moe.sm100.config import RECORD_FIELDS, RECORDS

LAST_LANE = WARP_THREADS - 1


class TileRecord(NamedTuple):
    """A tile record.

    expert: the tile's expert. first_row: the tile's first row, among all sorted rows. rows: number of tokens from there
    on, at most as many as a tile holds; 0 means that there are no more tiles. first_feature: the tile's first row of
    the weights. atom, atom_row: the scale atom of first_row, and its row in that atom.
    """

    expert: Int32
    first_row: Int32
    rows: Int32
    first_feature: Int32
    atom: Int32
    atom_row: Int32


@dataclass(frozen=True)
class Records:
    """The ring of tile records, as a reading warp sees it."""

    full: object
    empty: object
    ring: cute.Tensor  # (FIELD, STAGE)

    @classmethod
    def make(cls, channels, base: cute.Pointer) -> Records:
        ring = cute.make_tensor(base, cute.make_layout((RECORD_FIELDS, RECORDS), stride=(1, RECORD_FIELDS)))
        return cls(channels["record_full"], channels["record_empty"], ring)

    def read(self, use) -> TileRecord:
        """Read the use-th record and hand it back. Executed by a whole warp."""
        self.full.wait(use)
        record = self.ring[None, self.full.stage(use)]
        tile = TileRecord(*(record[i] for i in range(len(TileRecord._fields))))
        self.empty.arrive_warp(use)
        return tile

    def write(self, use, *fields) -> None:
        """Write the use-th record once its stage is free. Executed by a whole warp."""
        self.empty.wait_previous(use)
        record = self.ring[None, self.full.stage(use)]
        with cute.arch.elect_one():
            for i, value in enumerate(fields):
                record[i] = value
            self.full.arrive(use)


@cute.jit
def schedule(config: cutlass.Constexpr, records, offsets: cute.Tensor, features, rows, group, groups):
    """Write this CTA's tile records, and a last one that ends them.

    offsets: int32 [E]. features: rows N of each expert's weights. rows: R, to which ends are clamped. group, groups:
    number of this CTA (or pair), and how many there are. Consumes record_empty. Produces record_full.
    """
    lane = cute.arch.lane_idx()
    tokens = config.shape.tokens
    feature_tiles = cute.ceil_div(features, config.shape.features)
    experts = cute.size(offsets)
    chunk = Int32(0)  # first of the experts that the lanes hold
    tiles_before, atoms_before = Int32(0), Int32(0)  # totals of all experts before the chunk
    begin, count, tiles, atoms = load_chunk(config, offsets, chunk, lane, feature_tiles, rows)
    tile_ends, atom_ends = running_sum(tiles, lane), running_sum(atoms, lane)
    use, number = Int32(0), Int32(group)
    while chunk < experts:
        here = cute.arch.shuffle_sync(tile_ends, LAST_LANE)
        if number < tiles_before + here:
            later = cute.arch.vote_ballot_sync(number < tiles_before + tile_ends)
            # The lowest lane whose tiles end after this number.
            owner = cute.arch.popc(later ^ (later - 1)) - 1
            own = number - tiles_before - cute.arch.shuffle_sync(tile_ends - tiles, owner)
            expert_rows = cute.arch.shuffle_sync(count, owner)
            token_tiles = cute.ceil_div(expert_rows, tokens)
            first = own % token_tiles * tokens  # among the expert's rows
            records.write(
                use,
                chunk + owner,
                cute.arch.shuffle_sync(begin, owner) + first,
                cutlass.min(expert_rows - first, tokens),
                own // token_tiles * config.shape.features,
                atoms_before + cute.arch.shuffle_sync(atom_ends - atoms, owner) + first // ATOM_ROWS,
                first % ATOM_ROWS,
            )
            use += 1
            number += groups
        else:
            tiles_before += here
            atoms_before += cute.arch.shuffle_sync(atom_ends, LAST_LANE)
            chunk += WARP_THREADS
            begin, count, tiles, atoms = load_chunk(config, offsets, chunk, lane, feature_tiles, rows)
            tile_ends, atom_ends = running_sum(tiles, lane), running_sum(atoms, lane)
    zero = Int32(0)
    # All readers are in this CTA, so no arrival can come after its end.
    records.write(use, zero, zero, zero, zero, zero, zero)


@cute.jit
def load_chunk(config: cutlass.Constexpr, offsets, chunk, lane, feature_tiles, rows):
    """(first row, rows, tiles, scale atoms) of this lane's expert; all 0 past the last expert. Wrong offsets give wrong
    rows, but never rows that do not exist."""
    expert = chunk + lane
    begin, end = Int32(0), Int32(0)
    if expert < cute.size(offsets):
        end = cutlass.max(cutlass.min(offsets[expert], rows), 0)
        if expert > 0:
            begin = cutlass.max(cutlass.min(offsets[expert - 1], rows), 0)
    count = cutlass.max(end - begin, 0)
    return (
        begin,
        count,
        cute.ceil_div(count, config.shape.tokens) * feature_tiles,
        cute.ceil_div(count, ATOM_ROWS),
    )
