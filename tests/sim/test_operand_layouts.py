"""Matrix descriptors that do not have the layout of the tile that TMA wrote, with check="order"."""

from types import SimpleNamespace

import pytest
import torch

from warpspec import sim
from warpspec.sim.names import StorageNames
from warpspec.sim.order.operand_layouts import OperandLayouts
from warpspec.sim.tcgen05 import smem_descriptor
from warpspec.sim.tcgen05.operands import SharedOperand

ROWS, DEPTH = 64, 64
START = 1024  # of `sm` in shared memory
REGISTERS = ", ".join(f"%f{i}" for i in range(32))
STORES = "".join(f"st.global.f32 [%rd3+{512 * i}], %f{i};" for i in range(32))
PTX = (
    """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry product(.param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .u64 d, .param .u64 da,
    .param .u64 db)
{
  .reg .b32 %r<16>; .reg .f32 %f<32>; .reg .b64 %rd<16>; .reg .pred %p<4>;
  .shared .align 1024 .b8 sm[32768];
  mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; mov.b32 %r2, sm; add.u32 %r3, %r2, 24576; add.u32 %r4, %r2, 8192;
  mov.b64 %rd1, a; cvta.param.u64 %rd1, %rd1; mov.b64 %rd2, b; cvta.param.u64 %rd2, %rd2; mov.b32 %r5, 0;
  @%p1 mbarrier.init.shared.b64 [%r3], 1;
  fence.mbarrier_init.release.cluster; bar.sync 0;
  @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16384;
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r5, %r5}], [%r3];
  @%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r4], [%rd2, {%r5, %r5}], [%r3];
wait: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
  @!%p2 bra wait;
  ld.param.u64 %rd4, [da]; ld.param.u64 %rd5, [db];
  wgmma.fence.sync.aligned;
"""
    + "".join(
        f"""add.u64 %rd6, %rd4, {2 * k}; add.u64 %rd7, %rd5, {2 * k};
  wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{REGISTERS}}}, %rd6, %rd7, {int(k > 0)}, 1, 1, 0, 0;
"""
        for k in range(DEPTH // 16)
    )
    + f"""
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
  ld.param.u64 %rd3, [d]; mul.lo.u32 %r6, %r1, 4; cvt.u64.u32 %rd8, %r6; add.u64 %rd3, %rd3, %rd8;
  {STORES}
  ret;
}}
"""
)


def descriptor(start: int, stride: int, swizzle: int = 1) -> int:
    return start >> 4 | 1 << 16 | stride >> 4 << 32 | swizzle << 62


def product(stride: int, swizzle: int = 1) -> sim.SimReport:
    """A product whose B has this stride byte offset and swizzle mode; TMA wrote it in rows of 128 bytes, swizzled."""
    a, b = torch.randn(2, ROWS, DEPTH).half()
    d = torch.full((32, 128), float("nan"))
    maps = [sim.tensor_map(x, (ROWS, DEPTH), swizzle=128) for x in (a, b)]
    descriptors = descriptor(START, 1024), descriptor(START + ROWS * DEPTH * 2, stride, swizzle)
    return sim.launch(PTX, grid=1, block=128, args=[*maps, d, *descriptors], check="order")


def test_the_tiles_own_layout():
    assert not product(1024).launches[0].warnings


@pytest.mark.parametrize("stride", [0, 512, 2048])
def test_a_wrong_stride(stride):
    with pytest.raises(sim.OrderError) as caught:
        product(stride)
    (found,) = caught.value.findings
    assert f"B with a stride byte offset of {stride};" in found.second and "a box of 64 x 64" in found.first
    assert found.remedy == "a stride byte offset of 1024: 8 rows of 128 bytes"


def test_a_wrong_swizzle():
    with pytest.raises(sim.OrderError) as caught:
        product(1024, swizzle=2)
    (found,) = caught.value.findings
    assert "B with a swizzle of 64 bytes" in found.second
    assert found.remedy == "a descriptor with a swizzle of 128 bytes"


def test_rows_that_several_products_share_out():
    """Every other group of 8 rows is an operand of its own: no finding, as the whole tile is read."""
    tensor_map = sim.tensor_map(torch.zeros(64, 64).half(), (64, 64), swizzle=128)
    ins = SimpleNamespace(line=1, opcode="cp.async.bulk.tensor.2d", source=None)
    for products, clean in ((1, False), (2, True)):
        layouts, order = OperandLayouts(lambda cta, offset: ins), SimpleNamespace(tiles={})
        cta = SimpleNamespace(order=order, coords=0, names=StorageNames())
        layouts.written(cta, START, 8192, tensor_map.map, ins)
        for first in range(products):
            bits = smem_descriptor.encode(START + 1024 * first, 16, 2048, swizzle_mode=2)
            chunks = smem_descriptor.k_major_chunks(bits, 32, 8)
            layouts.read(cta, ins, SharedOperand("A", bits, 32, False, chunks))
        assert (not layouts.findings()) == clean
