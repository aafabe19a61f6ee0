"""A kernel translated for execution: its blocks, its register file and the native code, cached on disk."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numpy as np

from warpspec.common.disk_cache import DiskCache
from warpspec.sim import cfg
from warpspec.sim.codegen import control
from warpspec.sim.codegen.emitter import Emitter, NotNative, ivec
from warpspec.sim.codegen.layout import LOG_WORDS, Ctx, RegisterFile, Stop, registers_of
from warpspec.sim.codegen.memory import access_bytes, is_logged
from warpspec.sim.codegen.support import LOGGING_TRAMPOLINE, RECORD, RESOLVE, TRAMPOLINE
from warpspec.sim.instruction import Instr, Kernel, Mem, Not, Pair, PtxModule, Reg, Sym, Vec
from warpspec.sim.memory import SHARED_BASE_OFFSET
from warpspec.sim.registry import Control, Family, find, row_of

LOG_ENTRIES = 2048  # that a program's log holds beside those of one block
OBJECTS = DiskCache("sim", limit=2 << 30)


def _shape(operand) -> str:
    """What of an operand decides whether an instruction has a native form."""
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
        self.static_shared_end = at
        self.local_size = -(-local_at // 16) * 16


class _KernelEmitter(Emitter):
    """An emitter that also knows local variables (their addresses are offsets in local memory)."""

    def __init__(self, registers: RegisterFile, tables: SymbolTables):
        super().__init__(registers, tables.symbols, tables.params, tables.shared)
        self.local = tables.local

    def symbol(self, name: str, offset: int, bits: int) -> str:
        if name in self.local:
            return self.imm(bits, self.local[name] + offset)
        return super().symbol(name, offset, bits)


class Program:
    """Blocks and native code of one kernel.

    logging: for a run that checks memory order. Native code logs its accesses, and instructions that decide the order
    are system blocks, native or not (`hooked` says which are).
    """

    def __init__(self, module: PtxModule, kernel: Kernel, logging: bool = False):
        self.module, self.kernel, self.logging = module, kernel, logging
        self.tables = SymbolTables(module, kernel)
        self.registers = RegisterFile(kernel)
        self._native: dict[str, bool] = {}
        self.blocks = cfg.cut(kernel, self.is_uninterrupted)
        self.live = cfg.liveness(kernel, self.blocks)
        self.registers.place(self.live.names(self.live.homes))
        self.exit_index = len(self.blocks)
        self.block_at = {block.start: block.index for block in self.blocks}
        self.system = [block.kind == "system" for block in self.blocks]
        self.hooked = [
            system and logging and self.is_native(kernel.instrs[block.start])
            for system, block in zip(self.system, self.blocks, strict=True)
        ]
        self._load()

    def is_uninterrupted(self, ins: Instr) -> bool:
        """Whether an instruction is native code between others."""
        return self.is_native(ins) and not (self.logging and row_of(ins.opcode).decides_order(ins))

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

    def through(self, block: int) -> int:
        """The block behind one in the text."""
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
        code = self._object_code()
        # The engine owns its target machine: a shared one would be freed with the first program that goes.
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
        engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
        self._engine = engine
        count = len(self.blocks) + 1
        self.table = np.zeros(count, np.uint64)
        self.flags = np.zeros(count, np.uint8)
        self.hook_table = np.zeros(count, np.uint64)
        self._no_flags = np.zeros(count, np.uint8)
        for block in self.blocks:
            if self.hooked[block.index]:
                self.hook_table[block.index] = engine.get_function_address(f"b{block.index}")
            if not self.system[block.index]:
                self.table[block.index] = engine.get_function_address(f"b{block.index}")
                self.flags[block.index] = block.kind == "collective"
        self.table[self.exit_index] = engine.get_function_address("leave")
        signature = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_void_p] * 4, *[ctypes.c_uint32] * 3)
        self._run = signature(engine.get_function_address("run"))
        self.table_pointer, self.flags_pointer = self.table.ctypes.data, self.flags.ctypes.data

    def run(self, registers: int, context: int, mask: int, block: int, budget: int) -> tuple[Stop, int]:
        """Run native blocks from `block` for the lanes in `mask` until one stops; (why, block)."""
        answer = self._run(self.table_pointer, self.flags_pointer, registers, context, mask, block, budget)
        return answer >> 32, answer & 0xFFFFFFFF

    def run_hooked(self, registers: int, context: int, mask: int, block: int) -> tuple[Stop, int]:
        """Run one native block at which `run` stops."""
        tables = self.hook_table.ctypes.data, self._no_flags.ctypes.data
        answer = self._run(*tables, registers, context, mask, block, 1)
        return answer >> 32, answer & 0xFFFFFFFF

    def _object_key(self) -> str:
        """Names the object code by all that decides it: the kernel, what its opcodes' rows say of it, the sources."""
        cut = [(block.start, block.kind) for block in self.blocks]
        kept = [hex(bits) for bits in (self.live.homes, *self.live.live_out)]
        decisive = (
            self.kernel,
            self.module.variables,
            cut,
            kept,
            self.logging,
            _generator_version(),
            _host_id(),
        )
        parts = map(repr, decisive)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _object_code(self) -> bytes:
        name = f"{self._object_key()}.o"
        code = OBJECTS.read(name)
        if code is None:
            code = _target_machine().emit_object(llvm.parse_assembly(self._text()))
            OBJECTS.write(name, code)
        return code

    def _text(self) -> str:
        functions, extras = [], set()
        for block in self.blocks:
            if not self.system[block.index] or self.hooked[block.index]:
                text, needed = self._block(block)
                functions.append(text)
                extras |= needed
        leave = f"define i32 @leave(ptr %regs, ptr %ctx, i32 %mask) {{\n  ret i32 -{int(Stop.EXIT)}\n}}\n"
        support = [RESOLVE, RECORD, LOGGING_TRAMPOLINE] if self.logging else [RESOLVE, TRAMPOLINE]
        return "\n".join([*support, leave, *sorted(extras), *functions])

    def _block(self, block: cfg.Block) -> tuple[str, set[str]]:
        e = _KernelEmitter(self.registers, self.tables)
        e.logging = self.logging and not self.hooked[block.index]
        instrs = self.kernel.instrs[block.start : block.end]
        ends_by = cfg.control_of(instrs[-1]) if instrs else None
        for ins in instrs if ends_by is None else instrs[:-1]:
            e.translate(ins)
        e.guard = None
        e.store_live(self.live.names(self.live.live_out[block.index]))
        through = self.through(block.index)
        if ends_by is None:
            ending = f"  ret i32 {through}"
        else:
            ending = control.ending(e, instrs[-1], ends_by, self.targets(instrs[-1]), through)
        count = [
            f"  %counters.at = getelementptr i64, ptr %ctx, i64 {int(Ctx.COUNTERS)}",
            "  %counters = load ptr, ptr %counters.at, align 8",
            f"  %counter.at = getelementptr i64, ptr %counters, i64 {block.index}",
            "  %counter = load i64, ptr %counter.at, align 8",
            "  %counter.next = add i64 %counter, 1",
            "  store i64 %counter.next, ptr %counter.at, align 8",
        ]
        head = [f"  {name} = alloca {type_}, align 64" for (type_, _), name in e.allocas.items()]
        head += [f"  %m = bitcast i32 %mask to {ivec(1)}", "  %notmask = xor i32 %mask, -1", *count]
        text = "\n".join(
            [f"define i32 @b{block.index}(ptr %regs, ptr %ctx, i32 %mask) {{", *head, *e.lines, ending, "}\n"]
        )
        return text, e.intrinsics


def _is_access(ins: Instr) -> bool:
    return access_bytes(ins) > 0 and is_logged(ins)


def _register_names(ins: Instr) -> list[str]:
    return [name for operand in ins.operands for name in registers_of(operand)]


def _target_machine():
    """A new target machine; an execution engine owns the one it is given."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=1,
        codemodel="large",
        jit=True,
    )


@cache
def _host_id() -> str:
    return (
        f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} llvmlite {llvmlite.__version__}"
    )


@cache
def _generator_version() -> str:
    """Hash of the sources that decide the generated code."""
    folder = Path(__file__).parent
    sources = [*sorted(folder.glob("*.py")), folder.parent / "cfg.py", folder.parent / "memory.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
