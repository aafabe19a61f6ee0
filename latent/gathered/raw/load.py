"""The load warp: codes of a task's keys by TMA, a page at a time, to a ring in shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.common.hardware import WORD_BYTES
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.task import each_task
from warpspec.latent.gathered.transposed.load import Loader, load_task


def box_of(config) -> tuple[int, int, int, int]:
    """(WORD, KEY, BLOCK, PAGE) that a load brings: blocks of 64 columns behind each other, swizzled."""
    return (BLOCK // WORD_BYTES, config.tile_n, config.heads.qk_blocks, 1)


def pages_view(config, pool: cute.Tensor) -> cute.Tensor:
    """View (WORD, KEY, BLOCK, PAGE) of a pool [pages, words]. Host side."""
    words, box = config.gathers.fmt.row_bytes // WORD_BYTES, box_of(config)
    layout = cute.make_layout((*box[:3], pool.shape[0]), stride=(1, words, box[0], pool.stride[0]))
    return cute.make_tensor(pool.iterator, layout)


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, operands, units, atom, coordinates):
    """Fill the ring, task after task of this CTA. Produces full (expect_tx by one lane, bytes by TMA). Consumes empty
    before a unit is filled again. Returns only when all units have been released."""
    box = box_of(config)
    # (WORD, KEY, BLOCK, PAGE, UNIT of the page, PAGE)
    tiles = cute.local_tile(coordinates, box, (0, None, 0, None))
    stages = tma.shared_tiles(shared.codes.align(tma.TILE_ALIGNMENT), cutlass.Uint32, box, config.units)
    ring = tma.TileRing.make(atom, cute.group_modes(tiles, 4, 6), stages)
    role = Loader(config, channels, operands, shared.masks, ring, 1)
    use, _ = each_task(config, operands, units, load_task, role, (Int32(0), Int32(0)))
    drain((channels["empty"],), use)
