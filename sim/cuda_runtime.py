"""The CUDA runtime that compiled host code calls, for a simulated device.

The entry points are C callbacks registered once with LLVM; each call goes to the `Session` of the host
function that is running. A Python exception inside a callback cannot cross the host code: the session keeps
it, the callback returns an error code, and whoever called the host function raises it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import llvmlite.binding as llvm

from warpspec.common.cubin import FATBIN_HEADER, KernelResources, cubin_from_fatbin, parse_cubin
from warpspec.sim.device import (
    MAX_BLOCK,
    MAX_CLUSTER,
    MAX_GRID,
    MAX_PORTABLE_CLUSTER,
    SHARED_PER_CTA_DEFAULT,
    SHARED_RESERVED,
    WARP_SIZE,
    Device,
)
from warpspec.sim.errors import HostError, TooManyCtas
from warpspec.sim.limits import ctas_by_registers, register_shortage
from warpspec.sim.memory import GlobalMemory

CUDA_PREFIX = "_cu"  # prefix of the entry points in host code
CUDA_SUCCESS = 0
CUDA_ERROR_LAUNCH_FAILURE = 719  # what host code gets after an exception; the caller sees the exception

# cudaFuncAttribute / CUfunction_attribute numbers.
FUNC_MAX_THREADS = 0
FUNC_SHARED_BYTES = 1
FUNC_LOCAL_BYTES = 3
FUNC_REGISTERS = 4
FUNC_MAX_DYNAMIC_SHARED = 8
FUNC_NON_PORTABLE_CLUSTER = 14

# cudaLaunchAttributeID numbers, and the layout of cudaLaunchConfig_t and cudaLaunchAttribute.
ATTRIBUTE_NAMES = {
    1: "access_policy_window",
    2: "cooperative",
    3: "synchronization_policy",
    4: "cluster",
    5: "cluster_scheduling_policy",
    6: "programmatic_stream_serialization",
    7: "programmatic_event",
    8: "priority",
    9: "memory_sync_domain_map",
    10: "memory_sync_domain",
    11: "preferred_cluster",
    12: "launch_completion_event",
    13: "device_updatable_kernel_node",
    14: "preferred_shared_memory_carveout",
}
LAUNCH_CONFIG = struct.Struct("<3I3IQQQI")
LAUNCH_ATTRIBUTE_BYTES = 72
LAUNCH_ATTRIBUTE_VALUE = 8  # offset of the value union
DIM3 = struct.Struct("<3I")
DIM3_ATTRIBUTES = ("cluster", "preferred_cluster")


@dataclass(frozen=True)
class Launch:
    """One kernel launch, as the host code asked for it.

    smem_bytes: dynamic shared memory per CTA. params: the parameter block, laid out as the kernel's .param
    space; param_layout: (offset, size) of each parameter in it. attributes: launch attributes by name
    (cooperative, programmatic_stream_serialization, ...), cluster shape excepted.
    """

    kernel_name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: bytes = field(repr=False)
    param_layout: tuple[tuple[int, int], ...] = field(repr=False)
    attributes: dict[str, int | tuple[int, int, int]]
    stream: int
    resources: KernelResources
    memory: GlobalMemory = field(repr=False)


@dataclass
class Kernel:
    """A kernel of a loaded library, with the attributes the host code has set."""

    name: str
    resources: KernelResources
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass
class Session:
    """State of one compiled host function: its device, libraries and kernels, and the current call."""

    device: Device
    cubin: bytes | None
    libraries: dict[int, dict[str, Kernel]] = field(default_factory=dict)
    kernels: dict[int, Kernel] = field(default_factory=dict)
    memory: GlobalMemory | None = None
    on_launch: Callable[[Launch], None] | None = None
    error: BaseException | None = None
    handles: int = 0x1000  # first opaque handle
    device_allocations: int = 0

    def new_handle(self) -> int:
        self.handles += 16
        return self.handles

    def kernel(self, handle: int) -> Kernel:
        if handle not in self.kernels:
            raise HostError(
                f"the host function uses kernel handle {handle or 0:#x}, which it was never given"
            )
        return self.kernels[handle]

    def device_memory(self) -> GlobalMemory:
        if self.memory is None:
            raise HostError("the host function touches device memory while it is being loaded")
        return self.memory


_sessions: list[Session] = []  # the running host functions; the last one is the caller
_callbacks: dict[str, object] = {}

# Argument kinds of a callback.
PTR, INT, UINT, SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64


class running:
    """Context in which callbacks go to `session`."""

    def __init__(self, session: Session):
        self.session = session

    def __enter__(self) -> Session:
        _sessions.append(self.session)
        return self.session

    def __exit__(self, *_: object) -> None:
        _sessions.pop()


def entry_point(name: str, *kinds: type):
    """Register a function (session, *arguments) -> None as the CUDA entry point `name`."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: int) -> int:
            session = _sessions[-1]
            if session.error is not None:
                return CUDA_ERROR_LAUNCH_FAILURE
            try:
                function(session, *(a or 0 for a in arguments))
            except BaseException as error:  # re-raised by the caller of the host function
                session.error = error
                return CUDA_ERROR_LAUNCH_FAILURE
            return CUDA_SUCCESS

        callback = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(call)
        _callbacks[name] = callback
        llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
        return function

    return register


UNCALLED = ("TVMFFI", "cuda_dialect_", "CuteDSLRT_TVMFFI", "_cudaSetDevice")


@ctypes.CFUNCTYPE(ctypes.c_int32)
def _uncalled() -> int:
    return CUDA_ERROR_LAUNCH_FAILURE


def require_symbols(names: Iterable[str]) -> None:
    """Register the symbols a host object imports with LLVM, which would end the process on a missing one.

    CUDA entry points come from this module only: the DSL has its own in this process, for a real device.
    The rest (printf, memcpy) is the C library's. HostError names what is missing.
    """
    process = ctypes.CDLL(None)
    missing = []
    for name in names:
        if name in _callbacks:
            continue
        if name.startswith(UNCALLED):  # by the entry for TVM FFI, which is not the one that runs
            llvm.add_symbol(name, ctypes.cast(_uncalled, ctypes.c_void_p).value)
            continue
        if name.startswith(CUDA_PREFIX) or not hasattr(process, name):
            missing.append(name)
        else:
            llvm.add_symbol(name, ctypes.cast(getattr(process, name), ctypes.c_void_p).value)
    if missing:
        raise HostError(f"the host function calls {', '.join(missing)}, which the simulator does not provide")


def _store(address: int, kind: type, value: int) -> None:
    kind.from_address(address).value = value


@entry_point("_cudaLibraryLoadData", PTR, PTR, PTR, PTR, INT, PTR, PTR, INT)
def library_load_data(session: Session, out: int, code: int, *_options: int) -> None:
    cubin = session.cubin
    if cubin is None:
        _, _, header, body = FATBIN_HEADER.unpack(ctypes.string_at(code, FATBIN_HEADER.size))
        cubin = session.cubin = cubin_from_fatbin(ctypes.string_at(code, header + body))
    handle = session.new_handle()
    session.libraries[handle] = {name: Kernel(name, r) for name, r in parse_cubin(cubin).items()}
    _store(out, PTR, handle)


@entry_point("_cudaLibraryGetKernel", PTR, PTR, PTR)
def library_get_kernel(session: Session, out: int, library: int, name: int) -> None:
    text = ctypes.string_at(name).decode()
    kernels = session.libraries.get(library, {})
    if text not in kernels:
        raise HostError(f"the cubin has no kernel {text}; it has {', '.join(kernels) or 'none'}")
    handle = session.new_handle()
    session.kernels[handle] = kernels[text]
    _store(out, PTR, handle)


@entry_point("_cudaLibraryGetKernelCount", PTR, PTR)
def library_get_kernel_count(session: Session, out: int, library: int) -> None:
    _store(out, INT, len(session.libraries.get(library, {})))


@entry_point("_cudaLibraryUnload", PTR)
def library_unload(session: Session, library: int) -> None:
    session.libraries.pop(library, None)


@entry_point("_cuKernelGetAttribute", PTR, INT, PTR, INT)
def kernel_get_attribute(session: Session, out: int, attribute: int, kernel: int, _device: int) -> None:
    found = session.kernel(kernel)
    values = {
        FUNC_MAX_THREADS: found.resources.max_threads,
        FUNC_SHARED_BYTES: found.resources.static_smem,
        FUNC_LOCAL_BYTES: found.resources.local_bytes,
        FUNC_REGISTERS: found.resources.registers,
        FUNC_MAX_DYNAMIC_SHARED: SHARED_PER_CTA_DEFAULT - found.resources.static_smem,
        **found.attributes,
    }
    if attribute not in values:
        raise HostError(
            f"the host function asks for kernel attribute {attribute}, which the simulator does not know"
        )
    _store(out, INT, values[attribute])


@entry_point("_cudaFuncSetAttribute", PTR, INT, INT)
def func_set_attribute(session: Session, kernel: int, attribute: int, value: int) -> None:
    found = session.kernel(kernel)
    if (
        attribute == FUNC_MAX_DYNAMIC_SHARED
        and value + found.resources.static_smem > session.device.shared_per_cta
    ):
        raise HostError(
            f"{found.name}: {value} bytes of dynamic shared memory asked for, {session.device.shared_per_cta} exist"
        )
    found.attributes[attribute] = value


@entry_point("_cudaKernelSetAttributeForDevice", PTR, INT, INT, INT)
def kernel_set_attribute(session: Session, kernel: int, attribute: int, value: int, _device: int) -> None:
    func_set_attribute(session, kernel, attribute, value)


@entry_point("_cudaDeviceGetAttribute", PTR, INT, INT)
def device_get_attribute(session: Session, out: int, attribute: int, _device: int) -> None:
    _store(out, INT, session.device.attribute(attribute))


@entry_point("_cudaGetDevice", PTR)
def get_device(_session: Session, out: int) -> None:
    _store(out, INT, 0)


@entry_point("_cuDeviceGet", PTR, INT)
def device_get(_session: Session, out: int, ordinal: int) -> None:
    _store(out, INT, ordinal)


@entry_point("_cudaGetDeviceCount", PTR)
def get_device_count(_session: Session, out: int) -> None:
    _store(out, INT, 1)


@entry_point("_cudaSetDevice", INT)
def set_device(_session: Session, ordinal: int) -> None:
    if ordinal:
        raise HostError(f"the host function selects device {ordinal}; the simulator has device 0")


@entry_point("_cudaOccupancyMaxActiveBlocksPerMultiprocessor", PTR, PTR, INT, SIZE)
def occupancy(session: Session, out: int, kernel: int, threads: int, smem: int) -> None:
    _store(out, INT, _ctas_per_sm(session.device, session.kernel(kernel).resources, threads, smem))


def _ctas_per_sm(device: Device, resources: KernelResources, threads: int, smem: int) -> int:
    """CTAs of a kernel that an SM holds at once."""
    warps = -(-threads // WARP_SIZE)
    return min(
        device.ctas_per_sm,
        device.threads_per_sm // (warps * WARP_SIZE),
        ctas_by_registers(resources.registers, threads),
        device.shared_per_sm // (SHARED_RESERVED + resources.static_smem + smem),
    )


def _no_operation(*_: object) -> None:
    """Work is complete as soon as it is launched, so there is nothing to wait for."""


for _name, _kinds in {
    "_cudaDeviceSynchronize": (),
    "_cudaGetLastError": (),
    "_cudaStreamSynchronize": (PTR,),
    "_cudaStreamDestroy": (PTR,),
    "_cudaStreamWaitEvent": (PTR, PTR, INT),
    "_cudaEventDestroy": (PTR,),
    "_cudaEventRecord": (PTR, PTR),
    "_cudaEventSynchronize": (PTR,),
    "_cudaProfilerStart": (),
    "_cudaProfilerStop": (),
}.items():
    entry_point(_name, *_kinds)(_no_operation)


def _create_handle(session: Session, out: int) -> None:
    _store(out, PTR, session.new_handle())


entry_point("_cudaStreamCreate", PTR)(_create_handle)
entry_point("_cudaEventCreate", PTR)(_create_handle)


@entry_point("_cudaMalloc", PTR, SIZE)
def malloc(session: Session, out: int, nbytes: int) -> None:
    session.device_allocations += 1
    allocation = session.device_memory().allocate(nbytes, f"device allocation {session.device_allocations}")
    _store(out, PTR, allocation.address)


@entry_point("_cudaMallocAsync", PTR, SIZE, PTR)
def malloc_async(session: Session, out: int, nbytes: int, _stream: int) -> None:
    malloc(session, out, nbytes)


@entry_point("_cudaMallocManaged", PTR, SIZE, INT)
def malloc_managed(session: Session, out: int, nbytes: int, _flags: int) -> None:
    malloc(session, out, nbytes)


@entry_point("_cudaFree", PTR)
def free(session: Session, address: int) -> None:
    if address:
        session.device_memory().free(address)


@entry_point("_cudaFreeAsync", PTR, PTR)
def free_async(session: Session, address: int, _stream: int) -> None:
    free(session, address)


COPY_FROM_DEVICE = (2, 3, 4)  # cudaMemcpyKind: device to host, device to device, by address
COPY_TO_DEVICE = (1, 3, 4)
COPY_BY_ADDRESS = 4


@entry_point("_cudaMemcpy", PTR, PTR, SIZE, INT)
def memcpy(session: Session, target: int, source: int, nbytes: int, kind: int) -> None:
    memory = session.device_memory()
    by_address = kind == COPY_BY_ADDRESS
    if kind in COPY_FROM_DEVICE and not (by_address and memory.find(source) is None):
        memory.view(source, nbytes)
    if kind in COPY_TO_DEVICE and not (by_address and memory.find(target) is None):
        memory.view(target, nbytes, write=True)
    ctypes.memmove(target, source, nbytes)


@entry_point("_cudaMemcpyAsync", PTR, PTR, SIZE, INT, PTR)
def memcpy_async(session: Session, target: int, source: int, nbytes: int, kind: int, _stream: int) -> None:
    memcpy(session, target, source, nbytes, kind)


@entry_point("_cudaMemset", PTR, INT, SIZE)
def memset(session: Session, target: int, value: int, nbytes: int) -> None:
    session.device_memory().view(target, nbytes, write=True)[:] = value & 0xFF


@entry_point("_cudaMemsetAsync", PTR, INT, SIZE, PTR)
def memset_async(session: Session, target: int, value: int, nbytes: int, _stream: int) -> None:
    memset(session, target, value, nbytes)


@entry_point("_cudaLaunchKernelEx", PTR, PTR, PTR)
def launch_kernel_ex(session: Session, config: int, kernel: int, arguments: int) -> None:
    *shape, smem, stream, attributes, count = LAUNCH_CONFIG.unpack(
        ctypes.string_at(config, LAUNCH_CONFIG.size)
    )
    found: dict[str, int | tuple[int, int, int]] = {}
    for i in range(count):
        at = attributes + i * LAUNCH_ATTRIBUTE_BYTES
        number = ctypes.c_uint32.from_address(at).value
        name = ATTRIBUTE_NAMES.get(number)
        if name is None:
            raise HostError(f"launch attribute {number} is not known to the simulator")
        value = ctypes.string_at(at + LAUNCH_ATTRIBUTE_VALUE, DIM3.size)
        found[name] = DIM3.unpack(value) if name in DIM3_ATTRIBUTES else int.from_bytes(value[:4], "little")
    _launch(session, kernel, tuple(shape[:3]), tuple(shape[3:]), smem, stream, arguments, found)


@entry_point("_cudaLaunchKernel", PTR, INT, INT, INT, INT, INT, INT, PTR, SIZE, PTR)
def launch_kernel(session: Session, kernel: int, *rest: int) -> None:
    *shape, arguments, smem, stream = rest
    _launch(session, kernel, tuple(shape[:3]), tuple(shape[3:]), smem, stream, arguments, {})


def _launch(session, kernel, grid, block, smem, stream, arguments, attributes) -> None:
    found = session.kernel(kernel)
    cluster = attributes.pop("cluster", (1, 1, 1))
    cluster = tuple(max(1, c) for c in cluster)
    _check_launch(found, grid, block, cluster, smem)
    if attributes.get("cooperative"):
        threads, ctas = block[0] * block[1] * block[2], grid[0] * grid[1] * grid[2]
        most = session.device.sms * _ctas_per_sm(session.device, found.resources, threads, smem)
        if ctas > most:
            raise TooManyCtas(
                f"cooperative launch of {found.name}: {ctas} CTAs, and {session.device.name} holds {most} at once"
            )
    layout = found.resources.parameters
    params = bytearray(found.resources.params_bytes)
    for i, (offset, size) in enumerate(layout):
        pointer = PTR.from_address(arguments + i * ctypes.sizeof(PTR)).value
        params[offset : offset + size] = ctypes.string_at(pointer, size)
    if session.on_launch is None:
        raise HostError(f"{found.name} is launched while the host function is being loaded")
    session.on_launch(
        Launch(
            kernel_name=found.name,
            grid=grid,
            block=block,
            cluster=cluster,
            smem_bytes=smem,
            params=bytes(params),
            param_layout=layout,
            attributes=attributes,
            stream=stream,
            resources=found.resources,
            memory=session.device_memory(),
        )
    )


def _check_launch(kernel: Kernel, grid, block, cluster, smem: int) -> None:
    """Raise HostError for what cudaLaunchKernelExC would refuse."""

    def refuse(reason: str) -> None:
        raise HostError(f"launch of {kernel.name}: {reason}")

    threads = block[0] * block[1] * block[2]
    size = cluster[0] * cluster[1] * cluster[2]
    if any(not 1 <= g <= m for g, m in zip(grid, MAX_GRID, strict=True)):
        refuse(f"grid {grid} is empty or beyond {MAX_GRID}")
    if any(not 1 <= b <= m for b, m in zip(block, MAX_BLOCK, strict=True)):
        refuse(f"block {block} is empty or beyond {MAX_BLOCK}")
    if threads > kernel.resources.max_threads:
        refuse(
            f"block {block} has {threads} threads, the kernel is compiled for {kernel.resources.max_threads}"
        )
    if kernel.resources.required_threads not in (None, block):
        refuse(f"block {block}, the kernel is compiled for exactly {kernel.resources.required_threads}")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        refuse(f"grid {grid} is not a multiple of cluster {cluster}")
    portable = not kernel.attributes.get(FUNC_NON_PORTABLE_CLUSTER)
    if size > (MAX_PORTABLE_CLUSTER if portable else MAX_CLUSTER):
        refuse(
            f"cluster {cluster} has {size} CTAs, at most {MAX_PORTABLE_CLUSTER if portable else MAX_CLUSTER}"
        )
    allowed = kernel.attributes.get(
        FUNC_MAX_DYNAMIC_SHARED, SHARED_PER_CTA_DEFAULT - kernel.resources.static_smem
    )
    if smem > allowed:
        refuse(f"{smem} bytes of dynamic shared memory, at most {allowed}")
    if shortage := register_shortage(kernel.resources.registers, threads):
        refuse(shortage)
