"""Insert on a GPU: the bits of the reference on the CPU."""

import pytest
import torch
from helpers.insert_cases import HARD_SCALES, SLOTS, Cache, Case, assert_same, make_cache

from warpspec.cache import insert, ops

pytestmark = pytest.mark.gpu
CASES = [
    Case("e4m3", "cells", 128, 128, queries=5, rotated=64, scale="head", index=torch.int32),
    Case("e4m3", "slots", heads=len(HARD_SCALES), scale="hard"),
    Case("e5m2", "slots", heads=len(HARD_SCALES), scale="hard", dtype=torch.float16),
    Case("nvfp4", "cells", 64, 128, heads=8, scale="hard"),
    Case("nvfp4", "pages", 128, 64, swizzled=True, scale="tensor", rotated=128),
    Case("nvfp4", "cells", 80, 128, heads=3, queries=5, rotated=48, swizzled=True, scale="head", norm=True),
    Case("nvfp4", "slots", 256, 256, heads=5, queries=9, rotated=64, interleaved=True, dtype=torch.float16),
    Case("bfloat16", "cells", 512, 80, queries=3, rotated=512, norm=True),
    Case("e4m3", "pages", 256, 256, queries=2, rotated=64, interleaved=True, norm=True),
]


@pytest.mark.parametrize("case", CASES)
def test_stores_the_bits_of_the_reference(case, monkeypatch):
    """Also for scales, slots and positions that the CPU refuses, since it looks at their values."""
    monkeypatch.setattr(ops, "check_values", lambda operands: None)
    caches, queries = {}, {}
    for device in ("cuda", "cpu"):
        cache = make_cache(case.layout, case.name, case.heads, case.dim, case.v_dim)
        arguments = case.arguments()
        memory = [tensor.to(device) for tensor in cache.memory]
        views = {name: moved(tensor, cache.memory, memory) for name, tensor in cache.arguments.items()}
        arguments = {name: to(value, device) for name, value in arguments.items()}
        queries[device] = insert(**arguments, **views, backend="auto" if device == "cuda" else "reference")
        caches[device] = Cache([tensor.cpu() for tensor in memory], {})
    got = queries["cuda"].cpu() if case.queries else None
    assert_same(caches["cuda"], caches["cpu"], got, queries["cpu"], case)


def to(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def moved(view, old: list, new: list):
    """The view of ``old`` memory, in ``new`` memory."""
    if not isinstance(view, torch.Tensor):
        return view
    for before, after in zip(old, new, strict=True):
        if before.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
            memory = after.view(view.dtype)
            return memory.as_strided(view.shape, view.stride(), view.storage_offset())
    raise AssertionError("not a view of the memory")


def test_replays_in_a_graph():
    """Scales, slots and positions are read when the graph is replayed."""
    case = Case("e4m3", "pages", queries=4, rotated=64, scale="tensor")
    arguments = {name: to(value, "cuda") for name, value in case.arguments().items()}
    arguments["positions"].clamp_(0, 39)
    shape = (3, 8, case.heads, case.dim)
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2))

    def call():
        insert(**arguments, k_cache=k_cache, v_cache=v_cache)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    arguments["v_scale"].mul_(4)
    arguments["slots"].copy_(torch.tensor(SLOTS, device="cuda").roll(1))
    graph.replay()
    replayed = v_cache.view(torch.uint8).clone()
    k_cache.zero_(), v_cache.zero_()
    call()
    present = arguments["slots"][(arguments["slots"] >= 0) & (arguments["slots"] < 24)].long()
    pick = (present // 8, present % 8)
    assert torch.equal(replayed[pick], v_cache.view(torch.uint8)[pick])
