"""The load warps: for every tile the Q of its rows, then K and V tiles through TMA. One warp, or one for each column
group (``AttentionConfig.kv_groups``), or one for K and one for V (``AttentionConfig.loads_apart``). ``prefetch``
loads into L2 ahead of them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import drain
from warpspec.fmha.device.ahead import wait_for_launch
from warpspec.fmha.device.block_scales import load_scales
from warpspec.fmha.device.pages import NO_PAGE, kv_page, kv_places
from warpspec.fmha.device.tiles import each_tile
from warpspec.fmha.sm90.prefetch import prefetch_kv, prefetch_q
from warpspec.fmha.sm90.rings import Source

LEAD = 2  # KV tiles that are still to be loaded when a CTA takes its next tile


@dataclass(frozen=True)
class Loader:
    """A load warp's state for all of its tiles. source: ``rings.Source``. where: as in ``tiles.each_tile``. rings:
    numbers in ``format.rings`` of those that it fills; the warp that fills the first loads Q."""

    config: object
    channels: dict
    source: Source
    where: object
    rings: tuple


@cute.jit
def load(config: cutlass.Constexpr, channels: cutlass.Constexpr, source, where, rings: cutlass.Constexpr):
    """Fill shared memory, tile after tile of this CTA: Q of each row group, then one K and one V tile for every KV
    tile of the span, in order; one tile for both if they are one tensor. rings: as in ``Loader``.

    Produces: q_full, k_full, v_full (expect_tx by one lane, bytes by TMA). Consumes: q_empty, k_empty, v_empty before
    refilling a buffer. Returns only when every buffer has been released.
    """
    role = Loader(config, channels, source, where, rings)
    hands_back, uses = config.scheduler.from_queue, (Int32(0), Int32(0))
    _, use = each_tile(config, source.operands, where, load_tile, role, uses, hands_back=hands_back)
    drain(
        tuple(channels[config.load_ring(config.format.rings[i]) + "_empty"] for i in rings),
        use * config.rows.kv_heads,
        config.kv_groups,
        source.column_group,
    )


@cute.jit
def load_tile(role, tile, uses, record=None):
    """Load Q, K and V of one tile. uses: (tiles with keys, KV tiles) loaded before; returns the counts after. record:
    number of the tile's record if it comes from a queue. It is released LEAD KV tiles before the last load: only then
    does the CTA take its next tile, and finding that tile takes about as long as these loads.
    """
    config, channels, source, where = role.config, role.channels, role.source, role.where
    heads = config.rows.kv_heads
    tile_use, use = uses
    column_group = source.column_group
    span = tile.span
    page = Int32(NO_PAGE) if cutlass.const_expr(config.pages_ahead) else None
    wait_for_launch(config)
    if cutlass.const_expr(config.waits_late):
        cute.arch.griddepcontrol_launch_dependents()  # has an effect once
    if cutlass.const_expr(config.prefetches):  # noqa: SIM102
        if tile_use > 0:  # while the tile before ends
            prefetch_q(source, tile)
            for step in cutlass.range_constexpr(config.kv_stages):
                prefetch_kv(source, where, tile, step)
    if span.count > 0:
        if cutlass.const_expr(config.pages_ahead):
            page = kv_page(config, source.operands, tile, span.tile(0))
        if cutlass.const_expr(role.rings[0] == 0):
            for row_group in cutlass.range_constexpr(config.rows.groups):
                q_use = tile_use * config.rows.groups + row_group
                ring = source.q(tile, row_group)
                channels["q_empty"].wait_previous(q_use)
                load_q(config, ring, channels["q_full"], q_use, column_group, row_group)
        tile_use += 1
    release = cutlass.max(span.count - LEAD, 0)
    for step in cutlass.range(span.count, unroll=1):
        if cutlass.const_expr(record is not None):  # noqa: SIM102
            if step == release:
                channels["tile_empty"].arrive_warp(record)
        places = kv_places(config, source.operands, tile, span.tile(step), page)
        if cutlass.const_expr(config.pages_ahead):
            after = cutlass.min(step + 1, span.count - 1)
            page = kv_page(config, source.operands, tile, span.tile(after))
        for i in role.rings:
            loaded = config.load_ring(config.format.rings[i])
            full, empty = channels[loaded + "_full"], channels[loaded + "_empty"]
            for head in range(heads):
                ring, at = source.kv(tile, i, head), (use + step) * heads + head
                empty.wait_previous(at * config.kv_groups + column_group)
                load_kv(config, source, tile, i, (ring, full), at, places)
        if cutlass.const_expr(config.prefetches):
            prefetch_kv(source, where, tile, step + config.kv_stages)
    if cutlass.const_expr(record is not None):  # noqa: SIM102
        if span.count == 0:
            channels["tile_empty"].arrive_warp(record)
    return tile_use, use + span.count


@cute.jit
def load_q(
    config: cutlass.Constexpr, ring, full: cutlass.Constexpr, use, column_group, row_group: cutlass.Constexpr
):
    """Load a load warp's blocks of Q."""
    blocks, odd = config.group_blocks, config.odd_blocks
    expected = blocks * tma.tile_bytes(config.q_box)
    if cutlass.const_expr(odd > 0):
        more = odd * tma.tile_bytes(config.q_box)
        expected += Int32(cutlass.select_(column_group == config.kv_groups - 1, Int32(more), Int32(0)))
    full.expect_bytes(use, expected)
    for i in cutlass.range_constexpr(blocks):
        block = column_group * blocks + i
        stage = row_group * config.heads.qk_blocks + block
        ring.load(block, stage, full.barrier(use), evicts_first=config.streams_keys)
    if cutlass.const_expr(odd > 0):  # noqa: SIM102
        if column_group == config.kv_groups - 1:
            for block in cutlass.range_constexpr(config.heads.qk_blocks - odd, config.heads.qk_blocks):
                stage = row_group * config.heads.qk_blocks + block
                ring.load(block, stage, full.barrier(use), evicts_first=config.streams_keys)


@cute.jit
def load_kv(
    config: cutlass.Constexpr,
    source,
    tile,
    number: cutlass.Constexpr,
    target: cutlass.Constexpr,
    use,
    places,
):
    """Load a load warp's subtiles of a KV tile to a ring. number: the ring's in ``format.rings``. target: (the ring's
    ``TileRing``, its full channel). use: KV tiles loaded before. places: of ``kv_places``."""
    (ring, full), name = target, config.format.rings[number]
    column_group, subtiles = source.column_group, config.group_subtiles
    if cutlass.const_expr(config.subtiles == 1):  # a loop of one would take registers all the same
        load_subtile(config, name, ring, full, use, 0, places)
        if cutlass.const_expr(config.format.kv_block > 0):
            base = source.shared.scales
            load_scales(config, source.operands, base, tile, number, full, use, places)
    else:
        for subtile in cutlass.range(column_group * subtiles, (column_group + 1) * subtiles, unroll=1):
            load_subtile(config, name, ring, full, use * config.subtiles + subtile, subtile, places)
        if cutlass.const_expr(config.p_in_keys):
            last = config.subtiles - 1
            if use % config.kv_groups != column_group:
                load_subtile(config, name, ring, full, use * config.subtiles + last, last, places)


@cute.jit
def load_subtile(
    config: cutlass.Constexpr, name: cutlass.Constexpr, ring, full: cutlass.Constexpr, use, subtile, places
):
    """Load one subtile of a KV tile. use: use count of its mbarrier; subtile: its number in the tile."""
    blocks, pages = config.kv.boxes(name)
    full.expect_bytes(use, config.load_tile_bytes(name) // config.subtiles)
    if cutlass.const_expr(pages > 1):  # page by page: the lanes exchange its number once for all its boxes
        for page in cutlass.range(pages, unroll=1):
            for block in cutlass.range_constexpr(blocks // config.subtiles):
                load_box(config, ring, full, use, (subtile, block, page), (blocks, pages), places[page])
    else:
        for block in cutlass.range(blocks // config.subtiles, unroll=1):
            load_box(config, ring, full, use, (subtile, block, 0), (blocks, pages), places[0])


def load_box(config, ring, full, use, number: tuple, boxes: tuple, place: tuple) -> None:
    """Load one box of a KV tile. number: (subtile, its block, page). boxes: blocks and pages of a tile. place: the
    page's of ``kv_places``."""
    (subtile, block, page), (blocks, pages), (row, source) = number, boxes, place
    at = subtile * (blocks // config.subtiles) + block
    box = (full.stage(use) // config.subtiles * blocks + at) * pages + page
    place = config.kv.place_of(row, at, source)
    ring.load(place, box, full.barrier(use), evicts_first=config.streams_keys)
