"""Run a checked problem: choose splits, compile, launch; on a GPU or in the simulator."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from warpspec.common.allocation import allocate
from warpspec.common.architecture import Family
from warpspec.common.launch import Kernel, Target
from warpspec.common.simulator import joined
from warpspec.common.strides import regular_strides
from warpspec.fmha.combine import COMBINE, CombineConfig
from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.launch import partial_blocks
from warpspec.fmha.logits import LogitNumbers, LogitOptions
from warpspec.fmha.plan.splits import choose_splits
from warpspec.latent.gathered.config import (
    GatheredConfig,
    Sm100GatheredConfig,
)
from warpspec.latent.gathered.problem import MAX_KEY_SETS, VALUE_DIM, GatheredProblem


class GatheredKernels(NamedTuple):
    """The gathered-attention kernels of one architecture: the class of their configurations and the kernel class."""

    config: type
    kernel: Kernel


GATHERED = Family(
    "gathered_attention",
    sm90=GatheredKernels(
        GatheredConfig, Kernel("gathered.sm90", "warpspec.latent.gathered.sm90:host_and_arguments")
    ),
    sm100=GatheredKernels(
        Sm100GatheredConfig, Kernel("gathered.sm100", "warpspec.latent.gathered.sm100:host_and_arguments")
    ),
)


class GatheredPlan(NamedTuple):
    """The host's decisions for a problem.

    config: configuration of the attention kernel. splits: parts that each query's keys are cut into. combine:
    configuration of the kernel that combines the parts; None without splits.
    """

    config: AttentionKernel
    splits: int
    combine: CombineConfig | None


@lru_cache(maxsize=4096)
def make_plan(problem: GatheredProblem, target: Target) -> GatheredPlan:
    """Choose splits and configurations. Raises UnsupportedProblem, naming the constraint, if no kernel fits."""
    kind = GATHERED.of(target.architecture).config
    tile_m, tile_n = kind.of().tile_m, kind.of().tile_n
    tiles = sum(-(-k // tile_n) for k in problem.slots)
    splits = problem.num_splits
    if splits is None:
        splits = choose_splits(
            m_tiles=problem.tokens * -(-problem.heads // tile_m),
            kv_tiles=tiles,
            rows=problem.tokens * problem.heads,
            head_dim=512,
            tile_m=tile_m,
            tile_n=tile_n,
            shared_kv=True,
            sm_count=target.sm_count,
        )
    splits = max(1, min(splits, tiles))
    of_kernel = problem.states if splits > 1 else problem
    config = kind.of(
        row_format=problem.format,
        sets=len(problem.slots),
        lengths=problem.lengths,
        has_sink=of_kernel.has_sink,
        has_lse=of_kernel.return_lse,
        normalize=of_kernel.normalize,
        rotate_back=problem.rotate_back,
        splits=splits > 1,
        float8=of_kernel.float8,
        paged=problem.paged,
        has_kv_scale=problem.has_kv_scale,
    )
    combine = None
    if splits > 1:
        combine = CombineConfig.of(
            512,
            splits,
            dtype="bfloat16" if problem.normalize else "float32",
            normalize=problem.normalize,
            has_sink=problem.has_sink,
            has_lse=problem.return_lse,
        )
    return GatheredPlan(config, splits, combine)


def run(problem: GatheredProblem, target: Target, tensors: dict):
    """Launch on the tensors' device and its current stream, without synchronisation.

    tensors: q [T, H, D], o (words, if in FP8), scales, sink, lse, row_max, row_sum, cos_sin, positions, kv_scale (None
    where the problem has none) and key_sets, each as (words, slots, lengths, page_size). Returns the simulator's
    report, or None on a GPU.
    """
    plan = make_plan(problem, target)
    q, o = (regular_strides(tensors[name]) for name in "qo")
    scales, sink = tensors["scales"], tensors["sink"]
    scales = None if scales is None else scales[None]
    row_stats = [
        None if t is None else t[None] for t in (tensors["lse"], tensors["row_max"], tensors["row_sum"])
    ]
    angles = (tensors["cos_sin"], tensors["positions"], tensors.get("kv_scale"))
    sets = list(tensors["key_sets"]) + [(None, None, None, 1)] * (MAX_KEY_SETS - len(problem.slots))
    flat = [part for each in sets for part in each]
    numbers = (*LogitNumbers.of(LogitOptions(problem.scale)), plan.splits, target.sm_count)
    attention = GATHERED.of(target.architecture).kernel.launcher(plan.config, target)
    with target.current():
        if plan.combine is None:
            return attention(q[None], o[None], scales, sink, *row_stats, *angles, *flat, *numbers)
        shape = (1, *q.shape[:2], VALUE_DIM)
        partial = allocate(partial_blocks(shape, plan.splits), q.device)
        first = attention(q[None], partial[0], None, None, None, *partial[1:], *angles, *flat, *numbers)
        if problem.float8:
            from warpspec.latent.gathered.float8 import COMBINE_FLOAT8

            combine = COMBINE_FLOAT8.launcher(plan.combine, target)
            second = combine(*partial, sink, o[None], scales, row_stats[0])
        else:
            combine = COMBINE.launcher(plan.combine, target)
            second = combine(*partial, sink, o[None], *row_stats, None)
    return joined(first, second)
