"""Which kernels and orders attention's gradients get: slices of heads, sections, who makes dQ. Nothing is compiled."""

from dataclasses import replace

import pytest
import torch

from warpspec.common.hardware import gpu_model
from warpspec.common.launch import Target
from warpspec.fmha.backward import apart, launch, schedule
from warpspec.fmha.backward.apart import is_apart
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.problem import AttentionProblem

H200 = Target.of_model(gpu_model("H200"))
# Microseconds of the whole backward pass on an H200, causal: (heads, batch, length, D), then (pieces, section, slices,
# whole) of orders that were timed in turn.
TIMED = {
    ((16, 1), 7, 1784, 128): {(7, 2, 1, 0): 601, (8, 2, 2, 0): 539, (3, 4, 4, 0): 548, (1, 14, 16, 0): 561},
    ((16, 4), 7, 1784, 128): {(4, 7, 1, 21): 568, (1, 14, 1, 0): 540, (1, 8, 2, 0): 604, (1, 14, 4, 0): 603},
    ((16, 2), 1, 9346, 64): {(6, 1, 1, 0): 954, (1, 4, 4, 0): 858, (1, 8, 8, 0): 867, (1, 2, 2, 0): 879},
    ((32, 2), 4, 1273, 128): {(8, 2, 1, 0): 390, (1, 16, 8, 0): 365, (1, 16, 4, 0): 368, (1, 16, 16, 0): 384},
    ((7, 1), 3, 6054, 128): {(1, 3, 7, 0): 924, (3, 3, 7, 18): 880, (8, 1, 1, 0): 911},
    ((48, 8), 1, 1999, 128): {(5, 2, 1, 0): 325, (1, 8, 2, 0): 305, (1, 12, 6, 0): 315, (2, 4, 1, 4): 460},
    ((12, 1), 7, 6156, 64): {(8, 2, 1, 4): 2188, (6, 3, 3, 18): 2033},
    ((6, 1), 7, 972, 256): {(8, 3, 1, 0): 249, (1, 7, 2, 0): 223},
    ((64, 64), 10, 384, 256): {(1, 32, 1, 0): 751},  # sections of 64 rows: 810 with 348 queries
}  # fmt: skip


def test_many_rounds_are_counted_by_the_first(monkeypatch):
    """CTAs' loads over 300 rounds, by 64 of them, are within 4% of what all rounds add up to; the mean is exact."""
    calls = [(tuple(range(1, 9)), 5000, section, 3.0) for section in (1, 8, 33, 264)]
    found = [apart.loads_of(steps, rows, section, 132, tile) for steps, rows, section, tile in calls]
    monkeypatch.setattr(apart, "COUNTED_ROUNDS", 10**6)
    for each, (steps, rows, section, tile) in zip(found, calls, strict=True):
        whole = apart.loads_of(steps, rows, section, 132, tile)
        assert len(each) == len(whole) == 132 and each.sum() == pytest.approx(whole.sum())
        assert each.max() == pytest.approx(whole.max(), rel=0.04) and not (each == whole).all()


@pytest.mark.parametrize("call", TIMED, ids=str)
def test_the_best_of_timed_orders_is_chosen(call):
    heads, batch, length, dim = call
    q, k, v = (torch.empty(batch, length, n, dim, device="meta").bfloat16() for n in (*heads, heads[1]))
    forward = AttentionProblem.of(q, k, v, causal=True, return_lse=True, memory=False)
    problem = BackwardProblem.check(forward, ("q", "k", "v"))
    order, times = schedule.choose_order(problem, launch.plan_main(problem, H200), H200), TIMED[call]
    assert times[order[:4]] < 1.01 * min(times.values())


@pytest.mark.parametrize(
    ("heads", "lengths", "packed", "window", "slices"),
    [
        ((16, 1), (5101, 2300, 1900, 1500, 1400, 3300, 234), True, None, 4),
        ((7, 1), (3825,) * 5, False, None, 7),
        ((32, 2), (1716,) * 13, False, None, 4),
        ((64, 8), (600,), False, None, 1),  # fits L2
        ((6, 2), (6297, 5000, 4000, 4000, 4000, 721), True, None, 1),  # few heads
        ((64, 8), (10314, 8000, 1218), True, (127, 0), 1),
        ((128, 8), (35, 356, 178, 90, 300, 200, 154, 100), True, None, 1),  # beyond L2, but of few steps
        ((32, 4), (1432, 421), True, None, 4),  # fits L2, but has fewer key tiles than SMs
    ],
)
def test_many_heads_beyond_l2_are_sliced(heads, lengths, packed, window, slices):
    total = (sum(lengths),) if packed else (len(lengths), lengths[0])
    q, k, v = (torch.empty(*total, n, 128, dtype=torch.bfloat16, device="meta") for n in (*heads, heads[1]))
    options = {"causal": True, "window": window, "return_lse": True, "memory": False}
    if packed:
        starts = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    problem = BackwardProblem.check(AttentionProblem.of(q, k, v, **options), ("q", "k", "v"))
    config = launch.plan_main(problem, H200)
    assert schedule.choose_order(problem, config, H200).slices == slices and config.slices == (slices > 1)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "dim", "causal", "finishes"),
    [
        (16, 512, (32, 32), 128, True, False),
        (2, 512, (8, 8), 128, True, True),
        (16, 512, (32, 8), 128, True, True),
        (4, 2048, (64, 64), 128, True, True),
        (8, 2048, (32, 32), 64, True, False),
        (8, 2048, (32, 32), 64, False, True),
    ],
)
def test_who_makes_dq(batch, length, heads, dim, causal, finishes):
    """A kernel of its own where many rows of one head have few key tiles, else the main kernel's last CTAs."""
    q, k = (torch.empty(batch, length, n, dim, dtype=torch.bfloat16, device="meta") for n in heads)
    forward = AttentionProblem.of(q, k, k, causal=causal, return_lse=True, memory=False)
    assert launch.plan_main(BackwardProblem.check(forward, ("q", "k", "v")), H200).finishes == finishes


@pytest.mark.parametrize(
    ("lengths", "heads", "dims", "causal", "apart"),
    [
        ((512,) * 16, (32, 32), (128, 128), True, True),
        ((256,) * 20, (32, 8), (128, 128), True, True),
        ((300,) * 40, (12, 12), (64, 64), True, True),
        ((2048,) * 2, (64, 64), (192, 128), True, True),
        ((1628,) * 2, (64, 64), (192, 128), True, True),
        ((1536,) * 6, (16, 16), (128, 128), True, False),  # 0.91 of the speed
        ((1024,) * 8, (16, 16), (64, 64), False, False),  # 0.92
        ((1024,) * 2, (32, 8), (128, 128), True, False),  # 0.95: 128 key tiles, one for each SM
        ((128,) * 2, (8, 8), (128, 128), True, False),
        ((8192,) * 2, (32, 32), (128, 128), True, False),
        ((436, 995, 700, 800, 600, 900, 512, 711) * 2, (32, 8), (128, 128), True, True),
        ((4000, 300, 200), (32, 8), (128, 128), True, False),
        ((395, 1426, 900) * 4, (64, 64), (192, 128), True, True),
        ((1427, 4332, 2500) * 4, (16, 16), (192, 128), True, True),
        ((512,) * 16, (16, 16), (256, 256), True, False),
    ],
)
def test_when_dq_is_made_apart(lengths, heads, dims, causal, apart):
    """Where that took less time on an H100. Lengths that differ are packed."""
    packed = len(set(lengths)) > 1
    total = (sum(lengths),) if packed else (len(lengths), lengths[0])
    q, k, v = (
        torch.empty(*total, n, d, dtype=torch.bfloat16, device="meta")
        for n, d in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    )
    options = {"causal": causal, "return_lse": True, "memory": False}
    if packed:
        starts = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        options |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    problem = BackwardProblem.check(AttentionProblem.of(q, k, v, **options), ("q", "k", "v")).padded
    config = launch.plan(problem, Target.of_model(gpu_model("H100")))
    assert is_apart(problem, config) == apart


@pytest.mark.parametrize("wanted", [("q", "k", "v"), ("k", "v")])
def test_a_fixed_order_has_no_slices(wanted):
    """Not even where no dQ is wanted, whose order is all that the main kernel knows of."""
    q, k = (torch.empty(5, 3825, n, 128, dtype=torch.bfloat16, device="meta") for n in (7, 1))
    forward = AttentionProblem.of(q, k, k, causal=True, return_lse=True, memory=False)
    problem = BackwardProblem.check(forward, wanted, deterministic=True)
    assert not launch.plan_main(problem, H200).slices


def test_sections_are_equal():
    """Eight KV heads come in two or four sections, although three sections would fill the SMs best."""
    q, k = (torch.empty(3000, n, 64, dtype=torch.bfloat16, device="meta") for n in (64, 8))
    starts = torch.empty(5, dtype=torch.int32, device="meta")
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 1135, "max_seqlen_k": 1135}
    forward = AttentionProblem.of(q, k, k, causal=True, return_lse=True, memory=False, **options)
    problem = BackwardProblem.check(forward, ("q", "k", "v"))
    assert schedule.choose_order(problem, launch.plan_main(problem, H200), H200).section in (2, 4)


@pytest.mark.parametrize("packed", [False, True])
def test_a_gpu_of_one_sm(packed):
    """Fewer SMs than CTAs that share a key tile at D 512."""
    q, k = (torch.empty(*((300,) if packed else (2, 300)), n, 512, device="meta").bfloat16() for n in (8, 2))
    options = {"causal": True, "return_lse": True, "memory": False}
    if packed:
        starts = torch.empty(3, dtype=torch.int32, device="meta")
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 200, "max_seqlen_k": 200}
    problem = BackwardProblem.check(AttentionProblem.of(q, k, k, **options), ("q", "k"))
    target = replace(H200, sm_count=1)
    assert schedule.choose_order(problem, launch.plan_main(problem, target), target).pieces >= 1
