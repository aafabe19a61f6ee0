"""PTX text to data: `parse(text)` reads what CuTe DSL and NVVM emit into a `PtxModule` (PTX ISA, chapters 4, 5, 10, 11).

Registers, labels and variables declared in nested `{ }` scopes (inline assembly) are renamed `name$scope`, so that
names are unique within a kernel. Debug sections are skipped; `.loc` becomes `Instr.source`.
"""

from __future__ import annotations

import ast
import operator
import re
import struct
from dataclasses import replace

from warpspec.sim.errors import PtxSyntaxError, Where
from warpspec.sim.instruction import (
    Imm,
    Instr,
    Kernel,
    Label,
    Mem,
    Not,
    Operand,
    Pair,
    Param,
    PtxModule,
    Reg,
    Sym,
    Variable,
    Vec,
)

WARP_SIZE = 32

TYPE_BITS = {
    "pred": 1,
    **{f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)},
    "b128": 128,
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "f32": 32,
    "f64": 64,
}
VARIABLE_SPACES = ("shared", "global", "const", "local", "param")

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.S)
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"((?:\\.|[^"\\])*)"', re.M)
_SPACE = re.compile(r"\s*")
_STATEMENT = re.compile(
    r"\s*(?:"
    r"(?P<brace>[{}])"
    r"|(?P<directive>\.[A-Za-z_]\w*)"
    r"|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)"
    r"|(?:@\s*(?P<negated>!?)\s*(?P<guard>[A-Za-z_$%][\w$]*)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>[^;]*);"
    r")"
)
_OPERAND = re.compile(r"\s*((?:\[[^\]]*\]|\{[^}]*\}|\([^)]*\)|[^,\[{(])+)(,|$)")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"(-?)0([fF])([0-9a-fA-F]{8})$|(-?)0([dD])([0-9a-fA-F]{16})$")
_DECIMAL_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?$")
_IDENTIFIER = re.compile(r"[A-Za-z_$%][\w$]*(?:\.[\w]+)?$")
_OFFSET = re.compile(r"([A-Za-z_$%][\w$]*(?:\.[xyzw])?)\s*([+-])\s*([^\s].*)$", re.S)
_REG_DECLARATION = re.compile(r"\.reg\s+(?:\.\w+\s+)*?\.(\w+)\s+([^;]*);")
_REG_RANGE = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*(?:<\s*(\d+)\s*>)?\s*$")
_VARIABLE = re.compile(
    r"\s*(?P<modifiers>(?:\.\w+(?:\([^)]*\)|\s+\d+)?\s*)+?)\s*(?P<name>[A-Za-z_$%][\w$]*)\s*"
    r"(?P<dims>(?:\[[^\]]*\]\s*)*)(?:=\s*(?P<init>\{[^;]*\}|[^;,]+))?\s*(?=[;,)]|$)",
    re.S,
)
_MODIFIER = re.compile(r"\.(\w+)\s*(\([^)]*\)|\d+)?")
_FUNCTION = re.compile(r"\.(entry|func)\b")
_LINKAGE = ("extern", "visible", "weak", "common")
_TRIPLE = re.compile(r"\s*(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}


def parse(text: str) -> PtxModule:
    """Parse a PTX module.

    Raises PtxSyntaxError, with the line, for text that is not PTX or uses a form that is not understood.
    """
    return _Parser(text).module()


def integer(text: str) -> int:
    """The value of a PTX integer literal: decimal, 0x hexadecimal, 0b binary, 0 octal; an optional U suffix."""
    digits = text.rstrip("U")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("-")
    if digits[:2] in ("0x", "0X", "0b", "0B"):
        return sign * int(digits, 0)
    return sign * int(digits, 8 if len(digits) > 1 and digits[0] == "0" else 10)


def constant_expression(text: str) -> int:
    """The value of a constant integer expression (PTX ISA 4.5.5); ValueError when it is not one."""
    source = re.sub(r"\(\s*\.([us])64\s*\)", "", text).replace("WARP_SZ", str(WARP_SIZE))
    source = re.sub(r"\b(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?\b", lambda m: str(integer(m.group(1))), source)

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return int(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            inner = value(node.operand)
            if isinstance(node.op, ast.USub):
                return -inner
            return ~inner if isinstance(node.op, ast.Invert) else inner
        raise ValueError(text)

    try:
        return value(ast.parse(source.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(text) from error


class _Scope:
    """One `{ }` level: names declared here -> their unique operands; labels; branches waiting for a label."""

    def __init__(self, suffix: str, parent: _Scope | None):
        self.suffix = suffix
        self.parent = parent
        self.names: dict[str, Reg | Sym] = {}
        self.labels: set[str] = set()
        self.branches: list[tuple[Instr, int, str]] = []
        self.target_lists: list[tuple[str, tuple[str, ...], int]] = []
        self.cache: dict[str, Operand] = {}

    def lookup(self, name: str) -> Reg | Sym | None:
        scope: _Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None


class _Parser:
    def __init__(self, text: str):
        self.files = {int(m.group(1)): m.group(2) for m in _FILE.finditer(text)}
        self.text = _COMMENT.sub(_blank_comment, text)
        self.pos = 0
        self.line = 1
        self.counted = 0  # newlines before this position are in self.line

    # -- places and errors

    def line_at(self, pos: int) -> int:
        self.line += self.text.count("\n", self.counted, pos)
        self.counted = pos
        return self.line

    def error(self, message: str, pos: int | None = None) -> PtxSyntaxError:
        pos = self.pos if pos is None else pos
        pos = _SPACE.match(self.text, pos).end()
        end = self.text.find("\n", pos)
        quote = self.text[pos : end if end >= 0 else None].strip()[:200]
        return PtxSyntaxError(message, Where(ptx_line=self.text.count("\n", 0, pos) + 1, ptx_text=quote))

    def until(self, stop: str) -> str:
        """The text up to `stop`, which is consumed too."""
        end = self.text.find(stop, self.pos)
        if end < 0:
            raise self.error(f"expected {stop!r}")
        found = self.text[self.pos : end]
        self.pos = end + len(stop)
        return found

    # -- module level

    def module(self) -> PtxModule:
        result = PtxModule(version="", target="", kernels={})
        self.scope = _Scope("", None)
        while True:
            self.pos = _SPACE.match(self.text, self.pos).end()
            if self.pos == len(self.text):
                break
            word = re.compile(r"\.?[\w$]*").match(self.text, self.pos).group()
            if word == ".version":
                result.version = self.until("\n").split()[1]
            elif word == ".target":
                result.target = self.until("\n").split(None, 1)[1].strip()
            elif word in (".address_size", ".loc", ".file"):
                self.until("\n")
            elif word == ".section":
                self.until("}")
            elif word in (".pragma", ".alias"):
                self.until(";")
            elif word.startswith("."):
                self.declaration(result)
            elif self.text[self.pos] == ";":
                self.pos += 1
            else:
                raise self.error("expected a directive at module level")
        if not result.version or not result.target:
            raise self.error("a PTX module needs .version and .target", 0)
        return result

    def declaration(self, result: PtxModule) -> None:
        """A module variable, .entry or .func, after its linkage directives."""
        start = self.pos
        end = min(
            (at for at in (self.text.find(c, start) for c in ";{(=[") if at >= 0),
            default=len(self.text),
        )
        head = _FUNCTION.search(self.text, start, end)
        if head is None:
            for variable in self.variables(self.until(";"), start):
                result.variables[variable.name] = variable
                self.scope.names[variable.name] = Sym(variable.name)
            return
        self.pos = head.end()
        kernel = self.function(is_entry=head.group(1) == "entry")
        if kernel is not None:
            (result.kernels if head.group(1) == "entry" else result.functions)[kernel.name] = kernel

    def variables(self, text: str, at: int) -> list[Variable]:
        """Variables of one declaration, e.g. `.global .align 4 .b8 a[8] = {1, 2}`; `text` ends before the ';'."""
        match = _VARIABLE.match(text)
        if match is None:
            raise self.error("declaration not understood", at)
        modifiers = dict(_MODIFIER.findall(match.group("modifiers")))
        space = next((s for s in VARIABLE_SPACES if s in modifiers), None)
        kind = next((m for m in modifiers if m in TYPE_BITS), None)
        if space is None or kind is None:
            raise self.error("declaration without a state space or a type", at)
        count = 2 if "v2" in modifiers else 4 if "v4" in modifiers else 1
        width = max(TYPE_BITS[kind], 8) // 8
        align = int(modifiers["align"]) if modifiers.get("align") else width * count
        found = []
        while match is not None:
            elements = count
            values = self.initialiser(match.group("init"), width, at)
            for dim in re.findall(r"\[([^\]]*)\]", match.group("dims")):
                # An empty dimension is extern (size 0) or sized by its initialiser.
                elements *= constant_expression(dim) if dim.strip() else len(values or b"") // width // count
            size = elements * width
            init = values.ljust(size, b"\0") if values is not None else None
            found.append(Variable(match.group("name"), space, size, align, init))
            rest = text[match.end() :]
            if not rest.startswith(","):
                break
            text = match.group("modifiers") + " " + rest[1:]
            match = _VARIABLE.match(text)
        return found

    def initialiser(self, text: str | None, width: int, at: int) -> bytes | None:
        if text is None:
            return None
        values = bytearray()
        for item in text.strip("{} \t\n").replace("{", "").replace("}", "").split(","):
            item = item.strip()
            if not item:
                continue
            bits = _float_literal(item)
            try:
                value = bits[0] if bits else constant_expression(item)
            except ValueError:
                raise self.error(f"initialiser {item!r} is not a constant", at) from None
            values += (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        return bytes(values)

    # -- functions

    def function(self, is_entry: bool) -> Kernel | None:
        """A kernel or device function after `.entry` / `.func`; None for a declaration without a body."""
        module_scope = self.scope
        self.scope = _Scope("", module_scope)
        self.scopes = 0
        self.source: str | None = None
        returned: list[Param] = []
        self.pos = _SPACE.match(self.text, self.pos).end()
        self.kernel = Kernel("", [], {}, [], {})
        if not is_entry and self.text[self.pos] == "(":
            returned = self.parameters()
        name = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*").match(self.text, self.pos)
        if name is None:
            raise self.error("expected a function name")
        self.kernel.name = name.group(1)
        self.pos = name.end()
        self.kernel.params = returned + (self.parameters() if self.text[self.pos] == "(" else [])
        has_body = self.performance_directives()
        if has_body:
            self.body()
        self.scope = module_scope
        module_scope.names.setdefault(self.kernel.name, Sym(self.kernel.name))
        return self.kernel if has_body else None

    def parameters(self) -> list[Param]:
        """`( .param ..., ... )`: byte offsets follow the C ABI, every parameter at its own alignment."""
        start = self.pos
        self.pos += 1
        found = []
        offset = 0
        for text in self.until(")").split(","):
            if not text.strip():
                continue
            plain = re.sub(r"\.ptr\b(\s*\.(?:global|shared|const|local|param))?(\s*\.align\s+\d+)?", "", text)
            if plain.strip().startswith(".reg"):
                self.declare_registers(plain.strip() + ";", start)
                continue
            (variable,) = self.variables(plain, start)
            offset = -(-offset // variable.align) * variable.align
            found.append(Param(variable.name, offset, variable.size, variable.align))
            offset += variable.size
            self.scope.names[variable.name] = Sym(variable.name)
        return found

    def performance_directives(self) -> bool:
        """.reqntid and its kin; True when a body follows, False for a declaration that ends in ';'."""
        while True:
            self.pos = _SPACE.match(self.text, self.pos).end()
            char = self.text[self.pos : self.pos + 1]
            if char == "{":
                self.pos += 1
                return True
            if char == ";":
                self.pos += 1
                return False
            match = re.compile(r"\.(\w+)").match(self.text, self.pos)
            if match is None:
                # `.func` declarations may close without ';' in front of the next directive only if malformed.
                raise self.error("expected a function body")
            self.pos = match.end()
            directive = match.group(1)
            if directive == "pragma":
                self.until(";")
                continue
            if directive in ("entry", "func", "visible", "extern", "weak", "version"):
                raise self.error("expected a function body", match.start())
            numbers = _TRIPLE.match(self.text, self.pos)
            if numbers is None:
                continue
            self.pos = numbers.end()
            triple = tuple(int(n) if n else 1 for n in numbers.groups())
            if directive == "reqntid":
                self.kernel.reqntid = triple
            elif directive == "maxntid":
                self.kernel.maxntid = triple
            elif directive == "reqnctapercluster":
                self.kernel.cluster_dims = triple

    def body(self) -> None:
        outermost = self.scope
        match_statement = _STATEMENT.match
        while True:
            match = match_statement(self.text, self.pos)
            if match is None:
                if _SPACE.match(self.text, self.pos).end() == len(self.text):
                    raise self.error(f"the body of {self.kernel.name} is not closed")
                raise self.error("statement not understood")
            opcode = match.group("opcode")
            if opcode is not None:
                self.instruction(match, opcode)
                self.pos = match.end()
                continue
            label = match.group("label")
            if label is not None:
                self.pos = match.end()
                if self.text.startswith(".", _SPACE.match(self.text, self.pos).end()):
                    if self.target_list(label):
                        continue
                self.define_label(label, match.start("label"))
            elif match.group("directive") is not None:
                self.pos = match.start("directive")
                self.body_directive(match.group("directive")[1:])
            elif match.group("brace") == "{":
                self.pos = match.end()
                self.scopes += 1
                self.scope = _Scope(f"${self.scopes}", self.scope)
            else:
                self.pos = match.end()
                self.close_scope(is_outermost=self.scope is outermost)
                if self.scope is outermost.parent:
                    return

    def define_label(self, label: str, at: int) -> None:
        if label in self.scope.labels:
            raise self.error(f"label {label} is defined twice", at)
        self.scope.labels.add(label)
        self.kernel.labels[label + self.scope.suffix] = len(self.kernel.instrs)

    def target_list(self, label: str) -> bool:
        """`name: .branchtargets a, b;` and `name: .callprototype ...;`; False when it is a plain label."""
        match = re.compile(r"\s*\.(branchtargets|calltargets|callprototype)\b([^;]*);").match(
            self.text, self.pos
        )
        if match is None:
            return False
        if match.group(1) == "branchtargets":
            targets = tuple(name.strip() for name in match.group(2).split(","))
            self.scope.target_lists.append((label, targets, match.start()))
        else:
            self.scope.names[label] = Sym(label)
        self.pos = match.end()
        return True

    def body_directive(self, name: str) -> None:
        start = self.pos
        if name == "loc":
            numbers = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*").match(self.text, start)
            if numbers is None:
                raise self.error(".loc not understood")
            self.pos = numbers.end()
            line = int(numbers.group(2))
            file = self.files.get(int(numbers.group(1)))
            self.source = f"{file}:{line}" if file is not None and line > 0 else None
        elif name == "reg":
            self.declare_registers(self.until(";") + ";", start)
        elif name in ("pragma", "branchtargets", "callprototype", "calltargets"):
            self.until(";")
        elif name == "file":
            self.until("\n")
        else:
            for variable in self.variables(self.until(";"), start):
                unique = variable.name + self.scope.suffix
                self.scope.names[variable.name] = Sym(unique)
                self.kernel.variables[unique] = replace(variable, name=unique)

    def declare_registers(self, text: str, at: int) -> None:
        match = _REG_DECLARATION.match(text)
        if match is None or match.group(1) not in TYPE_BITS:
            raise self.error(".reg declaration not understood", at)
        bits = TYPE_BITS[match.group(1)]
        suffix = self.scope.suffix
        registers = self.kernel.registers
        names = self.scope.names
        for item in match.group(2).split(","):
            parts = _REG_RANGE.match(item)
            if parts is None:
                raise self.error(".reg declaration not understood", at)
            stem, count = parts.groups()
            for name in [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]:
                unique = name + suffix
                registers[unique] = bits
                names[name] = Reg(unique)
        self.scope.cache.clear()

    def close_scope(self, is_outermost: bool) -> None:
        scope = self.scope
        parent = scope.parent
        for instr, position, name in scope.branches:
            if name in scope.labels:
                operands = list(instr.operands)
                operands[position] = Label(name + scope.suffix)
                instr.operands = tuple(operands)
            elif is_outermost:
                raise PtxSyntaxError(
                    f"label {name} is not defined", Where(ptx_line=instr.line, ptx_text=instr.text)
                )
            else:
                parent.branches.append((instr, position, name))
        for label, targets, at in scope.target_lists:
            missing = [t for t in targets if t not in scope.labels]
            if missing:
                raise self.error(f"label {missing[0]} is not defined in this scope", at)
            self.kernel.branch_targets[label + scope.suffix] = tuple(t + scope.suffix for t in targets)
        self.scope = parent

    # -- instructions

    def instruction(self, match: re.Match, opcode: str) -> None:
        kernel = self.kernel
        negated, guard = match.group("negated", "guard")
        start = match.start("opcode") if guard is None else match.start("guard")
        line = self.line_at(start)
        guard_reg = None
        if guard is not None:
            guard_reg = self.scope.lookup(guard)
            if not isinstance(guard_reg, Reg):
                raise self.error(f"guard predicate {guard} is not declared", start)
        text = match.group("operands").rstrip()
        instr = Instr(
            index=len(kernel.instrs),
            opcode=opcode,
            parts=tuple(opcode.split(".")),
            operands=(),
            guard=guard_reg,
            guard_negated=bool(negated),
            line=line,
            source=self.source,
            text=" ".join(match.group().split()),
        )
        kernel.instrs.append(instr)
        if not text:
            return
        if instr.parts[0] in ("bra", "brx", "call"):
            instr.operands = self.transfer_operands(instr, text, start)
            return
        cache = self.scope.cache
        operands = []
        for item in self.split_operands(text, start):
            operand = cache.get(item)
            if operand is None:
                operand = self.operand(item, instr, start)
                if not isinstance(operand, Imm):
                    cache[item] = operand
            operands.append(operand)
        instr.operands = tuple(operands)

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

    def transfer_operands(self, instr: Instr, text: str, at: int) -> tuple[Operand, ...]:
        """Operands of bra, brx.idx and call: labels are settled when their scope closes."""
        items = self.split_operands(text, at)
        if instr.parts[0] == "bra":
            self.scope.branches.append((instr, 0, items[0]))
            return (Label(items[0]),)
        if instr.parts[0] == "brx":
            return (self.operand(items[0], instr, at), Label(self.target_list_name(items[1], at)))
        operands = []
        for item in items:
            if item.startswith("("):
                inner = tuple(
                    self.value(part.strip(), instr, at) for part in item[1:-1].split(",") if part.strip()
                )
                operands.append(Vec(inner))
            else:
                known = self.scope.lookup(item)
                operands.append(Sym(item) if known is None else known)
        return tuple(operands)

    def target_list_name(self, name: str, at: int) -> str:
        scope: _Scope | None = self.scope
        while scope is not None:
            if any(name == label for label, _, _ in scope.target_lists):
                return name + scope.suffix
            scope = scope.parent
        raise self.error(f"{name} is not a .branchtargets list", at)

    def operand(self, text: str, instr: Instr, at: int) -> Operand:
        if not text:
            raise self.error("empty operand", at)
        first = text[0]
        if first == "[":
            if text[-1] != "]":
                raise self.error(f"address {text} not understood", at)
            return self.address(text[1:-1].strip(), instr, at)
        if first == "{":
            if text[-1] != "}":
                raise self.error(f"vector {text} not understood", at)
            return Vec(tuple(self.value(item.strip(), instr, at) for item in text[1:-1].split(",")))
        if first == "!":
            reg = self.value(text[1:].strip(), instr, at)
            if isinstance(reg, Reg):
                return Not(reg)
            raise self.error(f"{text} is not a negated predicate", at)
        if "|" in text:
            left, right = (self.scope.lookup(part.strip()) for part in text.split("|", 1))
            parts = [part.strip() for part in text.split("|", 1)]
            if all(isinstance(o, Reg) or p == "_" for o, p in zip((left, right), parts, strict=True)):
                return Pair(left, right)
        return self.value(text, instr, at)

    def address(self, text: str, instr: Instr, at: int) -> Mem:
        coords = None
        if "," in text:
            text, rest = (part.strip() for part in text.split(",", 1))
            if not rest.startswith("{") or not rest.endswith("}"):
                raise self.error(f"tensor coordinates {rest} not understood", at)
            coords = tuple(self.value(item.strip(), instr, at) for item in rest[1:-1].split(","))
        base = self.scope.lookup(text)
        if base is None:
            base = self.value(text, instr, at, allow_register_offset=True)
        if isinstance(base, Sym) and base.offset:
            return Mem(Sym(base.name), base.offset, coords)
        if isinstance(base, Mem):
            return Mem(base.base, base.offset, coords)
        return Mem(base, 0, coords)

    def value(self, text: str, instr: Instr, at: int, allow_register_offset: bool = False) -> Operand:
        """A register, immediate, symbol, symbol+offset, or _ (None)."""
        found = self.scope.lookup(text)
        if found is not None:
            return found
        if text == "_":
            return None
        if _INTEGER.match(text):
            return Imm(integer(text))
        bits = _float_literal(text, instr.parts[-1])
        if bits is not None:
            return Imm(bits[0], is_float=True)
        if text == "WARP_SZ":
            return Imm(WARP_SIZE)
        if _IDENTIFIER.match(text):
            if text[0] == "%":
                if "." in text or not text[-1].isdigit() or text in _NUMBERED_SPECIAL:
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


_NUMBERED_SPECIAL = frozenset(
    ["%clock64", "%globaltimer_lo"]
    + [f"%pm{i}" for i in range(8)]
    + [f"%pm{i}_64" for i in range(8)]
    + [f"%envreg{i}" for i in range(32)]
    + ["%reserved_smem_offset_0", "%reserved_smem_offset_1"]
)


def _blank_comment(match: re.Match) -> str:
    """A comment as nothing but its newlines (line numbers stay right); strings as they are."""
    text = match.group()
    if text[0] == '"':
        return text
    return "\n" * text.count("\n") if text[1] == "*" else ""


def _float_literal(text: str, kind: str = "f64") -> tuple[int, int] | None:
    """(bit pattern, bits) of 0f, 0d and decimal floating-point literals; a decimal one takes the type `kind`."""
    match = _FLOAT_BITS.match(text)
    if match is not None:
        sign, _, digits = [g for g in match.groups() if g is not None]
        bits = 4 * len(digits)
        return int(digits, 16) ^ (1 << (bits - 1) if sign else 0), bits
    if _DECIMAL_FLOAT.match(text):
        if kind == "f32":
            return int.from_bytes(struct.pack("<f", float(text)), "little"), 32
        return int.from_bytes(struct.pack("<d", float(text)), "little"), 64
    return None
