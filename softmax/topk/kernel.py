"""Softmax + top-k of rows in one launch, on sm_90a and sm_100a: the kernel put together, host side and device side.

A row belongs to one warp, to the warps of a CTA, or to the CTAs of a cluster (``TopkConfig``). Every warp streams
its part of the row (``stream``) and ends with a softmax state per lane and a few candidates in shared memory.
Then the candidates that some threshold rules out are dropped, the rest are ranked by counting who is larger,
which sorts them, and one warp turns the k first into probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint64

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.online import exponential, reference_of
from warpspec.softmax.topk.config import FP32_BYTES, SAMPLES, TopkConfig
from warpspec.softmax.topk.elements import total
from warpspec.softmax.topk.held import Group, hold, write_ranked
from warpspec.softmax.topk.keys import (
    NOTHING_YET,
    candidate_column,
    candidate_key,
    key_of,
    logit_of,
    lowest_candidate,
)
from warpspec.softmax.topk.select import (
    close_list,
    keep_from,
    keep_largest,
    rank_in,
    rank_in_sorted,
    sort_lanes,
)
from warpspec.softmax.topk.stream import Part, give_samples, joint_threshold, renewed, stream
from warpspec.softmax.vectors import row_span

LEADER = 0  # CTA of a cluster that merges its candidates


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA. R rows, W warps a row, C CTAs a cluster, K capacity for k."""

    slots: cute.Tensor  # (SLOT, W * R) candidates of a warp
    ranked: cute.Tensor  # (K, R) candidates of the row, in order
    samples: cute.Tensor  # (SAMPLES) keys of lanes' maxima, SAMPLES / W from every warp
    bound: cute.Tensor  # (1) key that the row's top k does not lie below
    counts: cute.Tensor  # (W) candidates
    maxima: cute.Tensor  # (W) maximum of a warp's elements
    sums: cute.Tensor  # (W) their sum of exp(x - maximum)
    # In the leader, written by every CTA of the cluster:
    lists: cute.Tensor | None  # (K, C) a CTA's candidates, in order
    list_counts: cute.Tensor | None  # (C)
    list_maxima: cute.Tensor | None  # (C)
    list_sums: cute.Tensor | None  # (C)


def allocate(config: TopkConfig) -> Shared:
    allocator = cutlass.memory.SmemAllocator()

    def tensor(dtype, *shape):
        size = VECTOR_BYTES if dtype is Uint64 else FP32_BYTES
        return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=size)

    shared = config.cluster > 1
    return Shared(
        slots=tensor(Uint64, config.list_size, config.warps * config.rows),
        ranked=tensor(Uint64, config.k_capacity, config.rows),
        lists=tensor(Uint64, config.k_capacity, config.cluster) if shared else None,
        samples=tensor(Int32, SAMPLES),
        bound=tensor(Int32, 1),
        counts=tensor(Int32, config.warps),
        maxima=tensor(Float32, config.warps),
        sums=tensor(Float32, config.warps),
        list_counts=tensor(Int32, config.cluster) if shared else None,
        list_maxima=tensor(Float32, config.cluster) if shared else None,
        list_sums=tensor(Float32, config.cluster) if shared else None,
    )


@dataclass(frozen=True)
class HeldShared:
    """Shared memory of a CTA that holds rows. R rows, W warps a row (R or W is 1)."""

    slots: cute.Tensor  # (SLOT, W * R) candidates of a warp, or of the lanes that have a row
    counts: cute.Tensor  # (W * R) of these
    maxima: cute.Tensor  # (W * R)
    sums: cute.Tensor  # (W * R)
    parts: cute.Tensor  # (W * R)


def allocate_held(config: TopkConfig) -> HeldShared:
    allocator = cutlass.memory.SmemAllocator()
    groups = config.warps * config.rows
    slots = cute.make_layout((config.list_size, groups))

    def numbers(dtype):
        return allocator.allocate_tensor(dtype, cute.make_layout(groups), byte_alignment=FP32_BYTES)

    return HeldShared(
        slots=allocator.allocate_tensor(Uint64, slots, byte_alignment=VECTOR_BYTES),
        counts=numbers(Int32),
        maxima=numbers(Float32),
        sums=numbers(Float32),
        parts=numbers(Float32),
    )


class SoftmaxTopk:
    def __init__(self, config: TopkConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        probs: cute.Tensor,
        indices: cute.Tensor,
        stream: CUstream,
    ):
        """Host side. logits: (ROW, COLUMN), columns contiguous. probs, indices: (ROW, K) fp32 and int32."""
        config = self.config
        self.kernel(logits, probs, indices).launch(
            grid=(cute.ceil_div(logits.shape[0], config.rows) * config.cluster, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if cutlass.const_expr(config.cluster > 1) else None,
            smem=config.smem_bytes,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=config.smem_carveout_percent,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, logits: cute.Tensor, probs: cute.Tensor, indices: cute.Tensor):
        config = self.config
        k = Int32(probs.shape[1])
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % WARP_THREADS
        shared = allocate_held(config) if cutlass.const_expr(config.held) else allocate(config)
        if cutlass.const_expr(config.held):
            first = lane // config.lanes * config.lanes
            number = thread % (config.lanes * config.warps)
            row = block * config.rows + thread // (config.lanes * config.warps)
            # Lanes past the last row read that, since they take part in shuffles, and write nothing.
            place = row_span(logits, cutlass.min(row, logits.shape[0] - 1), config.dtype, config.edges)
            slots = shared.slots[None, thread // config.lanes]
            group = Group(place, first, lane - first, number, k, slots)
            row_held(config, group, shared, warp, probs, indices, row)
        elif cutlass.const_expr(config.rows > 1):
            row = block * config.rows + warp
            if row < logits.shape[0]:
                place = row_span(logits, row, config.dtype, config.edges)
                slots = shared.slots[None, warp]
                part = Part(place, Int32(0), Int32(0), lane, k, slots, shared.samples, shared.bound)
                row_of_warp(config, part, shared.ranked[None, warp], probs, indices, row)
        else:
            row, rank = block // config.cluster, block % config.cluster
            place = row_span(logits, row, config.dtype, config.edges)
            slots = shared.slots[None, warp]
            of_row = rank * config.warps + warp
            part = Part(place, of_row, warp, lane, k, slots, shared.samples, shared.bound)
            if cutlass.const_expr(config.warps * config.cluster == 1):
                row_of_warp(config, part, shared.ranked[None, 0], probs, indices, row)
            else:
                row_of_cta(config, part, shared, rank, probs, indices, row)


@cute.jit
def row_held(config: cutlass.Constexpr, group: Group, shared: HeldShared, warp, probs, indices, row):
    maximum, sum_, count = hold(config, group)
    others = [(group.slots, count)]
    if cutlass.const_expr(config.warps > 1):
        if group.lane == 0:
            shared.counts[warp] = count
            shared.maxima[warp] = maximum
            shared.sums[warp] = sum_
        cute.arch.sync_threads()
        others = [(shared.slots[None, w], shared.counts[w]) for w in range(config.warps)]
        maximum, sum_ = state_of_parts(shared.maxima, shared.sums, config.warps, config.accurate)
    write_ranked(config, group, count, others, maximum, sum_, shared.parts, probs, indices, row)


@cute.jit
def row_of_warp(config: cutlass.Constexpr, part: Part, ranked: cute.Tensor, probs, indices, row):
    maximum, sum_, count, threshold = stream(config, part)
    if count > WARP_THREADS:
        own, _ = renewed(config, part, maximum)
        floor = lowest_candidate(cutlass.max(own, threshold))
        count = keep_from(part.slots, count, floor, part.lane)
        if count > WARP_THREADS:
            keep_largest(part.slots, count, part.k, part.lane)
            count = part.k
    close_list(part.slots, count, part.lane)
    maximum, sum_ = state_of_lanes(maximum, sum_, config.accurate)
    cute.arch.sync_warp()
    if part.lane < count:
        word = part.slots[part.lane]
        rank = rank_in(part.slots, count, word)
        if rank < part.k:
            ranked[rank] = word
    cute.arch.sync_warp()
    write(config, ranked, part, maximum, sum_, probs, indices, row)


@cute.jit
def row_of_cta(config: cutlass.Constexpr, part: Part, shared: Shared, rank, probs, indices, row):
    if part.warp_in_cta == 0:
        shared.samples[part.lane] = Int32(NOTHING_YET)
        shared.bound[0] = Int32(NOTHING_YET)
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
    cute.arch.sync_threads()

    # 1. Every warp's part; what the warps' thresholds together rule out.
    maximum, sum_, count, threshold = stream(config, part)
    lane_maximum = key_of(maximum)
    maximum, sum_ = state_of_lanes(maximum, sum_, config.accurate)
    if cutlass.const_expr(config.needs_others):
        give_samples(config, part, sort_lanes(lane_maximum, part.lane, WARP_THREADS))
    if part.lane == 0:
        shared.maxima[part.warp_in_cta] = maximum
        shared.sums[part.warp_in_cta] = sum_
        cute.arch.atomic_max(part.bound.iterator, threshold, sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    bound = shared.bound[0]
    if cutlass.const_expr(config.needs_others):
        bound = cutlass.max(bound, joint_threshold(part))
    floor = lowest_candidate(bound)
    count = keep_from(part.slots, count, floor, part.lane)
    if count > config.k_capacity:
        keep_largest(part.slots, count, part.k, part.lane)
        count = part.k
    close_list(part.slots, count, part.lane)
    if part.lane == 0:
        shared.counts[part.warp_in_cta] = count
    cute.arch.sync_threads()

    # 2. Ranks among the CTA's candidates.
    if cutlass.const_expr(config.cluster > 1):
        cute.arch.cluster_wait()
    for i in cutlass.range(part.lane, count, WARP_THREADS, unroll=1):
        word = part.slots[i]
        position = Int32(0)
        for w in cutlass.range(config.warps, unroll=1):
            position += rank_in(shared.slots[None, w], shared.counts[w], word)
        if position < part.k:
            if cutlass.const_expr(config.cluster > 1):
                place = shared.lists.iterator + (rank * config.k_capacity + position)
                cute.arch.map_dsmem_ptr(place, LEADER).store(word)
            else:
                shared.ranked[position, 0] = word
    maximum, sum_ = state_of_parts(shared.maxima, shared.sums, config.warps, config.accurate)

    # 3. Ranks among the cluster's.
    if cutlass.const_expr(config.cluster > 1):
        if (part.warp_in_cta == 0) & (part.lane == 0):
            candidates = Int32(0)
            for w in cutlass.range_constexpr(config.warps):
                candidates += shared.counts[w]
            for tensor, value in (
                (shared.list_counts, cutlass.min(candidates, part.k)),
                (shared.list_maxima, maximum),
                (shared.list_sums, sum_),
            ):
                cute.arch.map_dsmem_ptr(tensor.iterator + rank, LEADER).store(value)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if rank == LEADER:
            merge_lists(config, part, shared)
            maximum, sum_ = state_of_parts(
                shared.list_maxima, shared.list_sums, config.cluster, config.accurate
            )
    cute.arch.sync_threads()
    if (rank == LEADER) & (part.warp_in_cta == 0):
        write(config, shared.ranked[None, 0], part, maximum, sum_, probs, indices, row)


@cute.jit
def merge_lists(config: cutlass.Constexpr, part: Part, shared: Shared):
    """shared.ranked becomes the k first of all CTAs' candidates; called by all threads of the leader."""
    for c in cutlass.range(part.warp_in_cta, config.cluster, config.warps, unroll=1):
        for i in cutlass.range(part.lane, shared.list_counts[c], WARP_THREADS, unroll=1):
            word = shared.lists[i, c]
            position = i
            for other in cutlass.range(config.cluster, unroll=1):
                if other != c:
                    larger = rank_in_sorted(shared.lists[None, other], shared.list_counts[other], word)
                    position += larger
            if position < part.k:
                shared.ranked[position, 0] = word


@cute.jit
def state_of_lanes(maximum: Float32, sum_: Float32, accurate: cutlass.Constexpr):
    """The softmax state of the warp, known to every lane; its maximum is NaN where a lane's is."""
    largest = logit_of(cute.arch.warp_redux_sync(key_of(maximum), "max"))
    sum_ = sum_ * exponential(maximum - reference_of(largest), accurate)
    return largest, cute.arch.warp_reduction_sum(sum_)


@cute.jit
def state_of_parts(
    maxima: cute.Tensor, sums: cute.Tensor, parts: cutlass.Constexpr, accurate: cutlass.Constexpr
):
    """The state of all parts, joined in a fixed order: pairs of pairs, since sixteen roundings in a row would show."""
    largest = maxima[0]
    for i in cutlass.range_constexpr(1, parts):
        largest = cute.arch.fmax(largest, maxima[i], nan=True)
    reference = reference_of(largest)
    return largest, total([sums[i] * exponential(maxima[i] - reference, accurate) for i in range(parts)])


@cute.jit
def write(
    config: cutlass.Constexpr, ranked, part: Part, maximum: Float32, sum_: Float32, probs, indices, row
):
    """One warp writes the row's k probabilities and indices.

    An exponent is taken against the maximum itself: where that is -inf, NaN or +inf, so is torch.softmax's.
    """
    rounds = config.k_capacity // WARP_THREADS
    weights = cute.make_rmem_tensor(rounds, Float32)
    columns = cute.make_rmem_tensor(rounds, Int32)
    divisor = Float32(0.0)
    for i in cutlass.range_constexpr(rounds):
        weights[i], columns[i] = Float32(0.0), Int32(0)
        if i * WARP_THREADS + part.lane < part.k:
            word = ranked[i * WARP_THREADS + part.lane]
            weights[i] = exponential(logit_of(candidate_key(word)) - maximum, True)
            columns[i] = candidate_column(word)
        divisor += weights[i]
    if cutlass.const_expr(config.renormalize):
        divisor = cute.arch.warp_reduction_sum(divisor)
    else:
        divisor = sum_
    for i in cutlass.range_constexpr(rounds):
        if i * WARP_THREADS + part.lane < part.k:
            probs[row, i * WARP_THREADS + part.lane] = weights[i] / divisor
            indices[row, i * WARP_THREADS + part.lane] = columns[i]
