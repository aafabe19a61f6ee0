"""Joins softmax states of lanes, warps and CTAs, and writes the row's result. Device side."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.hardware import WARP_THREADS
from warpspec.softmax.online import exponential, reference_of
from warpspec.softmax.topk.config import LEADER
from warpspec.softmax.topk.keys import candidate_column, candidate_key, key_of, logit_of


@cute.jit
def state_of_lanes(maximum: Float32, sum_: Float32, accurate: cutlass.Constexpr):
    """The softmax state of the warp, known to every lane; its maximum is NaN if a lane's is."""
    largest = logit_of(cute.arch.warp_redux_sync(key_of(maximum), "max"))
    sum_ = sum_ * exponential(maximum - reference_of(largest), accurate)
    return largest, cute.arch.warp_reduction_sum(sum_)


@cute.jit
def joint_state(
    maxima: cute.Tensor, sums: cute.Tensor, count: cutlass.Constexpr, accurate: cutlass.Constexpr
):
    """The joint state of ``count`` states, at most as many as a warp has lanes. Called by a warp.

    Joined in a fixed order, in pairs of pairs: sixteen roundings one after another would show.
    """
    lane = cute.arch.lane_idx()
    maximum, sum_ = -Float32.inf, Float32(0.0)
    if lane < count:
        maximum, sum_ = maxima[lane], sums[lane]
    return state_of_lanes(maximum, sum_, accurate)


def send_state(shared, rank, count, maximum: Float32, sum_: Float32) -> None:
    """Give the cluster's leader the number of candidates of the CTA ``rank``, and its state. Called by a thread."""
    given = ((shared.list_counts, count), (shared.list_maxima, maximum), (shared.list_sums, sum_))
    for tensor, value in given:
        cute.arch.map_dsmem_ptr(tensor.iterator + rank, LEADER).store(value)


@cute.jit
def write(config: cutlass.Constexpr, ranked, mine, maximum: Float32, sum_: Float32, probs, indices, row):
    """One warp writes the row's k probabilities and indices.

    Exponents are relative to the maximum itself, so that a maximum of -inf, NaN or +inf gives NaN, as in torch.softmax.
    """
    rounds = config.k_capacity // WARP_THREADS
    weights = cute.make_rmem_tensor(rounds, Float32)
    columns = cute.make_rmem_tensor(rounds, Int32)
    divisor = Float32(0.0)
    for i in cutlass.range_constexpr(rounds):
        weights[i], columns[i] = Float32(0.0), Int32(0)
        if i * WARP_THREADS + mine.lane < mine.k:
            word = ranked[i * WARP_THREADS + mine.lane]
            weights[i] = exponential(logit_of(candidate_key(word)) - maximum, True)
            columns[i] = candidate_column(word)
        divisor += weights[i]
    if cutlass.const_expr(config.renormalize):
        divisor = cute.arch.warp_reduction_sum(divisor)
    else:
        divisor = sum_
    for i in cutlass.range_constexpr(rounds):
        if i * WARP_THREADS + mine.lane < mine.k:
            probs[row, i * WARP_THREADS + mine.lane] = weights[i] / divisor
            indices[row, i * WARP_THREADS + mine.lane] = columns[i]
