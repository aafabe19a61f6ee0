"""Facts that hold on some path to an instruction, as bitsets."""

from __future__ import annotations

from collections.abc import Callable

from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr


def along_blocks(program: Program, start: int, after: Callable[[Instr, int], int]) -> None:
    """Carry a bitset along the blocks of a kernel until it grows nowhere. start: at the kernel's entry. after: makes of
    an instruction and the bits before it those behind it; it sees every instruction with all bits of some path."""
    entry = [0] * len(program.blocks)
    entry[0] = start
    reached = {0}
    waiting = [0]
    while waiting:
        block = program.blocks[waiting.pop()]
        bits = entry[block.index]
        for ins in program.kernel.instrs[block.start : block.end]:
            bits = after(ins, bits)
        for successor in block.successors:
            if successor not in reached or bits & ~entry[successor]:
                reached.add(successor)
                entry[successor] |= bits
                waiting.append(successor)
