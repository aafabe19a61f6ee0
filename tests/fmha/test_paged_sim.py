"""Paged K and V in the sm100 kernel: the same result as of the same keys without pages."""

import pytest
import torch
from helpers import simulate
from helpers.attention_cases import LSE_TOLERANCE, O_TOLERANCE, relative_error
from helpers.attention_configs import configured
from helpers.page_layouts import FAR, PAGE_SIZES, paged
from helpers.pairwise import pairwise
from helpers.suites import long, long_but

from warpspec.common.compile import resources
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.fmha import attention
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm100 import ATTENTION, AttentionConfig
from warpspec.fmha.sm100.shapes import SHAPES, SHARED_SHAPES

BACKEND = "sim"
# Against the dense kernel in fp32, un-normalised: the same sums, but the simulator (like hardware) is free in
# the order in which products accumulate.
TOLERANCE = 2e-5
LENGTHS = (150, 200, 1, 0)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(lengths, page_size, *, seq_q, heads_q, heads_kv=1, head_dim=64, shared_kv=False, **options):
    """(arguments with dense K and V, arguments with pages). The first page of all rows is one."""
    batch, seq_k = len(lengths), -(-max(lengths) // page_size) * page_size
    dense = normal(2, batch, seq_k, heads_kv, head_dim, seed=1)
    dense[:, :, :page_size] = dense[:, :1, :page_size]
    (k_pages, v_pages), table = paged(dense, lengths, page_size)
    if batch > 1 and min(lengths[:2]) >= page_size:
        assert table[0, 0] == table[1, 0], "the first page is shared"
    options |= {
        "q": normal(batch, seq_q, heads_q, head_dim),
        "kv_lengths": torch.tensor(lengths, dtype=torch.int32),
        "normalize": False,
        "num_splits": 1,  # chosen from Sk it would differ: spare slots of a page table count as keys
    }
    v, v_pages = (None, None) if shared_kv else (dense[1], v_pages)
    return {**options, "k": dense[0], "v": v}, {**options, "k": k_pages, "v": v_pages, "page_table": table}


def run_unchecked(arguments):
    """State of the kernel, without the checks of the values of CPU tensors."""
    problem = AttentionProblem.of(**arguments, memory=False)
    o = torch.full(problem.o_shape, torch.nan)
    row_max, row_sum = torch.full((2, *problem.stat_shape), torch.nan)
    simulate.run_unchecked(arguments, o=o, row_max=row_max, row_sum=row_sum)
    return o, row_max, row_sum


def assert_same(expected, got):
    for name, a, b in zip(("o", "row_max", "row_sum"), expected, got, strict=True):
        assert a.isfinite().any()
        close = a.isclose(b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        assert close.all(), f"{name}: {int((~close).sum())} elements differ, at {(~close).nonzero()[0]}"


def assert_no_spills(config):
    (kernel,) = resources(ATTENTION.compiled(config, "sm_100a")).values()
    assert kernel.local_bytes == 0, "registers spill, or an array landed in local memory"


@pytest.mark.parametrize("page_size", long_but((16,), (*PAGE_SIZES, 48, 80, 96, 112, 256, 384)))
def test_pages_give_the_dense_result(page_size):
    dense, pages = inputs(LENGTHS, page_size, seq_q=3, heads_q=4, heads_kv=2, causal=True)
    assert_same(attention(**dense, backend=BACKEND), attention(**pages, backend=BACKEND))
    assert_no_spills(simulate.plan_for("sm_100a", **pages).config)


@pytest.mark.parametrize(
    "head_dim, page_size, shared_kv",
    [
        long(512, 16, True),
        long(128, 32, False),
        pytest.param(128, 128, True, marks=pytest.mark.long),
        pytest.param(256, 64, False, marks=pytest.mark.long),
        pytest.param(512, 128, False, marks=pytest.mark.long),
    ],
)
def test_pages_of_other_head_dims(head_dim, page_size, shared_kv):
    dense, pages = inputs((100, 40), page_size, seq_q=1, heads_q=8, head_dim=head_dim, shared_kv=shared_kv)
    assert_same(attention(**dense, backend=BACKEND), attention(**pages, backend=BACKEND))
    assert_no_spills(simulate.plan_for("sm_100a", **pages).config)


@pytest.mark.parametrize("far", long_but(FAR[:1], FAR))
def test_page_out_of_range_reads_as_zeros(far):
    """Where nothing checked the table: in a page that keys use, by TMA and by the exact path of rows that a
    NaN hidden from them may have reached."""
    page_size, page = 16, 2
    dense, pages = inputs(LENGTHS, page_size, seq_q=3, heads_q=4, heads_kv=2, causal=True)
    dense["v"][0, LENGTHS[0] - 1] = torch.nan  # the last query of batch row 0 sees it, the others do not
    last = divmod(LENGTHS[0] - 1, page_size)
    pages["v"][pages["page_table"][0, last[0]], last[1]] = torch.nan
    for name in "kv":
        dense[name][0, page * page_size : (page + 1) * page_size] = 0
    pages["page_table"][0, page] = far
    with pytest.raises(ValueError, match="page_table"):
        attention(**pages, backend=BACKEND)
    got = run_unchecked(pages)
    assert got[0][0, :2].isfinite().all() and got[0][0, 2].isnan().all()
    assert_same(attention(**dense, backend=BACKEND), got)


@pytest.mark.parametrize(
    "head_dim, page_size, shared_kv, bias_dtype",
    [
        long(64, 16, False, torch.bfloat16),
        pytest.param(128, 128, False, torch.float32, marks=pytest.mark.long),
        pytest.param(256, 64, True, torch.bfloat16, marks=pytest.mark.long),
        pytest.param(512, 32, True, torch.float32, marks=pytest.mark.long),
    ],
)
def test_bias_over_pages(head_dim, page_size, shared_kv, bias_dtype):
    """The bias counts keys through the page table; NaN in it at keys past the lengths, -inf here and there."""
    heads, seq_q = 4, 3
    dense, pages = inputs(
        LENGTHS, page_size, seq_q=seq_q, heads_q=heads, head_dim=head_dim, shared_kv=shared_kv, causal=True
    )
    bias = 2 * normal(len(LENGTHS), heads, seq_q, pages["page_table"].shape[1] * page_size, seed=2)
    bias[bias < -2] = -torch.inf
    for row, length in enumerate(LENGTHS):
        bias[row, ..., length:] = torch.nan
    pages["bias"] = bias.to(bias_dtype)
    if head_dim != 64:  # the dense kernel is one more to compile; the reference knows pages too
        dense["bias"] = pages["bias"][..., : dense["k"].shape[1]].contiguous()
        assert_same(attention(**dense, backend=BACKEND), attention(**pages, backend=BACKEND))
    reference, got = (attention(**pages, backend=name) for name in ("reference", BACKEND))
    torch.testing.assert_close(got.lse, reference.lse, rtol=0, atol=LSE_TOLERANCE)
    o, expected = (
        state.o / state.row_sum.clamp(min=1e-30).transpose(1, 2)[..., None] for state in (got, reference)
    )
    assert relative_error(o, expected) <= O_TOLERANCE[torch.bfloat16]
    assert_no_spills(simulate.plan_for("sm_100a", **pages).config)


def test_no_pages_at_all():
    _, pages = inputs(LENGTHS, 16, seq_q=3, heads_q=4, heads_kv=2, causal=True)
    nothing = {"k": pages["k"][:0], "v": pages["v"][:0], "kv_lengths": torch.zeros_like(pages["kv_lengths"])}
    state = attention(**{**pages, **nothing}, backend=BACKEND)
    assert (state.o == 0).all() and (state.row_max == -torch.inf).all() and (state.row_sum == 0).all()


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("page_size, words", [
    (1, "set the page size .* to 16 or more"), (8, "to 16 or more"), (24, "multiple of 16 keys up to 128"),
    (144, "or a multiple of 128$"),
])  # fmt: skip
def test_page_sizes_that_are_not_supported_are_named(arch, page_size, words):
    _, pages = inputs((40,), page_size, seq_q=1, heads_q=1)
    with pytest.raises(UnsupportedProblem, match=f"page_size={page_size} is not supported.*{words}"):
        simulate.plan_for(arch, **pages)


@pytest.mark.long
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_of_split_keys(page_size):
    dense, pages = inputs((900, 300), page_size, seq_q=2, heads_q=4, causal=True)
    dense["num_splits"] = pages["num_splits"] = 3
    # The parts of the keys follow from the length, so they are the same ones.
    assert_same(attention(**dense, backend=BACKEND), attention(**pages, backend=BACKEND))


@pytest.mark.long
@pytest.mark.parametrize(
    ("page_size", "head_dim", "shared_kv", "band"),
    pairwise(list(PAGE_SIZES), list(SHAPES), [False, True], [False, True]),
)
def test_compiles_without_spills(page_size, head_dim, shared_kv, band):
    for shape in (SHARED_SHAPES if shared_kv else SHAPES)[head_dim]:
        assert_no_spills(
            configured(
                AttentionConfig,
                head_dim=head_dim,
                shape=shape,
                shared_kv=shared_kv,
                causal=band,
                has_left=band,
                has_kv_lengths=True,
                page_size=page_size,
            )
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("head_dim", "shared_kv", "page_size", "dtype", "way"),
    pairwise(
        list(SHAPES),
        [False, True],
        list(PAGE_SIZES),
        [torch.bfloat16, torch.float32],
        ["whole", "causal", "splits"],
    ),
)
def test_compiles_with_a_bias_without_spills(head_dim, shared_kv, page_size, dtype, way):
    """Pages cost the load warp registers, a bias the softmax warps, and both share the kernel's allocation."""
    k = torch.empty(20, page_size, 1, head_dim, dtype=torch.bfloat16)
    q = torch.empty(2, 20, 4, head_dim, dtype=torch.bfloat16)
    table, lengths = torch.zeros(2, 9, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    causal = way == "causal"
    bias = torch.empty(2, 4, 20, 9 * page_size, dtype=dtype)
    problem = AttentionProblem.of(
        q, k, None if shared_kv else k, bias=bias, page_table=table, kv_lengths=lengths, causal=causal,
        window=(50, None) if causal else None, return_lse=True,
    )  # fmt: skip
    assert_no_spills(AttentionConfig.of(problem, SIMULATED["sm_100a"], splits=way == "splits"))
