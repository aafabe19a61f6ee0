"""Instruction families that Python executes: importing this package registers every handler."""

import importlib
import pkgutil


def load_all() -> None:
    """Import every family."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
