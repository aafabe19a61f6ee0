"""setmaxnreg: warps hand registers to each other through the CTA's pool (PTX ISA 9.7.20.5).

The pool holds what warps have given up, of the registers that the CTA was launched with. An increase waits until the
pool has enough, on hardware for ever where nobody gives them up.
"""

from __future__ import annotations

from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.machine import Machine
from warpspec.sim.operation import Wait
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.warp import Warp

STEP = 8  # registers a thread is given at once


@handler("setmaxnreg", family=Family.MISCELLANEOUS, destinations=0, collective=Collective.WARP)
def setmaxnreg(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """setmaxnreg.inc and .dec; without effect where the launch does not say how many registers a thread has."""
    if m.launch.registers is None:
        return None
    start = -(-m.launch.registers // STEP) * STEP
    held, wanted = w.state.get("registers", start), w.scalar(ins.operands[0], mask)
    pool = w.cta.spare_registers
    more = (wanted - held) * WARP_SIZE
    if (more > 0) != ins.has("inc") and more:
        return None  # an increase to less, a decrease to more: nothing changes
    if more > pool[0]:
        text = (
            f"setmaxnreg.inc to {wanted} registers a thread: it needs {more} more and {pool[0]} are to be had; "
            f"the CTA was launched with {start} a thread"
        )
        return Wait(on=("registers", w.cta.number), text=text)
    pool[0] -= more
    w.state["registers"] = wanted
    if more < 0:
        m.notify(("registers", w.cta.number))
    return None
