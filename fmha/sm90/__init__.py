"""Attention on sm_90a: the kernel compiled once a configuration, run on a GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from warpspec.common.compile import compile_kernel
from warpspec.fmha.features import ELEMENT_BYTES
from warpspec.fmha.planning import partial_results, plan_of, scalars
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.scheduler import TileGrid, balanced_section, key_span
from warpspec.fmha.sm90.config import AttentionConfig
from warpspec.fmha.splits import CombineConfig

__all__ = ["AttentionConfig", "compiled", "plan", "run_cuda", "run_sim"]

ARCH = "sm_90a"
SM_COUNT = 132  # of an H100 or H200
L2_BYTES = 50 << 20  # of an H100; an H200's 60 MiB hold a little more
L2_SHARE = 0.8  # of L2 for K and V

# What it costs that the K and V of a section do not fit L2 (H200, D 64 to 256, causal, 16 to 256 heads): bandwidth
# where CTAs ask for all there is, and on the way there power, which the clock pays for.
MEMORY_BYTES = 19  # from memory, a clock and SM: 4.3 TB/s
MMA_FLOPS = 4096  # a clock and SM
EXPONENTIALS = 16  # a clock and SM
MISS_COST = 0.17  # part of the time lost when CTAs ask for as many bytes as memory gives


def plan(problem: AttentionProblem, sm_count: int = SM_COUNT) -> tuple[AttentionConfig, int]:
    """(configuration, number of splits of the keys) for a problem on a device of ``sm_count`` SMs."""
    return plan_of(AttentionConfig, problem, sm_count)


def section(problem: AttentionProblem, config: AttentionConfig, ctas: int) -> int:
    """Heads of a section (``TileGrid.decode``): such that CTAs are balanced, and K and V come from L2 or are read by
    many CTAs at a time."""
    head_tiles = -(-problem.group // config.pack)
    query_tiles = -(-problem.seq_q // config.queries)
    grid = TileGrid(query_tiles, head_tiles, problem.heads_kv, problem.batch)
    if not config.causal:
        return 1  # not read
    bounds = {
        "causal": True,
        "left": problem.window_left,
        "right": problem.window_right,
        "key_stride": config.key_stride,
    }
    start = problem.seq_k - problem.seq_q  # as if no row's length or position were given
    first = start + np.arange(0, problem.seq_q, config.queries)
    last = np.minimum(first + config.queries, start + problem.seq_q) - 1
    counts = key_span(first, last, problem.seq_k, config.tile_n, bounds, np.minimum, np.maximum).count
    return balanced_section(
        grid, ctas, counts, lambda section: reading_cost(problem, config, ctas, section / head_tiles)
    )


def reading_cost(problem: AttentionProblem, config: AttentionConfig, ctas: int, heads: float) -> float:
    """Time as a multiple of that with K and V in L2, where CTAs work on so many KV heads at a time.

    CTAs of one head keep pace, so that memory is read once for all of them.
    """
    key_bytes = problem.head_dim * ELEMENT_BYTES * len(config.rings)
    if heads * problem.seq_k * key_bytes <= L2_SHARE * L2_BYTES:
        return 1.0
    clocks = config.tile_m * (
        4 * problem.head_dim / MMA_FLOPS + 1 / EXPONENTIALS
    )  # of a key, nothing overlapped
    asked = key_bytes / MEMORY_BYTES / clocks * min(heads / ctas, 1.0)  # as a part of what memory gives
    return 1.0 + MISS_COST * asked


class Prepared(NamedTuple):
    """What does not depend on the tensors. numbers: among the kernel's arguments. combine: the second kernel, natively
    and where keys are split."""

    splits: int
    numbers: tuple
    kernel: Callable
    combine: Callable | None


@lru_cache(maxsize=4096)
def prepared(problem: AttentionProblem, sm_count: int, native: bool) -> Prepared:
    """Configured and compiled for a problem."""
    from warpspec.fmha.combine_splits import compiled_combine

    config, splits = plan(problem, sm_count)
    ctas = sm_count * config.shape.ctas_per_sm
    numbers = (*scalars(problem), ctas, section(problem, config, ctas))
    combine = None
    if native and splits > 1:
        options = {
            "has_sink": problem.has_sink,
            "has_lse": problem.return_lse,
            "normalize": problem.normalize,
        }
        combine = CombineConfig.of(problem.head_dim, splits, **options)
        combine = compiled_combine(combine, problem.o_dtype, ARCH, native=True)
    return Prepared(splits, numbers, compiled(config, native), combine)


def run(
    launch,
    problem,
    sm_count,
    q,
    k,
    v,
    sink,
    kv_lengths,
    q_start,
    o,
    lse,
    row_max,
    row_sum,
    page_table=None,
    bias=None,
    native=False,
):
    """Compile, launch the attention kernel and, for split keys, the combine kernel.

    launch: called with a compiled kernel and its arguments but the stream; returns what ``run`` does.
    """
    from warpspec.fmha.combine_splits import combine_splits

    splits, numbers, kernel, combine = prepared(problem, sm_count, native)
    if splits == 1:
        tensors = (q, k, v, o, sink, kv_lengths, q_start, lse, row_max, row_sum, page_table, bias)
        return launch(kernel, tensors, numbers), None
    partial = partial_results(problem, splits)
    tensors = (q, k, v, partial[0], None, kv_lengths, q_start, None, *partial[1:], page_table, bias)
    first = launch(kernel, tensors, numbers)
    if combine is not None:
        return first, launch(combine, (*partial, sink, o, lse, row_max, row_sum), ())
    return first, combine_splits(*partial, o, sink=sink, lse=lse, row_max=row_max, row_sum=row_sum)


def run_sim(problem, *tensors, sm_count: int = SM_COUNT, seed: int = 0, **options):
    """Execute the compiled kernel on CPU tensors in the simulator; returns its ``SimReport``."""
    from warpspec import sim  # brings in llvmlite, an optional dependency

    def launch(kernel, tensors, numbers):
        return sim.run(kernel, *tensors, *numbers, None, seed=seed)

    first, second = run(launch, problem, sm_count, *tensors, **options)
    return first if second is None else sim.remember(first + second)


def run_cuda(problem, q, *tensors, **options) -> None:
    """Launch on the tensors' device and its current stream: one kernel, two where the keys are split; no
    synchronisation."""
    device = q.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run_cuda(problem, q, *tensors, **options)
    run(call_kernel, problem, sm_count_of(device), q, *tensors, native=True, **options)


def call_kernel(kernel, tensors, numbers) -> None:
    kernel(*tensors, *numbers)


@cache
def sm_count_of(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiled(config: AttentionConfig, native: bool = False):
    """The kernel of a configuration, compiled on first use in this process. Needs no GPU. native: callable on CUDA
    tensors; otherwise for the simulator."""
    return compile_kernel(
        ("fmha sm90", config), lambda: _host_and_arguments(config), arch=ARCH, native=native
    )


def _host_and_arguments(config: AttentionConfig) -> tuple:
    """The host function and its arguments but the stream."""
    from warpspec.fmha.operands import fake_operands  # brings in the DSL
    from warpspec.fmha.sm90.kernel import Attention

    numbers = (1.0, 0, 0, 1, 1)  # scale_log2, window_left, window_right, ctas, section
    return (Attention(config), *fake_operands(config), *numbers)
