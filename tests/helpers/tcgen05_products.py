"""One tcgen05.mma in a test: operands, descriptors, and D compared with sums made element by element."""

import numpy as np

from helpers.tcgen05_model import (
    BITS,
    Layout,
    ModelCta,
    accumulator_cells,
    read_accumulator,
    smem_matrix,
)
from warpspec.sim.tcgen05 import instruction_descriptor, mma, smem_descriptor

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
