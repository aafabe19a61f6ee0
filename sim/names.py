"""Readable names: a kernel's function in the DSL, the function around a Python line, fields of storage."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

DSL_PREFIX = "kernel_cutlass_"  # prefix of a DSL kernel's name; its function and arguments follow
LONGEST = 40  # characters to which long names are cut
BARRIER_BYTES = 8

Field = tuple[str, int, int]  # name, bytes, offset in dynamic shared memory


@lru_cache(maxsize=256)
def _functions(path: str) -> tuple[tuple[int, int, str], ...]:
    """(first line, last line, qualified name) of each function of a Python file, outer ones first."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ()
    found: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    first = min((child.lineno, *(d.lineno for d in child.decorator_list)))
                    found.append((first, child.end_lineno or child.lineno, name))
                name += "."
            visit(child, name)

    visit(tree, "")
    return tuple(found)


@lru_cache(maxsize=4096)
def function_at(source: str | None) -> str | None:
    """The function that contains a line ("file:line"), with its classes; None if the file does not tell."""
    path, _, line = (source or "").rpartition(":")
    if not path or not line.isdigit():
        return None
    inside = [name for first, last, name in _functions(path) if first <= int(line) <= last]
    return inside[-1] if inside else None


def placed(source: str | None) -> str:
    """A Python line for a message, with the function that it is in; "" where it is not known."""
    if not source:
        return ""
    function = function_at(source)
    return f"{source} in {function}" if function else source


@lru_cache(maxsize=256)
def _without_arguments(name: str) -> str:
    rest = name.removeprefix(DSL_PREFIX)
    # What the DSL appends: "tensorptrf32gmem...", "TiledMMA...", "<object at 0x...>" without its punctuation, numbers.
    cut = re.search(r"_(?:tensorptr|Tensor|ptr|TiledMMA|TiledCopy|CopyAtom|None|objectat|\d)", rest)
    rest = rest[: cut.start()] if cut and cut.start() else rest
    return rest if len(rest) <= LONGEST else f"{rest[:LONGEST]}..."


def kernel_name(name: str, source: str | None) -> str:
    """The name of a kernel for messages: the DSL's function if line information tells it, else the name without the
    mangled arguments, cut if necessary.

    name: in PTX. source: the Python line of its first instruction.
    """
    function = function_at(source)
    if function is not None and function.rpartition(".")[2] in name:
        return function
    return _without_arguments(name)


class StorageNames:
    """Fields of shared memory by offset. fields: the known fields of dynamic memory, and padding, whose name is empty;
    start: where dynamic memory begins."""

    def __init__(self, fields: Sequence[Field] = (), start: int = 0):
        every = sorted((offset + start, nbytes, name) for name, nbytes, offset in fields)
        self._fields = [field for field in every if field[2]]
        self._starts = [offset for offset, _, _ in self._fields]
        # (first offset, end, field before) of padding
        self.padding = [
            (offset, offset + nbytes, every[i - 1][2] if i else "")
            for i, (offset, nbytes, name) in enumerate(every)
            if not name and nbytes
        ]

    def barrier(self, offset: int) -> str | None:
        """The field of the mbarrier at an offset in shared memory, `name[index]` if it has several."""
        return self._at(offset, BARRIER_BYTES)

    def place(self, offset: int) -> str | None:
        """The field that contains an offset in shared memory, `name + bytes` unless it is the field's first byte."""
        return self._at(offset, 0)

    def _at(self, offset: int, unit: int) -> str | None:
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return None
        start, nbytes, name = self._fields[at]
        inside = offset - start
        if inside >= nbytes:
            return None
        if unit:
            return name if nbytes <= unit else f"{name}[{inside // unit}]"
        return name if inside == 0 else f"{name} + {inside:#x}"
