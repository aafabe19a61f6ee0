"""Grouped GEMM on sm_90a with streamed 4-bit weights: compiles each configuration once, runs it on a GPU or
simulated."""

from __future__ import annotations

import torch

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import WARPGROUP_ROWS
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.operands import fakes
from warpspec.moe.permute import head_rows
from warpspec.moe.sm90.config import StreamConfig
from warpspec.moe.streamed import StreamedWeights, chunks_of


def _host_and_arguments(config: StreamConfig) -> tuple:
    """The host function and its arguments without the stream."""
    from warpspec.moe.sm90.kernel import StreamedGemm
    from warpspec.moe.sm90.tiles import StreamGrid, StreamOperands

    return (StreamedGemm(config), *fakes(StreamOperands, config), *fakes(StreamGrid, config))


stream_kernel = Kernel("moe.stream", _host_and_arguments)  # by StreamConfig


def entries_bound(rows: int, experts: int, tokens: int) -> int:
    """The most entries of work that rows of experts can make if each entry has at most ``tokens`` rows."""
    return rows // tokens + min(experts, rows)


def grouped_gemm(
    config: StreamConfig,
    tokens: torch.Tensor,
    source: torch.Tensor | None,
    w: StreamedWeights,
    work: torch.Tensor,
    out: torch.Tensor,
    *,
    row_scale: torch.Tensor | None = None,
    limit: float | None = None,
    ctas: int | None = None,
    target: Target | None = None,
    seed: int = 0,
):
    """out[r] = epilogue(tokens[r] @ w[e]^T) for the rows of every entry of work, in one launch without synchronisation.

    tokens: bf16 [T or R, padded K], columns in the kernel's order (``streamed.reorder``). source: int32 [R], if the
    configuration has choices: row r is token source[r] // choices; None: tokens are the rows. work: int32 [heads +
    entries, 4]: where each class of entries ends, then entries (expert, first row, rows). If the configuration has a
    ``Routing``, work is topk_ids, int32 [T, k], source is None, and tokens that are looked up are [T, K] with columns
    in their own order. row_scale: fp32 [T], if the configuration rounds. out: [R, columns], bf16, or fp32 if it rounds;
    for w13 the columns are in the order of the next GEMM's activations. ctas: replaces the chosen number. CPU tensors
    run in the simulator, whose SimReport is returned; otherwise the result is None.
    """
    target = target or target_of(out.device)
    if not target.architecture.wgmma:
        raise UnsupportedProblem(f"grouped_gemm: {target.arch} does not have the wgmma of sm_90a")
    shape = config.shape
    entries = len(work) * config.routing.taken if config.routing else len(work) - head_rows(config.widths)
    lists = (None, work) if config.routing else (work, None)
    tiles = entries * -(-w.row_tiles // shape.row_groups)
    ctas = ctas or max(1, min(tiles, target.sm_count * shape.ctas_per_sm))
    return stream_kernel.run(
        config,
        target,
        *(tokens, source, row_scale, w.data, w.global_scale, w.bias, *lists, out),
        *(chunks_of(w.k), float(limit or 0.0), ctas),
        seed=seed,
    )


__all__ = ["WARPGROUP_ROWS", "StreamConfig", "entries_bound", "grouped_gemm", "stream_kernel"]
