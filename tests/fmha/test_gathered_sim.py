"""The gathered-attention kernel for sm_90a, in the simulator, against the reference."""

import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Uint32
from gathered_cases import O_TOLERANCE, judge, judge_lse, random_case
from suites import long

from warpspec.common.compile import fake_rows, resources
from warpspec.common.launch import SIMULATED, Kernel
from warpspec.fmha import merge
from warpspec.fmha.gathered import dense, gathered_attention, launch, ops
from warpspec.fmha.gathered.config import GatheredConfig, RowsConfig
from warpspec.fmha.gathered.convert import to_bf16

TARGET = SIMULATED["sm_90a"]


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    """Backend "sim" runs the kernel for sm_90a."""
    monkeypatch.setattr(ops, "target_of", lambda device: TARGET)


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
def test_against_reference(heads, slots, options):
    """Queries that see all, a part, nothing; slots of no row; NaN in every row that is not seen."""
    case = random_case(4, heads, slots, **{"num_splits": 1, **options})
    got = compare(case)
    assert not got[2].any()
    if heads == 8:  # the same kernel: NaN that is seen, large and small scales, rows on which all depends
        numbers = case.key_sets[0].pool
        numbers.write(numbers_slots(case, 0, 1), torch.full((1, 512), torch.nan).bfloat16())
        numbers.write(numbers_slots(case, 1, 0), (1e4 * torch.randn(1, 512)).bfloat16())
        numbers.write(numbers_slots(case, 1, 1), (1e-3 * torch.randn(1, 512)).bfloat16())
        got = compare(case)
        assert got[0].isnan().all() and got[1].isfinite().all()


def numbers_slots(case, token, number):
    """The number-th slot that a query sees, [1]."""
    slots = case.key_sets[0].slots[token, : case.key_sets[0].lengths[token]]
    seen = slots[(slots >= 0) & (slots < case.key_sets[0].pool.capacity)]
    return seen[number : number + 1]


@pytest.mark.long
def test_states_merge():
    case = random_case(2, 16, (70, 70), sink=False, rotate=False, lse=False)
    states = [
        gathered_attention(case.q, [k], normalize=False, num_splits=1, backend="sim") for k in case.key_sets
    ]
    wanted = gathered_attention(case.q, case.key_sets, backend="reference")
    assert judge(merge(states)[0], wanted) < O_TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"format": "bf16", "rotate": False}])
def test_rows_brought_together(monkeypatch, options):
    """What sm100 does: bits of the rows, then attention over them; a workspace of two queries at a time."""
    monkeypatch.setattr(ops, "target_of", lambda device: SIMULATED["sm_100a"])
    monkeypatch.setattr(dense, "WORKSPACE_BYTES", 2 * 90 * dense.ROW_BYTES)
    assert not compare(random_case(5, 8, (20, 70), **options))[2].any()
    states = random_case(2, 16, (30, 40), sink=False, rotate=False, lse=False)
    parts = [gathered_attention(states.q, [k], normalize=False, backend="sim") for k in states.key_sets]
    wanted = gathered_attention(states.q, states.key_sets, backend="reference")
    assert judge(merge(parts)[0], wanted) < O_TOLERANCE


@pytest.mark.parametrize("format", ["v4-fp8", "bf16"])
def test_gathered_rows_bits(format):
    """Rows as ``LatentPool.read`` has them in bf16; zeros and -inf where there are none."""
    case = random_case(3, 8, (20, 33), format=format)
    rows = torch.full((3, 53, 512), torch.nan, dtype=torch.bfloat16)
    bias = torch.full((3, 53), 7.0)
    sets = [part for k in case.key_sets for part in (k.pool.words, k.slots, k.lengths, k.pool.page_size)]
    config = RowsConfig(format, 2, (True, True))
    dense.GATHER_ROWS.run(
        config, SIMULATED["sm_100a"], rows.view(torch.uint32), bias, *sets, None, None, None, 1
    )
    wanted, seen = [], []
    for k in case.key_sets:
        here = (
            (torch.arange(k.slots.shape[1]) < k.lengths[:, None])
            & (k.slots >= 0)
            & (k.slots < k.pool.capacity)
        )
        wanted.append(k.pool.read(torch.where(here, k.slots, -1))), seen.append(here)
    seen = torch.cat(seen, 1)
    assert torch.equal(rows.float(), torch.cat(wanted, 1))
    assert bias[seen].eq(0).all() and bias[~seen].eq(-torch.inf).all()


def test_budgets():
    """Few words spill, none of them in O: the producer's addresses."""
    config = launch.make_plan(problem_of(8, (130, 70)), TARGET).config
    for found in resources(launch.GATHERED.compiled(config, "sm_90a")).values():
        assert found.local_bytes <= 96
    assert config.smem_bytes <= config.smem_limit and isinstance(config, GatheredConfig)


def problem_of(heads, slots):
    from warpspec.fmha.gathered.problem import GatheredProblem

    return GatheredProblem(
        4, heads, "v4-fp8", slots, (True,) * len(slots), 512**-0.5, True, True, True, True, num_splits=1
    )


class Convert:
    """Words of four e4m3 codes, under a scale each, to bf16."""

    @cute.jit
    def __call__(self, words: cute.Tensor, scales: cute.Tensor, out: cute.Tensor, stream: CUstream):
        self.kernel(words, scales, out).launch(grid=(scales.shape[0], 1, 1), block=(64, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, words: cute.Tensor, scales: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        low, high = to_bf16([words[thread]], scales[block])
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
