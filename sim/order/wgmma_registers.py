"""wgmma.fence: a warp's accesses to the registers of wgmma.mma_async are ordered before it (PTX ISA 9.7.15.7.1).

A static check, along the blocks of a kernel: between an instruction that writes a register and a wgmma.mma_async that
has it as A or as an accumulator, and between one that reads a register and a wgmma.mma_async that accumulates in it,
there must be a wgmma.fence on every path. A mov is no access: it hands on what it copies. Products that accumulate one
after the other need no fence between them.
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


@cache
def check(program: Program) -> dict[tuple, Finding]:
    """Findings by kind and PTX lines. It takes no run, so that every run of such a kernel has it."""
    kernel = program.kernel
    if not any(ins.opcode.startswith("wgmma.mma_async") for ins in kernel.instrs):
        return {}
    every = (1 << len(program.live.bit)) - 1  # at the kernel's start, no fence precedes any register
    found: dict[tuple, Finding] = {}
    along_blocks(program, every, lambda ins, unfenced: _after(program, ins, unfenced, found))
    return found


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
