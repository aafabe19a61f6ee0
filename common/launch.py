"""Running a kernel: compiled once a configuration, kept on disk, called on CUDA tensors or in the simulator.

A ``Kernel`` is a family of kernels, one for each configuration; a ``Target`` is where one of them runs. ``Kernel.run``
does all of a call. Whoever calls often keeps ``Kernel.launcher``'s function instead: natively this is the compiled
host function itself, at a few microseconds a call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from warpspec.common.compile import compile_kernel
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import GPUS

_NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Target:
    """Where kernels run. Hashable.

    arch: what they are compiled for, "sm_90a" for example. device: index of the CUDA device; None: the simulator, on
    CPU tensors. sm_count, l2_bytes: the SMs and the bytes of L2 that they are planned for.
    """

    arch: str
    device: int | None
    sm_count: int
    l2_bytes: int

    @property
    def native(self) -> bool:
        """Whether kernels run on a GPU."""
        return self.device is not None

    @property
    def major(self) -> int:
        """First number of the compute capability: 9 for sm_90a, 10 for sm_100a and sm_103a."""
        return int(self.arch.removeprefix("sm_").removesuffix("a")) // 10

    def current(self) -> contextlib.AbstractContextManager:
        """A context for the launches of a call: natively the target's device is the current one, as launches and
        allocations want it; simulated they follow each other in one stream."""
        if self.device is None:
            from warpspec import sim

            return sim.one_stream()
        if self.device == torch.cuda.current_device():
            return _NOTHING
        return torch.cuda.device(self.device)


SIMULATED = {gpu.arch: Target(gpu.arch, None, gpu.sm_count, gpu.l2_bytes) for gpu in GPUS.values()}
SIMULATED_ARCH = "sm_100a"  # what the simulator stands for where nobody says


@functools.cache
def target_of(device: torch.device) -> Target:
    """The target for tensors on ``device``: a CUDA device itself, for the CPU the simulator of SIMULATED_ARCH.

    device: with its index, as tensors have it. Raises UnsupportedProblem for a device of another kind.
    """
    if device.type == "cpu":
        return SIMULATED[SIMULATED_ARCH]
    if device.type != "cuda":
        raise UnsupportedProblem(f"kernels run on CUDA tensors, and on CPU tensors simulated; got {device}")
    properties = torch.cuda.get_device_properties(device)
    arch = f"sm_{properties.major}{properties.minor}a"
    return Target(arch, device.index, properties.multi_processor_count, properties.L2_cache_size)


class Kernel:
    """A family of kernels, each compiled for one configuration on first use. Those of warpspec are kept on disk for
    other processes (``kernel_cache``); of a family that others define, no process knows whether its source has changed.

    name: of the family, no other's. build: makes of a configuration, which is hashable and says everything that changes
    the code, the host function and its arguments but the last, the stream: fake tensors (``compile.fake_rows``) and
    numbers. It is called on a miss only, and imports the DSL then.
    """

    def __init__(self, name: str, build: Callable[[Hashable], tuple]):
        self.name, self.build = name, build
        self.on_disk = build.__module__.startswith("warpspec.")

    def compiled(self, config: Hashable, arch: str, *, native: bool = False):
        """What ``cute.compile`` makes of the configuration, with ``artifacts``. Needs no GPU. native: see
        ``compile_kernel``. Raises what the DSL raises."""
        key = (self.name, config)
        return compile_kernel(key, lambda: self.build(config), arch=arch, native=native, on_disk=self.on_disk)

    def launcher(self, config: Hashable, target: Target, *, seed: int = 0) -> Callable:
        """A function that launches the kernel; compiled before this returns.

        It takes the host function's arguments but the stream, all of them and by position. Natively it launches on the
        tensors' device, which must be the current one (``Target.current``), and its current stream, and returns None.
        In the simulator it returns the ``SimReport``; seed: of ``sim.run``.
        """
        compiled = self.compiled(config, target.arch, native=target.native)
        if target.native:
            return _without_keywords(compiled)
        from warpspec import sim  # brings in llvmlite, an optional dependency

        return lambda *arguments: sim.run(compiled, *arguments, None, seed=seed)

    def run(self, config: Hashable, target: Target, *arguments, seed: int = 0):
        """Launch the kernel once. The same as ``launcher`` and a call of it, with the target's device made current."""
        launch = self.launcher(config, target, seed=seed)
        with target.current():
            return launch(*arguments)


def _without_keywords(compiled):
    """A native host function without the wrapper that fills in defaults and keywords: it costs more than the launch."""
    unwrap = getattr(compiled, "__tvm_ffi_object__", None)
    function = None if unwrap is None else unwrap()
    return compiled if function is None else function
