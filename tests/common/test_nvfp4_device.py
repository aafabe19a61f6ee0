"""Blocks quantised by a compiled kernel in the simulator: the bits of `nvfp4.quantize`."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Uint32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from warpspec import sim
from warpspec.common import nvfp4
from warpspec.common.compile import compile_cached, resources
from warpspec.common.device import nvfp4 as nvfp4_device

THREADS = 128


@cute.kernel
def kernel(x: cute.Tensor, scale: cute.Tensor, out: cute.Tensor, bounded: cutlass.Constexpr):
    """A block a thread. x: (BLOCK, 16) fp32; scale: (BLOCK) fp32; out: (BLOCK, 3) uint32, scale and codes."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * THREADS + thread
    values = cute.make_rmem_tensor(nvfp4.NVFP4_BLOCK, Float32)
    cute.autovec_copy(x[i, None], values)
    amax = nvfp4_device.largest_magnitude(values)
    global_scale = nvfp4_device.global_scale_of(scale[i]) if cutlass.const_expr(bounded) else scale[i]
    result = nvfp4_device.quantize_block(values, amax, global_scale, bounded=bounded)
    for part in cutlass.range_constexpr(3):
        out[i, part] = result[part]


@cute.jit
def host(x: cute.Tensor, scale: cute.Tensor, out: cute.Tensor, bounded: cutlass.Constexpr, stream: CUstream):
    kernel(x, scale, out, bounded).launch(
        grid=(x.shape[0] // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


def compiled(bounded):
    def tensor(dtype, *width):
        return make_fake_tensor(
            dtype,
            (cute.sym_int(), *width),
            stride=(*width, 1),
            assumed_align=16 if width == (16,) else 4,
            memspace=cute.AddressSpace.gmem,
        )

    def build():
        tensors = tensor(Float32, 16), tensor(Float32), tensor(Uint32, 3)
        return host, *tensors, bounded, make_fake_stream()

    return compile_cached(("test_nvfp4_device", bounded), build, arch="sm_100a")


def run(x, scale, *, bounded):
    """(scale codes [N], packed data [N, 8]) of blocks x [N, 16]. scale [N]: global scale, or with bounded amax."""
    rows = -(-len(x) // THREADS) * THREADS
    padded = torch.ones(rows, 16), torch.ones(rows)
    padded[0][: len(x)], padded[1][: len(x)] = x, scale
    out = torch.full((rows, 3), -1, dtype=torch.int32).view(torch.uint32)
    sim.run(compiled(bounded), *padded, out, None)
    out = out.view(torch.int32)[: len(x)]
    assert not (out[:, 0] & ~0xFF).any()
    return out[:, 0].to(torch.uint8), out[:, 1:].contiguous().view(torch.uint8)


def check(x, scale, *, bounded):
    got_scale, got_data = run(x, scale, bounded=bounded)
    expected = nvfp4.quantize(x, nvfp4.global_scale_of(scale) if bounded else scale)
    assert torch.equal(got_scale, expected.scale.view(torch.uint8)[:, 0])
    assert torch.equal(got_data, expected.data)


def near_boundaries(count, generator):
    """Blocks whose quotients lie at, or a few ulp beside, the points where e2m1 and e4m3 round up or down."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    codes = torch.randint(1, 0x7F, (count, 1), generator=generator, dtype=torch.uint8)
    scale = codes.view(torch.float8_e4m3fn).float()
    global_scale = torch.rand(count, 1, generator=generator) + 0.5
    x = midpoints[torch.randint(0, 8, (count, 16), generator=generator)] * (scale * global_scale)
    ulps = torch.randint(-2, 3, x.shape, generator=generator, dtype=torch.int32)
    x = (x.view(torch.int32) + ulps).view(torch.float32)
    x[:, 0] = 6 * scale[:, 0] * global_scale[:, 0]
    # and scales between two e4m3: half of the blocks' largest value moves by half a step
    x[::2, 0] *= 1 + torch.randint(-8, 9, (len(x[::2]),), generator=generator) / 128
    sign = torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    return x * sign, global_scale[:, 0]


@pytest.mark.parametrize("exponent", [-90, -60, 0, 80])
def test_quotients_round_as_ieee_says(exponent):
    generator = torch.Generator().manual_seed(exponent)
    x, scale = near_boundaries(1500, generator)
    factor = 2.0**exponent
    check(x * factor, scale * factor, bounded=False)
    amax = x.abs().amax(1)
    check(x * factor, amax * factor * (1 + torch.rand(len(x), generator=generator)), bounded=True)


def test_random_magnitudes():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 16, generator=generator) * torch.exp2(
        6 * torch.randn(1000, 16, generator=generator)
    )
    check(x, torch.exp2(4 * torch.randn(1000, generator=generator)), bounded=False)
    check(x.bfloat16().float(), x.abs().amax(1), bounded=True)


def test_extremes():
    lines = [
        [0.0] * 16,
        [-0.0] * 16,
        [-0.0, 1.0] * 8,
        [-1e-9, 1.0] * 8,
        [1e-30] * 16,
        [-1e-30] * 16,
        [1e-42, -1e-45] * 8,
        [3e38, -3e38] * 8,
        [torch.nan, 1.0] * 8,
        [-torch.nan, -1.0] * 8,
        [1.0, -1.0] * 7 + [torch.inf, 2.0],
        [1.0, -1.0] * 7 + [-torch.inf, torch.nan],
    ]
    x = torch.tensor(lines)
    for scale in (1.0, 2.0**-4, 2.0**-89, 1e-3, 1e30, torch.nan):
        check(x, torch.full((len(x),), scale), bounded=False)
    amax = x.abs().amax(1)
    check(x, amax, bounded=True)
    check(x[:7], torch.full((7,), 2.0**40), bounded=True)


@pytest.mark.parametrize("bounded", [False, True])
def test_no_spills(bounded):
    for kernel_resources in resources(compiled(bounded)).values():
        assert kernel_resources.local_bytes == 0
