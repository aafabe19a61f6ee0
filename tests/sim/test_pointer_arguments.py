"""Pointers and addresses for a compiled host function: what stands behind them reaches the kernel, and comes back."""

import ctypes

import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import make_ptr
from helpers.host_calls import THREADS, build, dynamic, launches_of, parameter

from warpspec.sim.errors import HostError


@cute.kernel
def through_pointer(p: cute.Pointer):
    thread, _, _ = cute.arch.thread_idx()
    cute.make_tensor(p, cute.make_layout(THREADS))[thread] = cutlass.Float16(0)


@cute.jit
def pointer_host(p: cute.Pointer, t: cute.Tensor):
    through_pointer(p).launch(grid=[cute.size(t), 1, 1], block=[THREADS, 1, 1])


class Buffer:
    """A user's own argument type: a pointer and a name fixed at compile time (the DSL's JitArgument protocol)."""

    def __init__(self, pointer, name):
        self.pointer, self.name = pointer, name

    def __c_pointers__(self):
        return self.pointer.__c_pointers__()

    def __get_mlir_types__(self):
        return self.pointer.__get_mlir_types__()

    def __extract_mlir_values__(self):
        return self.pointer.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values):
        return Buffer(self.pointer.__new_from_mlir_values__(values), self.name)


@cute.jit
def buffer_host(b: Buffer, kind: type[cutlass.Numeric], t: cute.Tensor):
    through_pointer(b.pointer).launch(grid=[cute.size(t), 1, 1], block=[THREADS, 1, 1])


def gmem_pointer(address):
    return make_ptr(cutlass.Float16, address, cute.AddressSpace.gmem, assumed_align=16)


def test_pointers_inside_an_argument_of_the_caller_s_own_type():
    module = build(buffer_host, Buffer(gmem_pointer(0), "b"), cutlass.Float16, dynamic(cutlass.Int64, 1))
    data, t = torch.arange(64.0).half(), torch.zeros(5, dtype=torch.int64)
    (launch,) = launches_of(module, Buffer(gmem_pointer(data.data_ptr() + 32), "b"), cutlass.Float16, t)
    (address,) = parameter(launch, 0, "<Q")
    assert launch.memory.view(address, 8).view(np.float16).tolist() == [16, 17, 18, 19]
    (launch,) = launches_of(module, Buffer(gmem_pointer(0), "b"), cutlass.Float16, t)
    assert parameter(launch, 0, "<Q") == (0,)


@pytest.fixture(scope="module")
def module():
    null = make_ptr(cutlass.Float16, 0, cute.AddressSpace.gmem, assumed_align=16)
    return build(pointer_host, null, dynamic(cutlass.Int64, 1))


def test_tensor_pointer_and_address(module):
    a, t = torch.arange(64.0).half(), torch.zeros(5, dtype=torch.int64)
    pointer = make_ptr(cutlass.Float16, a.data_ptr() + 32, cute.AddressSpace.gmem, assumed_align=16)
    for given, start in ((a, 0), (a.data_ptr() + 32, 16), (pointer, 16)):
        (launch,) = launches_of(module, given, t, memory=(a,))
        assert launch.grid == (5, 1, 1)
        (address,) = parameter(launch, 0, "<Q")
        assert launch.memory.view(address, 8).view(np.float16).tolist() == list(range(start, start + 4))


def test_null(module):
    (launch,) = launches_of(module, 0, torch.zeros(5, dtype=torch.int64))
    assert parameter(launch, 0, "<Q") == (0,)


def test_address_of_nothing_given(module):
    buffer = ctypes.create_string_buffer(64)
    with pytest.raises(HostError, match=r"argument `p`: address 0x.* is in none of the tensors"):
        launches_of(module, ctypes.addressof(buffer) & ~15, torch.zeros(5, dtype=torch.int64))


def test_live_tensors_behind_addresses_are_found(module):
    whole = torch.arange(64.0)
    inner, outer = whole[32:], torch.tensor([whole.data_ptr() + 12, 5, 1 << 40, whole.data_ptr() + 16])
    before = outer.tolist()
    (launch,) = launches_of(module, inner.data_ptr(), outer)
    at = {x.name: x for x in launch.memory.allocations}
    found = at["argument `p`'s target"]
    assert found.array.view(np.float32).tolist() == whole.tolist()
    assert parameter(launch, 0, "<Q") == (found.address + 128,)
    words = at["argument `t`"].array.view(np.uint64).tolist()
    assert words == [found.address + 12, 5, 1 << 40, found.address + 16]
    assert outer.tolist() == before


def test_a_table_behind_a_pointer_leads_further(module):
    data = torch.arange(16, dtype=torch.int32)
    table = torch.tensor([0, data.data_ptr()])
    (launch,) = launches_of(module, table.data_ptr(), torch.zeros(5, dtype=torch.int64))
    (address,) = parameter(launch, 0, "<Q")
    (pointer,) = launch.memory.view(address + 8, 8).view(np.uint64)
    assert launch.memory.view(pointer, 64).view(np.int32).tolist() == list(range(16))


def test_live_arrays_behind_addresses_are_found(module):
    data = np.arange(32, dtype=np.float32)
    start = -(data.ctypes.data // 4) % 4  # the first 16-byte aligned element
    (launch,) = launches_of(module, data[start:].ctypes.data, torch.zeros(5, dtype=torch.int64))
    (address,) = parameter(launch, 0, "<Q")
    assert launch.memory.view(address, 4).view(np.float32) == [start]


def test_what_is_written_behind_an_address_comes_back(module):
    data = torch.zeros(16)

    def write(launch):
        (address,) = parameter(launch, 0, "<Q")
        launch.memory.view(address, 4, write=True).view(np.float32)[0] = 7

    module.call((data.data_ptr(), torch.zeros(5, dtype=torch.int64)), write)
    assert data[0] == 7


def test_misaligned(module):
    a = torch.zeros(64)
    for given in (a[1:], a.data_ptr() + 4):
        with pytest.raises(HostError, match=r"argument `p`: begins 4 bytes off.*16-byte aligned"):
            launches_of(module, given, torch.zeros(5, dtype=torch.int64), memory=(a,))


def test_addresses_in_a_tensor_are_translated(module):
    a, b = torch.arange(4.0), torch.arange(8.0)
    addresses = torch.tensor([a.data_ptr(), b.data_ptr()])
    (launch,) = launches_of(module, 0, addresses, memory=(a, b))
    at = {x.name: x for x in launch.memory.allocations}
    words = at["argument `t`"].array.view(np.uint64).tolist()
    assert words == [at["argument `memory[0]`"].address, at["argument `memory[1]`"].address]
    assert addresses.tolist() == [a.data_ptr(), b.data_ptr()]
