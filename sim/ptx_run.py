"""`sim.launch`: runs a kernel given as PTX text from any compiler."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from warpspec.common.cubin import CubinError, KernelResources, parse_cubin
from warpspec.sim.errors import HostError
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.order.findings import OrderError
from warpspec.sim.ptx_arguments import KernelArguments
from warpspec.sim.report import SimReport
from warpspec.sim.runs import run_with_options, stream_of_run
from warpspec.sim.runtime import execute, kernels_of, parameters_of

Dim3 = tuple[int, int, int]


def launch(
    ptx: str | os.PathLike,
    entry: str | None = None,
    *,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    cluster: int | Sequence[int] = (1, 1, 1),
    smem: int = 0,
    args: Sequence[object] = (),
    seed: int = 0,
    seeds: int | None = None,
    check: str | None = None,
    timeline: str | os.PathLike | None = None,
    cubin: bytes | str | os.PathLike | None = None,
) -> SimReport:
    """Run one launch of a kernel given as PTX, from any compiler; tensors among `args` are written in place.

    ptx: the text of a PTX module for one of the simulator's targets, or the path of a file that holds it.
    entry: the kernel's name; may be left out where the module has one kernel.
    grid, block, cluster: one to three ints, x first. A kernel with .reqnctapercluster has that cluster by itself.
    smem: bytes of dynamic shared memory.
    args: one for each .param. A CPU torch tensor or NumPy array is a pointer to its first element; an int fills an
    integer parameter of 1, 2, 4 or 8 bytes; a float fills one of .f32, .f64, .b32 or .b64; None is a null pointer;
    bytes and NumPy scalars are used unchanged; `sim.tensor_map(...)` is a tensor map, by value (128 bytes) or by
    pointer (8). A struct is its bytes, a ctypes.Structure (addresses of live CPU tensors in its c_void_p fields are
    translated), or a tuple of its fields (numbers in it as NumPy scalars), laid out as C does. seed, seeds, check,
    timeline: as for `sim.run`. cubin: ptxas's output for the PTX, or its path: the report then shows registers and
    stack, and a launch that needs too many registers is refused.

    Returns a SimReport with one launch. Raises HostError for arguments that do not fit the .param declarations, and for
    a launch that hardware refuses (.reqntid, .maxntid, .reqnctapercluster, .maxclusterrank, shared memory, registers);
    else what `sim.run` raises.
    """
    text = _text(ptx)
    entry = _entry(text, entry)
    resources = _resources(cubin, entry)
    shape, block, cluster = (
        _dim3(name, value) for name, value in (("grid", grid), ("block", block), ("cluster", cluster))
    )
    if isinstance(smem, bool) or not isinstance(smem, int) or smem < 0:
        raise HostError(f"smem is {smem!r}; a number of bytes is needed")
    if isinstance(args, torch.Tensor | str | bytes) or not isinstance(args, Iterable):
        raise HostError(f"args is a {type(args).__name__}; a sequence with a value for each .param is needed")
    arguments = KernelArguments(entry, parameters_of(text, entry), list(args))

    def once(seed: int, check: str | None) -> SimReport:
        start = time.monotonic()
        memory = GlobalMemory()
        params = arguments.stage(memory)
        report, found = SimReport(seed=seed), None
        try:
            launched = execute(
                text, entry, grid=shape, block=block, cluster=cluster, dynamic_smem=smem, params=params, gmem=memory,
                seed=seed, resources=resources, check=check, overlap=stream_of_run().next(False),
            )  # fmt: skip
        except OrderError as error:
            if error.launch is None:
                raise
            launched, found = error.launch, error  # the launch ran to its end
        finally:
            memory.check_guards()
            memory.copy_back()
        report.launches.append(launched)
        report.seconds = time.monotonic() - start
        if found is not None:
            raise OrderError(found.findings, found.kernel, report)
        return report

    return run_with_options(
        once, lambda: arguments.tensors, seed=seed, seeds=seeds, check=check, timeline=timeline
    )


def _text(ptx: str | os.PathLike) -> str:
    if isinstance(ptx, str) and ".version" in ptx:
        return ptx
    if not isinstance(ptx, str | os.PathLike):
        raise HostError(f"ptx is a {type(ptx).__name__}; PTX text or the path of a file is needed")
    try:
        return Path(ptx).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(f"ptx is neither PTX text (it has no .version) nor a file of it: {error}") from None


def _entry(text: str, entry: str | None) -> str:
    kernels = kernels_of(text)
    if entry is None:
        if len(kernels) != 1:
            raise HostError(f"entry: the PTX has {len(kernels)} kernels ({', '.join(kernels)}); name one")
        return kernels[0]
    if entry not in kernels:
        raise HostError(f"entry is {entry!r}; the PTX has {', '.join(kernels) or 'no kernel'}")
    return entry


def _dim3(name: str, value: int | Sequence[int]) -> Dim3:
    numbers = value if isinstance(value, list | tuple) else (value,)
    if not 1 <= len(numbers) <= 3 or not all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) for n in numbers
    ):
        raise HostError(f"{name} is {value!r}; one to three ints are needed")
    return (*map(int, numbers), *(1,) * (3 - len(numbers)))


def _resources(cubin: bytes | str | os.PathLike | None, entry: str) -> KernelResources | None:
    if cubin is None:
        return None
    try:
        image = cubin if isinstance(cubin, bytes) else Path(cubin).read_bytes()
        found = parse_cubin(image)
    except (OSError, CubinError) as error:
        raise HostError(f"cubin: {error}") from None
    if entry not in found:
        raise HostError(f"cubin has no kernel {entry}; it has {', '.join(found) or 'none'}")
    return found[entry]
