"""The options of command lines that predict times: --clocks and --sample."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext

from warpspec.common.command_line import positive
from warpspec.sim.clocks.chips import CHIPS
from warpspec.sim.clocks.record import SAMPLE, recording


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add both. The parser has options --arch, --check, --timeline, perhaps --seeds."""
    names = ", ".join(CHIPS)
    parser.add_argument(
        "--clocks",
        metavar="CHIP",
        choices=CHIPS,
        help=f"predict the kernels' time on {names} from a few CTAs of each, instead of computing the result; "
        "--timeline is then in clocks",
    )
    parser.add_argument(
        "--sample",
        type=positive,
        default=SAMPLE,
        help="clusters of a kernel that --clocks runs (default %(default)s)",
    )


def check(options: argparse.Namespace) -> None:
    """ValueError if --clocks does not go with the other options."""
    if options.clocks is None:
        return
    target = CHIPS[options.clocks].target
    if options.arch[:5] != target[:5]:
        raise ValueError(f"--clocks {options.clocks}: needs --arch {target}, got {options.arch}")
    if options.check or getattr(options, "seeds", None):
        raise ValueError("--clocks runs a part of each kernel and goes without --check and --seeds")


def recorded(options: argparse.Namespace) -> AbstractContextManager:
    """The context of the runs. ValueError for a sample that is not positive."""
    return nullcontext() if options.clocks is None else recording(options.sample)


def show(options: argparse.Namespace, report) -> None:
    """Print a report's predicted times, and write the timeline that was asked for."""
    clocks = report.clocks(options.clocks)
    print(clocks)
    if options.timeline:
        print(f"timeline: {clocks.timeline(options.timeline)}")
