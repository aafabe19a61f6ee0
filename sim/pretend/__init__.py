"""A CUDA device that is not there: other people's scripts with device="cuda" run unchanged on a CPU.

>>> with warpspec.sim.intercept("sm_100a", check="order") as session:
...     their_module.main()
>>> print(session.summary())
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator

import torch
from cuda.bindings import driver, runtime
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import _disable_current_modes

from warpspec.common.simulator import offer
from warpspec.sim.device import device_of
from warpspec.sim.pretend import (
    cuda_bindings,
    dsl,
    out_dtype,
    tensors,
    torch_cuda,
    triton_stub,
    triton_testing,
)
from warpspec.sim.pretend.capture import tensors_among
from warpspec.sim.pretend.own import OwnKernels
from warpspec.sim.pretend.patches import Patches
from warpspec.sim.pretend.scaled_mm import scaled_mm
from warpspec.sim.pretend.session import Session
from warpspec.sim.report import SimReport
from warpspec.sim.runs import checked_options

REAL_GENERATOR = torch.Generator
# So that warpspec allocates by torch.empty, which the modes see, not by torch's allocator for the device.
NO_DEVICE = -1
_active: Session | None = None


@contextlib.contextmanager
def intercept(
    arch: str = "sm_100a",
    *,
    seed: int = 0,
    seeds: int | None = None,
    check: str | None = None,
    collect: bool = True,
) -> Iterator[Session]:
    """Let torch, CuTe DSL and cuda.bindings believe that there is a GPU, and run kernels in the simulator.

    Tensors "on cuda" are in this machine's memory; torch's operations on them run on the CPU. `cute.compile`, calls of
    what it returns and plain calls of @cute.jit functions, torch.cuda's streams, events and graphs, device properties,
    CUTLASS's testing helpers and a part of cuda.bindings work as on the device. Import kernel libraries inside it: some
    look at the device when they are imported.

    arch: the target to compile for, e.g. "sm_90a"; the device is the one that stands for it (sim/device.py).
    seed, seeds, check: of each call of a compiled function, as `sim.run` takes them.
    collect: findings of check="order" are kept in the session and the script goes on; otherwise they are raised.

    Yields a Session with the report of all launches, and the findings. Raises RuntimeError inside another one,
    HostError for a target that the simulator does not run, ValueError for other options. What else the simulator finds
    is raised where the kernel is called.
    """
    global _active
    if _active is not None:
        raise RuntimeError("warpspec.sim.intercept is active already")
    checked_options(seed, seeds, check)
    device = device_of(arch)
    session = Session(seed=seed, seeds=seeds, check=check, collect=collect)
    patches, propagation = Patches(), tensors.Propagation()
    propagation.on_kernel = session.torch_runs

    def call(compiled: object, args: tuple, kwargs: dict) -> SimReport:
        capture = propagation.recorder()
        if capture is None:
            return session.call(compiled, args, kwargs)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            capture.keep(tensors_among([*args, *kwargs.values()]))
        report = session.call(compiled, args, kwargs)
        capture.record(lambda: session.call(compiled, args, kwargs))
        return report

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="warpspec-"))
        stack.callback(patches.undo)
        for name, value in _environment(arch, device, folder).items():
            patches.item(os.environ, name, value)
        dsl.patch(patches, device, arch, folder, call)
        stack.callback(offer, offer(OwnKernels(arch, call)))
        _patch_torch(patches, device, propagation)
        patches.update(driver, cuda_bindings.driver_functions(device))
        patches.update(runtime, cuda_bindings.runtime_functions(device))
        stack.callback(triton_stub.remove, triton_stub.install())
        stack.enter_context(triton_testing.replaced())
        stack.enter_context(out_dtype.products())
        placement = tensors.Placement()
        _patch_callers(patches, placement, propagation)
        stack.enter_context(placement)
        stack.enter_context(propagation)
        _active = session
        try:
            yield session
        finally:
            _active = None


def _patch_torch(patches: Patches, device: object, propagation: tensors.Propagation) -> None:
    """Give torch's tensors, devices, streams and compiler the answers of a machine with a GPU."""
    patches.update(torch.Tensor, tensors.ATTRIBUTES)
    patches.set(torch.storage._StorageBase, "clone", tensors._clone_storage)
    patches.update(torch.cuda, torch_cuda.attributes(device, propagation))
    patches.update(torch._C, {"_cuda_getDevice": lambda: NO_DEVICE, "_cuda_getCurrentRawStream": lambda _: 0})
    patches.update(torch, {"compile": _undecorated(), "Generator": _Generator})
    patches.set(torch, "_scaled_mm", scaled_mm(torch._scaled_mm))
    patches.set(torch.compiler, "disable", _undecorated())
    patches.set(torch.profiler, "profile", _profile(torch.profiler.profile))
    patches.set(torch.version, "cuda", "13.0")


def _patch_callers(patches: Patches, placement: tensors.Placement, propagation: tensors.Propagation) -> None:
    """Make the modes hold in what torch calls outside of them: backward(), operators' functions, other threads."""
    run_backward = tensors.backward_in(placement, torch.autograd.graph._engine_run_backward)
    patches.set(torch.autograd, "_engine_run_backward", run_backward)
    patches.set(torch.autograd.graph, "_engine_run_backward", run_backward)
    inside = _inside(placement, propagation)
    for operator in OPDEFS.values():  # of what was imported before
        for kind, function in operator._backend_fns.items():
            patches.item(operator._backend_fns, kind, inside(function))
    patches.set(torch.library, "custom_op", _custom_op(torch.library.custom_op, inside))
    patches.set(threading.Thread, "_bootstrap_inner", inside(threading.Thread._bootstrap_inner))


def active() -> Session | None:
    """The session of the `intercept` that is active, or None."""
    return _active


def _environment(arch: str, device, folder: str) -> dict[str, str]:
    """Environment variables for the compiler, and those that tell kernel libraries which target to build for."""
    number = f"sm_{device.major}{device.minor}"
    return dsl.environment(arch, folder) | {
        "FLASH_ATTENTION_ARCH": number,
        "FLASH_ATTENTION_NUM_SMS": str(device.sms),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
        "QUACK_ARCH": number,
        "QUACK_CACHE_ENABLED": "0",
    }


def _undecorated():
    """A stand-in for torch.compile and torch.compiler.disable that returns the function unchanged."""
    return lambda function=None, **_: function if function is not None else lambda inner: inner


class _GeneratorType(type):
    """torch.Generator, except that a "cuda" generator is a CPU generator."""

    def __call__(cls, device: object = "cpu") -> torch.Generator:
        return REAL_GENERATOR("cpu" if tensors.names_cuda(device) else device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, REAL_GENERATOR)


def _profile(original: Callable) -> Callable:
    """torch.profiler.profile, of what runs on the CPU: the device's work does."""

    @functools.wraps(original, updated=())
    def profile(activities: object = None, **options: object):
        cpu = [torch.profiler.ProfilerActivity.CPU]
        return original(activities=None if activities is None else cpu, **options)

    return profile


class _Generator(metaclass=_GeneratorType):
    pass


def _inside(placement: tensors.Placement, propagation: tensors.Propagation) -> Callable:
    """A decorator of an operator's function, which then has the modes: torch takes them off inside an operator."""

    def inside(function: Callable) -> Callable:
        function = function.__wrapped__ if hasattr(function, "has_modes") else function

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            if _active is None:
                return function(*args, **kwargs)
            with placement, propagation:
                return function(*args, **kwargs)

        call.has_modes = True
        return call

    return inside


def _custom_op(custom_op: Callable, inside: Callable) -> Callable:
    """torch.library.custom_op, whose "cuda" operators run where the tensors are, in this machine's memory, and whose
    functions have the modes (``_inside``)."""

    def define(name: str, function: Callable | None = None, /, **options: object):
        options.pop("device_types", None)
        if function is not None:
            return custom_op(name, inside(function), **options)
        return lambda later: custom_op(name, inside(later), **options)

    return define
