"""tcgen05.mma against sums made element by element from the same bytes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers.tcgen05_model import (
    ModelCta,
    smem_matrix,
    tmem_a_matrix,
)
from helpers.tcgen05_products import (
    D_COLUMN,
    SMEM_BYTES,
    check,
    descriptor_bits,
    instruction,
    layout_for,
    make_cta,
    random_bytes,
)

from warpspec.sim.errors import BadDescriptor, MemoryFault, TmemFault
from warpspec.sim.tcgen05 import instruction_descriptor, mma, smem_descriptor
from warpspec.sim.tcgen05.mma import Mma, MmaBatch

KIND_FORMATS = [
    ("f16", "f16", "f16"),
    ("f16", "bf16", "bf16"),
    ("f16", "f16", "bf16"),
    ("tf32", "tf32", "tf32"),
    ("f8f6f4", "e4m3", "e5m2"),
    ("f8f6f4", "e5m2", "e2m1"),
    ("f8f6f4", "e2m3", "e3m2"),
    ("f8f6f4", "e2m1", "e4m3"),
]


@pytest.mark.parametrize("mode_a, mode_b", [(2, 2), (4, 6), (6, 0), (0, 4)])
@pytest.mark.parametrize("kind, a, b", KIND_FORMATS)
def test_k_major_formats_and_swizzles(kind, a, b, mode_a, mode_b):
    rng = np.random.default_rng([mode_a, mode_b, len(a), len(b)])
    cta = make_cta(rng, a, b)
    a_layout = layout_for(rng, 1024, mode_a, False)
    b_layout = layout_for(rng, SMEM_BYTES // 2, mode_b, False)
    d = instruction(kind, 128, 40, a, b)
    a_bits, b_bits = descriptor_bits(a_layout), descriptor_bits(b_layout)
    one = Mma(d, 1, D_COLUMN, a_bits, b_bits, enable_input_d=mode_a == 2)
    check([cta], one, a_layout, b_layout)


@pytest.mark.parametrize("a_mn, b_mn", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "fmt, mode", [*itertools.product(("bf16", "e4m3"), (0, 2, 4, 6)), ("tf32", 1)], ids=lambda x: str(x)
)
def test_mn_major(fmt, mode, a_mn, b_mn):
    rng = np.random.default_rng([mode, a_mn, b_mn])
    kind = {"bf16": "f16", "e4m3": "f8f6f4", "tf32": "tf32"}[fmt]
    cta = make_cta(rng, fmt, fmt)
    k_mode = 2 if mode == 1 else mode
    a_layout = layout_for(rng, 1024, mode if a_mn else k_mode, a_mn)
    b_layout = layout_for(rng, SMEM_BYTES // 2, mode if b_mn else k_mode, b_mn)
    if mode and (a_mn or b_mn):  # MN-major atoms: K steps of SBO inside, MN steps of LBO outside
        depth = 4 if mode == 1 else 8
        atom = depth * {1: 128, 2: 128, 4: 64, 6: 32}[mode]
        steps = instruction_descriptor.K_ELEMENTS[kind] // depth
        a_layout = replace(a_layout, lbo=atom * steps) if a_mn else a_layout
        b_layout = replace(b_layout, lbo=atom * steps) if b_mn else b_layout
    d = instruction(kind, 128, 64, fmt, fmt, a_mn=a_mn, b_mn=b_mn, negate_b=True)
    one = Mma(d, 1, D_COLUMN, descriptor_bits(a_layout), descriptor_bits(b_layout))
    check([cta], one, a_layout, b_layout)


@pytest.mark.parametrize("fmt, mode", [("bf16", 1), ("tf32", 0), ("tf32", 2)])
def test_mn_major_pairs_32_bit_operands_with_32_byte_atomicity(fmt, mode):
    cta = make_cta(np.random.default_rng(0), fmt, fmt)
    d = instruction("tf32" if fmt == "tf32" else "f16", 128, 64, fmt, fmt, a_mn=True)
    bits = smem_descriptor.encode(1024, 1024, 1024, mode)
    with pytest.raises(BadDescriptor, match="32B atomicity"):
        mma.run([Mma(d, 1, 0, bits, smem_descriptor.encode(1024, 16, 1024, 2))], [cta])


@pytest.mark.parametrize(
    "m, n, group, ws, lane",
    [
        (128, 8, 1, False, 0),
        (128, 256, 1, False, 0),
        (64, 24, 1, False, 0),
        (64, 24, 1, False, 16),
        (256, 48, 2, False, 0),
        (128, 48, 2, False, 0),
        (32, 64, 1, True, 0),
        (64, 64, 1, True, 0),
        (128, 64, 1, True, 0),
    ],
)
@pytest.mark.parametrize("a_in_tmem", [False, True])
def test_shapes_and_accumulator_layouts(m, n, group, ws, lane, a_in_tmem):
    rng = np.random.default_rng([m, n, group, lane])
    ctas = [make_cta(rng, "bf16", "bf16") for _ in range(group)]
    a_layout, b_layout = layout_for(rng, 1024, 2, False), layout_for(rng, SMEM_BYTES // 2, 2, False)
    d = instruction("f16", m, n, "bf16", "bf16", group=group, ws=ws)
    one = Mma(d, group, lane << 16 | D_COLUMN, descriptor_bits(a_layout), descriptor_bits(b_layout))
    one = replace(one, weight_stationary=ws)
    a = None
    if a_in_tmem:
        a, rows = [], m // group
        half_lanes = m == 64 and not ws
        for cta in ctas:
            words = random_bytes(rng, rows * 32, "bf16").view(np.uint32).reshape(rows, 8)
            lanes = [lane + r // 16 * 32 + r % 16 for r in range(64)] if half_lanes else list(range(rows))
            copies = [0] if half_lanes else range(0, 128, rows)
            for copy in copies:  # data paths that split N read A again from their own lanes
                cta.tmem.data[np.array(lanes) + copy, 400:408] = words
            a.append(tmem_a_matrix(cta.tmem, "bf16", 400, lanes, 16))
        one = replace(one, a=lane << 16 | 400, a_in_tmem=True)
    check(ctas, one, a_layout, b_layout, a)


@pytest.mark.parametrize(
    "kind, fmt",
    [
        ("f16", "f16"),
        ("tf32", "tf32"),
        ("f8f6f4", "e4m3"),
        ("f8f6f4", "e2m1"),
        ("f8f6f4", "e3m2"),
        ("f8f6f4", "e2m3"),
    ],
)
def test_a_in_tensor_memory_formats(kind, fmt):
    rng = np.random.default_rng(7)
    cta = make_cta(rng, fmt, fmt)
    b_layout = layout_for(rng, SMEM_BYTES // 2, 2, False)
    cta.tmem.data[:, 300:308] = random_bytes(rng, 128 * 32, fmt).view(np.uint32).reshape(128, 8)
    d = instruction(kind, 128, 32, fmt, fmt, negate_a=True)
    a = [tmem_a_matrix(cta.tmem, fmt, 300, range(128), d.k)]
    check([cta], Mma(d, 1, D_COLUMN, 300, descriptor_bits(b_layout), a_in_tmem=True), None, b_layout, a)


def test_scale_input_d_and_enable():
    rng = np.random.default_rng(3)
    layout = layout_for(rng, 1024, 2, False)
    d = instruction("f16", 128, 64, "bf16", "bf16")
    for enable, scale in ((True, 5), (False, 5), (True, 0)):
        cta = make_cta(rng, "bf16", "bf16")
        bits = descriptor_bits(layout)
        one = Mma(d, 1, D_COLUMN, bits, bits, enable_input_d=enable, scale_input_d=scale)
        check([cta], one, layout, layout)


def test_disabled_lanes_keep_their_words():
    rng = np.random.default_rng(4)
    layout = layout_for(rng, 1024, 2, False)
    bits = descriptor_bits(layout)
    mask = int(rng.integers(0, 1 << 62)) | int(rng.integers(0, 1 << 62)) << 64
    for m in (128, 64):
        cta = make_cta(rng, "bf16", "bf16")
        d = instruction("f16", m, 32, "bf16", "bf16")
        before = cta.tmem.data.copy()
        mma.run([Mma(d, 1, 0, bits, bits, enable_input_d=False)], [cta])
        full = cta.tmem.data.copy()
        cta.tmem.data[:] = before
        mma.run([Mma(d, 1, 0, bits, bits, enable_input_d=False, disabled_lanes=mask)], [cta])
        for lane in range(128):
            expected = before if mask >> lane & 1 else full
            assert (cta.tmem.data[lane] == expected[lane]).all()


def test_disabled_lanes_of_the_second_cta_are_the_high_words():
    rng = np.random.default_rng(5)
    layout = layout_for(rng, 1024, 2, False)
    bits = descriptor_bits(layout)
    ctas = [make_cta(rng, "bf16", "bf16") for _ in range(2)]
    before = [cta.tmem.data.copy() for cta in ctas]
    d = instruction("f16", 256, 32, "bf16", "bf16", group=2)
    mma.run([Mma(d, 2, 0, bits, bits, disabled_lanes=0b1 << 128 | ((1 << 128) - 1))], ctas)
    assert (ctas[0].tmem.data == before[0]).all()
    changed = (ctas[1].tmem.data != before[1]).any(axis=1)
    assert not changed[0] and changed[1:].all()


@pytest.mark.parametrize("signs", [("s8", "s8"), ("u8", "s8"), ("u8", "u8")])
@pytest.mark.parametrize("saturate", [False, True])
def test_integers_are_exact(signs, saturate):
    rng = np.random.default_rng(6)
    cta = make_cta(rng, *signs)
    layout = layout_for(rng, 1024, 2, False)
    b_layout = layout_for(rng, SMEM_BYTES // 2, 4, False)
    start = rng.integers(-(1 << 31), (1 << 31) - 1, (128, 32)).astype(np.int32)
    start[0], start[1] = (1 << 31) - 5, -(1 << 31) + 5
    cta.tmem.data[:, :32] = start.view(np.uint32)
    d = instruction("i8", 128, 32, *signs, d=2, extra=saturate << 3)
    mma.run([Mma(d, 1, 0, descriptor_bits(layout), descriptor_bits(b_layout))], [cta])
    a = smem_matrix(cta.smem, layout, signs[0], 128, 32).astype(np.int64)
    b = smem_matrix(cta.smem, b_layout, signs[1], 32, 32).astype(np.int64)
    total = a @ b.T + start
    wrapped = (total + (1 << 31)) % (1 << 32) - (1 << 31)
    expected = np.clip(total, -(1 << 31), (1 << 31) - 1) if saturate else wrapped
    np.testing.assert_array_equal(cta.tmem.data[:, :32].view(np.int32), expected)


def test_sums_of_integers_stay_exact_in_a_batch():
    cta = make_cta(np.random.default_rng(6), "u8", "u8")
    cta.smem[:] = 255
    bits = descriptor_bits(layout_for(np.random.default_rng(6), 1024, 2, False))
    d = instruction("i8", 128, 32, "u8", "u8", d=2)
    batch = MmaBatch(Mma(d, 1, 0, bits, bits, enable_input_d=False))
    assert all(batch.append(Mma(d, 1, 0, bits, bits)) for _ in range(15))
    batch.execute([cta])
    assert (cta.tmem.data[:, :32] == 16 * 32 * 255**2).all(), "beyond 2**24, where float32 has no odd numbers"


def test_f16_accumulator_rounds_after_each_instruction():
    rng = np.random.default_rng(8)
    cta = make_cta(rng, "f16", "f16")
    layout = layout_for(rng, 1024, 2, False)
    bits = descriptor_bits(layout)
    d = instruction("f16", 128, 32, "f16", "f16", d=0)
    a, b = (smem_matrix(cta.smem, layout, "f16", rows, 16) for rows in (128, 32))
    product = (a @ b.T).astype(np.float32)
    mma.run([Mma(d, 1, 0, bits, bits, enable_input_d=False)], [cta])
    first = cta.tmem.data[:, :32].astype(np.uint16).view(np.float16)
    assert (cta.tmem.data[:, :32] >> 16 == 0).all(), "one 16-bit element a word, in its low half"
    np.testing.assert_allclose(first, product.astype(np.float16), rtol=1e-3, atol=1e-6)
    mma.run([Mma(d, 1, 0, bits, bits)], [cta])
    second = cta.tmem.data[:, :32].astype(np.uint16).view(np.float16)
    expected = (first.astype(np.float32) + product).astype(np.float16)
    np.testing.assert_allclose(second, expected, rtol=1e-3, atol=1e-6)
    batch = MmaBatch(Mma(d, 1, 0, bits, bits, enable_input_d=False))
    assert batch.append(Mma(d, 1, 0, bits, bits))
    batch.execute([cta])
    np.testing.assert_array_equal(cta.tmem.data[:, :32].astype(np.uint16).view(np.float16), second)


@pytest.mark.parametrize("a_in_tmem", [False, True])
@pytest.mark.parametrize("b_mn", [False, True])
def test_a_batch_equals_its_instructions_one_by_one(a_in_tmem, b_mn):
    rng = np.random.default_rng(9)
    cta = make_cta(rng, "bf16", "bf16")
    other = ModelCta(cta.smem)
    other.tmem.allocate(512)
    other.tmem.data[:] = cta.tmem.data
    for target in (cta, other):
        target.tmem.data[:, 300:332] &= 0xBFFFBFFF  # moderate bf16 pairs
    d = instruction("f16", 128, 64, "bf16", "bf16", b_mn=b_mn)
    mmas = []
    for step in range(4):
        a = 300 + 8 * step if a_in_tmem else smem_descriptor.encode(1024 + 32 * step, 16, 1024, 2)
        b_start = SMEM_BYTES // 2 + (2048 * step if b_mn else 32 * step)
        b = smem_descriptor.encode(b_start, 8192, 1024, 2)
        mmas.append(Mma(d, 1, D_COLUMN, a, b, a_in_tmem=a_in_tmem, enable_input_d=step > 0))
    batch = MmaBatch(mmas[0])
    assert all(batch.append(one) for one in mmas[1:])
    assert not batch.append(replace(mmas[1], enable_input_d=False)), "a new accumulation starts a new batch"
    assert not batch.append(replace(mmas[1], d=D_COLUMN + 64))
    assert not batch.append(replace(mmas[1], scale_input_d=1))
    assert batch.flops == 4 * 2 * 128 * 64 * 16
    batch.execute([cta])
    for one in mmas:
        mma.run([one], [other])
    got, expected = (t.tmem.data[:, D_COLUMN : D_COLUMN + 64].view(np.float32) for t in (cta, other))
    np.testing.assert_array_equal(got, expected)


def test_nan_poison_reaches_the_accumulator():
    cta = ModelCta(np.full(SMEM_BYTES, 0xFF, np.uint8))
    cta.tmem.allocate(32)
    d = instruction("f16", 128, 32, "bf16", "bf16")
    bits = smem_descriptor.encode(1024, 16, 1024, 2)
    mma.run([Mma(d, 1, 0, bits, bits, enable_input_d=False)], [cta])
    assert np.isnan(cta.tmem.data[:, :32].view(np.float32)).all()


def test_an_accumulator_that_nobody_wrote_is_a_fault():
    cta = ModelCta(np.zeros(SMEM_BYTES, np.uint8))
    cta.tmem.allocate(32)
    bits = smem_descriptor.encode(1024, 16, 1024, 2)
    adds = Mma(instruction("f16", 128, 32, "bf16", "bf16"), 1, 0, bits, bits)
    with pytest.raises(TmemFault, match="adds to columns 0 to 31, which nothing has written"):
        mma.run([adds], [cta])
    mma.run([replace(adds, enable_input_d=False)], [cta])
    mma.run([adds], [cta])


def test_misplaced_operands_are_faults():
    cta = make_cta(np.random.default_rng(0), "bf16", "bf16", columns=64)
    d = instruction("f16", 128, 64, "bf16", "bf16")
    bits = smem_descriptor.encode(1024, 16, 1024, 2)
    with pytest.raises(TmemFault, match="columns 32 to 95"):
        mma.run([Mma(d, 1, 32, bits, bits)], [cta])
    with pytest.raises(TmemFault, match="D at lane 32"):
        mma.run([Mma(d, 1, 32 << 16, bits, bits)], [cta])
    with pytest.raises(TmemFault, match="matrix A"):
        mma.run([Mma(d, 1, 0, 60, bits, a_in_tmem=True)], [cta])
    with pytest.raises(TmemFault, match="A in tensor memory at lane 16"):
        mma.run([Mma(d, 1, 0, 16 << 16, bits, a_in_tmem=True)], [cta])
    with pytest.raises(MemoryFault):
        mma.run([Mma(d, 1, 0, bits, smem_descriptor.encode(SMEM_BYTES - 1024, 16, 1024, 2))], [cta])


def test_ashift_moves_rows_after_the_product():
    rng = np.random.default_rng(11)
    cta = make_cta(rng, "bf16", "bf16")
    cta.tmem.data[:, 300:308] = random_bytes(rng, 128 * 32, "bf16").view(np.uint32).reshape(128, 8)
    held = cta.tmem.data[:, 300:308].copy()
    b_layout = layout_for(rng, SMEM_BYTES // 2, 2, False)
    d = instruction("f16", 128, 32, "bf16", "bf16")
    a = tmem_a_matrix(cta.tmem, "bf16", 300, range(128), 16)
    b_bits = descriptor_bits(b_layout)
    one = Mma(d, 1, D_COLUMN, 300, b_bits, a_in_tmem=True, enable_input_d=False, shift_a=True)
    mma.run([one], [cta])
    expected = a @ smem_matrix(cta.smem, b_layout, "bf16", 32, 16).T
    got = cta.tmem.data[:, D_COLUMN : D_COLUMN + 32].view(np.float32)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    for lane in range(128):
        source = lane if lane % 32 == 31 else lane + 1
        assert (cta.tmem.data[lane, 300:308] == held[source]).all()
    assert not one.continues(one)
