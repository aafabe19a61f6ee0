"""What `make demo` runs: the compiled sm_100a attention kernel on gpt-oss layers, simulated, without a GPU.

Takes the operands of a sliding-window and of a full attention layer of gpt-oss-20b at their real shapes, runs
the kernel on them, compares with two independent references, and prints what ran and where trace and picture
lie. Arguments are those of validate_layer.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import validate_layer
from error_plot import draw
from rich.console import Console

OUT = Path(__file__).resolve().parent.parent / "out" / "demo"
SEQ = 512  # tokens: four tiles of queries and of keys a head; the window skips some, causality others


def warp_roles() -> dict[int, str]:
    """Warp index to role of the attention kernel, for reports."""
    from warpspec.fmha.sm100 import AttentionConfig

    config = AttentionConfig("bfloat16")
    return {
        **dict.fromkeys(config.softmax_warps, "softmax"),
        config.mma_warp: "MMA",
        config.load_warp: "load",
    }


def main() -> int:
    parser = validate_layer.parser()
    parser.set_defaults(backend="sim", seq=SEQ, plot=OUT / "error.png")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    start = time.perf_counter()
    console.print(
        f"[bold]warpspec demo[/]: attention of {options.model}, {options.batch} x {options.seq} tokens,\n"
        "seeded weights and hidden states. CuTe DSL compiles the kernel for sm_100a (Blackwell); the\n"
        "simulator executes what came out, instruction by instruction, on this CPU.\n"
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
    (OUT / "results.json").write_text(
        json.dumps(validate_layer.as_json(options, options.backend, results), indent=2)
    )

    passed = all(result.passed for result in results)
    worst = max(result.worst_head for result in results)
    console.print(
        f"\n[bold]{'[green]passed' if passed else '[red]FAILED'}[/][/]: worst head {worst:.2e} from the FP32 "
        f"reference (tolerance {validate_layer.O_TOLERANCE:.0e}); {time.perf_counter() - start:.0f} s"
    )
    for what, path in files.items():
        console.print(
            f"  {what}: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
