"""The packages form layers: host code needs no device code, and configurations need no compiler."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {link.name for link in (ROOT / "src/warpspec").iterdir()}


def test_configurations_load_no_compiler():
    """A configuration and its plan can be made, and its budgets added up, where CuTe DSL is not installed."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("config.py")]
    names = sorted(f"warpspec.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}" for path in files)
    assert len(names) > 10
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names}]; assert 'cutlass' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_host_code_of_common_imports_no_device_code():
    for path in (ROOT / "common").glob("*.py"):
        assert "warpspec.common.device" not in path.read_text(), path
