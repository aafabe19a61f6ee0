"""tcgen05.mma against sums made element by element from the same bytes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers.tcgen05_model import (
    BITS,
    Layout,
    ModelCta,
    accumulator_cells,
    cached_value,
    read_accumulator,
    smem_matrix,
    tmem_a_matrix,
)

from warpspec.sim.errors import BadDescriptor, MemoryFault, TmemFault, UnsupportedInstruction
from warpspec.sim.tcgen05 import instruction_descriptor, mma, smem_descriptor
from warpspec.sim.tcgen05.mma import Mma, MmaBatch

SMEM_BYTES = 96 * 1024
D_COLUMN = 32
FORMAT_CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
FORMAT_CODES |= {"u8": 0, "s8": 1}


def random_bytes(rng, size, fmt):
    """Bytes whose elements are finite and of moderate size in `fmt`."""
    if fmt in ("f16", "bf16", "tf32"):
        values = rng.normal(size=size * 8 // BITS[fmt]).astype(np.float32)
        bits = values.view(np.uint32)
        if fmt == "f16":
            return values.astype(np.float16).view(np.uint8)
        return bits.view(np.uint8) if fmt == "tf32" else (bits >> 16).astype(np.uint16).view(np.uint8)
    data = rng.integers(0, 256, size, dtype=np.uint8)
    if fmt == "e4m3":
        data[data & 0x7F == 0x7F] = 0
    if fmt == "e5m2":  # keep exponents small, so that float32 sums are nearly exact
        data = data & 0xCF
    return data


def make_cta(rng, a_format, b_format, columns=512):
    cta = ModelCta(np.zeros(SMEM_BYTES, np.uint8))
    cta.smem[: SMEM_BYTES // 2] = random_bytes(rng, SMEM_BYTES // 2, a_format)
    cta.smem[SMEM_BYTES // 2 :] = random_bytes(rng, SMEM_BYTES // 2, b_format)
    assert cta.tmem.allocate(columns) == 0
    cta.tmem.data[:] = rng.normal(size=(128, 512)).astype(np.float32).view(np.uint32)
    return cta


def layout_for(rng, base, mode, mn_major):
    """A descriptor layout inside half of shared memory, with strides that keep atoms apart."""
    if mode == 0:
        start = base + 16 * int(rng.integers(0, 64))
        return Layout(start, 2176, 128 * int(rng.integers(1, 4)), mode, mn_major)
    start = base + 1024 * int(rng.integers(0, 4))
    if not mn_major:
        start += 32 * int(rng.integers(0, {2: 4, 4: 2, 6: 1}[mode]))
    sbo = {1: 512, 2: 1024, 4: 512, 6: 256}[mode]
    return Layout(start, 2 * sbo if mn_major else 16, sbo, mode, mn_major)


def descriptor_bits(layout):
    if layout.next is not None:
        return smem_descriptor.encode(layout.start, layout.next, layout.sbo, layout.mode, absolute=True)
    return smem_descriptor.encode(layout.start, layout.lbo, layout.sbo, layout.mode)


def instruction(
    kind,
    m,
    n,
    a,
    b,
    d=1,
    a_mn=False,
    b_mn=False,
    negate_a=False,
    negate_b=False,
    group=1,
    ws=False,
    extra=0,
    sparse=False,
):
    codes = {"e2m1": 1} if kind in ("mxf4", "mxf4nvf4") else FORMAT_CODES
    bits = d << 4 | codes[a] << 7 | codes[b] << 10 | negate_a << 13 | negate_b << 14 | a_mn << 15 | b_mn << 16
    bits |= n >> 3 << 17 | m >> 4 << 24 | sparse << 2 | extra
    return instruction_descriptor.decode(bits, kind, group, ws, sparse)


def check(ctas, one, a_layout, b_layout, a=None, scale=None):
    """Run one MMA; compare every element of D, and that nothing else in tensor memory changed."""
    d = one.descriptor
    packed = d.kind in ("mxf4", "mxf4nvf4")
    group = one.cta_group
    b = np.concatenate(
        [smem_matrix(cta.smem, b_layout, d.b_format, d.n // group, d.k, packed) for cta in ctas], axis=0
    )
    expected, before, cells = [], [], []
    for rank, cta in enumerate(ctas):
        rows = d.m // group
        own_a = a[rank] if a is not None else smem_matrix(cta.smem, a_layout, d.a_format, rows, d.k, packed)
        product = own_a @ b.T if scale is None else scale(rank, own_a, b)
        if d.negate_a != d.negate_b:
            product = -product
        lane = one.d >> 16
        where = accumulator_cells(d.m, d.n, group, rank, one.weight_stationary, lane)
        old = read_accumulator(cta.tmem, D_COLUMN, where, (rows, d.n), rank * rows)
        expected.append(product + (old * 2.0**-one.scale_input_d if one.enable_input_d else 0))
        before.append(cta.tmem.data.copy())
        cells.append(where)
    mma.run([one], ctas)
    for rank, cta in enumerate(ctas):
        got = read_accumulator(cta.tmem, D_COLUMN, cells[rank], expected[rank].shape, rank * (d.m // group))
        bound = 1e-6 * (np.abs(expected[rank]).max() + 1) * d.k
        np.testing.assert_allclose(got, expected[rank], rtol=0, atol=bound)
        untouched = np.ones((128, 512), bool)
        for lane, offset in cells[rank].values():
            untouched[lane, D_COLUMN + offset] = False
        assert (cta.tmem.data[untouched] == before[rank][untouched]).all()


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
    batches = [MmaBatch(Mma(d, 1, 0, bits, bits, enable_input_d=False))]
    for _ in range(15):
        if not batches[-1].append(one := Mma(d, 1, 0, bits, bits)):
            batches.append(MmaBatch(one))
    assert len(batches) < 16
    for batch in batches:
        batch.execute([cta])
    assert (cta.tmem.data[:, :32] == 16 * 32 * 255**2).all()


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
    assert not Mma(d, 1, 0, bits, bits).continues(Mma(d, 1, 0, bits, bits))


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
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-4)


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


# ---- block scaling -----------------------------------------------------------------------------------------

SCALED = [
    ("mxf8f6f4", "e4m3", "e2m1", "ue8m0", 1),
    ("mxf8f6f4", "e3m2", "e5m2", "ue8m0", 1),
    ("mxf4", "e2m1", "e2m1", "ue8m0", 2),
    ("mxf4nvf4", "e2m1", "e2m1", "ue8m0", 2),
    ("mxf4nvf4", "e2m1", "e2m1", "ue4m3", 4),
    ("mxf4nvf4", "e2m1", "e2m1", "ue8m0", 4),
]
SFA_COLUMN, SFB_COLUMN = 320, 340


def scale_code(tmem, column, row, first_byte, lane):
    return int(tmem.data[lane, column + row // 32]) >> 8 * first_byte & 0xFF


SCALED_SHAPES = [(128, 40, 1), (128, 256, 1), (256, 64, 2), (128, 128, 2), (128, 48, 2)]


@pytest.mark.parametrize("m, n, group", SCALED_SHAPES)
@pytest.mark.parametrize("kind, a, b, scale_format, per_row", SCALED)
@pytest.mark.parametrize("duplicated", [True, False])
def test_block_scaling(kind, a, b, scale_format, per_row, m, n, group, duplicated):
    """With `duplicated` off the four copies of the scales differ: each 32 lanes must use their own."""
    rng = np.random.default_rng([m, n, group, per_row])
    ctas = [make_cta(rng, a, b) for _ in range(group)]
    low, high = (120, 134) if scale_format == "ue8m0" else (0x20, 0x50)
    for cta in ctas:
        words = rng.integers(low, high, (128, 16, 4)).astype(np.uint8)
        if duplicated:
            words[32:] = np.tile(words[:32], (3, 1, 1))
            if m == 128 and group == 2:  # each half of the lanes holds its own half of N
                words[64:96, 8:] = words[96:128, 8:] = rng.integers(low, high, (32, 8, 4))
        cta.tmem.data[:, SFA_COLUMN : SFA_COLUMN + 8] = words[:, :8].reshape(128, 32).view(np.uint32)
        cta.tmem.data[:, SFB_COLUMN : SFB_COLUMN + 8] = words[:, 8:].reshape(128, 32).view(np.uint32)
    ids = {1: (3, 1), 2: (2, 0), 4: (0, 0)}[per_row]
    extra = (scale_format == "ue8m0") << 23 | ids[0] << 29
    d = instruction(kind, m, n, a, b, d=ids[1], group=group, extra=extra)
    a_layout, b_layout = layout_for(rng, 1024, 2, False), layout_for(rng, SMEM_BYTES // 2, 4, False)
    one = Mma(d, group, D_COLUMN, descriptor_bits(a_layout), descriptor_bits(b_layout))
    one = replace(one, scales_per_row=per_row, scale_a=SFA_COLUMN, scale_b=3 << 30 | SFB_COLUMN)
    block = d.k // per_row

    def scale(rank, own_a, full_b):
        tmem, rows = ctas[rank].tmem, m // group
        halves = 2 if rows == 64 else 1
        product = np.zeros((rows, n))
        steps = (range(0, rows, 32), range(halves), range(per_row))
        for first, half, s in itertools.product(*steps):
            partition, columns = first // 32 + 2 * half, n // halves

            def values(column, of, byte, partition=partition):
                codes = (scale_code(tmem, column, i, byte, 32 * partition + i % 32) for i in of)
                return np.array([cached_value(code, scale_format) for code in codes])

            sfa = values(SFA_COLUMN, range(first, first + 32), ids[0] + s)
            sfb = values(SFB_COLUMN, range(columns), ids[1] + s)
            own, theirs = slice(first, first + 32), slice(half * columns, (half + 1) * columns)
            span = slice(s * block, (s + 1) * block)
            product[own, theirs] += own_a[own, span] @ full_b[theirs, span].T * np.outer(sfa, sfb)
        return product

    check(ctas, one, a_layout, b_layout, scale=scale)


@pytest.mark.parametrize(
    ("kind", "scale_format", "per_row", "ids", "m", "n", "group", "into_row"),
    [("mxf4", "ue8m0", 3, (1, 3), 128, 40, 1, 48), ("mxf4", "ue8m0", 3, (2, 0), 256, 64, 2, 96),
     ("mxf4nvf4", "ue4m3", 6, (2, 0), 128, 256, 1, 112), ("mxf4nvf4", "ue8m0", 6, (0, 2), 128, 40, 1, 96),
     ("mxf4nvf4", "ue4m3", 6, (0, 0), 256, 64, 2, 0)],
)  # fmt: skip
def test_k_of_96(kind, scale_format, per_row, ids, m, n, group, into_row):
    """A row of K is 48 bytes, which go on elsewhere behind 128; factors go on in the words behind those of all rows."""
    rng = np.random.default_rng([m, n, into_row, *ids])
    ctas = [make_cta(rng, "e2m1", "e2m1") for _ in range(group)]
    low, high = (120, 134) if scale_format == "ue8m0" else (0x20, 0x50)
    for cta in ctas:
        for column, columns in ((SFA_COLUMN, 8), (SFB_COLUMN, 16)):
            codes = np.tile(rng.integers(low, high, (32, 4 * columns)).astype(np.uint8), (4, 1))
            cta.tmem.data[:, column : column + columns] = codes.view(np.uint32)
    d = instruction(
        kind, m, n, "e2m1", "e2m1", d=ids[1], group=group,
        extra=(scale_format == "ue8m0") << 23 | ids[0] << 29 | 1 << 31,
    )  # fmt: skip
    assert d.k == 96
    a_layout = Layout(2048 + into_row, 0, 1024, 2, next=20480)
    b_layout = Layout(SMEM_BYTES // 2 + 32768 + 128 * 8 + into_row, 0, 1024, 2, next=SMEM_BYTES // 2)
    if n == 256:
        b_layout = replace(b_layout, start=SMEM_BYTES // 2 + into_row, next=1024)
    one = Mma(d, group, D_COLUMN, descriptor_bits(a_layout), descriptor_bits(b_layout))
    one = replace(one, scales_per_row=per_row, scale_a=SFA_COLUMN, scale_b=SFB_COLUMN)

    def factors(tmem, column, rows, first):
        def code(row, byte):
            word = tmem.data[row % 32, column + byte // 4 * -(-rows // 32) + row // 32]
            return int(word) >> byte % 4 * 8 & 0xFF

        return np.array(
            [
                [cached_value(code(row, first + s), scale_format) for s in range(per_row)]
                for row in range(rows)
            ]
        )

    def scale(rank, own_a, full_b):
        tmem, block = ctas[rank].tmem, 96 // per_row
        a_factors, b_factors = (
            factors(tmem, SFA_COLUMN, m // group, ids[0]),
            factors(tmem, SFB_COLUMN, n, ids[1]),
        )
        return (own_a * a_factors.repeat(block, axis=1)) @ (full_b * b_factors.repeat(block, axis=1)).T

    check(ctas, one, a_layout, b_layout, scale=scale)


def test_extreme_scales_multiply_without_overflow():
    rng = np.random.default_rng(12)
    cta = make_cta(rng, "e4m3", "e4m3")
    layout = layout_for(rng, 1024, 2, False)
    cta.tmem.data[:, SFA_COLUMN : SFA_COLUMN + 8] = 0x01010101 * 252  # 2**125
    cta.tmem.data[:, SFB_COLUMN : SFB_COLUMN + 8] = 0x01010101 * 2  # 2**-125
    d = instruction("mxf8f6f4", 128, 32, "e4m3", "e4m3", d=0, extra=1 << 23)
    bits = descriptor_bits(layout)
    one = Mma(d, 1, D_COLUMN, bits, bits, scales_per_row=1, scale_a=SFA_COLUMN, scale_b=SFB_COLUMN)
    check([cta], one, layout, layout)


def test_scale_factor_faults():
    cta = make_cta(np.random.default_rng(0), "e2m1", "e2m1", columns=64)
    bits = smem_descriptor.encode(1024, 16, 1024, 2)
    d = instruction("mxf4", 128, 32, "e2m1", "e2m1", d=0, extra=1 << 23)
    good = Mma(d, 1, 0, bits, bits, scales_per_row=2, scale_a=40, scale_b=44)
    mma.run([good], [cta])
    with pytest.raises(TmemFault, match="scale factors of A"):
        mma.run([replace(good, scale_a=62)], [cta])
    with pytest.raises(TmemFault, match="lane 32"):
        mma.run([replace(good, scale_b=32 << 16 | 44)], [cta])
    odd = instruction("mxf4", 128, 32, "e2m1", "e2m1", d=1, extra=1 << 23)
    with pytest.raises(BadDescriptor, match="scale factor id 1 of B"):
        mma.run([replace(good, descriptor=odd)], [cta])


# ---- sparse A ----------------------------------------------------------------------------------------------

METADATA_COLUMN = 330
SPARSE = [  # kind, formats, M, N, CTAs, weight-stationary, selector, B's layout, B N-major, A in tensor memory
    ("f16", "f16", "bf16", 128, 40, 1, False, 0, 2, False, False),
    ("f16", "bf16", "bf16", 128, 256, 1, False, 1, 4, False, True),
    ("f16", "f16", "f16", 256, 48, 2, False, 1, 0, False, False),
    ("f16", "f16", "f16", 64, 64, 1, True, 1, 2, False, True),
    ("f16", "bf16", "bf16", 128, 64, 1, False, 0, 2, True, False),
    ("tf32", "tf32", "tf32", 128, 24, 1, False, 1, 2, False, True),
    ("tf32", "tf32", "tf32", 32, 128, 1, True, 0, 4, False, False),
    ("f8f6f4", "e4m3", "e2m1", 128, 40, 1, False, 0, 2, False, True),
    ("f8f6f4", "e2m3", "e5m2", 256, 64, 2, False, 0, 0, False, False),
    ("i8", "s8", "s8", 128, 32, 1, False, 0, 2, False, True),
    ("mxf8f6f4", "e4m3", "e3m2", 128, 40, 1, False, 0, 2, False, False),
    ("mxf4", "e2m1", "e2m1", 128, 40, 1, False, 0, 4, False, True),
]


def set_metadata(tmem, row, rows, group, places, kind, selector):
    """Write where the group's stored elements of a row stand into all lanes that hold the row."""
    four = {0: 0b0100, 1: 0b1110}[places[0]] if kind == "tf32" else places[0] | places[1] << 2
    for copy in range(0, 128, rows):
        if kind in ("f16", "tf32"):  # 4 groups in a half of K; 8 rows, then 8 others in the high 16 bits
            lane = copy + row // 16 * 16 + group // 4 * 8 + row % 8
            word, bit = METADATA_COLUMN + selector, row // 8 % 2 * 16 + group % 4 * 4
        else:
            lane, word, bit = copy + row, METADATA_COLUMN + group // 8, group % 8 * 4
        kept = int(tmem.data[lane, word]) & ~(15 << bit)
        tmem.data[lane, word] = kept | four << bit


@pytest.mark.parametrize(
    ("kind", "a", "b", "m", "n", "ctas", "ws", "selector", "mode", "b_mn", "a_in_tmem"), SPARSE
)
def test_sparse_a(kind, a, b, m, n, ctas, ws, selector, mode, b_mn, a_in_tmem):
    """A's stored elements are put where random metadata say; a dense product of that must come out."""
    rng = np.random.default_rng([m, n, selector, mode])
    scaled = kind.startswith("mx")
    d_code = 2 if kind == "i8" else 0 if scaled else 1
    d = instruction(
        kind, m, n, a, b, d=d_code, b_mn=b_mn, group=ctas, ws=ws, extra=selector | scaled << 23, sparse=True
    )
    a_layout = layout_for(rng, 1024, 2, False)
    b_layout = layout_for(rng, SMEM_BYTES // 2, mode, b_mn)
    b_layout = replace(b_layout, start=b_layout.start // 128 * 128 if mode else b_layout.start)
    group_ctas = [make_cta(rng, a, b) for _ in range(ctas)]
    rows, packed = m // ctas, kind == "mxf4"
    size, keep = {"tf32": (2, 1), "mxf4": (8, 4)}.get(kind, (4, 2))
    expanded = []
    for cta in group_ctas:
        if scaled:
            cta.tmem.data[:, SFA_COLUMN:METADATA_COLUMN] = 0x7F7F7F7F  # all scale factors are 1
        if a_in_tmem:
            words = random_bytes(rng, rows * 32, a).view(np.uint32).reshape(rows, 8)
            cta.tmem.data[:, 400:408] = np.tile(words, (128 // rows, 1))
            stored = tmem_a_matrix(cta.tmem, a, 400, range(rows), d.k // 2, packed)
        else:
            stored = smem_matrix(cta.smem, a_layout, a, rows, d.k // 2, packed)
        full = np.zeros((rows, d.k))
        for row, group in itertools.product(range(rows), range(d.k // size)):
            places = rng.permutation(2 if size == 2 else 4)[: 1 if size == 2 else 2]
            set_metadata(cta.tmem, row, rows, group, [int(p) for p in places], kind, selector)
            columns = [2 * p + i for p in places for i in range(2)] if packed else places
            full[row, group * size + np.array(columns)] = stored[row, group * keep : (group + 1) * keep]
        expanded.append(full)
    one = Mma(d, ctas, D_COLUMN, descriptor_bits(a_layout), descriptor_bits(b_layout), weight_stationary=ws)
    one = replace(one, sparsity=METADATA_COLUMN, enable_input_d=kind != "i8")
    if a_in_tmem:
        one = replace(one, a=400, a_in_tmem=True)
    if scaled:
        one = replace(one, scales_per_row=2 if packed else 1, scale_a=SFA_COLUMN, scale_b=SFA_COLUMN + 4)
    if kind != "i8":
        check(group_ctas, one, a_layout, b_layout, expanded)
        return
    mma.run([one], group_ctas)
    got = group_ctas[0].tmem.data[:, D_COLUMN : D_COLUMN + n].view(np.int32)
    assert (got == expanded[0] @ smem_matrix(group_ctas[0].smem, b_layout, b, n, d.k).T).all()


def test_sparse_misuse_is_named():
    cta = make_cta(np.random.default_rng(0), "f16", "f16")
    bits = descriptor_bits(layout_for(np.random.default_rng(0), 1024, 2, False))
    d = instruction("f16", 128, 32, "f16", "f16", sparse=True)
    with pytest.raises(TmemFault, match="column 331: they start at lane 0 and an even column"):
        mma.run([Mma(d, 1, D_COLUMN, bits, bits, sparsity=331)], [cta])
    cta.tmem.data[:, 330] = 0x44445444
    with pytest.raises(BadDescriptor, match="0b0101 of row 0"):
        mma.run([Mma(d, 1, D_COLUMN, bits, bits, sparsity=330)], [cta])
    with pytest.raises(BadDescriptor, match="64 bytes of K do not fit into an atom with 32B"):
        mma.run([Mma(d, 1, D_COLUMN, bits, smem_descriptor.encode(1024, 16, 256, 6), sparsity=330)], [cta])
    with pytest.raises(UnsupportedInstruction, match="64 rows a CTA"):
        instruction("f16", 64, 32, "f16", "f16", sparse=True)
    with pytest.raises(BadDescriptor, match="sparsity selector 1"):
        instruction("f8f6f4", 128, 32, "e4m3", "e4m3", extra=1, sparse=True)
