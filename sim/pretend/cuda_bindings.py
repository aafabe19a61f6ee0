"""cuda.bindings for a device that is not there: device queries, contexts, streams, events, and memory of this machine.

Functions that this table lacks stay the package's own; without a driver they raise and name themselves.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable

import numpy as np
import torch
from cuda.bindings import driver, runtime

from warpspec.sim.device import Device
from warpspec.sim.pretend.torch_cuda import SHORTEST_MS, TOTAL_MEMORY

DRIVER_VERSION = 13000
HANDLE = 1  # the handle of the only context and of the only device
_handles = itertools.count(0x9100, 16)
_memory: dict[int, torch.Tensor] = {}  # allocations by address; the simulator finds live tensors behind them
_times: dict[int, float] = {}  # when events were recorded, by handle


def _allocate(nbytes: int) -> int:
    buffer = np.zeros(max(int(nbytes), 1) + 256, np.uint8)
    offset = -buffer.ctypes.data % 256
    block = buffer[offset : offset + max(int(nbytes), 1)]
    _memory[block.ctypes.data] = torch.from_numpy(block)
    return block.ctypes.data


def _move(target: object, source: object, nbytes: int, *_: object) -> None:
    ctypes.memmove(_address(target), _address(source), int(nbytes))


def _address(pointer: object) -> int:
    if isinstance(pointer, (bytes, bytearray, np.ndarray)):
        return np.frombuffer(pointer, np.uint8).ctypes.data
    return int(pointer)


def _fill(word: type) -> Callable:
    def fill(target: object, value: int, count: int, *_: object) -> None:
        block = np.ctypeslib.as_array(
            (ctypes.c_uint8 * (int(count) * np.dtype(word).itemsize)).from_address(int(target))
        )
        block.view(word)[:] = value

    return fill


def _record(event: object, *_: object) -> None:
    _times[int(event)] = time.perf_counter()


def _elapsed(start: object, end: object) -> float:
    return max((_times.get(int(end), 0.0) - _times.get(int(start), 0.0)) * 1e3, SHORTEST_MS)


def _free(pointer: object, *_: object) -> None:
    _memory.pop(int(pointer), None)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing and succeed."""


def _answers(success: object, functions: dict[str, Callable]) -> dict[str, Callable]:
    """Functions that return (success, result), or (success,) where they return None."""

    def answering(function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> tuple:
            result = function(*args, **kwargs)
            return (success,) if result is None else (success, result)

        return call

    return {name: answering(function) for name, function in functions.items()}


def driver_functions(device: Device) -> dict[str, Callable]:
    """The functions that replace those of cuda.bindings.driver."""
    d = driver
    functions: dict[str, Callable] = {
        "cuDriverGetVersion": lambda: DRIVER_VERSION,
        "cuDeviceGetCount": lambda: 1,
        "cuDeviceGet": lambda ordinal: d.CUdevice(ordinal),
        "cuDeviceGetName": lambda length, which: f"NVIDIA {device.name}".encode(),
        "cuDeviceGetAttribute": lambda attribute, which: device.attribute(int(attribute)),
        "cuDeviceTotalMem": lambda which: TOTAL_MEMORY,
        "cuCtxGetCurrent": lambda: d.CUcontext(HANDLE),
        "cuCtxGetDevice": lambda: d.CUdevice(0),
        "cuCtxCreate": lambda *_: d.CUcontext(HANDLE),
        "cuCtxPopCurrent": lambda *_: d.CUcontext(HANDLE),
        "cuDevicePrimaryCtxRetain": lambda which: d.CUcontext(HANDLE),
        "cuStreamCreate": lambda *_: d.CUstream(next(_handles)),
        "cuStreamCreateWithPriority": lambda *_: d.CUstream(next(_handles)),
        "cuEventCreate": lambda *_: d.CUevent(next(_handles)),
        "cuEventRecord": _record,
        "cuEventElapsedTime": _elapsed,
        "cuMemAlloc": lambda nbytes: d.CUdeviceptr(_allocate(nbytes)),
        "cuMemAllocAsync": lambda nbytes, stream=None: d.CUdeviceptr(_allocate(nbytes)),
        "cuMemFree": _free,
        "cuMemFreeAsync": _free,
        "cuMemsetD8": _fill(np.uint8),
        "cuMemsetD8Async": _fill(np.uint8),
        "cuMemsetD32": _fill(np.uint32),
        "cuMemsetD32Async": _fill(np.uint32),
        "cuGetErrorName": lambda error: getattr(error, "name", str(error)).encode(),
        "cuGetErrorString": lambda error: getattr(error, "name", str(error)).encode(),
    }
    for name in (
        "cuInit", "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxDestroy", "cuCtxSynchronize",
        "cuDevicePrimaryCtxRelease", "cuStreamDestroy", "cuStreamSynchronize", "cuStreamQuery", "cuStreamWaitEvent",
        "cuEventDestroy", "cuEventSynchronize", "cuEventQuery",
    ):  # fmt: skip
        functions[name] = _nothing
    for name in ("HtoD", "DtoH", "DtoD"):
        functions[f"cuMemcpy{name}"] = functions[f"cuMemcpy{name}Async"] = _move
    return _answers(d.CUresult.CUDA_SUCCESS, functions)


def runtime_functions(device: Device) -> dict[str, Callable]:
    """The functions that replace those of cuda.bindings.runtime."""
    r = runtime
    functions: dict[str, Callable] = {
        "cudaGetDeviceCount": lambda: 1,
        "cudaGetDevice": lambda: 0,
        "cudaDriverGetVersion": lambda: DRIVER_VERSION,
        "cudaRuntimeGetVersion": lambda: DRIVER_VERSION,
        "cudaDeviceGetAttribute": lambda attribute, which: device.attribute(int(attribute)),
        "cudaStreamCreate": lambda: r.cudaStream_t(next(_handles)),
        "cudaStreamCreateWithFlags": lambda flags: r.cudaStream_t(next(_handles)),
        "cudaEventCreate": lambda: r.cudaEvent_t(next(_handles)),
        "cudaEventCreateWithFlags": lambda flags: r.cudaEvent_t(next(_handles)),
        "cudaEventRecord": _record,
        "cudaEventElapsedTime": _elapsed,
        "cudaMalloc": _allocate,
        "cudaFree": _free,
        "cudaMemcpy": _move,
        "cudaMemcpyAsync": _move,
        "cudaMemset": _fill(np.uint8),
        "cudaMemsetAsync": _fill(np.uint8),
        "cudaGetErrorName": lambda error: getattr(error, "name", str(error)).encode(),
        "cudaGetErrorString": lambda error: getattr(error, "name", str(error)).encode(),
    }
    for name in (
        "cudaSetDevice", "cudaDeviceSynchronize", "cudaGetLastError", "cudaPeekAtLastError", "cudaStreamDestroy",
        "cudaStreamSynchronize", "cudaStreamQuery", "cudaStreamWaitEvent", "cudaEventDestroy", "cudaEventSynchronize",
        "cudaEventQuery", "cudaProfilerStart", "cudaProfilerStop",
    ):  # fmt: skip
        functions[name] = _nothing
    return _answers(r.cudaError_t.cudaSuccess, functions)
