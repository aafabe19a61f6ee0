"""A row's threshold: a lower bound of its k-th largest element, from the maxima of all its lanes. Device side.

A *sample* of stride q of some values is their q-th, 2 q-th, ... largest. If n samples of several sets reach a number,
at least n q values do. Every warp gives its CTA samples of its lanes' maxima, and every CTA of a cluster gives all
others samples of its sorted samples. Each sort is thus of 32 numbers, one a lane.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.softmax.topk.again import WarpRow
from warpspec.softmax.topk.config import SAMPLE_RANK, SAMPLES
from warpspec.softmax.topk.keys import NOTHING_YET, key_of
from warpspec.softmax.topk.select import sort_lanes


def ceil_div(a, b):
    return (a + b - 1) // b


@cute.jit
def sampled(ordered: Int32, number, stride) -> Int32:
    """The ``number``-th sample (from 0) of the lanes' keys, which are in descending order."""
    rank = (number + 1) * stride - 1
    key = cute.arch.shuffle_sync(ordered, cutlass.min(rank, WARP_THREADS - 1))
    return Int32(cutlass.select_(Boolean(rank < WARP_THREADS), key, Int32(NOTHING_YET)))


@cute.jit
def threshold_of(
    config: cutlass.Constexpr, mine: WarpRow, warp, rank, samples, cluster_samples, maximum: Float32
) -> Int32:
    """A key that no element of the row's top k is below. Called by all threads that share the row.

    warp: its number in the CTA. rank: the CTA's rank in its cluster. samples: (SAMPLES) keys in shared memory, for the
    CTA's samples; None if a warp has the row to itself. cluster_samples: likewise, for the samples of all CTAs.
    maximum: the lane's.
    """
    ordered = sort_lanes(key_of(maximum), mine.lane, WARP_THREADS)
    own = Int32(NOTHING_YET)  # threshold of the warp's share; if k exceeds its lanes, there is none
    if cutlass.const_expr(config.k_capacity <= WARP_THREADS):
        own = cute.arch.shuffle_sync(ordered, mine.k - 1)
    joint = own
    if cutlass.const_expr(config.warps * config.cluster > 1):
        given = SAMPLES // config.warps
        stride = ceil_div(mine.k, SAMPLE_RANK * config.cluster)
        sample = sampled(ordered, mine.lane % given, stride)
        if mine.lane < given:
            samples[warp * given + mine.lane] = sample
        cute.arch.sync_threads()
        if cutlass.const_expr(config.cluster > 1):
            given_on = SAMPLES // config.cluster
            stride_on = ceil_div(mine.k, SAMPLE_RANK * stride)
            cute.arch.cluster_wait()  # all CTAs have started
            if warp == 0:
                ordered = sort_lanes(samples[mine.lane], mine.lane, WARP_THREADS)
                sample = sampled(ordered, mine.lane % given_on, stride_on)
                place = cluster_samples.iterator + (rank * given_on + mine.lane % given_on)
                cute.arch.map_dsmem_ptr(place, mine.lane // given_on).store(sample)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            stride = stride * stride_on
            samples = cluster_samples
        ordered = sort_lanes(samples[mine.lane], mine.lane, WARP_THREADS)
        joint = cute.arch.shuffle_sync(ordered, ceil_div(mine.k, stride) - 1)
    return cutlass.max(own, joint)
