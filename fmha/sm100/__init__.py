"""Attention on sm_100a: the kernel compiled once a configuration, run on a GPU or in the simulator."""

from __future__ import annotations

import torch

from warpspec.common.compile import TVM_FFI, compile_cached
from warpspec.fmha.planning import partial_results, plan_of, scalars
from warpspec.fmha.problem import ROW_ALIGNMENT, AttentionProblem
from warpspec.fmha.sm100.config import AttentionConfig
from warpspec.fmha.splits import SM_COUNT

__all__ = ["AttentionConfig", "compiled", "plan", "run_cuda", "run_sim", "supports"]

SIMULATED_ARCH = "sm_100a"


def supports(problem: AttentionProblem) -> None:
    """Raise UnsupportedProblem, naming the constraint, for a problem this kernel does not run."""
    AttentionConfig.of(problem)


def plan(problem: AttentionProblem, sm_count: int = SM_COUNT) -> tuple[AttentionConfig, int]:
    """(configuration, number of splits of the keys) for a problem on a device of ``sm_count`` SMs."""
    return plan_of(AttentionConfig, problem, sm_count)


def run_sim(
    problem, q, k, v, sink, kv_lengths, q_start, o, lse, row_max, row_sum, page_table=None, bias=None
):
    """Execute the compiled kernel on CPU tensors in the simulator; returns its ``SimReport``.

    sink: fp32. Writes o and, where given, lse, row_max, row_sum in place. Split keys take a second launch.
    """
    from warpspec import sim  # brings in llvmlite, an optional dependency
    from warpspec.fmha.combine_splits import combine_splits

    config, splits = plan(problem)
    kernel = compiled(config, SIMULATED_ARCH)
    if splits == 1:
        tensors = (q, k, v, o, sink, kv_lengths, q_start, lse, row_max, row_sum, page_table, bias)
        return sim.run(kernel, *tensors, *scalars(problem), None)
    partial = partial_results(problem, splits)
    tensors = (q, k, v, partial[0], None, kv_lengths, q_start, None, *partial[1:], page_table, bias)
    report = sim.run(kernel, *tensors, *scalars(problem), None)
    combined = combine_splits(*partial, o, sink=sink, lse=lse, row_max=row_max, row_sum=row_sum)
    return sim.remember(report + combined)


def run_cuda(
    problem, q, k, v, sink, kv_lengths, q_start, o, lse, row_max, row_sum, page_table=None, bias=None
) -> None:
    """Launch on the tensors' device and its current stream: one kernel, two where the keys are split; no
    synchronisation."""
    from warpspec.fmha.combine_splits import combine_splits

    properties = torch.cuda.get_device_properties(q.device)
    config, splits = plan(problem, properties.multi_processor_count)
    kernel = compiled(config, f"sm_{properties.major}{properties.minor}a", native=True)
    if splits == 1:
        tensors = (q, k, v, o, sink, kv_lengths, q_start, lse, row_max, row_sum, page_table, bias)
        return launch_cuda(kernel, tensors, problem)
    partial = partial_results(problem, splits)
    tensors = (q, k, v, partial[0], None, kv_lengths, q_start, None, *partial[1:], page_table, bias)
    launch_cuda(kernel, tensors, problem)
    combine_splits(*partial, o, sink=sink, lse=lse, row_max=row_max, row_sum=row_sum)


def launch_cuda(kernel, tensors, problem: AttentionProblem) -> None:
    """Call a compiled kernel on CUDA tensors, on their device's current stream."""
    with torch.cuda.device(tensors[0].device):
        kernel(*tensors, *scalars(problem))


def compiled(config: AttentionConfig, arch: str = SIMULATED_ARCH, native: bool = False):
    """The kernel of a configuration, compiled on first use in this process. Needs no GPU. native: callable on CUDA
    tensors; otherwise for the simulator."""
    return compile_cached(
        ("fmha", config, native),
        lambda: _host_and_arguments(config, native),
        arch=arch,
        options=TVM_FFI if native else "",
    )


def _host_and_arguments(config: AttentionConfig, native: bool) -> tuple:
    """The host function and fake arguments: extents and strides unknown, last dimension contiguous."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    from warpspec.fmha.row_bias import TYPES
    from warpspec.fmha.sm100.kernel import Attention

    def tensor(dtype, rank, last=None, aligned=False):
        """Of ``rank`` dimensions, the last contiguous; rows of a known length are aligned for TMA."""
        aligned = aligned or last is not None
        step = ROW_ALIGNMENT * 8 // dtype.width if aligned else 1
        return make_fake_tensor(
            dtype,
            (*(cute.sym_int() for _ in range(rank - 1)), last or cute.sym_int()),
            stride=(*(cute.sym_int64(divisibility=step) for _ in range(rank - 1)), 1),
            assumed_align=ROW_ALIGNMENT if aligned else dtype.width // 8,
            memspace=cute.AddressSpace.gmem,
        )

    dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[config.dtype]
    fp32, int32 = cutlass.Float32, cutlass.Int32
    return (
        Attention(config),
        *(tensor(dtype, 4, config.head_dim) for _ in "qkv"),
        tensor(dtype if config.normalize else fp32, 5 if config.splits else 4, config.head_dim),
        tensor(fp32, 1) if config.has_sink else None,
        tensor(int32, 1) if config.has_kv_lengths else None,
        tensor(int32, 1) if config.has_q_start else None,
        tensor(fp32, 3) if config.has_lse else None,
        *(None if config.normalize else tensor(fp32, 4 if config.splits else 3) for _ in range(2)),
        tensor(int32, 2) if config.page_size else None,
        tensor(TYPES[config.bias], 4, aligned=config.bias_stages > 0) if config.bias else None,
        *(1.0, 0, 0),  # scale_log2, window_left, window_right
        make_fake_stream(use_tvm_ffi_env_stream=native),
    )
