"""What tests of the simulator's host side share: small host functions, calls that only record launches."""

import struct

import cuda.bindings.driver as cuda_driver
import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from warpspec.common.compile import compile_host
from warpspec.sim.host import HostModule

ARCH = "sm_100a"
THREADS = 32


@cute.kernel
def touch(a: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    a[thread] = a[thread]


@cute.kernel
def nothing():
    pass


@cute.kernel
def keep_tensor(a: cute.Tensor):
    """Keeps its whole argument: a static layout would otherwise leave only the pointer."""
    thread, _, _ = cute.arch.thread_idx()
    if thread < cute.size(a):
        a[(thread,) * cute.rank(a)] = a[(0,) * cute.rank(a)]


def build(host, *args, arch=ARCH, options=""):
    return HostModule(compile_host(host, *args, arch=arch, options=options))


def launches_of(module, *args, **kwargs):
    """The launches a call makes; what the kernels would do is left out."""
    launches = []
    module.call(args, launches.append, **kwargs)
    return launches


def parameter(launch, index, form):
    offset, size = launch.param_layout[index]
    assert struct.calcsize(form) <= size
    return struct.unpack_from(form, launch.params, offset)


def fake(dtype, shape, stride, align=16):
    return make_fake_tensor(dtype, shape, stride, assumed_align=align)


def dynamic(dtype, rank, divisibility=1, align=16):
    """Dynamic sizes, dynamic strides but the last, which is 1."""
    shape = tuple(cute.sym_int() for _ in range(rank))
    stride = (*(cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)), 1)
    return fake(dtype, shape, stride, align)


@cute.kernel
def scale_kernel(a: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    a[thread, 0] = a[thread, 0] * factor


@cute.jit
def scale_host(a: cute.Tensor, factor: cutlass.Float32, stream: cuda_driver.CUstream):
    rows = cute.size(a, mode=[0])
    scale_kernel(a, factor).launch(
        grid=[cute.ceil_div(rows, THREADS), 2, 3], block=[THREADS, 1, 1], smem=2048, stream=stream
    )


@cute.jit
def rows_host(a: cute.Tensor):
    nothing().launch(grid=[cute.size(a, mode=[0]), cute.size(a, mode=[1]), 1], block=[THREADS, 1, 1])


def scale_module(arch=ARCH):
    return build(scale_host, dynamic(cutlass.Float32, 2, 4), 1.0, make_fake_stream(), arch=arch)
