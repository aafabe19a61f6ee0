"""Small windows over few queries: what no row sees is neither read nor reaches a result."""

from collections import Counter

import pytest
import torch
from helpers.boxes import count_boxes
from helpers.page_layouts import paged
from helpers.suites import long_but

from warpspec.common.launch import simulating
from warpspec.fmha import attention, attention_varlen, launch
from warpspec.fmha.config import BOX_KEYS, box_keys_of
from warpspec.fmha.problem import AttentionProblem

LENGTHS, HEADS, TOLERANCE = (333, 129, 77, 5), 8, 1.6e-2
START = torch.tensor((3, 8), dtype=torch.int32)
FORMS = ("pages of 16", "pages of 128", "packed", "lengths")


def case(form: str, window: int, head_dim: int) -> tuple:
    """(function, tensors, options, lengths) of one query for each request; hidden keys and values are NaN."""
    lengths = LENGTHS
    torch.manual_seed(0)
    dense = torch.randn(2, len(lengths), max(lengths), 1, head_dim).bfloat16()
    for request, length in enumerate(lengths):
        dense[:, request, : max(length - window, 0)] = torch.nan
        dense[:, request, length:] = torch.inf
    q = torch.randn(len(lengths), HEADS, head_dim).bfloat16()
    if form == "lengths":
        lengths_of = {"kv_lengths": torch.tensor(lengths, dtype=torch.int32)}
        return attention, (q[:, None], *dense), lengths_of, lengths
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    options = {"cu_seqlens_q": starts, "max_seqlen_q": 1, "max_seqlen_k": max(lengths)}
    if form == "packed":
        rows = [
            torch.cat([row[:length] for row, length in zip(half, lengths, strict=True)]) for half in dense
        ]
        options["cu_seqlens_k"] = torch.tensor((0, *lengths)).cumsum(0).int()
        return attention_varlen, (q, *rows), options, lengths
    pages, table = paged(dense, lengths, int(form.split()[-1]))
    options |= {"page_table": table, "kv_lengths": torch.tensor(lengths, dtype=torch.int32)}
    return attention_varlen, (q, *pages), options, lengths


@pytest.mark.parametrize("arch", long_but(("sm_90a",), ("sm_90a", "sm_100a")))
@pytest.mark.parametrize("head_dim", long_but((64,), (64, 96, 128)))
@pytest.mark.parametrize("form", long_but(FORMS[:1], FORMS))
def test_keys_outside_a_window_are_not_read(monkeypatch, arch, head_dim, form):
    window, plans, plan = 100, [], launch.plan
    monkeypatch.setattr(launch, "plan", lambda *of: plans.append(plan(*of)) or plans[-1])
    launch.prepare.cache_clear()
    asked, read = count_boxes(monkeypatch), Counter()
    function, tensors, options, lengths = case(form, window, head_dim)
    options |= {"causal": True, "window": (window - 1, 0)}
    expected = function(*tensors, backend="reference", **options)
    with simulating(arch, sm_count=4):
        got = function(*tensors, backend="sim", **options, num_splits=1)
    assert (got.float() - expected.float()).abs().max() < TOLERANCE
    box = plans[-1].config.kv.page_keys
    assert box <= BOX_KEYS
    boxes = sum(-(-length // box) - max(length - window, 0) // box for length in lengths)
    for (tensor_map, coords), times in asked.items():
        read[tensor_map] += times * (coords[-1] >= 0)  # page or batch row -1: zeros, nothing is read
    assert sorted(read.values())[-2:] == [boxes * -(-head_dim // 64)] * 2


@pytest.mark.parametrize("changes, keys", [
    ({}, BOX_KEYS), ({"window": (255, 0)}, BOX_KEYS), ({"window": (256, 0)}, 0), ({"causal": False}, BOX_KEYS),
    ({"causal": False, "window": (99, 3)}, BOX_KEYS), ({"causal": False, "q_start": START}, 0),
    ({"kv_lengths": None}, 0), ({"window": None}, 0),
])  # fmt: skip
def test_boxes_are_small_where_few_keys_are_seen(changes, keys):
    lengths = torch.tensor((300, 200), dtype=torch.int32)
    arguments = {"causal": True, "window": (99, None), "kv_lengths": lengths} | changes
    q, kv = torch.empty(2, 1, 8, 64).bfloat16(), torch.empty(2, 300, 2, 64).bfloat16()
    problem = AttentionProblem.of(q=q, k=kv, v=kv, memory=False, **arguments)
    assert box_keys_of(problem) == keys
