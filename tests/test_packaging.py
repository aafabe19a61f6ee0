"""What is installed is what stands in the tree: all packages, also from a wheel outside the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKS = sorted(path for path in (ROOT / "src/warpspec").iterdir() if path.is_symlink())
PACKAGES = [link.name for link in LINKS]
NOT_PACKAGES = {"tests", "scripts", "build", "out"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the tree's packages (setuptools would write build/ into the checkout)."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src", tree / "src", symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        tree / "dist",
    ]
    subprocess.run([*command, tree], check=True)
    return next((tree / "dist").glob("warpspec-*.whl"))


def test_every_top_level_package_is_linked():
    on_disk = {path.parent.name for path in ROOT.glob("[!.]*/__init__.py")} - NOT_PACKAGES
    assert on_disk == set(PACKAGES)
    assert all(link.readlink() == Path("../..") / link.name for link in LINKS)


def test_every_folder_with_modules_is_a_package():
    """A folder with modules but no __init__.py would be left out of the wheel silently."""
    for folder in PACKAGES:
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has no __init__.py"


def test_wheel_holds_every_module(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"warpspec/{module.relative_to(ROOT)}"
        for folder in PACKAGES
        for module in (ROOT / folder).rglob("*.py")
    }
    typed = {f"warpspec/{folder}/py.typed" for folder in PACKAGES}
    assert expected | typed <= held
    assert "warpspec/__main__.py" in held  # python -m warpspec
    assert not any(name.startswith(("tests/", "scripts/")) for name in held)


def test_wheel_imports_outside_the_checkout(wheel, tmp_path):
    """In a new process, which also finds the simulator though nobody has imported it."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True)
    names = [f"warpspec.{package}" for package in PACKAGES]
    commands = (
        "from warpspec.cli.main import COMMANDS; [importlib.import_module(n) for n in COMMANDS.values()]"
    )
    found = "from warpspec.common.simulator import simulator; assert simulator().__name__ == 'warpspec.sim'"
    code = f"import importlib; {found}; {commands}; print([importlib.import_module(n).__file__ for n in {names}])"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    # -P: the working directory stays off the path; PYTHONPATH precedes the editable install's finder.
    printed = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed.strip() == repr([str(site / name.replace(".", "/") / "__init__.py") for name in names])
