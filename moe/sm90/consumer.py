"""A consumer: does the tiles of its CTA, class by class: products, then epilogue."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device.wgmma import flat
from warpspec.common.hardware import WARPGROUP_ROWS
from warpspec.moe.sm90.epilogue import store, terms_of
from warpspec.moe.sm90.products import add_products, await_stage, make_mma
from warpspec.moe.sm90.relay import add_in_turns, await_all
from warpspec.moe.sm90.tiles import has_rows, stage_count, tile_at, tile_count


@cute.jit
def consume(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, ops, group, split, thread):
    """One consumer, for all tiles of the CTA: the stages split, split + splits, ... of its row groups.

    group: its first row group. thread: 0..127 of the consumer. Consumes full; the fence after it makes the load warps'
    copies visible to wgmma, and lets the copy engine overwrite what was read before. Produces empty, one arrival a
    warp, when a stage's products are done.
    """
    use = Int32(0)
    for number in cutlass.range_constexpr(len(config.widths)):
        use = consume_class(config, number, channels, shared, ops, group, split, thread, use)


@cute.jit
def consume_class(
    config: cutlass.Constexpr,
    number: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    ops,
    group,
    split,
    thread,
    use,
) -> Int32:
    """Do the tiles of one class of entries.

    use: ring use count of the CTA's first stage of them; returns the next class's.
    """
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    width, splits, tall = config.widths[number], config.shape.splits, config.shape.tall
    mma = make_mma(width)
    sums_shape = mma.partition_shape_C((WARPGROUP_ROWS, width))
    sums = [cute.make_rmem_tensor(sums_shape, Float32) for _ in range(tall)]
    stages, first = stage_count(config, ops), cta
    if cutlass.const_expr(number > 0):
        before = cutlass.max(tile_count(config, ops, number - 1) - cta, 0)
        first = cta + cute.ceil_div(before, ctas) * ctas
    for index in cutlass.range(first, tile_count(config, ops, number), ctas, unroll=1):
        tile = tile_at(config, ops, index)
        if has_rows(ops, tile, group):
            terms = [terms_of(config, ops, tile, group + i, thread) for i in range(tall)]
            for i in cutlass.range_constexpr(tall):
                sums[i].fill(0.0)
            owner = Int32(0)
            if cutlass.const_expr(splits > 1):
                add_in_turns(config, width, channels, shared, ops, group, split, thread, use, sums[0])
                await_all(config, group)
                owner = (stages - 1) % splits
            else:
                add_products(config, width, channels, shared, ops, group, thread, use, sums)
            if split == owner:
                for i in cutlass.range_constexpr(tall):
                    store(config, width, ops, tile, group + i, thread, flat(sums[i]), terms[i])
        else:
            for stage in cutlass.range(split, stages, splits, unroll=1):
                await_stage(channels, use + stage)
                channels["empty"].arrive_warp(use + stage)
        use += stages
    return use
