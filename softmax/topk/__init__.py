"""Softmax fused with top-k: the k largest probabilities of every row and their columns."""

from __future__ import annotations

import torch

from warpspec.common.backend import refuse_tangents
from warpspec.common.forward_only import forward_only
from warpspec.common.repeated import recorded, watched
from warpspec.common.transforms import call_operator
from warpspec.softmax.topk import ops

__all__ = ["softmax_topk"]


def softmax_topk(
    logits: torch.Tensor, k: int, *, renormalize: bool = False, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of softmax(logits, -1) and their columns, in one launch that reads the logits once.

    A row's V probabilities never reach memory. Forward only.

    Args:
        logits: [..., V], fp32, fp16 or bf16, V in 1..2**20, any strides. If rows are not contiguous, or not evenly
            spaced, they are copied first. Never modified.
        k: 1 <= k <= min(V, 128).
        renormalize: divide the probabilities by the sum of the k.
        backend: "auto", "sm90", "sm100" (GPU kernels, CUDA tensors), "sim" (the sm100 kernel simulated on the CPU, CPU
            tensors) or "reference" (FP32 torch, any device). "auto" is the device's kernel for CUDA tensors and "sim"
            for CPU tensors; the environment variable WARPSPEC_BACKEND overrides it.

    Returns:
        (probs fp32 [..., k], indices int32 [..., k]), ordered by the *logits*: NaN first (as in torch.topk), then from
        the largest down; of equal logits (-0 equals +0) the lower column comes first. Indices are therefore exact even
        where probabilities round to the same number, or to 0. probs are what torch.softmax gives at these columns, in
        fp32: 0 where the logit is -inf, and NaN throughout a row that contains NaN or +inf, or nothing but -inf.

    Raises:
        TypeError: an argument of the wrong kind or dtype. ValueError: wrong shape or value. UnsupportedProblem: the
        backend does not run on the tensor's device. NotImplementedError: backward() through the result, or a
        forward-mode derivative.
    """
    if type(backend) is not str:
        raise TypeError(f"backend: must be a string, got {backend!r}")
    if not isinstance(logits, torch.Tensor) or watched(logits):
        ops.check(logits, k, renormalize)
        refuse_tangents(logits=logits)
        return call_operator(ops.softmax_topk_operator, logits, k, renormalize, backend)
    if recorded(logits):
        return forward_only(ops.NO_GRADIENTS, ops.call, logits, k, renormalize, backend)
    return ops.call(logits, k, renormalize, backend)
