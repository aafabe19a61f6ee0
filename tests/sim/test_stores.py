"""The store that left the first wrong element of a result."""

import re

import pytest
import torch

from warpspec import sim

# Thread t of CTA c writes c * 64 + t to its element of x; then, in the CTA of %bad, one thread another number.
PTX = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry numbers(.param .u64 x, .param .u32 bad)
{
  .reg .b32 %r<16>; .reg .b64 %rd<8>; .reg .pred %p<4>;
  ld.param.u64 %rd1, [x]; ld.param.u32 %r1, [bad]; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %tid.x;
  shl.b32 %r4, %r2, 6; add.u32 %r4, %r4, %r3; mul.wide.u32 %rd2, %r4, 4; add.u64 %rd1, %rd1, %rd2;
  st.global.u32 [%rd1], 0;
  st.global.u32 [%rd1], %r4;
  setp.eq.u32 %p1, %r2, %r1; setp.eq.and.u32 %p1, %r3, 37, %p1;
  @%p1 st.global.v2.u32 [%rd1+-4], {%r3, %r4};
  ret;
}
"""
LINE = next(number for number, row in enumerate(PTX.splitlines(), 1) if "v2.u32" in row)


def recorded(bad: int, ctas: int = 6) -> tuple[torch.Tensor, sim.Stores]:
    x = torch.full((ctas, 64), -1, dtype=torch.int32)
    with sim.recording_stores() as stores:
        sim.launch(PTX, grid=ctas, block=64, args=[x, bad])
    return x, stores


def test_what_is_right_is_no_error():
    x, stores = recorded(bad=99)
    stores.compare(x, torch.arange(6 * 64).reshape(6, 64))


def test_the_store_and_its_thread_are_named():
    x, stores = recorded(bad=3)
    with pytest.raises(sim.WrongResult) as caught:
        stores.compare(x, torch.arange(6 * 64).reshape(6, 64))
    assert re.search(
        rf"1 of 384 elements differ .* at \(3, 36\), is 37, expected 228\n"
        rf".* CTA \(3, 0, 0\) warp 1 lane 5 writes: PTX line {LINE} `st.global.v2.u32`\n"
        r"  in launch 1, kernel numbers",
        str(caught.value),
    )


def test_a_view_with_strides_and_elements_that_nothing_wrote():
    x, stores = recorded(bad=99, ctas=4)
    x = torch.cat([x, x])[:4]  # another storage: nothing wrote it
    with pytest.raises(sim.WrongResult, match="nothing wrote 2 of them, the first at \\(0, 1\\)"):
        stores.compare(x.T[:, :2], x.T[:, :2] + torch.eye(64, 2, dtype=torch.int32)[:, [1, 0]])
    with pytest.raises(ValueError, match="expected has shape"):
        stores.compare(x, x[0])


def test_the_last_launch_counts_and_tolerances_do():
    x = torch.zeros(1, 64)
    scale = PTX.replace("st.global.u32 [%rd1], %r4;", "cvt.rn.f32.u32 %r4, %r4; st.global.u32 [%rd1], %r4;")
    with sim.recording_stores() as stores:
        for _ in range(2):
            sim.launch(scale, grid=1, block=64, args=[x, 99])
    wanted = torch.arange(64.0)[None]
    stores.compare(x, wanted + 0.5, atol=0.5)
    with pytest.raises(sim.WrongResult, match=r"at \(0, \d+\), is \d+.0, expected \d+.5\n(.|\n)*in launch 2"):
        stores.compare(x, wanted + 0.5)
