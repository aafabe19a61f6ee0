"""Pools: where bytes lie, which slots there are, what is refused. States: rings, commit."""

import pytest
import torch

from warpspec.latent.cache import DEEPSEEK_V4_FLASH, IndexPool, LatentPool, StateCache, table_slots
from warpspec.latent.cache.quantize import quantize_rows

NAMES = [(LatentPool, "v4-fp8"), (LatentPool, "bf16"), (LatentPool, "v3.2-fp8")]
NAMES += [(IndexPool, "mxfp4"), (IndexPool, "fp8"), (IndexPool, "bf16")]


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_where_rows_lie(kind, name):
    """Byte by byte, in pages that are further apart than they are long; nothing else is written."""
    size, pages = 3, 4
    fmt = kind.formats[name]
    whole = torch.full((pages, fmt.page_stride(size) + 48), 0xA5, dtype=torch.uint8)
    pool = kind(whole[:, : fmt.page_bytes(size)], size, name)
    rows = torch.randn(3, fmt.dim).bfloat16()
    pool.write(torch.tensor([7, -1, 3]), rows)
    expected = torch.full_like(whole, 0xA5)
    data, scales = quantize_rows(rows, fmt)
    for row, slot in ((0, 7), (2, 3)):
        page, at = divmod(slot, size)
        values, tail = data[row].split([fmt.value_bytes, fmt.data_bytes - fmt.value_bytes])
        if name == "v3.2-fp8":  # in the row: values, scales, tail
            parts = [(at * 656, torch.cat((values, scales[row], tail)))]
        else:  # scales after all rows
            parts = [
                (at * fmt.data_bytes, data[row]),
                (size * fmt.data_bytes + at * fmt.scale_bytes, scales[row]),
            ]
        for first, content in parts:
            expected[page, first : first + len(content)] = content
    assert torch.equal(whole, expected)
    read = pool.read(torch.tensor([[7, 3], [-1, 12]]))
    assert torch.equal(read[0, 0], kind.read(pool, torch.tensor(7))) and not read[1].any()
    assert ((read[0] - rows[[0, 2]].float()).norm(dim=1) < 0.15 * rows[[0, 2]].float().norm(dim=1)).all()


def test_bad_pools():
    good = torch.zeros(2, 64 * 584, dtype=torch.uint8)
    LatentPool(good, 64, "v4-fp8")
    for data, size, name, error, message in [
        (good, 64, "v5", ValueError, "format: must be one of"),
        (good, 64, 3, TypeError, "format: must be a string"),
        (good, 64, "mxfp4", ValueError, "format: must be one of"),
        (good, 0, "v4-fp8", ValueError, "page_size: must be within 1"),
        (good, 64.0, "v4-fp8", TypeError, "page_size: must be an int"),
        (good, 65, "v4-fp8", ValueError, "at least 37960 bytes"),
        (
            good.view(2, 64, 1, 584).view(torch.float8_e4m3fn),
            64,
            "v4-fp8",
            TypeError,
            r"float8_e4m3fn of shape .*; of a cache .*, pass data.view\(torch.uint8\).view\(len\(data\), -1\)",
        ),
        (
            good.view(2, 64, 584),
            64,
            "v4-fp8",
            ValueError,
            r"\[2, 64, 584\]; .*pass data.view\(len\(data\), -1\)",
        ),
        (good[0], 64, "v4-fp8", ValueError, r"data: must be \[pages, bytes\]"),
        (torch.zeros(64 * 584, 2, dtype=torch.uint8).T, 64, "v4-fp8", ValueError, "contiguous"),
        (
            torch.zeros(2, 64 * 584 + 8, dtype=torch.uint8),
            64,
            "v4-fp8",
            ValueError,
            "multiple of 16 bytes apart",
        ),
        (
            torch.zeros(2 * 64 * 584 + 16, dtype=torch.uint8)[8:-8].view(2, -1),
            64,
            "v4-fp8",
            ValueError,
            "aligned",
        ),
        (good[:1].expand(2, -1), 64, "v4-fp8", ValueError, "apart"),
    ]:
        with pytest.raises(error, match=message):
            LatentPool(data, size, name)


def test_table_slots():
    table = torch.tensor([[5, 2], [0, -1]], dtype=torch.int32)
    rows = torch.tensor([[0, 3, 4, 8, -1], [3, 4, 0, 1, 2]])
    assert table_slots(table, rows, 4).tolist() == [[20, 23, 8, -1, -1], [3, -1, 0, 1, 2]]
    assert table_slots(table[:, :0], rows, 4).eq(-1).all()
    assert table_slots(table + 2**29, rows, 4).eq(-1).all()  # slots past int32


def test_window_keys_are_the_last():
    """What a token sees are the rows of the last 128 positions, in order, whatever was written after them."""
    state = StateCache(DEEPSEEK_V4_FLASH, "window", 2, max_draft=3)
    requests, positions = torch.tensor([1, 1, 0]), torch.tensor([0, 300, 130])
    slots, lengths = state.window_keys(requests, positions)
    assert lengths.tolist() == [1, 128, 128]
    assert slots[0].tolist() == [131, *[-1] * 127]
    assert slots[1].tolist() == [131 + p % 131 for p in range(173, 301)]
    assert slots[2].tolist() == [p % 131 for p in range(3, 131)]


def test_commit():
    state = StateCache(DEEPSEEK_V4_FLASH, "csa", 3, max_draft=2)
    state.commit(4)
    state.commit(torch.tensor([1, 3], dtype=torch.int32), torch.tensor([2, 0]))
    assert state.lengths.tolist() == [7, 4, 5]
    state.release(torch.tensor([1]))
    assert state.lengths.tolist() == [7, 0, 5]
    shared = StateCache(DEEPSEEK_V4_FLASH, "hca", 3, lengths=state.lengths)
    assert shared.lengths is state.lengths and shared.tail.rows.numel() == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "mla"}, ValueError, "kind: must be one of"),
        ({"config": "v4"}, TypeError, "config: must be a CacheConfig"),
        ({"requests": 0}, ValueError, "requests: must be within 1"),
        ({"max_draft": -1}, ValueError, "max_draft: must be within 0"),
        ({"lengths": torch.zeros(3)}, TypeError, "lengths: dtype must be"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, r"lengths: shape must be \[2\]"),
    ],
)
def test_bad_states(change, error, message):
    arguments = {"config": DEEPSEEK_V4_FLASH, "kind": "csa", "requests": 2} | change
    with pytest.raises(error, match=message):
        StateCache(**arguments)
