"""Page numbers: which page of K and V holds a key.

Whatever a page table holds, nothing outside the table or outside K and V is read: a page number out of range
counts as a page of zeros, and no entry is read whose keys all lie past the KV length.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from warpspec.fmha.device.packed import extent_of

NO_PAGE = -1  # as a TMA coordinate it is out of bounds: zeros arrive, no memory is read


def source_or_none(config, tile, key, source) -> Int32:
    """The batch row or page of a box that begins at ``key``, or NO_PAGE if all its keys lie past the KV length or, with
    a window, outside the keys that some row sees."""
    wanted = Boolean(key < tile.length)
    if config.skips_boxes:
        wanted = Boolean(key < tile.span.end) & Boolean(key + config.kv.page_keys > tile.span.first)
    return Int32(cutlass.select_(wanted, Int32(source), Int32(NO_PAGE)))


def address_of(config, operands, request, key) -> tuple:
    """((first index of k and v, row), exists) of a request's key within its KV length. If its page does not exist, the
    indices are those of a page that does."""
    if config.requests.packed_k:
        first_key, _ = extent_of(operands.cu_seqlens_k, request, operands.k.shape[1])
        return (0, first_key + key), Boolean(True)
    if not config.requests.page_size:
        return (request, key), Boolean(True)
    page = operands.page_table[request, key // config.requests.page_size]
    nearest = cutlass.max(cutlass.min(page, operands.k.shape[0] - 1), 0)
    return (nearest, key % config.requests.page_size), Boolean(page == nearest)


def box_key(config, kv_tile) -> Int32:
    """The key at which a KV tile's box begins; of several boxes, the lane's own."""
    key = kv_tile * config.tile_n
    if config.kv.pages > 1:
        key = key + cute.arch.lane_idx() * config.kv.page_keys
    return key


def kv_page(config, operands, tile, kv_tile) -> Int32:
    """The entry of the page table for a KV tile's box; of several boxes, each lane's own. A load warp may read it a KV
    tile ahead, and look at it only when it loads that tile: the tile before hides its latency.

    Not checked against the number of pages: TMA does that.
    """
    entries, entry = operands.page_table.shape[1], box_key(config, kv_tile) // config.requests.page_size
    return operands.page_table[tile.request, cutlass.min(entry, entries - 1)]


def kv_places(config, operands, tile, kv_tile, page=None):
    """The source of each of a KV tile's boxes, by page of the tile: (tile, batch), or (box of the page, page).

    A box holds ``config.kv.page_keys`` keys, which lie in one page; without pages, a tile of several boxes counts as
    one batch row. page: ``kv_page``; None: it is read here, before the wait for the stage, which hides its latency.
    """
    kv, page_size = config.kv, config.requests.page_size
    if not page_size and kv.pages == 1:
        return ((kv_tile, tile.keys_batch),)
    key = box_key(config, kv_tile)
    if not page_size:
        return PagesByLane(source_or_none(config, tile, key, tile.keys_batch), key // kv.page_keys)
    page = kv_page(config, operands, tile, kv_tile) if page is None else page
    page, box = source_or_none(config, tile, key, page), key % page_size // kv.page_keys
    if kv.pages == 1:
        return ((box, page),)
    return PagesByLane(page, None if kv.page_keys == page_size else box)


@dataclass(frozen=True)
class PagesByLane:
    """Places of a tile's boxes: each lane of the load warp holds one page number or batch row, so that all take one
    register and one load. box: the number of the page's or batch row's box, likewise; None if boxes are whole pages."""

    page: Int32
    box: Int32 | None = None

    def __getitem__(self, index):
        """The index-th box's (box of the page, page). Called by a whole warp."""
        box = 0 if self.box is None else cute.arch.shuffle_sync(self.box, index)
        return box, cute.arch.shuffle_sync(self.page, index)
