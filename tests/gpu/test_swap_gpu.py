"""Swap-FFN on a GPU at the sizes that matter: both ways to run a step, state over many steps, graphs, co-residency."""

import dataclasses

import pytest
import torch
from helpers.swap_cases import check_forced, reference_of, run, unfused
from shared.swap_inputs import random_call, random_weights

from warpspec.common.launch import target_of
from warpspec.swap import launch, swap_ffn_decode
from warpspec.swap.problem import SwapProblem
from warpspec.swap.reference import lanes
from warpspec.swap.weights import SwapState

pytestmark = pytest.mark.gpu
CALL = dict(events=8, k_ffn=2, residual=False)


def plan_of(x, state, w, call, **changes) -> launch.SwapPlan:
    problem = SwapProblem.check(x, state, w, **call)
    return dataclasses.replace(launch.make_plan(problem, target_of(x.device)), **changes)


def case(batch=1, *, seed=0, **sizes):
    w = random_weights(device="cuda", seed=seed, **sizes).prepare()
    return *random_call(w, batch, seed=seed + 1), w


@pytest.mark.parametrize(
    ("batch", "residual", "changes"),
    [
        (1, False, {}),
        (1, False, dict(fused=False)),
        (3, True, {}),
        (3, True, dict(fused=True)),
        (16, False, {}),
    ],
)
def test_forced_decisions_at_full_size(batch, residual, changes):
    """The plan that is taken, and the other way."""
    x, state, w = case(batch)
    call = CALL | dict(residual=residual)
    check_forced(x, state, w, call, plan_of(x, state, w, call, **changes))


@pytest.mark.parametrize(
    "sizes", [dict(cores=509, d_ff=4001), dict(cores=37, d_ff=64), dict(d_model=512, d_ff=520)]
)
def test_odd_sizes(sizes):
    x, state, w = case(2, **sizes)
    check_forced(x, state, w, CALL, plan_of(x, state, w, CALL))


def test_free_running_decisions():
    """How many cores ever decide otherwise than the reference, and by which margins: no more than in the unfused step.
    From a core's first such decision on it holds another vector, so only first ones count."""
    x, state, w = case(1)
    _, _, made = reference_of(x, state, w, CALL)
    *_, peer = unfused(x, state, w, CALL)
    got = run(x, state, w, CALL, plan_of(x, state, w, CALL, fused=False))  # the same bits, sooner compiled
    counts = []
    for name, gate, logical in (("ours", got.gate, got.logical), ("unfused", peer.gate, peer.logical)):
        other = (gate != made.gate) | (made.gate & (logical != made.logical))
        first = other & (other.cumsum(0) == 1)
        margin = torch.where(gate != made.gate, made.gate_logit.abs(), made.margin)[first]
        counts.append(first.sum().item())
        by_event = first.flatten(1).sum(1).tolist()
        print(f"{name}: {counts[-1]} of {first[0].numel()} cores, by event {by_event}; ", end="")
        print(f"margins: median {margin.median():.4f}, largest {margin.max():.4f}")
    assert counts[0] <= 1.25 * counts[1] + 2


def test_a_hundred_steps_of_state():
    """Maps stay permutations; the chain and the fused kernel leave the same bits, in place or not."""
    x, state, w = case(2)
    call = dict(events=2, k_ffn=1, residual=False)
    mine = state.clone()
    problem = SwapProblem.check(x, state, w, **call)
    plan = plan_of(x, state, w, call)
    other = launch.Step(problem, target_of(x.device), dataclasses.replace(plan, fused=not plan.fused))
    for _ in range(100):
        delta, new = swap_ffn_decode(x, state, w, **call)
        if torch.equal(new.ram, state.ram):
            pytest.fail("nothing was swapped")
        found = torch.full_like(x, torch.nan)
        other.run(other.operands(x, mine.ram, mine.map, w, found))
        state = new
        x = torch.randn_like(x)
        assert torch.equal(delta, found)
    assert torch.equal(state.ram, mine.ram) and torch.equal(state.map, mine.map)
    assert torch.equal(lanes(state.map).sort(-1).values, torch.arange(4, device="cuda").expand(2, 512, 4))


def test_closed_gates_leave_the_state():
    x, state, w = case(1)
    w = type(w).from_tensors(dict(w.tensors) | {"swap_b": torch.full((1,), -1e4, device="cuda")})
    kept = state.clone()
    delta, same = swap_ffn_decode(x, state, w, in_place=True)
    assert same is state and delta.isfinite().all()
    assert torch.equal(state.ram, kept.ram) and torch.equal(state.map, kept.map)


def test_no_request():
    x, state, w = case(0)
    delta, new = swap_ffn_decode(x, state, w)
    assert delta.shape == (0, 1024) and new.map.shape == (0, 512)


@pytest.mark.parametrize("fused", [False, True])
def test_graph_replays_are_identical(fused):
    """Replays, eager calls between them and calls on another stream leave the same bits."""
    x, state, w = case(1)
    problem = SwapProblem.check(x, state, w, **CALL)
    step = launch.Step(problem, target_of(x.device), plan_of(x, state, w, CALL, fused=fused))

    def call(mine: SwapState):
        delta = torch.full_like(x, torch.nan)
        step.run(step.operands(x, mine.ram, mine.map, w, delta))
        return delta

    mine = state.clone()
    wanted = call(mine)
    captured = state.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        delta = call(captured)
    for _ in range(3):
        captured.ram.copy_(state.ram)
        captured.map.copy_(state.map)
        delta.fill_(torch.nan)
        graph.replay()
        beside = state.clone()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            other = call(beside)
        torch.cuda.synchronize()
        for found, left in ((delta, captured), (other, beside)):
            assert torch.equal(found, wanted) and torch.equal(left.ram, mine.ram)


def refused(step, x, state, w):
    """The launch raises, nothing hangs, nothing is written."""
    mine, delta = state.clone(), torch.full_like(x, torch.nan)
    operands = step.operands(x, mine.ram, mine.map, w, delta)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match=r"no room for all .* CTAs"):
        step.run(operands)
    torch.cuda.synchronize()
    assert delta.isnan().all() and torch.equal(mine.ram, state.ram)


def test_more_ctas_than_sms_raises():
    """And the next call is right."""
    x, state, w = case(1)
    target = target_of(x.device)
    problem = SwapProblem.check(x, state, w, **CALL)
    wanted, _ = swap_ffn_decode(x, state, w)
    plan = plan_of(x, state, w, CALL, fused=True, ctas=2 * target.sm_count)
    refused(launch.Step(problem, target, plan), x, state, w)
    again, _ = swap_ffn_decode(x, state, w)
    assert torch.equal(again, wanted)


def test_fewer_sms_than_ctas_raises():
    """Half of the SMs, by a green context."""
    green_contexts = pytest.importorskip("torch.cuda.green_contexts")
    if not green_contexts.SUPPORTED:
        pytest.skip("torch was built without green contexts")
    x, state, w = case(1)
    target = target_of(x.device)
    problem = SwapProblem.check(x, state, w, **CALL)
    wanted, _ = swap_ffn_decode(x, state, w)
    half = green_contexts.GreenContext.create(num_sms=target.sm_count // 2, device_id=target.device)
    half.set_context()
    try:
        refused(launch.Step(problem, target, plan_of(x, state, w, CALL, fused=True)), x, state, w)
    finally:
        half.pop_context()
    again, _ = swap_ffn_decode(x, state, w)
    assert torch.equal(again, wanted)


def test_torch_compile():
    x, state, w = case(1)
    compiled = torch.compile(
        lambda x, ram, map_: swap_ffn_decode(x * 2, SwapState(ram, map_), w, events=2)[0] + 1, fullgraph=True
    )
    wanted = swap_ffn_decode(x * 2, state, w, events=2)[0] + 1
    assert torch.equal(compiled(x, state.ram, state.map), wanted)
