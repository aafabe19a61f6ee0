"""MLA's decode kernels for sm_90a as compiled: no registers spill. What a thread keeps differs with the dtype of rows
and where they lie, with how CTAs share the keys, what they write, and which rows a tile has."""

import itertools

import pytest
import torch
from helpers.pairwise import pairwise
from helpers.suites import long_but

from warpspec.common.compile import resources
from warpspec.common.launch import SIMULATED
from warpspec.fmha import launch
from warpspec.fmha.cuts import reader
from warpspec.fmha.plan import candidates, plan_of
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.problem import AttentionProblem
from warpspec.latent.gathered import launch as gathered
from warpspec.latent.mla.float8 import problem_of

TARGET = SIMULATED["sm_90a"]
BATCH, KEYS = 8, 8192
WAYS = {"whole": Way.PERSISTENT, "split": Way.SPLIT, "line": Way.LINE, "scheduled": Way.LINE}
# (how CTAs share the keys, what they write). Splits write states, for o as means where these fit. A kernel that reads
# its cuts from a schedule differs from the one that finds them only in its beginning.
RESULTS = [
    ("split", "state"),
    ("split", "o"),
    ("scheduled", "state"),
    *itertools.product(("whole", "line"), ("o", "lse", "state")),
]


def spilled_bytes(kernel, config) -> int:
    """Bytes of local memory of a thread, as ptxas says of the compiled kernel."""
    (found,) = resources(kernel.compiled(config, TARGET.arch)).values()
    return found.local_bytes


def wanted(output: str) -> dict:
    return {"normalize": output != "state", "return_lse": output == "lse"}


def config_of(dtype: str, page_size: int, result: tuple, rows: tuple):
    """The configuration over bf16 or fp16 rows. page_size: 0, a request's rows lie one after another. rows: (heads,
    queries)."""
    (way, output), (heads, queries) = result, rows

    def empty(*shape: int, dtype: str = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    pages = (BATCH * KEYS // page_size, page_size) if page_size else (BATCH, KEYS)
    problem = AttentionProblem.of(
        empty(BATCH, queries, heads, 576), empty(*pages, 1, 576), None, v_dim=512, causal=queries > 1, scale=0.07,
        kv_lengths=empty(BATCH, dtype="int32"),
        page_table=empty(BATCH, KEYS // page_size, dtype="int32") if page_size else None,
        memory=False, **wanted(output),
    )  # fmt: skip
    choices = launch.ATTENTION.of(TARGET.architecture).CHOICES
    found = next(each for each in candidates(choices, problem, TARGET) if each.way is WAYS[way])
    config = plan_of(choices, problem, TARGET, found).config
    return reader(config) if way == "scheduled" else config


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "page_size", "result", "rows"),
    pairwise(["bfloat16", "float16"], [64, 16, 0], RESULTS, [(8, 1), (128, 1), (8, 4), (64, 3)]),
    ids=str,
)
def test_no_kernel_spills(dtype, page_size, result, rows):
    config = config_of(dtype, page_size, result, rows)
    assert spilled_bytes(launch.ATTENTION.of(TARGET.architecture).ATTENTION, config) == 0


@pytest.mark.parametrize(
    ("result", "rows", "q_codes"),
    long_but(
        [(("line", "state"), (8, 2), False)],
        # The last two: 64 rows a task.
        pairwise(RESULTS, [(8, 1), (8, 2), (32, 1), (64, 3), (16, 4), (64, 1)], [False, True]),
    ),
    ids=str,
)
def test_no_kernel_over_codes_spills(result, rows, q_codes, monkeypatch):
    """No kernel over codes spills. With queries in e4m3 and 64 rows, ptxas would also run all products alone."""
    (way, output), (heads, queries) = result, rows
    splits = {"split": 2, "whole": 1}.get(way)
    monkeypatch.setattr(gathered, "takes_line", lambda *_: splits is None)
    results = wanted(output)
    problem = problem_of(BATCH, queries, heads, KEYS, 0.07, num_splits=splits, has_q_scale=q_codes, **results)
    plan = gathered.make_plan.__wrapped__(problem, TARGET)
    config = reader(plan.config) if way == "scheduled" else plan.config
    assert spilled_bytes(plan.kernel(TARGET), config) == 0
