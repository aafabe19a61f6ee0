"""A published model's mixture-of-experts layer: the kernels against two independent references.

Seeded or real weights go to NVFP4; hidden states go through transformers' router, then the whole layer runs through
`warpspec.moe.moe_ffn`, from which the results of the stages are kept. They are compared stage by stage and expert by
expert with warpspec's FP32 reference, and as a whole with transformers' own experts in FP32 on the dequantised weights.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from transformers import DeepseekV4Config, GptOssConfig
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.gpt_oss import modeling_gpt_oss

from warpspec.common import nvfp4
from warpspec.moe import NVFP4Experts, moe_ffn, ops, reference
from warpspec.moe.operands import PreparedWeights, QuantizedRows, deinterleave
from warpspec.moe.permute import SortedTokens, sort_tokens

from .devices import device_of
from .moe_inputs import DTYPE, MODELS, LayerInputs, Model, layer_inputs

TOLERANCE = 3e-3  # relative, worst expert, bf16
TORCH_FACTOR = 1.25  # never worse than this times torch's own result in the same dtype
EXPERTS = 4  # of the layer's that take part, unless more are asked for
SEQ = 16  # tokens, likewise


@dataclass(frozen=True)
class MoEResult:
    """Errors of one layer; lists by expert, None for one without tokens."""

    model: str
    tokens: int
    top: int
    hidden: int
    width: int
    shared: int
    rows: list[int]  # of each expert
    first_errors: list[float | None]  # GEMM 1 with its activation, as NVFP4, against the reference's
    second_errors: list[float | None]  # GEMM 2 on what GEMM 1 gave
    torch_worst: float  # torch's GEMM 2 in bf16 on the same operands, worst expert
    quantiser_equal: bool  # activations quantised bit for bit like the reference
    layer_error: float  # whole layer against the FP32 reference
    eager_error: float  # whole layer against transformers' experts in FP32
    router_differences: int
    seconds: float
    reports: tuple = field(default=(), repr=False)  # the simulator's, of all launches together

    @property
    def worst_second(self) -> float:
        return worst(self.second_errors)

    def checks(self) -> list[tuple[str, float, float]]:
        """(what, measured, allowed)."""
        return [
            ("tokens routed otherwise than by transformers", self.router_differences, 0),
            ("activations not quantised bit for bit", int(not self.quantiser_equal), 0),
            (
                "GEMM 1, activation, NVFP4 against FP32 reference, worst expert",
                worst(self.first_errors),
                TOLERANCE,
            ),
            ("GEMM 2 against FP32 reference, worst expert", self.worst_second, TOLERANCE),
            (
                "the same as a multiple of torch's error in bf16",
                self.worst_second / self.torch_worst,
                TORCH_FACTOR,
            ),
            ("layer against FP32 reference", self.layer_error, TOLERANCE),
            ("layer against transformers' experts in FP32", self.eager_error, TOLERANCE),
        ]

    @property
    def passed(self) -> bool:
        """Every check holds; a NaN fails."""
        return all(measured <= allowed for _, measured, allowed in self.checks())


def worst(errors: list[float | None]) -> float:
    """The largest; experts without tokens do not count, a NaN of another does."""
    counted = [error for error in errors if error is not None]
    return torch.tensor(counted).max().item() if counted else float("nan")


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    norm = torch.linalg.vector_norm
    return (norm(got.float() - expected.float()) / norm(expected.float())).item()


# -- the kernels, with what each stage gave


@dataclass
class LayerSteps:
    """What the stages of a layer gave: quantised rows, GEMM 1's result, GEMM 2's."""

    tokens: SortedTokens
    weights: torch.Tensor
    a: QuantizedRows
    h: QuantizedRows
    rows: torch.Tensor
    out: torch.Tensor


def run_layer(inputs: LayerInputs, backend: str) -> tuple[LayerSteps, float, tuple]:
    """(stages on the CPU, seconds, reports) of `moe_ffn` on a backend."""
    model, experts, kept = inputs.model, inputs.experts, {}
    device = device_of(backend)
    on_device = experts.to(device)

    def keep(name, function):
        def kept_by(self, *arguments, **options):
            result = function(self, *arguments, **options)
            kept.setdefault(name, []).append(result)
            return result

        return kept_by

    start = time.perf_counter()
    with (
        mock.patch.object(ops.LayerSteps, "quantize", keep("a", ops.LayerSteps.quantize)),
        mock.patch.object(ops.LayerSteps, "gemm", keep("gemm", ops.LayerSteps.gemm)),
    ):
        out = moe_ffn(
            *(inputs.x.to(device), on_device, inputs.ids.to(device), inputs.weights.to(device)),
            activation=model.activation,
            limit=model.limit,
            check=True,
            backend=backend,
        ).cpu()
    seconds = time.perf_counter() - start
    reports = (importlib.import_module("warpspec.sim").last_report(),) if backend == "sim" else ()

    count = experts.shared
    every = torch.arange(count, dtype=torch.int32) + experts.experts
    ids = torch.cat([inputs.ids, every.expand(len(inputs.ids), -1)], dim=1)
    weights = torch.cat([inputs.weights, torch.ones(len(inputs.ids), count)], dim=1)
    tokens = sort_tokens(ids, experts.w13.experts)
    if kept:
        (a,), (h, rows) = kept["a"], kept["gemm"]
        parts = (to_cpu(a), to_cpu(h), rows.cpu())
    else:  # the reference keeps nothing
        a = QuantizedRows.from_rows(inputs.x[(tokens.source // ids.shape[1]).long()], tokens.offsets)
        h = first_reference(inputs, a, tokens)
        rows = reference.grouped_gemm(h, experts.w2, tokens.offsets, activation=None, limit=None).to(DTYPE)
        parts = (a, h, rows)
    return LayerSteps(tokens, weights, *parts, out), seconds, reports


def to_cpu(q: QuantizedRows) -> QuantizedRows:
    scale = None if q.row_scale is None else q.row_scale.cpu()
    return QuantizedRows(q.data.cpu(), q.scales.cpu(), scale, q.k)


def first_reference(inputs: LayerInputs, a: QuantizedRows, tokens: SortedTokens) -> QuantizedRows:
    """GEMM 1 with its activation by the reference, as NVFP4."""
    model, experts = inputs.model, inputs.experts
    options = dict(activation=model.activation, limit=model.limit)
    rows = reference.grouped_gemm(a, experts.w13, tokens.offsets, **options)
    return QuantizedRows.from_rows(rows, tokens.offsets, out_scale=experts.intermediate_scale)


# -- the references


def by_expert(function: Callable, tokens: SortedTokens) -> list[float | None]:
    """function(expert, its rows as a slice) for each expert, None for one without rows."""
    start, found = 0, []
    for e, end in enumerate(tokens.offsets.tolist()):
        found.append(function(e, slice(start, end)) if end > start else None)
        start = end
    return found


def eager_layer(inputs: LayerInputs, stages: LayerSteps) -> torch.Tensor:
    """transformers' experts modules in FP32 on the dequantised weights, one expert at a time: [T, H].

    Activations are rounded to NVFP4 where the layer rounds them: before an expert, and where its `_apply_gate` returns.
    """
    model, experts = inputs.model, inputs.experts
    module = experts_module(model)
    apply_gate, scale = module._apply_gate, None

    def rounded(gate_up):
        h = apply_gate(gate_up)
        padded = torch.nn.functional.pad(h, (0, -h.shape[-1] % nvfp4.NVFP4_BLOCK))
        return nvfp4.dequantize(nvfp4.quantize(padded, scale))[..., : h.shape[-1]]

    module._apply_gate = rounded
    hidden = nvfp4.dequantize(nvfp4.quantize(inputs.x, global_dims=1))
    choices, total = stages.tokens.choices, torch.zeros(hidden.shape)

    def add(e, rows):
        nonlocal scale
        scale = experts.intermediate_scale[e]
        fill_module(module, experts, e)
        source = stages.tokens.source[rows].long()
        token = source // choices
        zero = torch.zeros(len(source), 1, dtype=torch.long)
        with torch.no_grad():
            result = module(hidden[token], zero, stages.weights.flatten()[source][:, None])
        total.index_add_(0, token, result)
        return 0.0

    by_expert(add, stages.tokens)
    return total


def experts_module(model: Model) -> torch.nn.Module:
    """transformers' module of one expert."""
    if model.biases:
        config = GptOssConfig(
            hidden_size=model.hidden,
            intermediate_size=model.width,
            num_local_experts=1,
            swiglu_limit=model.limit,
        )
        module = modeling_gpt_oss.GptOssExperts(config)
    else:
        config = DeepseekV4Config(
            hidden_size=model.hidden,
            moe_intermediate_size=model.width,
            n_routed_experts=1,
            swiglu_limit=model.limit,
        )
        module = modeling_deepseek_v4.DeepseekV4Experts(config)
    config._experts_implementation = "eager"
    return module.eval()


def fill_module(module: torch.nn.Module, experts: NVFP4Experts, e: int) -> None:
    """Weights and biases of expert e, dequantised."""
    gate, up = deinterleave(reference.one_expert(experts.w13, e)[None])
    down = reference.one_expert(experts.w2, e)[None, :, : experts.width] / experts.intermediate_scale[e]
    both = (
        torch.cat([gate, up], dim=1)
        if module.is_concatenated
        else torch.stack([gate, up], dim=2).flatten(1, 2)
    )
    with torch.no_grad():
        module.gate_up_proj.copy_(both.transpose(1, 2) if module.is_transposed else both)
        module.down_proj.copy_(down.transpose(1, 2) if module.is_transposed else down)
        if module.has_bias:
            biases = torch.stack(deinterleave(experts.w13.bias[e : e + 1]), dim=2)  # [1, I, 2]
            module.gate_up_proj_bias.copy_(biases.flatten(1))
            module.down_proj_bias.copy_(experts.w2.bias[e : e + 1])


def second_errors(w2: PreparedWeights, h: torch.Tensor, got: torch.Tensor, e: int) -> tuple[float, float]:
    """Errors of one expert's GEMM 2, and of torch's in bf16, on dequantised operands, against torch's in FP32."""
    weight, bias = reference.one_expert(w2, e), None if w2.bias is None else w2.bias[e]
    exact = torch.nn.functional.linear(h, weight, bias)
    rounded = (None if tensor is None else tensor.to(DTYPE) for tensor in (h, weight, bias))
    return relative_error(got, exact), relative_error(torch.nn.functional.linear(*rounded), exact)


def validate(name: str, inputs: LayerInputs, backend: str, stage) -> MoEResult:
    """Runs the layer and the references; `stage(text)` is a context that shows progress."""
    experts = inputs.experts
    with stage(f"moe_ffn, backend {backend}", live=False):
        stages, seconds, reports = run_layer(inputs, backend)
    tokens = stages.tokens
    with stage("FP32 reference, stage by stage"):
        source = (tokens.source // tokens.choices).long()
        a = QuantizedRows.from_rows(inputs.x[source], tokens.offsets)
        equal = torch.equal(stages.a.data[:, : a.k // 2], a.data[:, : a.k // 2]) and torch.equal(
            stages.a.dequantize(tokens.offsets), a.dequantize(tokens.offsets)
        )
        first_quantised = first_reference(inputs, a, tokens)
        expected_h = first_quantised.dequantize(tokens.offsets)
        h = stages.h.dequantize(tokens.offsets)
        first = by_expert(lambda e, rows: relative_error(h[rows], expected_h[rows]), tokens)
        second = by_expert(lambda e, rows: second_errors(experts.w2, h[rows], stages.rows[rows], e), tokens)
        rows = reference.grouped_gemm(
            first_quantised, experts.w2, tokens.offsets, activation=None, limit=None
        )
        layer = reference.unpermute(rows, tokens, stages.weights)
    with stage("transformers' experts, FP32"):
        eager = eager_layer(inputs, stages)
    return MoEResult(
        model=name,
        tokens=inputs.x.shape[0],
        top=inputs.ids.shape[1],
        hidden=experts.hidden,
        width=experts.width,
        shared=experts.shared,
        rows=torch.diff(tokens.offsets, prepend=tokens.offsets.new_zeros(1)).tolist(),
        first_errors=first,
        second_errors=[None if errors is None else errors[0] for errors in second],
        torch_worst=worst([None if errors is None else errors[1] for errors in second]),
        quantiser_equal=equal,
        layer_error=relative_error(stages.out, layer),
        eager_error=relative_error(stages.out, eager),
        router_differences=inputs.router_differences,
        seconds=seconds,
        reports=reports,
    )


def print_result(console: Console, result: MoEResult) -> None:
    """Errors by expert and the checks."""
    table = Table(
        title=f"experts of {result.model}: {result.tokens} tokens take {result.top} each, "
        f"H {result.hidden}, I {result.width}; error by expert, in 1e-3"
    )
    for heading in ("expert", "tokens", "GEMM 1 + activation, NVFP4", "GEMM 2, bf16"):
        table.add_column(heading, justify="right")
    routed = len(result.rows) - result.shared
    for e, rows in enumerate(result.rows):
        cells = (
            "-" if error is None else f"[{'red' if not error <= TOLERANCE else 'none'}]{1e3 * error:.2f}[/]"
            for error in (result.first_errors[e], result.second_errors[e])
        )
        table.add_row(f"{e}" if e < routed else "shared", str(rows), *cells)
    console.print(table)
    for what, measured, allowed in result.checks():
        verdict = "[green]ok[/]" if measured <= allowed else "[red]FAILED[/]"
        console.print(f"  {verdict}  {what}: {measured:.2e} (at most {allowed:.2e})", highlight=False)
    console.print()


def run(options, console: Console, backend: str, stage) -> list[MoEResult]:
    """Validates the model's layer as validate_layer.py's options say, printing as it goes."""
    if options.model not in MODELS:
        raise KeyError(f"{options.model} has no experts, only {', '.join(MODELS)} do")
    model = MODELS[options.model]
    experts = min(options.experts or EXPERTS, model.experts)
    tokens = options.batch * (1 if options.decode else options.seq or SEQ)
    console.print(
        f"[bold]{options.model}, layer {model.layer}: mixture of experts, {experts} of {model.experts}[/]",
        highlight=False,
    )
    with stage("weights to NVFP4, router (transformers)"):
        inputs = layer_inputs(
            model, tokens=tokens, experts=experts, seed=options.seed, checkpoint=options.checkpoint
        )
    result = validate(options.model, inputs, backend, stage)
    print_result(console, result)
    return [result]


def as_json(options, backend: str, results: list[MoEResult]) -> dict:
    """Machine-readable form of what was run and found."""
    return {
        "model": options.model,
        "layer": "moe",
        "backend": backend,
        "seed": options.seed,
        "weights": str(options.checkpoint) if options.checkpoint else "seeded",
        "passed": all(result.passed for result in results),
        "layers": [
            {
                "kind": "moe",
                "tokens": result.tokens,
                "experts_per_token": result.top,
                "rows_by_expert": result.rows,
                "passed": result.passed,
                "seconds": result.seconds,
                "checks": [
                    {"name": name, "measured": measured, "allowed": allowed}
                    for name, measured, allowed in result.checks()
                ],
                "gemm_1_error_by_expert": result.first_errors,
                "gemm_2_error_by_expert": result.second_errors,
                "torch_gemm_2_bf16": result.torch_worst,
            }
            for result in results
        ],
    }
