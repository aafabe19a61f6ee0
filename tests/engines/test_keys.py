"""What engines share: page tables from slots, and settings that are refused."""

import math

import pytest
import torch

from warpspec.common.errors import UnsupportedProblem
from warpspec.engines import keys, queries


@pytest.mark.parametrize("lengths", [(40, 0, 16, 1), (1,), (0, 0, 33)])
def test_page_table_from_slots(lengths):
    """Every key is found again through the table; requests' pages lie anywhere."""
    page, generator = 16, torch.Generator().manual_seed(len(lengths))
    pages = torch.randperm(32, generator=generator)
    slots, used = [], 0
    for length in lengths:
        count = -(-length // page)
        own = pages[used : used + count]
        used += count
        slots.append((own[:, None] * page + torch.arange(page)).flatten()[:length])
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    listed = torch.cat(slots)
    table = keys.page_table(listed, cu, page, max(lengths))
    assert table.dtype == torch.int32 and table.shape == (len(lengths), -(-max(lengths) // page))
    assert table.amin() >= 0 and table.amax() < 32  # past a request's end as well
    for row, expected in zip(table, slots, strict=True):
        position = torch.arange(len(expected))
        assert torch.equal(row[position // page] * page + position % page, expected)
    found = keys.slots_of_last(table, torch.tensor(lengths), page, trash=999)
    assert found.tolist() == [int(own[-1]) if len(own) else 999 for own in slots]


@pytest.mark.parametrize("page", [1, 8, 24, 144, 0, -16])
def test_page_sizes_that_are_refused(page):
    with pytest.raises(UnsupportedProblem, match=f"--page.*got {page}; set it to 16, 32, 64 or 128"):
        keys.check_page_size(page, "--page")


def test_settings_that_are_served():
    for page in (16, 48, 128, 256, 384):
        keys.check_page_size(page, "--page")
    assert keys.window_of(128, counts_own=True) == (127, 0) and keys.window_of(128, counts_own=False) == (
        128,
        0,
    )
    assert keys.window_of(None, counts_own=True) is None and keys.window_of(0, counts_own=True) is None
    slots = torch.arange(50)[:, None, None].expand(50, 2, 64)
    assert keys.pages_of(slots, 16).shape == (3, 16, 2, 64)


def test_importing_the_package_imports_no_engine():
    import subprocess
    import sys

    code = (
        "import sys, warpspec.engines, warpspec.engines.vllm, warpspec.engines.sglang\n"
        "print([name for name in ('torch', 'transformers', 'vllm', 'sglang', 'cutlass') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_queries_of_latent_attention(monkeypatch):
    """Rounded on Hopper if there are more than 32 rows, unless the variable says otherwise."""
    cpu = torch.device("cpu")
    monkeypatch.setenv(queries.VARIABLE, "")
    assert queries.least_rows(cpu) == math.inf
    monkeypatch.setattr(queries, "resolve_backend", lambda *_: "sm90")
    assert queries.least_rows(cpu) == 33
    monkeypatch.setenv(queries.VARIABLE, "16-bit")
    assert queries.least_rows(cpu) == math.inf
    monkeypatch.setattr(queries, "resolve_backend", lambda *_: "sm100")
    monkeypatch.setenv(queries.VARIABLE, "e4m3")
    assert queries.least_rows(cpu) == 0
    monkeypatch.setenv(queries.VARIABLE, "bf16")
    with pytest.raises(ValueError, match=r"WARPSPEC_MLA_QUERIES: must be one of e4m3, 16-bit, got 'bf16'"):
        queries.least_rows(cpu)
