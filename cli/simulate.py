"""``python -m warpspec simulate``: one operator's compiled kernels, run on a CPU instruction by instruction."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from warpspec.cli import cases
from warpspec.cli.options import SMALL, add_options, check_options, refuse_given
from warpspec.common.command_line import positive

ARCHITECTURES = ("sm_100a", "sm_90a")
CHIPS = {"h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a", "b300": "sm_100a"}
EXAMPLES = """\
Prints what the kernels executed (instructions, bytes, waits), and the error against the operator's FP32 definition.
Exit status 1: the error is above the tolerance, or the simulator found a defect (a deadlock; with --check order, a
race).

examples:
  python -m warpspec simulate attention --queries 128 --keys 256 --causal --check order
  python -m warpspec simulate attention --arch sm_90a --head-dim 128 --timeline trace.json
  python -m warpspec simulate softmax --rows 4 --columns 1000
  python -m warpspec simulate attention --arch sm_90a --queries 4096 --keys 4096 --clocks h200"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m warpspec simulate",
        usage="%(prog)s OPERATOR [options]",
        description="Run an operator's compiled kernels on this CPU, instruction by instruction, on random inputs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "operator", choices=cases.OPERATORS, metavar="OPERATOR", help=", ".join(cases.OPERATORS)
    )
    parser.add_argument("--arch", choices=ARCHITECTURES, default=ARCHITECTURES[0], help="default %(default)s")
    parser.add_argument("--check", choices=["order"], help="order: also look for missing waits and fences")
    parser.add_argument(
        "--timeline", metavar="FILE", help="write a trace of the last kernel for Perfetto (ui.perfetto.dev)"
    )
    parser.add_argument(
        "--clocks",
        metavar="CHIP",
        choices=CHIPS,
        help="predict the kernels' time on %(choices)s from a few CTAs of each, instead of computing the result; "
        "--timeline is then in clocks",
    )
    parser.add_argument(
        "--sample",
        type=positive,
        default=6,
        help="clusters of a kernel that --clocks runs (default %(default)s)",
    )
    add_options(parser, cases.OPERATORS, SMALL)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 1 where the result is wrong or the simulator found a defect; exits with 2 for bad options."""
    options = parser().parse_args(arguments)
    check_options(parser(), options, [options.operator])
    try:
        from warpspec import sim
    except ImportError as error:
        parser().error(f"the simulator cannot be imported ({error}): pip install 'warpspec[sim]'")
    from warpspec.common.launch import simulating

    if options.clocks and options.arch != CHIPS[options.clocks]:
        parser().error(f"--clocks {options.clocks}: needs --arch {CHIPS[options.clocks]}, got {options.arch}")
    if not options.clocks:
        refuse_given(parser(), options, ["sample"], "it is for --clocks")
    if options.clocks and options.check:
        parser().error("--clocks runs a part of each kernel and goes without --check")
    if options.check:
        os.environ[sim.CHECK_VARIABLE] = options.check
    try:
        with simulating(options.arch, seed=options.seed):
            case = cases.OPERATORS[options.operator](options, "cpu")
            with sim.recording(options.sample) if options.clocks else nullcontext():
                results = case.run("sim")
    except sim.SimError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # UnsupportedProblem is one
        parser().error(str(error))
    report = sim.last_report()
    if options.clocks:
        clocks = report.clocks(options.clocks)
        print(clocks)
        if options.timeline:
            print(f"timeline: {clocks.timeline(options.timeline)}")
        return 0
    print(report)
    error = case.error(results, case.expected())
    passed = error <= case.tolerance
    verdict = "ok" if passed else "FAILED"
    print(f"{case.title}: error {error:.2e} against FP32, tolerance {case.tolerance:.1e}: {verdict}")
    if options.timeline:
        report.timeline(options.timeline)
        print(f"timeline: {options.timeline}")
    return 0 if passed else 1
