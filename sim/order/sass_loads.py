"""Loads of shared memory that ptxas leaves in flight at an mbarrier arrival (why: `pending_loads`).

PTX shows where a load is used, but ptxas may move the use past the arrival. In SASS a load names the scoreboard that
its data release, and the first later instruction that waits for that scoreboard has the data. If an arrival
(SYNCS.ARRIVE) comes before it, the load is in flight there. A run asks for this by the environment variable
WARPSPEC_SIM_SASS=1; it needs ptxas and nvdisasm (``pip install warpspec[clocks]``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from warpspec.sim.clocks.sass import NO_SCOREBOARD, SassInstr, sass_of
from warpspec.sim.codegen.program import Program

SASS_VARIABLE = "WARPSPEC_SIM_SASS"
LOADS = ("LDS", "LDSM")
ARRIVAL = "SYNCS.ARRIVE"
ENDS = ("EXIT", "BRA", "RET", "KILL")  # instructions that end the path unless predicated


def asked_for() -> bool:
    """Whether current runs check the SASS."""
    return bool(os.environ.get(SASS_VARIABLE))


def at_arrivals(program: Program) -> set[tuple[int, int]]:
    """(PTX line of a load, PTX line of an arrival at which it may be in flight). NoSass if a tool is missing."""
    sass = sass_of(program.module.text, program.kernel.name, program.module.target)
    return under_way(sass.instrs)


def under_way(instrs: Sequence[SassInstr]) -> set[tuple[int, int]]:
    """``at_arrivals`` for a kernel's SASS."""
    labels = {ins.label: at for at, ins in enumerate(instrs) if ins.label is not None}
    found: set[tuple[int, int]] = set()
    reached: dict[int, frozenset] = {}
    waiting = [(0, frozenset())]
    while waiting:
        at, loads = waiting.pop()
        while at < len(instrs):
            ins = instrs[at]
            if ins.label is not None or at == 0:
                before = reached.get(at)
                if before is not None and loads <= before:
                    break
                loads = reached[at] = loads | (before or frozenset())
            loads = frozenset(load for load in loads if not ins.waits >> load[0] & 1)
            name = ins.name.split(".")[0]
            if ins.name.startswith(ARRIVAL):
                found |= {(line, ins.line) for _, line in loads}
            elif name in LOADS and ins.writes != NO_SCOREBOARD:
                loads |= {(ins.writes, ins.line)}
            if ins.target in labels:
                waiting.append((labels[ins.target], loads))
            if name in ENDS and not ins.guarded:
                break
            at += 1
    return found
