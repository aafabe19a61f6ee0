"""The command line, ``python -m warpspec COMMAND``: compile kernels ahead, run an operator in the simulator."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

ARCHITECTURES = ("sm_100a", "sm_90a")
OPERATORS = ("attention", "softmax", "topk")
DESCRIPTION = """\
commands:
  compile    compile a model's attention kernels ahead and keep them on disk (needs no GPU)
  simulate   run one operator at a shape in the simulator, and compare it with the FP32 reference (needs no GPU)

`python -m warpspec COMMAND --help` has the options of a command."""
EXAMPLES = """\
examples:
  python -m warpspec simulate attention --queries 128 --keys 256 --causal --check order
  python -m warpspec simulate attention --arch sm_90a --head-dim 128 --timeline trace.json
  python -m warpspec simulate softmax --rows 4 --columns 1000"""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def simulate_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m warpspec simulate",
        description="Run an operator's compiled kernels on this CPU, instruction by instruction, on random inputs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operator", choices=OPERATORS)
    parser.add_argument("--arch", choices=ARCHITECTURES, default=ARCHITECTURES[0], help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs and of the order of threads")
    parser.add_argument("--check", choices=["order"], help="order: also look for missing waits and fences")
    parser.add_argument(
        "--timeline", metavar="FILE", help="write a trace of the run for Perfetto (ui.perfetto.dev)"
    )
    attention = parser.add_argument_group("attention")
    attention.add_argument("--batch", type=positive, default=1)
    attention.add_argument("--queries", type=positive, default=128, help="queries a sequence (default 128)")
    attention.add_argument("--keys", type=positive, default=128, help="keys a sequence (default 128)")
    attention.add_argument("--heads", type=positive, default=2, help="query heads (default 2)")
    attention.add_argument("--kv-heads", type=positive, default=1, help="default 1")
    attention.add_argument("--head-dim", type=positive, default=64, help="default 64")
    attention.add_argument("--causal", action="store_true")
    rows = parser.add_argument_group("softmax, topk")
    rows.add_argument("--rows", type=positive, default=4, help="default 4")
    rows.add_argument("--columns", type=positive, default=1000, help="default 1000")
    rows.add_argument("--k", type=positive, default=8, help="of topk (default 8)")
    return parser


def call_of(options: argparse.Namespace):
    """A function of the backend that computes the operator on inputs of the seed; the result is one tensor."""
    import torch

    generator = torch.Generator().manual_seed(options.seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    if options.operator == "attention":
        from warpspec.fmha import attention

        q = randn(options.batch, options.queries, options.heads, options.head_dim)
        k, v = (randn(options.batch, options.keys, options.kv_heads, options.head_dim) for _ in "kv")
        return lambda backend: attention(q, k, v, causal=options.causal, backend=backend)
    from warpspec.softmax import softmax, softmax_topk

    x = randn(options.rows, options.columns)
    if options.operator == "softmax":
        return lambda backend: softmax(x, backend=backend)
    return lambda backend: softmax_topk(x, options.k, backend=backend)[0]


def simulate(arguments: Sequence[str]) -> int:
    parser = simulate_parser()
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed: must not be negative, got {options.seed}")
    try:
        from warpspec import sim
    except ImportError as error:
        parser.error(f"the simulator cannot be imported ({error}): pip install 'warpspec[sim]'")
    from warpspec.common.launch import simulating

    if options.check:
        os.environ[sim.CHECK_VARIABLE] = options.check
    try:
        call = call_of(options)
        with simulating(options.arch, seed=options.seed):
            result = call("sim").float()
        expected = call("reference").float()
    except sim.SimError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # UnsupportedProblem is one
        parser.error(str(error))
    report = sim.last_report()
    print(report)
    error = ((result - expected).norm() / expected.norm()).item()
    print(f"relative difference from the FP32 reference: {error:.2e}")
    if options.timeline:
        report.timeline(options.timeline)
        print(f"timeline: {options.timeline}")
    return 0


def compile_ahead(arguments: Sequence[str]) -> int:
    from warpspec.aot.__main__ import main as aot

    return aot(arguments)


COMMANDS = {"compile": compile_ahead, "simulate": simulate}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m warpspec",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command")
    options = parser.parse_args(arguments)
    return COMMANDS[options.command](options.arguments)


if __name__ == "__main__":
    sys.exit(main())
