"""Runs a command: ``python -m warpspec COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

# Imported when they are called: --help needs no torch.
COMMANDS = {
    "compile": "warpspec.aot.__main__",
    "simulate": "warpspec.cli.simulate",
    "validate": "warpspec.cli.validate",
    "bench": "warpspec.cli.bench",
    "tune": "warpspec.cli.tune",
}
DESCRIPTION = """\
commands:
  compile    compile a model's attention kernels ahead and keep them on disk (needs no GPU)
  simulate   run one operator at a shape in the simulator, instruction by instruction (needs no GPU)
  validate   compare operators with their FP32 definitions, on this machine's GPU or simulated
  bench      time an operator on this machine's GPU beside torch's own
  tune       measure this machine's GPU, once, for the choice of kernels

examples:
  python -m warpspec validate                                          is this installation right?
  python -m warpspec compile --arch sm_90a --model gpt-oss-120b        before a server's first request
  python -m warpspec simulate attention --causal --check order         look for missing waits and fences
  python -m warpspec bench attention --batch 2 --queries 8192 --keys 8192 --causal

`python -m warpspec COMMAND --help` has the options of a command. Exit status: 0 all is well, 1 a result is wrong or a
kernel failed, 2 the command cannot be run as asked, 141 the reader of the output went away."""
OUTPUT_CLOSED = 128 + signal.SIGPIPE  # what a shell reports of a program that SIGPIPE ends


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with its arguments (the process's where None are given); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m warpspec",
        usage="%(prog)s COMMAND [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(arguments)
    command = importlib.import_module(COMMANDS[options.command]).main
    try:
        status = command(options.arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `... | head` has seen enough; so that the interpreter's last flush finds a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    return status
