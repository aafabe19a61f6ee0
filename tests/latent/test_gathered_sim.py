"""The gathered-attention kernels in the simulator, against the reference."""

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Uint32
from helpers.gathered_cases import O_TOLERANCE, judge, judge_lse, pool_of_rows, random_case
from helpers.suites import long

from warpspec.common.compile import fake_rows, resources
from warpspec.common.launch import SIMULATED, Kernel, simulating
from warpspec.fmha import merge
from warpspec.latent.gathered import KeySet, gathered_attention, launch, problem
from warpspec.latent.gathered.convert import some_large, to_bf16
from warpspec.latent.projection import Float8Tensor

TARGET = SIMULATED["sm_90a"]


@pytest.fixture(params=["sm_90a", "sm_100a"])
def simulated(request):
    """Backend "sim" runs the kernel for either architecture."""
    with simulating(request.param):
        yield request.param


def compare(case):
    got = gathered_attention(case.q, case.key_sets, backend="sim", **case.options)
    wanted = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
    if case.options.get("return_lse"):
        judge_lse(got[1], wanted[1])
        got, wanted = got[0], wanted[0]
    assert judge(got, wanted) < O_TOLERANCE
    return got


@pytest.mark.parametrize(
    ("heads", "slots", "options"),
    [
        (8, (130, 70), {}),
        long(128, (64, 65, 1), {}),
        long(96, (70,), {"format": "bf16"}),
        long(64, (200,), {"lengths": False, "sink": False, "rotate": False, "lse": False}),
        long(64, (100, 300), {"num_splits": 3}),
    ],
)
def test_against_reference(simulated, monkeypatch, heads, slots, options):
    """Queries that see all, a part, nothing; slots of no row; NaN in every row that is not seen."""
    case = random_case(3, heads, slots, **{"num_splits": 1, **options})
    got = compare(case)
    assert not got[2].any()
    if heads == 8:  # the same kernel
        # NaN that is seen, large and small scales, lengths and positions out of range
        monkeypatch.setattr(problem, "check_range", lambda *arguments: None)  # as on a GPU
        case.key_sets[0].lengths[0], case.key_sets[1].lengths[2] = 10**6, -10
        case.options["rotate_back"][1][1] = 4096
        numbers = case.key_sets[0].pool
        numbers.write(numbers_slots(case, 0, 1), torch.full((1, 512), torch.nan).bfloat16())
        generator = torch.Generator().manual_seed(0)
        large, small = (scale * torch.randn(1, 512, generator=generator) for scale in (1e6, 1e-3))
        numbers.write(numbers_slots(case, 1, 0), large.bfloat16())
        numbers.write(numbers_slots(case, 1, 1), small.bfloat16())
        got = compare(case)
        assert got[0].isnan().all() and not got[2].any()
        assert got[1, :, -64:].isnan().all() and got[1, :, :-64].isfinite().all()


@pytest.mark.parametrize("format", ["v4-fp8", long("bf16")])
@pytest.mark.usefixtures("check_order")
def test_one_cta(simulate_as, format):
    """Queries one after another on one CTA, of no, one and many tiles that end anywhere; keys missing at a tile's begin
    and end, or all of it; scales of both sizes side by side; pages of one row. What no query selects is NaN."""
    simulate_as("sm_90a", sm_count=1)
    counts = torch.tensor([[130, 70], [1, 0], [0, 0], [64, 0], [65, 64], [0, 8], [128, 1]], dtype=torch.int32)
    case = random_case(len(counts), 8, (130, 70), format=format, num_splits=1)
    generator = torch.Generator().manual_seed(1)
    for number, (k, page_size) in enumerate(((130, 33), (70, 1))):
        pool = pool_of_rows(3 * k, page_size, format, generator)
        slots = torch.randint(1, 3 * k, (len(counts), k), generator=generator).to(torch.int32)
        slots[torch.arange(k) >= counts[:, number, None]] = pool.capacity - 1  # a row of NaN
        case.key_sets[number] = KeySet(pool, slots, counts[:, number].contiguous())
    first, second = (each.slots for each in case.key_sets)
    first[0, :8], first[3, 56:64], first[4, 64], first[6, :64] = -1, -1, -1, -1
    second[0, 8:16], second[4, 1:] = -1, -1
    columns = torch.cat([torch.arange(64), torch.arange(256, 320)])  # a block of each half
    case.q[..., columns] = 0  # so that other keys are seen beside the large one
    row = torch.randn(1, 512, generator=generator)
    row[:, columns] *= 1e6
    case.key_sets[0].pool.write(torch.tensor([0]), row.bfloat16())
    first[0, 11], first[1, 0], first[6, 127] = 0, 0, 0
    got, lse = gathered_attention(case.q, case.key_sets, backend="sim", **case.options)
    wanted, wanted_lse = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
    judge_lse(lse, wanted_lse)
    large = torch.zeros(512, dtype=torch.bool)
    large[columns] = True
    assert judge(got[..., large], wanted[..., large]) < O_TOLERANCE
    assert judge(got[..., ~large], wanted[..., ~large]) < O_TOLERANCE
    assert not got[2].any() and got.isfinite().all()


def numbers_slots(case, token, number):
    """The number-th slot that a query sees, [1]."""
    slots = case.key_sets[0].slots[token, : case.key_sets[0].lengths[token]]
    seen = slots[(slots >= 0) & (slots < case.key_sets[0].pool.capacity)]
    return seen[number : number + 1]


@pytest.mark.long
def test_states_merge(simulated):
    case = random_case(2, 16, (70, 70), sink=False, rotate=False, lse=False)
    states = [
        gathered_attention(case.q, [k], normalize=False, num_splits=1, backend="sim") for k in case.key_sets
    ]
    wanted = gathered_attention(case.q, case.key_sets, backend="reference")
    assert judge(merge(states)[0], wanted) < O_TOLERANCE


@pytest.mark.parametrize(
    ("simulated", "splits"),
    [("sm_100a", 1), long("sm_100a", 3), long("sm_90a", 1), long("sm_90a", 3)],
    indirect=["simulated"],
)
def test_float8(simulated, splits):
    """The bits of quantising the result in bf16, in the epilogue and where splits are combined."""
    case = random_case(3, 9, (100, 70), num_splits=splits)
    rows = case.key_sets[0].pool
    rows.write(numbers_slots(case, 0, 1), torch.full((1, 512), torch.nan).bfloat16())
    wanted, lse = gathered_attention(case.q, case.key_sets, backend="sim", **case.options)
    got, its_lse = gathered_attention(case.q, case.key_sets, backend="sim", out_format="fp8", **case.options)
    wanted = Float8Tensor.quantize(wanted)
    assert torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(got.scales.view(torch.int32), wanted.scales.view(torch.int32))
    assert wanted.scales[0].isnan().all() and wanted.scales[1].isfinite().all() and not wanted.values[2].any()
    assert torch.equal(lse.view(torch.int32), its_lse.view(torch.int32))


def test_budgets():
    """Nothing spills: a word that is loaded would be waited for where it is put away."""
    for target in (TARGET, SIMULATED["sm_100a"]):
        config = launch.make_plan(problem_of(8, (130, 70)), target).config
        for found in resources(
            launch.GATHERED.of(target.architecture).kernel.compiled(config, target.arch)
        ).values():
            assert found.local_bytes == 0


def problem_of(heads, slots):
    from warpspec.latent.gathered.problem import GatheredProblem

    return GatheredProblem(
        4, heads, "v4-fp8", slots, (True,) * len(slots), 512**-0.5, True, True, True, True, num_splits=1
    )


class Convert:
    """Words of four e4m3 codes, under a scale each, to bf16: in one multiplication where the scale is not large."""

    @cute.jit
    def __call__(self, words: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, stream: CUstream):
        self.kernel(words, scales, out).launch(grid=(scales.shape[0], 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, words: cute.Tensor, scales: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        scale = scales[block]
        low, high = to_bf16([words[thread]], scale)
        if not some_large(Uint32(1) | scale << 16):
            low, high = to_bf16([words[thread]], scale, True)
        out[block, 2 * thread], out[block, 2 * thread + 1] = low, high


def test_conversion_is_exact():
    """Every e4m3 code under scales of all sizes: the fp32 product in bf16; NaN for all four where one is NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.tensor([0, 1, 20, 100, 126, 127, 128, 134, 135, 140, 200, 245, 255])
    out = torch.full((len(scales), 128), 7, dtype=torch.uint32)
    kernel = Kernel("test.convert", lambda _: (Convert(), *(fake_rows(Uint32, rank) for rank in (1, 1, 2))))
    kernel.run(None, TARGET, codes.view(torch.uint32), scales.to(torch.uint32), out)
    got = out.view(torch.bfloat16).float()
    values = codes.view(torch.float8_e4m3fn).double()
    wanted = values * torch.exp2(scales[:, None].double() - 127)
    wanted[:, values.unflatten(0, (64, 4)).isnan().any(1).repeat_interleave(4)] = torch.nan
    wanted[scales == 255] = torch.nan
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0).bfloat16().float())
