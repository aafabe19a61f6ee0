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

    q: bf16 [T, H, D], 1 to 128 heads, D that of the pools' rows (512; 576 for "v3.2-fp8", whose first 512 numbers are
    the values). key_sets: 1 to 3 ``KeySet`` of one row format, together the keys; a row given twice counts twice.
    scale: of logits, by default 512**-0.5. sink: [H] floating, one more logit per head without a value, in natural
    units. rotate_back: (cos_sin, positions), the table and int32 [T]: o's last 64 numbers are rotated by minus the
    query's angles; a position beyond the table makes them NaN on a GPU, on the CPU ValueError. num_splits: parts that
    each query's keys are cut into; None chooses. out_format: "bf16", or "fp8": o is a ``projection.Float8Tensor``, the
    bits that ``quantize_output`` makes of o in bf16. out: o, to be written to, in memory that no other argument has.

    Returns o bf16 [T, H, 512]; with return_lse also lse fp32 [H, T] = ln(sum over keys of exp(scale q.k)), the sink not
    counted; with normalize=False ``AttentionState`` of packed shapes, which ``merge`` combines with others. A query
    that sees no key gives 0 and lse -inf. Slots of no row, and slots past a query's length, are not seen, whatever
    their rows hold; lengths are clamped to 0..K on a GPU, and ValueError on the CPU beyond. A row of NaN that is seen
    makes NaN: so does an e4m3 NaN for the 64 numbers of its block, whatever its scale.

    Kernels read "v4-fp8" and "bf16" rows. Few queries are split over CTAs by their keys, whose states a second launch
    joins.
    Raises TypeError or ValueError naming the argument, UnsupportedProblem where a backend cannot run it. Forward only.
    """
    refuse_tangents(q=q)
    problem = GatheredProblem.of(
        q, key_sets, scale=scale, sink=sink, normalize=normalize, return_lse=return_lse, rotate_back=rotate_back,
        num_splits=num_splits, out=out, out_format=out_format,
    )  # fmt: skip
    for name, tensor in (("q", q), ("sink", sink)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: gradients are not implemented (forward only)")
    return ops.call(problem, q, list(key_sets), sink, rotate_back, out, backend)
