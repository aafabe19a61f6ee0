"""``python -m warpspec``, as users call it."""

import json
import subprocess
import sys

import pytest

SMALL = ("simulate", "attention", "--queries", "16", "--keys", "32", "--heads", "1")


def call(*arguments):
    return subprocess.run([sys.executable, "-m", "warpspec", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_simulate(arch, tmp_path):
    timeline = tmp_path / "trace.json"
    done = call(*SMALL, "--arch", arch, "--check", "order", "--timeline", str(timeline))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("FP32 reference: ")[1].split()[0]) < 4e-3
    assert json.loads(timeline.read_text())


def test_what_cannot_be_computed_is_refused():
    done = call(*SMALL, "--head-dim", "65")
    assert done.returncode == 2
    assert "65" in done.stderr and "Traceback" not in done.stderr


def test_compile_has_the_options_of_aot():
    done = call("compile", "--list")
    assert done.returncode == 0 and "gpt-oss-120b" in done.stdout
