"""A stand-in for `triton` where it is not installed: kernel libraries import it for kernels that nobody calls."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
from pathlib import Path

from torch.utils._triton import has_triton_package

from warpspec.sim.pretend import triton_testing

NAME = "triton"
TORCH_LOOKS = ("torch._dynamo", "torch._inductor.runtime.hints", "torch._inductor.runtime.triton_compat")


class _Anything:
    """Stands in for any name of triton: decorator, type or namespace. Launching a kernel raises ImportError."""

    def __init__(self, name: str = NAME):
        self._name = name

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self._name}.{name}"
        return WRITTEN.get(full) or _Anything(full)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and callable(args[0]):  # a decorator
            return _Anything(getattr(args[0], "__name__", self._name))
        return _Anything(self._name)

    def __getitem__(self, _: object) -> _Missing:
        return _Missing(self._name)

    def __mro_entries__(self, _: tuple) -> tuple:
        return (_Base,)


class _Base:
    """The base of classes that derive from one of triton's."""

    def __init__(self, *_: object, **__: object):
        pass


class FileCacheManager:
    """triton.runtime.cache.FileCacheManager, from which other packages derive caches of their own."""

    def __init__(self, key: str):
        self.key = key
        self.cache_dir = tempfile.gettempdir()

    def get_file(self, filename: str) -> str | None:
        """The path of a file that is in the cache."""
        path = Path(self.cache_dir) / filename
        return str(path) if path.exists() else None

    def put(self, data: str | bytes, filename: str, binary: bool = True) -> str:
        """Keep a file, and return its path; a reader sees all of it or none."""
        path = Path(self.cache_dir) / filename
        handle, part = tempfile.mkstemp(dir=self.cache_dir)
        with open(handle, "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
        os.replace(part, path)
        return str(path)


WRITTEN = {  # names that are more than stand-ins
    "triton.runtime.cache.FileCacheManager": FileCacheManager,
    **{f"{triton_testing.NAME}.{name}": written for name, written in triton_testing.WRITTEN.items()},
}


class _Missing:
    def __init__(self, name: str):
        self._name = name

    def __call__(self, *_: object, **__: object) -> None:
        raise ImportError(f"{self._name} is a Triton kernel, and triton is not installed")


class _Module(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012  (as the import system wants it)
    __version__ = "0"

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return WRITTEN.get(full) or _Anything(full)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton` and its submodules for all importers but torch, which would try to compile with it."""

    def find_spec(self, name: str, path: object = None, target: object = None):
        if name.partition(".")[0] != NAME or _importer().startswith("torch."):
            return None
        if name == NAME:
            _let_torch_look()
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        """Do nothing: the module creates its names on access."""


def _let_torch_look() -> None:
    """Import the parts of torch that look for triton before this stand-in can be found."""
    has_triton_package()
    for name in TORCH_LOOKS:
        importlib.import_module(name)


def _importer() -> str:
    """The name of the module that is executing the import."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith("importlib") and name != __name__:
            return name
        frame = frame.f_back
    return ""


def install() -> Finder | None:
    """Make `import triton` work; None where triton is installed."""
    if importlib.util.find_spec(NAME) is not None:
        return None
    finder = Finder()
    sys.meta_path.append(finder)
    return finder


def remove(finder: Finder | None) -> None:
    """Undo `install`."""
    if finder is not None:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
            del sys.modules[name]
