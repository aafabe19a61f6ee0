"""tcgen05.ld/st maps, tcgen05.cp and tcgen05.shift against the ISA's figures, one element at a time."""

import numpy as np
import pytest
from helpers.tcgen05_model import Layout, locate

from warpspec.sim.errors import TmemFault, UnsupportedInstruction
from warpspec.sim.tcgen05 import copy, mma, smem_descriptor, transfer
from warpspec.sim.tcgen05.memory import Tmem

REPEATS = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32, "16x32bx2": 128}
SHAPES = [(shape, 1 << i) for shape, most in REPEATS.items() for i in range(most.bit_length())]


def cell(shape, register, thread, split):
    """(lane, word along the row) of a register, from the fragment figures of the ISA."""
    row, in_row = thread // 4, thread % 4
    if shape == "32x32b":
        return thread, register
    if shape == "16x32bx2":
        return thread % 16, register + (split if thread >= 16 else 0)
    if shape == "16x64b":  # T0 T2 hold the two words of row 0; T1 T3 those of row 8
        return row + 8 * (thread % 2), 2 * register + in_row // 2
    if shape == "16x128b":  # T0..T3 hold the four words of row 0; odd registers are rows 8 to 15
        return row + 8 * (register % 2), 4 * (register // 2) + in_row
    # 16x256b: r0 r1 in row t/4, r2 r3 eight rows down
    return row + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * in_row + register % 2


def random_tmem(seed):
    tmem = Tmem()
    tmem.allocate(512)
    tmem.data[:] = np.random.default_rng(seed).integers(0, 1 << 32, (128, 512), dtype=np.uint32)
    return tmem


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape, repeat", SHAPES)
def test_load_and_store(shape, repeat, packed):
    per_repeat = {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    registers = per_repeat * repeat
    step = 2 if packed else 1
    split = min(2 * repeat + 3, 512 - step * repeat) if shape == "16x32bx2" else 0
    tmap = transfer.transfer_map(shape, repeat, packed, split)
    tmem = random_tmem(repeat)
    warp, column = 6, 512 - tmap.columns
    lane_offset = 16 if shape.startswith("16") else 0
    address = (64 + lane_offset) << 16 | column  # warp 6 owns lanes 64 to 95
    lane, at = transfer.place(tmem, address, warp, tmap, "tcgen05.ld")
    assert (lane, at) == (64 + lane_offset, column)
    got = transfer.load(tmem, lane, at, tmap, packed)
    assert got.shape == (registers, 32)
    for register in range(registers):
        for thread in range(32):
            row, word = cell(shape, register, thread, 0)
            if shape == "16x32bx2":
                start = column + register * step + (split if thread >= 16 else 0)
            else:
                start = column + word * step
            value = int(tmem.data[lane + row, start])
            if packed:
                value = value & 0xFFFF | (int(tmem.data[lane + row, start + 1]) & 0xFFFF) << 16
            assert got[register, thread] == value
    values = np.random.default_rng(1).integers(0, 1 << 32, (registers, 32), dtype=np.uint32)
    before = tmem.data.copy()
    transfer.store(tmem, lane, at, tmap, packed, values)
    np.testing.assert_array_equal(transfer.load(tmem, lane, at, tmap, packed), values)
    changed = np.argwhere(tmem.data != before)
    assert changed[:, 0].min() >= lane and changed[:, 0].max() < lane + tmap.lanes
    assert changed[:, 1].min() >= column
    if packed:
        assert tmem.data[lane, column] >> 16 == 0


def test_a_warp_reaches_its_own_lanes_only():
    tmem = random_tmem(0)
    tmap = transfer.transfer_map("32x32b", 4)
    for warp in range(8):
        own = warp % 4 * 32
        assert transfer.place(tmem, own << 16, warp, tmap, "ld")[0] == own
        assert transfer.place(tmem, 0, warp, tmap, "ld")[0] == own, "lane 0 means the warp's first"
        for other in {32, 64, 96} - {own}:
            with pytest.raises(TmemFault, match=f"lanes {own} to {own + 31} only"):
                transfer.place(tmem, other << 16, warp, tmap, "ld")
    half = transfer.transfer_map("16x256b", 1)
    assert transfer.place(tmem, 48 << 16, 1, half, "ld")[0] == 48
    with pytest.raises(TmemFault, match="multiple of 16"):
        transfer.place(tmem, 40 << 16, 1, half, "ld")
    with pytest.raises(TmemFault, match="only"):
        transfer.place(tmem, 56 << 16, 1, half, "ld")


def test_columns_must_be_allocated():
    tmem = Tmem()
    tmem.allocate(64)
    transfer.place(tmem, 60, 0, transfer.transfer_map("32x32b", 4), "ld")
    for shape, repeat in (("32x32b", 8), ("16x256b", 1)):
        with pytest.raises(TmemFault, match="columns 60 to 67"):
            transfer.place(tmem, 60, 0, transfer.transfer_map(shape, repeat), "ld")
    gap = transfer.transfer_map("16x32bx2", 4, False, 60)
    transfer.place(tmem, 0, 0, gap, "ld")
    with pytest.raises(TmemFault):
        transfer.place(tmem, 4, 0, gap, "ld")
    with pytest.raises(TmemFault, match="there are 512"):
        transfer.place(tmem, 600, 0, transfer.transfer_map("32x32b", 1), "ld")


@pytest.mark.parametrize("shape, repeat", [("16x256b", 64), ("16x128b", 128), ("32x32b", 256), ("8x8b", 1)])
def test_forms_the_isa_does_not_have(shape, repeat):
    with pytest.raises(UnsupportedInstruction):
        transfer.transfer_map(shape, repeat)


# ---- tcgen05.cp --------------------------------------------------------------------------------------------

LANES_OF_ROW = {
    ("128x256b", ""): lambda r: [r],
    ("128x128b", ""): lambda r: [r],
    ("4x256b", ""): lambda r: [32 * r],
    ("64x128b", "warpx2::02_13"): lambda r: [r, r + 64],
    ("64x128b", "warpx2::01_23"): lambda r: [r % 32 + 64 * (r // 32), r % 32 + 64 * (r // 32) + 32],
    ("32x128b", "warpx4"): lambda r: [r, r + 32, r + 64, r + 96],
}


@pytest.mark.parametrize("source_format", ["", "b4x16_p64", "b6x16_p32"])
@pytest.mark.parametrize("mode", [0, 2, 4, 6])
@pytest.mark.parametrize("shape", LANES_OF_ROW)
def test_copy(shape, mode, source_format):
    rng = np.random.default_rng(mode)
    smem = rng.integers(0, 256, 64 * 1024, dtype=np.uint8)
    tmem = random_tmem(2)
    rows, row_bytes = (int(x) for x in shape[0].removesuffix("b").split("x"))
    row_bytes //= 8
    layout = Layout(4096 + (16 if mode == 0 else 0), 2064, {0: 144, 2: 1024, 4: 512, 6: 256}[mode], mode)
    bits = smem_descriptor.encode(layout.start, layout.lbo, layout.sbo, mode)
    lane, column = (31, 100) if shape[0] == "4x256b" else (0, 100)
    before = tmem.data.copy()
    form = copy.copy_shape(*shape)
    assert copy.copy(smem, tmem, bits, lane << 16 | column, form, source_format) == rows * row_bytes
    expected = before.view(np.uint8).reshape(128, 2048)
    for row in range(rows):
        for i in range(row_bytes):
            if source_format:  # element i of the row, in the middle of its byte
                width = 4 if source_format.startswith("b4") else 6
                first, _, _ = locate(layout, "e4m3", False, row, i // 16 * 16)
                packed = int.from_bytes(smem[first : first + 16].tobytes(), "little")
                value = (packed >> width * (i % 16) & ((1 << width) - 1)) << (2 if width == 4 else 1)
            else:
                value = smem[locate(layout, "e4m3", False, row, i)[0]]
            for target in LANES_OF_ROW[shape](row):
                expected[lane + target, 4 * column + i] = value
    np.testing.assert_array_equal(tmem.data.view(np.uint8).reshape(128, 2048), expected)


def test_copy_faults():
    smem = np.zeros(64 * 1024, np.uint8)
    tmem = Tmem()
    tmem.allocate(32)
    bits = smem_descriptor.encode(1024, 16, 128, 0)
    with pytest.raises(TmemFault, match="columns 30 to 33"):
        copy.copy(smem, tmem, bits, 30, copy.copy_shape("32x128b", "warpx4"))
    with pytest.raises(TmemFault, match="beyond lane 127"):
        copy.copy(smem, tmem, bits, 16 << 16, copy.copy_shape("32x128b", "warpx4"))
    with pytest.raises(UnsupportedInstruction):
        copy.copy_shape("32x128b", "")


def test_shift_then_4x256b_copy_moves_a_window_down():
    """A shift leaves lane 31 of each warp's lanes; 4x256b refills it: the way convolutions use them."""
    tmem = random_tmem(3)
    before = tmem.data.copy()
    for lane in range(0, 128, 32):
        mma.shift_rows_down(tmem, lane, 32, 40)
    for lane in range(128):
        source = lane if lane % 32 == 31 else lane + 1
        assert (tmem.data[lane, 40:48] == before[source, 40:48]).all()
    outside = np.r_[0:40, 48:512]
    assert (tmem.data[:, outside] == before[:, outside]).all()
    smem = np.random.default_rng(4).integers(0, 256, 8192, dtype=np.uint8)
    bits = smem_descriptor.encode(1024, 64, 256, 0)
    copy.copy(smem, tmem, bits, 31 << 16 | 40, copy.copy_shape("4x256b", ""))
    for i in range(4):
        row = np.concatenate([smem[1024 + 16 * i :][:16], smem[1024 + 64 + 16 * i :][:16]])
        assert (tmem.data[31 + 32 * i, 40:48] == row.view(np.uint32)).all()
