"""`make demo` and `make test` on a bare machine: what is missing is named, with what installs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import bootstrap as script
import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED_TOOLS = ("sh", "dirname", "env")


@pytest.fixture
def machine(tmp_path):
    """A tree with the bootstrap script and a PATH that holds nothing but what a test puts there."""
    scripts, path = tmp_path / "tree" / "scripts", tmp_path / "bin"
    scripts.mkdir(parents=True)
    path.mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap.sh", scripts)
    (scripts / "bootstrap.py").write_text("print('bootstrap.py runs')")
    for tool in NEEDED_TOOLS:
        (path / tool).symlink_to(shutil.which(tool))

    def run() -> subprocess.CompletedProcess:
        command = ["/bin/sh", scripts / "bootstrap.sh"]
        return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, check=False)

    run.path = path
    return run


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def real_python(path: Path, prelude: str = "") -> None:
    executable(path / "python3", f'{prelude}\nexec {sys.executable} "$@"')


def test_without_python(machine):
    done = machine()
    assert done.returncode == 1
    assert "Python 3.11" in done.stderr and "apt-get install python3" in done.stderr


def test_old_python(machine):
    executable(machine.path / "python3", '[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1')
    done = machine()
    assert done.returncode == 1
    assert "found Python 3.9.2" in done.stderr


def test_a_newer_python_under_another_name_is_taken(machine):
    executable(machine.path / "python3", "exit 1")
    executable(machine.path / "python3.12", f'exec {sys.executable} "$@"')
    executable(machine.path / "git", "exit 0")
    assert machine().stdout == "bootstrap.py runs\n"


def test_without_venv(machine):
    real_python(machine.path, 'case "$*" in *ensurepip*) exit 1;; esac')
    done = machine()
    assert done.returncode == 1
    assert "apt-get install python3-venv" in done.stderr


def test_without_git(machine):
    real_python(machine.path)
    done = machine()
    assert done.returncode == 1
    assert "apt-get install git" in done.stderr


@pytest.fixture
def bootstrap(monkeypatch, tmp_path):
    """bootstrap.py as a module; pip's configuration is what the test says."""
    for name in [name for name in os.environ if name.startswith("PIP_") or name == "TORCH_INDEX"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(script, "STAMP", tmp_path / "stamp")
    return script


def test_torch_source(bootstrap, monkeypatch):
    """The index asked for, else what pip is configured with, else CPU builds where there is no GPU."""
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    assert bootstrap.torch_source() == ([] if has_gpu else ["--extra-index-url", bootstrap.CPU_TORCH_INDEX])
    monkeypatch.setenv("PIP_FIND_LINKS", "/somewhere")
    assert bootstrap.torch_source() == []
    monkeypatch.setenv("TORCH_INDEX", "https://example.org/simple")
    assert bootstrap.torch_source() == ["--index-url", "https://example.org/simple"]
    monkeypatch.setenv("TORCH_INDEX", "")
    assert bootstrap.torch_source() == []


def test_pins_are_the_lowest_versions_that_are_allowed(bootstrap):
    """Everything else stays as constraints.txt has it."""
    lowest, usual = bootstrap.lowest_versions(), (ROOT / "constraints.txt").read_text().splitlines()
    assert {"nvidia-cutlass-dsl==4.8.0", "apache-tvm-ffi==0.1.11", bootstrap.TORCH_PIN} <= set(lowest)
    assert not any(name in line for line in set(lowest) & set(usual) for name in bootstrap.COMPILER)
    assert len(set(usual) - set(lowest)) == sum(line.startswith(bootstrap.COMPILER) for line in usual)


def test_nothing_is_installed_while_the_stamp_is_right(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap, "PYTHON", Path("/nonexistent"))
    bootstrap.STAMP.write_text(bootstrap.stamp())
    bootstrap.main()


def test_a_failed_install_shows_the_end_of_pips_output(bootstrap, monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(bootstrap, "LOG", tmp_path / "log")
    with pytest.raises(SystemExit, match="no-such-folder"):
        bootstrap.install("a package", "--no-index", "./no-such-folder")
    assert "no-such-folder" in bootstrap.LOG.read_text()
