"""tcgen05.ld.red (sm_103a): loads with the minimum or maximum of what each thread loads."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec import sim

COLUMNS = 8
NAMES = ", ".join(f"%r{20 + i}" for i in range(COLUMNS))
KERNEL = """
  mov.u32 %r0, %tid.x; ld.param.u64 %rd1, [words]; ld.param.u64 %rd2, [out]; mov.b32 %r1, sm;
  tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32; bar.sync 0; ld.shared.u32 %r2, [%r1];
  mul.wide.u32 %rd3, %r0, 32; add.u64 %rd1, %rd1, %rd3;
  ld.global.v4.u32 {{%r20, %r21, %r22, %r23}}, [%rd1]; ld.global.v4.u32 {{%r24, %r25, %r26, %r27}}, [%rd1+16];
  tcgen05.st.sync.aligned.32x32b.x8.b32 [%r2], {{{names}}}; tcgen05.wait::st.sync.aligned;
  tcgen05.ld.red.sync.aligned.{form} {{{names}}}, %r10, [%r2];
  tcgen05.wait::ld.sync.aligned;
  mul.wide.u32 %rd3, %r0, 4; add.u64 %rd2, %rd2, %rd3; st.global.u32 [%rd2], %r10;
  st.global.v4.u32 [%rd1], {{%r20, %r21, %r22, %r23}}; st.global.v4.u32 [%rd1+16], {{%r24, %r25, %r26, %r27}};
  bar.sync 0; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
"""


def run(form, words):
    loaded, out = words.copy(), np.zeros(32, np.uint32)
    body = KERNEL.format(form=form, names=NAMES)
    launch(body, {"words": loaded, "out": out}, target="sm_103a", seed=1)
    assert (loaded == words).all()
    return out


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_integers(operation, kind):
    words = np.random.default_rng(1).integers(0, 1 << 32, (32, COLUMNS), dtype=np.uint32)
    typed = words.view({"u32": np.uint32, "s32": np.int32}[kind])
    out = run(f"32x32b.x8.{operation}.{kind}", words)
    assert (out.view(typed.dtype) == getattr(typed, operation)(axis=1)).all()


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("modifiers", ["", ".abs", ".NaN", ".abs.NaN"])
def test_floats(operation, modifiers):
    """Row 0 has zeros of both signs, row 1 a NaN among numbers, row 2 NaNs alone, row 3 infinities."""
    values = np.random.default_rng(2).standard_normal((32, COLUMNS)).astype(np.float32)
    values[0] = [0.0, -0.0] * 4
    values[1, 3], values[2] = np.nan, np.nan
    values[3, :2] = np.inf, -np.inf
    out = run(f"32x32b.x8.{operation}{modifiers}.f32", values.view(np.uint32)).view(np.float32)
    seen = np.abs(values) if "abs" in modifiers else values
    wanted = getattr(np, f"nan{operation}")(seen[3:], axis=1)
    assert (out[3:] == wanted).all()
    assert out[0] == 0 and np.signbit(out[0]) == (operation == "min" and "abs" not in modifiers)
    assert np.isnan(out[2])
    if "NaN" in modifiers:
        assert np.isnan(out[1])
    else:
        assert out[1] == getattr(np, f"nan{operation}")(seen[1])


def test_other_shapes_are_refused():
    with pytest.raises(sim.UnsupportedInstruction, match=r"only .32x32b"):
        run("16x32bx2.x8.max.f32", np.zeros((32, COLUMNS), np.uint32))
