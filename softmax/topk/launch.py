"""The kernel compiled once a configuration, run on a GPU or in the simulator."""

from __future__ import annotations

import functools

import torch

from warpspec.common.compile import compile_cached
from warpspec.softmax.launch import TVM_FFI
from warpspec.softmax.problem import DTYPES, VECTOR_BYTES
from warpspec.softmax.topk.choose import choose
from warpspec.softmax.topk.config import TopkConfig

SIMULATED_ARCH = "sm_100a"
SIMULATED_SM_COUNT = 148  # B200


def compiled(config: TopkConfig, arch: str, native: bool = False):
    """The kernel of a configuration for ``arch``. native: callable on CUDA tensors; else for the simulator."""
    return compile_cached(
        ("softmax_topk", config, native),
        lambda: _host_and_arguments(config, native),
        arch=arch,
        options=TVM_FFI if native else "",
    )


def _host_and_arguments(config: TopkConfig, native: bool) -> tuple:
    """The host function and fake arguments: numbers of rows and columns, the row stride and k unknown."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from warpspec.softmax.topk.kernel import SoftmaxTopk
    from warpspec.softmax.vectors import TYPES

    rows, k = cute.sym_int(), cute.sym_int()
    step = 1 if config.edges else config.per_vector

    def matrix(dtype, columns, step, alignment):
        return make_fake_tensor(
            dtype,
            (rows, columns),
            stride=(cute.sym_int64(divisibility=step), 1),
            assumed_align=alignment,
            memspace=cute.AddressSpace.gmem,
        )

    dtype = TYPES[config.dtype]
    return (
        SoftmaxTopk(config),
        matrix(
            dtype, cute.sym_int(divisibility=step), step, dtype.width // 8 if config.edges else VECTOR_BYTES
        ),
        matrix(cutlass.Float32, k, 1, 4),
        matrix(cutlass.Int32, k, 1, 4),
        make_fake_stream(use_tvm_ffi_env_stream=native),
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
