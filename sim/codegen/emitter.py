"""Emits the LLVM text of one instruction. A PTX register is a `<32 x iN>`, a predicate a `<32 x i1>`.

The text is that of the instruction's form: where registers lie, immediates and offsets are parameters, which the
function reads from the instruction's record (`FIRST_PARAMETER`), so that instructions that differ in nothing else
share one compiled function. Lanes that do not execute compute garbage that nothing reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from warpspec.sim.codegen.layout import CLOCK_REGISTERS, FIRST_PARAMETER, Ctx, RegisterFile
from warpspec.sim.instruction import Imm, Instr, Not, Operand, Reg, Sym, Vec
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.registry import row_of

FLOAT_TYPE = {16: "half", 32: "float", 64: "double"}


class NotNative(Exception):
    """This form of an instruction has no native translation: a Python handler executes it."""


def ivec(bits: int) -> str:
    """LLVM type of 32 lanes of integers."""
    return f"<{WARP_SIZE} x i{bits}>"


def fvec(bits: int) -> str:
    """LLVM type of 32 lanes of floats."""
    return f"<{WARP_SIZE} x {FLOAT_TYPE[bits]}>"


@dataclass(frozen=True, slots=True)
class Place:
    """The places of an instruction's registers, as byte offsets in a warp's register file.

    sources: by name, what it may read; a register that is in no place has never been written. targets: by name,
    (offset, whether only the lanes that execute may be written) of what it writes.
    """

    sources: dict[str, int]
    targets: dict[str, tuple[int, bool]]


class Origin(Enum):
    """The origin of a parameter: the place that a register is read from or written to, the number of the
    instruction, or a value that instructions of one kind share."""

    SOURCE, TARGET, INSTRUCTION, VALUE = range(4)


@dataclass(frozen=True, slots=True)
class Form:
    """Compiled code of instructions: its text and the definitions that it needs. The text is its name."""

    text: str
    needs: frozenset[str] = field(compare=False)


class Emitter:
    """Text of a function `i32 (ptr %regs, ptr %ctx, i32 %mask, ptr %record)`, and the parameters of one use of it.

    It returns 0, the negative of a `Stop`, or, for the last record of a block, the block that follows. place: None to
    see whether there is a translation.
    """

    def __init__(
        self,
        registers: RegisterFile,
        symbols: dict[str, int],
        params: dict[str, int],
        shared: dict[str, int],
        place: Place | None = None,
    ):
        self.registers = registers
        self.symbols = symbols  # module variable -> index in the symbol table
        self.params = params  # kernel parameter -> byte offset
        self.shared = shared  # shared variable -> offset in shared memory
        self.place = place
        self.parameters: list[int] = []  # 64-bit words of the record
        self.origins: list[tuple[Origin, object]] = []  # each parameter's kind, and register or value
        self.head: list[str] = []
        self.lines: list[str] = []
        self.allocas: dict[tuple[str, int], str] = {}
        self.values: dict[str, str] = {}  # register -> SSA name, integer typed
        self.dirty: dict[str, None] = {}  # registers that are written, in order
        self.intrinsics: set[str] = set()
        self.count = 0
        self.guard: str | None = None
        self.logging = False  # accesses to shared and global memory are written to the context's log
        self._ctx: dict[int, str] = {}

    # ---- plain text -------------------------------------------------------------------------------------------

    def op(self, text: str) -> str:
        """Append `%n = text` and return %n."""
        name = f"%v{self.count}"
        self.count += 1
        self.lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Append an LLVM instruction that has no result."""
        self.lines.append("  " + text)

    def label(self, stem: str) -> str:
        """A new label that begins with `stem`."""
        self.count += 1
        return f"{stem}{self.count}"

    def call(self, returns: str, name: str, *arguments: str) -> str:
        """Call an LLVM intrinsic or helper; each argument is 'type value'."""
        types = ", ".join(a.rsplit(" ", 1)[0] if not a.endswith(")") else _type_of(a) for a in arguments)
        self.intrinsics.add(f"declare {returns} @{name}({types})")
        return self.op(f"call {returns} @{name}({', '.join(arguments)})")

    def buffer(self, type_: str, slot: int = 0) -> str:
        """Stack memory of a type, in the function's entry; the same (type, slot) is shared."""
        key = (type_, slot)
        if key not in self.allocas:
            self.allocas[key] = f"%buf{len(self.allocas)}"
        return self.allocas[key]

    # ---- context ----------------------------------------------------------------------------------------------

    def ctx(self, field: Ctx) -> str:
        """A 64-bit field of the warp's context."""
        if field not in self._ctx or field == Ctx.CLOCK:
            at = self.op(f"getelementptr i64, ptr %ctx, i64 {int(field)}")
            self._ctx[field] = self.op(f"load i64, ptr {at}, align 8")
        return self._ctx[field]

    def ctx_store(self, field: Ctx, value: str) -> None:
        """Write a 64-bit field of the warp's context."""
        at = self.op(f"getelementptr i64, ptr %ctx, i64 {int(field)}")
        self.do(f"store i64 {value}, ptr {at}, align 8")
        self._ctx.pop(field, None)

    # ---- parameters -------------------------------------------------------------------------------------------

    def parameter(self, value: int, origin: Origin = Origin.VALUE, name: str = "") -> str:
        """A 64-bit word that the form reads from the record; `value` is that of this use. name: of the register whose
        place it is."""
        at = len(self.parameters)
        self.parameters.append(value & 0xFFFFFFFFFFFFFFFF)
        self.origins.append((origin, name or self.parameters[at]))
        self.head.append(f"  %p{at}.at = getelementptr i64, ptr %record, i64 {FIRST_PARAMETER + at}")
        self.head.append(f"  %p{at} = load i64, ptr %p{at}.at, align 8")
        return f"%p{at}"

    def parameter32(self, value: int, origin: Origin = Origin.VALUE) -> str:
        """The parameter as an i32."""
        return self.op(f"trunc i64 {self.parameter(value, origin)} to i32")

    # ---- registers --------------------------------------------------------------------------------------------

    def at(self, offset: int, origin: Origin, name: str) -> str:
        """A pointer into the warp's register file, to the place of a register."""
        return self.op(f"getelementptr i8, ptr %regs, i64 {self.parameter(offset, origin, name)}")

    def load(self, name: str) -> str:
        """Load a register's value from the register file."""
        bits, offset = self.registers.bits[name], 0
        if self.place is not None:
            offset = self.place.sources.get(name, self.registers.offset.get(name))
        if offset is None:  # read before any write
            return "zeroinitializer"
        at = self.at(offset, Origin.SOURCE, name)
        if bits == 1:
            raw = self.op(f"load i32, ptr {at}, align 4")
            return self.op(f"bitcast i32 {raw} to {ivec(1)}")
        return self.op(f"load {ivec(bits)}, ptr {at}, align {min(64, 4 * bits)}")

    def current(self, name: str) -> str:
        """The register's value as its full-width integer vector."""
        if name in CLOCK_REGISTERS:
            return self._clock(name)
        if name not in self.values:
            self.values[name] = self.load(name)
        return self.values[name]

    def _clock(self, name: str) -> str:
        ticks = self.ctx(Ctx.CLOCK)
        if self.registers.bits[name] == 64:
            return self.splat(64, ticks)
        if name.endswith("_hi"):
            ticks = self.op(f"lshr i64 {ticks}, 32")
        return self.splat(32, self.op(f"trunc i64 {ticks} to i32"))

    def store(self) -> None:
        """Write changed registers back to the register file."""
        for name in self.dirty:
            offset, masked = (0, False) if self.place is None else self.place.targets[name]
            bits, value, at = (
                self.registers.bits[name],
                self.values[name],
                self.at(offset, Origin.TARGET, name),
            )
            if bits == 1:
                value = self.op(f"bitcast {ivec(1)} {value} to i32")
                if masked:
                    keep = self.op(f"and i32 {self.op(f'load i32, ptr {at}, align 4')}, %notmask")
                    value = self.op(f"or i32 {keep}, {self.op(f'and i32 {value}, %mask')}")
                self.do(f"store i32 {value}, ptr {at}, align 4")
                continue
            align = min(64, 4 * bits)
            if masked:
                old = self.op(f"load {ivec(bits)}, ptr {at}, align {align}")
                value = self.select("%m", value, old, ivec(bits))
            self.do(f"store {ivec(bits)} {value}, ptr {at}, align {align}")

    # ---- operands ---------------------------------------------------------------------------------------------

    def splat(self, bits: int, scalar: str) -> str:
        """A scalar SSA integer in all lanes."""
        one = self.op(f"insertelement {ivec(bits)} poison, i{bits} {scalar}, i32 0")
        return self.op(f"shufflevector {ivec(bits)} {one}, {ivec(bits)} poison, {ivec(32)} zeroinitializer")

    def scalar(self, bits: int, word: str) -> str:
        """A 64-bit word as an integer of the given width."""
        return word if bits == 64 else self.op(f"trunc i64 {word} to i{bits}")

    def imm(self, bits: int, value: int) -> str:
        """A constant of the form in all lanes (a constant expression, usable as an operand)."""
        value &= (1 << bits) - 1
        return f"splat (i{bits} {value})"

    def get(self, operand: Operand, bits: int) -> str:
        """An operand as `<32 x i{bits}>`: wider registers are truncated, narrower zero-extended."""
        match operand:
            case Imm(value, is_float):
                if is_float and bits == 32 and value >> 32:
                    raise NotNative("double literal in a 32-bit operand")
                return self.splat(bits, self.scalar(bits, self.parameter(value)))
            case Reg(name):
                return self.resize(self.current(name), self.registers.bits[name], bits)
            case Sym(name, offset):
                return self.symbol(name, offset, bits)
            case Vec(items) if len(items) * 32 == bits or len(items) * 16 == bits or len(items) * 8 == bits:
                return self.pack(items, bits)
        raise NotNative(f"operand {operand}")

    def resize(self, value: str, have: int, want: int, signed: bool = False) -> str:
        """`<32 x i{have}>` as `<32 x i{want}>`: truncated, or zero- or sign-extended."""
        if have == want:
            return value
        word = "trunc" if have > want else ("sext" if signed else "zext")
        return self.op(f"{word} {ivec(have)} {value} to {ivec(want)}")

    def pack(self, items: tuple, bits: int) -> str:
        """Concatenate the items of a source vector in `<32 x i{bits}>`, the first item lowest."""
        part = bits // len(items)
        total = None
        for position, item in enumerate(items):
            if item is None:
                raise NotNative("_ in a source vector")
            piece = self.resize(self.get(item, part), part, bits)
            if position:
                piece = self.op(f"shl {ivec(bits)} {piece}, {self.imm(bits, position * part)}")
                total = self.op(f"or {ivec(bits)} {total}, {piece}")
            else:
                total = piece
        return total

    def symbol(self, name: str, offset: int, bits: int) -> str:
        """The address of a variable: shared addresses carry the CTA's rank, others are host addresses. A parameter's in
        32 bits is its offset in the parameter buffer: see `in_parameters`."""
        if name in self.shared:
            rank = self.op(f"shl i64 {self.ctx(Ctx.CTA_RANK)}, 24")
            scalar = self.op(f"add i64 {rank}, {self.parameter(self.shared[name] + offset)}")
        elif name in self.params and bits < 64:
            return self.splat(bits, self.scalar(bits, self.parameter(self.params[name] + offset)))
        elif name in self.params:
            scalar = self.op(f"add i64 {self.ctx(Ctx.PARAMS)}, {self.parameter(self.params[name] + offset)}")
        elif name in self.symbols:
            at = self.op(f"inttoptr i64 {self.ctx(Ctx.SYMBOLS)} to ptr")
            at = self.op(f"getelementptr i64, ptr {at}, i64 {self.parameter(self.symbols[name])}")
            base = self.op(f"load i64, ptr {at}, align 8")
            scalar = self.op(f"add i64 {base}, {self.parameter(offset)}")
        else:
            raise NotNative(f"address of {name}")
        return self.splat(bits, self.scalar(bits, scalar))

    def in_parameters(self, address: str) -> str:
        """64-bit addresses in .param space as host addresses: what 32 bits hold is an offset in the buffer."""
        base = self.splat(64, self.ctx(Ctx.PARAMS))
        moved = self.op(f"add {ivec(64)} {address}, {base}")
        is_offset = self.op(f"icmp ult {ivec(64)} {address}, {self.imm(64, 1 << 32)}")
        return self.op(f"select {ivec(1)} {is_offset}, {ivec(64)} {moved}, {ivec(64)} {address}")

    def getf(self, operand: Operand, bits: int) -> str:
        """An operand as floats of the given width (same bits, other type)."""
        value = self.get(operand, bits)
        return self.op(f"bitcast {ivec(bits)} {value} to {fvec(bits)}")

    def pred(self, operand: Operand) -> str:
        """A predicate operand as `<32 x i1>`."""
        match operand:
            case Reg(name):
                return self.current(name)
            case Not(Reg(name)):
                return self.op(f"xor {ivec(1)} {self.current(name)}, splat (i1 true)")
            case Imm(value, _):
                return f"splat (i1 {'true' if value else 'false'})"
        raise NotNative(f"predicate operand {operand}")

    def set(self, operand: Operand, value: str, bits: int, signed: bool = False) -> None:
        """Assign `<32 x i{bits}>` to a register; wider registers are zero- or sign-extended. None (`_`) is dropped."""
        if operand is None:
            return
        if isinstance(operand, Vec):
            return self.unpack(operand.items, value, bits)
        if not isinstance(operand, Reg):
            raise NotNative(f"destination {operand}")
        have = self.registers.bits[operand.name]
        value = self.resize(value, bits, have, signed)
        if self.guard is not None:
            value = self.select(self.guard, value, self.current(operand.name), ivec(have))
        self.values[operand.name] = value
        self.dirty[operand.name] = None

    def unpack(self, items: tuple, value: str, bits: int) -> None:
        """Assign the parts of `<32 x i{bits}>`, the lowest first, to the items of a destination vector."""
        part = bits // len(items)
        for position, item in enumerate(items):
            if item is None:
                continue
            piece = value
            if position:
                piece = self.op(f"lshr {ivec(bits)} {value}, {self.imm(bits, position * part)}")
            self.set(item, self.resize(piece, bits, part), part)

    def setf(self, operand: Operand, value: str, bits: int) -> None:
        """Assign floats of the given width to a register, as their bits."""
        self.set(operand, self.op(f"bitcast {fvec(bits)} {value} to {ivec(bits)}"), bits)

    def select(self, condition: str, yes: str, no: str, type_: str) -> str:
        """`yes` in the lanes where the condition (`<32 x i1>`) holds, `no` in the others."""
        return self.op(f"select {ivec(1)} {condition}, {type_} {yes}, {type_} {no}")

    def active(self) -> str:
        """i32 mask of the lanes that execute this instruction (block mask and guard)."""
        if self.guard is None:
            return "%mask"
        bits = self.op(f"bitcast {ivec(1)} {self.guard} to i32")
        return self.op(f"and i32 {bits}, %mask")

    # ---- one instruction --------------------------------------------------------------------------------------

    def translate(self, ins: Instr) -> None:
        """Append the code of one instruction; raises NotNative for a form that has none."""
        translator = row_of(ins.opcode).translator
        if translator is None:
            raise NotNative(ins.opcode)
        self.instruction = ins
        if ins.guard is not None:
            self.guard = self.pred(Not(ins.guard) if ins.guard_negated else ins.guard)
        try:
            translator(self, ins)
        except NotNative:
            raise
        except Exception as error:
            error.add_note(f"in the translation of PTX line {ins.line}: `{ins.text}`")
            raise
        self.guard = None
        self.store()

    def form(self, returns: str = "0") -> Form:
        """The emitted code as a function that returns the i32 `returns`."""
        head = [f"  {name} = alloca {type_}, align 64" for (type_, _), name in self.allocas.items()]
        head += [f"  %m = bitcast i32 %mask to {ivec(1)}", "  %notmask = xor i32 %mask, -1"]
        ending = returns if returns.startswith("  ") else f"  ret i32 {returns}"
        return Form("\n".join([*head, *self.head, *self.lines, ending, "}\n"]), frozenset(self.intrinsics))


def _type_of(argument: str) -> str:
    """Type of an argument whose value is a constant expression: 'T splat (i32 5)' -> 'T'."""
    return argument[: argument.index(" splat (")]
