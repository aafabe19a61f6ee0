"""mma.sync of 4-, 6- and 8-bit floats with and without scale factors (sm_120a), against a model of the ISA's tables."""

import numpy as np
import pytest
from helpers.ptx_launch import launch
from helpers.tcgen05_model import cached_value

from warpspec import sim

# Every thread: its ten words of `words` are A's four registers, B's two, and the two scale registers (and two spare).
KERNEL = """
  mov.u32 %r0, %tid.x; ld.param.u64 %rd1, [words]; ld.param.u64 %rd2, [out];
  mul.wide.u32 %rd3, %r0, 32; add.u64 %rd1, %rd1, %rd3; mul.wide.u32 %rd3, %r0, 16; add.u64 %rd2, %rd2, %rd3;
  ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd1]; ld.global.v4.u32 {{%r5, %r6, %r7, %r8}}, [%rd1+16];
  ld.global.v4.f32 {{%f4, %f5, %f6, %f7}}, [%rd2];
  mov.b16 %h1, {ids[0]}; mov.b16 %h2, {ids[1]}; mov.b16 %h3, {ids[2]}; mov.b16 %h4, {ids[3]};
  {opcode} {{%f0, %f1, %f2, %f3}}, {{%r1, %r2, %r3, %r4}}, {{%r5, %r6}}, {{%f4, %f5, %f6, %f7}}{scales};
  st.global.v4.f32 [%rd2], {{%f0, %f1, %f2, %f3}};
"""
SCALES = ", %r7, {%h1, %h2}, %r8, {%h3, %h4}"
BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6, "e4m3": 8, "e5m2": 8}


def run(opcode, words, c, ids=None):
    out = c.copy()
    body = KERNEL.format(opcode=opcode, ids=ids or (0, 0, 0, 0), scales=SCALES if ids else "")
    launch(body, {"words": words, "out": out}, target="sm_120a")
    return out


def multiplicands(rng, a_type, b_type, packed):
    """(words [32, 8], A [16, K], B [8, K]): random codes, each at its place in the fragments' tables."""
    k, per_word = (64, 8) if packed else (32, 4)
    words = np.zeros((32, 8), np.uint32)
    matrices = []
    for fmt, rows, first in ((a_type, 16, 0), (b_type, 8, 4)):
        codes = rng.integers(0, 1 << BITS[fmt], (rows, k))
        if fmt in ("e4m3", "e5m2"):
            codes &= 0xB7  # moderate, no NaN
        for row in range(rows):
            for column in range(k):
                thread = 4 * (row % 8) + column % (k // 2) // per_word
                half = column // (k // 2)
                register = first + (row // 8 + 2 * half if rows == 16 else half)
                shift = 32 // per_word * (column % per_word) + (2 if fmt == "e2m1" and not packed else 0)
                words[thread, register] |= np.uint32(int(codes[row, column]) << shift)
        matrices.append(np.array([[cached_value(int(code), fmt) for code in line] for line in codes]))
    return words, *matrices


def accumulators(rng):
    """(what threads hold [32, 4], C [16, 8])."""
    c = rng.normal(size=(16, 8)).astype(np.float32)
    return fragment_of(c), c


def fragment_of(matrix):
    held = np.empty((32, 4), np.float32)
    for thread in range(32):
        for i in range(4):
            held[thread, i] = matrix[thread // 4 + 8 * (i // 2), thread % 4 * 2 + i % 2]
    return held


def scale(code, fmt):
    return 2.0 ** (int(code) - 127) if fmt == "ue8m0" else cached_value(int(code), "e4m3")


@pytest.mark.parametrize("types", [("e2m1", "e2m1"), ("e3m2", "e2m1"), ("e4m3", "e2m3"), ("e2m1", "e5m2")])
def test_narrow_floats_without_scales(types):
    rng = np.random.default_rng(len(types[0]) + ord(types[1][1]))
    words, a, b = multiplicands(rng, *types, packed=False)
    held, c = accumulators(rng)
    opcode = f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f32.{types[0]}.{types[1]}.f32"
    assert np.allclose(run(opcode, words, held), fragment_of(a @ b.T + c), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "size", "per_row", "scale_type", "types", "ids"),
    [
        ("mxf8f6f4", "1X", 1, "ue8m0", ("e4m3", "e2m1"), (3, 1, 1, 2)),
        ("mxf8f6f4", "1X", 1, "ue8m0", ("e3m2", "e5m2"), (0, 0, 2, 3)),
        ("mxf4", "2X", 2, "ue8m0", ("e2m1", "e2m1"), (2, 1, 0, 3)),
        ("mxf4nvf4", "4X", 4, "ue4m3", ("e2m1", "e2m1"), (0, 1, 0, 1)),
        ("mxf4nvf4", "2X", 2, "ue8m0", ("e2m1", "e2m1"), (0, 0, 2, 0)),
    ],
)
def test_block_scaling(kind, size, per_row, scale_type, types, ids):
    """The scales come from the bytes and threads that the ids name; all others hold something else."""
    rng = np.random.default_rng(per_row + ids[0])
    words, a, b = multiplicands(rng, *types, packed=kind != "mxf8f6f4")
    held, c = accumulators(rng)
    low, high = (118, 136) if scale_type == "ue8m0" else (0x20, 0x50)
    codes = rng.integers(low, high, (32, 2, 4), dtype=np.uint8)
    words[:, 6:] = codes.view(np.uint32)[:, :, 0]
    byte_a, thread_a, byte_b, thread_b = ids
    rows = [4 * (row % 8) + 2 * thread_a + row // 8 for row in range(16)]
    columns = [4 * column + thread_b for column in range(8)]
    scale_a = np.array(
        [[scale(code, scale_type) for code in codes[t, 0, byte_a : byte_a + per_row]] for t in rows]
    )
    scale_b = np.array(
        [[scale(code, scale_type) for code in codes[t, 1, byte_b : byte_b + per_row]] for t in columns]
    )
    block = a.shape[1] // per_row
    wanted = (a * scale_a.repeat(block, 1)) @ (b * scale_b.repeat(block, 1)).T + c
    types = f"f32.{types[0]}.{types[1]}.f32.{scale_type}"
    opcode = f"mma.sync.aligned.kind::{kind}.block_scale.scale_vec::{size}.m16n8k{a.shape[1]}.row.col.{types}"
    assert np.allclose(run(opcode, words, held, ids), fragment_of(wanted), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("form", "types", "ids", "error"),
    [
        (
            "kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64",
            "e2m1.e2m1.f32.ue4m3",
            (1, 0, 0, 0),
            "byte-id 1",
        ),
        (
            "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32",
            "e4m3.e4m3.f32.ue8m0",
            (0, 2, 0, 0),
            "thread-id 2",
        ),
        (
            "kind::mxf8f6f4.block_scale.scale_vec::2X.m16n8k32",
            "e4m3.e4m3.f32.ue8m0",
            (0, 0, 0, 0),
            "scale_vec::2X",
        ),
        ("kind::mxf4.block_scale.scale_vec::2X.m16n8k64", "e4m3.e2m1.f32.ue8m0", (0, 0, 0, 0), "e4m3"),
        ("kind::mxf4nvf4.block_scale.m16n8k64", "e2m1.e2m1.f32.ue4m3", (0, 0, 0, 0), "mxf4nvf4"),
    ],
)
def test_other_forms_are_refused(form, types, ids, error):
    words, held = np.zeros((32, 8), np.uint32), np.zeros((32, 4), np.float32)
    with pytest.raises((sim.UnsupportedInstruction, sim.BadDescriptor), match=error):
        run(f"mma.sync.aligned.{form}.row.col.f32.{types}", words, held, ids)
