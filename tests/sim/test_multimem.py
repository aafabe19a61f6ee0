"""multimem on one device, whose memory is the only replica."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.multimem import on_one_device


@pytest.mark.parametrize(
    ("opcode", "ordinary"),
    [
        ("multimem.ld_reduce.relaxed.sys.global.add.v4.f32", "ld.relaxed.sys.global.v4.b32"),
        ("multimem.ld_reduce.weak.global.add.acc::f32.v4.bf16x2", "ld.weak.global.v4.b32"),
        ("multimem.ld_reduce.acquire.gpu.global.max.s64", "ld.acquire.gpu.global.b64"),
        ("multimem.ld_reduce.relaxed.sys.global.add.v4.e4m3x4", "ld.relaxed.sys.global.v4.b32"),
        ("multimem.st.release.sys.global.v2.f16x2", "st.release.sys.global.v2.b32"),
        ("multimem.red.release.sys.global.add.u32", "red.release.sys.global.add.u32"),
    ],
)
def test_forms(opcode, ordinary):
    assert on_one_device(opcode) == ordinary


NONE = ("multimem.ld_reduce.weak.global.f32", "multimem.st.weak.global.add.f32", "multimem.cas.u32")


@pytest.mark.parametrize("opcode", NONE)
def test_forms_that_are_none(opcode):
    with pytest.raises(UnsupportedInstruction, match=opcode):
        on_one_device(opcode)


def test_a_sum_over_one_device():
    x = np.arange(128, dtype=np.float32)
    out, count = np.zeros(128, np.float32), np.zeros(1, np.uint32)
    launch(
        """
        mov.u32 %r1, %tid.x; mul.wide.u32 %rd4, %r1, 16;
        ld.param.u64 %rd1, [x]; add.u64 %rd1, %rd1, %rd4; ld.param.u64 %rd2, [out]; add.u64 %rd2, %rd2, %rd4;
        multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];
        multimem.st.relaxed.sys.global.v4.f32 [%rd2], {%f4, %f3, %f2, %f1};
        ld.param.u64 %rd3, [count]; multimem.red.release.sys.global.add.u32 [%rd3], 1;
        """,
        {"x": x, "out": out, "count": count},
        check="order",
    )
    assert (out.reshape(32, 4)[:, ::-1] == x.reshape(32, 4)).all() and count[0] == 32
