"""Runs kernels: compiles each configuration once, keeps it on disk, calls it on CUDA tensors or in the simulator.

A ``Kernel`` is a family of kernels, one for each configuration; a ``Target`` is where one of them runs. ``Kernel.run``
does a whole call. Code that calls often keeps the function from ``Kernel.launcher``: on a GPU this is the compiled host
function itself, which takes a few microseconds a call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from warpspec.common.architecture import Architecture, architecture, architecture_of
from warpspec.common.compile import compile_kernel
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import GPUS, H200_SPEEDS, L2_SHARE, MODELS, Gpu, Speeds, gpu_model
from warpspec.common.simulator import pretended, simulator
from warpspec.common.speeds import speeds_of

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Target:
    """A GPU, or the simulator of one, that kernels run on. Hashable.

    architecture: the architecture that kernels are compiled for. device: index of the CUDA device; None: the simulator,
    on CPU tensors. sm_count, l2_bytes: number of SMs and bytes of L2 that plans assume; fewer than 1 SM raise
    ValueError. seed: the simulator draws the order of threads from it. l2_share, speeds: see ``hardware.Gpu``.
    """

    architecture: Architecture
    device: int | None
    sm_count: int
    l2_bytes: int
    seed: int = 0
    l2_share: float = L2_SHARE
    speeds: Speeds = H200_SPEEDS

    def __post_init__(self):
        if not isinstance(self.sm_count, int) or self.sm_count < 1:
            raise ValueError(f"sm_count: must be a positive int, got {self.sm_count!r}")

    @classmethod
    def of_model(cls, gpu: Gpu, device: int | None = None) -> Target:
        """A GPU model as target; without a device, the simulator."""
        found = architecture(gpu.arch)
        return cls(found, device, gpu.sm_count, gpu.l2_bytes, l2_share=gpu.l2_share, speeds=gpu.speeds)

    @property
    def l2_room(self) -> int:
        """Bytes of K and V that plans expect to stay in L2."""
        return round(self.l2_share * self.l2_bytes)

    @property
    def native(self) -> bool:
        """Whether kernels run on a GPU."""
        return self.device is not None

    @property
    def arch(self) -> str:
        """The architecture's name, "sm_90a" for example."""
        return self.architecture.name

    def current(self) -> contextlib.AbstractContextManager:
        """A context for the launches of a call. On a GPU it makes the target's device the current one, as launches and
        allocations need; in the simulator it puts the launches into one stream."""
        if self.device is None:
            return simulator().one_stream()
        if self.device == torch.cuda.current_device():
            return _NOTHING
        return torch.cuda.device(self.device)


# Simulated targets: each architecture's GPU in ``hardware.GPUS``, by the architecture's name.
SIMULATED = {arch: Target.of_model(gpu) for arch, gpu in GPUS.items()}
SIMULATED_ARCH = "sm_100a"  # what the simulator simulates by default
_simulated = ContextVar("simulated", default=SIMULATED[SIMULATED_ARCH])


def simulated(arch: str, **changes) -> Target:
    """The simulator as a GPU of ``arch``. changes: other fields, for example ``sm_count=1``; None keeps the number of
    SMs or the size of L2. Raises UnsupportedProblem for an unknown architecture."""
    if arch not in SIMULATED:
        raise UnsupportedProblem(f"arch: must be one of {', '.join(SIMULATED)}, got {arch!r}")
    return _changed(SIMULATED[arch], changes)


def _changed(target: Target, changes: dict) -> Target:
    kept = ("sm_count", "l2_bytes")  # with None
    return replace(
        target, **{name: value for name, value in changes.items() if value is not None or name not in kept}
    )


@contextlib.contextmanager
def simulating(target: Target | str, **changes) -> Iterator[Target]:
    """A context in which backend "sim" runs the kernels of ``target`` in this thread.

    target: a simulated target, or the name of an architecture, with changes as in ``simulated``. For example

        with simulating("sm_90a", sm_count=2, seed=1):
            attention(q, k, v, backend="sim")
    """
    target = simulated(target, **changes) if isinstance(target, str) else _changed(target, changes)
    if target.native:
        raise ValueError(f"target: must be the simulator (device None), got device {target.device}")
    token = _simulated.set(target)
    try:
        yield target
    finally:
        _simulated.reset(token)


def target_of(device: torch.device, backend: str | None = None) -> Target:
    """The target for tensors on ``device``: the CUDA device itself, or for the CPU the simulator set by ``simulating``.
    While a simulator pretends to be a CUDA device, that device's target is the simulator of its architecture.

    device: with its index, as tensors have it. backend: a native one, if only its kernels can read the data; for the
    CPU this selects the simulator of one of its architectures. Raises UnsupportedProblem for a device of another kind,
    and for a CUDA device without kernels.
    """
    arch = pretended() if device.type == "cuda" else None
    found = _device_target(device) if arch is None else simulated(arch)
    if found is not None:
        return found
    target = _simulated.get()
    if backend is None or target.architecture.backend == backend:
        return target
    return next(one for one in SIMULATED.values() if one.architecture.backend == backend)


@functools.cache
def _device_target(device: torch.device) -> Target | None:
    """The target of a CUDA device; None for the CPU, whose target is not fixed."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise UnsupportedProblem(f"kernels run on CUDA tensors, and on CPU tensors simulated; got {device}")
    properties = torch.cuda.get_device_properties(device)
    found = architecture_of((properties.major, properties.minor))
    if found is None:
        raise UnsupportedProblem(
            f"no kernels for compute capability {properties.major}.{properties.minor} of {device}"
        )
    model = gpu_model(properties.name)
    return Target(
        found,
        device.index,
        properties.multi_processor_count,
        properties.L2_cache_size,
        l2_share=L2_SHARE if model is None else model.l2_share,
        speeds=speeds_of(properties, model, _like(found)),
    )


def _like(found: Architecture) -> Gpu:
    """A model whose kernels an architecture runs."""
    return next(gpu for gpu in reversed(MODELS) if architecture(gpu.arch).backend == found.backend)


class Kernel:
    """A family of kernels, each compiled for one configuration on first use.

    Kernels of warpspec are kept on disk for other processes (``kernel_cache``). Families defined elsewhere are not,
    because no process can know whether their sources have changed.

    name: the family's, unique. build: takes a configuration, which is hashable and determines the code; returns the
    host function and its arguments without the last, the stream: fake tensors (``compile.fake_rows``) and numbers. It
    is called only on a miss, and imports the DSL then. If it is a string "module:function", that is imported then, too.
    """

    def __init__(self, name: str, build: Callable[[Hashable], tuple] | str):
        self.name, self._build = name, build
        module = build if isinstance(build, str) else build.__module__
        self.on_disk = module.startswith("warpspec.")

    def build(self, config: Hashable) -> tuple:
        """The host function of a configuration and its arguments without the stream."""
        if isinstance(self._build, str):
            module, function = self._build.split(":")
            self._build = getattr(importlib.import_module(module), function)
        return self._build(config)

    def compiled(self, config: Hashable, arch: str, *, native: bool = False):
        """Compile the configuration and return ``cute.compile``'s result, with ``artifacts``. Needs no GPU.

        native: see ``compile_kernel``.

        Raises UnsupportedProblem for an unknown architecture, or if a CTA has less shared memory than the configuration
        needs (``smem_bytes``); also what the DSL raises.
        """

        def build() -> tuple:
            needed, most = getattr(config, "smem_bytes", 0), architecture(arch).smem_per_cta
            if needed > most:
                raise UnsupportedProblem(
                    f"{self.name}: needs {needed} bytes of shared memory, a CTA on {arch} has {most}"
                )
            return self.build(config)

        return compile_kernel((self.name, config), build, arch=arch, native=native, on_disk=self.on_disk)

    def launcher(self, config: Hashable, target: Target, *, seed: int | None = None) -> Callable:
        """A function that launches the kernel, which is compiled before this returns.

        The function takes the host function's arguments without the stream, all of them, by position. On a GPU it
        launches on the tensors' device, which must be the current one (``Target.current``), and on its current stream;
        it returns None. In the simulator it returns the ``SimReport``. seed: for ``sim.run``; None: the target's.
        """
        compiled = self.compiled(config, target.arch, native=target.native)
        if target.native:
            return _without_keywords(compiled)
        seed = target.seed if seed is None else seed
        run = simulator().run
        return lambda *arguments: run(compiled, *arguments, None, seed=seed)

    def run(self, config: Hashable, target: Target, *arguments, seed: int | None = None):
        """Launch the kernel once: calls ``launcher``'s function with the target's device made current."""
        launch = self.launcher(config, target, seed=seed)
        with target.current():
            return launch(*arguments)


def _without_keywords(compiled):
    """A native host function without the wrapper for defaults and keywords, which takes longer than the launch."""
    unwrap = getattr(compiled, "__tvm_ffi_object__", None)
    function = None if unwrap is None else unwrap()
    return compiled if function is None else function
