"""Row softmax and fused softmax + top-k."""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.repeated import recorded, watched
from warpspec.common.transforms import call_operator
from warpspec.softmax import ops
from warpspec.softmax.problem import check_input, check_output
from warpspec.softmax.topk import softmax_topk

__all__ = ["softmax", "softmax_topk"]


def softmax(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """exp(x - max) / sum over the last dimension, in fp32, rounded to x's dtype.

    x: [..., N], fp32, fp16 or bf16, 1 <= N <= 2**25, any number of rows, any strides and alignment. Rows should be
    contiguous and evenly spaced; anything else is copied first (as torch.softmax does). A row that contains NaN or
    +inf, or nothing but -inf, becomes NaN throughout, as in torch.softmax. out: has x's shape, dtype and device, and
    rows that are contiguous and evenly spaced; it is x itself, or memory that x does not share. backend: see
    ``warpspec.common.backend.resolve_backend``; on the CPU, "sim" runs the sm_100a kernel in the simulator.

    Returns out, or a new contiguous tensor. Differentiable; if out is given, x must not require gradients.
    torch.compile traces it as an operator. It can be captured in a CUDA graph after one call with the same shapes.
    Bitwise repeatable. Several CTAs may share a long row in a cooperative launch, which waits for the whole GPU.

    Raises TypeError or ValueError naming the argument, UnsupportedProblem if the backend does not run on the device,
    and NotImplementedError for gradients with out and for forward-mode derivatives.
    """
    plain = isinstance(x, torch.Tensor) and not watched(x)
    records = plain and recorded(x)
    if plain and not records and x.is_cuda and type(backend) is str:
        result = ops.run_again(x, out, backend)
        if result is not None:
            return result
    check_input(x)
    refuse_tangents(x=x)
    if out is not None:
        check_output(out, x)
        if recorded(x, out):
            raise NotImplementedError("out: gradients need a new result, got out with requires_grad")
    if records:
        return ops.record(x, backend)
    if plain:
        return ops.run(x, out, backend)
    if out is None:
        return call_operator(ops.softmax_op, x, backend)
    ops.softmax_out_op(x, out, backend)
    return out
