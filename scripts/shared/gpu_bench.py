"""What the bench_*.py scripts share: timing as ``warpspec.cli.timing`` does it, host time, a copy's speed, tables."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from warpspec.cli.timing import (
    L2_MULTIPLES,
    PACKAGES,
    SHORT_ROUNDS,
    captured,
    gpu_times,
    graph_time,
    graph_times,
    header,
    rotation,
)

__all__ = [
    "L2_MULTIPLES",
    "PACKAGES",
    "SHORT_ROUNDS",
    "Speeds",
    "captured",
    "copy_bandwidth",
    "gpu_times",
    "graph_time",
    "graph_times",
    "header",
    "host_time",
    "matmul_rate",
    "rotation",
    "table",
]

COPY_BYTES = 4 << 30  # of the copy that measures bandwidth: read once and written once
MATMUL_SIZE = 8192  # rows, columns and reduction of the matrix product that measures FLOP/s


def host_time(call: Callable, inputs: Sequence[tuple], *, calls: int = 100, rounds: int = 20) -> float:
    """Microseconds of CPU time from Python that one call takes, the GPU not waited for: median of rounds."""
    for i in range(10):
        call(*inputs[i % len(inputs)])
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(calls):
            call(*inputs[i % len(inputs)])
        times.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy through torch: bytes read plus bytes written, over the median time."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    microseconds = gpu_times({"copy": target.copy_}, [(source,)])["copy"]
    return 2 * COPY_BYTES / microseconds * 1e-6


def matmul_rate() -> float:
    """TFLOP/s of a large bf16 matrix product through torch, over the median time."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    call = functools.partial(torch.matmul, out=out)
    return 2 * MATMUL_SIZE**3 / gpu_times({"matmul": call}, [(a, b)], **SHORT_ROUNDS)["matmul"] * 1e-6


class Speeds(NamedTuple):
    """What one GPU does at most. copy: TB/s, read and written. matmul: TFLOP/s in bf16."""

    copy: float
    matmul: float

    @classmethod
    def measured(cls) -> Speeds:
        """Those of the current device, which gets back the memory that this takes."""
        found = cls(copy_bandwidth(), matmul_rate())
        torch.cuda.empty_cache()
        return found

    def __str__(self) -> str:
        return f"copy {self.copy:.2f} TB/s, bf16 matrix product {self.matmul:.0f} TFLOP/s, measured here"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, markdown: bool = False) -> str:
    """Rows under their column names; floats with three significant digits, None as "-"."""
    cells = [[_cell(value) for value in row] for row in rows]
    if markdown:
        lines = [columns, ["---"] * len(columns), *cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    widths = [max(len(line[i]) for line in (columns, *cells)) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (columns, *cells)
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    digits = max(0, 2 - len(str(int(abs(value)))) + 1) if value else 0
    return f"{value:.{digits}f}"
