"""A kernel translated for execution: its blocks, its register file and records of native code.

A block's records stand one after the other: for each instruction the function of its form (`forms.py`) and that
function's parameters.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import numpy as np

from warpspec.sim import cfg
from warpspec.sim.codegen import control, forms, templates
from warpspec.sim.codegen.emitter import Emitter, Form, NotNative, Place
from warpspec.sim.codegen.layout import (
    CLOCK_REGISTERS,
    FIRST_PARAMETER,
    LOG_WORDS,
    Ctx,
    RegisterFile,
    register_bytes,
    registers_of,
)
from warpspec.sim.codegen.memory import access_bytes, is_logged
from warpspec.sim.codegen.places import TemporaryPlaces
from warpspec.sim.instruction import Imm, Instr, Kernel, Mem, Not, Operand, Pair, PtxModule, Reg, Sym, Vec
from warpspec.sim.memory import SHARED_BASE_OFFSET
from warpspec.sim.names import kernel_name
from warpspec.sim.registry import Control, Family, find, row_of

MOST_UNWRITTEN = 64  # registers that are poisoned one by one
LOG_ENTRIES = 2048  # entries that a program's log holds beside those of one block


def _shape(operand) -> str:
    """The properties of an operand that decide whether an instruction has a native form."""
    match operand:
        case Vec(items):
            return "{" + ",".join(_shape(i) for i in items) + "}"
        case Mem(base, _, coords):
            return f"[{_shape(base)}{'' if coords is None else 'c'}]"
        case Pair(first, second):
            return f"{_shape(first)}|{_shape(second)}"
        case Sym(name, _):
            return f"s:{name}"
        case Reg() | Not():
            return type(operand).__name__[0]
        case None:
            return "_"
    return "i" if not hasattr(operand, "value") else f"i{operand.value & 255}"


class SymbolTables:
    """Addresses that code generation needs: shared variables by offset, others by index in a table filled at launch."""

    def __init__(self, module: PtxModule, kernel: Kernel):
        variables = {**module.variables, **kernel.variables}
        self.params = {p.name: p.offset for p in kernel.params}
        self.table = [v for v in variables.values() if v.space in ("global", "const")]
        self.symbols = {v.name: i for i, v in enumerate(self.table)}
        self.shared: dict[str, int] = {}
        self.local: dict[str, int] = {}
        at, local_at = SHARED_BASE_OFFSET, 0
        for v in variables.values():
            if v.space == "shared" and v.size:
                at = -(-at // v.align) * v.align
                self.shared[v.name] = at
                at += v.size
            elif v.space == "local":
                local_at = -(-local_at // v.align) * v.align
                self.local[v.name] = local_at
                local_at += v.size
        for v in variables.values():
            if v.space == "shared" and not v.size:  # extern: dynamic shared memory follows the static part
                at = -(-at // v.align) * v.align
                self.shared[v.name] = at
        self.dynamic_shared = at
        self.static_shared_end = at
        self.local_size = -(-local_at // 16) * 16


@dataclass(frozen=True, slots=True)
class VectorPlace:
    """The places of the registers of a vector operand. bits: the registers as a set (`Liveness`).

    rows: of a register file as uint32 [rows, 32], in the order of the operand; None where they are not all of 32 bits.
    """

    operand: Operand
    bits: int
    rows: slice | np.ndarray | None


class _KernelEmitter(Emitter):
    """An emitter that also knows local variables (their addresses are offsets in local memory)."""

    def __init__(
        self,
        registers: RegisterFile,
        tables: SymbolTables,
        place: Place | None = None,
        logging: bool = False,
    ):
        super().__init__(registers, tables.symbols, tables.params, tables.shared, place)
        self.local = tables.local
        self.logging = logging

    def symbol(self, name: str, offset: int, bits: int) -> str:
        if name in self.local:
            return self.get(Imm(self.local[name] + offset), bits)
        return super().symbol(name, offset, bits)


class Program:
    """Blocks and native code of one kernel.

    logging: for a run that checks memory order. Native code logs its accesses, and instructions that decide the order
    are system blocks, native or not (`hooked` says which are). keeps_back: reductions into global memory are kept back
    (`reductions.py`), which no native code does.
    """

    def __init__(self, module: PtxModule, kernel: Kernel, logging: bool = False, keeps_back: bool = False):
        self.module, self.kernel, self.logging = module, kernel, logging
        kept_back = cfg.sharing(kernel)[1] if keeps_back else ()
        self._kept_back = {id(kernel.instrs[position]) for position in kept_back}
        self.tables = SymbolTables(module, kernel)
        self.registers = RegisterFile(kernel)
        self._native: dict[str, bool] = {}
        self._vectors: dict[int, VectorPlace] = {}  # key: the operand's id
        self._ignored: dict[str, bool] = {}  # key: a register's name
        self.blocks = cfg.cut(kernel, self.is_uninterrupted)
        self.live = cfg.liveness(kernel, self.blocks)
        self.registers.place(self.live.names(self.live.homes))
        self.exit_index = len(self.blocks)
        self.block_at = {block.start: block.index for block in self.blocks}
        self.system = [block.kind == "system" for block in self.blocks]
        self.hooked = [
            system and logging and self._is_hooked(kernel.instrs[block.start])
            for system, block in zip(self.system, self.blocks, strict=True)
        ]
        self._load()

    @cached_property
    def name(self) -> str:
        """The kernel's name in messages."""
        return kernel_name(
            self.kernel.name, next((ins.source for ins in self.kernel.instrs if ins.source), None)
        )

    @cached_property
    def reads_clock(self) -> bool:
        """Whether it reads a clock."""
        return not CLOCK_REGISTERS.isdisjoint(self.registers.bits)

    def is_uninterrupted(self, ins: Instr) -> bool:
        """Whether an instruction is native code between others."""
        return self.is_native(ins) and not (self.logging and row_of(ins.opcode).decides_order(ins))

    def _is_hooked(self, ins: Instr) -> bool:
        return self.is_native(ins) and not row_of(ins.opcode).no_effect

    def new_log(self) -> np.ndarray:
        """A log for native code's accesses."""
        return np.zeros((self.log_limit + self._most_logged, LOG_WORDS), np.uint64)

    @property
    def log_limit(self) -> int:
        """Entries from which a log may not hold those of another block."""
        return LOG_ENTRIES

    @cached_property
    def _most_logged(self) -> int:
        instrs = self.kernel.instrs
        counts = [sum(map(_is_access, instrs[block.start : block.end])) for block in self.blocks]
        return max(counts, default=0) + 1

    def is_native(self, ins: Instr) -> bool:
        """Whether the instruction is translated; decided by translating one of its kind into the void."""
        row = find(ins.opcode)
        if id(ins) in self._kept_back:
            return False
        if row is None or row.translator is None:
            return row is not None and row.control is not None
        bits = [str(self.registers.bits.get(r, "")) for r in _register_names(ins)]
        key = f"{ins.opcode} {' '.join(map(_shape, ins.operands))} {' '.join(bits)}"
        if key not in self._native:
            try:
                _KernelEmitter(self.registers, self.tables).translate(ins)
                self._native[key] = True
            except NotNative:
                self._native[key] = False
        return self._native[key]

    @cache  # noqa: B019 (programs are cached for the life of the process)
    def touches(self, block: int) -> int:
        """Registers in flight that a block needs or overwrites, as a bitset."""
        first = self.kernel.instrs[self.blocks[block].start]
        touched = self.live.uses[block] | self.live.defs[block]
        row = find(first.opcode)
        if row is not None and row.accumulates:  # may go on with an accumulator in flight
            reads, _ = cfg.reads_writes(replace(first, operands=(None, *first.operands[1:])))
            touched = self.live.bits(reads)
        return touched

    @cache  # noqa: B019
    def uses_beyond_moves(self, block: int) -> int:
        """Registers that a native block reads, before it writes them, in instructions other than mov; a bitset."""
        used = defined = 0
        span = self.blocks[block]
        for ins in self.kernel.instrs[span.start : span.end]:
            reads, writes = cfg.reads_writes(ins)
            if row_of(ins.opcode).family is not Family.MOVE:
                used |= self.live.bits(reads) & ~defined
            defined |= self.live.bits(writes)
        return used

    def vector(self, operand: Operand) -> VectorPlace:
        """The places of the registers of a vector operand, or of a single register; they must have homes."""
        found = self._vectors.get(id(operand))
        if found is None:
            found = self._vectors[id(operand)] = self._vector_place(operand)
        return found

    def _vector_place(self, operand: Operand) -> VectorPlace:
        items = operand.items if isinstance(operand, Vec) else (operand,)
        names = [item.name for item in items if isinstance(item, Reg)]
        bits = self.live.bits(name for name in names if name in self.live.bit)
        rows: slice | np.ndarray | None = None
        if len(names) == len(items) and all(self.registers.bits[name] == 32 for name in names):
            rows = np.array([self.registers.offset[name] // register_bytes(32) for name in names])
            if (np.diff(rows) == 1).all():
                rows = slice(int(rows[0]), int(rows[-1]) + 1)
        return VectorPlace(operand, bits, rows)

    @cached_property
    def _read_behind_their_block(self) -> int:
        used = 0
        for bits in self.live.uses:
            used |= bits
        return used

    @cached_property
    def unwritten(self) -> list[slice] | None:
        """Bytes of the register file that a warp may read before it has written them; None: as good as all."""
        names = self.live.names(self.live.live_in[0])
        if len(names) > MOST_UNWRITTEN:
            return None
        offset, bits = self.registers.offset, self.registers.bits
        return [slice(offset[name], offset[name] + register_bytes(bits[name])) for name in names]

    def is_ignored(self, result: Reg) -> bool:
        """Whether nothing reads a register that a system instruction writes."""
        found = self._ignored.get(result.name)
        if found is None:
            found = not self.live.bits((result.name,)) & self._read_behind_their_block
            self._ignored[result.name] = found
        return found

    def through(self, block: int) -> int:
        """The block after one in the text."""
        return self.block_at.get(self.blocks[block].end, self.exit_index)

    def targets(self, last: Instr) -> list[int]:
        """The blocks to which the last instruction of a block may go: those of its labels, or out of the kernel."""
        if cfg.control_of(last) in (Control.EXIT, Control.TRAP):
            return [self.exit_index]
        labels = self.kernel.labels
        return [self.block_at.get(labels[name], self.exit_index) for name in cfg.targets(last, self.kernel)]

    @cache  # noqa: B019
    def split(self, block: int) -> tuple[int | None, int]:
        """(block of the lanes that take the branch at a block's end, block of the others).

        None stands for the target that the context names: the lanes at a brx.idx that have another index than the
        first run it again.
        """
        last = self.kernel.instrs[self.blocks[block].end - 1]
        if cfg.control_of(last) is Control.INDEXED_BRANCH:
            return None, block
        (target,) = self.targets(last)
        return target, self.through(block)

    # ---- native code ------------------------------------------------------------------------------------------

    def _load(self) -> None:
        count = len(self.blocks) + 1
        self.table = np.zeros(count, np.uint64)
        self.flags = np.zeros(count, np.uint8)
        self.hook_table = np.zeros(count, np.uint64)
        self._no_flags = np.zeros(count, np.uint8)
        first = self._write_records()
        for block in self.blocks:
            if self.hooked[block.index]:
                self.hook_table[block.index] = first[block.index]
            if not self.system[block.index]:
                self.table[block.index] = first[block.index]
                self.flags[block.index] = block.kind == "collective"
        self.table[self.exit_index] = first[self.exit_index]
        # Runs native blocks of a warp until one stops; returns `Stop` << 32 | block. See START_BIT in layout.py.
        self.call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)(
            forms.trampoline(self.logging)
        )
        self.context = {
            Ctx.CODE: self.table.ctypes.data,
            Ctx.FLAGS: self.flags.ctypes.data,
            Ctx.HOOKED_CODE: self.hook_table.ctypes.data,
            Ctx.HOOKED_FLAGS: self._no_flags.ctypes.data,
        }

    def _write_records(self) -> dict[int, int]:
        """Write the records of all native blocks; the address of each block's first."""
        native = [b for b in self.blocks if not self.system[b.index] or self.hooked[b.index]]
        temporary = TemporaryPlaces(self.registers)
        places = {}
        for block in native:
            touched = self.live.touched[block.start : block.end]
            live_out = frozenset(self.live.names(self.live.live_out[block.index]))
            places[block.index] = temporary.block(touched, live_out)
        self.registers.end = temporary.reserve(self.registers.size)
        words: list[int] = []
        uses: list[tuple[int, Form]] = []  # where a record begins, its function
        following: list[int] = []  # where records begin that the next one follows
        first: dict[int, int] = {}

        def add(form: Form, parameters: list[int], last: bool) -> None:
            uses.append((len(words), form))
            if not last:
                following.append(len(words))
            words.extend((0, 0 if last else len(words) + FIRST_PARAMETER + len(parameters), *parameters))

        for block in native:
            first[block.index] = len(words)
            instrs = self.kernel.instrs[block.start : block.end]
            ends_by = cfg.control_of(instrs[-1]) if instrs else None
            through = self.through(block.index)
            logging = self.logging and not self.hooked[block.index]
            for ins, found in zip(instrs, places[block.index], strict=True):
                place = temporary.resolve(*found)
                emitter = partial(_KernelEmitter, self.registers, self.tables, place, logging)
                if ins is instrs[-1] and ends_by is not None:
                    e = emitter()
                    form = control.ending(e, ins, ends_by, self.targets(ins), through)
                    add(form, e.parameters, True)
                else:
                    add(*templates.translated(ins, self.registers, place, logging, emitter), False)
            if ends_by is None:
                e = _KernelEmitter(self.registers, self.tables)
                add(control.jump(e, through), e.parameters, True)
        first[self.exit_index] = len(words)
        add(forms.LEAVE, [], True)
        address = forms.addresses({form for _, form in uses})
        self._records = records = np.array(words, np.uint64)
        base = records.ctypes.data
        at, functions = zip(*((at, address[form]) for at, form in uses), strict=True)
        records[list(at)] = functions
        behind = np.array(following, np.int64) + 1
        records[behind] = records[behind] * np.uint64(8) + np.uint64(base)
        return {block: base + 8 * at for block, at in first.items()}


def _is_access(ins: Instr) -> bool:
    return access_bytes(ins) > 0 and is_logged(ins)


def _register_names(ins: Instr) -> list[str]:
    return [name for operand in ins.operands for name in registers_of(operand)]
