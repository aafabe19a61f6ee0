"""What `make demo` runs: the compiled sm_100a kernels on gpt-oss layers, simulated, without a GPU.

Takes the operands of a sliding-window and of a full attention layer of gpt-oss-20b and of its mixture of experts at
their real shapes (a few of the experts), runs the kernels on them, compares with two independent references, and
prints what ran and where traces and picture lie. On a machine with a Hopper GPU the attention layers then run natively
too. Arguments are those of validate_layer.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import validate_layer
from rich.console import Console
from shared import moe_layer
from shared.error_plot import draw

OUT = Path(__file__).resolve().parent.parent / "out" / "demo"
SEQ = 512  # tokens: four tiles of queries and of keys a head; the window skips some, causality others
MOE_SEQ = 8  # tokens that the experts get: a step of decoding


def warp_roles() -> dict[int, str]:
    """Warp index to role of the attention kernel, for reports."""
    from warpspec.fmha.sm100 import AttentionConfig

    config = AttentionConfig()
    return {
        **dict.fromkeys(config.softmax_warps, "softmax"),
        config.mma_warp: "MMA",
        config.load_warp: "load",
    }


def gemm_roles() -> dict[int, str]:
    """Warp index to role of the grouped GEMM."""
    from warpspec.moe.sm100 import GemmConfig, Shape

    config = GemmConfig(Shape(swapped=True, tile_n=MOE_SEQ), epilogue="linear", output="bf16")
    return {
        **dict.fromkeys(config.epilogue_warps, "epilogue"),
        config.mma_warp: "MMA",
        config.load_warp: "load",
        config.schedule_warp: "schedule",
    }


def run_experts(options, console: Console, files: dict) -> list[moe_layer.MoEResult]:
    """The mixture of experts; prints what ran, and names the trace in `files`."""
    from warpspec.sim import SimReport

    of_layer = argparse.Namespace(**{**vars(options), "layer": "moe", "seq": MOE_SEQ})
    results = validate_layer.run(of_layer, console)
    for result in results:
        for report in result.reports:
            gemms = [launch for launch in report.launches if "GroupedGemm" in launch.kernel]
            others = [launch for launch in report.launches if "GroupedGemm" not in launch.kernel]
            for title, launches, roles in (
                ("grouped GEMM 1 with SwiGLU, grouped GEMM 2", gemms, gemm_roles()),
                ("sort, activation quantiser, un-permute", others, {}),
            ):
                console.print(f"\n[bold]What ran: {title}[/]")
                console.print(str(SimReport(launches, report.seconds, report.seed, roles)), markup=False)
            report.roles = gemm_roles()
            trace = OUT / "moe.trace.json"
            report.timeline(trace)
            files["trace of moe, for ui.perfetto.dev"] = trace
    return results


def has_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def run_natively(options, console: Console) -> list[validate_layer.LayerResult]:
    """Run the layers through the sm_90a kernels on this machine's GPU; none where it has no Hopper."""
    if not has_hopper():
        return []
    console.print(
        f"[bold]The same layers on this machine's {torch.cuda.get_device_name()}[/]: the kernels compiled for sm_90a.\n"
    )
    return validate_layer.run(argparse.Namespace(**{**vars(options), "backend": "sm90"}), console)


def main() -> int:
    parser = validate_layer.parser()
    parser.set_defaults(backend="sim", seq=SEQ, plot=OUT / "error.png")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    start = time.perf_counter()
    console.print(
        f"[bold]warpspec demo[/]: attention of {options.model}, {options.batch} x {options.seq} tokens, and its\n"
        "experts, seeded weights and hidden states. CuTe DSL compiles the kernels for sm_100a (Blackwell);\n"
        "the simulator executes what came out, instruction by instruction, on this CPU.\n"
    )
    results = validate_layer.run(options, console)

    OUT.mkdir(parents=True, exist_ok=True)
    files = {"errors by head and position": options.plot, "results": OUT / "results.json"}
    for result in results:
        for number, report in enumerate(result.reports):
            report.roles = warp_roles()
            name = result.kind if len(result.reports) == 1 else f"{result.kind}.{number}"
            console.print(f"\n[bold]What ran: {name}[/]")
            console.print(str(report), markup=False)
            trace = OUT / f"{name}.trace.json"
            report.timeline(trace)
            files[f"trace of {name}, for ui.perfetto.dev"] = trace
    draw(results, options.plot, f"{options.model}, backend {options.backend}")
    console.print()
    experts = run_experts(options, console, files) if options.model in moe_layer.MODELS else []
    native = run_natively(options, console)
    passed = all(result.passed for result in (*results, *experts, *native))
    found = validate_layer.as_json(options, options.backend, results)
    found |= {"moe": moe_layer.as_json(options, options.backend, experts), "passed": passed}
    if native:
        found["native"] = validate_layer.as_json(options, "sm90", native)
    (OUT / "results.json").write_text(json.dumps(found, indent=2))

    worst = max(result.worst_head for result in results)
    console.print(
        f"\n[bold]{'[green]passed' if passed else '[red]FAILED'}[/][/]: worst head {worst:.2e} from the FP32 "
        f"reference (tolerance {validate_layer.O_TOLERANCE:.0e}), "
        + "".join(f"experts {r.layer_error:.2e} (tolerance {moe_layer.TOLERANCE:.0e}); " for r in experts)
        + (f"natively worst head {max(r.worst_head for r in native):.2e}; " if native else "")
        + f"{time.perf_counter() - start:.0f} s"
    )
    for what, path in files.items():
        console.print(
            f"  {what}: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
