"""Stands in for torchvision where only a build for GPUs can be had.

SGLang and transformers import it; for text they call nothing of it. Any module of it and any name can be imported;
names are empty classes.

`scripts/bootstrap.py --engines` copies this file into its environment as torchvision.py.
"""

import importlib.abc
import importlib.machinery
import sys

__path__ = []
__version__ = "0"


class _Empty(type):
    def __getattr__(cls, name):
        return _named(name)


def _named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below torchvision."""

    def find_spec(self, name, path, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.startswith("torchvision.")
            else None
        )

    def exec_module(self, module):
        module.__getattr__ = _named


__getattr__ = _named
sys.meta_path.append(_Modules())
