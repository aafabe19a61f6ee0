"""atom and red of 16-bit floats, vectors, b16 and b128, against sums made lane by lane."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.sim.errors import MemoryFault, UnsupportedInstruction


def to_bits(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f32":
        return values.astype(np.float32).view(np.uint32)
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: np.ndarray, kind: str) -> np.ndarray:
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if kind == "f16" else np.float32)


@pytest.mark.parametrize(
    ("space", "order"), [("global", "{op}{noftz}.{vec}{type}"), ("shared", "{vec}{type}.{op}{noftz}")]
)
@pytest.mark.parametrize(
    ("kind", "packed", "vector"),
    [
        ("f16", "f16", 1), ("bf16", "bf16", 1), ("f16", "f16x2", 1), ("bf16", "bf16x2", 1),
        ("f16", "f16", 8), ("bf16", "bf16", 4), ("f16", "f16x2", 2), ("bf16", "bf16x2", 4),
        ("f32", "f32", 2), ("f32", "f32", 4),
    ],
)  # fmt: skip
def test_additions_and_extrema_of_every_lane_take_effect_once(space, order, kind, packed, vector):
    width = 16 if packed in ("f16", "bf16") else 32
    elements = vector * (2 if packed.endswith("x2") else 1)
    rng = np.random.default_rng(0)
    values = rng.integers(-3, 4, (32, elements)).astype(np.float64)  # sums are exact in every type
    reg = "h" if width == 16 else "r"
    names = [f"%{reg}{10 + i}" for i in range(vector)]
    operand = "{" + ", ".join(names) + "}" if vector > 1 else names[0]
    loads = "".join(f"ld.global.b{width} {n}, [%rd3+{i * width // 8}];" for i, n in enumerate(names))
    for op in ("add", "max", "min") if kind != "f32" else ("add",):
        noftz = "" if kind == "f32" else ".noftz"
        tail = order.format(op=op, noftz=noftz, vec=f"v{vector}." if vector > 1 else "", type=packed)
        data, out = to_bits(values, kind), np.zeros(16, np.uint8)
        address = "%rd1" if space == "global" else "%r5"
        body = f"""
          ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [data]; mov.u32 %r1, %tid.x; mov.b32 %r5, sm;
          st.shared.v4.b32 [%r5], {{0, 0, 0, 0}};
          mul.wide.u32 %rd3, %r1, {elements * data.itemsize}; add.s64 %rd3, %rd2, %rd3; {loads}
          bar.warp.sync -1; red.{space}.{tail} [{address}], {operand}; bar.warp.sync -1;
        """
        if space == "shared":
            body += "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r5];"
            body += "st.global.v4.b32 [%rd1], {%r20, %r21, %r22, %r23};"
        launch(body, {"out": out, "data": data})
        got = from_bits(out.view(data.dtype)[:elements], kind)
        if op == "add":
            expected = values.sum(0)
        else:
            expected = np.maximum(values.max(0), 0) if op == "max" else np.minimum(values.min(0), 0)
        assert got.tolist() == expected.tolist(), op


def test_atom_returns_what_was_there():
    out, old = np.zeros(4, np.float32), np.zeros((32, 2), np.float32)
    launch(
        """
      ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [old]; mov.u32 %r1, %tid.x;
      mul.wide.u32 %rd3, %r1, 8; add.s64 %rd3, %rd2, %rd3; mov.f32 %f1, 0f3F800000; mov.f32 %f2, 0f40000000;
      atom.global.add.v2.f32 {%f3, %f4}, [%rd1], {%f1, %f2}; st.global.v2.f32 [%rd3], {%f3, %f4};
    """,
        {"out": out, "old": old},
    )
    assert out.tolist() == [32, 64, 0, 0]
    assert sorted(map(tuple, old.tolist())) == [(float(i), 2.0 * i) for i in range(32)]


@pytest.mark.parametrize("shared_by", [1, 2])
def test_lanes_with_elements_of_their_own(shared_by):
    """The upper 24 lanes, in reverse; where two have the same elements, one sees what the other has left."""
    out, old = np.arange(64, dtype=np.float32), np.full((32, 2), -1, np.float32)
    launch(
        f"""
      ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [old]; mov.u32 %r1, %tid.x; setp.ge.u32 %p1, %r1, 8;
      sub.u32 %r2, 31, %r1; div.u32 %r2, %r2, {shared_by}; mul.wide.u32 %rd3, %r2, 8; add.s64 %rd3, %rd1, %rd3;
      cvt.rn.f32.u32 %f1, %r1; mov.f32 %f2, 0f42C80000; mul.wide.u32 %rd4, %r1, 8; add.s64 %rd4, %rd2, %rd4;
      @%p1 atom.global.add.v2.f32 {{%f3, %f4}}, [%rd3], {{%f1, %f2}}; @%p1 st.global.v2.f32 [%rd4], {{%f3, %f4}};
    """,
        {"out": out, "old": old},
    )
    sums, seen = np.arange(64, dtype=np.float32).reshape(32, 2), np.full((32, 2), -1, np.float32)
    for lane in range(8, 32):
        seen[lane] = sums[(31 - lane) // shared_by]
        sums[(31 - lane) // shared_by] += lane, 100
    assert np.array_equal(out.reshape(32, 2), sums) and np.array_equal(old, seen)


def test_compare_and_swap_of_16_and_128_bits():
    """One lane wins each exchange of zero for its own number."""
    out, wide = np.zeros(2, np.uint16), np.zeros(4, np.uint64)
    launch(
        """
      .reg .b128 %q<4>;
      ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [wide]; mov.u32 %r1, %tid.x; add.u32 %r2, %r1, 5;
      cvt.u16.u32 %h1, %r2; mov.b16 %h2, 0; atom.global.cas.b16 %h3, [%rd1+2], %h2, %h1;
      cvt.u64.u32 %rd3, %r2; mov.b64 %rd4, 0; mov.b128 %q1, {%rd3, %rd3}; mov.b128 %q2, {%rd4, %rd4};
      atom.global.cas.b128 %q3, [%rd2+16], %q2, %q1;
    """,
        {"out": out, "wide": wide},
    )
    assert out[0] == 0 and 5 <= out[1] < 37
    assert wide[:2].tolist() == [0, 0] and wide[2] == wide[3] and 5 <= wide[2] < 37


def test_what_is_no_atomic_is_refused():
    with pytest.raises(UnsupportedInstruction, match=r"atom\.global\.min\.f32"):
        launch(
            "ld.param.u64 %rd1, [out]; atom.global.min.f32 %f1, [%rd1], %f2;",
            {"out": np.zeros(1, np.float32)},
        )
    with pytest.raises(MemoryFault, match=r"16-byte access .* not aligned"):
        launch(
            "ld.param.u64 %rd1, [out]; red.global.add.v4.f32 [%rd1+8], {%f1, %f1, %f1, %f1};",
            {"out": np.zeros(8, np.float32)},
        )
