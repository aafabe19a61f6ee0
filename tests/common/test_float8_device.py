"""FP8 codes widened by a compiled kernel in the simulator: every code, exactly."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Uint32
from cutlass.cute.runtime import make_fake_stream

from warpspec import sim
from warpspec.common.compile import compile_cached, fake_rows
from warpspec.common.device.float8 import widened

WORDS = 64  # of 4 codes: all 256
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@cute.kernel
def kernel(codes: cute.Tensor, out: cute.Tensor, fmt: cutlass.Constexpr, dtype: cutlass.Constexpr):
    """A word a thread."""
    thread, _, _ = cute.arch.thread_idx()
    wide = widened([codes[thread]], fmt, dtype)
    for half in cutlass.range_constexpr(2):
        out[2 * thread + half] = wide[half]


@cute.jit
def host(
    codes: cute.Tensor,
    out: cute.Tensor,
    fmt: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
    stream: CUstream,
):
    kernel(codes, out, fmt, dtype).launch(grid=(1, 1, 1), block=(WORDS, 1, 1), stream=stream)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", FLOAT8)
def test_every_code(fmt, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.full((2 * WORDS,), 0xFFFF, dtype=torch.uint32)

    def build():
        return host, fake_rows(Uint32, 1), fake_rows(Uint32, 1), fmt, dtype, make_fake_stream()

    made = compile_cached(("test_float8_device", fmt, dtype), build, arch="sm_90a")
    sim.run(made, codes.view(torch.uint32), out, None)
    got, wanted = out.view(getattr(torch, dtype)).float(), codes.view(FLOAT8[fmt]).float()
    assert torch.equal(got.isnan(), wanted.isnan())
    known = ~wanted.isnan()
    assert torch.equal(got[known], wanted[known])
    assert torch.equal(torch.signbit(got[known]), torch.signbit(wanted[known]))
