"""Gathered attention over "v3.2-fp8" rows, whose scales are any fp32 numbers: both kernels in the simulator."""

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Uint32
from helpers.gathered_cases import O_TOLERANCE, Case, judge, judge_lse, random_case
from helpers.row_scales import ROW_BYTES, put_scales, random_scales, scales_of
from helpers.suites import long

from warpspec.common.compile import fake_rows
from warpspec.common.launch import SIMULATED, Kernel
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import codes, gathered_attention

TRUE_TOLERANCE = 5e-3  # of o and lse on keys that are not rounded: a code times its scale is, to bf16


def rounded(read):
    """``LatentPool.read``, of rows as kernels convert them."""
    return lambda pool, slots: read(pool, slots).bfloat16().float()


def compare(case: Case, monkeypatch, true=TRUE_TOLERANCE, rounded_=O_TOLERANCE) -> torch.Tensor:
    """Compare the kernel with the reference on true keys and on keys rounded to bf16, with a tolerance each."""
    got, lse = gathered_attention(case.q, case.key_sets, backend="sim", **case.options)
    wanted, wanted_lse = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
    judge_lse(lse, wanted_lse, true)
    assert judge(got, wanted) < true
    with monkeypatch.context() as patched:
        patched.setattr(LatentPool, "read", rounded(LatentPool.read))
        wanted, wanted_lse = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
    judge_lse(lse, wanted_lse)
    assert judge(got, wanted) < rounded_
    return got


@pytest.mark.parametrize(
    ("arch", "heads", "slots", "splits"),
    [
        ("sm_100a", 8, (130, 70), 1),
        long("sm_90a", 8, (200, 70), 1),
        long("sm_90a", 128, (64, 65, 1), 1),
        long("sm_90a", 16, (300,), 3),
        long("sm_100a", 16, (300,), 3),
    ],
)
@pytest.mark.usefixtures("check_order")
def test_true_scales(simulate_as, monkeypatch, arch, heads, slots, splits):
    """Queries one after another on one CTA, which see all, a part, nothing; NaN in every row that is not seen."""
    simulate_as(arch, sm_count=1)
    case = random_case(4, heads, slots, format="v3.2-fp8", rotate=False, num_splits=splits)
    random_scales(case)
    got = compare(case, monkeypatch)
    assert not got[2].any() and got.isfinite().all()
    if heads == 8:
        # With this kernel also scales above 128, of few keys, whose weights' rounding shows; NaN that is seen.
        scales = scales_of(case.key_sets[0].pool)
        scales[0, :8] *= 3e4
        put_scales(case.key_sets[0].pool, scales)
        case.q *= 1e-4
        compare(case, monkeypatch, 2e-2, 1e-2)
        seen = case.key_sets[0].slots[0]
        slot = int(seen[(seen >= 0) & (seen < case.key_sets[0].pool.capacity)][0])
        page, row = divmod(slot, case.key_sets[0].pool.page_size)
        case.key_sets[0].pool.data[page, row * ROW_BYTES + 77] = 0x7F  # NaN in e4m3
        assert compare(case, monkeypatch, 2e-2, 1e-2)[0].isnan().all()


class Scale:
    """Words of four e4m3 codes, under an fp32 scale each, to bf16; also as small scales are, where they are."""

    @cute.jit
    def __call__(self, words: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, stream: CUstream):
        self.kernel(words, scales, out).launch(grid=(scales.shape[0], 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, words: cute.Tensor, scales: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        scale = scales[block]
        low, high = codes.scaled([words[thread]], *codes.split_scale(scale, False), False)
        out[block, 2 * thread], out[block, 2 * thread + 1] = low, high
        if Boolean(scale < codes.SMALL_SCALE):
            low, high = codes.scaled([words[thread]], *codes.split_scale(scale, True), True)
            out[block, 128 + 2 * thread], out[block, 128 + 2 * thread + 1] = low, high


def test_conversion_rounds_once():
    """Every code under scales of all sizes: the fp32 product rounded to bf16, but for a few that lie within 2**-17 of
    the middle between two; NaN for all four where one is NaN."""
    numbers = torch.arange(256, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    scales = torch.cat(
        [
            torch.tensor([0.0, 1.0, 2.0**-126, 3e-30, 127.99, 128.0, 1.0 / 3, 448.0, 7e30, torch.nan]),
            torch.exp2(torch.rand(30, generator=generator) * 20 - 14),
        ]
    )
    out = torch.zeros((len(scales), 256), dtype=torch.uint32)
    kernel = Kernel(
        "test.scale", lambda _: (Scale(), fake_rows(Uint32, 1), fake_rows(Float32, 1), fake_rows(Uint32, 2))
    )
    kernel.run(None, SIMULATED["sm_90a"], numbers.view(torch.uint32), scales, out)
    values = numbers.view(torch.float8_e4m3fn).float()
    products = values * scales[:, None]
    products[:, values.unflatten(0, (64, 4)).isnan().any(1).repeat_interleave(4)] = torch.nan
    wanted = products.bfloat16().float()
    for got, rows in ((out[:, :128], scales == scales), (out[:, 128:], scales < codes.SMALL_SCALE)):
        got = got.contiguous().view(torch.bfloat16).float()[rows]
        assert torch.equal(got.isnan(), wanted[rows].isnan())
        wrong = (got != wanted[rows]) & ~got.isnan()
        assert wrong.float().mean() < 2e-3
        error, size = (got - products[rows]).abs(), products[rows].abs()
        assert (error <= size * (2**-8 + 2**-16) + 2**-132)[~got.isnan()].all()
