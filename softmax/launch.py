"""Runs a strategy's kernel on a GPU or in the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import MIB, VECTOR_BYTES
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.simulator import simulator
from warpspec.common.workspace import EMPTY, new_workspace, prepare_reserve, workspace
from warpspec.softmax.plan import SoftmaxPlan, choose_plan
from warpspec.softmax.problem import SoftmaxProblem

# The simulator stands for no particular device, and its time grows with what runs at once, so it has few SMs.
SIMULATED_SMS, SIMULATED_L2 = 8, 1 * MIB


def _host_and_arguments(config) -> tuple:
    """The host function of a strategy's configuration and its arguments but the stream."""
    import cutlass

    from warpspec.softmax import resident, rows, staged, two_pass
    from warpspec.softmax.vectors import TYPES

    dtype = TYPES[config.dtype]
    x = fake_rows(dtype, 2, alignment=None if config.edges else VECTOR_BYTES)
    out = fake_rows(dtype, 2, alignment=None if config.edges else config.store_bytes)
    if isinstance(config, resident.ResidentConfig):
        return (resident.Resident(config), x, out, fake_rows(cutlass.Int64, 1), 0, 0)
    hosts = {
        rows.RowsConfig: rows.Rows,
        staged.StagedConfig: staged.Staged,
        two_pass.TwoPassConfig: two_pass.TwoPass,
    }
    return (hosts[type(config)](config), x, out)


softmax_kernel = Kernel("softmax", _host_and_arguments)


def launcher(problem: SoftmaxProblem, target: Target, plan: SoftmaxPlan | None = None) -> Callable:
    """A function of CUDA matrices (x, out) that launches the problem's kernel; compiled before this returns.

    target: a CUDA device, which must be the current one in calls. plan: None: the chosen one.
    """
    plan = _checked(plan or choose_plan(problem, target), problem)
    kernel = softmax_kernel.launcher(plan.config, target)
    if not plan.group:
        return kernel
    words, device, groups, group = plan.workspace_words(problem.rows), target.device, plan.groups, plan.group
    if plan.config.cluster:  # whose CTAs reduce in shared memory
        unused = torch.empty(words, dtype=torch.int64, device=torch.device("cuda", device))
        return lambda x, out: kernel(x, out, unused, groups, group)
    prepare_reserve(device)
    return lambda x, out: kernel(x, out, workspace(words, device), groups, group)


def _checked(plan: SoftmaxPlan, problem: SoftmaxProblem) -> SoftmaxPlan:
    """The plan; ValueError if its kernel does not take rows of the problem's length."""
    if getattr(plan.config, "once", False):
        plan.config.check_row(problem.vectors)
    return plan


def _simulated_target(device: torch.device) -> Target:
    whole = target_of(device)
    return whole if simulator().times() else replace(whole, sm_count=SIMULATED_SMS, l2_bytes=SIMULATED_L2)


def run_sim(
    x: torch.Tensor,
    out: torch.Tensor,
    plan: SoftmaxPlan | None = None,
    target: Target | None = None,
    *,
    seed: int = 0,
):
    """Execute on CPU matrices in the simulator; returns its ``SimReport``.

    plan: None: the chosen one. target: None: a small GPU of the simulated architecture, a whole one where times are
    predicted.
    """
    problem = SoftmaxProblem.of(x, out)
    target = target or _simulated_target(x.device)
    plan = _checked(plan or choose_plan(problem, target), problem)
    if not plan.group:
        return softmax_kernel.run(plan.config, target, x, out, seed=seed)
    words = new_workspace(plan.workspace_words(problem.rows), x.device)
    report = softmax_kernel.run(plan.config, target, x, out, words, plan.groups, plan.group, seed=seed)
    assert (words == EMPTY).all(), "the workspace was not emptied"
    return report
