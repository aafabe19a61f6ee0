"""`python -m warpspec.sim run SCRIPT ARGUMENTS`: a script that wants a GPU, run unchanged on this CPU."""

from __future__ import annotations

import argparse
import faulthandler
import runpy
import sys
import traceback
from pathlib import Path

from warpspec.common.command_line import natural, positive
from warpspec.sim.clocks import command
from warpspec.sim.errors import SimError
from warpspec.sim.pretend import Session, intercept
from warpspec.sim.pretend.frames import to_callers
from warpspec.sim.views import html, sarif

DESCRIPTION = """Run a Python script as on a GPU: its "cuda" tensors are in this machine's memory, and the CuTe DSL
kernels that it compiles and launches execute in the simulator. Options stand before the script, its own
arguments after it."""
FOUND, FAILED = 1, 2  # exit codes: the simulator found something; the script failed for another reason


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    found = argparse.ArgumentParser("python -m warpspec.sim run", description=DESCRIPTION)
    found.add_argument(
        "--arch", default="sm_100a", help="target to compile for: sm_100a (default), sm_90a, ..."
    )
    found.add_argument("--check", choices=["order"], help="order: check memory order")
    found.add_argument("--seed", type=natural, default=0, help="draws the schedule")
    found.add_argument(
        "--seeds", type=positive, help="run each launch under this many schedules and compare the results"
    )
    found.add_argument("--timeline", type=Path, help="write a trace for Perfetto to this file")
    found.add_argument("--report", type=Path, help="write one HTML page about the run to this file")
    found.add_argument("--sarif", type=Path, help="write what was found as SARIF to this file")
    command.add_options(found)
    found.add_argument("script", type=Path, metavar="SCRIPT")
    found.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS")
    return found


def run_script(script: Path, arguments: list[str]) -> None:
    """Run a file as `python SCRIPT ARGUMENTS` does, in this process. SystemExit comes through."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path


def _failure(error: BaseException) -> str:
    """Format an exception of the script without this program's frames."""
    entry = error.__traceback__
    while entry is not None and (
        "runpy" in entry.tb_frame.f_code.co_filename or entry.tb_frame.f_code.co_filename == __file__
    ):
        entry = entry.tb_next
    if not isinstance(error, SimError):
        return "".join(traceback.format_exception(type(error), error, entry))
    text = "".join([*traceback.format_tb(to_callers(entry)), *traceback.format_exception_only(error)])
    if isinstance(error.__cause__, SimError):  # the findings of a run that stopped
        text += "".join(["\nIt stopped by:\n", *traceback.format_exception_only(error.__cause__)])
    return text


def main(argv: list[str]) -> int:
    """0: the script ran and nothing was found; 1: the simulator found something; else what the script exits with, 2 if
    it raises something else."""
    options = parser().parse_args(argv)
    if not options.script.is_file():
        print(f"error: {options.script} is not a file", file=sys.stderr)
        return FAILED
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a compiled function's host part may crash: name the Python lines that called it
    code = 0
    try:
        command.check(options)
        recorded = command.recorded(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    intercepted = intercept(options.arch, seed=options.seed, seeds=options.seeds, check=options.check)
    try:
        with intercepted as session, recorded:
            try:
                run_script(options.script, options.arguments)
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 0 if error.code is None else FAILED
                if isinstance(error.code, str):
                    print(error.code, file=sys.stderr)
            except Exception as error:
                print(_failure(error), file=sys.stderr)
                code = FOUND if session.failed is not None and isinstance(error, SimError) else FAILED
    except SimError as error:  # no such target
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    _write(session, options)
    print(session.summary())
    return code or (FOUND if session.findings else 0)


def _write(session: Session, options: argparse.Namespace) -> None:
    """Write the timeline, report and SARIF files that were asked for."""
    if options.clocks:
        command.show(options, session.report)
    elif options.timeline:
        session.report.timeline(options.timeline)
    if options.report:
        html.write(options.report, session.report, session.findings, session.failed)
    if options.sarif:
        results = [result for error in session.errors for result in sarif.of_error(error)]
        if session.failed is not None:
            results += sarif.of_error(session.failed)
        sarif.write(options.sarif, results, Path.cwd())
