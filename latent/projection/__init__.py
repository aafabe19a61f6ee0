"""The grouped output projection after gathered attention (DeepSeek-V4's wo_a), in bf16 or FP8.

Each group of heads has a matrix product of its own.
"""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.checks import check_operand
from warpspec.latent.projection import ops
from warpspec.latent.projection.float8 import Float8Tensor
from warpspec.latent.projection.problem import ProjectionProblem

__all__ = ["Float8Tensor", "output_projection", "quantize_output"]


def output_projection(
    o: torch.Tensor | Float8Tensor,
    weight: torch.Tensor | Float8Tensor,
    *,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Multiply each group's columns of o by the group's weight: result[t, g] = weight[g] @ o[t, group g]. One launch.

    o: [T, H, D], contiguous within a token, or [T, H D]. weight: [G, N, K] with G K = H D: group g, which is H / G
    heads, takes K numbers from g K on. Both are bf16, or both are ``Float8Tensor`` as ``Float8Tensor.quantize`` makes
    them: o with a scale for every 128 numbers of a row, weight with one for every 128 x 128. out: bf16 [T, G, N], in
    memory that no other argument uses.

    Returns bf16 [T, G, N], whose ``flatten(1)`` is the input of wo_b. Sums are fp32. In FP8 the tensor core sums 128
    products, which are then scaled in fp32; a NaN in a row makes that row NaN and no other. Kernels require K to be a
    multiple of 128 and N a multiple of 64, in FP8 of 128. T may be 0.
    Raises TypeError or ValueError naming the argument, and UnsupportedProblem where a backend cannot run it. Forward
    only.
    """
    tensors = {"o": o, "weight": weight, "out": out}
    refuse_tangents(**{name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)})
    problem = ProjectionProblem.of(o, weight, out)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: gradients are not implemented (forward only)")
    return ops.call(problem, o, weight, out, backend)


def quantize_output(o: torch.Tensor, *, backend: str = "auto") -> Float8Tensor:
    """Quantise attention's output to FP8 for ``output_projection``; the bits of ``Float8Tensor.quantize``. One launch.

    o: bf16 [T, H, 512], with any strides that leave rows aligned to 16 bytes. The result has data [T, H, 512] and
    scales [T, H, 4]. Raises TypeError or ValueError naming the argument, and UnsupportedProblem where a backend cannot
    run it. Forward only.
    """
    refuse_tangents(o=o)
    check_operand("o", o, (torch.bfloat16,), (-1, -1, 512), getattr(o, "device", None), aligned=True)
    if o.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("o: gradients are not implemented (forward only)")
    return ops.quantize(o, backend)
