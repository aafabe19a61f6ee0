"""`sim.launch` and `sim.tensor_map`: PTX that no DSL wrote, its arguments, and what hardware refuses to launch."""

import ctypes
import sys

import numpy as np
import pytest
import torch

import warpspec.sim as sim
from warpspec.sim.limits import ctas_by_registers, register_shortage

NAN = float("nan")
MODULE = """
.version 9.0
.target sm_90a
.address_size 64
{kernels}
"""
SAXPY = """
.visible .entry saxpy(.param .u64 .ptr .global .align 16 x, .param .u64 y, .param .f32 a, .param .u32 n)
{directives}
{{
  .reg .pred %p<2>; .reg .b32 %r<8>; .reg .f32 %f<5>; .reg .b64 %rd<8>;
  ld.param.b64 %rd1, [x]; ld.param.b64 %rd2, [y]; ld.param.f32 %f1, [a]; ld.param.b32 %r1, [n];
  mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
  mad.lo.s32 %r5, %r2, %r3, %r4;
  setp.ge.u32 %p1, %r5, %r1;
  @%p1 bra done;
  mul.wide.u32 %rd3, %r5, 4;
  add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
  ld.global.f32 %f2, [%rd4]; ld.global.f32 %f3, [%rd5];
  fma.rn.f32 %f4, %f1, %f2, %f3;
  st.global.f32 [%rd5], %f4;
done:
  ret;
}}
"""
# A struct {{pointer; int32 offset; float scale}} by value: out[offset] = scale.
STRUCT = """
.visible .entry store(.param .align 8 .b8 s[16])
{
  .reg .b32 %r<4>; .reg .f32 %f<2>; .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [s]; ld.param.u32 %r1, [s+8]; ld.param.f32 %f1, [s+12];
  mul.wide.s32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
  st.global.f32 [%rd3], %f1;
  ret;
}
"""
# Two maps, their addresses in 32 bits as LLVM writes them: a tile is loaded through one and stored through the other.
COPY = """
.visible .entry copy(.param .u32 row, .param .align 64 .b8 from[128], .param .align 64 .b8 to[128])
.reqntid 32
{
  .shared .align 1024 .b8 tile[1024];
  .shared .align 8 .b64 full;
  .reg .pred %p<4>; .reg .b32 %r<12>; .reg .b64 %rd<8>;
  ld.param.u32 %r1, [row];
  mov.b32 %r2, from; cvt.u64.u32 %rd1, %r2; cvta.param.u64 %rd2, %rd1;
  mov.b32 %r3, to; cvt.u64.u32 %rd3, %r3; cvta.param.u64 %rd4, %rd3;
  mov.u32 %r4, tile; mov.u32 %r5, full; mov.u32 %r6, %tid.x; mov.u32 %r7, 0;
  setp.ne.u32 %p1, %r6, 0;
  @%p1 bra done;
  mbarrier.init.shared::cta.b64 [%r5], 1;
  fence.mbarrier_init.release.cluster;
  fence.proxy.async.shared::cta;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 1024;
  cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd2, {%r7, %r1}], [%r5];
wait:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r5], 0;
  @!%p2 bra wait;
  cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r7, %r1}], [%r4];
  cp.async.bulk.commit_group;
  cp.async.bulk.wait_group 0;
done:
  ret;
}
"""


def module(*kernels: str) -> str:
    return MODULE.format(kernels="\n".join(kernels))


def saxpy(directives: str = "") -> str:
    return module(SAXPY.format(directives=directives))


def test_tensors_and_numbers_fill_the_parameters(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 100)).astype(np.float32)
    expected = 3 * x[:70] + y[:70]
    whole, out = np.full(104, NAN, np.float32), torch.from_numpy(y.copy())
    whole[4:] = x
    path = tmp_path / "saxpy.ptx"
    path.write_text(saxpy())
    report = sim.launch(path, grid=2, block=64, args=[whole[4:], out, 3, 70], seeds=2, check="order")
    assert np.allclose(out[:70], expected, atol=1e-6) and (out[70:].numpy() == y[70:]).all()
    assert report.launches[0].block == (64, 1, 1) and sim.last_report() is report


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([torch.ones(4), torch.ones(4), 1.0], r"saxpy takes 4 arguments \(x \(8 bytes\).*; 3 are given"),
        (
            [torch.ones(4), torch.ones(4), 1.0, 1 << 32],
            r"args\[3\] \(n\) is 4294967296, which does not fit the 4",
        ),
        ([torch.ones(4), torch.ones(4), 1.0, 2.0], r"args\[3\] \(n\) is the float 2.0; .* 4 bytes of .u32"),
        (
            [torch.ones(4), torch.ones(4), 1.0, torch.ones(1)],
            r"args\[3\] \(n\) fills 8 bytes; the PTX declares 4",
        ),
        ([torch.ones(4), np.float32(1), 1.0, 4], r"args\[1\] \(y\) fills 4 bytes; the PTX declares 8"),
        ([torch.ones(4), "y", 1.0, 4], r"args\[1\] \(y\) is 'y' \(str\); a tensor, a number"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args, says):
    with pytest.raises(sim.HostError, match=says):
        sim.launch(saxpy(), grid=1, block=32, args=args)


def test_structures_hold_numbers_and_addresses():
    class Store(ctypes.Structure):
        _fields_ = [("out", ctypes.c_void_p), ("offset", ctypes.c_int32), ("scale", ctypes.c_float)]

    out = torch.full((8,), NAN)
    sim.launch(module(STRUCT), grid=1, block=1, args=[Store(out.data_ptr(), 3, 2.5)])
    sim.launch(module(STRUCT), grid=1, block=1, args=[(out, np.int32(5), np.float32(-1))])
    assert [out[i].item() for i in (3, 5)] == [2.5, -1] and out.isnan().sum() == 6
    with pytest.raises(sim.HostError, match="fills 12 bytes; the PTX declares 16"):
        sim.launch(module(STRUCT), grid=1, block=1, args=[bytes(12)])


@pytest.mark.parametrize("swizzle", [0, 64])
def test_tensor_maps_by_value(swizzle):
    """A tile of a view with a stride goes through both maps; rows beyond the view stay as they are."""
    whole = torch.randn(40, 48).half()
    out = torch.full((36, 32), NAN).half()
    box = dict(box=(16, 32), swizzle=swizzle)
    maps = [sim.tensor_map(whole[:, 8:40], **box), sim.tensor_map(out[:30], **box)]
    for row in (0, 16):
        sim.launch(module(COPY), "copy", grid=1, block=32, args=[row, *maps], check="order", seed=3)
    assert torch.equal(out[:30], whole[:30, 8:40]) and out[30:].isnan().all()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(box=(16,)), sim.HostError, r"box \(16,\) has 1 entries; view has 2"),
        (dict(box=(16.5, 32)), sim.HostError, r"box is \(16.5, 32\); an int for each dimension is needed"),
        (dict(box=(16, 32), swizzle=48), sim.HostError, "swizzle is 48; 0, 32, 64, 128, 96 are allowed"),
        (
            dict(box=(16, 32), element="f32"),
            sim.HostError,
            "element f32 has 32 bits, view's elements have 16",
        ),
        (dict(box=(16, 64), swizzle=64), sim.BadDescriptor, "inner box of 128 B is wider than the swizzle"),
        (dict(box=(300, 32)), sim.BadDescriptor, "box size of dimension 1 is not 1 to 256"),
    ],
)
def test_tensor_maps_that_cannot_be_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        sim.tensor_map(torch.ones(64, 64).half(), **options)


@pytest.mark.parametrize(
    ("directives", "options", "says"),
    [
        (
            ".reqntid 64",
            dict(block=32),
            r"block \(32, 1, 1\); the kernel is compiled for exactly \(64, 1, 1\)",
        ),
        (
            ".maxntid 16, 4",
            dict(block=96),
            r"has 96 threads; the kernel is compiled for at most 64 \(.maxntid\)",
        ),
        (".reqnctapercluster 2", dict(grid=4, cluster=4), r"cluster \(4, 1, 1\); .* exactly \(2, 1, 1\)"),
        (
            ".reqnctapercluster 2",
            dict(grid=3),
            r"grid \(3, 1, 1\) is not a multiple of the cluster \(2, 1, 1\)",
        ),
        (".maxclusterrank 2", dict(grid=4, cluster=4), r"has 4 CTAs; .* at most 2 \(.maxclusterrank\)"),
        ("", dict(smem=227 * 1024 + 1), "232449 bytes of shared memory a CTA .*; H200 has 232448"),
        ("", dict(block=(32, 33)), "has 1056 threads; at most 1024"),
        ("", dict(grid=0), r"grid \(0, 1, 1\): at most .* and at least 1"),
        ("", dict(smem=-1), "smem is -1"),
        ("", dict(block="32"), "block is '32'"),
        ("", dict(grid=None), "grid is None; one to three ints"),
        ("", dict(grid=(True, 1)), r"grid is \(True, 1\)"),
        ("", dict(args=None), "args is a NoneType; a sequence"),
        ("", dict(entry="add"), "entry is 'add'; the PTX has saxpy"),
    ],
)
def test_launches_that_hardware_refuses(directives, options, says):
    x = torch.ones(4)
    with pytest.raises(sim.HostError, match=says):
        sim.launch(saxpy(directives), **dict(args=[x, x, 1.0, 4], grid=np.int64(1), block=32) | options)


def test_limits_are_the_targets_own():
    """An RTX 5090 (sm_120a) has less shared memory a CTA and smaller clusters than an H200."""
    x, text = torch.ones(32), saxpy().replace("sm_90a", "sm_120a")
    sim.launch(text, grid=1, block=32, smem=99 * 1024, args=[x, x.clone(), 1.0, 4])
    with pytest.raises(sim.HostError, match=r"101377 bytes of shared memory .* RTX 5090 has 101376"):
        sim.launch(text, grid=1, block=32, smem=99 * 1024 + 1, args=[x, x, 1.0, 4])
    with pytest.raises(sim.HostError, match=r"has 16 CTAs; RTX 5090 allows 8"):
        sim.launch(text, grid=16, block=32, cluster=16, args=[x, x, 1.0, 4])
    with pytest.raises(sim.HostError, match=r"the simulator runs sm_90a, .* and sm_120a, not sm_80"):
        sim.launch(text.replace("sm_120a", "sm_80"), grid=1, block=32, args=[x, x, 1.0, 4])


@pytest.mark.parametrize(
    ("registers", "threads", "ctas"),
    [(224, 256, 1), (224, 288, 0), (168, 384, 1), (168, 388, 0), (32, 128, 16)],
)
def test_registers_of_a_quarter_of_an_sm(registers, threads, ctas):
    """A 9th warp of 224 registers fits an SM's 65536 registers, and none of its four partitions."""
    assert ctas_by_registers(registers, threads) == ctas
    assert (register_shortage(registers, threads) is None) == (ctas > 0)


def test_the_kernel_must_be_named_where_there_are_several():
    with pytest.raises(sim.HostError, match=r"entry: the PTX has 2 kernels \(store, copy\); name one"):
        sim.launch(module(STRUCT, COPY), grid=1, block=1)
    for path in ("no such file", sys.executable):
        with pytest.raises(sim.HostError, match=r"neither PTX text .* nor a file"):
            sim.launch(path, grid=1, block=1)
