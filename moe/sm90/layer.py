"""The layer on sm_90a: sort, GEMM 1 with the activation, GEMM 2, weighted sum; each starts as the one before ends."""

from __future__ import annotations

import torch

from warpspec.common.launch import Target
from warpspec.moe.permute import SortedTokens
from warpspec.moe.problem import GroupedProblem, LayerProblem
from warpspec.moe.sm90 import grouped_gemm
from warpspec.moe.sm90.config import Shape, StreamConfig
from warpspec.moe.sm90.plan import choose_shape
from warpspec.moe.sort import sort_choices
from warpspec.moe.streamed import StreamedWeights, padded_k, reorder
from warpspec.moe.unpermute import unpermute


def gated_config(w13: StreamedWeights, shape: Shape, problem, **flags) -> StreamConfig:
    return StreamConfig(
        shape=shape,
        block=w13.block,
        epilogue=problem.activation,
        has_limit=problem.limit is not None,
        has_bias=w13.bias is not None,
        **flags,
    )


def run_layer(
    problem: LayerProblem,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: StreamedWeights,
    w2: StreamedWeights,
    out: torch.Tensor,
    *,
    target: Target,
    shape: Shape | None = None,
) -> list:
    """out [T, H] of a checked problem with rows, four launches on the current stream. Returns the simulator's reports,
    or Nones. shape: instead of the chosen tiles."""
    if x.shape[0] == 1:
        x = x[0][None]  # a stride that means nothing need not be even
    rows, experts = problem.rows, w13.experts
    shape = shape or choose_shape(rows, experts)
    tokens, work, activations, report = sort_choices(
        topk_ids.contiguous(), experts, shared=problem.shared, rows=shape.tokens, x=x, target=target
    )
    h = x.new_empty(rows, padded_k(w2.k))
    config = gated_config(w13, shape, problem, gathers=True, ordered=True)
    choices = problem.choices + problem.shared
    options = dict(target=target)
    reports = [report]
    reports.append(
        grouped_gemm(
            config, activations, tokens.source, w13, work, h, choices=choices, limit=problem.limit, **options
        )
    )
    y = x.new_empty(rows, problem.hidden)
    config = StreamConfig(shape=shape, block=w2.block, has_bias=w2.bias is not None, early=True)
    reports.append(grouped_gemm(config, h, None, w2, work, y, **options))
    reports.append(
        unpermute(y, tokens.position, topk_weights.contiguous(), out, dependent=True, target=target)
    )
    return reports


def run_grouped(
    problem: GroupedProblem,
    a: torch.Tensor,
    tokens: SortedTokens,
    w13: StreamedWeights,
    out: torch.Tensor,
    *,
    target: Target,
) -> list:
    """out [R, I] of rows that are sorted already. Returns the simulator's reports, or Nones."""
    shape = choose_shape(problem.rows, problem.experts)
    work = list_work(tokens.offsets, shape.tokens, problem.rows)
    config = gated_config(w13, shape, problem)
    return [grouped_gemm(config, reorder(a), None, w13, work, out, limit=problem.limit, target=target)]


def list_work(offsets: torch.Tensor, most: int, rows: int) -> torch.Tensor:
    """The list of work of running ends, in torch operations: int32 [entries + 1, 4], as of ``sort.sort_choices``."""
    from warpspec.moe.sort import WORK_COLUMNS, entries_bound

    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    counts = (offsets - starts + most - 1) // most
    ends = torch.cumsum(counts, 0, dtype=torch.int32)
    bound = entries_bound(rows, len(offsets), most)
    entry = torch.arange(bound, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(ends, entry, right=True).clamp(max=len(offsets) - 1)
    first = starts[expert] + (entry - (ends - counts)[expert]) * most
    work = offsets.new_zeros(bound + 1, WORK_COLUMNS)
    work[0, 0] = ends[-1]
    work[1:, 0] = expert
    work[1:, 1] = first
    work[1:, 2] = (offsets[expert] - first).clamp(max=most)
    return work
