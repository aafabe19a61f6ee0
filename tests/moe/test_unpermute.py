"""The un-permute kernel, compiled for both architectures, in the simulator against its definition."""

import pytest
import torch
from helpers.suites import long

from warpspec.common.compile import resources
from warpspec.common.launch import SIMULATED
from warpspec.moe.permute import UNSENT, sort_tokens
from warpspec.moe.unpermute import UnpermuteConfig, unpermute, unpermute_kernel

ARCHS = ("sm_100a", "sm_90a")


def case(tokens, width, choices, experts, seed=0):
    """(rows, NaN where nobody's; sorted tokens; weights)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts, (tokens, choices), generator=generator, dtype=torch.int32)
    ids[tokens // 2] = -1
    s = sort_tokens(ids, experts)
    rows = torch.randn(tokens * choices, width, generator=generator).bfloat16()
    rows[int(s.offsets[-1]) :] = torch.nan
    return rows, s, torch.randn(tokens, choices, generator=generator)


def expected(rows, s, weights):
    """fp64."""
    total = torch.zeros(weights.shape[0], rows.shape[1], dtype=torch.double)
    for t, positions in enumerate(s.position.tolist()):
        for j, position in enumerate(positions):
            if position >= 0:
                total[t] += weights[t, j].double() * rows[position].double()
    return total


@pytest.mark.parametrize(
    ("arch", "tokens", "width", "choices", "unsent"),
    [
        ("sm_100a", 1, 8, 1, False),
        ("sm_100a", 5, 2880, 4, False),
        long("sm_100a", 3, 1032, 7, False),
        ("sm_90a", 40, 64, 8, False),
        ("sm_90a", 3, 16, 9, True),
    ],
)
def test_against_definition(arch, tokens, width, choices, unsent):
    """unsent: one token's choice had no room."""
    rows, s, weights = case(tokens, width, choices, 6)
    out = torch.full((tokens, width), torch.nan, dtype=torch.bfloat16)
    exact = expected(rows, s, weights)
    if unsent:
        s.position[0, choices - 2], exact[0] = UNSENT, 0.0
    options = dict(unsent=unsent, target=SIMULATED[arch])
    report = unpermute(rows, s.position, weights, out, **options)
    if unsent:
        assert out[0].isnan().all()
        out[0] = 0.0
    # fp32 sums, then one rounding to bf16
    assert (out.double() - exact).abs().le(exact.abs() * 2**-8 * 1.01 + 1e-5).all()
    assert not out[tokens // 2].any()
    assert all(launch.local_bytes == 0 for launch in report.launches)
    again = torch.full_like(out, torch.nan)
    unpermute(rows, s.position, weights, again, **options)
    assert torch.equal(again[unsent:], out[unsent:])


def test_order_is_that_of_the_choices():
    """Sums whose result depends on the order, at any place of the rows."""
    rows = torch.tensor([[1.0], [2.0**30], [-(2.0**30)]]).repeat(1, 8).bfloat16()
    position = torch.tensor([[1, 2, 0], [1, 0, 2], [0, 1, 2]], dtype=torch.int32)
    out = torch.full((3, 8), torch.nan, dtype=torch.bfloat16)
    unpermute(rows, position, torch.ones(3, 3), out)
    assert out[:, 0].tolist() == [1, 0, 0]


def test_nan_stays_in_its_token():
    rows, s, weights = case(6, 24, 2, 3, seed=1)
    s.position[4] = torch.tensor([0, 1])
    rows[0] = torch.nan
    out = torch.zeros(6, 24, dtype=torch.bfloat16)
    unpermute(rows, s.position, weights, out)
    owners = (s.position == 0).any(1)
    assert torch.equal(out.isnan().any(1), owners) and owners.any() and not owners.all()


def test_rows_apart_and_empty():
    rows, s, weights = case(4, 40, 2, 3)
    wide = torch.full((4, 64), torch.nan, dtype=torch.bfloat16)
    unpermute(rows, s.position, weights, wide[:, 8:48])
    out = torch.empty(4, 40, dtype=torch.bfloat16)
    unpermute(rows, s.position, weights, out)
    assert torch.equal(wide[:, 8:48], out) and wide[:, :8].isnan().all() and wide[:, 48:].isnan().all()
    unpermute(rows, s.position[:, :0], weights[:, :0], out)
    assert not out.any()
    assert unpermute(rows, s.position[:0], weights[:0], out[:0]) is None


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("choices", [4, 9])
def test_no_spills(arch, choices):
    for kernel in resources(unpermute_kernel.compiled(UnpermuteConfig(choices), arch)).values():
        assert kernel.local_bytes == 0 and kernel.registers <= 128
