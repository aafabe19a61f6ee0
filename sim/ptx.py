"""PTX text to data: `parse(text)` reads what CuTe DSL and NVVM emit into a `PtxModule` (PTX ISA 4, 5, 11).

Registers, labels and variables declared in nested `{ }` scopes (inline assembly) are renamed `name$scope`,
so that names are unique within a kernel. Debug sections are skipped; `.loc` becomes `Instr.source`.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import replace

from warpspec.sim import multimem
from warpspec.sim.errors import PtxSyntaxError, Where
from warpspec.sim.instruction import (
    Imm,
    Instr,
    Kernel,
    Label,
    Param,
    PtxModule,
    Reg,
    Sym,
    Variable,
    Vec,
)
from warpspec.sim.ptx_lexis import TYPE_BITS, constant_expression, float_literal
from warpspec.sim.ptx_operands import SPACE, OperandReader, Scope

VARIABLE_SPACES = ("shared", "global", "const", "local", "param")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"((?:\\.|[^"\\])*)"', re.M)
_STATEMENT = re.compile(
    r"\s*(?:"
    r"(?P<brace>[{}])"
    r"|(?P<directive>\.[A-Za-z_]\w*)"
    r"|(?P<label>[A-Za-z_$%][\w$]*)\s*:(?!:)"
    r"|(?:@\s*(?P<negated>!?)\s*(?P<guard>[A-Za-z_$%][\w$]*)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>[^;]*);"
    r")"
)
_REG_DECLARATION = re.compile(r"\.reg\s+(?:\.v([24])\s*)?\.(\w+)\s+([^;]*);")
_VECTOR_ITEMS = (
    "xr",
    "yg",
    "zb",
    "wa",
)  # names of a vector register's elements, two for each (PTX ISA 5.4.2)
_ASSEMBLY = re.compile(r"^[ \t]*// (?:begin|end) inline asm", re.M)
_REG_RANGE = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*(?:<\s*(\d+)\s*>)?\s*$")
_VARIABLE = re.compile(
    r"\s*(?P<modifiers>(?:\.\w+(?:\([^)]*\)|\s+\d+)?\s*)+?)\s*(?P<name>[A-Za-z_$%][\w$]*)\s*"
    r"(?P<dims>(?:\[[^\]]*\]\s*)*)(?:=\s*(?P<init>\{[^;]*\}|[^;,]+))?\s*(?=[;,)]|$)",
    re.S,
)
_MODIFIER = re.compile(r"\.(\w+)\s*(\([^)]*\)|\d+)?")
_FUNCTION = re.compile(r"\.(entry|func)\b")
_TRIPLE = re.compile(r"\s*(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


def _assembly_lines(text: str) -> list[int]:
    """The lines at which inline assembly begins and ends, in turn."""
    found, counted, line = [], 0, 1
    for match in _ASSEMBLY.finditer(text):
        line += text.count("\n", counted, match.start())
        counted = match.start()
        found.append(line)
    return found


def parse(text: str) -> PtxModule:
    """Parse a PTX module.

    Raises PtxSyntaxError, with the line, for text that is not PTX or uses a form that is not understood.
    """
    module = _Parser(text).module()
    module.text = text
    return module


class _Parser(OperandReader):
    def __init__(self, text: str):
        self.files = {int(m.group(1)): m.group(2) for m in _FILE.finditer(text)}
        super().__init__(text)
        self.assembly = _assembly_lines(text)
        self.used_bytes: int | None = None  # bytes that the next instruction, a load, uses

    # -- module level

    def module(self) -> PtxModule:
        result = PtxModule(version="", target="", kernels={})
        while True:
            self.pos = SPACE.match(self.text, self.pos).end()
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
        """Variables of one declaration such as `.global .align 4 .b8 a[8] = {1, 2}`, without the ';'."""
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
            found.append(Variable(match.group("name"), space, size, align, init, kind))
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
            bits = float_literal(item)
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
        self.scope = Scope("", module_scope)
        self.scopes = 0
        self.source: str | None = None
        returned: list[Param] = []
        self.pos = SPACE.match(self.text, self.pos).end()
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
            found.append(Param(variable.name, offset, variable.size, variable.align, variable.kind))
            offset += variable.size
            self.scope.names[variable.name] = Sym(variable.name)
        return found

    def performance_directives(self) -> bool:
        """.reqntid and similar; True if a body follows, False for a declaration that ends in ';'."""
        while True:
            self.pos = SPACE.match(self.text, self.pos).end()
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
            if directive == "blocksareclusters":
                self.kernel.blocks_are_clusters = True
            if directive in ("maxnreg", "minnctapersm"):
                self.kernel.bounds_registers = True
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
            elif directive == "maxclusterrank":
                self.kernel.max_cluster_rank = triple[0]

    def body(self) -> None:
        outermost = self.scope
        match_statement = _STATEMENT.match
        while True:
            match = match_statement(self.text, self.pos)
            if match is None:
                if SPACE.match(self.text, self.pos).end() == len(self.text):
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
                if not self.target_list(label):
                    self.define_label(label, match.start("label"))
            elif match.group("directive") is not None:
                self.pos = match.start("directive")
                self.body_directive(match.group("directive")[1:])
            elif match.group("brace") == "{":
                self.pos = match.end()
                self.scopes += 1
                self.scope = Scope(f"${self.scopes}", self.scope)
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
            if self.assembly and bisect_right(self.assembly, self.line_at(start)) % 2:
                return  # LLVM counts the lines of inline assembly on from where it stands in the source
            line = int(numbers.group(2))
            file = self.files.get(int(numbers.group(1)))
            self.source = f"{file}:{line}" if file is not None and line > 0 else None
        elif name == "reg":
            self.declare_registers(self.until(";") + ";", start)
        elif name == "pragma":
            mask = re.search(r"used_bytes_mask\s+(0x[0-9a-fA-F]+)", self.until(";"))
            self.used_bytes = int(mask.group(1), 16) if mask else None
        elif name in ("branchtargets", "callprototype", "calltargets"):
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
        if match is None or match.group(2) not in TYPE_BITS:
            raise self.error(".reg declaration not understood", at)
        bits, length = TYPE_BITS[match.group(2)], int(match.group(1) or 1)
        suffix = self.scope.suffix
        registers = self.kernel.registers
        names = self.scope.names
        for item in match.group(3).split(","):
            parts = _REG_RANGE.match(item)
            if parts is None:
                raise self.error(".reg declaration not understood", at)
            stem, count = parts.groups()
            for name in [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]:
                if length == 1:
                    unique = name + suffix
                    registers[unique] = bits
                    names[name] = Reg(unique)
                    continue
                elements = []
                for letters in _VECTOR_ITEMS[:length]:
                    unique = f"{name}.{letters[0]}{suffix}"
                    registers[unique] = bits
                    elements.append(Reg(unique))
                    names.update((f"{name}.{letter}", elements[-1]) for letter in letters)
                names[name] = Vec(tuple(elements))
        self.scope.cache.clear()

    def close_scope(self, is_outermost: bool) -> None:
        scope = self.scope
        parent = scope.parent
        for ins, position, name in scope.branches:
            if name in scope.labels:
                operands = list(ins.operands)
                operands[position] = Label(name + scope.suffix)
                ins.operands = tuple(operands)
            elif is_outermost:
                raise PtxSyntaxError(
                    f"label {name} is not defined", Where(ptx_line=ins.line, ptx_text=ins.text)
                )
            else:
                parent.branches.append((ins, position, name))
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
        if opcode.startswith("multimem."):
            opcode = multimem.on_one_device(opcode)
        ins = Instr(
            index=len(kernel.instrs),
            opcode=opcode,
            parts=tuple(opcode.split(".")),
            operands=(),
            guard=guard_reg,
            guard_negated=bool(negated),
            line=line,
            source=self.source,
            text=" ".join(match.group().split()),
            used_bytes=self.used_bytes,
        )
        self.used_bytes = None
        kernel.instrs.append(ins)
        if not text:
            return
        if ins.parts[0] in ("bra", "brx", "call"):
            ins.operands = self.transfer_operands(ins, text, start)
            return
        cache = self.scope.cache
        operands = []
        for item in self.split_operands(text, start):
            operand = cache.get(item)
            if operand is None:
                operand = self.operand(item, ins, start)
                if not isinstance(operand, Imm):
                    cache[item] = operand
            operands.append(operand)
        ins.operands = tuple(operands)
