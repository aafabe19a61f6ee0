"""The load warp: codes of a task's keys by TMA, 32 keys of a page at a time, to a ring in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.latent.gathered.task import each_task
from warpspec.latent.gathered.transposed.config import UNIT_KEYS, UNITS

WHOLE = 0xFFFFFFFF  # mask of a unit whose page is there


def box_of(config) -> tuple[int, int, int]:
    """(WORD, KEY, PAGE) that a load brings. Words behind a row arrive as zeros."""
    return (config.unit_bytes // UNIT_KEYS // WORD_BYTES, UNIT_KEYS, 1)


def pages_view(config, pool: cute.Tensor) -> cute.Tensor:
    """View (WORD, KEY, PAGE) of a pool [pages, words]. Host side."""
    words = config.gathers.fmt.row_bytes // WORD_BYTES
    layout = cute.make_layout((words, config.tile_n, pool.shape[0]), stride=(1, words, pool.stride[0]))
    return cute.make_tensor(pool.iterator, layout)


@dataclass(frozen=True)
class Loader:
    """The load warp's state for all tasks. ring: ``tma.TileRing`` of tiles (UNIT of the page, PAGE). page_units: units
    of a page."""

    config: object
    channels: dict
    operands: object
    masks: cute.Tensor
    ring: tma.TileRing
    page_units: int


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, operands, units, atom, coordinates):
    """Fill the ring, task after task of this CTA. Produces full (expect_tx by one lane, bytes by TMA). Consumes empty
    before a unit is filled again. Returns only when all units have been released."""
    box = box_of(config)
    tiles = cute.local_tile(coordinates, box, (0, None, None))  # (WORD, KEY, PAGE, UNIT of the page, PAGE)
    stages = tma.plain_tiles(shared.codes, cutlass.Uint32, box, config.units)
    ring = tma.TileRing.make(atom, cute.group_modes(tiles, 3, 5), stages)
    role = Loader(config, channels, operands, shared.masks, ring, UNITS)
    use, _ = each_task(config, operands, units, load_task, role, (Int32(0), Int32(0)))
    drain((channels["empty"],), use)


@cute.jit
def load_task(role, task, uses):
    """Load a task's units. uses: number of units before it, and a number that ``each_task`` hands on unused. Returns
    both as they are after it."""
    config, channels, keys = role.config, role.channels, role.operands.sets[0]
    masks, ring = role.masks, role.ring
    use, unused = uses
    lane, span = cute.arch.lane_idx(), task.span
    row = keys.request(task.token)
    pages, pool = Int32(-1), keys.pool.shape[0]
    for step in cutlass.range(span.count, unroll=1):
        if step % WARP_THREADS == 0:  # the pages of as many tiles as there are lanes
            at = span.tile(step) + lane
            pages = Int32(-1)
            if step + lane < span.count:
                pages = Int32(keys.slots[row, at])
        page = Int32(cute.arch.shuffle_sync(pages, step % WARP_THREADS))
        here = Boolean(page >= 0) & Boolean(page < pool)
        page = Int32(cutlass.select_(here, page, pool))  # past the end, so that zeros arrive
        for unit in cutlass.range_constexpr(role.page_units):
            number = use + step * role.page_units + unit
            channels["empty"].wait_previous(number)
            stage = channels["full"].stage(number)
            if lane == 0:
                masks[stage] = Uint32(cutlass.select_(here, Uint32(WHOLE), Uint32(0)))
            cute.arch.sync_warp()
            channels["full"].expect_bytes(number, config.unit_bytes)
            ring.load((unit, page), stage, channels["full"].barrier(number))
    return use + span.count * role.page_units, unused
