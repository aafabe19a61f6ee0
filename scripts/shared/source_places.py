"""Places in our sources that survive edits elsewhere: a function and an operation in it, not a line.

A line that a compiled kernel names is looked up in the file's syntax tree (`place_of`). What a person writes,
"fmha/sm90/pair.py:Pair.issue_qk, warpgroup.commit_group", is held against such places (`Pattern`).
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "src" / "warpspec"  # files are named from here
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Place:
    """An operation in a function.

    file: path from `PACKAGE`. function: qualified name in the file. operation: the name that is called, as it is
    written, or what the statement begins with. ordinal: which of the function's operations of that name, from 1; 0:
    there is no other.
    """

    file: str
    function: str
    operation: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.file}:{self.function}, {self.operation}" + (f" {self.ordinal}" if self.ordinal else "")


@dataclass(frozen=True)
class Pattern:
    """What a person writes for places. operation: None, all of the function. ordinal: None, all of that name."""

    file: str
    function: str
    operation: str | None = None
    ordinal: int | None = None

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """The pattern of "FILE:FUNCTION", "FILE:FUNCTION, OPERATION" or "FILE:FUNCTION, OPERATION ORDINAL"."""
        parts = re.fullmatch(r"([^:]+\.py):([\w.]+)(?:, (.+?)(?: (\d+))?)?", text)
        if parts is None:
            raise ValueError(f"{text!r} names no place: write FILE:FUNCTION, OPERATION ORDINAL")
        file, function, operation, ordinal = parts.groups()
        return cls(file, function, operation, int(ordinal) if ordinal else None)

    def matches(self, place: Place | None) -> bool:
        """Whether the place is one of those it stands for."""
        return (
            place is not None
            and (place.file, place.function) == (self.file, self.function)
            and self.operation in (None, place.operation)
            and self.ordinal in (None, place.ordinal)
        )

    def missing(self) -> str:
        """What of it the sources do not have, in words; "": they have all."""
        path = PACKAGE / self.file
        if not path.exists():
            return f"there is no file {self.file}"
        functions = operations_of(path)
        if self.function not in functions:
            return f"{self.file} has no function {self.function}"
        places = set(functions[self.function].values())
        if not any(self.matches(Place(self.file, self.function, *operation)) for operation in places):
            return f"{self.function} in {self.file} has no operation {self.operation} {self.ordinal or ''}".rstrip()
        return ""


def place_of(file: str, line: int) -> Place | None:
    """The place that a line belongs to, which compiled code says that an instruction stems from; None: it belongs to no
    function of the package."""
    name = file.rpartition("/warpspec/")[2]
    path = PACKAGE / name
    if name == file or not path.exists():
        return None
    found = None
    for function, operations in operations_of(path).items():  # a function before those in it
        if line in operations:
            found = Place(name, function, *operations[line])
    return found


@cache
def operations_of(path: Path) -> dict[str, dict[int, tuple[str, int]]]:
    """Qualified name -> line -> (operation, ordinal) of a file's functions."""
    return dict(_functions(ast.parse(path.read_text()), ""))


def _functions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, dict[int, tuple[str, int]]]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = prefix + node.name
            if isinstance(node, FUNCTIONS):
                yield name, _operations(node)
            yield from _functions(node, f"{name}.")
        else:
            yield from _functions(node, prefix)


def _operations(function: ast.FunctionDef) -> dict[int, tuple[str, int]]:
    """Line -> (operation, ordinal). A line belongs to the first call that begins there; without one, to the innermost
    call or statement that it is part of."""
    first = min(node.lineno for node in (function, *function.decorator_list))
    owners: dict[int, ast.AST] = dict.fromkeys(range(first, function.end_lineno + 1), function)
    nodes = sorted(_own_nodes(function), key=lambda n: (isinstance(n, ast.Call), n.lineno, n.col_offset))
    begun: set[int] = set()
    for node in nodes:
        is_call = isinstance(node, ast.Call)
        for line in range(node.lineno, node.end_lineno + 1):
            if not (is_call and line == node.lineno and line in begun):
                owners[line] = node
        if is_call:
            begun.add(node.lineno)
    named = {
        node: _name(node) for node in sorted(set(owners.values()), key=lambda n: (n.lineno, n.col_offset))
    }
    totals, counts, numbered = Counter(named.values()), Counter(), {}
    for node, name in named.items():
        counts[name] += 1
        numbered[node] = (name, counts[name] if totals[name] > 1 else 0)
    return {line: numbered[node] for line, node in sorted(owners.items())}


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Statements and calls of a function, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, (ast.stmt, ast.Call)):
            yield node
        yield from _own_nodes(node)


def _name(node: ast.AST) -> str:
    """What an operation is called: a call by its function, another statement by its first word."""
    if isinstance(node, ast.Call):
        return _callee(node.func)
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return f"{ast.unparse(target).strip('()')} ="
    return "def" if isinstance(node, FUNCTIONS) else type(node).__name__.lower()


def _callee(function: ast.AST) -> str:
    if isinstance(function, ast.Attribute) and not isinstance(function.value, ast.Call):
        return f"{_callee(function.value)}.{function.attr}"
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
