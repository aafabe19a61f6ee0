"""Small Swap-FFN steps, and how a kernel's is run and compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from shared.swap_inputs import random_call, random_weights

from warpspec.common.launch import SIMULATED, Target, target_of
from warpspec.swap import eager, launch, reference
from warpspec.swap.config import Tiles
from warpspec.swap.problem import SwapProblem
from warpspec.swap.weights import SwapFFNWeights, SwapState

SMALL = dict(cores=100, d_model=256, d_ff=300, collapse_r=20)
OF_UNFUSED = 1.25  # an error may be this many times the unfused bf16 step's
ALONE = Tiles(cluster_m=1, cluster_n=1)


@dataclass
class Result:
    """What a run left: delta, state, the decisions that the router would have taken and their margins; the report."""

    delta: torch.Tensor
    state: SwapState
    gate: torch.Tensor
    logical: torch.Tensor
    margins: torch.Tensor
    report: object


def small(batch=1, *, seed=0, device="cpu", **sizes) -> tuple[torch.Tensor, SwapState, SwapFFNWeights]:
    weights = random_weights(**SMALL | sizes, seed=seed, device=device)
    return *random_call(weights, batch, seed=seed + 1), weights


def make_plan(arch: str, *, fused=False, tiles: Tiles | None = None, splits=2, ctas=8) -> launch.SwapPlan:
    return launch.SwapPlan(fused, tiles or (Tiles() if arch == "sm_90a" else ALONE), splits, ctas)


def word(decisions) -> torch.Tensor:
    """The router's decisions as kernels take them, uint8 [events, rows]."""
    gate, logical = decisions[:2]
    return (gate.int() * 4 + logical).to(torch.uint8).flatten(1)


def run(x, state, weights, call, plan, target: Target | None = None, *, forced=None, seed=0) -> Result:
    """A step under a plan, in buffers that are NaN before it. forced: the reference's ``Decisions``."""
    problem = SwapProblem.check(x, state, weights, **call)
    target = target or target_of(x.device)
    step = launch.Step(problem, target, plan, forced=forced is not None, recorded=True, seed=seed)
    state, delta = state.clone(), torch.full_like(x, torch.nan)
    recorded = torch.full((problem.events, problem.rows), 255, dtype=torch.uint8, device=x.device)
    margins = torch.full((problem.events, problem.rows, 2), torch.nan, device=x.device)
    words = None if forced is None else word(forced)
    operands = step.operands(x, state.ram, state.map, weights, delta, words, recorded, margins)
    for name in ("vectors", "inverse", "hidden", "partial", "pooled", "summed"):
        getattr(operands, name).fill_(torch.nan)
    report = step.run(operands)
    if operands.counters is not None:
        assert not operands.counters.any(), "the counters were not left at zero"
    shape = (problem.events, *state.map.shape)
    recorded = recorded.view(shape)
    return Result(delta, state, recorded >= 4, recorded.long() % 4, margins.view(*shape, 2), report)


def simulated(arch: str, **changes) -> Target:
    return replace(SIMULATED[arch], **changes)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def reference_of(x, state, weights, call, forced=None):
    """(delta, SwapState in fp32, decisions)."""
    delta, ram, map_, made = reference.decode(x, state.ram, state.map, weights, **call, forced=forced)
    return delta, SwapState(ram, map_), made


def unfused(x, state, weights, call, forced=None):
    """(delta, state, decisions) of the unfused step, under its own decisions where none are given."""
    state, seen = state.clone(), []
    forced = None if forced is None else forced[:2]
    delta = eager.decode(x, state.ram, state.map, weights, **call, forced=forced, seen=seen)
    return delta, state, reference.Decisions(*map(torch.stack, zip(*seen, strict=True)))


def check_forced(x, state, weights, call, plan, target=None, *, seed=0) -> Result:
    """Under the reference's decisions: no worse than OF_UNFUSED times the unfused step, the router's view of
    vectors in every event too; maps and what never moved are exact."""
    delta, wanted, made = reference_of(x, state, weights, call)
    own, peer, peer_made = unfused(x, state, weights, call, made)
    got = run(x, state, weights, call, plan, target, forced=made, seed=seed)
    assert error(got.delta, delta) <= OF_UNFUSED * error(own, delta), (
        error(got.delta, delta),
        error(own, delta),
    )
    for b in range(len(x)):  # each request by itself
        assert error(got.state.ram[b], wanted.ram[b]) <= OF_UNFUSED * error(peer.ram[b], wanted.ram[b])
    assert torch.equal(got.state.map, wanted.map)
    still = wanted.ram == state.ram.float()
    assert still.float().mean() > 0.1, "the case moves everything"
    assert torch.equal(got.state.ram[still], state.ram[still])
    # The router's view of the vectors, event by event; its decisions follow from what it saw.
    logits, margins = got.margins.unbind(-1)
    assert torch.equal(got.gate, logits > 0)
    for event in range(call["events"]):
        for mine, peers, exact in (
            (logits, peer_made.gate_logit, made.gate_logit),
            (margins, peer_made.margin, made.margin),
        ):
            bound = OF_UNFUSED * error(peers[event], exact[event])
            assert error(mine[event], exact[event]) <= bound, (event, error(mine[event], exact[event]), bound)
    assert (got.logical != made.logical).sum() <= OF_UNFUSED * (peer_made.logical != made.logical).sum() + 2
    return got
