"""``python -m warpspec tune``: measures how fast this machine's GPU copies and multiplies, and keeps the result for the
choice of kernels."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from warpspec.cli import timing
from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.common.hardware import gpu_model
from warpspec.common.speeds import MEASURED, keep_speeds, kept_speeds

ABOUT = """\
Attention chooses its kernels by a model of their time, which takes the number of SMs, the size of L2, and two speeds:
of a large copy, and of a large matrix product. They are built in for GPUs that warpspec was measured on; for others
plans use the data sheet's until this command has measured them. It takes a few seconds on a GPU with nothing else to
do, and keeps two numbers in the cache folder, for all GPUs of the same name. Processes that start later plan with them.
The model is wrong by some percent; calls whose shapes repeat can have their plans timed once instead: see
warpspec.fmha.tuning.
Exit status 2: there is no GPU, or caching is off."""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m warpspec tune",
        description="Measure this machine's GPU for the choice of kernels.",
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--show", action="store_true", help="print what plans use now, and measure nothing")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Returns 0, or 2 where nothing can be measured or kept; exits with 2 for bad options."""
    options = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("tune: no CUDA GPU here; it measures this machine's first one", file=sys.stderr)
        return 2
    if MEASURED.folder is None:
        print(
            f"tune: caching is off, so nothing can be kept; {CACHE_VARIABLE} names a folder", file=sys.stderr
        )
        return 2
    properties = torch.cuda.get_device_properties(0)
    name, sm_count = properties.name, properties.multi_processor_count
    if not options.show:
        keep_speeds(name, sm_count, timing.measured_speeds())
    print(f"{name}: {described(name, sm_count)}")
    return 0


def described(name: str, sm_count: int) -> str:
    """A text with the speeds that plans for a device use, and where they come from."""
    kept, model = kept_speeds(name, sm_count), gpu_model(name)
    if kept is not None:
        return f"{kept}, measured here (kept in {MEASURED.folder})"
    return "not measured here; the data sheet's" if model is None else f"{model.speeds}, built in"
