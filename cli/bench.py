"""``python -m warpspec bench``: times an operator on this machine's GPU, beside torch's own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from warpspec.cli import cases, timing
from warpspec.cli.options import LARGE, add_options, check_options
from warpspec.common.backend import resolve_backend
from warpspec.common.hardware import GPUS

OPERATORS = ("attention", "gradients", "softmax", "topk")  # those that torch has, too
WRONG = 2  # our result and torch's may differ by this many tolerances, because each may be off by one
EXAMPLES = """\
Prints the median time of a call, ours and torch's, in turn on the same inputs in the same process, and how many times
as long torch's takes: above 1 we are faster. Forward operators are timed in CUDA graphs, gradients (forward and
backward together) between events. Forward inputs rotate through more memory than the L2 holds. Results are compared
first.
Exit status 1: ours is not what torch computes. 2: no GPU that there are kernels for.

The repository's scripts/bench_*.py compare with flash-attn-4, cuDNN, QuACK, FlashMLA, DeepGEMM and others.

examples:
  python -m warpspec bench attention --batch 2 --queries 8192 --keys 8192 --heads 32 --kv-heads 32 --causal
  python -m warpspec bench attention --batch 32 --queries 1 --keys 8192 --heads 64      decoding
  python -m warpspec bench softmax --rows 32768 --columns 4096"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m warpspec bench",
        usage="%(prog)s OPERATOR [options]",
        description="Time an operator on this machine's GPU beside torch's own, on random inputs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("operator", choices=OPERATORS, metavar="OPERATOR", help=", ".join(OPERATORS))
    add_options(parser, OPERATORS, LARGE)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Returns 0, 1 where ours differs from torch's, 2 without a GPU; exits with 2 for bad options."""
    options = parser().parse_args(arguments)
    check_options(parser(), options, [options.operator])
    if not torch.cuda.is_available():
        known = ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in GPUS.values())
        print(
            f"bench: no CUDA GPU here; it measures one that there are kernels for: {known} and their like.\n"
            "Without a GPU, `python -m warpspec simulate` counts instructions and bytes; --clocks predicts times.",
            file=sys.stderr,
        )
        return 2
    try:
        return measure(options, resolve_backend("auto", torch.device("cuda", 0)))
    except ValueError as error:  # UnsupportedProblem is one
        parser().error(str(error))
    except torch.OutOfMemoryError as error:
        parser().error(f"inputs and results do not fit this GPU: {error}")


def measure(options: argparse.Namespace, backend: str) -> int:
    """Compare, time, print; returns the exit status."""
    make = cases.OPERATORS[options.operator]
    case = make(options, "cuda")
    expected = case.expected() if case.torchs is None else case.torchs()
    error = case.error(case.run(backend), [tensor.float() for tensor in expected])
    allowed = case.tolerance * (1 if case.torchs is None else WRONG)
    print(f"{timing.header(('warpspec', *timing.PACKAGES))}\n{case.title}")
    if not error <= allowed:
        print(f"FAILED: the result differs by {error:.1e}, allowed {allowed:.1e}; `validate` says more")
        return 1
    candidates = {"warpspec": lambda one: one.run(backend)}
    for name in case.peers:
        try:
            case.peers[name]()
        except RuntimeError as refusal:
            print(f"  {name}: refuses this problem ({str(refusal).splitlines()[0]})")
            continue
        candidates[name] = lambda one, name=name: one.peers[name]()

    def another(i):
        changed = argparse.Namespace(**{**vars(options), "seed": options.seed + i})
        return (make(changed, "cuda"),)

    if options.operator == "gradients":
        times = timing.gpu_times(candidates, [(case,)], **timing.SHORT_ROUNDS)
    else:
        times = timing.graph_times(candidates, timing.rotation(another, case.bytes), **timing.SHORT_ROUNDS)
    ours = times["warpspec"]
    width = max(map(len, times))
    for name, us in times.items():
        rates = f"{case.flops / us * 1e-6:8.0f} TFLOP/s" if case.flops else ""
        rates += f"{case.bytes / us * 1e-6:8.2f} TB/s" if case.bytes else ""
        ratio = "" if name == "warpspec" else f"   {us / ours:.2f} times as long"
        print(f"  {name:{width}} {us:10.1f} us{rates}{ratio}")
    return 0
