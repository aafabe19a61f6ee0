"""Row softmax and fused softmax + top-k."""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.repeated import recorded, watched
from warpspec.softmax import ops
from warpspec.softmax.problem import check_input, check_output
from warpspec.softmax.topk import softmax_topk

__all__ = ["softmax", "softmax_topk"]


def softmax(x: torch.Tensor, *, out: torch.Tensor | None = None, backend: str = "auto") -> torch.Tensor:
    """exp(x - max) / sum over the last dimension, in fp32, rounded to x's dtype.

    x: [..., N], fp32, fp16 or bf16, 1 <= N <= 2**25, any number of rows, any strides and alignment. Rows should be
    contiguous and evenly spaced: anything else is first copied (as torch.softmax does). NaN, +inf, or nothing but
    -inf in a row makes the whole row NaN, as with torch.softmax. out: of x's shape, dtype and device, its rows
    contiguous and evenly spaced; x itself, or memory that x does not share. backend: see
    ``warpspec.common.backend.resolve_backend``; on the CPU "sim" runs the sm_100a kernel in the simulator.

    Returns out, or a new contiguous tensor. Differentiable; with out given, x must not require gradients.
    Traced by torch.compile as an operator, safe to capture in a CUDA graph once called with the same shapes. Bitwise
    repeatable. Long rows may be shared by CTAs of a cooperative launch, which waits for the whole GPU.

    Raises TypeError or ValueError naming the argument, UnsupportedProblem where the backend does not run on the
    device, NotImplementedError for gradients with out and for forward-mode derivatives.
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
        return ops.Softmax.apply(x, backend)
    if plain:
        return ops.run(x, out, backend)
    if out is None:
        return ops.softmax_op(x, backend)
    ops.softmax_out_op(x, out, backend)
    return out
