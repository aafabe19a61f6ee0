"""Attention's backward kernel on sm_90a in other configurations than the plan's, timed in turn."""

from __future__ import annotations

import dataclasses
import os

import torch

from warpspec.aot.workers import compile_all
from warpspec.common.launch import Target, target_of
from warpspec.fmha import attention
from warpspec.fmha.backward import launch, sm90
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.operands import Operands
from warpspec.fmha.ops import kernel_operands
from warpspec.fmha.problem import AttentionProblem

from . import gpu_bench

WRONG = 1e-3  # relative difference between two orders of the same sums
STAGED = {"dq_sent": True, "q_stages": 3, "do_stages": 2}
APART = {"stores_early": True, "apart": True}
LATE = {"dq_late": True, **APART}
ANY = {
    "the plan's": {},
    "by query": {"ds_by_query": True},
    "delta later": {"delta_later": True},
    "early": {"stores_early": True},
    "early, apart": APART,
    "late": {"dq_late": True, "stores_early": True},
    "late, apart": LATE,
    "late, apart, by query": {**LATE, "ds_by_query": True},
    "late, apart, delta later": {**LATE, "delta_later": True},
    "sent": STAGED,
    "sent, early": {**STAGED, "stores_early": True},
    "sent, early, apart": {**STAGED, **APART},
}
UNDER_DV = {"meets_under_dv": True}
VARIANTS = {
    64: {
        **ANY,
        "under dV": {**UNDER_DV, "q_stages": 3},
        "under dV, apart": {**UNDER_DV, "q_stages": 3, "apart": True},
    },
    128: {
        **ANY,
        "under dV": {**UNDER_DV, "do_stages": 4},
        "under dV, apart": {**UNDER_DV, "do_stages": 4, "apart": True},
        "under dV, 3 stages": {**UNDER_DV, "q_stages": 3},
        "under dV, sent": {**UNDER_DV, "dq_sent": True, "q_stages": 3},
    },
    256: {
        "the plan's": {},
        "by query": {"ds_by_query": True},
        "shared queries": {"shares_queries": True},
        "shared queries, by query": {"shares_queries": True, "ds_by_query": True},
    },
}


def configs_of(config) -> dict:
    """Name -> configuration."""
    return {
        name: dataclasses.replace(config, **changes) for name, changes in VARIANTS[config.head_dim].items()
    }


def problem_of(batch, heads, length, d, causal, device) -> BackwardProblem:
    sizes = {
        "batch": batch,
        "seq_q": length,
        "seq_k": length,
        "heads_q": heads,
        "heads_kv": heads,
        "head_dim": d,
    }
    kind = {"dtype": torch.bfloat16, "device": device, "scale": d**-0.5, "causal": causal, "return_lse": True}
    return BackwardProblem(AttentionProblem(**sizes, **kind), ("q", "k", "v"))


def compile_variants(shapes, target: Target) -> None:
    """All that is timed, in as many processes as there are cores."""
    device = torch.device("cuda", target.device)
    problems = [problem_of(*shape, device) for shape in shapes]
    found = {c: None for problem in problems for c in configs_of(launch.plan(problem, target)).values()}
    if compile_all([(sm90.MAIN, config) for config in found], target.arch, os.cpu_count() or 1):
        raise SystemExit("some variants do not compile")


def calls_of(shape, target: Target, device) -> dict:
    """Name -> a call of the whole backward pass; all have been called, and agree."""
    batch, heads, length, d, causal = shape
    q, k, v, do = (torch.randn(batch, length, heads, d, device=device).bfloat16() for _ in range(4))
    o, lse = attention(q, k, v, causal=causal, return_lse=True)
    problem = problem_of(*shape, q.device)
    operands = kernel_operands(problem.forward, Operands(q, k, v, o=o, lse=lse))
    prepared, calls, expected = launch.prepare(problem, target), {}, None
    for name, config in configs_of(prepared.config).items():
        own = prepared._replace(config=config, main=sm90.MAIN.launcher(config, target))
        results = [torch.empty_like(t) for t in (q, k, v)]

        def call(own=own, results=results):
            gradients = launch.Gradients(do, None, *results)
            launch.run_prepared(own, problem, operands, gradients)
            return results

        found = [t.float() for t in call()]
        expected = expected or found
        for mine, first in zip(found, expected, strict=True):
            difference = ((mine - first).norm() / first.norm()).item()
            if not difference < WRONG:
                raise SystemExit(f"{shape}, {name}: differs by {difference:.1e}")
        calls[name] = call
    return calls


def rows(shapes) -> list[list]:
    """Shape, variant, us, how many times as fast as the plan's."""
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(device)
    compile_variants(shapes, target)
    found = []
    for shape in shapes:
        batch, heads, length, d, causal = shape
        times = gpu_bench.gpu_times(calls_of(shape, target, device), [()], **gpu_bench.SHORT_ROUNDS)
        first = next(iter(times.values()))
        name = f"B{batch} H{heads} S{length} D{d} {'causal' if causal else 'full'}"
        found += [[name, variant, time, first / time] for variant, time in times.items()]
    return found
