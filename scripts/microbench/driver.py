"""The CUDA driver through ctypes: modules from PTX text, launches, memory, tensor maps."""

from __future__ import annotations

import ctypes

import numpy as np

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
BFLOAT16, SWIZZLE_128B, PROMOTE_256B = 9, 3, 3  # of cuTensorMapEncodeTiled
SM_COUNT, CLOCK_RATE, MEMORY_CLOCK, L2_BYTES = 16, 13, 36, 38  # CUdevice_attribute


class TensorMap(ctypes.Structure):
    """The 128 bytes of a CUtensorMap."""

    _fields_ = (("data", ctypes.c_uint8 * 128),)


class Gpu:
    """A device with its primary context. Every method raises RuntimeError with the driver's number; without a driver
    the process ends with a message."""

    def __init__(self) -> None:
        try:
            self.cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise SystemExit(f"needs an NVIDIA GPU: {error}") from None
        self.check(self.cuda.cuInit(0))
        self.device, context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self.cuda.cuDeviceGet(ctypes.byref(self.device), 0))
        self.check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device))
        self.check(self.cuda.cuCtxSetCurrent(context))

    def check(self, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"CUDA driver error {status}: {(text.value or b'').decode()}")

    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self.check(self.cuda.cuDeviceGetName(text, 128, self.device))
        return text.value.decode()

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.check(self.cuda.cuDeviceGetAttribute(ctypes.byref(value), number, self.device))
        return value.value

    def load(self, code: bytes) -> ctypes.c_void_p:
        """A module of PTX text or of a cubin's bytes."""
        module = ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), code + b"\0"))
        return module

    def unload(self, module: ctypes.c_void_p) -> None:
        self.check(self.cuda.cuModuleUnload(module))

    def function(self, module: ctypes.c_void_p, name: str, shared: int) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        self.check(self.cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared))
        return function

    def allocate(self, nbytes: int) -> ctypes.c_uint64:
        address = ctypes.c_uint64()
        self.check(self.cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)))
        self.check(self.cuda.cuMemsetD8_v2(address, 0, ctypes.c_size_t(nbytes)))
        return address

    def put(self, address: ctypes.c_uint64, data: np.ndarray) -> None:
        source = data.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cuMemcpyHtoD_v2(address, source, ctypes.c_size_t(data.nbytes)))

    def get(self, address: ctypes.c_uint64, shape: tuple[int, ...], dtype=np.uint64) -> np.ndarray:
        data = np.empty(shape, dtype)
        target = data.ctypes.data_as(ctypes.c_void_p)
        self.check(self.cuda.cuMemcpyDtoH_v2(target, address, ctypes.c_size_t(data.nbytes)))
        return data

    def launch(self, function, grid: int, block: int, shared: int, params: list) -> None:
        pointers = (ctypes.c_void_p * len(params))(*(ctypes.addressof(p) for p in params))
        self.check(self.cuda.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, shared, None, pointers, None))

    def wait(self) -> None:
        self.check(self.cuda.cuCtxSynchronize())

    def event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self.check(self.cuda.cuEventCreate(ctypes.byref(event), 0))
        self.check(self.cuda.cuEventRecord(event, None))
        return event

    def microseconds(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        elapsed = ctypes.c_float()
        self.check(self.cuda.cuEventSynchronize(end))
        self.check(self.cuda.cuEventElapsedTime_v2(ctypes.byref(elapsed), start, end))
        return 1000 * elapsed.value

    def rows_map(self, address: ctypes.c_uint64, rows: int, box_rows: int) -> TensorMap:
        """A map of a bfloat16 matrix [rows, 64] whose boxes are [box_rows, 64], swizzled by 128 bytes."""
        raw = (ctypes.c_uint8 * 256)()
        at = -ctypes.addressof(raw) % 64
        self.check(
            self.cuda.cuTensorMapEncodeTiled(
                ctypes.c_void_p(ctypes.addressof(raw) + at),
                BFLOAT16,
                2,
                ctypes.c_void_p(address.value),
                (ctypes.c_uint64 * 2)(64, rows),
                (ctypes.c_uint64 * 1)(128),
                (ctypes.c_uint32 * 2)(64, box_rows),
                (ctypes.c_uint32 * 2)(1, 1),
                0,
                SWIZZLE_128B,
                PROMOTE_256B,
                0,
            )
        )
        return TensorMap((ctypes.c_uint8 * 128)(*raw[at : at + 128]))
