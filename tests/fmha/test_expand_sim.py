"""Keys and values in codes that a launch dequantises before attention (``fmha.expand``), in the simulator, against FP32
on dequantised values."""

from dataclasses import replace

import pytest
import torch
from helpers.float8_cases import NVFP4, Case, check
from helpers.suites import long

from warpspec import sim
from warpspec.common.launch import simulating
from warpspec.fmha import attention, attention_varlen, expand, launch
from warpspec.fmha.expand import may_expand

FP16 = torch.float16


@pytest.fixture
def first(monkeypatch) -> list[torch.Tensor]:
    """Keys and values are dequantised first. The tensors that become K and V, which are NaN before; two for a call."""
    found = []

    def empty(shape, dtype, device):
        found.append(torch.full(shape, torch.nan, dtype=dtype, device=device))
        return found[-1]

    monkeypatch.setattr(launch, "expands", lambda choices, problem, target: may_expand(problem))
    monkeypatch.setattr(expand, "empty", empty)
    launch.prepare.cache_clear()
    yield found
    launch.prepare.cache_clear()


def run(arguments):
    with simulating("sm_90a", seed=1):
        results = attention(**arguments, return_lse=arguments["normalize"], backend="sim")
    assert all(each.local_bytes == 0 for each in sim.last_report().launches)
    return results


@pytest.mark.parametrize(
    "case",
    [
        Case(5, 20, (2, 1), 64, batch=2, page=16, lengths=(20, 3), swizzled=True, by_head=True),
        long(Case(70, 140, (2, 1), 64, dtype=FP16, causal=True, float8=torch.float8_e5m2, nan=True)),
        long(Case(70, 140, (2, 1), 128, dtype=FP16, causal=True, nan=True)),
        long(Case(70, 140, (2, 1), 256, normalize=False, causal=True)),
    ],
)
def test_dequantised_before(case, first):
    """Keys and values that many query rows meet become 16-bit tensors first."""
    check(case if case.float8 == torch.float8_e5m2 else replace(case, float8=NVFP4), run)
    first = sim.last_report().launches[0]
    assert "Expand" in first.kernel and first.grid[1:] == (2, 1)  # only x takes more than 65535 batch rows


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 150, (4, 2), 64, batch=3, page=16, lengths=(143, 0, 20), swizzled=True),
        long(Case(1, 163, (4, 2), 64, batch=3, dtype=FP16, lengths=(143, 0, 20))),
    ],
)
def test_packed_queries_dequantised_before(case, first):
    """The pages of packed requests become a tensor with a row for each request, packed keys a tensor of packed rows;
    one request has no key, one few queries."""
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


@pytest.mark.parametrize(
    ("case", "starts"),
    [
        (
            Case(20, 300, (2, 1), 64, batch=4, page=16, lengths=(299, 0, 250, 7), window=(37, 0), sink=True),
            None,
        ),
        long(Case(20, 300, (2, 1), 64, batch=3, lengths=(299, 0, 250), window=(37, 5)), (200, 3, 20)),
        long(Case(70, 300, (2, 1), 128, window=(90, 0), dtype=FP16, nan=True), None),
    ],
)
def test_keys_in_front_of_windows_are_left_out(case, starts, first):
    """NaN stays where no query sees a key, and reaches no result."""
    case = replace(case, float8=NVFP4)
    if starts:
        arguments = case.arguments() | {"q_start": torch.tensor(starts, dtype=torch.int32)}
        (o, lse), (wanted, wanted_lse) = (
            run(arguments),
            attention(**arguments, return_lse=True, backend="reference"),
        )
        torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-3)
        assert (o.float() - wanted.float()).norm() < 4e-3 * wanted.float().norm()
    else:
        check(case, run)
    for request, length in enumerate(case.lengths or (case.keys,)):
        begin = max((starts[request] if starts else length - case.queries) - case.window[0], 0)
        for wide in first:
            written = ~wide[request].isnan().all(dim=(1, 2))
            assert written.nonzero().flatten().tolist() == list(range(begin, length))


@pytest.mark.parametrize("kv_format", [torch.float8_e4m3fn, long(NVFP4)])
def test_heads_are_dequantised_in_passes_within_the_memory(kv_format, first, monkeypatch):
    """Two KV heads where there is room for one: two passes in the same memory, of packed queries."""
    case = Case(
        1, 70, (4, 2), 64, batch=2, page=16, lengths=(65, 20), scale="request", sink=True, float8=kv_format
    )
    monkeypatch.setattr(expand, "MOST_BYTES", 2 * 2 * 80 * 64 * 2)
    arguments = case.arguments() | {"causal": True, "max_seqlen_q": 30, "return_lse": True}
    arguments["q"] = torch.randn(41, 4, 64, generator=torch.Generator().manual_seed(5)).to(case.dtype)
    arguments["cu_seqlens_q"] = torch.tensor([0, 30, 41], dtype=torch.int32)
    arguments["max_seqlen_k"] = 70
    del arguments["normalize"], arguments["window"], arguments["num_splits"]
    with simulating("sm_90a", seed=1):
        o, lse = attention_varlen(**arguments, backend="sim")
    launched = ["Expand" in each.kernel for each in sim.last_report().launches]
    assert launched == [True, False] * 2 and [wide.shape for wide in first] == [(2, 80, 1, 64)] * 2
    wanted, wanted_lse = attention_varlen(**arguments, backend="reference")
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-3)
    error = (o.float() - wanted.float()).norm(dim=(0, 2))
    assert (error < 4e-3 * wanted.float().norm(dim=(0, 2))).all()  # of each head
