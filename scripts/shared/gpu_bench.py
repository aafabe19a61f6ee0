"""What the bench_*.py scripts share: timing as ``warpspec.cli.timing`` does it, host time, a copy's speed, tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from warpspec.cli.timing import (
    L2_MULTIPLES,
    PACKAGES,
    SHORT_ROUNDS,
    captured,
    copy_bandwidth,
    gpu_times,
    graph_time,
    graph_times,
    header,
    matmul_rate,
    measured_speeds,
    rotation,
)
from warpspec.common.hardware import Speeds

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
    "measured_speeds",
    "rotation",
    "table",
]


def host_time(call: Callable, inputs: Sequence[tuple], *, calls: int = 20, rounds: int = 100) -> float:
    """Microseconds from Python that one call takes, the GPU not waited for: the first decile of rounds, because other
    processes lengthen some of them."""
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
    return statistics.quantiles(times, n=10)[0]


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
