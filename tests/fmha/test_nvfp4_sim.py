"""NVFP4 keys and values in kernels, in the simulator, against FP32 on dequantised values."""

from dataclasses import replace

import pytest
import torch
from helpers.float8_cases import NVFP4, Case, check
from helpers.suites import long

from warpspec import sim
from warpspec.common.launch import simulating
from warpspec.fmha import attention, attention_varlen, launch
from warpspec.fmha.expand import may_expand

FP16 = torch.float16
PAGED = Case(
    1, 150, (16, 2), batch=2, page=16, lengths=(150, 33), scale="request", swizzled=True, by_head=True
)
CASES = [
    Case(1, 70, (4, 1), 64, page=16, lengths=(68,), swizzled=True),
    long(PAGED),
    long(Case(1, 4100, (8, 1), swizzled=True)),  # a CTA for each SM
    long(Case(70, 140, (2, 1), 64, dtype=FP16, window=(90, 0), sink=True, nan=True, swizzled=True)),
    long(Case(1, 300, (16, 2), 64, batch=2, lengths=(300, 17), splits=2, scale="tensor")),
    long(Case(1, 200, (8, 1), 256, dtype=FP16, scale=None, swizzled=True)),
    long(Case(130, 260, (2, 1), 128, causal=True, nan=True)),
    long(Case(70, 140, (2, 1), 256, causal=True)),
    long(Case(3, 200, (8, 2), 128, dtype=FP16, causal=True, shared=True)),
    long(Case(2, 200, (8, 2), 128, normalize=False, page=64, lengths=(190,))),
    long(Case(4, 300, (4, 1), 64, causal=True, nan=True)),
    long(Case(3, 200, (32, 2), 128, batch=2, page=16, lengths=(200, 33))),
]


BLACKWELL = [
    Case(70, 140, (2, 1), 64, window=(90, 0), sink=True, nan=True, swizzled=True),
    *(long(*case.values) if hasattr(case, "values") else long(case) for case in CASES),
]


def always(choices, problem, target) -> bool:
    """Stands in for ``plan.expanding.expands``."""
    return may_expand(problem)


def run(arguments, arch="sm_90a"):
    with simulating(arch, seed=1):
        results = attention(**arguments, return_lse=arguments["normalize"], backend="sim")
    assert all(each.local_bytes == 0 for each in sim.last_report().launches)
    return results


@pytest.mark.parametrize("case", CASES)
def test_against_reference(case):
    check(replace(case, float8=NVFP4), run)


@pytest.mark.parametrize("case", BLACKWELL)
def test_against_reference_on_blackwell(case):
    check(replace(case, float8=NVFP4), lambda arguments: run(arguments, "sm_100a"))


@pytest.mark.parametrize(
    "case",
    [
        Case(5, 20, (2, 1), 64, batch=2, page=16, lengths=(20, 3), swizzled=True, by_head=True),
        long(Case(70, 140, (2, 1), 64, dtype=FP16, causal=True, float8=torch.float8_e5m2, nan=True)),
        long(Case(70, 140, (2, 1), 128, dtype=FP16, causal=True, nan=True)),
        long(Case(70, 140, (2, 1), 256, normalize=False, window=(30, 0))),
    ],
)
def test_dequantised_before(case, monkeypatch):
    """Keys and values that many query rows meet become 16-bit tensors first."""
    monkeypatch.setattr(launch, "expands", always)
    launch.prepare.cache_clear()
    check(case if case.float8 == torch.float8_e5m2 else replace(case, float8=NVFP4), run)
    first = sim.last_report().launches[0]
    assert "Expand" in first.kernel and first.grid[1:] == (2, 1)  # only x takes more than 65535 batch rows
    launch.prepare.cache_clear()


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 150, (4, 2), 64, batch=3, page=16, lengths=(143, 0, 20), swizzled=True),
        long(Case(1, 163, (4, 2), 64, batch=3, dtype=FP16, lengths=(143, 0, 20))),
    ],
)
def test_packed_queries_dequantised_before(case, monkeypatch):
    """The pages of packed requests become a tensor with a row for each request, packed keys a tensor of packed rows;
    one request has no key, one few queries."""
    monkeypatch.setattr(launch, "expands", always)
    launch.prepare.cache_clear()
    counts = (40, 3, 9)
    arguments = replace(case, float8=NVFP4).arguments() | {
        "causal": True,
        "max_seqlen_k": 1,
    }  # a hint: too small
    arguments["q"] = q = torch.randn(sum(counts), 4, 64, generator=torch.Generator().manual_seed(5)).to(
        case.dtype
    )
    starts = torch.tensor([0, 40, 43, 52], dtype=torch.int32)
    if not case.page:  # five more rows are of nobody, and NaN
        for name in ("k", "v", "k_block_scales", "v_block_scales"):
            rows = arguments[name]
            arguments[name] = torch.cat([rows[0, :143], rows[2, :20], rows[1, :5]])
        arguments["cu_seqlens_k"] = torch.tensor([0, 143, 143, 163], dtype=torch.int32)
        del arguments["kv_lengths"]
    del arguments["normalize"], arguments["window"], arguments["num_splits"]
    call = dict(cu_seqlens_q=starts, max_seqlen_q=40, **arguments)
    with simulating("sm_90a", seed=1):
        got = attention_varlen(**call, backend="sim")
    assert "Expand" in sim.last_report().launches[0].kernel
    wanted = attention_varlen(**call, backend="reference").float()
    assert got[40:43].eq(0).all() and not q.isnan().any()
    assert (got.float() - wanted).norm() < 4e-3 * wanted.norm()
    launch.prepare.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", [PAGED, Case(130, 260, (2, 1), 128, causal=True)])
def test_order_is_clean(case, arch, check_order):
    check(replace(case, float8=NVFP4), lambda arguments: run(arguments, arch))
