"""Facts that hold on some path to an instruction, as bitsets."""

from __future__ import annotations

from collections.abc import Callable

from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr


def along_blocks(program: Program, start: int, after: Callable[[Instr, int], int]) -> None:
    """Propagate a bitset along the blocks of a kernel to a fixed point. start: bits at the kernel's entry. after:
    function from an instruction and the bits before it to the bits after it; it is called for every instruction with
    all bits of some path."""
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
