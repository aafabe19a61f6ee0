"""Registers of wgmma.mma_async: wgmma.fence before it, wgmma.wait_group before its accumulators are read and any of
them is written again (PTX ISA 9.7.15.7.1, 9.7.15.7.3).

Static checks, along the blocks of a kernel. Between an instruction that writes a register and a wgmma.mma_async that
has it as A or as an accumulator, and between one that reads a register and a wgmma.mma_async that accumulates in it,
there must be a wgmma.fence on every path. A mov is not an access: it passes on what it copies. Products that accumulate
one after another need no fence between them. Between a wgmma.mma_async and another instruction that writes one of its
registers, or reads one of its accumulators or a copy of it, there must be a wgmma.wait_group that covers its group.
"""

from __future__ import annotations

from functools import cache

from warpspec.sim import cfg
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr, Vec
from warpspec.sim.order.findings import Finding
from warpspec.sim.order.flow import along_blocks
from warpspec.sim.registry import Family, find, row_of

KIND = "no wgmma.fence between an access of a register and wgmma.mma_async"
EARLY = "a register of wgmma.mma_async is written before wgmma.wait_group"
READ_EARLY = "an accumulator of wgmma.mma_async is read before wgmma.wait_group"
GROUPS = 8  # committed groups that are told apart by age


@cache
def check(program: Program) -> dict[tuple, Finding]:
    """Findings by kind and PTX lines. They do not depend on the run, so every run of such a kernel has them."""
    kernel = program.kernel
    if not any(ins.opcode.startswith("wgmma.mma_async") for ins in kernel.instrs):
        return {}
    every = (1 << len(program.live.bit)) - 1  # at the kernel's start, no fence precedes any register
    found: dict[tuple, Finding] = {}
    along_blocks(program, every, lambda ins, unfenced: _after(program, ins, unfenced, found))
    along_blocks(program, 0, lambda ins, under_way: _written(program, ins, under_way, found))
    along_blocks(program, 0, lambda ins, under_way: _read(program, ins, under_way, found))
    return found


def _written(program: Program, ins: Instr, under_way: int, found: dict) -> int:
    """The registers of products under way after an instruction, a plane of bits for each group (`_groups`)."""
    live = program.live
    if ins.opcode.startswith("wgmma."):
        return _groups(live, ins, under_way, ins.operands[:2])
    if under_way:
        early = _any_group(live, under_way) & live.bits(cfg.reads_writes(ins)[1])
        if early:
            _report(
                found, EARLY, live, early, ins,
                "wgmma.wait_group that covers the product before the register is written, on every path",
            )  # fmt: skip
    return under_way


def _read(program: Program, ins: Instr, under_way: int, found: dict) -> int:
    """The accumulators under way after an instruction, and copies of them, in planes as in `_written`."""
    live = program.live
    if ins.opcode.startswith("wgmma."):
        return _groups(live, ins, under_way, ins.operands[:1])
    if not under_way:
        return 0
    reads, writes = (live.bits(registers) for registers in cfg.reads_writes(ins))
    copies = 0
    early = _any_group(live, under_way) & reads
    if early and row_of(ins.opcode).family is Family.MOVE:
        width = len(live.bit)
        for group in range(GROUPS + 1):
            if under_way >> group * width & reads:
                copies |= writes << group * width
    elif early:
        _report(
            found, READ_EARLY, live, early, ins,
            "wgmma.wait_group that covers the product before the register is read, on every path",
        )  # fmt: skip
    if ins.guard is None and writes:
        under_way &= ~_in_all_groups(live, writes)
    return under_way | copies


def _groups(live, ins: Instr, under_way: int, operands) -> int:
    """The registers under way after an instruction of wgmma, those of its operands included: a plane of bits for each
    group, the lowest for products that are in no group yet, the others by age."""
    width = len(live.bit)
    if ins.opcode.startswith("wgmma.mma_async"):
        for operand in operands:
            under_way |= _bits(live, operand)
    elif ins.opcode.startswith("wgmma.commit_group"):
        oldest = under_way >> GROUPS * width
        return (under_way << width & (1 << (GROUPS + 1) * width) - 1) | oldest << GROUPS * width
    elif ins.opcode.startswith("wgmma.wait_group"):
        return under_way & (1 << (ins.operands[0].value + 1) * width) - 1
    return under_way


def _any_group(live, under_way: int) -> int:
    """The registers of any plane."""
    width = len(live.bit)
    found = 0
    while under_way:
        found |= under_way & (1 << width) - 1
        under_way >>= width
    return found


def _in_all_groups(live, registers: int) -> int:
    """Repeat registers in every plane."""
    return sum(registers << group * len(live.bit) for group in range(GROUPS + 1))


def _report(found: dict, kind: str, live, registers: int, ins: Instr, remedy: str) -> None:
    source = f" from {ins.source}" if ins.source else ""
    second = f"PTX line {ins.line} `{ins.opcode}`{source}"
    place = f"registers {', '.join(live.names(registers)[:4])}"
    found.setdefault((kind, (ins.line,)), Finding(kind, place, "", second, remedy, (ins.line,)))


def _after(program: Program, ins: Instr, unfenced: int, found: dict) -> int:
    """The registers written since the last wgmma.fence, after an instruction; in the bits above, the registers read."""
    row = find(ins.opcode)
    if row is None:
        return unfenced
    if ins.opcode.startswith("wgmma.fence"):
        return 0
    live = program.live
    above = len(live.bit)
    reads, writes = cfg.reads_writes(ins)
    if ins.opcode.startswith("wgmma.mma_async"):
        d, a = (_bits(live, operand) for operand in ins.operands[:2])
        bits = d | a | d << above
        if bits & unfenced:
            early = (bits & unfenced | (bits & unfenced) >> above) & (1 << above) - 1
            _report(
                found, KIND, live, early, ins,
                "wgmma.fence between the last access of these registers, on every path, and the instruction",
            )  # fmt: skip
        return unfenced & ~bits  # said once
    written = live.bits(writes)
    if row_of(ins.opcode).family is Family.MOVE and reads:
        if live.bits(reads) & unfenced:
            return unfenced | written
        return unfenced if ins.guard is not None else unfenced & ~written
    return unfenced | written | live.bits(reads) << above


def _bits(live, operand) -> int:
    """The registers of a matrix operand; a descriptor is none."""
    return live.bits(cfg.operand_registers(operand)) if isinstance(operand, Vec) else 0
