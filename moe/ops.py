"""The torch operators behind ``grouped_swiglu`` and ``moe_ffn``: checks, backend choice, the stages in order.

Operators take weights as plain tensors, from which ``weights`` rebuilds the record. Checks run inside the operator, on
real tensors, so that compiled and eager calls raise the same errors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpspec.common.backend import resolve_backend
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.forward_only import forward_only, refuse_backward
from warpspec.common.repeated import recorded, watched
from warpspec.common.simulator import joined
from warpspec.common.transforms import call_operator, register_derivatives
from warpspec.moe import reference
from warpspec.moe.operands import PreparedWeights, QuantizedRows
from warpspec.moe.permute import SortedTokens, sort_tokens
from warpspec.moe.problem import GroupedProblem, LayerProblem

WEIGHTS = "Tensor {0}_data, Tensor {0}_scales, Tensor {0}_global, Tensor? {0}_bias, SymInt {0}_k"
GROUPED = (
    f"(Tensor a, Tensor offsets, {WEIGHTS.format('w13')}, Tensor? out_scale, str out_format, str activation, "
    "float? limit, bool check, str backend) -> (Tensor, Tensor)"
)
LAYER = (
    f"(Tensor x, Tensor topk_ids, Tensor topk_weights, {WEIGHTS.format('w13')}, {WEIGHTS.format('w2')}, "
    "Tensor intermediate_scale, SymInt shared, str activation, float? limit, bool check, str precision, "
    "str backend) -> Tensor"
)
WEIGHT_ARGUMENTS = 5


def flatten(w: PreparedWeights) -> tuple:
    """The operators' arguments that hold the weights."""
    return w.data, w.scales, w.global_scale, w.bias, w.k


def weights(data, scales, global_scale, bias, k) -> PreparedWeights:
    """The weights record of the arguments that ``flatten`` returned."""
    return PreparedWeights(data, scales, global_scale, data.shape[1], k, bias)


def resolve_moe_backend(backend: str, device: torch.device, precision: str = "auto") -> str:
    """The backend that runs experts laid out for sm_100a. Raises ValueError for "sm90", and UnsupportedProblem for a
    precision that the backend does not have."""
    backend = resolve_backend(backend, device)
    if backend == "sm90":
        raise ValueError("experts: laid out for 'sm100', backend 'sm90' takes experts.for_backend('sm90')")
    if precision == "w4a16" and backend != "reference":
        raise UnsupportedProblem(
            f"precision: 'w4a16' of experts laid out for 'sm100' runs on backend 'reference' alone, got {backend!r}; "
            "experts.for_backend('sm90') run on sm90 and sim"
        )
    return backend


def sorted_rows(rows: int, offsets: torch.Tensor) -> SortedTokens:
    """Rows that are sorted already, as tokens with one choice each. Rows from offsets[-1] on are dropped.

    Ends out of range are clamped, so that no kernel can leave the rows; checking their values would need the host.
    """
    offsets = torch.cummax(offsets.clamp(0, rows), 0).values if len(offsets) else offsets
    index = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    used = offsets[-1] if len(offsets) else 0
    return SortedTokens(index, torch.where(index < used, index, -1)[:, None], offsets)


class LayerSteps:
    """The stages of a layer on kernels. report: the simulator's report of all stages so far, None on a GPU."""

    def __init__(self):
        self.report = None

    def add(self, report) -> None:
        """Add a stage's report, None if nothing was simulated."""
        if report is not None:
            self.report = joined(report) if self.report is None else joined(self.report, report)

    def sort(self, problem: LayerProblem, topk_ids: torch.Tensor) -> SortedTokens:
        from warpspec.moe.sort import sort_choices

        experts = problem.experts + problem.shared
        tokens, _, _, report = sort_choices(topk_ids.contiguous(), experts, shared=problem.shared)
        self.add(report)
        return tokens

    def quantize(self, x: torch.Tensor, tokens: SortedTokens) -> QuantizedRows:
        from warpspec.moe.quantize_rows import quantize_rows

        if x.shape[0] == 1:
            x = x[0][None]  # the stride of a dimension of size 1 need not be aligned
        experts, (_, choices) = len(tokens.offsets), tokens.position.shape
        a = QuantizedRows.empty(x.shape[0] * choices, x.shape[1], experts, x.device, row_scale=True)
        self.add(quantize_rows(x, tokens.position, tokens.offsets, a))
        return a

    def gemm(self, a, w, offsets, out, **options):
        from warpspec.moe import sm100

        self.add(sm100.grouped_gemm(a, w, offsets, out, **options))
        return out

    def unpermute(self, rows, tokens, topk_weights, out):
        from warpspec.moe.unpermute import unpermute

        self.add(unpermute(rows, tokens.position, topk_weights.contiguous(), out))
        return out


def new_rows(
    problem: GroupedProblem, out_format: str, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised results of `grouped_swiglu`: (data, scales). scales have no elements if the result is bf16."""
    if out_format == "bf16":
        return like.new_empty(problem.rows, problem.width), like.new_empty(0, dtype=torch.uint8)
    q = QuantizedRows.empty(problem.rows, problem.width, problem.experts, like.device, row_scale=False)
    return q.data, q.scales


def check_grouped(arguments, memory):
    """Check the operator's arguments; (problem, a, offsets, w13, out_scale, out_format, backend)."""
    a, offsets, *rest = arguments
    w13 = weights(*rest[:WEIGHT_ARGUMENTS])
    out_scale, out_format, activation, limit, check, backend = rest[WEIGHT_ARGUMENTS:]
    problem = GroupedProblem.check(
        a,
        offsets,
        w13,
        activation=activation,
        limit=limit,
        out_format=out_format,
        out_scale=out_scale,
        values=check or a.device.type == "cpu",
        memory=memory,
    )
    return problem, a, offsets, w13, out_scale, out_format, backend


def run_grouped(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``grouped_swiglu``; (data, scales)."""
    problem, a, offsets, w13, out_scale, out_format, backend = check_grouped(arguments, memory=True)
    backend = resolve_moe_backend(backend, problem.device)
    data, scales = new_rows(problem, out_format, a)
    if problem.rows == 0:
        return data, scales
    tokens = sorted_rows(problem.rows, offsets)
    options = dict(limit=problem.limit)
    if backend == "reference":
        quantized = QuantizedRows.from_rows(a, tokens.offsets)
        rows = reference.grouped_gemm(
            quantized, w13, tokens.offsets, activation=problem.activation, **options
        )
        if out_format == "bf16":
            return rows.bfloat16(), scales
        q = QuantizedRows.from_rows(rows, tokens.offsets, out_scale=out_scale)
        return q.data, q.scales
    steps = LayerSteps()
    out = data
    if out_format == "nvfp4":
        out = QuantizedRows(data, scales, None, -(-problem.width // 16) * 16)
        options["out_scale"] = out_scale.contiguous()
    steps.gemm(steps.quantize(a, tokens), w13, tokens.offsets, out, epilogue=problem.activation, **options)
    return data, scales


@torch.library.custom_op("warpspec::moe_grouped_swiglu", mutates_args=(), schema=GROUPED)
def moe_grouped_swiglu(*arguments):
    """Operator of ``grouped_swiglu``; (data, scales)."""
    return run_grouped(*arguments)


@moe_grouped_swiglu.register_fake
def _(*arguments):
    problem, a, _, _, _, out_format, _ = check_grouped(arguments, memory=False)
    return new_rows(problem, out_format, a)


def check_layer(arguments, memory):
    """Check the arguments; (problem, x, topk_ids, topk_weights, w13, w2, intermediate_scale, precision, backend)."""
    x, topk_ids, topk_weights, *rest = arguments
    w13, w2 = (weights(*rest[i : i + WEIGHT_ARGUMENTS]) for i in (0, WEIGHT_ARGUMENTS))
    intermediate_scale, shared, activation, limit, check, precision, backend = rest[2 * WEIGHT_ARGUMENTS :]
    problem = LayerProblem.check(
        x,
        topk_ids,
        topk_weights,
        w13,
        w2,
        intermediate_scale,
        shared=shared,
        activation=activation,
        limit=limit,
        values=check,
        memory=memory,
    )
    return problem, x, topk_ids, topk_weights, w13, w2, intermediate_scale, precision, backend


def with_shared(problem: LayerProblem, topk_ids, topk_weights):
    """Append the shared experts to ids and weights, as the last choices of every token, with weight 1."""
    # An id that names a shared expert is out of range like any other; it does not select that expert a second time.
    topk_ids = torch.where(topk_ids < problem.experts, topk_ids, -1)
    if problem.shared:
        shared = torch.arange(problem.shared, dtype=torch.int32, device=problem.device) + problem.experts
        topk_ids = torch.cat([topk_ids, shared.expand(problem.tokens, -1)], dim=1)
        topk_weights = torch.cat([topk_weights, topk_weights.new_ones(problem.tokens, problem.shared)], dim=1)
    return topk_ids, topk_weights


def run_layer(*arguments) -> torch.Tensor:
    """Run ``moe_ffn``; [T, H] bf16."""
    problem, x, topk_ids, topk_weights, w13, w2, middle, precision, backend = check_layer(
        arguments, memory=True
    )
    backend = resolve_moe_backend(backend, problem.device, precision)
    out = x.new_empty(problem.tokens, problem.hidden)
    if problem.rows == 0:
        return out.zero_()
    if backend == "reference":
        topk_ids, topk_weights = with_shared(problem, topk_ids, topk_weights)
        tokens = sort_tokens(topk_ids, w13.experts)
        options = (problem.activation, problem.limit, "w4a4" if precision == "auto" else precision)
        return out.copy_(reference.layer(x, tokens, topk_weights, w13, w2, middle, *options))
    steps = LayerSteps()
    tokens = steps.sort(problem, topk_ids)
    a = steps.quantize(x, tokens)
    h = QuantizedRows.empty(problem.rows, problem.width, w13.experts, x.device, row_scale=False)
    options = dict(epilogue=problem.activation, limit=problem.limit, out_scale=middle.contiguous())
    steps.gemm(a, w13, tokens.offsets, h, **options)
    rows = steps.gemm(h, w2, tokens.offsets, x.new_empty(problem.rows, problem.hidden), epilogue="linear")
    return steps.unpermute(rows, tokens, topk_weights, out)


@torch.library.custom_op("warpspec::moe_ffn", mutates_args=(), schema=LAYER)
def moe_ffn(*arguments):
    """Operator of ``moe_ffn``; [T, H] bf16."""
    return run_layer(*arguments)


@moe_ffn.register_fake
def _(*arguments):
    problem, x, *_ = check_layer(arguments, memory=False)
    return x.new_empty(problem.tokens, problem.hidden)


NO_GRADIENTS = {
    name: f"warpspec.moe.{name}: gradients are not implemented (forward only)"
    for name in ("grouped_swiglu", "moe_ffn")
}
register_derivatives(moe_grouped_swiglu, refuse_backward(NO_GRADIENTS["grouped_swiglu"]))
register_derivatives(moe_ffn, refuse_backward(NO_GRADIENTS["moe_ffn"]))


def call(name: str, operator: Callable, run: Callable, *arguments):
    """Call an operator; through torch if ``watched`` says so, otherwise ``run``, the function that it executes.

    name: a key of NO_GRADIENTS.
    """
    tensors = [t for t in arguments if isinstance(t, torch.Tensor)]
    if watched(*tensors):
        return call_operator(operator, *arguments)
    if recorded(*tensors):
        return forward_only(NO_GRADIENTS[name], run, *arguments)
    return run(*arguments)
