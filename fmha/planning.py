"""What an architecture works out before a launch: configuration, splits of the keys, workspace, numbers."""

from __future__ import annotations

import math

import torch

from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.splits import choose_splits, visited_tiles

# A scale of 0 would turn a hidden score, -inf, into NaN. This one keeps it and weighs all visible keys alike.
SMALLEST_SCALE = 2.0**-100


def plan_of(config_class, problem: AttentionProblem, sm_count: int) -> tuple:
    """(configuration, number of splits of the keys) for a problem on a device of ``sm_count`` SMs.

    config_class: an architecture's ``AttentionConfig``.
    """
    config = config_class.of(problem)
    splits = problem.num_splits
    if splits is None:
        plain = problem.key_stride == 1  # only then do positions count keys
        kv_tiles = visited_tiles(
            seq_k=problem.seq_k,
            queries=config.queries,
            tile_n=config.tile_n,
            left=problem.window_left if plain else None,
            right=problem.window_right if plain else None,
            causal=problem.causal and plain,
        )
        query_tiles, head_tiles = -(-problem.seq_q // config.queries), -(-problem.group // config.pack)
        splits = choose_splits(
            m_tiles=query_tiles * head_tiles * problem.heads_kv * problem.batch,
            kv_tiles=kv_tiles,
            rows=problem.batch * problem.seq_q * problem.heads_q,
            head_dim=problem.head_dim,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            shared_kv=config.shared_kv,
            sm_count=sm_count,
            ctas_per_sm=config.shape.ctas_per_sm,
        )
    return (config, 1) if splits == 1 else (config_class.of(problem, splits=True), splits)


def partial_results(
    problem: AttentionProblem, splits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Workspace of split keys, fp32: o [S, B, Sq, Hq, D], row_max and row_sum [S, B, Hq, Sq]."""
    rows, heads = (splits, problem.batch), problem.heads_q
    kind = {"dtype": torch.float32, "device": problem.device}
    return (
        torch.empty(*rows, problem.seq_q, heads, problem.head_dim, **kind),
        *(torch.empty(*rows, heads, problem.seq_q, **kind) for _ in range(2)),
    )


def scalars(problem: AttentionProblem) -> tuple[float, int, int]:
    """(|scale| * log2(e), window left, window right); a window side that is unbounded is not read."""
    scale = max(abs(problem.scale), SMALLEST_SCALE)
    return scale * math.log2(math.e), problem.window_left or 0, problem.window_right or 0
