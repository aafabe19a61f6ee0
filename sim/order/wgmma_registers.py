"""Registers of wgmma.mma_async: wgmma.fence before it, wgmma.wait_group before they are written again (PTX ISA
9.7.15.7.1, 9.7.15.7.3).

Static checks, along the blocks of a kernel. Between an instruction that writes a register and a wgmma.mma_async that
has it as A or as an accumulator, and between one that reads a register and a wgmma.mma_async that accumulates in it,
there must be a wgmma.fence on every path. A mov is no access: it hands on what it copies. Products that accumulate one
after the other need no fence between them. Between a wgmma.mma_async and another instruction that writes one of its
registers, there must be a wgmma.wait_group that covers its group. (Reads of accumulators are checked as they happen.)
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
GROUPS = 8  # committed groups that are told apart by age


@cache
def check(program: Program) -> dict[tuple, Finding]:
    """Findings by kind and PTX lines. It takes no run, so that every run of such a kernel has it."""
    kernel = program.kernel
    if not any(ins.opcode.startswith("wgmma.mma_async") for ins in kernel.instrs):
        return {}
    every = (1 << len(program.live.bit)) - 1  # at the kernel's start, no fence precedes any register
    found: dict[tuple, Finding] = {}
    along_blocks(program, every, lambda ins, unfenced: _after(program, ins, unfenced, found))
    along_blocks(program, 0, lambda ins, under_way: _behind(program, ins, under_way, found))
    return found


def _behind(program: Program, ins: Instr, under_way: int, found: dict) -> int:
    """Behind an instruction: registers of products under way. A plane of bits a group: the lowest of products that no
    group has yet, then by age."""
    live = program.live
    width = len(live.bit)
    plane = (1 << width) - 1
    if ins.opcode.startswith("wgmma.mma_async"):
        return under_way | _bits(live, ins.operands[0]) | _bits(live, ins.operands[1])
    if ins.opcode.startswith("wgmma.commit_group"):
        oldest = under_way >> GROUPS * width
        return (under_way << width & (1 << (GROUPS + 1) * width) - 1) | oldest << GROUPS * width
    if ins.opcode.startswith("wgmma.wait_group"):
        return under_way & (1 << (ins.operands[0].value + 1) * width) - 1
    if not under_way or ins.opcode.startswith("wgmma."):
        return under_way
    written = live.bits(cfg.reads_writes(ins)[1])
    if written:
        early = 0
        for group in range(GROUPS + 1):
            early |= under_way >> group * width & plane
        if early & written:
            source = f" from {ins.source}" if ins.source else ""
            found.setdefault(
                (EARLY, (ins.line,)),
                Finding(
                    EARLY, f"registers {', '.join(live.names(early & written)[:4])}", "",
                    f"PTX line {ins.line} `{ins.opcode}`{source}",
                    "wgmma.wait_group that covers the product before the register is written, on every path",
                    (ins.line,),
                ),
            )  # fmt: skip
    return under_way


def _after(program: Program, ins: Instr, unfenced: int, found: dict) -> int:
    """Behind an instruction: the registers written since the last wgmma.fence, in the bits above theirs those read."""
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
            names = ", ".join(
                live.names((bits & unfenced | (bits & unfenced) >> above) & (1 << above) - 1)[:4]
            )
            source = f" from {ins.source}" if ins.source else ""
            found.setdefault(
                (KIND, (ins.line,)),
                Finding(
                    KIND, f"registers {names}", "", f"PTX line {ins.line} `{ins.opcode}`{source}",
                    "wgmma.fence between the last access of these registers, on every path, and the instruction",
                    (ins.line,),
                ),
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
