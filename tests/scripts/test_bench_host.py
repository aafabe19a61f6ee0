"""The benchmark of host time without a GPU: everything but the launches."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_host.py"


def tables(*options) -> tuple[list, dict]:
    """(cells by row, microseconds by name) of what it prints."""
    command = [sys.executable, SCRIPT, "--dry", "--markdown", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    times = {
        cells[0].strip(): cells[1] for cells in rows if "us a call" not in cells[0] and "-" not in cells[0]
    }
    return rows, times


@pytest.mark.long
def test_table_of_operators():
    _, times = tables("--only", "operators")
    for name in ("softmax, gradients", "softmax_topk", "moe_ffn", "gathered_attention"):
        assert float(times[name]) > 0


@pytest.mark.long
def test_tables():
    rows, times = tables()
    for name in ("dense, forward", "packed, gradients", "D 512, forward", "softmax_topk", "moe_ffn"):
        assert float(times[name]) > 0
    assert rows[-1][-1].strip() == "not imported"  # torch._dynamo
