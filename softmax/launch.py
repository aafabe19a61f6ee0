"""Compiling a strategy's kernel once a configuration, and calling it: on a GPU, or in the simulator."""

from __future__ import annotations

import functools

import torch

from warpspec.common.compile import compile_kernel, fake_rows
from warpspec.softmax.dispatch import Device, Plan, choose
from warpspec.softmax.problem import VECTOR_BYTES, SoftmaxProblem

EMPTY = -1  # what an unused word of a workspace holds


def compiled(config, arch: str, native: bool):
    """The kernel of a configuration for ``arch``; native: see ``compile_kernel``."""
    return compile_kernel(("softmax", config), lambda: _host_and_arguments(config), arch=arch, native=native)


def _host_and_arguments(config) -> tuple:
    """The host function and its arguments but the stream."""
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


_workspaces: dict[tuple[int, int], torch.Tensor] = {}


def new_workspace(words: int, device: torch.device) -> torch.Tensor:
    """``words`` Int64, all EMPTY."""
    return torch.full((words,), EMPTY, dtype=torch.int64, device=device)


def workspace(words: int, device_index: int) -> torch.Tensor:
    """On a CUDA device, at least ``words`` Int64, all EMPTY, that no other launch uses at the same time.

    One for each stream, which runs its launches one after another and finds it as the last one left it, emptied.
    A launch captured into a graph gets its own, which the graph fills at every replay.
    """
    if torch.cuda.is_current_stream_capturing():
        return new_workspace(words, torch.device("cuda", device_index))
    key = (device_index, torch._C._cuda_getCurrentRawStream(device_index))
    found = _workspaces.get(key)
    if found is None or found.numel() < words:
        size = 1 << (words - 1).bit_length()
        found = _workspaces[key] = new_workspace(size, torch.device("cuda", device_index))
    return found


@functools.cache
def device_of(index: int) -> tuple[str, Device]:
    """(architecture to compile for, what the dispatcher wants to know) of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}a"
    return arch, Device(properties.multi_processor_count, properties.L2_cache_size)


def launcher(problem: SoftmaxProblem, device_index: int, plan: Plan | None = None):
    """A function of CUDA matrices (x, out) that launches the problem's kernel; compiled before it returns.

    plan: to run; None: the dispatcher's choice.
    """
    arch, device = device_of(device_index)
    plan = plan or choose(problem, device)
    kernel = compiled(plan.config, arch, native=True)
    if not plan.group:
        return kernel
    groups, group = plan.groups, plan.group
    # Clusters exchange without a workspace.
    words = 1 + problem.rows * group if plan.strategy == "split" else 1

    def launch(x: torch.Tensor, out: torch.Tensor) -> None:
        kernel(x, out, workspace(words, device_index), groups, group)

    return launch


SIMULATED_ARCH = "sm_100a"
# The simulator's time grows with what runs at once, and it stands for no device in particular: few SMs will do.
SIMULATED = Device(sms=8, l2_bytes=1 << 20)


def run_sim(x: torch.Tensor, out: torch.Tensor, plan: Plan | None = None, arch: str = SIMULATED_ARCH):
    """Execute on CPU matrices in the simulator; returns its ``SimReport``. plan: None: the dispatcher's choice."""
    from warpspec import sim  # brings in llvmlite, an optional dependency

    plan = plan or choose(SoftmaxProblem.of(x, out), SIMULATED)
    kernel = compiled(plan.config, arch, native=False)
    if not plan.group:
        return sim.run(kernel, x, out, None)
    words = new_workspace(1 + x.shape[0] * plan.group, x.device)
    report = sim.run(kernel, x, out, words, plan.groups, plan.group, None)
    assert (words == EMPTY).all(), "the workspace was not emptied"
    return report
