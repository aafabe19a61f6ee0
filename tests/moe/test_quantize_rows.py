"""The activation quantiser, compiled for sm_100a, in the simulator: the bits of the reference."""

import pytest
import torch
from helpers.suites import long
from hypothesis import given, settings
from hypothesis import strategies as st

from warpspec.common import nvfp4
from warpspec.common.compile import resources
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.moe.operands import QuantizedRows, first_atoms
from warpspec.moe.permute import sort_tokens
from warpspec.moe.quantize_rows import QuantizeConfig, quantize_kernel, quantize_rows

POISON = 0xA5


def poisoned(rows, k, experts):
    out = QuantizedRows.empty(rows, k, experts, "cpu", row_scale=True)
    out.data.fill_(POISON), out.scales.fill_(POISON), out.row_scale.fill_(torch.nan)
    return out


def check(x, ids, experts):
    """Kernel against `from_rows` of the gathered rows; nothing else is written."""
    tokens = sort_tokens(ids, experts)
    out = poisoned(ids.numel(), x.shape[1], experts)
    before = x.clone()
    report = quantize_rows(x, tokens.position, tokens.offsets, out)
    assert torch.equal(x.view(torch.int16), before.view(torch.int16))
    used = int(tokens.offsets[-1])
    rows = x[tokens.source // ids.shape[1]]
    expected = QuantizedRows.from_rows(rows, tokens.offsets)
    half = x.shape[1] // 2
    assert torch.equal(out.data[:used, :half], expected.data[:used, :half])
    assert torch.equal(out.row_scale[:used].view(torch.int32), expected.row_scale[:used].view(torch.int32))
    assert (out.data[used:] == POISON).all() and (out.data[:, half:] == POISON).all()
    assert out.row_scale[used:].isnan().all()
    start = 0
    atoms_written = torch.zeros(len(out.scales), dtype=torch.bool)
    for end, atom in zip(tokens.offsets.tolist(), first_atoms(tokens.offsets).tolist(), strict=True):
        atoms = -(-(end - start) // 128)
        columns = out.scales.shape[1] * 4  # with those after the row, which are 0
        parts = [
            nvfp4.unswizzle_scales(q.scales[atom : atom + atoms], atoms * 128, columns).view(torch.uint8)
            for q in (out, expected)
        ]
        assert torch.equal(parts[0][: end - start], parts[1][: end - start])
        assert (parts[0][end - start :] == POISON).all()
        atoms_written[atom : atom + atoms] = True
        start = end
    assert (out.scales[~atoms_written] == POISON).all()
    return report


def random_case(tokens, k, choices, experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=generator) * torch.exp2(
        4 * torch.randn(tokens, 1, generator=generator)
    )
    ids = torch.randint(-1, experts, (tokens, choices), generator=generator, dtype=torch.int32)
    return x.bfloat16(), ids


@pytest.mark.parametrize(
    ("tokens", "k", "choices", "experts"),
    [
        (1, 16, 1, 1),
        (3, 80, 2, 4),
        (5, 2880, 4, 32),
        long(2, 4096, 7, 257),
        (2, 7168, 7, 385),
        (300, 64, 2, 3),
    ],
)
def test_against_reference(tokens, k, choices, experts):
    report = check(*random_case(tokens, k, choices, experts), experts)
    for launch in report.launches:
        assert launch.local_bytes == 0


@pytest.mark.long
@settings(max_examples=15)
@given(
    st.integers(1, 20),
    st.sampled_from([(3, 9), (70, 1)]),  # each is compiled
    st.integers(1, 40),
    st.integers(0, 1000),
)
def test_any_sizes(tokens, compiled_for, experts, seed):
    blocks, choices = compiled_for
    check(*random_case(tokens, 16 * blocks, choices, experts, seed), experts)


def test_all_tokens_to_one_expert_and_duplicates():
    x, ids = random_case(140, 48, 3, 5)
    check(x, torch.full_like(ids, 3), 5)
    check(x, torch.full_like(ids, -1), 5)
    check(x, torch.full_like(ids, 9), 5)


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e-23, 1e-6, 1e30, 1e37])
def test_magnitudes(magnitude):
    x, ids = random_case(6, 176, 2, 3)
    check((x.float() * magnitude).bfloat16(), ids, 3)


def test_nan_inf_and_zeros():
    x, ids = random_case(8, 112, 2, 3)
    ids[:, 0] = torch.arange(8) % 3
    x[1, 17], x[2, 100], x[3, 3], x[4, 111] = torch.nan, torch.inf, -torch.inf, -torch.nan
    x[5], x[6], x[7, 16:48] = 0.0, -0.0, 0.0
    check(x, ids, 3)


def test_rows_may_lie_apart():
    x, ids = random_case(4, 64, 2, 3)
    wide = torch.full((4, 96), torch.nan, dtype=torch.bfloat16)
    wide[:, 8:72] = x
    check(wide[:, 8:72], ids, 3)


@pytest.mark.parametrize(("k", "choices"), [(2880, 4), long(4096, 7), (7168, 7), long(16384, 9)])
def test_no_spills(k, choices):
    for kernel in resources(quantize_kernel.compiled(QuantizeConfig(k, choices), "sm_100a")).values():
        assert kernel.local_bytes == 0 and kernel.registers <= 128


def test_empty():
    out = poisoned(0, 32, 2)
    assert (
        quantize_rows(torch.zeros(0, 32).bfloat16(), torch.zeros(0, 2).int(), torch.zeros(2).int(), out)
        is None
    )


def test_an_architecture_without_the_conversion_is_refused():
    x, ids = random_case(2, 32, 1, 2)
    tokens, out = sort_tokens(ids, 2), poisoned(2, 32, 2)
    with pytest.raises(UnsupportedProblem, match="sm_90a has no conversion to e2m1"):
        quantize_rows(x, tokens.position, tokens.offsets, out, target=SIMULATED["sm_90a"])
    assert (out.data == POISON).all()
