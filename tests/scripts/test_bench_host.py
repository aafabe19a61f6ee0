"""The benchmark of host time without a GPU: everything but the launches."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_host.py"


def test_tables():
    done = subprocess.run([sys.executable, SCRIPT, "--dry", "--markdown"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    times = {
        cells[0].strip(): cells[1] for cells in rows if "us a call" not in cells[0] and "-" not in cells[0]
    }
    for name in ("dense, forward", "packed, gradients", "D 512, forward", "softmax_topk", "moe_ffn"):
        assert float(times[name]) > 0
    assert rows[-1][-1].strip() == "not imported"  # torch._dynamo
