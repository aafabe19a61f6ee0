"""The torch operator behind ``gathered_attention``: backend choice, outputs, launch."""

from __future__ import annotations

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.launch import target_of
from warpspec.common.outputs import note_written
from warpspec.common.repeated import watched
from warpspec.fmha.state import AttentionState, normalized_output
from warpspec.latent.cache.pools import LatentPool
from warpspec.latent.gathered import reference
from warpspec.latent.gathered.problem import GatheredProblem, KeySet, check_apart_out
from warpspec.latent.projection.float8 import Float8Tensor
from warpspec.latent.projection.ops import quantized_like


def outputs(problem: GatheredProblem, q: torch.Tensor, out: torch.Tensor | Float8Tensor | None) -> tuple:
    """Uninitialised (o, scales, lse, row_max, row_sum); None for results that the problem lacks.

    scales: those of FP8 o.
    """
    fp32 = {"dtype": torch.float32, "device": q.device}
    shape, statistics = (problem.tokens, problem.heads, 512), (problem.heads, problem.tokens)
    if problem.normalize:
        lse = torch.empty(statistics, **fp32) if problem.return_lse else None
        if problem.float8:
            o, scales = (out.data, out.scales) if out is not None else quantized_like(q[..., :512])
            return o, scales, lse, None, None
        o = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
        return o, None, lse, None, None
    return torch.empty(shape, **fp32), None, None, *(torch.empty(statistics, **fp32) for _ in range(2))


def compute(
    problem: GatheredProblem, q, key_sets: list[KeySet], sink, rotate_back, results: tuple, backend
) -> None:
    """Compute a checked call into ``results``, which ``outputs`` has made."""
    o, scales, lse, row_max, row_sum = results
    backend = resolve_backend(backend, q.device)
    if backend == "reference":
        state = reference.forward(problem, q.detach(), key_sets, rotate_back)
        if problem.normalize:
            values = normalized_output(state, sink)
            if problem.float8:
                made = Float8Tensor.quantize(values.bfloat16())
                o.view(torch.uint8).copy_(made.data.view(torch.uint8))
                scales.copy_(made.scales)
            else:
                o.copy_(values)
            if lse is not None:
                lse.copy_(state.lse)
        else:
            for target, source in zip((o, row_max, row_sum), state, strict=True):
                target.copy_(source)
        return
    if problem.tokens == 0:
        return
    from warpspec.latent.gathered import launch

    cos_sin, positions = rotate_back or (None, None)
    words = o.view(torch.uint8).view(torch.uint32) if problem.float8 else o
    sets = [(each.pool.words, each.slots, each.lengths, each.pool.page_size) for each in key_sets]
    sink = None if sink is None else sink.detach().float()
    tensors = {
        "q": q.detach(), "o": words, "scales": scales, "sink": sink, "lse": lse,
        "row_max": row_max, "row_sum": row_sum, "cos_sin": cos_sin, "positions": positions, "key_sets": sets,
    }  # fmt: skip
    launch.run(problem, target_of(q.device), tensors)


def call(problem: GatheredProblem, q, key_sets, sink, rotate_back, out, backend):
    """The result of a checked call: o, (o, lse) or AttentionState; through the operator while something records it."""
    results = outputs(problem, q, out)
    cos_sin, positions = rotate_back or (None, None)
    of_sets = [t for each in key_sets for t in (each.pool.data, each.slots, each.lengths)]
    if watched(*(t for t in (q, *of_sets, sink, cos_sin, positions) if t is not None)):
        gathered_operator(
            q, [k.pool.data for k in key_sets], [k.pool.page_size for k in key_sets], problem.format,
            [k.slots for k in key_sets], [k.lengths for k in key_sets], problem.scale, sink, cos_sin, positions,
            problem.num_splits or 0, *results, backend,
        )  # fmt: skip
    else:
        if out is not None:
            note_written(*results[:2])
        compute(problem, q, key_sets, sink, rotate_back, results, backend)
    o, scales, lse, row_max, row_sum = results
    if not problem.normalize:
        return AttentionState(o, row_max, row_sum)
    if problem.float8:
        o = Float8Tensor(o, scales) if out is None else out
    return (o, lse) if problem.return_lse else o


@torch.library.custom_op(
    "warpspec::gathered_attention",
    mutates_args=("o", "scales", "lse", "row_max", "row_sum"),
    schema="(Tensor q, Tensor[] data, SymInt[] page_sizes, str name, Tensor[] slots, Tensor?[] lengths, float scale, "
    "Tensor? sink, Tensor? cos_sin, Tensor? positions, SymInt num_splits, Tensor(a!) o, Tensor(b!)? scales, "
    "Tensor(c!)? lse, Tensor(d!)? row_max, Tensor(e!)? row_sum, str backend) -> ()",
)
def gathered_operator(*arguments) -> None:
    """Operator of ``gathered_attention``; num_splits 0: choose it."""
    q, data, page_sizes, name, slots, lengths, scale, sink, *others = arguments
    cos_sin, positions, num_splits, *results, backend = others
    o, scales, lse, row_max, _ = results
    fields = zip(data, page_sizes, slots, lengths, strict=True)
    key_sets = [KeySet(LatentPool(pool, size, name), *rest) for pool, size, *rest in fields]
    rotate_back = None if cos_sin is None else (cos_sin, positions)
    problem = GatheredProblem.of(
        q, key_sets, scale=scale, sink=sink, normalize=row_max is None, return_lse=lse is not None,
        rotate_back=rotate_back, num_splits=num_splits or None, out=None,
        out_format="bf16" if scales is None else "fp8",
    )  # fmt: skip
    check_apart_out(o if scales is None else Float8Tensor(o, scales), q, key_sets, sink, rotate_back)
    compute(problem, q, key_sets, sink, rotate_back, tuple(results), backend)


@gathered_operator.register_fake
def _(*arguments):
    return None
