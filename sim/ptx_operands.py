"""Operands of PTX instructions: registers, immediates, addresses, vectors, labels (PTX ISA chapter 6)."""

from __future__ import annotations

import re

from warpspec.sim.errors import PtxSyntaxError, Where
from warpspec.sim.instruction import Imm, Instr, Label, Mem, Not, Operand, Pair, Reg, Sym, Vec
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.ptx_lexis import (
    constant_expression,
    float_literal,
    integer,
    is_integer,
    is_special,
    without_comments,
)

SPACE = re.compile(r"\s*")
_OPERAND = re.compile(r"\s*((?:\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|[^,\[{(])+)(,|$)")
_IDENTIFIER = re.compile(r"[A-Za-z_$%][\w$]*(?:\.[\w]+)?$")
_OFFSET = re.compile(r"([A-Za-z_$%][\w$]*(?:\.[xyzw])?)\s*([+-])\s*([^\s].*)$", re.S)


class Scope:
    """One `{ }` level: names declared here -> their unique operands; labels; branches waiting for a label."""

    def __init__(self, suffix: str, parent: Scope | None):
        self.suffix = suffix
        self.parent = parent
        self.names: dict[str, Reg | Sym | Vec] = {}
        self.labels: set[str] = set()
        self.branches: list[tuple[Instr, int, str]] = []
        self.target_lists: list[tuple[str, tuple[str, ...], int]] = []
        self.cache: dict[str, Operand] = {}

    def lookup(self, name: str) -> Reg | Sym | Vec | None:
        scope: Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None


class OperandReader:
    """Reads operands at a place in PTX text, looking up names in a scope."""

    def __init__(self, text: str):
        self.text = without_comments(text)
        self.pos = 0
        self.line = 1
        self.counted = 0  # newlines before this position are in self.line
        self.scope = Scope("", None)

    # -- places and errors

    def line_at(self, pos: int) -> int:
        self.line += self.text.count("\n", self.counted, pos)
        self.counted = pos
        return self.line

    def error(self, message: str, pos: int | None = None) -> PtxSyntaxError:
        pos = self.pos if pos is None else pos
        pos = SPACE.match(self.text, pos).end()
        end = self.text.find("\n", pos)
        quote = self.text[pos : end if end >= 0 else None].strip()[:200]
        return PtxSyntaxError(message, Where(ptx_line=self.text.count("\n", 0, pos) + 1, ptx_text=quote))

    def until(self, stop: str) -> str:
        """The text up to `stop`; consumes both."""
        end = self.text.find(stop, self.pos)
        if end < 0:
            raise self.error(f"expected {stop!r}")
        found = self.text[self.pos : end]
        self.pos = end + len(stop)
        return found

    # -- operands

    def split_operands(self, text: str, at: int) -> list[str]:
        if "[" not in text and "{" not in text and "(" not in text:
            return [item.strip() for item in text.split(",")]
        found = []
        pos = 0
        while pos < len(text):
            match = _OPERAND.match(text, pos)
            if match is None:
                raise self.error("operands not understood", at)
            found.append(match.group(1).strip())
            pos = match.end()
        return found

    def transfer_operands(self, ins: Instr, text: str, at: int) -> tuple[Operand, ...]:
        """Operands of bra, brx.idx and call: labels are settled when their scope closes."""
        items = self.split_operands(text, at)
        if ins.parts[0] == "bra":
            self.scope.branches.append((ins, 0, items[0]))
            return (Label(items[0]),)
        if ins.parts[0] == "brx":
            return (self.operand(items[0], ins, at), Label(self.target_list_name(items[1], at)))
        operands = []
        for item in items:
            if item.startswith("("):
                inner = tuple(
                    self.value(part.strip(), ins, at) for part in item[1:-1].split(",") if part.strip()
                )
                operands.append(Vec(inner))
            else:
                known = self.scope.lookup(item)
                operands.append(Sym(item) if known is None else known)
        return tuple(operands)

    def target_list_name(self, name: str, at: int) -> str:
        scope: Scope | None = self.scope
        while scope is not None:
            if any(name == label for label, _, _ in scope.target_lists):
                return name + scope.suffix
            scope = scope.parent
        raise self.error(f"{name} is not a .branchtargets list", at)

    def operand(self, text: str, ins: Instr, at: int) -> Operand:
        if not text:
            raise self.error("empty operand", at)
        first = text[0]
        if first == "[":
            if text[-1] != "]":
                raise self.error(f"address {text} not understood", at)
            return self.address(text[1:-1].strip(), ins, at)
        if first == "{":
            if text[-1] != "}":
                raise self.error(f"vector {text} not understood", at)
            return Vec(tuple(self.value(item.strip(), ins, at) for item in text[1:-1].split(",")))
        if first == "!":
            reg = self.value(text[1:].strip(), ins, at)
            if isinstance(reg, Reg):
                return Not(reg)
            raise self.error(f"{text} is not a negated predicate", at)
        if "|" in text:
            left, right = (self.scope.lookup(part.strip()) for part in text.split("|", 1))
            parts = [part.strip() for part in text.split("|", 1)]
            if all(isinstance(o, Reg) or p == "_" for o, p in zip((left, right), parts, strict=True)):
                return Pair(left, right)
        return self.value(text, ins, at)

    def address(self, text: str, ins: Instr, at: int) -> Mem:
        coords = None
        if "," in text:
            text, rest = (part.strip() for part in text.split(",", 1))
            if not rest.startswith("{") or not rest.endswith("}"):
                raise self.error(f"tensor coordinates {rest} not understood", at)
            coords = tuple(self.value(item.strip(), ins, at) for item in rest[1:-1].split(","))
        base = self.scope.lookup(text)
        if base is None:
            base = self.value(text, ins, at, allow_register_offset=True)
        if isinstance(base, Sym) and base.offset:
            return Mem(Sym(base.name), base.offset, coords)
        if isinstance(base, Mem):
            return Mem(base.base, base.offset, coords)
        return Mem(base, 0, coords)

    def value(self, text: str, ins: Instr, at: int, allow_register_offset: bool = False) -> Operand:
        """A register, immediate, symbol, symbol+offset, or _ (None)."""
        found = self.scope.lookup(text)
        if found is not None:
            return found
        if text == "_":
            return None
        if is_integer(text):
            return Imm(integer(text))
        bits = float_literal(text, ins.parts[-1])
        if bits is not None:
            return Imm(bits[0], is_float=True)
        if text == "WARP_SZ":
            return Imm(WARP_SIZE)
        if _IDENTIFIER.match(text):
            if text[0] == "%":
                if is_special(text):
                    return Reg(text)
                raise self.error(f"register {text} is not declared", at)
            raise self.error(f"name {text} is not declared", at)
        match = _OFFSET.match(text)
        try:
            if match is None:
                return Imm(constant_expression(text))
            name, sign, rest = match.groups()
            offset = constant_expression(rest) * (-1 if sign == "-" else 1)
        except ValueError:
            raise self.error(f"operand {text!r} not understood", at) from None
        base = self.scope.lookup(name)
        if isinstance(base, Sym):
            return Sym(base.name, offset)
        if isinstance(base, Reg) and allow_register_offset:
            return Mem(base, offset)
        raise self.error(f"operand {text!r} not understood", at)
