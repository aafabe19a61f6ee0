"""Attention on sm_100a: the kernel compiled once a configuration, run on a GPU or in the simulator."""

from __future__ import annotations

import torch

from warpspec.common.compile import compile_kernel
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
    return compile_kernel(("fmha", config), lambda: _host_and_arguments(config), arch=arch, native=native)


def _host_and_arguments(config: AttentionConfig) -> tuple:
    """The host function and its arguments but the stream."""
    from warpspec.fmha.operands import fake_operands  # brings in the DSL
    from warpspec.fmha.sm100.kernel import Attention

    tensors = fake_operands(config, bias_alignment=ROW_ALIGNMENT if config.bias_stages else None)
    return (Attention(config), *tensors, *(1.0, 0, 0))  # scale_log2, window_left, window_right
