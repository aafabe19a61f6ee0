"""Attention over rows of paged latent caches, by slot: DeepSeek-V4's window and selected or compressed keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.fmha.state import AttentionState
from warpspec.latent.gathered import ops
from warpspec.latent.gathered.problem import GatheredProblem, KeySet
from warpspec.latent.projection.float8 import Float8Tensor

__all__ = ["KeySet", "gathered_attention"]


def gathered_attention(
    q: torch.Tensor,
    key_sets: Sequence[KeySet],
    *,
    scale: float | None = None,
    sink: torch.Tensor | None = None,
    normalize: bool = True,
    return_lse: bool = False,
    rotate_back: tuple[torch.Tensor, torch.Tensor] | None = None,
    num_splits: int | None = None,
    out_format: str = "bf16",
    out: torch.Tensor | Float8Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | Float8Tensor | tuple[torch.Tensor | Float8Tensor, torch.Tensor] | AttentionState:
    """Attention of each query over its own rows of one or more pools; keys and values are the same rows. One launch.

    q: bf16 [T, H, D], 1 to 128 heads; D is that of the pools' rows (512; 576 for "v3.2-fp8", whose first 512 numbers
    are the values). key_sets: 1 to 3 ``KeySet`` of one row format, which together are the keys; a row given twice
    counts twice. scale: multiplies the logits, 512**-0.5 by default. sink: floating [H], one more logit per head, which
    has no value, in natural units. rotate_back: (cos_sin, positions), the table and int32 [T]: rotate the last 64
    numbers of o by minus the query's angles. A position beyond the table makes them NaN on a GPU and raises ValueError
    on the CPU. num_splits: number of splits of each query's keys, as in ``warpspec.fmha.attention``.
    out_format: "bf16" or "fp8"; in FP8, o is a ``projection.Float8Tensor`` with the bits that ``quantize_output`` makes
    of the bf16 result. out: memory for o that no other argument uses.

    Returns o bf16 [T, H, 512]. With return_lse it also returns lse fp32 [H, T] = ln(sum over keys of exp(scale q.k)),
    without the sink. With normalize=False it returns an ``AttentionState`` of packed shapes, which ``merge`` combines
    with others. A query without keys gives 0 and lse -inf. Queries do not see slots of no row, nor slots past their
    length, whatever memory holds there. A length outside 0..K is clamped on a GPU and raises ValueError on the CPU. A
    visible row of NaN makes the result NaN, and so does an e4m3 NaN, which stands for the 64 numbers of its block
    whatever the block's scale.

    Kernels compute on bf16 keys: "v4-fp8" rows are converted exactly, "v3.2-fp8" rows, whose scales are any fp32
    numbers, rounded once. If there are few queries, several CTAs split each query's keys, and a second launch combines
    their states; or, on sm_90a, CTAs share out the keys of all queries, and add up the states themselves.
    Raises TypeError or ValueError naming the argument, and UnsupportedProblem where a backend cannot run it. Forward
    only.
    """
    refuse_tangents(q=q)
    problem = GatheredProblem.of(
        q, key_sets, scale=scale, sink=sink, normalize=normalize, return_lse=return_lse, rotate_back=rotate_back,
        num_splits=num_splits, out=out, out_format=out_format,
    )  # fmt: skip
    written = out.data if isinstance(out, Float8Tensor) else out
    for name, tensor in (("q", q), ("sink", sink), ("out", written)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: gradients are not implemented (forward only)")
    return ops.call(problem, q, list(key_sets), sink, rotate_back, out, backend)
