"""Values of lengths, positions and page tables: what is checked, when, and what kernels do with unchecked ones."""

import pytest
import torch
from helpers.simulate import run_unchecked
from helpers.suites import long

from warpspec.fmha import attention, problem
from warpspec.fmha.problem import POSITION_LIMIT, AttentionProblem
from warpspec.fmha.values import DEBUG_VARIABLE, are_checked, check_values, debugging

CUDA = torch.device("cuda", 0)
SIZES = dict(seq_k=8, pages=9, page_size=4)
INT32 = torch.iinfo(torch.int32)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("kv_lengths", dict(kv_lengths=int32(7, 9)), r"0\.\.8 \(Sk\), got 9 at index 1 \(batch row 1\)"),
        ("kv_lengths", dict(kv_lengths=int32(-1, 3)), r"got -1 at index 0 \(batch row 0\)"),
        (
            "q_start",
            dict(q_start=int32(0, POSITION_LIMIT + 1)),
            rf"within \+-{POSITION_LIMIT}, got .* row 1\)",
        ),
        ("q_start", dict(q_start=int32(INT32.min, 0)), r"got -2147483648 at index 0"),
        (
            "page_table",
            dict(page_table=int32([0, 8], [9, -1])),
            r"0\.\.8 \(k has 9 pages\), got 9 at index \[1, 0\] \(batch row 1, entry 0\)",
        ),
        (
            "page_table",
            dict(page_table=int32([0, -3], [2, 1])),
            r"got -3 at index \[0, 1\] \(batch row 0, entry 1\)",
        ),
    ],
)
def test_wrong_values_are_named_with_their_place(name, changes, message):
    """On whatever device: nothing in the check asks which."""
    good = dict(kv_lengths=int32(7, 3), q_start=int32(-5, 9), page_table=int32([0, 8], [2, -1]))
    check_values(**good, **SIZES)
    with pytest.raises(ValueError, match=rf"^{name}: values must be .*{message}"):
        check_values(**{**good, **changes}, **SIZES)


def test_entries_past_the_length_may_hold_anything():
    table = int32([0, INT32.max], [-1, INT32.min])
    check_values(int32(4, 0), None, table, **SIZES)
    with pytest.raises(ValueError, match="page_table"):
        check_values(int32(5, 0), None, table, **SIZES)


def test_debug_variable(monkeypatch):
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    assert not debugging() and are_checked(torch.device("cpu")) and not are_checked(CUDA)
    for value, on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(DEBUG_VARIABLE, value)
        assert debugging() is on and are_checked(CUDA) is on and are_checked(torch.device("cpu"))
    monkeypatch.setenv(DEBUG_VARIABLE, "yes")
    with pytest.raises(ValueError, match=r"^WARPSPEC_DEBUG: must be 0 or 1, got 'yes'"):
        are_checked(CUDA)


def test_values_on_a_device_are_looked_at_in_debug_mode_only(monkeypatch):
    """CPU tensors stand for a GPU's."""
    monkeypatch.setattr(problem, "are_checked", lambda device: are_checked(CUDA))
    monkeypatch.delenv(DEBUG_VARIABLE, raising=False)
    q, pages = (torch.zeros(2, n, 1, 64, dtype=torch.bfloat16) for n in (3, 16))
    arguments = dict(q=q, k=pages, kv_lengths=int32(20, 5), page_table=int32([0, 2], [1, 0]))
    AttentionProblem.of(**arguments)
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    with pytest.raises(ValueError, match=r"^page_table: .*got 2 at index \[0, 1\]"):
        AttentionProblem.of(**arguments)


@pytest.mark.parametrize(("paged", "arch"), [long(False, "sm_100a"), (True, "sm_90a"), long(True, "sm_100a")])
def test_unchecked_values_read_nothing_out_of_bounds(paged, arch):
    """The simulator would name the access. Lengths and positions are clamped. The last batch row has good values and
    the right result."""
    batch, seq_q, page_size, slots = 8, 3, 16, 10
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch, seq_q, 2, 64, generator=generator).bfloat16()
    pages = torch.randn(2, batch * slots, page_size, 1, 64, generator=generator).bfloat16()
    table = torch.arange(batch * slots).view(batch, slots).int()
    dense = pages.view(2, batch, slots * page_size, 1, 64)
    far = (-1, INT32.max, INT32.min, 10**6)
    arguments = dict(
        kv_lengths=int32(-5, INT32.max, INT32.min, 10**6, 160, 160, 160, 97),
        q_start=int32(0, 0, 100, 100, INT32.max, INT32.min, INT32.max - 1, 94),
        causal=True,
        window=(50, None),
    )
    k, v = pages if paged else dense
    if paged:
        table[1:5, 3] = torch.tensor(far, dtype=torch.int32)
        arguments["page_table"] = table
    call = dict(arguments, q=q, k=k, v=v, return_lse=True, num_splits=1)
    checked = AttentionProblem.of(**call, memory=False)
    o, lse = torch.full_like(q, torch.nan), torch.full(checked.stat_shape, torch.nan)
    lengths, start = arguments["kv_lengths"], arguments["q_start"]
    run_unchecked(call, o=o, lse=lse, arch=arch)
    assert o.isfinite().all() and not lse.isnan().any()
    expected = attention(
        q[-1:], *(t[-1:] for t in dense), causal=True, window=(50, None), kv_lengths=lengths[-1:],
        q_start=start[-1:], backend="reference",
    )  # fmt: skip
    assert (o[-1:] - expected).float().norm() <= 4e-3 * expected.float().norm()
