"""The CUDA entry points that host code calls, called here as it calls them."""

import ctypes

import pytest

from warpspec.common.cubin import KernelResources
from warpspec.sim import (
    cuda_runtime,
    cuda_tensor_map,  # noqa: F401  (registers its entry point)
)
from warpspec.sim.cuda_runtime import Kernel, Session, require_symbols, running
from warpspec.sim.device import DEVICES
from warpspec.sim.errors import BadDescriptor, HostError, MemoryFault
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.tma import Interleave, Swizzle, SwizzleAtomicity, TensorMap, decode
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS = 1, 2, 3, 4


@pytest.fixture
def session():
    session = Session(DEVICES["sm_100"], None)
    session.memory = GlobalMemory()
    session.kernels[0x10] = Kernel("k", KernelResources(72, 512, 16, 64, 256))
    with running(session):
        yield session


def cuda(name, *arguments):
    """Call an entry point through its C function pointer; raise what it kept."""
    session = cuda_runtime._sessions[-1]
    result = cuda_runtime._callbacks[name](*arguments)
    error, session.error = session.error, None
    if error is not None:
        assert result == cuda_runtime.CUDA_ERROR_LAUNCH_FAILURE
        raise error
    assert result == 0


def out(kind, name, *arguments):
    """The value an entry point stores through its first argument."""
    value = kind()
    cuda(name, ctypes.addressof(value), *arguments)
    return value.value


def integer(name, *arguments):
    return out(ctypes.c_int32, name, *arguments)


def allocate(nbytes):
    return out(ctypes.c_void_p, "_cudaMalloc", nbytes)


@pytest.mark.parametrize(
    ("number", "hopper", "blackwell"),
    [
        (16, 132, 148),  # multiprocessors
        (38, 60 * 2**20, 126 * 2**20),  # L2
        (75, 9, 10),  # compute capability
        (76, 0, 0),
        (81, 228 * 1024, 228 * 1024),  # shared memory per multiprocessor
        (97, 227 * 1024, 227 * 1024),  # per block with opt-in
        (10, 32, 32),  # warp size
    ],
)
def test_device_attributes(session, number, hopper, blackwell):
    assert integer("_cudaDeviceGetAttribute", number, 0) == blackwell
    session.device = DEVICES["sm_90"]
    assert integer("_cudaDeviceGetAttribute", number, 0) == hopper


def test_unknown_device_attribute(session):
    with pytest.raises(HostError, match="cudaDeviceAttr 9999"):
        integer("_cudaDeviceGetAttribute", 9999, 0)


def test_devices(session):
    assert integer("_cudaGetDevice") == 0
    assert integer("_cudaGetDeviceCount") == 1
    cuda("_cudaSetDevice", 0)
    with pytest.raises(HostError, match="device 1"):
        cuda("_cudaSetDevice", 1)


def test_kernel_attributes(session):
    assert [integer("_cuKernelGetAttribute", n, 0x10, 0) for n in (0, 1, 3, 4)] == [256, 512, 16, 72]
    cuda("_cudaFuncSetAttribute", 0x10, 8, 200_000)
    assert integer("_cuKernelGetAttribute", 8, 0x10, 0) == 200_000
    with pytest.raises(HostError, match="k: 232448 bytes of dynamic shared memory"):
        cuda("_cudaKernelSetAttributeForDevice", 0x10, 8, 227 * 1024, 0)
    with pytest.raises(HostError, match="kernel attribute 77"):
        integer("_cuKernelGetAttribute", 77, 0x10, 0)
    with pytest.raises(HostError, match="kernel handle 0x20"):
        cuda("_cudaFuncSetAttribute", 0x20, 8, 1)


@pytest.mark.parametrize(
    ("threads", "smem", "blocks"),
    [
        (256, 0, 3),  # registers: 72 * 32 rounded to 2304 a warp, 8 warps, of 65536
        (32, 0, 28),  # registers, one warp
        (128, 100_000, 2),  # shared memory: 1024 + 512 + 100000 of 233472
        (128, 230_000, 1),
    ],
)
def test_occupancy(session, threads, smem, blocks):
    name = "_cudaOccupancyMaxActiveBlocksPerMultiprocessor"
    assert integer(name, 0x10, threads, smem) == blocks


def test_allocate_copy_set_free(session):
    first, second = allocate(64), allocate(64)
    assert [a.name for a in sorted(session.memory.allocations, key=lambda a: a.name)] == [
        "device allocation 1",
        "device allocation 2",
    ]
    host = ctypes.create_string_buffer(bytes(range(64)), 64)
    back = ctypes.create_string_buffer(64)
    cuda("_cudaMemcpy", first, ctypes.addressof(host), 64, HOST_TO_DEVICE)
    cuda("_cudaMemcpyAsync", second, first, 64, DEVICE_TO_DEVICE, 0)
    cuda("_cudaMemset", second + 8, 0x107, 4)
    cuda("_cudaMemcpy", ctypes.addressof(back), second, 64, BY_ADDRESS)
    assert back.raw == bytes(range(8)) + bytes([7] * 4) + bytes(range(12, 64))
    cuda("_cudaFree", first)
    cuda("_cudaFreeAsync", second, 0)
    cuda("_cudaFree", None)
    assert session.memory.allocations == ()


def test_copies_are_checked(session):
    device = allocate(64)
    host = ctypes.create_string_buffer(128)
    with pytest.raises(MemoryFault, match="64 bytes are past the end of device allocation 1"):
        cuda("_cudaMemcpy", device, ctypes.addressof(host), 128, HOST_TO_DEVICE)
    with pytest.raises(MemoryFault, match="read at"):
        cuda("_cudaMemcpy", ctypes.addressof(host), device + 1, 64, DEVICE_TO_HOST)
    with pytest.raises(MemoryFault, match="write at"):
        cuda("_cudaMemset", device, 0, 65)
    with pytest.raises(MemoryFault, match="not the start of an allocation"):
        cuda("_cudaFree", device + 4)


def test_streams_and_events_are_handles(session):
    handles = [
        out(ctypes.c_void_p, n) for n in ("_cudaStreamCreate", "_cudaStreamCreate", "_cudaEventCreate")
    ]
    assert len(set(handles)) == 3
    assert all(handles)
    cuda("_cudaEventRecord", handles[2], handles[0])
    cuda("_cudaStreamSynchronize", handles[0])
    cuda("_cudaDeviceSynchronize")


def test_after_an_error_every_call_fails(session):
    value = ctypes.c_int32(-5)
    get_device = cuda_runtime._callbacks["_cudaGetDevice"]
    cuda_runtime._callbacks["_cudaSetDevice"](3)
    assert get_device(ctypes.addressof(value)) == cuda_runtime.CUDA_ERROR_LAUNCH_FAILURE
    assert value.value == -5
    assert isinstance(session.error, HostError)
    session.error = None
    assert get_device(ctypes.addressof(value)) == 0
    assert value.value == 0


def test_symbols(monkeypatch):
    require_symbols(["_cudaMalloc", "printf", "memcpy"])
    with pytest.raises(
        HostError, match="calls _cudaGraphLaunch, _cuEventQuery, which the simulator does not"
    ):
        require_symbols(["_cudaGraphLaunch", "printf", "_cuEventQuery"])
    monkeypatch.delitem(cuda_runtime._callbacks, "_cudaMalloc")
    with pytest.raises(HostError, match="calls _cudaMalloc"):
        require_symbols(["_cudaMalloc"])
    with pytest.raises(HostError, match="calls no_such_function"):
        require_symbols(["no_such_function"])


def words(kind, *values):
    array = (kind * len(values))(*values)
    return ctypes.addressof(array), array


def encode_tiled(element, dims, strides, box, steps, *modes):
    """Call cuTensorMapEncodeTiled on a buffer of garbage; the map it writes, decoded."""
    raw = bytearray(b"\xee" * 192)
    start = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    at = -start % 64
    arrays = [
        words(ctypes.c_uint64, *dims),
        words(ctypes.c_uint64, *strides),
        words(ctypes.c_uint32, *box),
        words(ctypes.c_uint32, *steps),
    ]
    address = allocate(4096)
    cuda("_cuTensorMapEncodeTiled", start + at, element, len(dims), address, *(a for a, _ in arrays), *modes)
    return address, decode(raw[at : at + 128])


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (0, "u8"),
        (6, "f16"),
        (7, "f32"),
        (8, "f64"),
        (9, "bf16"),
        (10, "f32.ftz"),
        (11, "tf32"),
        (13, "b4x16"),
    ],
)
def test_tensor_map_types_are_numbered_as_the_driver_does(session, number, name):
    bits = ELEMENT_BY_NAME[name].bits
    address, found = encode_tiled(number, (256, 3), (256 * bits // 8,), (256 // bits, 2), (1, 1), 0, 0, 1, 0)
    assert found == TensorMap(
        address,
        ELEMENT_BY_NAME[name],
        (256, 3),
        (256 * bits // 8,),
        (256 // bits, 2),
        (1, 1),
        l2_promotion=1,
    )


@pytest.mark.parametrize(
    ("number", "swizzle", "atomicity"),
    [
        (0, Swizzle.NONE, SwizzleAtomicity.BYTES_16),
        (1, Swizzle.BYTES_32, SwizzleAtomicity.BYTES_16),
        (3, Swizzle.BYTES_128, SwizzleAtomicity.BYTES_16),
        (4, Swizzle.BYTES_128, SwizzleAtomicity.BYTES_32),
        (5, Swizzle.BYTES_128, SwizzleAtomicity.BYTES_32_FLIP_8),
        (6, Swizzle.BYTES_128, SwizzleAtomicity.BYTES_64),
    ],
)
def test_tensor_map_swizzles_steps_and_fill(session, number, swizzle, atomicity):
    _, found = encode_tiled(6, (64, 8, 5), (128, 1024), (16, 8, 4), (1, 2, 1), 0, number, 0, 1)
    assert (found.swizzle, found.atomicity, found.nan_fill) == (swizzle, atomicity, True)
    assert (found.box, found.element_strides, found.interleave) == ((16, 8, 4), (1, 2, 1), Interleave.NONE)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((6, (64, 8), (136,), (64, 8), (1, 1), 0, 0, 0, 0), "stride of dimension 1"),
        ((6, (64, 8), (128,), (64, 512), (1, 1), 0, 0, 0, 0), "box size of dimension 1"),
        ((6, (64, 8), (128,), (64, 8), (1, 1), 0, 1, 0, 0), "wider than the swizzle"),
        ((16, (64, 8), (128,), (64, 8), (1, 1), 0, 0, 0, 0), "no data type 16"),
        ((6, (64, 8), (128,), (64, 8), (1, 1), 0, 7, 0, 0), "no swizzle 7"),
    ],
)
def test_tensor_map_rules(session, arguments, reason):
    with pytest.raises(BadDescriptor, match=reason):
        encode_tiled(*arguments)
