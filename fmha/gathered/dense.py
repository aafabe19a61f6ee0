"""Gathered attention where no kernel gathers (sm_100a): rows brought together in bf16, then attention over them.

Two launches for as many queries as the workspace has room for; what is not there is hidden by a bias of -inf. Rotating
back is torch's, on the result.
"""

from __future__ import annotations

import torch

from warpspec.cache.reference import angles_at, rotate
from warpspec.common.launch import Kernel, Target
from warpspec.fmha import launch as attention_launch
from warpspec.fmha.gathered.config import RowsConfig
from warpspec.fmha.gathered.problem import MAX_KEY_SETS, VALUE_DIM, GatheredProblem
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem

WORKSPACE_BYTES = 1 << 30  # of rows, unless one query's are more
ROW_BYTES = 2 * VALUE_DIM
BIAS_STEP = 4  # elements: rows of the bias are aligned to 16 bytes


def rows_arguments(config: RowsConfig) -> tuple:
    """The host function of a configuration and its arguments but the stream."""
    from warpspec.fmha.gathered.rows import rows_arguments  # brings in the DSL

    return rows_arguments(config)


GATHER_ROWS = Kernel("fmha.gathered.rows", rows_arguments)  # by RowsConfig


def run(problem: GatheredProblem, target: Target, tensors: dict, *, seed: int = 0) -> None:
    """As ``launch.run``, of tensors as it takes them. UnsupportedProblem names what attention's kernel does not do."""
    from warpspec.fmha.gathered.launch import check_format

    check_format(problem)
    keys = sum(problem.slots)
    step = max(1, WORKSPACE_BYTES // max(1, keys * ROW_BYTES))
    for first in range(0, problem.tokens, step):
        run_part(problem, target, tensors, slice(first, first + step), keys, seed)


def run_part(
    problem: GatheredProblem, target: Target, tensors: dict, at: slice, keys: int, seed: int
) -> None:
    """Some of the queries."""
    q, o = tensors["q"][at], tensors["o"][at]
    tokens = len(q)
    stats = {
        name: None if tensors[name] is None else tensors[name][:, at]
        for name in ("lse", "row_max", "row_sum")
    }
    if keys == 0:
        o.zero_()
        for name, value in (("lse", -torch.inf), ("row_max", -torch.inf), ("row_sum", 0.0)):
            if stats[name] is not None:
                stats[name].fill_(value)
        return
    rows = torch.empty(tokens, keys, VALUE_DIM, dtype=torch.bfloat16, device=q.device)
    pitch = -(-keys // BIAS_STEP) * BIAS_STEP
    bias = torch.empty(tokens, 1, 1, pitch, device=q.device)[..., :keys]
    sets = []
    for words, slots, lengths, page_size in tensors["key_sets"]:
        sets += [words, slots[at], None if lengths is None else lengths[at], page_size]
    sets += [None, None, None, 1] * (MAX_KEY_SETS - len(problem.slots))
    config = RowsConfig(problem.format, len(problem.slots), problem.lengths)
    GATHER_ROWS.run(config, target, rows.view(torch.uint32), bias[:, 0, 0], *sets, seed=seed)

    arguments = {
        "q": q[:, None],
        "k": rows[:, :, None],
        "bias": bias,
        "sink": tensors["sink"],
    }
    switches = {"scale": problem.scale, "normalize": problem.normalize, "return_lse": problem.return_lse}
    of_rows = AttentionProblem.of(**arguments, **switches, num_splits=problem.num_splits)
    shape = (tokens, problem.heads, 1)
    found = {
        name: None if value is None else torch.empty(shape, dtype=torch.float32, device=q.device)
        for name, value in stats.items()
    }
    operands = Operands(**arguments, v=arguments["k"], o=o[:, None], **found)
    attention_launch.prepare(of_rows, target, seed).run(operands)
    for name, value in found.items():
        if value is not None:
            stats[name].copy_(value[..., 0].T)
    if problem.rotate_back:
        angles = angles_at(tensors["cos_sin"], tensors["positions"][at])[:, None]
        o.copy_(rotate(o, angles, back=True))
