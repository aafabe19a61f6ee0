"""One row for each PTX opcode: everything that the simulator knows about the opcode, in one place.

A row (`Opcode`) holds facts (how many operands are destinations, which lanes must meet, what kind of instruction
it is) and the function that executes it. It is declared beside that function, by a decorator:

    @translator("popc", "clz", family=Family.ARITHMETIC, destinations=1)
    def bit_count(e, ins): ...                  # native code, in codegen/: emits LLVM text

    @handler("mbarrier.init", family=Family.MBARRIER, destinations=0)
    def mbarrier_init(m, w, ins, mask): ...     # Python, in families/: executes it for the lanes in `mask`

    @fallback("add", "sub")                     # Python, for the forms that the row's translator refuses (NotNative)
    def arithmetic(m, w, ins, mask): ...

A name stands for every opcode that begins with these dotted parts, and the longest name wins: `cp.async.bulk`
is the row of `cp.async.bulk.global.shared::cta.bulk_group`, not of `cp.async.bulk.wait_group.read`, which has its own.

To add an instruction, write its function with its row above it, in the file of its family under families/ (what
waits, is asynchronous, concerns other warps or is rare) or of its kind under codegen/ (what should be fast). Nothing
else lists opcodes; only the parser knows how the operands of bra, brx and call are written. An instruction without
a row raises UnsupportedInstruction when it is reached. A part of the simulator that needs to know something new
about opcodes (its proxy, whether it is a fence) adds a field to `Opcode`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cache
from types import ModuleType

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.instruction import Instr


class Family(StrEnum):
    """The kinds of instructions by which a run's report counts."""

    ARITHMETIC = "arithmetic"  # the report splits it by type: integer, float, float packed
    SPECIAL_FUNCTION = "special function"
    COMPARE = "compare"
    SELECT = "select"
    MOVE = "move"  # register to register, and nothing else
    CONVERT = "convert"
    CONTROL = "control"
    CALL = "calls"
    MEMORY = "memory"
    WARP = "warp"  # lanes of a warp exchange values
    FENCE = "fence"
    BARRIER = "barriers"
    MBARRIER = "mbarrier"
    ASYNC_COPY = "async_copy"
    BULK_GROUP = "bulk_groups"
    TMA = "tma"
    MATRIX = "matrix"
    MMA_SYNC = "mma_sync"
    WGMMA = "wgmma"
    TCGEN05 = "tcgen05"  # the report splits it by operation
    MISCELLANEOUS = "miscellaneous"


class Control(Enum):
    """The ways in which an instruction ends a basic block."""

    BRANCH = "to its label"
    INDEXED_BRANCH = "to the label that its index picks from a list"
    EXIT = "ends the thread"
    TRAP = "stops the launch"


class Collective(Enum):
    """The lanes that must be together at an instruction before it is executed."""

    WARP = "all lanes of the warp that have not exited"
    MEMBERS = "the lanes that its last operand, the membermask, names"
    MEMBERS_ANYWHERE = "the same, at this instruction or at another of its opcode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opcode:
    """The row of an opcode. A fact that depends on modifiers or operands is a function of the instruction.

    name: the dotted parts with which the opcode begins.
    family: what kind of instruction it is.
    destinations: how many leading operands it writes.
    accumulates: it reads its destination too.
    carry_in: it reads the carry flag (whether one writes it is a modifier, .cc).
    control: how it ends a basic block; None: it does not.
    collective: which lanes must be together; None: each lane is on its own.
    loads: it reads memory and does not write it (which names the access in the diagnosis of a fault).
    shares_memory: clusters can see each other through it: by global memory, or by the grid's state.
    reduces: it reduces into global memory; if nobody uses what it returns, its effect may wait for the launch's end,
        and it does not count for shares_memory.
    no_effect: it changes no value, so that only the order checker executes it.
    orders: memory order depends on it, so that a run that checks it stops at it, native or not.
    order: tells the order checker of it, order(checker, warp, instruction, mask), before it is executed; handlers
        of what is asynchronous or waits tell it themselves.
    translator: emits native code, translator(emitter, instruction), or raises NotNative for a form it does not know.
    handler: executes it in Python, handler(machine, warp, instruction, mask); returns None or a Wait.
    """

    name: str
    family: Family
    destinations: int | Callable[[Instr], int]
    accumulates: bool = False
    carry_in: bool = False
    control: Control | None = None
    collective: Collective | None = None
    loads: bool = False
    shares_memory: bool | Callable[[Instr], bool] = False
    reduces: bool | Callable[[Instr], bool] = False
    no_effect: bool = False
    orders: bool | Callable[[Instr], bool] = False
    order: Callable | None = None
    translator: Callable | None = None
    handler: Callable | None = None

    def destination_count(self, ins: Instr) -> int:
        """Number of leading operands that an instruction of this opcode writes."""
        return self.destinations(ins) if callable(self.destinations) else self.destinations

    def decides_order(self, ins: Instr) -> bool:
        """Whether memory order depends on an instruction of this opcode that native code may execute."""
        return self.orders(ins) if callable(self.orders) else self.orders

    def may_share_memory(self, ins: Instr) -> bool:
        """Whether clusters can see each other through an instruction of this opcode."""
        return self.shares_memory(ins) if callable(self.shares_memory) else self.shares_memory

    def only_reduces(self, ins: Instr) -> bool:
        """Whether an instruction of this opcode reduces into global memory, and nobody sees what was there."""
        return self.reduces(ins) if callable(self.reduces) else self.reduces


_ROWS: dict[str, Opcode] = {}


def declare(*names: str, family: Family, destinations: int | Callable[[Instr], int], **facts) -> None:
    """Add one row a name; `facts` are fields of Opcode. Raises ValueError for a name that has a row."""
    for name in names:
        if name in _ROWS:
            raise ValueError(f"two rows for the opcode {name}")
        _ROWS[name] = Opcode(name=name, family=family, destinations=destinations, **facts)
    find.cache_clear()


def translator(*names: str, family: Family, destinations: int | Callable[[Instr], int], **facts):
    """Declare the rows of opcodes that the decorated function translates to native code."""

    def register(function):
        declare(*names, family=family, destinations=destinations, translator=function, **facts)
        return function

    return register


def handler(*names: str, family: Family, destinations: int | Callable[[Instr], int], **facts):
    """Declare the rows of opcodes that the decorated function executes in Python."""

    def register(function):
        declare(*names, family=family, destinations=destinations, handler=function, **facts)
        return function

    return register


def fallback(*names: str):
    """Give the rows of translated opcodes a Python handler, for the forms that their translator refuses.

    Raises ValueError for a name whose row is not declared or has a handler already.
    """

    def register(function):
        for name in names:
            row = _ROWS.get(name)
            if row is None or row.handler is not None:
                raise ValueError(f"{name} has {'no row' if row is None else 'a Python handler'}")
            _ROWS[name] = replace(row, handler=function)
        find.cache_clear()
        return function

    return register


@cache
def find(opcode: str) -> Opcode | None:
    """The row of an opcode, or None: the simulator stops where such an instruction is reached."""
    name = opcode
    while name:
        row = _ROWS.get(name)
        if row is not None:
            return row
        name = name.rpartition(".")[0]
    return None


def row_of(opcode: str) -> Opcode:
    """The row of an opcode; raises UnsupportedInstruction where it has none."""
    row = find(opcode)
    if row is None:
        raise unsupported(opcode)
    return row


def unsupported(opcode: str) -> UnsupportedInstruction:
    """The error of an opcode, or of a form of it, that nothing executes."""
    return UnsupportedInstruction(f"the simulator does not execute `{opcode}`")


def import_all(package: ModuleType) -> None:
    """Import every module of a package: the rows that they declare are then known."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
