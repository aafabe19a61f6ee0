"""The experts' benchmark without a GPU: all but the times, in parts that take up where one stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_moe.py"


def run(rows, *options):
    command = [sys.executable, SCRIPT, "--dry", "--peers", "--rows", rows, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_table_in_parts(tmp_path):
    rows = tmp_path / "rows.jsonl"
    assert run(rows, "--minutes", "0").endswith("8 rows left\n") and not rows.exists()
    assert run(rows).endswith("all rows measured\n")
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 8 and all(row["ours"] == ["moe_ffn"] for row in found)
    before = rows.read_text()
    printed = run(rows)
    assert printed.count("| moe_ffn |") == 8 and rows.read_text() == before
    assert "us, floor" not in printed
