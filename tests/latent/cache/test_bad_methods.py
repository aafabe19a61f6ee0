"""Bad arguments of pools, states and tables: an error that names the argument and its value, and nothing written."""

import re

import pytest
import torch

from warpspec.latent import (
    DEEPSEEK_V4_FLASH,
    CacheConfig,
    IndexPool,
    IndexQueries,
    LatentPool,
    StateCache,
    Tail,
    bytes_per_token,
    rope_table,
    table_slots,
)

FIRST, AGAIN = torch.tensor([0, 1]), torch.tensor([1, 1])
MASK = torch.tensor([True, False, True])


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("method", "arguments", "error", "message"),
    [
        ("commit", (-50,), ValueError, "accepted: must be within 0..1073741824, got -50"),
        ("commit", (True,), TypeError, "accepted: must be an int, got True (bool)"),
        ("commit", (1.9,), TypeError, "accepted: must be an int, got 1.9 (float)"),
        ("commit", (float("nan"), FIRST), TypeError, "accepted: must be an int, got nan (float)"),
        ("commit", (torch.tensor([1.9, 1.0]), FIRST), TypeError,
         "accepted: dtype must be one of torch.int32"),
        ("commit", (int32(1, -2), FIRST), ValueError,
         "accepted: must be within 0..1073741824 (tokens), got -2"),
        ("commit", (int32(1, 2, 3), FIRST), ValueError, "accepted: shape must be [2], got [3]"),
        ("commit", (1, [0, 3]), TypeError, "requests: must be a torch.Tensor, got [0, 3] (list)"),
        ("commit", (1, torch.tensor([0, 3])), ValueError,
         "requests: must be within 0..2 (the cache's requests), got 3"),
        ("commit", (1, AGAIN), ValueError, "requests: each may be given once, got [1, 1]"),
        ("release", (MASK,), TypeError,
         "requests: dtype must be one of torch.int32, torch.int64, got torch.bool"),
        ("release", (torch.tensor([0, -1]),), ValueError,
         "requests: must be within 0..2 (the cache's requests), got -1"),
        ("release", (-1,), TypeError, "requests: must be a torch.Tensor, got -1 (int)"),
        ("window_keys", (torch.tensor([3]), torch.tensor([5])), ValueError, "requests: must be within 0..2"),
        ("window_keys", (FIRST, torch.tensor([5])), ValueError,
         "positions: shape must be requests' [2], got [1]"),
        ("window_slots", (FIRST, torch.zeros(3).int()), ValueError,
         "positions: shape must broadcast with requests' [2]"),
        ("window_slots", (FIRST, FIRST.float()), TypeError, "positions: dtype must be one of"),
    ],
)  # fmt: skip
def test_methods_of_a_state_cache(method, arguments, error, message):
    state = StateCache(DEEPSEEK_V4_FLASH, "window", 3, lengths=int32(7, 8, 9))
    with pytest.raises(error, match="^" + re.escape(message)):
        getattr(state, method)(*arguments)
    assert state.lengths.tolist() == [7, 8, 9]


def test_requests_out_of_range_as_on_a_gpu(monkeypatch):
    """Where the host does not look at the values: they are skipped, and their slots lie outside the pool."""
    state = StateCache(DEEPSEEK_V4_FLASH, "window", 3, lengths=int32(7, 8, 9))
    monkeypatch.setattr(StateCache, "_check_requests", lambda *arguments: None)
    monkeypatch.setattr(StateCache, "_check_tokens", lambda *arguments: None)
    out_of_range = torch.tensor([-1, 3, 1])
    state.commit(int32(10, 20, 30), out_of_range)
    assert state.lengths.tolist() == [7, 38, 9]
    state.release(out_of_range)
    assert state.lengths.tolist() == [7, 0, 9]
    slots, _ = state.window_keys(out_of_range, torch.tensor([5, 5, 5]))
    assert ((slots[:2] < 0) | (slots[:2] >= state.window.capacity)).all()
    assert slots[2, :6].tolist() == [state.window.page_size + p for p in range(6)]


POOL, INDEX = LatentPool.empty(2, 4, "bf16"), IndexPool.empty(3, 8, "mxfp4")
TABLE = int32(0, 1, 2, 3).view(2, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rope_table(torch.arange(4), 8), TypeError,
         "inv_freq: must be a floating tensor, got torch.int64"),
        (lambda: rope_table(torch.rand(4), -1), ValueError, "length: must be within 0..1073741824, got -1"),
        (lambda: rope_table([1.0], 8), TypeError, "inv_freq: must be a torch.Tensor, got [1.0] (list)"),
        (lambda: table_slots(TABLE.float(), TABLE, 4), TypeError, "page_table: dtype must be one of"),
        (lambda: table_slots(TABLE, TABLE[:1], 4), ValueError,
         "rows: shape must be [2, ...] as page_table's, got [1, 2]"),
        (lambda: table_slots(TABLE, TABLE, 0), ValueError, "page_size: must be within 1.."),
        (lambda: bytes_per_token("v5"), ValueError,
         "model: must be one of deepseek-v4-flash, deepseek-v4-pro, got 'v5'"),
        (lambda: bytes_per_token("deepseek-v4-pro", latent=3), TypeError,
         "latent: must be a string, got 3 (int)"),
        (lambda: bytes_per_token("deepseek-v4-pro", keys="bf16"), TypeError, "keys: is not an argument"),
        (lambda: CacheConfig((("csa", -1),)), ValueError, "layers: count 0: must be at least 0, got -1"),
        (lambda: CacheConfig((("csa", 1),), window=1.5), TypeError,
         "window: must be an int, got 1.5 (float)"),
        (lambda: DEEPSEEK_V4_FLASH.state_bytes("mla"), ValueError,
         "kind: must be one of window, csa, hca, got 'mla'"),
        (lambda: LatentPool.empty(2**31, 4, "bf16"), ValueError,
         "pages: must be within 0..536870911, got 2147483648"),
        (lambda: LatentPool.empty(2, 4, "bf16", device="gpu"), ValueError,
         "device: must be a torch.device or its name"),
        (lambda: POOL.read(torch.tensor([0.5])), TypeError, "slots: dtype must be one of"),
        (lambda: POOL.write(int32(0, 1), torch.zeros(1, 512)), ValueError,
         "rows: shape must be [2, 512], got [1, 512]"),
        (lambda: IndexQueries(INDEX, torch.zeros(2, 8)), ValueError,
         "pool: must have a page of as many heads"),
        (lambda: Tail.empty("window", 4, 8, 1, 0), ValueError, "kind: must be one of csa, hca, got 'window'"),
        (lambda: Tail.empty("csa", 4, 8, 1, -1), ValueError, "max_draft: must be within 0..65536, got -1"),
        (lambda: Tail("hca", 8, 16, 0, torch.zeros(1, 0, 2, 16), None, int32(0, 0)[None]), TypeError,
         "online: must be a"),
        (lambda: Tail("csa", 4, 16, 0, torch.zeros(1, 7, 2, 32), None, int32(0, 0)[None]), ValueError,
         "rows: shape must be [1, 8, 2, 32], got [1, 7, 2, 32]"),
    ],
)  # fmt: skip
def test_functions(call, error, message):
    with pytest.raises(error, match="^" + re.escape(message)):
        call()
    assert not POOL.data.any()
