"""Global memory of the simulator: bounds, guard zones, staging of overlapping and strided tensors."""

import os

import numpy as np
import pytest
import torch

from warpspec.sim.errors import HostError, MemoryFault
from warpspec.sim.host_tensor import host_tensor
from warpspec.sim.memory import (
    DEVICE_ALIGNMENT,
    GUARD_BYTE,
    GUARD_BYTES,
    LOCAL_WINDOW,
    POISON_BYTE,
    SHARED_WINDOW,
    GlobalMemory,
    HostRegion,
)


def stage(**tensors):
    """A memory with tensors staged, and the device address of each one's first element."""
    memory = GlobalMemory()
    memory.stage([host_tensor(t, n).region(f"`{n}`") for n, t in tensors.items()])
    return memory, {n: memory.device_address(t.data_ptr()) for n, t in tensors.items()}


def read(memory, address, count, dtype=np.float32):
    return memory.view(address, count * np.dtype(dtype).itemsize).view(dtype)


def test_allocation_is_aligned_and_poisoned():
    memory = GlobalMemory()
    for nbytes in (1, 255, 4096, 1 << 20):
        a = memory.allocate(nbytes, "x")
        assert a.address % DEVICE_ALIGNMENT == 0
        assert (memory.view(a.address, nbytes) == POISON_BYTE).all()
    partly = memory.allocate(8, "y", data=b"abc")
    assert bytes(memory.view(partly.address, 8)) == b"abc" + bytes([POISON_BYTE]) * 5


def test_offset_is_kept():
    memory = GlobalMemory()
    for offset in (0, 2, 16, 255, 256 + 48):
        assert memory.allocate(64, "x", offset=offset).address % DEVICE_ALIGNMENT == offset % DEVICE_ALIGNMENT


def test_view_writes_reach_the_allocation():
    memory = GlobalMemory()
    a = memory.allocate(64, "x")
    memory.view(a.address + 8, 4, write=True)[:] = 7
    assert a.array[7:13].tolist() == [POISON_BYTE, 7, 7, 7, 7, POISON_BYTE]
    assert memory.view(np.uint64(a.address + 8), 4).tolist() == [7] * 4  # addresses come as NumPy integers


@pytest.mark.parametrize(
    ("offset", "nbytes", "text"),
    [
        (1000 + 512, 4, "512 bytes past the end of argument `q` (1000 bytes)"),
        (1000, 4, "0 bytes past the end of argument `q`"),
        (998, 4, "the last 2 bytes are past the end of argument `q`"),
        (-16, 16, "16 bytes before the start of argument `q`"),
        (-2, 4, "2 bytes before the start of argument `q`"),
    ],
)
def test_fault_names_the_nearest_allocation(offset, nbytes, text):
    memory = GlobalMemory()
    a = memory.allocate(1000, "argument `q`")
    with pytest.raises(MemoryFault) as caught:
        memory.view(a.address + offset, nbytes)
    assert text in str(caught.value)
    assert f"{nbytes}-byte read at {a.address + offset:#x}" in str(caught.value)


def test_fault_between_two_allocations_names_the_closer():
    memory = GlobalMemory()
    low, high = sorted((memory.allocate(4096, "one"), memory.allocate(4096, "two")), key=lambda a: a.address)
    with pytest.raises(MemoryFault, match=f"8 bytes past the end of {low.name}"):
        memory.view(low.end + 8, 4)
    with pytest.raises(MemoryFault, match=f"8 bytes before the start of {high.name}"):
        memory.view(high.address - 8, 4)


def test_fault_without_allocations_and_at_null():
    memory = GlobalMemory()
    with pytest.raises(MemoryFault, match="nothing is allocated"):
        memory.view(0x7000, 4)
    memory.allocate(16, "x")
    with pytest.raises(MemoryFault, match="null pointer"):
        memory.view(16, 4)


@pytest.mark.parametrize(("window", "word"), [(SHARED_WINDOW, "shared"), (LOCAL_WINDOW, "local")])
def test_fault_in_another_window(window, word):
    memory = GlobalMemory()
    memory.allocate(16, "x")
    with pytest.raises(MemoryFault, match=f"{word} memory, not global"):
        memory.view(window + 1024, 4)


def test_read_only():
    memory = GlobalMemory()
    a = memory.allocate(16, "kernel parameters", writable=False, data=bytes(16))
    assert not memory.view(a.address, 16).any()
    with pytest.raises(MemoryFault, match=r"write at .* kernel parameters is read-only"):
        memory.view(a.address, 4, write=True)


def test_free():
    memory = GlobalMemory()
    a = memory.allocate(16, "device allocation 1")
    with pytest.raises(MemoryFault, match="not the start of an allocation"):
        memory.free(a.address + 4)
    memory.free(a.address)
    assert memory.allocations == ()
    with pytest.raises(MemoryFault, match="device allocation 1, which was freed"):
        memory.view(a.address, 4)
    with pytest.raises(MemoryFault):
        memory.free(a.address)


def test_ranges_table():
    memory = GlobalMemory()
    assert memory.ranges.shape == (0, 3)
    made = [memory.allocate(n, str(n), writable=n != 5) for n in (7, 5, 300)]
    memory.allocate(0, "empty")
    table = memory.ranges
    assert table.dtype == np.uint64
    assert table.flags.c_contiguous
    assert table.tolist() == [
        [a.address, a.end, int(a.writable)] for a in sorted(made, key=lambda a: a.address)
    ]
    version = memory.version
    memory.free(made[0].address)
    assert memory.version > version
    assert len(memory.ranges) == 2


def test_bad_sizes():
    memory = GlobalMemory()
    with pytest.raises(ValueError, match="-1 bytes"):
        memory.allocate(-1, "x")
    with pytest.raises(ValueError, match="3 bytes of data"):
        memory.allocate(2, "x", data=b"abc")


@pytest.mark.parametrize("side", [0, 1])
def test_guard_zones(side):
    memory = GlobalMemory()
    a = memory.allocate(100, "argument `q`", offset=16)
    memory.check_guards()
    guard = a._guards[side]
    assert len(guard) >= GUARD_BYTES
    assert (guard == GUARD_BYTE).all()
    guard[-1 if side == 0 else 0] = 0
    with pytest.raises(MemoryFault, match=f"guard zone {['before', 'after'][side]} argument `q`"):
        memory.check_guards()


def test_staging_copies_in_and_back():
    x = torch.arange(12.0).reshape(3, 4)
    memory, at = stage(x=x)
    view = read(memory, at["x"], 12)
    assert view.tolist() == list(range(12))
    view[:] += 100
    assert x.flatten().tolist() == list(range(12)), "nothing reaches the caller before copy_back"
    memory.copy_back()
    assert x.flatten().tolist() == list(range(100, 112))


def test_a_file_mapped_for_reading(tmp_path):
    """Its memory may not be written, not even with the bytes that are there."""
    np.arange(4, dtype=np.float32).tofile(tmp_path / "x")
    memory = GlobalMemory()
    x = np.memmap(tmp_path / "x", np.float32, "r")
    memory.stage([host_tensor(x, "x").region("`x`")])
    memory.copy_back()
    read(memory, memory.device_address(x.ctypes.data), 4)[:] = 5
    with pytest.raises(HostError, match="argument `x`: the array is read-only, and a kernel wrote to it"):
        memory.copy_back()
    assert x.tolist() == [0, 1, 2, 3]


def test_views_that_overlap_share_an_allocation():
    qkv = torch.arange(2 * 6 * 4.0).reshape(2, 6, 4)
    q, k = qkv[:, 0:3], qkv[:, 3:6]
    memory, at = stage(q=q, k=k)
    assert [a.name for a in memory.allocations] == ["arguments `q`, `k`"]
    assert at["k"] - at["q"] == 3 * 4 * 4
    read(memory, at["k"], 1)[0] = -1
    memory.copy_back()
    assert k[0, 0, 0] == -1


def test_views_side_by_side_do_not_share():
    both = torch.arange(16.0)
    memory, at = stage(a=both[:8], b=both[8:])
    assert sorted(a.name for a in memory.allocations) == ["argument `a`", "argument `b`"]
    assert read(memory, at["b"], 8).tolist() == list(range(8, 16))
    with pytest.raises(MemoryFault, match="past the end of argument `a`"):
        memory.view(at["a"], 36)


def test_same_tensor_twice():
    x = torch.arange(4.0)
    memory, at = stage(x=x, y=x)
    assert at["x"] == at["y"]
    assert len(memory.allocations) == 1


def test_strided_view_spans_first_to_last_element():
    x = torch.arange(100.0).reshape(10, 10)
    view = x[2:5, 3:6]
    memory, at = stage(v=view)
    (a,) = memory.allocations
    assert a.nbytes == (2 * 10 + 2 + 1) * 4
    assert read(memory, at["v"] + 10 * 4, 3).tolist() == view[1].tolist()
    read(memory, at["v"], 23)[:] = 0
    memory.copy_back()
    assert x[2, 2] == 22
    assert x[4, 6] == 46
    assert not view.any()


def test_offset_in_storage_is_kept():
    storage = torch.zeros(1000)
    for start in (0, 1, 4, 63, 64, 100):
        _, at = stage(x=storage[start:])
        assert at["x"] % DEVICE_ALIGNMENT == start * 4 % DEVICE_ALIGNMENT


def test_host_address_tells_offset_where_storage_is_unknown():
    memory = GlobalMemory()
    x = np.zeros(256, np.uint8)
    start = x.ctypes.data + (-x.ctypes.data % 64) + 4
    memory.stage([HostRegion(start, start + 16, "`x`")])
    assert memory.device_address(start) % DEVICE_ALIGNMENT == 4


def test_broadcast_and_empty_tensors():
    row = torch.arange(4.0)
    empty = torch.empty(0, 4)
    memory, at = stage(b=row.expand(1000, 4), e=empty)
    assert {a.name: a.nbytes for a in memory.allocations} == {"argument `b`": 16, "argument `e`": 0}
    assert read(memory, at["b"], 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(MemoryFault):
        memory.view(memory._staged[0].allocation.address, 1)
    memory.copy_back()


def test_device_address_of_foreign_and_end_addresses():
    x = torch.zeros(8)
    memory, at = stage(x=x)
    assert memory.device_address(x.data_ptr() + 32) == at["x"] + 32
    assert memory.device_address(x.data_ptr() + 33) is None
    assert memory.device_address(0) is None


def test_pointers_kept_in_memory_are_translated():
    a, b = torch.arange(4.0), torch.arange(8.0)
    pointers = torch.tensor([a.data_ptr(), b.data_ptr() + 8, 12345, 0], dtype=torch.int64)
    before = pointers.clone()
    memory, at = stage(a=a, b=b, pointers=pointers)
    assert read(memory, at["pointers"], 4, np.uint64).tolist() == [at["a"], at["b"] + 8, 12345, 0]
    read(memory, at["pointers"], 4, np.uint64)[3] = at["b"]
    memory.copy_back()
    before[3] = b.data_ptr()
    assert pointers.tolist() == before.tolist()
    assert read(memory, at["pointers"], 4, np.uint64)[0] == at["a"], "the device keeps device addresses"


def test_numbers_in_other_dtypes_are_not_pointers():
    a = torch.arange(4.0)
    words = torch.tensor([a.data_ptr()], dtype=torch.int64).view(torch.float64)
    memory, at = stage(a=a, words=words)
    assert read(memory, at["words"], 1, np.uint64)[0] == a.data_ptr()


def test_forked_process_shares_the_memory():
    memory = GlobalMemory()
    a = memory.allocate(16, "x", data=bytes(16))
    pid = os.fork()
    if pid == 0:
        a.array[3] = 42
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert a.array[3] == 42
