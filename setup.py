"""Expands pyproject's package-dir table to every sub-package, so that none can be forgotten.

setuptools' own `packages.find` has no prefix, and `warpspec` has no folder it could search: each entry of
`[tool.setuptools.package-dir]` names a folder, and all folders below it with an `__init__.py` are packages.
"""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def packages() -> list[str]:
    """Import names of all packages, e.g. `warpspec.fmha` and `warpspec.fmha.sm100`."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    return [
        name
        for package, folder in table.items()
        for name in [package, *(f"{package}.{sub}" for sub in find_packages(str(ROOT / folder)))]
    ]


setup(packages=packages())
