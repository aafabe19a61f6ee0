"""Timings of plans: what fit_plans.py reads of old and new files, and what collect_plans.py leaves out."""

import json
from types import SimpleNamespace

import fit_plans
from shared import plan_kernels
from shared.plan_templates import templates
from shared.sweep_shapes import AttentionShape, to_json

from warpspec.common.launch import SIMULATED
from warpspec.fmha.plan.cost import Way

H200 = SIMULATED["sm_90a"]
SHAPE = AttentionShape(
    "mixed", "", 32, 8, 128, "packed-paged", queries=(1, 1, 300), keys=(900, 70, 400), page_size=64
)


def timings(path, header, *plans):
    about = {"header": header, "speeds": {"copy": 3.0}}
    times = {json.dumps(plan): 10.0 + number for number, plan in enumerate(plans)}
    line = {"i": [0, 0], "shape": to_json(SHAPE), "present": plans[0], "times": times}
    path.write_text(f"{json.dumps(about)}\n{json.dumps(line)}\n")
    return path


def test_timings_of_kernels_that_have_changed_are_left_out(tmp_path):
    old = [[2, 128, 2, 1, 4, way, 1, 0, 8] for way in ("PERSISTENT", "QUEUE", "LINE")]
    new = [[*plan, skips] for plan, skips in zip(old, (1, 1, 1), strict=True)]
    first = timings(tmp_path / "first", f"{fit_plans.OLD_JOIN}, 132 SMs", *old)
    later = timings(tmp_path / "later", "2026-11-26, NVIDIA H200, 132 SMs", *old)
    data = fit_plans.Data([first, later, timings(tmp_path / "new", "2026-11-27", *new)])
    found = [(data.meta[row].file, fit_plans.WAYS[way]) for row, way in zip(data.row, data.way, strict=True)]
    ways = (Way.PERSISTENT, Way.QUEUE, Way.LINE)
    assert found == [(0, ways[0]), (1, ways[0]), (1, ways[2]), *((2, way) for way in ways)]
    assert list(data.tiling.skips) == [0, 0, 0, 1, 1, 1]


def test_refused_kernels_of_a_template_are_not_timed(tmp_path, capsys):
    """What --compile-ahead writes is read with the same kernels in the same order."""
    options = SimpleNamespace(seed=3, kernels=2, compiled=tmp_path / "compiled")
    found = templates(2, 3, ("decode",), 0.0)
    (_, _, all_of, items), _ = plan_kernels.wanted(found, H200, options)
    refused = next(place for place, (_, config) in enumerate(items) if config in all_of)
    options.compiled.write_text(json.dumps([0, {refused: "12 bytes spilled"}]) + "\n")
    (one,) = plan_kernels.compiled_before(found, H200, options)
    assert one.index == 0 and one.kernels == all_of - {items[refused][1]}
    assert "12 bytes spilled" in capsys.readouterr().out
