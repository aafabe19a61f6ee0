"""How the scripts that time things on a GPU begin and print: their options, the line of what is measured on, tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from . import gpu_bench


def parser(about: str, *, only: Iterable[str] = (), markdown: bool = False) -> argparse.ArgumentParser:
    """A parser that prints the script's docstring as its help. only: parts, for --only, all by default. markdown:
    whether there is --markdown, which ``show`` follows."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if only := list(only):
        made.add_argument("--only", nargs="+", choices=only, default=only, help="parts (default: all)")
    if markdown:
        made.add_argument("--markdown", action="store_true", help="tables for docs/measurements.md")
    return made


def need_gpu(otherwise: str = "") -> None:
    """End the process with a message where there is no GPU. otherwise: what needs none."""
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name} needs an NVIDIA GPU{f' ({otherwise})' if otherwise else ''}")


def begin(*packages: str) -> str:
    """Print and return the line that says what is measured on. packages: whose versions count, too."""
    need_gpu()
    header = gpu_bench.header((*gpu_bench.PACKAGES, *packages))
    print(header, flush=True)
    return header


def show(options: argparse.Namespace, columns: Sequence[str], rows: list, before: str = "") -> list:
    """Print a table, as the options say, after an empty line and what comes before it; returns the rows."""
    print(f"\n{before}{gpu_bench.table(columns, rows, markdown=options.markdown)}", flush=True)
    return rows
