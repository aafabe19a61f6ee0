"""The compiler's side of the pretended device: what `cute.compile` returns, and plain calls of @cute.jit functions,
run in the simulator; what the DSL asks a GPU for is answered."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable

import cutlass
import cutlass.testing
import cutlass.utils
import cutlass.utils.hardware_info
import torch
import tvm_ffi
from cuda.bindings import runtime as cuda_runtime
from cutlass.base_dsl import env_manager
from cutlass.base_dsl.common import DSLCudaRuntimeError
from cutlass.base_dsl.dsl import BaseDSL, DSLSingletonMeta
from cutlass.cute import runtime as cute_runtime
from cutlass.cute import testing as cute_testing
from cutlass.cutlass_dsl import tvm_ffi_provider
from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

from warpspec.sim.device import Device
from warpspec.sim.errors import HostError, TooManyCtas
from warpspec.sim.host import HostModule
from warpspec.sim.host_tensor import SOURCE
from warpspec.sim.pretend.patches import Patches
from warpspec.sim.pretend.tensors import Exported

SETTINGS = ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL")  # prefixes of environment variables
ENVIRONMENT_READERS = (
    "get_str_env_var", "get_bool_env_var", "get_int_env_var", "get_int_or_none_env_var", "has_env_var",
)  # fmt: skip
COMPILED = (
    CudaDialectJitCompiledFunction,
    tvm_ffi_provider.TVMFFIJitCompiledFunctionBase,
    tvm_ffi_provider.TVMFFIJitCompiledFunction,
    tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs,
)
Call = Callable[[object, tuple, dict], None]  # runs a compiled function with its arguments


class ArgumentError(HostError, TypeError, ValueError):
    """Arguments that do not fit the compiled signature; also a TypeError and a ValueError, as TVM FFI raises."""


class CooperativeLaunchError(TooManyCtas, DSLCudaRuntimeError):
    """A cooperative launch that the device refuses; also what the DSL raises on a GPU, with CUDA's number."""

    error_code = cuda_runtime.cudaError_t.cudaErrorCooperativeLaunchTooLarge

    def __init__(self, message: str):
        Exception.__init__(self, message)  # the DSL's own wants a number and its name
        self.message, self.where = message, None


def _with_cuda_errors(call: Call) -> Call:
    """Let a call raise what a script that handles CUDA's errors expects."""

    def run(compiled: object, args: tuple, kwargs: dict) -> None:
        try:
            call(compiled, args, kwargs)
        except TooManyCtas as error:
            raise CooperativeLaunchError(error.message) from error

    return run


class Executor:
    """The result of `compiled.to(device)`: the same compiled function, because there is one device."""

    def __init__(self, compiled: object):
        self._compiled = compiled

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._compiled(*args, **kwargs)

    def run_compiled_program(self, arguments: list) -> object:
        """Run with what `generate_execution_args` returned."""
        return self._compiled.run_compiled_program(arguments)

    def generate_execution_args(self, *args: object, **kwargs: object) -> tuple[list, list]:
        """Pack arguments the way `run_compiled_program` takes them."""
        return self._compiled.generate_execution_args(*args, **kwargs)


def _call_of(call: Call) -> Callable:
    def __call__(self, *args: object, **kwargs: object) -> int:
        try:
            call(self, args, kwargs)
        except HostError as error:
            if type(error) is HostError and isinstance(self, tvm_ffi_provider.TVMFFIJitCompiledFunctionBase):
                raise ArgumentError(str(error)) from error
            raise
        return 0

    return __call__


def _arguments(self, *args: object, **kwargs: object) -> tuple[list, list]:
    return [args, kwargs], []


def _run_arguments(self, arguments: list) -> object:
    args, kwargs = arguments
    return self(*args, **kwargs)


def runtime_arguments(compiled: object, names: dict[str, object]) -> dict[str, object]:
    """Select the arguments of a host function that its compiled form takes at a call."""
    taken = {parameter.name for parameter in HostModule.of(compiled).host.parameters}
    return {name: value for name, value in names.items() if name in taken}


def _generate(original: Callable, call: Call) -> Callable:
    """Wrap `generate_mlir` so that a plain call of a @cute.jit function compiles it and runs it in the simulator."""

    @functools.wraps(original)
    def generate_mlir(
        self, function, name, attributes, args, kwonlyargs, signature, *rest: object, **options
    ):
        bound = inspect.signature(original).bind(
            self, function, name, attributes, args, kwonlyargs, signature, *rest, **options
        )
        if bound.arguments.get("compile_only") or bound.arguments.get("compile_to_precompiled_mlir"):
            return original(*bound.args, **bound.kwargs)
        bound.arguments["compile_only"] = True
        compiled = original(*bound.args, **bound.kwargs)
        names = dict(zip(signature.parameters, args, strict=False)) | dict(kwonlyargs)
        call(compiled, (), runtime_arguments(compiled, names))
        return None

    return generate_mlir


_tensor_init = cute_runtime._Tensor.__init__


def _remembering(self, tensor: object, *args: object, **kwargs: object) -> None:
    _tensor_init(self, tensor, *args, **kwargs)
    setattr(self, SOURCE, tensor)


def _exporting(original: Callable) -> Callable:
    """Wrap tvm_ffi.from_dlpack so that it accepts tensors on the pretended device."""

    def from_dlpack(tensor: object, **options: object) -> object:
        return original(Exported(tensor) if isinstance(tensor, torch.Tensor) else tensor, **options)

    return from_dlpack


def _benchmark(callable: Callable, *_: object, **options: object) -> float:
    """Replace cutlass.testing.benchmark: call once and return the time on this machine, in microseconds."""
    generator, arguments = options.get("workspace_generator"), options.get("kernel_arguments")
    arguments = arguments if generator is None else generator()
    start = time.perf_counter()
    if arguments is None:
        callable()
    else:
        callable(*arguments.args, **arguments.kwargs)
    return (time.perf_counter() - start) * 1e6


def _benchmark_for_autotune(callable: Callable, *args: object, **kwargs: object) -> float:
    own = ("warmup_iterations", "iterations", "use_cold_l2", "print_verbose", "current_stream")
    start = time.perf_counter()
    callable(*args, **{name: value for name, value in kwargs.items() if name not in own})
    return (time.perf_counter() - start) * 1e6


def environment(arch: str, folder: str) -> dict[str, str]:
    """Environment variables that select the target and make the compiler keep PTX, cubin and line information."""
    values = {
        "ARCH": arch,
        "KEEP": "ptx,cubin",
        "LINEINFO": "1",
        "DUMP_DIR": folder,
        "DISABLE_FILE_CACHING": "1",
    }
    return {f"{prefix}_{name}": value for prefix in SETTINGS for name, value in values.items()}


def dump_to(folder: str) -> None:
    """Make the compiler leave PTX and cubin in another folder: processes that compile kernels of one name at once must
    not share one."""
    for prefix in SETTINGS:
        os.environ[f"{prefix}_DUMP_DIR"] = folder
    for name in ENVIRONMENT_READERS:
        getattr(env_manager, name).cache_clear()
    for dsl in list(DSLSingletonMeta._instances.values()):
        dsl.envar.dump_dir = folder


def patch(patches: Patches, device: Device, arch: str, folder: str, call: Call) -> None:
    """Route the DSL's calls of compiled functions to `call`, and answer what it asks the device.

    arch: the target to compile for. folder: where the compiler leaves PTX and cubin.
    """
    call = _with_cuda_errors(call)
    for name in ENVIRONMENT_READERS:
        getattr(env_manager, name).cache_clear()
    for dsl in list(DSLSingletonMeta._instances.values()):
        settings = dict(
            _arch=arch,
            keep_ptx=True,
            keep_cubin=True,
            lineinfo=True,
            dump_dir=folder,
            disable_file_caching=True,
        )
        patches.update(dsl.envar, settings)
        patches.set(dsl, "print_warning", lambda *_, **__: None)
    for kind in COMPILED:
        patches.set(kind, "__call__", _call_of(call))
        patches.set(kind, "to", lambda self, device=None: Executor(self))
        patches.set(kind, "run_compiled_program", _run_arguments)
        patches.set(kind, "generate_execution_args", _arguments)
    patches.set(BaseDSL, "generate_mlir", _generate(BaseDSL.generate_mlir, call))
    patches.set(cute_runtime._Tensor, "__init__", _remembering)
    patches.set(tvm_ffi, "from_dlpack", _exporting(tvm_ffi.from_dlpack))
    information = cutlass.utils.hardware_info.HardwareInfo
    patches.set(
        information,
        "get_max_active_clusters",
        lambda self, cluster_size, *_, **__: device.sms // cluster_size,
    )
    for module in (cutlass.testing, cute_testing):
        patches.set(module, "benchmark", _benchmark)
        patches.set(module, "get_workspace_count", lambda *_, **__: 1)
    patches.set(cutlass.testing, "_benchmark_for_autotune", _benchmark_for_autotune)
