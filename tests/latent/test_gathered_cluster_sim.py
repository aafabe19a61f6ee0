"""Gathered attention by clusters of two CTAs, which convert each half of the FP8 keys and share the rows: in the
simulator, against the reference and against single CTAs."""

from dataclasses import replace

import pytest
import torch
from helpers.gathered_cases import O_TOLERANCE, judge, judge_lse, random_case
from helpers.row_scales import random_scales
from helpers.suites import long

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.common.launch import SIMULATED
from warpspec.latent.gathered import gathered_attention, launch
from warpspec.latent.gathered.problem import GatheredProblem

V32_TOLERANCE = 6e-3  # of o and lse on true keys: a code times its scale is rounded to bf16


@pytest.fixture
def planning(monkeypatch):
    """Plans are made anew for each call."""
    monkeypatch.setattr(launch, "make_plan", launch.make_plan.__wrapped__)


@pytest.mark.parametrize(
    ("format", "tokens", "slots", "way"),
    [
        ("v3.2-fp8", 3, (70,), 1),
        long("v3.2-fp8", 4, (130, 65), 1),
        long("v3.2-fp8", 2, (330,), 3),
        long("v3.2-fp8", 5, (200,), "line"),
        long("v4-fp8", 4, (130, 65), 1),
        long("v4-fp8", 2, (330,), 3),
    ],
)
@pytest.mark.usefixtures("check_order", "planning")
def test_shared_keys(simulate_as, monkeypatch, format, tokens, slots, way):
    """Queries one after another on one cluster, which see all keys, a part, nothing; slots of no row; NaN in every row
    that is not seen. Single CTAs have the same bits."""
    simulate_as("sm_90a", sm_count=4 if way == "line" else 2)
    monkeypatch.setattr(launch, "takes_line", lambda *_: way == "line")
    splits = {} if way == "line" else {"num_splits": way}
    case = random_case(tokens, 128, slots, format=format, rotate=False, **splits)
    if format == "v3.2-fp8":
        random_scales(case)
    got, lse = gathered_attention(case.q, case.key_sets, backend="sim", **case.options)
    run = sim.last_report().launches[0]
    assert run.cluster[0] == 2 and run.local_bytes == 0
    wanted, wanted_lse = gathered_attention(case.q, case.key_sets, backend="reference", **case.options)
    tolerance = V32_TOLERANCE if format == "v3.2-fp8" else O_TOLERANCE
    judge_lse(lse, wanted_lse, tolerance)
    assert judge(got, wanted) < tolerance and not got[2:3].any()
    if (tokens, way) != (3, 1):
        monkeypatch.setattr(launch, "choose_cluster", lambda *_: 1)
        alone, _ = gathered_attention(case.q, case.key_sets, backend="sim", **case.options)
        assert sim.last_report().launches[0].cluster[0] == 1 and torch.equal(got, alone)


@pytest.mark.long
@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize("format", ["v3.2-fp8", "v4-fp8"])
@pytest.mark.usefixtures("planning")
def test_no_kernel_spills(format, sets, monkeypatch):
    """Kernels of all ways, with and without lengths, states."""
    target, least = SIMULATED["sm_90a"], GatheredProblem(9, 128, format, (999,) * sets, (False,) * sets, 0.1)
    most = replace(least, lengths=(True,) * sets, has_sink=True, return_lse=True)
    for way in (1, 2) if format == "v4-fp8" else ("line", 1, 2):  # as there are
        monkeypatch.setattr(launch, "takes_line", lambda problem, *_, way=way: way == "line")
        for one in (least, most, replace(least, normalize=False)):
            splits = None if way == "line" else way
            config = launch.make_plan(replace(one, num_splits=splits), target).config
            assert config.gathers.cluster == (1 if way == "line" and sets > 1 else 2)
            (found,) = resources(
                launch.GATHERED.of(target.architecture).kernel.compiled(config, target.arch)
            ).values()
            assert found.local_bytes == 0, config


def test_which_calls_share():
    """Head groups in pairs over FP8 rows with scales, on a GPU that has room for a cluster."""
    problem = GatheredProblem(128, 128, "v3.2-fp8", (2048,), (False,), 0.1)
    target = SIMULATED["sm_90a"]

    def clusters(target=target, **changes):
        return launch.make_plan(replace(problem, **changes), target).config.gathers.cluster

    assert clusters() == clusters(heads=65) == clusters(heads=256) == 2
    assert clusters(heads=64) == clusters(heads=192) == clusters(format="bf16") == 1
    assert clusters(replace(target, sm_count=1)) == clusters(SIMULATED["sm_100a"]) == 1
    codes = {"format": "e4m3", "paged": True, "has_kv_scale": True, "lengths": (True,)}
    assert clusters(**codes) == 1
    for tokens in (70, 128):  # shared out by length, and whole
        plan = launch.make_plan(replace(problem, tokens=tokens), replace(target, sm_count=133))
        assert plan.config.gathers.cluster == 2 and plan.ctas == 132
