"""The kernel compiled once a configuration, run on a GPU or in the simulator."""

from __future__ import annotations

import functools

import torch

from warpspec.common.compile import compile_kernel, fake_rows
from warpspec.softmax.problem import DTYPES, VECTOR_BYTES
from warpspec.softmax.topk.choose import choose
from warpspec.softmax.topk.config import TopkConfig

SIMULATED_ARCH = "sm_100a"
SIMULATED_SM_COUNT = 148  # B200


def compiled(config: TopkConfig, arch: str, native: bool = False):
    """The kernel of a configuration for ``arch``; native: see ``compile_kernel``."""
    return compile_kernel(
        ("softmax_topk", config), lambda: _host_and_arguments(config), arch=arch, native=native
    )


def _host_and_arguments(config: TopkConfig) -> tuple:
    """The host function and its arguments but the stream."""
    import cutlass

    from warpspec.softmax.topk.kernel import SoftmaxTopk
    from warpspec.softmax.vectors import TYPES

    return (
        SoftmaxTopk(config),
        fake_rows(TYPES[config.dtype], 2, alignment=None if config.edges else VECTOR_BYTES),
        fake_rows(cutlass.Float32, 2),
        fake_rows(cutlass.Int32, 2),
    )


def configuration(logits: torch.Tensor, k: int, renormalize: bool, sm_count: int) -> TopkConfig:
    """The kernel for logits (ROW, COLUMN)."""
    rows, length = logits.shape
    width = logits.element_size()
    edges = (logits.data_ptr() | logits.stride(0) * width | length * width) % VECTOR_BYTES != 0
    return choose(rows, length, k, DTYPES[logits.dtype], edges, renormalize, sm_count)


@functools.cache
def target(device_index: int) -> tuple[str, int]:
    """(architecture to compile for, SMs) of a CUDA device."""
    properties = torch.cuda.get_device_properties(device_index)
    return f"sm_{properties.major}{properties.minor}a", properties.multi_processor_count


def launcher(logits: torch.Tensor, k: int, renormalize: bool):
    """The kernel for CUDA logits (ROW, COLUMN), compiled: call it with (logits, probs, indices), matrices, on their
    device's current stream. It serves all tensors of this shape, stride, dtype, device and alignment to 16 bytes."""
    arch, sm_count = target(logits.device.index)
    kernel = compiled(configuration(logits, k, renormalize, sm_count), arch, native=True)
    # The DSL's wrapper for keyword arguments costs more than the launch.
    unwrap = getattr(kernel, "__tvm_ffi_object__", None)
    return unwrap() if unwrap else kernel


def run_sim(logits, probs, indices, renormalize: bool):
    """Execute the kernel on CPU tensors in the simulator; returns its ``SimReport``."""
    from warpspec import sim  # brings in llvmlite, an optional dependency

    config = configuration(logits, probs.shape[1], renormalize, SIMULATED_SM_COUNT)
    return sim.run(compiled(config, SIMULATED_ARCH), logits, probs, indices, None)
