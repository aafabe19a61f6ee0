"""Consumers that take turns at a tile's stages.

Each decodes its stage while the others multiply theirs; then it receives the sums, adds its products and hands them on.
A tile of few tokens spends most of its time decoding and so takes less time. The sums are still added in the order of K
and have the same bits as those of a single consumer.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warpgroup

from warpspec.common.device.wgmma import flat
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.moe.sm90.products import await_stage, decode, issue, make_weights, stage_words, token_chunks
from warpspec.moe.sm90.tiles import stage_count

# The first named barrier. Each row group has one for each consumer, at which the consumer before it arrives, and one
# for all of them.
FIRST_BARRIER = 1


@cute.jit
def add_in_turns(
    config: cutlass.Constexpr,
    width: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    ops,
    group,
    split,
    thread,
    use,
    sums: cute.Tensor,
):
    """Add the products of stages split, split + splits, ... of a tile. The consumer of the last stage ends with the
    sums.

    use: ring use count of the tile's first stage. sums: a fragment of ``width`` tokens.
    """
    splits, chunks = config.shape.splits, config.stage_chunks
    tokens = token_chunks(config, width, shared.tokens)
    weights = [make_weights(width) for _ in range(chunks)]
    handed = sums_between(config, shared, group, thread)
    barrier = FIRST_BARRIER + group * (splits + 1)
    whole, stages = ops.chunks // chunks, stage_count(config, ops)
    for stage in cutlass.range(split, stages, splits, unroll=1):
        await_stage(channels, use + stage)
        present = cutlass.min(ops.chunks - stage * chunks, chunks)
        if stage < whole:
            words = stage_words(config, shared, group, thread, use + stage, chunks)
            for chunk in cutlass.range_constexpr(chunks):
                decode(words, chunk, weights[chunk])
        else:
            words = stage_words(config, shared, group, thread, use + stage, chunks - 1)
            for chunk in cutlass.range_constexpr(chunks - 1):
                decode(words, chunk, weights[chunk])
        if stage > 0:
            cute.arch.barrier(barrier_id=barrier + split, number_of_threads=2 * WARPGROUP_THREADS)
            cute.autovec_copy(handed, flat(sums))
        if stage < whole:
            for chunk in cutlass.range_constexpr(chunks):
                issue(config, width, sums, weights[chunk], tokens, use + stage, chunk)
            warpgroup.wait_group(0)
        else:
            for chunk in cutlass.range_constexpr(chunks - 1):
                if chunk < present:
                    issue(config, width, sums, weights[chunk], tokens, use + stage, chunk)
            warpgroup.wait_group(0)
        if stage + 1 < stages:
            cute.autovec_copy(flat(sums), handed)
            following = (split + 1) % splits
            cute.arch.barrier_arrive(barrier_id=barrier + following, number_of_threads=2 * WARPGROUP_THREADS)
        cute.arch.fence_view_async_shared()
        channels["empty"].arrive_warp(use + stage)


def sums_between(config, shared, group, thread) -> cute.Tensor:
    """(n): where a thread's sums are kept between turns; one thread of each consumer shares them."""
    size = config.shape.tokens // 2
    region = cute.make_tensor(
        cute.recast_ptr(shared.sums, dtype=Float32),
        cute.make_layout(
            (size, WARPGROUP_THREADS, config.shape.row_groups), stride=(1, size, size * WARPGROUP_THREADS)
        ),
    )
    return region[None, thread, group]


def await_all(config, group) -> None:
    """Wait until all consumers of the row group have had their turns at the tile; none starts the next tile before."""
    splits = config.shape.splits
    barrier = FIRST_BARRIER + group * (splits + 1) + splits
    cute.arch.barrier(barrier_id=barrier, number_of_threads=splits * WARPGROUP_THREADS)
