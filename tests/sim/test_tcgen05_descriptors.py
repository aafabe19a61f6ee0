"""Shared-memory and instruction descriptors against the element-by-element model and the ISA's tables."""

import numpy as np
import pytest
from helpers.tcgen05_model import Layout, locate

from warpspec.sim.errors import BadDescriptor, MemoryFault, UnsupportedInstruction
from warpspec.sim.tcgen05 import instruction_descriptor, smem_descriptor
from warpspec.sim.tcgen05.instruction_descriptor import decode as decode_instruction

MODES = (0, 1, 2, 4, 6)


def test_fields_are_where_the_isa_puts_them():
    bits = 0x1230 >> 4 | (0x80 >> 4) << 16 | (0x400 >> 4) << 32 | 1 << 46 | 5 << 49 | 2 << 61
    d = smem_descriptor.decode(bits)
    assert (d.start, d.leading_offset, d.stride_offset, d.base_offset) == (0x1230, 0x80, 0x400, 5)
    assert d.swizzle.name == "128B"
    assert smem_descriptor.encode(0x1230, 0x80, 0x400, 2, 5) == bits


@pytest.mark.parametrize("change", [1 << 47, 3 << 61, 5 << 61, 7 << 61, 1 << 52, 1 << 53, 1 << 60])
def test_reserved_encodings_are_refused(change):
    good = smem_descriptor.encode(0x400, 16, 1024, 0)
    smem_descriptor.decode(good)
    with pytest.raises(BadDescriptor):
        smem_descriptor.decode(good ^ change)


def test_128b_k_major_matches_the_isa_figure():
    """Cell c of row r stands at cell c ^ r of line r (figure "K major 128B swizzling")."""
    bits = smem_descriptor.encode(0x800, 16, 1024, 2)
    index = smem_descriptor.k_major_chunks(bits, 16, 8)
    for row in range(16):
        for chunk in range(8):
            assert index[row, chunk] == 0x80 + row // 8 * 64 + row % 8 * 8 + (chunk ^ row % 8)


def random_layout(rng, mode, mn_major):
    unit = 16 if mode in (0,) else 1024
    start = 1024 * int(rng.integers(1, 20))
    if mode == 0:
        start += 16 * int(rng.integers(0, 64))
    elif not mn_major and mode != 1:
        start += 16 * int(rng.integers(0, {2: 8, 4: 4, 6: 2}[mode]))  # K advances inside the atom
    return Layout(start, unit * int(rng.integers(1, 9)), unit * int(rng.integers(1, 9)), mode, mn_major)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", [0, 2, 4, 6])
def test_k_major_chunks_equal_the_model(mode, seed):
    rng = np.random.default_rng([seed, mode])
    layout = random_layout(rng, mode, False)
    bits = smem_descriptor.encode(layout.start, layout.lbo, layout.sbo, mode)
    index = smem_descriptor.k_major_chunks(bits, 40, 2)
    for row in range(40):
        for k in range(0, 32, 5):
            address, _, _ = locate(layout, "e4m3", False, row, k)
            assert index[row, k // 16] * 16 + k % 16 == address


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("mode", MODES)
def test_mn_major_chunks_equal_the_model(mode, seed):
    rng = np.random.default_rng([seed, mode, 1])
    fmt, k_elements, per_chunk = ("tf32", 8, 4) if mode == 1 else ("bf16", 16, 8)
    layout = random_layout(rng, mode, True)
    bits = smem_descriptor.encode(layout.start, layout.lbo, layout.sbo, mode)
    index = smem_descriptor.mn_major_chunks(bits, k_elements, 128 // per_chunk)
    for mn in range(0, 128, 3):
        for k in range(k_elements):
            address, _, _ = locate(layout, fmt, False, mn, k)
            assert index[k, mn // per_chunk] * 16 + mn % per_chunk * (16 // per_chunk) == address


def test_base_offset_moves_the_pattern():
    """A pattern that starts 3 lines after a 1024-byte boundary, with base offset 3, begins with row 0's
    order."""
    shifted = smem_descriptor.encode(0x800 + 3 * 128, 16, 1024, 2, base_offset=3)
    plain = smem_descriptor.encode(0x800, 16, 1024, 2)
    difference = smem_descriptor.k_major_chunks(shifted, 8, 8) - smem_descriptor.k_major_chunks(plain, 8, 8)
    assert (difference == 3 * 8).all()


def test_reading_beyond_shared_memory_is_a_fault():
    smem = np.zeros(8192, np.uint8)
    inside = smem_descriptor.k_major_chunks(smem_descriptor.encode(8192 - 1024, 16, 1024, 2), 8, 2)
    assert smem_descriptor.gather(smem, inside).shape == (8, 2)
    outside = smem_descriptor.k_major_chunks(smem_descriptor.encode(8192 - 1024, 16, 1024, 2), 16, 2)
    with pytest.raises(MemoryFault, match="8192 bytes"):
        smem_descriptor.gather(smem, outside)


def test_k_major_with_32b_atomicity_is_refused():
    with pytest.raises(BadDescriptor, match="32B atomicity"):
        smem_descriptor.k_major_chunks(smem_descriptor.encode(0x400, 16, 1024, 1), 8, 2)


def idesc(m, n, a, b, d=1, **bits):
    value = d << 4 | a << 7 | b << 10 | n >> 3 << 17 | m >> 4 << 24
    for position in bits.values():
        value |= position
    return value


def test_instruction_descriptor_fields():
    d = decode_instruction(idesc(128, 256, 1, 1, negate_a=1 << 13, b_major=1 << 16), "f16")
    assert (d.m, d.n, d.k, d.a_format, d.b_format, d.d_format) == (128, 256, 16, "bf16", "bf16", "f32")
    assert (d.negate_a, d.negate_b, d.a_mn_major, d.b_mn_major) == (True, False, False, True)
    assert decode_instruction(idesc(64, 8, 0, 1, d=0), "f16").d_format == "f16"
    d = decode_instruction(idesc(128, 64, 3, 5), "f8f6f4")
    assert (d.k, d.a_format, d.b_format) == (32, "e2m3", "e2m1")
    d = decode_instruction(idesc(128, 32, 0, 1, d=2, saturate=1 << 3), "i8")
    assert (d.a_format, d.b_format, d.d_format, d.saturate) == ("u8", "s8", "s32", True)


def test_block_scaled_descriptor_fields():
    bits = 2 << 4 | 1 << 7 | 1 << 10 | 256 >> 3 << 17 | 1 << 23 | 256 >> 4 << 24 | 1 << 29
    d = decode_instruction(bits, "mxf4", 2)
    assert (d.m, d.n, d.k, d.scale_format, d.scale_a_id, d.scale_b_id) == (256, 256, 64, "ue8m0", 1, 2)
    assert decode_instruction(bits & ~(1 << 23), "mxf4nvf4", 2).scale_format == "ue4m3"
    assert decode_instruction(bits | 1 << 12, "mxf4", 2) == d, "bit 12 is about sparsity"


@pytest.mark.parametrize(
    "bits, kind, cta_group",
    [
        (idesc(128, 64, 2, 2), "f16", 1),  # tf32 format in .kind::f16
        (idesc(128, 64, 0, 0, d=2), "f16", 1),  # s32 accumulator
        (idesc(128, 64, 0, 0, reserved=1 << 6), "f16", 1),
        (idesc(128, 64, 0, 0, reserved=1 << 29), "f16", 1),
        (idesc(128, 64, 0, 0, saturate=1 << 3), "f16", 1),
        (idesc(32, 64, 0, 0), "f16", 1),  # M
        (idesc(256, 64, 0, 0), "f16", 1),
        (idesc(64, 64, 0, 0), "f16", 2),
        (idesc(128, 8, 0, 0), "f16", 2),  # N
        (idesc(128, 0, 0, 0), "f16", 1),
        (idesc(128, 264, 0, 0), "f16", 1),
        (idesc(128, 40, 0, 0, d=2), "i8", 1),
        (idesc(128, 64, 0, 0, d=2, negate=1 << 13), "i8", 1),
        (idesc(128, 64, 5, 0, a_major=1 << 15), "f8f6f4", 1),  # 4-bit, M-major
        (idesc(128, 24, 0, 0, b_major=1 << 16), "f8f6f4", 1),  # 8-bit N-major: multiples of 16
        (idesc(64, 64, 1, 1, d=0, scale=1 << 23), "mxf4", 1),
        (idesc(128, 64, 1, 1, d=0), "mxf4", 1),  # ue4m3 scales
    ],
)
def test_bad_instruction_descriptors(bits, kind, cta_group):
    with pytest.raises(BadDescriptor):
        decode_instruction(bits, kind, cta_group)


def test_unsupported_instruction_descriptors():
    sparse = idesc(128, 64, 0, 0) | 1 << 2
    with pytest.raises(BadDescriptor, match="bit 2 says sparse, the instruction is not"):
        decode_instruction(sparse, "f16")
    with pytest.raises(BadDescriptor, match="bit 2 says dense"):
        decode_instruction(sparse ^ 1 << 2, "f16", sparse=True)
    with pytest.raises(UnsupportedInstruction, match="kind::f64"):
        decode_instruction(0, "f64")


def test_every_kind_reads_32_bytes_a_row():
    bits = {"f16": 16, "tf32": 32, "f8f6f4": 8, "i8": 8, "mxf8f6f4": 8, "mxf4": 4, "mxf4nvf4": 4}
    for kind, k in instruction_descriptor.K_ELEMENTS.items():
        assert k * bits[kind] == 256
