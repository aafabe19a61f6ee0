"""Box copies and swizzles against plain Python loops."""

import itertools
import random

import numpy as np
import pytest
from helpers.tma_model import (
    BASE,
    SWIZZLES,
    Memory,
    load_by_loops,
    random_coordinates,
    random_map,
    swizzle_by_words,
    valid_map,
)

from warpspec.sim import tma
from warpspec.sim.errors import BadDescriptor, MemoryFault, UnsupportedInstruction
from warpspec.sim.tma import Interleave, Swizzle, SwizzleAtomicity, TensorMap, copy, layout
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME


@pytest.mark.parametrize("swizzle, atomicity", SWIZZLES)
def test_swizzles_are_the_tables_of_the_isa(swizzle, atomicity):
    addresses = np.arange(4096)
    expected = [swizzle_by_words(a, swizzle, atomicity) for a in addresses]
    assert layout.swizzled(addresses, swizzle, atomicity).tolist() == expected
    assert sorted(expected) == list(range(4096))


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("swizzle, atomicity", SWIZZLES)
def test_loads_equal_the_definition(rank, swizzle, atomicity):
    rng = random.Random(f"{rank} {swizzle} {atomicity}")
    memory = Memory(1 << 20, rank)
    for _ in range(4):
        t = random_map(rng, rank, swizzle, atomicity)
        coords = random_coordinates(rng, t)
        offset = 1024 + 128 * rng.randint(0, 16)
        nbytes = copy.shared_bytes(t)
        smem = np.full(-(-(offset + nbytes) // 1024) * 1024, 0xEE, np.uint8)
        expected = smem.copy()
        load_by_loops(t, coords, memory, expected, offset)
        tma.write_shared(t, smem, offset, tma.load_box(t, coords, memory))
        assert np.array_equal(smem, expected), t.describe()
        assert copy.transfer_bytes(t) == copy.box_bytes(t)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_every_side_out_of_bounds(rank):
    """Each dimension in turn hangs over its lower end, over its upper end, and lies outside altogether."""
    memory = Memory(1 << 20)
    dims, box = (40, 7, 6, 5, 4)[:rank], (16, 3, 3, 3, 3)[:rank]
    strides = tuple(np.cumprod([96, *dims[1:]]).tolist())[: rank - 1]
    for element in ("f16", "u16"):
        t = TensorMap(
            BASE, ELEMENT_BY_NAME[element], dims, strides, box, (1,) * rank, nan_fill=element == "f16"
        )
        inside = (8, *(1,) * (rank - 1))
        for d in range(rank):
            step = 8 if d == 0 else 1  # a box begins on a 16-byte boundary
            edges = (-step, -box[d] + step, -box[d], -1000, dims[d] - step, dims[d], 2**31 - step, -(2**31))
            for start in edges:
                coords = (*inside[:d], start, *inside[d + 1 :])
                got = np.zeros(8192, np.uint8)
                expected = got.copy()
                load_by_loops(t, coords, memory, expected, 1024)
                tma.write_shared(t, got, 1024, tma.load_box(t, coords, memory))
                assert np.array_equal(got, expected), coords


@pytest.mark.parametrize("seed", range(40))
def test_a_store_writes_back_what_lies_inside_and_nothing_else(seed):
    rng = random.Random(seed)
    t = random_map(rng, 1 + seed % 5, *SWIZZLES[seed % len(SWIZZLES)])
    coords = random_coordinates(rng, t, low=0)
    offset = 1024 + 128 * rng.randint(0, 8)
    smem = np.random.default_rng(seed).integers(
        0, 256, -(-(offset + copy.shared_bytes(t)) // 1024) * 1024, dtype=np.uint8
    )
    memory = Memory(1 << 20)
    before = memory.data.copy()
    written = tma.store_box(t, coords, tma.read_shared(t, smem, offset), memory)
    # Loading the box again gives what was stored and fill outside; no other byte of memory changed.
    again = np.zeros_like(smem)
    tma.write_shared(t, again, offset, tma.load_box(t, coords, memory))
    marks = Memory(1 << 20)
    marks.data[:] = 0
    whole = np.full(copy.box_bytes(t), 0xFF, np.uint8)
    tma.store_box(t, coords, whole, marks)
    inside = np.zeros_like(smem)
    tma.write_shared(
        t, inside, offset, np.where(tma.load_box(t, coords, marks) == 0xFF, 0xFF, 0).astype(np.uint8)
    )
    if not t.nan_fill and "tf32" not in t.element.name:  # loads of tf32 round
        assert np.array_equal(again, np.where(inside == 0xFF, smem, 0))
    assert written == np.count_nonzero(marks.data)
    assert np.array_equal(memory.data[marks.data == 0], before[marks.data == 0])


def test_a_store_ends_at_whole_16_bytes_and_a_load_does_not():
    """What an H200 does: a tensor of 9 halves in rows of 64 bytes has 7 more overwritten."""
    memory = Memory(256)
    before = memory.data.copy()
    t = TensorMap(BASE, ELEMENT_BY_NAME["f16"], (9, 4), (64,), (24, 2), (1, 1))
    data = ~tma.load_box(t, (0, 1), memory)
    assert (data.reshape(2, 48)[:, 18:] == 0xFF).all()
    assert tma.store_box(t, (0, 1), data, memory) == 2 * 32
    changed = (memory.data != before).reshape(4, 64)
    assert changed[1:3, :18].all()
    assert not changed[:, 32:].any() and not changed[0].any() and not changed[3].any()
    assert (memory.data.reshape(4, 64)[1:3, 18:32] == 0xFF).all()


def test_a_box_begins_on_a_16_byte_boundary():
    for start in (1, 4, 7, -1, -7):
        with pytest.raises(MemoryFault, match="16-byte boundary"):
            tma.load_box(valid_map(), (start, 0), Memory(1 << 16))


def test_tf32_loads_round_to_nearest_even():
    memory = Memory(64)
    bits = [0x3F801000, 0x3F803000, 0x3F800FFF, 0xBF801001, 0x7F800000, 0xFF800001, 0x7FFFF000, 0x00001800]
    memory.data[:32] = np.array(bits, "<u4").view(np.uint8)
    t = TensorMap(BASE, ELEMENT_BY_NAME["tf32"], (8,), (), (12,), (1,), nan_fill=True)
    expected = [
        0x3F800000,
        0x3F804000,
        0x3F800000,
        0xBF802000,
        0x7F800000,
        0x7FFFE000,
        0x7FFFE000,
        0x00002000,
    ]
    assert tma.load_box(t, (0,), memory).view("<u4").tolist() == [*expected, *[0x7FF77FF7] * 4]


def test_store_at_negative_coordinates_is_refused():
    with pytest.raises(BadDescriptor, match="negative coordinates"):
        tma.store_box(valid_map(), (0, -1), np.zeros(1024, np.uint8), Memory(1 << 16))


def test_shared_address_must_be_aligned_and_inside():
    smem = np.zeros(4096, np.uint8)
    box = tma.load_box(valid_map(), (0, 0), Memory(1 << 16))
    with pytest.raises(MemoryFault, match="128-byte aligned"):
        tma.write_shared(valid_map(), smem, 1024 + 64, box)
    with pytest.raises(MemoryFault, match="end of shared memory"):
        tma.write_shared(valid_map(), smem, 4096 - 512, box)
    with pytest.raises(MemoryFault, match="end of shared memory"):
        tma.read_shared(valid_map(), smem, 4096 - 512)


def test_a_box_outside_every_allocation_names_the_copy():
    t = valid_map()
    with pytest.raises(MemoryFault, match=r"tensor copy at \(0, 60\) of tensor map f16"):
        tma.load_box(t, (0, 60), Memory(128 * 62))


def test_a_batch_stride_may_lead_to_another_allocation():
    class Two(Memory):
        def view(self, address, nbytes, write=False):
            second = address >= BASE + (1 << 30)
            offset = address - BASE - (1 << 30) * second
            limit = self.data.size // 2
            if not 0 <= offset <= limit - nbytes:
                raise MemoryFault("outside")
            return self.data[offset + limit * second :][:nbytes]

    memory = Two(2048)
    t = TensorMap(BASE, ELEMENT_BY_NAME["u8"], (32, 4, 2), (32, 1 << 30), (32, 4, 2), (1, 1, 1))
    got = tma.load_box(t, (0, 0, 0), memory)
    assert np.array_equal(got, np.concatenate([memory.data[:128], memory.data[1024 : 1024 + 128]]))


@pytest.mark.parametrize("swizzle, atomicity", SWIZZLES)
def test_packed_fp4(swizzle, atomicity):
    memory = Memory(1 << 16)
    width = min((swizzle.span or 64) * 2, 256)
    t = TensorMap(
        BASE,
        ELEMENT_BY_NAME["b4x16"],
        (200, 9),
        (112,),
        (width, 5),
        (1, 1),
        swizzle=swizzle,
        atomicity=atomicity,
    )
    as_bytes = TensorMap(
        BASE,
        ELEMENT_BY_NAME["u8"],
        (100, 9),
        (112,),
        (width // 2, 5),
        (1, 1),
        swizzle=swizzle,
        atomicity=atomicity,
    )
    for coords in ((0, 0), (32, 6), (-32, -2), (64, 3), (192, 0)):
        got, expected = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
        tma.write_shared(t, got, 1024, tma.load_box(t, coords, memory))
        load_by_loops(as_bytes, (coords[0] // 2, coords[1]), memory, expected, 1024)
        assert np.array_equal(got, expected), coords
    with pytest.raises(MemoryFault, match="16-byte boundary"):
        tma.load_box(t, (16, 0), memory)


@pytest.mark.parametrize("name, packed", [("b4x16_p64", 8), ("b6x16_p32", 12)])
def test_padded_sub_byte_types(name, packed):
    element = ELEMENT_BY_NAME[name]
    memory = Memory(1 << 16)
    pitch = 256 * element.bits // 8
    t = TensorMap(BASE, element, (256, 6), (pitch,), (128, 4), (1, 1), swizzle=Swizzle.BYTES_128)
    smem = np.zeros(4096, np.uint8)
    tma.write_shared(t, smem, 1024, tma.load_box(t, (128, 4), memory))
    assert copy.transfer_bytes(t) == 4 * 128 * element.bits // 8
    for row, group in itertools.product(range(4), range(8)):
        at = swizzle_by_words(1024 + 128 * row + 16 * group, Swizzle.BYTES_128, SwizzleAtomicity.BYTES_16)
        start = (4 + row) * pitch + pitch // 2 + packed * group
        expected = memory.data[start : start + packed] if row < 2 else 0
        assert np.array_equal(smem[at : at + packed], np.broadcast_to(expected, packed))
    with pytest.raises(BadDescriptor, match="multiple of 128"):
        tma.load_box(t, (64, 0), memory)


def test_sextets_are_packed_on_stores():
    element = ELEMENT_BY_NAME["b6x16_p32"]
    t = TensorMap(BASE, element, (128, 2), (96,), (128, 2), (1, 1))
    codes = np.random.default_rng(0).integers(0, 256, 256, dtype=np.uint8)
    memory = Memory(1 << 12)
    assert tma.store_box(t, (0, 0), codes, memory) == 192
    stream = int.from_bytes(memory.data[:192].tobytes(), "little")
    assert [stream >> 6 * i & 63 for i in range(256)] == (codes & 63).tolist()
    with pytest.raises(UnsupportedInstruction, match="b4x16_p64"):
        packed = TensorMap(BASE, ELEMENT_BY_NAME["b4x16_p64"], (128, 2), (64,), (128, 2), (1, 1))
        tma.store_box(packed, (0, 0), codes, memory)


def test_gather4_and_scatter4():
    memory = Memory(1 << 16)
    t = TensorMap(BASE, ELEMENT_BY_NAME["bf16"], (96, 20), (256,), (64, 1), (1, 1), swizzle=Swizzle.BYTES_128)
    rows = (7, -1, 19, 0)
    smem = np.zeros(4096, np.uint8)
    tma.write_shared(t, smem, 1024, tma.load_rows(t, 48, rows, memory))
    for i, row in enumerate(rows):
        for k in range(128):
            inside = row >= 0 and 48 + k // 2 < 96
            expected = memory.data[row * 256 + 96 + k] if inside else 0
            assert smem[swizzle_by_words(1024 + 128 * i + k, t.swizzle, t.atomicity)] == expected
    rows = (3, 2, 9, 25)
    taken = tma.read_shared(t, smem, 1024, boxes=4)
    assert tma.store_rows(t, 16, rows, taken, memory) == 3 * 128
    for i, row in enumerate(rows[:3]):
        assert np.array_equal(memory.data[row * 256 + 32 :][:128], taken[128 * i :][:128])
    with pytest.raises(BadDescriptor, match="box of 1"):
        tma.load_rows(valid_map(), 0, rows, memory)
    with pytest.raises(BadDescriptor, match="rank 2"):
        one = TensorMap(BASE, ELEMENT_BY_NAME["u8"], (64,), (), (16,), (1,))
        tma.load_rows(one, 0, rows, memory)


def test_interleaved_layouts_are_unsupported():
    t = TensorMap(
        BASE,
        ELEMENT_BY_NAME["f16"],
        (8, 4, 4),
        (64, 256),
        (8, 4, 4),
        (1, 1, 1),
        interleave=Interleave.BYTES_16,
    )
    with pytest.raises(UnsupportedInstruction, match="interleaved"):
        tma.load_box(t, (0, 0, 0), Memory(1 << 12))
