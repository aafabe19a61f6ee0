"""Compares the kernels with two independent references on a model's layer at its real shapes.

    python scripts/validate_layer.py --model gpt-oss-20b --layer attention --seq 512
    python scripts/validate_layer.py --model deepseek-v4-flash --kind csa --decode --seq 3000
    python scripts/validate_layer.py --model gpt-oss-120b --layer moe --experts 8 --seq 64
    python scripts/validate_layer.py --model deepseek-v4-flash --cache fp8

Hidden states go through transformers' own norm, projections, rotary embedding and compression of keys; the
attention itself is then computed by the kernel, by warpspec's FP32 reference, by transformers' eager code
(FP32 and the model's dtype) and by torch's SDPA in the model's dtype. moe_layer.py says what `--layer moe` does,
latent_layer.py what `--cache` does.
Exit status 1 when a tolerance is exceeded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from shared import deepseek_v4_layer, gpt_oss_layer, llama_layer, moe_layer
from shared.attention_layer import AttentionInputs, KeySet, attention_inputs, eager
from shared.devices import device_of

import warpspec.fmha
from warpspec.common.errors import UnsupportedProblem

O_TOLERANCE = 4e-3  # relative, worst head, bf16
LSE_TOLERANCE = 1e-3  # absolute
TORCH_FACTOR = 1.25  # never worse than this times torch's own result in the same dtype
FAMILIES = {
    model: family for family in (gpt_oss_layer, deepseek_v4_layer, llama_layer) for model in family.MODELS
}
KINDS = sorted({kind for model, family in FAMILIES.items() for kind in family.layers(model)})
HEADS_PER_ROW = 8  # of the printed table, at most
SEQ = 256  # tokens per sequence, unless said otherwise


@dataclass(frozen=True)
class LayerResult:
    """Errors of one layer's attention; per-head lists are relative errors over batch, positions and D."""

    kind: str
    query_shape: tuple[int, ...]  # [B, Hq, Sq, D]
    kv_heads: int
    first_position: int  # of the queries
    keys: int
    key_sets: tuple[KeySet, ...]
    kernel_heads: list[float]  # kernel against warpspec's FP32 reference
    eager_heads: list[float]  # kernel against transformers' eager code in FP32
    sdpa_worst: float  # torch SDPA in bf16 against the FP32 reference, worst head
    eager_worst: float  # transformers' eager code in bf16, likewise
    references_worst: float  # the two FP32 references against each other
    lse_worst: float  # absolute
    output_error: float  # of the layer's output, after its output projection, relative
    position_errors: torch.Tensor  # [Hq, Sq], relative, kernel against the FP32 reference
    seconds: float
    reports: tuple  # sim.SimReport of each of the kernel's runs

    def checks(self) -> list[tuple[str, float, float]]:
        """(what, measured, allowed)."""
        return [
            ("kernel against FP32 reference, worst head", self.worst_head, O_TOLERANCE),
            (
                "kernel against transformers eager FP32, worst head",
                torch.tensor(self.eager_heads).max().item(),
                O_TOLERANCE,
            ),
            ("the same as a multiple of torch SDPA's error in bf16", self.torch_ratio, TORCH_FACTOR),
            ("log-sum-exp, absolute", self.lse_worst, LSE_TOLERANCE),
        ]

    @property
    def worst_head(self) -> float:
        """Largest of kernel_heads, NaN if one is (Python's max would lose it)."""
        return torch.tensor(self.kernel_heads).max().item()

    @property
    def torch_ratio(self) -> float:
        """Kernel's worst head over that of torch SDPA in the same dtype."""
        return self.worst_head / self.sdpa_worst

    @property
    def passed(self) -> bool:
        """Every check holds; a NaN fails."""
        return all(measured <= allowed for _, measured, allowed in self.checks())


def relative_error(got: torch.Tensor, expected: torch.Tensor, dim=None) -> torch.Tensor:
    """||got - expected|| / ||expected|| over the dimensions `dim`, all by default."""
    norm, expected = torch.linalg.vector_norm, expected.float()
    return norm(got.float() - expected, dim=dim) / norm(expected, dim=dim)


def head_errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each head of [B, S, H, D]: [H]."""
    return relative_error(got, expected, dim=(0, 1, 3))


def reference(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """warpspec's FP32 reference: o [B, Sq, Hq, D] and lse [B, Hq, Sq], FP32, one KV head at a time."""
    group = inputs.query.shape[1] // inputs.key.shape[1]
    parts = []
    for h in range(inputs.key.shape[1]):
        of_group = slice(h * group, (h + 1) * group)
        one = replace(
            inputs,
            query=inputs.query[:, of_group],
            key=inputs.key[:, h : h + 1],
            value=None if inputs.value is None else inputs.value[:, h : h + 1],
        )
        states = [
            warpspec.fmha.attention(*operands, **options, normalize=False, backend="reference")
            for operands, options in calls(one)
        ]
        sink = None if inputs.sinks is None else inputs.sinks[of_group]
        parts.append(warpspec.fmha.merge(states, sink=sink))
    return torch.cat([o for o, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=1)


def sdpa(inputs: AttentionInputs) -> torch.Tensor:
    """torch's SDPA in the operands' dtype: [B, Sq, Hq, D]. The sink is a zero key with a bias."""
    query, key, value = inputs.query, inputs.key, inputs.key if inputs.value is None else inputs.value
    batch, heads, rows, _ = query.shape
    mask = inputs.mask.to(query.dtype).expand(batch, heads, rows, -1)
    if inputs.sinks is not None:
        zero = torch.zeros_like(key[:, :, :1])
        sink = inputs.sinks.to(query.dtype)[None, :, None, None].expand(batch, heads, rows, 1)
        mask = torch.cat([mask, sink], dim=-1)
        key, value = (torch.cat([tensor, zero], dim=2) for tensor in (key, value))
    o = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=inputs.scaling, enable_gqa=True
    )
    return o.transpose(1, 2)


def calls(inputs: AttentionInputs, device: str = "cpu") -> list[tuple[tuple, dict]]:
    """((q, k, v), keyword arguments) of `warpspec.fmha.attention` for each of the layer's key sets."""
    q, k, v = (
        None if tensor is None else tensor.to(device).transpose(1, 2)
        for tensor in (inputs.query, inputs.key, inputs.value)
    )
    found = []
    for keys in inputs.key_sets:
        part = slice(keys.start, keys.end)
        options = dict(scale=inputs.scaling, causal=keys.causal)
        if keys.window is not None:
            options["window"] = (keys.window - 1, 0)
        if keys.key_stride != 1:
            options["key_stride"] = keys.key_stride
            options["q_start"] = torch.full(
                (q.shape[0],), inputs.first_position, dtype=torch.int32, device=device
            )
        if keys.masked:
            options["bias"] = inputs.mask[..., part].contiguous().to(device)
        found.append(((q, k[:, part], None if v is None else v[:, part]), options))
    return found


def run_kernel(inputs: AttentionInputs, backend: str):
    """(o [B, Sq, Hq, D], lse [B, Hq, Sq], seconds, SimReport of each run, none but with "sim")."""
    device = device_of(backend)
    sink = None if inputs.sinks is None else inputs.sinks.to(device)
    sets, results, reports = calls(inputs, device), [], []
    # One key set takes the sink at once; several give states, to which merge() adds it.
    last = dict(sink=sink, return_lse=True) if len(sets) == 1 else dict(normalize=False)
    start = time.perf_counter()
    for operands, options in sets:
        results.append(warpspec.fmha.attention(*operands, **options, **last, backend=backend))
        if backend == "sim":
            reports.append(importlib.import_module("warpspec.sim").last_report())
    o, lse = results[0] if len(sets) == 1 else warpspec.fmha.merge(results, sink=sink)
    o, lse = o.to(inputs.query.dtype).cpu(), lse.cpu()
    return o, lse, time.perf_counter() - start, tuple(reports)


def resolve_backend(backend: str) -> str:
    """What "auto" stands for on this machine."""
    if backend != "auto":
        return backend
    return os.environ.get("WARPSPEC_BACKEND") or ("auto" if torch.cuda.is_available() else "sim")


def validate(inputs: AttentionInputs, backend: str, stage) -> LayerResult:
    """Runs kernel and references on one layer's operands; `stage(text)` is a context that shows progress."""
    with stage(f"attention kernel, backend {backend}", live=False):
        o, lse, seconds, reports = run_kernel(inputs, backend)
    with stage("FP32 reference"):
        expected, expected_lse = reference(inputs)
    with stage("transformers eager, FP32 and bf16; torch SDPA, bf16"):
        eager_fp32, eager_bf16 = eager(inputs, torch.float32), eager(inputs, inputs.query.dtype)
        sdpa_bf16 = sdpa(inputs)
    with stage("output projection, FP32"):
        layer, layer_expected = (inputs.output(tensor.float()) for tensor in (o, expected))
    return LayerResult(
        kind=inputs.kind,
        query_shape=tuple(inputs.query.shape),
        kv_heads=inputs.key.shape[1],
        first_position=inputs.first_position,
        keys=inputs.key.shape[2],
        key_sets=inputs.key_sets,
        kernel_heads=head_errors(o, expected).tolist(),
        eager_heads=head_errors(o, eager_fp32).tolist(),
        sdpa_worst=head_errors(sdpa_bf16, expected).max().item(),
        eager_worst=head_errors(eager_bf16, expected).max().item(),
        references_worst=head_errors(expected, eager_fp32).max().item(),
        lse_worst=(lse - expected_lse).abs().max().item(),
        output_error=relative_error(layer, layer_expected).item(),
        position_errors=relative_error(o, expected, dim=(0, 3)).T,
        seconds=seconds,
        reports=reports,
    )


def stages(console: Console):
    """Context manager factory: a spinner while a stage runs, one line with its time when it is over.

    live=False: no spinner, for stages that show progress of their own.
    """

    @contextmanager
    def stage(text: str, live: bool = True):
        start = time.perf_counter()
        if live:
            with console.status(text):
                yield
        else:
            console.print(f"  {text} ...")
            yield
        console.print(f"  {text}: {time.perf_counter() - start:.1f} s")

    return stage


def print_result(console: Console, result: LayerResult) -> None:
    """Per-head errors, a row for each KV head, and the checks."""
    _, heads, rows, _ = result.query_shape
    group = heads // result.kv_heads
    columns = min(group, HEADS_PER_ROW)
    sets = " and ".join(map(str, result.key_sets))
    table = Table(title=f"{result.kind}: {rows} queries; keys: {sets}; error by head, in 1e-3")
    table.add_column("KV head")
    for member in range(columns):
        table.add_column(f"+{member}", justify="right")
    for first in range(0, heads, columns):
        cells = (
            f"[{'red' if not error <= O_TOLERANCE else 'none'}]{1e3 * error:.2f}[/]"
            for error in result.kernel_heads[first : first + columns]
        )
        table.add_row(f"{first // group}  (query {first}-{first + columns - 1})", *cells)
    console.print(table)
    for what, measured, allowed in result.checks():
        verdict = "[green]ok[/]" if measured <= allowed else "[red]FAILED[/]"
        console.print(f"  {verdict}  {what}: {measured:.2e} (at most {allowed:.2e})", highlight=False)
    console.print(
        f"      for comparison, bf16 against FP32: torch SDPA {result.sdpa_worst:.2e}, transformers eager "
        f"{result.eager_worst:.2e}; the two FP32 references: {result.references_worst:.2e}; "
        f"layer output: {result.output_error:.2e}\n",
        highlight=False,
    )


def as_json(options: argparse.Namespace, backend: str, results: list) -> dict:
    """Machine-readable form of what was run and found."""
    if options.layer == "moe":
        return moe_layer.as_json(options, backend, results)
    return {
        "model": options.model,
        "layer": options.layer,
        "compressed": options.compressed,
        "backend": backend,
        "batch": options.batch,
        "seq": options.seq or SEQ,
        "decode": options.decode,
        "seed": options.seed,
        "weights": str(options.checkpoint) if options.checkpoint else "seeded",
        "passed": all(result.passed for result in results),
        "layers": [
            {
                "kind": result.kind,
                "query_shape": result.query_shape,
                "keys": result.keys,
                "key_sets": [asdict(keys) for keys in result.key_sets],
                "passed": result.passed,
                "seconds": result.seconds,
                "checks": [
                    {"name": name, "measured": measured, "allowed": allowed}
                    for name, measured, allowed in result.checks()
                ],
                "error_by_head": result.kernel_heads,
                "torch_sdpa_bf16": result.sdpa_worst,
                "transformers_eager_bf16": result.eager_worst,
                "layer_output": result.output_error,
            }
            for result in results
        ],
    }


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(FAMILIES), default="gpt-oss-20b")
    parser.add_argument("--layer", choices=["attention", "moe"], default="attention")
    parser.add_argument("--kind", choices=KINDS, help="of attention layer; every kind of the model without")
    parser.add_argument(
        "--experts",
        type=positive,
        metavar="N",
        help=f"only the layer's first N experts (default {moe_layer.EXPERTS})",
    )
    parser.add_argument(
        "--compressed",
        choices=["key-sets", "bias"],
        default="key-sets",
        help="compressed keys as a set of their own, merged with the window's, or all keys under one bias",
    )
    parser.add_argument(
        "--cache",
        choices=["fp8", "bf16"],
        help="DeepSeek-V4: the whole serving path on pools of such rows (--seq: 24 by default, 136 on a GPU)",
    )
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument(
        "--seq",
        type=positive,
        help=f"tokens per sequence (default {SEQ}, with --layer moe {moe_layer.SEQ}); with --decode, cached",
    )
    parser.add_argument(
        "--decode", action="store_true", help="one new token per sequence against the KV cache"
    )
    parser.add_argument("--backend", choices=["auto", "sm100", "sm90", "sim", "reference"], default="auto")
    parser.add_argument("--seed", type=int, default=0, help="of inputs, and of weights without --checkpoint")
    parser.add_argument("--checkpoint", type=Path, help=".safetensors file, or folder of a published model")
    parser.add_argument("--json", action="store_true", help="results as JSON on standard output")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="error by head and position")
    return parser


def run(options: argparse.Namespace, console: Console) -> list:
    """Validates each kind of layer the model has, or the one asked for, printing as it goes.

    Returns LayerResults, with --layer moe MoEResults.
    """
    if options.layer == "moe":
        return moe_layer.run(options, console, resolve_backend(options.backend), stages(console))
    if options.cache:
        from shared import latent_layer

        return latent_layer.run(options, console, resolve_backend(options.backend), stages(console))
    backend, family = resolve_backend(options.backend), FAMILIES[options.model]
    indices, results = family.layers(options.model), []
    if options.kind not in (None, *indices):
        raise KeyError(f"{options.model} has no layer {options.kind}, only {', '.join(indices)}")
    for kind in [options.kind] if options.kind else indices:
        console.print(f"[bold]{options.model}, layer {indices[kind]}: {kind}[/]", highlight=False)
        stage = stages(console)
        with stage("norm, projections, rotary embedding (transformers)"):
            inputs = attention_inputs(
                family.attention_layer(options.model, kind),
                batch=options.batch,
                seq=options.seq or SEQ,
                decode=options.decode,
                seed=options.seed,
                checkpoint=options.checkpoint,
            )
        if options.compressed == "bias" and len(inputs.key_sets) > 1:
            inputs = inputs.with_bias()
        results.append(validate(inputs, backend, stage))
        print_result(console, results[-1])
    return results


def main() -> int:
    arguments = parser()
    options = arguments.parse_args()
    if options.layer == "moe" and options.plot:
        arguments.error("--plot draws errors by head: it belongs to --layer attention")
    if options.cache and (options.plot or options.json or options.decode or options.layer == "moe"):
        arguments.error("--cache goes with --model, --kind, --seq, --batch, --backend and --seed only")
    console = Console(stderr=options.json, soft_wrap=True)
    try:
        results = run(options, console)
    except (UnsupportedProblem, FileNotFoundError, KeyError) as error:
        console.print(f"[red]{type(error).__name__}:[/] {error}", highlight=False)
        return 2
    if options.plot:
        from shared.error_plot import draw

        draw(results, options.plot, f"{options.model}, backend {resolve_backend(options.backend)}")
        console.print(f"error by head and position: {options.plot}", highlight=False)
    if options.json:
        print(json.dumps(as_json(options, resolve_backend(options.backend), results), indent=2))
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
