"""A load warp's rings of Q, K and V in shared memory, and their sources in global memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.fmha.device.rings import kv_ring


@dataclass(frozen=True)
class Source:
    """atoms, coordinates: from ``tma.make_load``, for Q and ``format.rings``. shared: ``kernel.Buffers``. column_group:
    this warp's."""

    config: object
    operands: tuple
    atoms: tuple
    coordinates: tuple
    shared: tuple
    dtype: type
    column_group: Int32 | int

    @property
    def blocks(self) -> tuple:
        """(first, end) of the blocks of 64 columns that this warp prefetches."""
        config = self.config
        first = self.column_group * config.group_blocks
        end = first + config.group_blocks
        if config.odd_blocks:
            end += Int32(
                cutlass.select_(self.column_group == config.kv_groups - 1, Int32(config.odd_blocks), Int32(0))
            )
        return first, end

    def q(self, tile, row_group: int) -> tma.TileRing:
        """The ring of Q of one row group, whose stages are the blocks of D of every row group."""
        config, coordinates = self.config, self.coordinates[0]
        # (D, HEAD, QUERY, BLOCK): from the row group's first head and query on
        q = coordinates[None, None, None, None, tile.batch]
        q = cute.domain_offset((0, tile.first_head_of(row_group), tile.first_row_of(row_group), 0), q)
        tiles = cute.local_tile(q, config.q_box, (0, 0, 0, None) if config.heads.whole else (None, 0, 0, 0))
        stages, block_bytes = (
            config.rows.groups * config.heads.qk_blocks,
            config.q_bytes // config.heads.qk_blocks,
        )
        shared = tma.shared_tiles(self.shared.q, self.dtype, config.q_box, stages, block_bytes)
        return tma.TileRing.make(self.atoms[0], tiles, shared)

    def kv(self, tile, number: int = 0, row_group: int = 0) -> tma.TileRing:
        """The ring of K or V of a row group. number: its number in ``config.format.rings``."""
        config = self.config
        raw = self.shared.raw + number * config.codes.ring_bytes
        base = raw if config.converts else self.shared[1 + number]
        arguments = self.atoms[1 + number], self.coordinates[1 + number], base, config.format.rings[number]
        return kv_ring(config, *arguments, tile, self.dtype, row_group)
