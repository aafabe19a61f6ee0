"""The torch operators for experts laid out for sm_90a; ``ops`` has those for sm_100a."""

from __future__ import annotations

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.forward_only import refuse_backward
from warpspec.common.launch import target_of
from warpspec.common.simulator import joined
from warpspec.common.transforms import register_derivatives
from warpspec.moe import ops, reference
from warpspec.moe.permute import sort_tokens
from warpspec.moe.problem import GroupedProblem, LayerProblem
from warpspec.moe.streamed import StreamedWeights

WEIGHTS = "Tensor {0}_data, Tensor {0}_global, Tensor? {0}_bias, SymInt {0}_n, SymInt {0}_k, SymInt {0}_block"
GROUPED = (
    f"(Tensor a, Tensor offsets, {WEIGHTS.format('w13')}, str activation, float? limit, bool check, str backend) "
    "-> Tensor"
)
LAYER = (
    f"(Tensor x, Tensor topk_ids, Tensor topk_weights, {WEIGHTS.format('w13')}, {WEIGHTS.format('w2')}, "
    "Tensor intermediate_scale, SymInt shared, str activation, float? limit, bool check, str precision, "
    "str backend) -> Tensor"
)
WEIGHT_ARGUMENTS = 6


def flatten(w: StreamedWeights) -> tuple:
    """The operators' arguments that hold the weights."""
    return w.data, w.global_scale, w.bias, w.n, w.k, w.block


def weights(data, global_scale, bias, n, k, block) -> StreamedWeights:
    """The weights record of the arguments that ``flatten`` returned."""
    return StreamedWeights(data, global_scale, n, k, block, bias)


def resolve(backend: str, device: torch.device) -> str:
    """The backend that runs experts laid out for sm_90a. Raises ValueError for "sm100"."""
    backend = resolve_backend(backend, device)
    if backend == "sm100":
        raise ValueError("experts: laid out for 'sm90', backend 'sm100' takes experts.for_backend('sm100')")
    return backend


def check_layer(arguments, memory):
    """Check the arguments; (problem, x, topk_ids, topk_weights, w13, w2, intermediate_scale, precision, backend)."""
    x, topk_ids, topk_weights, *rest = arguments
    w13, w2 = (weights(*rest[i : i + WEIGHT_ARGUMENTS]) for i in (0, WEIGHT_ARGUMENTS))
    intermediate_scale, shared, activation, limit, check, precision, backend = rest[2 * WEIGHT_ARGUMENTS :]
    problem = LayerProblem.check(
        *(x, topk_ids, topk_weights, w13, w2, intermediate_scale),
        shared=shared,
        activation=activation,
        limit=limit,
        values=check,
        memory=memory,
    )
    return problem, x, topk_ids, topk_weights, w13, w2, intermediate_scale, precision, backend


def run_layer(*arguments) -> torch.Tensor:
    """Run ``moe_ffn``; [T, H] bf16."""
    problem, x, ids, topk_weights, w13, w2, middle, precision, backend = check_layer(arguments, memory=True)
    backend = resolve(backend, problem.device)
    out = x.new_empty(problem.tokens, problem.hidden)
    if problem.rows == 0:
        return out.zero_()
    if backend == "reference":
        ids, topk_weights = ops.with_shared(problem, ids, topk_weights)
        tokens = sort_tokens(ids, w13.experts)
        options = (problem.activation, problem.limit, precision)
        return out.copy_(reference.layer(x, tokens, topk_weights, w13, w2, middle, *options))
    from warpspec.moe.sm90.layer import Layer

    target = target_of(problem.device, StreamedWeights.layout)
    layer = Layer(problem, w13, w2, target, precision="w4a16" if precision == "auto" else precision)
    layer.run(x, ids, topk_weights, w13, w2, out, middle)
    joined(*layer.reports)
    return out


@torch.library.custom_op("warpspec::moe_ffn_streamed", mutates_args=(), schema=LAYER)
def moe_ffn(*arguments):
    """Operator of ``moe_ffn``; [T, H] bf16."""
    return run_layer(*arguments)


@moe_ffn.register_fake
def _(*arguments):
    problem, x, *_ = check_layer(arguments, memory=False)
    return x.new_empty(problem.tokens, problem.hidden)


def check_grouped(arguments, memory):
    """Check the operator's arguments; (problem, a, offsets, w13, backend)."""
    a, offsets, *rest = arguments
    w13 = weights(*rest[:WEIGHT_ARGUMENTS])
    activation, limit, check, backend = rest[WEIGHT_ARGUMENTS:]
    problem = GroupedProblem.check(
        *(a, offsets, w13),
        activation=activation,
        limit=limit,
        out_format="bf16",
        out_scale=None,
        values=check or offsets.device.type == "cpu",
        memory=memory,
    )
    return problem, a, offsets, w13, backend


def run_grouped(*arguments) -> torch.Tensor:
    """Run ``grouped_swiglu``; [R, I] bf16."""
    problem, a, offsets, w13, backend = check_grouped(arguments, memory=True)
    backend = resolve(backend, problem.device)
    out = a.new_empty(problem.rows, problem.width)
    if problem.rows == 0:
        return out
    tokens = ops.sorted_rows(problem.rows, offsets)
    if backend == "reference":
        options = dict(activation=problem.activation, limit=problem.limit)
        return out.copy_(reference.grouped_gemm(a.float(), w13, tokens.offsets, **options))
    from warpspec.moe.sm90 import layer

    target = target_of(problem.device, StreamedWeights.layout)
    joined(*layer.run_grouped(problem, a, tokens, w13, out, target=target))
    return out


@torch.library.custom_op("warpspec::moe_grouped_swiglu_streamed", mutates_args=(), schema=GROUPED)
def moe_grouped_swiglu(*arguments):
    """Operator of ``grouped_swiglu``; [R, I] bf16."""
    return run_grouped(*arguments)


@moe_grouped_swiglu.register_fake
def _(*arguments):
    problem, a, *_ = check_grouped(arguments, memory=False)
    return a.new_empty(problem.rows, problem.width)


register_derivatives(moe_ffn, refuse_backward(ops.NO_GRADIENTS["moe_ffn"]))
register_derivatives(moe_grouped_swiglu, refuse_backward(ops.NO_GRADIENTS["grouped_swiglu"]))
