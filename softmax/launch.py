"""Running a strategy's kernel: on a GPU, or in the simulator."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from warpspec.common import launch
from warpspec.common.compile import fake_rows
from warpspec.common.hardware import MIB, VECTOR_BYTES
from warpspec.common.launch import Kernel, Target
from warpspec.softmax.plan import EMPTY, Plan, choose_plan
from warpspec.softmax.problem import SoftmaxProblem

# The simulator's time grows with what runs at once, and it stands for no device in particular: few SMs will do.
SIMULATED = replace(launch.SIMULATED[launch.SIMULATED_ARCH], sm_count=8, l2_bytes=1 * MIB)


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

RESERVE_WORDS = 1 << 17  # 1 MiB

_workspaces: dict[tuple[int, int], torch.Tensor] = {}  # by device and stream
_reserves: dict[int, torch.Tensor] = {}  # by device: words that no launch has had yet
_lock = threading.Lock()


def new_workspace(words: int, device: torch.device) -> torch.Tensor:
    """A workspace of ``words`` Int64, all EMPTY."""
    return torch.full((words,), EMPTY, dtype=torch.int64, device=device)


def prepare_reserve(device_index: int) -> None:
    """Fill the device's reserve, once, unless the current stream is being captured; waits for the device."""
    if device_index not in _reserves and not torch.cuda.is_current_stream_capturing():
        _reserves[device_index] = new_workspace(RESERVE_WORDS, torch.device("cuda", device_index))
        torch.cuda.synchronize(device_index)


def workspace(words: int, device_index: int) -> torch.Tensor:
    """On a CUDA device, at least ``words`` Int64, all EMPTY, that no other launch uses at the same time.

    One for each stream, which runs its launches one after another and finds it as the last one left it, emptied.
    A launch captured into a graph gets its own, for good: out of the reserve, or where that is used up one that the
    graph fills at every replay.
    """
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            left = _reserves.get(device_index)
            if left is not None and left.numel() >= words:
                _reserves[device_index] = left[words:]
                return left[:words]
        return new_workspace(words, torch.device("cuda", device_index))
    key = (device_index, torch._C._cuda_getCurrentRawStream(device_index))
    found = _workspaces.get(key)
    if found is None or found.numel() < words:
        size = 1 << (words - 1).bit_length()
        found = _workspaces[key] = new_workspace(size, torch.device("cuda", device_index))
    return found


def launcher(problem: SoftmaxProblem, target: Target, plan: Plan | None = None) -> Callable:
    """A function of CUDA matrices (x, out) that launches the problem's kernel; compiled before it returns.

    target: a CUDA device, which must be the current one in calls. plan: to run; None: the chosen one.
    """
    plan = plan or choose_plan(problem, target)
    kernel = softmax_kernel.launcher(plan.config, target)
    if not plan.group:
        return kernel
    words, device, groups, group = plan.workspace_words(problem.rows), target.device, plan.groups, plan.group
    if plan.config.cluster:  # which reduces in shared memory
        unused = torch.empty(words, dtype=torch.int64, device=torch.device("cuda", device))
        return lambda x, out: kernel(x, out, unused, groups, group)
    prepare_reserve(device)
    return lambda x, out: kernel(x, out, workspace(words, device), groups, group)


def run_sim(
    x: torch.Tensor, out: torch.Tensor, plan: Plan | None = None, target: Target = SIMULATED, *, seed: int = 0
):
    """Execute on CPU matrices in the simulator; returns its ``SimReport``. plan: None: the chosen one."""
    problem = SoftmaxProblem.of(x, out)
    plan = plan or choose_plan(problem, target)
    if not plan.group:
        return softmax_kernel.run(plan.config, target, x, out, seed=seed)
    words = new_workspace(plan.workspace_words(problem.rows), x.device)
    report = softmax_kernel.run(plan.config, target, x, out, words, plan.groups, plan.group, seed=seed)
    assert (words == EMPTY).all(), "the workspace was not emptied"
    return report
