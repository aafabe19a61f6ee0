"""Calls of attention by a given plan, instead of the one that would be chosen."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from warpspec.common.launch import Target
from warpspec.fmha import launch, ops
from warpspec.fmha.expand import Expanded
from warpspec.fmha.operands import Operands
from warpspec.fmha.plan import ANY_CTAS, Plan
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.quantized import BLOCK_SCALES, as_bytes

OPERANDS = ("sink", "kv_lengths", "page_table", "cu_seqlens_q", "cu_seqlens_k", *BLOCK_SCALES)
FIRST = "dequantised first"  # the name of a call that does that


def planned_call(
    problem: AttentionProblem, target: Target, plan: Plan, o: torch.Tensor | None = None
) -> Callable:
    """A function of ``sweep_calls.attention_inputs`` to o, which is always the same tensor. o: that tensor, as the
    caller has it; None: a new one."""
    return prepared_call(problem, launch.prepare.__wrapped__(problem, target, plan), o)


def prepared_call(
    problem: AttentionProblem, prepared: launch.Prepared | Expanded, o: torch.Tensor | None = None
) -> Callable:
    """Like ``planned_call``, of what runs the problem."""
    if o is None:
        o = torch.empty(problem.o_shape, dtype=problem.o_dtype, device=problem.device)
        o = o[0] if problem.requests.packed_q else o

    def call(x: SimpleNamespace) -> torch.Tensor:
        tensors = {name: x.options[name] for name in OPERANDS if name in x.options}
        if problem.mask.has_blocks:
            tensors |= x.options["block_mask"].operands
            if not problem.mask.has_order:
                del tensors["kv_order"]
        operands = Operands(x.q, as_bytes(x.k), as_bytes(x.v), **tensors)
        prepared.run(ops.kernel_operands(problem, operands, (o, None, None, None), batched=False))
        return o

    return call


def describe(plan: Plan) -> list:
    """A plan in JSON: consumers, keys of a tile, stages, CTAs an SM, heads to a tile, schedule, splits, whether as many
    CTAs are launched as there are tiles, section, whether consumers without rows leave the SM, whether they have a KV
    head each."""
    config, shape = plan.config, plan.config.shape
    tile = (shape.consumers, shape.tile_n, shape.kv_stages, shape.ctas_per_sm, config.rows.pack)
    ctas, skips = int(plan.ctas == ANY_CTAS), int(config.skips_idle)
    return [
        *tile,
        config.scheduler.schedule.name,
        plan.splits,
        ctas,
        plan.section,
        skips,
        int(shape.heads_apart),
    ]
