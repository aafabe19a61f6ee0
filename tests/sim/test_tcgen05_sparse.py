"""tcgen05.mma with a sparse A against sums made element by element from the same bytes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers.tcgen05_model import (
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

from warpspec.sim.errors import BadDescriptor, TmemFault, UnsupportedInstruction
from warpspec.sim.tcgen05 import mma, smem_descriptor
from warpspec.sim.tcgen05.mma import Mma

SFA_COLUMN = 320
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
