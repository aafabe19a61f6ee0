"""tcgen05.wait::ld must precede reads of tcgen05.ld's registers (PTX ISA 9.7.17.8, "tcgen05.wait").

A static check, along the blocks of a kernel: between a tcgen05.ld and an instruction that reads a register that it
writes, there must be a tcgen05.wait::ld on every path. A mov is not a read, because it passes on a pending result:
compilers put moves there, and ptxas follows a result through them. Findings are tolerated, and only a kernel's first
one is shown: NVIDIA's own examples convert an accumulator's registers without a wait, and "intra-thread ordering
through true register dependency will be respected" (PTX ISA, "Register dependencies, same thread"). The wait is needed
if the register or the tensor memory is written again; for tensor memory the checker detects that itself.
"""

from __future__ import annotations

from functools import cache

from warpspec.sim import cfg
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr
from warpspec.sim.order.findings import Finding
from warpspec.sim.order.flow import along_blocks
from warpspec.sim.registry import Family, find

KIND = "no tcgen05.wait::ld between tcgen05.ld and a use of its registers"


@cache
def check(program: Program) -> dict[tuple, Finding]:
    """Findings by kind and PTX lines."""
    if not any(ins.opcode.startswith("tcgen05.ld") for ins in program.kernel.instrs):
        return {}
    found: dict[tuple, Finding] = {}
    along_blocks(program, 0, lambda ins, under_way: _after(program, ins, under_way, found))
    return found


def _after(program: Program, ins: Instr, under_way: int, found: dict) -> int:
    """The registers that loads under way are still to fill after an instruction."""
    row = find(ins.opcode)
    if row is None or ins.opcode.startswith("tcgen05.wait::ld"):
        return 0 if row is not None else under_way
    live = program.live
    reads, writes = (live.bits(registers) for registers in cfg.reads_writes(ins))
    if ins.opcode.startswith("tcgen05.ld"):
        return under_way | writes
    early = reads & under_way
    if row.family is Family.MOVE and early:
        return under_way | writes
    if early:
        source = f" from {ins.source}" if ins.source else ""
        if not found:
            found[KIND, (ins.line,)] = Finding(
                KIND, f"registers {', '.join(live.names(early)[:4])}", "",
                f"PTX line {ins.line} `{ins.opcode}`{source}",
                "tcgen05.wait::ld between the load and the first use, on every path", (ins.line,), tolerated=True,
            )  # fmt: skip
        under_way &= ~early
    return under_way if ins.guard is not None else under_way & ~writes
