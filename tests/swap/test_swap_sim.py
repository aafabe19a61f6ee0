"""The kernels of both architectures in the simulator, as a chain and as one, against the reference."""

import pytest
import torch
from helpers.swap_cases import (
    OF_UNFUSED,
    SMALL,
    check_forced,
    error,
    make_plan,
    reference_of,
    run,
    simulated,
    small,
    unfused,
)

from warpspec.swap import launch, swap_ffn_decode
from warpspec.swap.config import SwapConfig, Tiles
from warpspec.swap.problem import SwapProblem

CALL = dict(events=2, k_ffn=2, residual=False)
SM90, SM100 = simulated("sm_90a"), simulated("sm_100a")


def test_fused_and_chain_on_sm90():
    """Both have the same bits: two requests, a last row tile of 12 rows, an odd d_ff, four CTAs that share weights."""
    case = *small(2, cores=70, d_ff=200), CALL
    chain = check_forced(*case, make_plan("sm_90a"), SM90)
    fused = check_forced(*case, make_plan("sm_90a", fused=True), SM90, seed=3)
    assert torch.equal(chain.delta, fused.delta) and torch.equal(chain.state.ram, fused.state.ram)
    assert torch.equal(chain.margins, fused.margins)


@pytest.mark.parametrize(
    ("tiles", "splits", "ctas"),
    [
        pytest.param(Tiles(cluster_m=2, cluster_n=2, stages=3), 3, 8, marks=pytest.mark.long),
        pytest.param(Tiles(cluster_m=1, cluster_n=2), 1, 4, marks=pytest.mark.long),
        pytest.param(Tiles(down_n=256), 2, 2, marks=pytest.mark.long),
        pytest.param(Tiles(), 8, 2, marks=pytest.mark.long),  # one K tile a split
    ],
)  # fmt: skip
def test_tiles_and_clusters_on_sm90(tiles, splits, ctas):
    """Few CTAs, so that each has several tiles of a phase; a residual."""
    x, state, w = small(1, cores=140)
    plan = make_plan("sm_90a", fused=True, tiles=tiles, splits=splits, ctas=ctas)
    check_forced(x, state, w, dict(events=2, k_ffn=1, residual=True), plan, SM90)


def test_chain_on_sm100():
    """Under the reference's decisions; then the public call, whose own decisions are the same for these inputs."""
    call = CALL | dict(k_ffn=1)
    x, state, w = small(1, cores=20, d_ff=200, seed=13)  # no margin is below 0.4
    plan = launch.make_plan(SwapProblem.check(x, state, w, **call), SM100)
    check_forced(x, state, w, call, plan, SM100, seed=5)
    delta, new = swap_ffn_decode(x, state, w, events=2, k_ffn=1, backend="sim")
    wanted, wanted_state, made = reference_of(x, state, w, call)
    own, peer, _ = unfused(x, state, w, call, made)
    assert torch.equal(new.map, wanted_state.map)
    assert error(delta, wanted) <= OF_UNFUSED * error(own, wanted)
    assert error(new.ram, wanted_state.ram) <= OF_UNFUSED * error(peer.ram, wanted_state.ram)


def test_hidden_nan_stays_in_its_core():
    """A NaN in one core's banks reaches that core's vector, if it reads them, and through the collapse its request."""
    x, state, w = small(2, cores=36)
    call, plan = dict(events=1, k_ffn=1, residual=False), make_plan("sm_90a", fused=True)
    _, _, made = reference_of(x, state, w, call)
    clean = run(x, state, w, call, plan, SM90, forced=made)
    reading, closed = (made.gate[0, 0] == gate for gate in (True, False))
    for core in (reading.nonzero()[0].item(), closed.nonzero()[0].item()):
        tainted = state.clone()
        tainted.ram[0, core] = torch.nan
        got = run(x, tainted, w, call, plan, SM90, forced=made)
        assert torch.equal(got.delta[1], clean.delta[1]) and torch.equal(got.state.ram[1], clean.state.ram[1])
        others = [c for c in range(36) if c != core]
        assert torch.equal(got.state.ram[0, others], clean.state.ram[0, others])
        assert (
            got.delta[0].isnan().all() == reading[core]
            and torch.equal(got.delta[0], clean.delta[0]) != reading[core]
        )


@pytest.mark.usefixtures("check_order")
def test_one_core_and_equal_scores():
    """One row; bank scores that are all the same take bank 0, an open gate everywhere."""
    x, state, w = small(1, cores=1, d_ff=8)
    tensors = dict(w.tensors) | {
        "bank_w": torch.zeros(64, 4),
        "bank_b": torch.ones(4),
        "swap_b": torch.full((1,), 99.0),
    }
    w = type(w).from_tensors(tensors)
    call = dict(events=2, k_ffn=1, residual=False)
    delta, new, made = reference_of(x, state, w, call)
    assert made.gate.all() and not made.logical.any()
    got = run(x, state, w, call, make_plan("sm_90a", fused=True, ctas=2), SM90, forced=made)
    assert got.gate.all() and not got.logical.any() and error(got.delta, delta) < 2e-2
    assert torch.equal(got.state.map, new.map)


def test_plans():
    """No more splits than K tiles; at the published sizes what was measured best."""
    x, state, w = small(1, cores=1, d_ff=8)
    for target in (SM90, SM100):
        assert launch.make_plan(SwapProblem.check(x, state, w, **CALL), target).splits == 4
    sizes = dict(cores=512, d_model=1024, d_ff=4096, d_router=64, collapse_k=8, collapse_r=224, **CALL)
    for batch, wanted in (
        (1, (True, 128, 4)),
        (2, (False, 128, 2)),
        (4, (False, 128, 1)),
        (16, (False, 256, 1)),
    ):
        problem = SwapProblem(batch=batch, eps=1e-6, device=torch.device("cpu"), **sizes)
        plan = launch.make_plan(problem, SM90)
        assert (plan.fused, plan.tiles.down_n, plan.splits) == wanted


@pytest.mark.parametrize(
    ("arch", "sm", "phase"),
    [
        ("sm_90a", "sm90", "up"),
        ("sm_100a", "sm100", "up"),
        pytest.param("sm_90a", "sm90", "down", marks=pytest.mark.long),
        pytest.param("sm_100a", "sm100", "down", marks=pytest.mark.long),
        pytest.param("sm_90a", "sm90", "fused", marks=pytest.mark.long),
    ],
)
def test_no_register_spills(arch, sm, phase):
    """At real sizes."""
    from warpspec.common.compile import resources

    tiles = Tiles() if sm == "sm90" else Tiles(cluster_m=1)
    config = SwapConfig(arch=sm, phase=phase, d_model=1024, tiles=tiles, splits=4 if phase == "fused" else 1)
    (found,) = resources(launch.SWAP.compiled(config, arch)).values()
    assert found.local_bytes == 0, found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fused", [False, True])
def test_d_model_1024(seed, fused):
    x, state, w = small(1, seed=seed, **SMALL | dict(d_model=1024, cores=60, collapse_r=224))
    plan = make_plan("sm_90a", fused=fused, splits=4, ctas=12)
    check_forced(x, state, w, dict(events=2, k_ffn=2, residual=True), plan, SM90, seed=seed)
