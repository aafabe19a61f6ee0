"""Basic blocks and register liveness of a kernel.

The simulator schedules blocks: native blocks are translated to LLVM; a system instruction is a block of its own that a
Python handler executes. `reads_writes` lists the registers an instruction touches.

An instruction whose opcode has no row is a system instruction that stops the run when it is reached, so nothing after
it depends on it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.instruction import Imm, Instr, Kernel, Label, Mem, Not, Operand, Pair, Reg, Vec
from warpspec.sim.ptx_lexis import is_special
from warpspec.sim.registry import Control, find, row_of

CARRY = "%cc"  # condition code register of add.cc and similar (PTX ISA 9.7.2), a pseudo register
ATOMICS = ("atom", "red")
FULL_MEMBERMASKS = (-1, 0xFFFFFFFF)


def reads_writes(ins: Instr) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the registers an instruction reads and writes, special registers left out.

    A guarded instruction keeps its destination in the lanes whose guard is false, so it reads it too. The
    carry flag of extended-precision arithmetic is the register CARRY. Raises UnsupportedInstruction for an
    opcode that has no row.
    """
    row = row_of(ins.opcode)
    count = row.destination_count(ins)
    operands = ins.operands
    writes: list[str] = []
    reads: list[str] = []
    for operand in operands[:count]:
        _registers(operand, writes)
    for operand in operands[count:]:
        _registers(operand, reads)
    if row.carry_in:
        reads.append(CARRY)
    if ins.has("cc"):
        writes.append(CARRY)
    if ins.guard is not None:
        reads.append(ins.guard.name)
        reads.extend(writes)
    elif row.accumulates:
        reads.extend(writes)
    return tuple(reads), tuple(writes)


def unread(kernel: Kernel) -> frozenset[int]:
    """The positions of instructions whose results, if they have any, no instruction reads."""
    read: set[str] = set()
    for ins in kernel.instrs:
        row = find(ins.opcode)
        if row is not None:
            skipped = 0 if row.accumulates else row.destination_count(ins)
            read.update(name for operand in ins.operands[skipped:] for name in operand_registers(operand))
    found = []
    for position, ins in enumerate(kernel.instrs):
        row = find(ins.opcode)
        if row is not None:
            written = ins.operands[: row.destination_count(ins)]
            if read.isdisjoint(name for operand in written for name in operand_registers(operand)):
                found.append(position)
    return frozenset(found)


def sharing(kernel: Kernel) -> tuple[bool, frozenset[int]]:
    """How clusters see each other through global memory: whether they do, and the positions of instructions that only
    reduce into it (red, bulk reductions, and atom whose result no instruction reads), which do not count."""
    visible, reductions, unused = False, [], unread(kernel)
    for position, ins in enumerate(kernel.instrs):
        row = find(ins.opcode)
        if row is None:
            continue
        if row.only_reduces(ins) and position in unused:
            reductions.append(position)
        elif row.may_share_memory(ins):
            visible = True
    return visible, frozenset(reductions)


def operand_registers(operand: Operand) -> list[str]:
    """Names of the registers that an operand mentions, special registers left out."""
    found: list[str] = []
    _registers(operand, found)
    return found


def _registers(operand: Operand, found: list[str]) -> None:
    if isinstance(operand, Reg):
        if not is_special(operand.name):
            found.append(operand.name)
    elif isinstance(operand, Vec):
        for item in operand.items:
            if isinstance(item, Reg):
                _registers(item, found)
    elif isinstance(operand, Mem):
        _registers(operand.base, found)
        for item in operand.coords or ():
            _registers(item, found)
    elif isinstance(operand, Pair):
        found.extend(reg.name for reg in (operand.first, operand.second) if reg is not None)
    elif isinstance(operand, Not):
        found.append(operand.reg.name)


@dataclass(slots=True)
class Block:
    """Instructions start to end (exclusive). `successors` are block indices, taken branch first.

    kind: 'system' (one instruction), 'collective' (its first instruction needs its lanes converged) or
    'native'. The last block may be empty: a branch to the closing brace ends the thread there.
    """

    index: int
    start: int
    end: int
    successors: tuple[int, ...]
    kind: str


def cut(kernel: Kernel, is_native: Callable[[Instr], bool]) -> list[Block]:
    """Cut a kernel into blocks, in textual order; `is_native` says which instructions, except branches and exits, are
    translated.

    A block begins at a branch target, after a branch or end of thread, at and after a system instruction or brx.idx,
    and at a collective one. A collective with the immediate membermask -1 stays in a block that already contains one:
    all lanes are together.
    """
    instrs = kernel.instrs
    starts = {0}
    kinds: dict[int, str] = {}
    for ins in instrs:
        at = ins.index
        control = control_of(ins)
        if control is not None:
            starts.add(at + 1)
            if control is Control.INDEXED_BRANCH:  # lanes with different indices execute it one after another
                starts.add(at)
            starts.update(kernel.labels[name] for name in targets(ins, kernel))
        elif not is_native(ins):
            starts.update((at, at + 1))
            kinds[at] = "system"
    full_block = False  # whether the current block began with a collective of all lanes
    for ins in instrs:
        at = ins.index
        if at in starts:
            full_block = False
        if at not in kinds and row_of(ins.opcode).collective is not None:
            full = ins.guard is None and immediate_membermask(ins) in FULL_MEMBERMASKS
            if not (full and full_block):
                starts.add(at)
                kinds[at] = "collective"
            full_block = full
    # A label after the last instruction needs a block; falling off the end needs none.
    end_is_target = any(len(instrs) in (kernel.labels[n] for n in targets(i, kernel)) for i in instrs)
    ordered = sorted(s for s in starts if s < len(instrs) or (s == len(instrs) and end_is_target))
    ends = [*ordered[1:], len(instrs)]
    blocks = []
    for index, (start, end) in enumerate(zip(ordered, ends, strict=True)):
        last = instrs[end - 1] if end > start else None
        after = [index + 1] if index + 1 < len(ordered) else []
        jumps = [bisect_left(ordered, kernel.labels[name]) for name in targets(last, kernel)] if last else []
        if last is not None and control_of(last) is not None and last.guard is None:
            after = []
        successors = tuple(dict.fromkeys(jumps + after))
        blocks.append(Block(index, start, end, successors, kinds.get(start, "native")))
    return blocks


def control_of(ins: Instr) -> Control | None:
    """The way in which the instruction ends its block; None if it does not."""
    row = find(ins.opcode)
    return None if row is None else row.control


def targets(ins: Instr, kernel: Kernel) -> tuple[str, ...]:
    """The labels a branch may go to."""
    control = control_of(ins)
    if control not in (Control.BRANCH, Control.INDEXED_BRANCH):
        return ()
    label = ins.operands[-1]
    if not isinstance(label, Label):
        raise UnsupportedInstruction(f"branch without a label: {ins.text}")
    return kernel.branch_targets[label.name] if control is Control.INDEXED_BRANCH else (label.name,)


def immediate_membermask(ins: Instr) -> int | None:
    """The membermask of a .sync instruction; None when it is a register."""
    mask = ins.membermask
    return mask.value if isinstance(mask, Imm) else None


@dataclass(slots=True)
class Liveness:
    """Registers as bitsets (Python ints); `names` turns one back into register names.

    live_in, live_out, uses, defs are indexed by block. `uses`: read before any write in the block. `homes`:
    registers that need a place in memory: live across a block boundary, touched by a system instruction, or operands of
    atomics and acquiring loads, which `sim.clocks.record` reads after the block.
    """

    registers: tuple[str, ...]
    touched: list[tuple[tuple[str, ...], tuple[str, ...]]]  # by instruction: `reads_writes`
    bit: dict[str, int]
    live_in: list[int]
    live_out: list[int]
    uses: list[int]
    defs: list[int]
    homes: int

    def names(self, bits: int) -> list[str]:
        """The registers in a bitset, in order of declaration."""
        found = []
        while bits:
            low = bits & -bits
            found.append(self.registers[low.bit_length() - 1])
            bits ^= low
        return found

    def bits(self, names: Iterable[str]) -> int:
        """The bitset of some registers."""
        result = 0
        for name in names:
            result |= 1 << self.bit[name]
        return result


def liveness(kernel: Kernel, blocks: list[Block]) -> Liveness:
    """The registers that are live at each block's start and end (backward data flow to a fixed point)."""
    registers = (*kernel.registers, CARRY)
    bit = {name: i for i, name in enumerate(registers)}
    touched = [((), ()) if find(ins.opcode) is None else reads_writes(ins) for ins in kernel.instrs]
    uses: list[int] = []
    defs: list[int] = []
    kept: list[int] = []  # by block: what it computes of operands that a recording reads after it
    homes = 0
    for block in blocks:
        used = defined = 0
        for reads, writes in touched[block.start : block.end]:
            for name in reads:
                used |= (1 << bit[name]) & ~defined
            for name in writes:
                defined |= 1 << bit[name]
        uses.append(used)
        defs.append(defined)
        named = 0
        for ins in kernel.instrs[block.start : block.end]:
            if ins.parts[0] in ATOMICS or "acquire" in ins.parts:
                for name in (name for operand in ins.operands for name in operand_registers(operand)):
                    named |= 1 << bit[name]
        kept.append(named & defined)
        if block.kind == "system":
            homes |= used | defined
    live_in = list(uses)
    live_out = [0] * len(blocks)
    predecessors: list[list[int]] = [[] for _ in blocks]
    for block in blocks:
        for successor in block.successors:
            predecessors[successor].append(block.index)
    pending = list(range(len(blocks)))
    queued = [True] * len(blocks)
    while pending:
        index = pending.pop()
        queued[index] = False
        out = kept[index]
        for successor in blocks[index].successors:
            out |= live_in[successor]
        live_out[index] = out
        entering = uses[index] | (out & ~defs[index])
        if entering != live_in[index]:
            live_in[index] = entering
            for predecessor in predecessors[index]:
                if not queued[predecessor]:
                    queued[predecessor] = True
                    pending.append(predecessor)
    for bits in (*live_in, *kept):
        homes |= bits
    return Liveness(registers, touched, bit, live_in, live_out, uses, defs, homes)
