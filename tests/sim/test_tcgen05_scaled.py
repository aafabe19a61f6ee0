"""tcgen05.mma with block scales against sums made element by element from the same bytes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers.tcgen05_model import (
    Layout,
    cached_value,
)
from helpers.tcgen05_products import (
    D_COLUMN,
    SMEM_BYTES,
    check,
    descriptor_bits,
    instruction,
    layout_for,
    make_cta,
)

from warpspec.sim.errors import BadDescriptor, TmemFault
from warpspec.sim.tcgen05 import mma, smem_descriptor
from warpspec.sim.tcgen05.mma import Mma

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
    """A row of K is 48 bytes, which go on elsewhere after 128; factors go on in the words after those of all rows."""
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
