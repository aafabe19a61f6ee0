"""Attention on sm_100a: the kernel compiled once a configuration, run on a GPU or in the simulator."""

from __future__ import annotations

import math

import torch

from warpspec.common.compile import compile_cached
from warpspec.fmha.problem import ROW_ALIGNMENT, AttentionProblem
from warpspec.fmha.sm100.config import AttentionConfig

__all__ = ["AttentionConfig", "compiled", "run_cuda", "run_sim", "supports"]

SIMULATED_ARCH = "sm_100a"
# A scale of 0 would turn a hidden score, -inf, into NaN. This one keeps it and weighs all visible keys alike.
SMALLEST_SCALE = 2.0**-100


def supports(problem: AttentionProblem) -> None:
    """Raise UnsupportedProblem, naming the constraint, for a problem this kernel does not run."""
    AttentionConfig.of(problem)


def run_sim(problem, q, k, v, sink, kv_lengths, q_start, o, lse, row_max, row_sum):
    """Execute the compiled kernel on CPU tensors in the simulator; returns its ``SimReport``.

    sink: fp32. Writes o and, where given, lse, row_max, row_sum in place.
    """
    from warpspec import sim  # brings in llvmlite, an optional dependency

    kernel = compiled(AttentionConfig.of(problem), SIMULATED_ARCH)
    tensors = (q, k, v, o, sink, kv_lengths, q_start, lse, row_max, row_sum)
    return sim.run(kernel, *tensors, *scalars(problem), None)


def run_cuda(problem, q, k, v, sink, kv_lengths, q_start, o, lse, row_max, row_sum) -> None:
    """Launch on the tensors' device and its current stream: one kernel, no synchronisation."""
    import cuda.bindings.driver as driver
    from cutlass.cute.runtime import from_dlpack

    major, minor = torch.cuda.get_device_capability(q.device)
    kernel = compiled(AttentionConfig.of(problem), f"sm_{major}{minor}a")
    tensors = (q, k, v, o, sink, kv_lengths, q_start, lse, row_max, row_sum)
    arguments = [
        None
        if tensor is None
        else from_dlpack(
            tensor.detach(), assumed_align=ROW_ALIGNMENT if tensor.dim() == 4 else tensor.element_size()
        ).mark_layout_dynamic(leading_dim=tensor.dim() - 1)
        for tensor in tensors
    ]
    with torch.cuda.device(q.device):
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        kernel(*arguments, *scalars(problem), stream)


def scalars(problem: AttentionProblem) -> tuple[float, int, int]:
    """(|scale| * log2(e), window left, window right); a window side that is unbounded is not read."""
    scale = max(abs(problem.scale), SMALLEST_SCALE)
    return scale * math.log2(math.e), problem.window_left or 0, problem.window_right or 0


def compiled(config: AttentionConfig, arch: str = SIMULATED_ARCH):
    """The kernel of a configuration, compiled on first use in this process. Needs no GPU."""
    return compile_cached(("fmha", config), lambda: _host_and_arguments(config), arch=arch)


def _host_and_arguments(config: AttentionConfig) -> tuple:
    """The host function and fake arguments: extents and strides unknown, last dimension contiguous."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from warpspec.fmha.sm100.kernel import Attention

    def tensor(dtype, rank, last=None):
        """Of ``rank`` dimensions, the last contiguous; rows of a known length are aligned for TMA."""
        aligned = last is not None
        step = ROW_ALIGNMENT * 8 // dtype.width if aligned else 1
        return make_fake_tensor(
            dtype,
            (*(cute.sym_int() for _ in range(rank - 1)), last if aligned else cute.sym_int()),
            stride=(*(cute.sym_int64(divisibility=step) for _ in range(rank - 1)), 1),
            assumed_align=ROW_ALIGNMENT if aligned else dtype.width // 8,
            memspace=cute.AddressSpace.gmem,
        )

    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
    fp32, int32 = cutlass.Float32, cutlass.Int32
    return (
        Attention(config),
        *(tensor(dtype, 4, config.head_dim) for _ in "qkv"),
        tensor(dtype if config.normalize else fp32, 4, config.head_dim),
        tensor(fp32, 1) if config.has_sink else None,
        tensor(int32, 1) if config.has_kv_lengths else None,
        tensor(int32, 1) if config.has_q_start else None,
        tensor(fp32, 3) if config.has_lse else None,
        None if config.normalize else tensor(fp32, 3),
        None if config.normalize else tensor(fp32, 3),
        *(1.0, 0, 0),  # scale_log2, window_left, window_right
        make_fake_stream(),
    )
