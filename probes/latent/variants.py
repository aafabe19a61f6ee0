"""Kernels by variant: what a variant changes of a configuration before it is launched."""
from dataclasses import replace
import warpspec.fmha.gathered.launch as gl
import warpspec.indexer.ops as io
from warpspec.indexer.scores_config import ScoresConfig
plan0 = gl.make_plan
GATHERED = {"v4-fp8": {"base": {}, "both": {"both_parts": True}}, "bf16": {"base": {}, "copies": {"copies": True}, "both": {"both_parts": True}}}
SCORES = {"mxfp4": {"4x2": (4, 2), "5x2": (5, 2)}, "fp8": {"4x2": (4, 2)}}
current = {"gathered": {}, "scores": None}
def make_plan(problem, target):
    plan = plan0(problem, target)
    return plan._replace(config=replace(plan.config, **current["gathered"])) if current["gathered"] else plan
gl.make_plan = make_plan
io.ScoresConfig = lambda name, heads, size: ScoresConfig(name, heads, size, *(current["scores"] or ()))
