"""Loads of shared memory whose data may still be in flight when their thread arrives at an mbarrier.

An arrival does not wait for loads: the hardware issues in order, a load's data come later, and only an instruction that
uses them waits. TMA that waits for the arrival may overwrite data that the load has yet to read. (On an H200 that gave
wrong results: docs/notebook/checker.md.) By the ISA's text it is a generic read before an asynchronous write without a
proxy fence, which is a warning elsewhere, as many kernels have used their loads by then.

A static part, along the blocks of a kernel: which loads have no use of their registers on some path to an arrival. A
mov is not a use, because it passes on pending data. Fences and thread barriers complete a load. On request, a run
checks the kernel's SASS instead (sass_loads.py).
"""

from __future__ import annotations

from functools import cache

from warpspec.sim import cfg
from warpspec.sim.codegen.memory import space_of
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr
from warpspec.sim.order import sass_loads
from warpspec.sim.order.flow import along_blocks
from warpspec.sim.registry import Family, find

KIND = "a buffer is handed back to an asynchronous write while a load of it may be under way"
ENDS = ("fence", "membar", "bar.sync", "bar.red", "barrier.", "bar.cta")


def at_arrivals(program: Program) -> dict[int, tuple[int, ...]]:
    """Map the index of each mbarrier.arrive to the indexes of loads that may be in flight there."""
    return _at_arrivals(program, sass_loads.asked_for())


@cache
def _at_arrivals(program: Program, in_sass: bool) -> dict[int, tuple[int, ...]]:
    instrs = program.kernel.instrs
    arrivals = any(ins.opcode.startswith("mbarrier.arrive") for ins in instrs)
    loads = [ins for ins in instrs if _loads_shared(ins)] if arrivals else []
    if not loads:
        return {}
    if in_sass:
        return _in_sass(program, loads)
    holders = _holders(program, loads)
    bit = {ins.index: 1 << number for number, ins in enumerate(loads)}
    found: dict[int, int] = {}
    along_blocks(program, 0, lambda ins, under_way: _after(program, ins, under_way, bit, holders, found))
    return {
        arrival: tuple(ins.index for ins in loads if under_way & bit[ins.index])
        for arrival, under_way in found.items()
    }


def _in_sass(program: Program, loads: list[Instr]) -> dict[int, tuple[int, ...]]:
    """`at_arrivals` computed from the kernel's SASS."""
    pairs = sass_loads.at_arrivals(program)
    arrivals = [ins for ins in program.kernel.instrs if ins.opcode.startswith("mbarrier.arrive")]
    found = {
        arrival.index: tuple(load.index for load in loads if (load.line, arrival.line) in pairs)
        for arrival in arrivals
    }
    return {index: those for index, those in found.items() if those}


def _loads_shared(ins: Instr) -> bool:
    if ins.opcode.startswith("ldmatrix"):
        return True
    return ins.parts[0] == "ld" and space_of(ins) in ("shared", "cluster", "generic")


def _holders(program: Program, loads: list[Instr]) -> dict[str, int]:
    """Map each register to the loads (bits in their order) whose data it may hold, moves included."""
    holders: dict[str, int] = {}
    for number, ins in enumerate(loads):
        for register in cfg.reads_writes(ins)[1]:
            holders[register] = holders.get(register, 0) | 1 << number
    moves = [ins for ins in program.kernel.instrs if _moves(ins)]
    grew = True
    while grew:
        grew = False
        for ins in moves:
            reads, writes = cfg.reads_writes(ins)
            held = 0
            for register in reads:
                held |= holders.get(register, 0)
            for register in writes if held else ():
                before = holders.get(register, 0)
                if held & ~before:
                    holders[register] = before | held
                    grew = True
    return holders


def _moves(ins: Instr) -> bool:
    row = find(ins.opcode)
    return row is not None and row.family is Family.MOVE and ins.guard is None


def _after(program: Program, ins: Instr, under_way: int, bit: dict, holders: dict, found: dict) -> int:
    """The loads under way after an instruction, as bits."""
    if under_way:
        if ins.opcode.startswith(ENDS):
            return 0
        if ins.opcode.startswith("mbarrier.arrive"):
            found[ins.index] = found.get(ins.index, 0) | under_way
        elif find(ins.opcode) is not None and not _moves(ins):
            for register in cfg.reads_writes(ins)[0]:
                under_way &= ~holders.get(register, 0)
    return under_way | bit.get(ins.index, 0)
