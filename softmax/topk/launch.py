"""Runs the kernel on a GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Kernel, target_of
from warpspec.softmax.problem import DTYPES
from warpspec.softmax.topk.config import TopkConfig
from warpspec.softmax.topk.plan import choose_config


def _host_and_arguments(config: TopkConfig) -> tuple:
    """The host function and its arguments without the stream."""
    import cutlass

    from warpspec.softmax.topk.kernel import SoftmaxTopk
    from warpspec.softmax.vectors import TYPES

    return (
        SoftmaxTopk(config),
        fake_rows(TYPES[config.dtype], 2, alignment=None if config.edges else VECTOR_BYTES),
        fake_rows(cutlass.Float32, 2),
        fake_rows(cutlass.Int32, 2),
    )


topk_kernel = Kernel("softmax_topk", _host_and_arguments)


def launcher(logits: torch.Tensor, k: int, renormalize: bool) -> Callable:
    """The compiled kernel for logits (ROW, COLUMN), as a function of the matrices (logits, probs, indices).

    Call it while their GPU is the current device. It serves all tensors of this shape, stride, dtype, device and
    alignment to 16 bytes. On CPU tensors it returns the ``SimReport``.
    """
    rows, length = logits.shape
    width = logits.element_size()
    edges = (logits.data_ptr() | logits.stride(0) * width | length * width) % VECTOR_BYTES != 0
    target = target_of(logits.device)
    config = choose_config(rows, length, k, DTYPES[logits.dtype], edges, renormalize, target.sm_count)
    return topk_kernel.launcher(config, target)
