"""Running a checked attention problem: plan, compile, launch; on a GPU or in the simulator, for every architecture.

``prepare`` does all that does not depend on the tensors and remembers it; ``Prepared.run`` launches one kernel, or two
where the keys are split.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import torch

from warpspec.common.launch import Target
from warpspec.fmha.combine import COMBINE, CombineConfig
from warpspec.fmha.features import dtype_name
from warpspec.fmha.operands import Operands
from warpspec.fmha.plan import Plan, launch_numbers, make_plan
from warpspec.fmha.problem import AttentionProblem


def architecture(arch: str) -> ModuleType:
    """The package with the kernel for ``arch``: "sm_90a", or any "sm_10?a"."""
    if arch == "sm_90a":
        from warpspec.fmha import sm90

        return sm90
    from warpspec.fmha import sm100

    return sm100


def plan(problem: AttentionProblem, target: Target) -> Plan:
    """How the problem is computed on a target. UnsupportedProblem names what its kernel does not do."""
    return make_plan(architecture(target.arch).AttentionConfig, problem, target)


def check_supported(problem: AttentionProblem, target: Target) -> None:
    """Raise UnsupportedProblem, naming the constraint, for a problem that the target's kernel does not run."""
    architecture(target.arch).AttentionConfig.of(problem)


class Prepared(NamedTuple):
    """A problem ready to run on a target.

    attention, combine: functions of the kernels' arguments; combine is None where the keys are not split. numbers:
    among the attention kernel's arguments.
    """

    target: Target
    plan: Plan
    numbers: tuple
    attention: Callable
    combine: Callable | None

    def run(self, operands: Operands):
        """Launch on the tensors' device and its current stream; no synchronisation. Writes o and, where given, lse,
        row_max and row_sum. Returns the simulator's ``SimReport``, natively None.

        operands: of the problem that was prepared, as ``AttentionProblem`` promises them; v is given.
        """
        with self.target.current():
            if self.combine is None:
                return self.attention(*operands, *self.numbers)
            partial = partial_results(operands.o, self.plan.splits)
            o, row_max, row_sum = partial
            parts = operands._replace(o=o, sink=None, lse=None, row_max=row_max, row_sum=row_sum)
            first = self.attention(*parts, *self.numbers)
            results = (operands.sink, operands.o, operands.lse, operands.row_max, operands.row_sum)
            second = self.combine(*partial, *results, operands.cu_seqlens_q)
        if first is None:
            return None
        from warpspec import sim

        return sim.remember(first + second)


@lru_cache(maxsize=4096)
def prepare(problem: AttentionProblem, target: Target, seed: int = 0) -> Prepared:
    """Plan and compile; what was prepared before is found again. seed: of the simulator.

    Raises UnsupportedProblem naming what the kernel does not do.
    """
    found = plan(problem, target)
    attention = architecture(target.arch).ATTENTION.launcher(found.config, target, seed=seed)
    combine = None
    if found.splits > 1:
        combine = COMBINE.launcher(combine_config(problem, found.splits), target, seed=seed)
    return Prepared(target, found, launch_numbers(problem, found), attention, combine)


def combine_config(problem: AttentionProblem, splits: int) -> CombineConfig:
    """The combine kernel of a problem whose keys are split into so many parts."""
    return CombineConfig.of(
        problem.head_dim,
        splits,
        dtype=dtype_name(problem.o_dtype),
        has_sink=problem.has_sink,
        has_lse=problem.return_lse,
        normalize=problem.normalize,
        packed=problem.packed_q,
    )


def compiled(problem: AttentionProblem, target: Target) -> tuple:
    """What ``cute.compile`` makes of a problem's kernels, the attention kernel first. Needs no GPU."""
    found = plan(problem, target)
    kernels = [architecture(target.arch).ATTENTION.compiled(found.config, target.arch, native=target.native)]
    if found.splits > 1:
        config = combine_config(problem, found.splits)
        kernels.append(COMBINE.compiled(config, target.arch, native=target.native))
    return tuple(kernels)


def partial_results(o: torch.Tensor, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Workspace of split keys, fp32: o [S, B, Sq, Hq, D], row_max and row_sum [S, B, Hq, Sq]."""
    batch, seq_q, heads, head_dim = o.shape
    kind = {"dtype": torch.float32, "device": o.device}
    return (
        torch.empty(splits, batch, seq_q, heads, head_dim, **kind),
        *(torch.empty(splits, batch, heads, seq_q, **kind) for _ in range(2)),
    )
