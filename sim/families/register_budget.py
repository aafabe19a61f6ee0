"""setmaxnreg: warps hand registers to each other through the CTA's pool (PTX ISA 9.7.20.5).

The pool holds what warps have given up, of the registers that the CTA was launched with. An increase waits until the
pool has enough, on hardware for ever where nobody gives them up.

ptxas compiles setmaxnreg only if it knows how many registers a thread has at entry; otherwise it says "'setmaxnreg'
ignored; unable to determine register count at entry" (13.0, measured for 128 to 1024 threads).
"""

from __future__ import annotations

import math

from warpspec.sim.instruction import Instr, Kernel
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.machine import Machine
from warpspec.sim.operation import Wait
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.warp import Warp

STEP = 8  # registers a thread is given at once
# Threads of a CTA up to which their number alone does not tell ptxas the register count at entry.
MOST_FREE = 512


def is_compiled(kernel: Kernel) -> bool:
    """Whether ptxas compiles a kernel's setmaxnreg. True where no directive names the number of threads."""
    threads = kernel.reqntid or kernel.maxntid
    return kernel.bounds_registers or threads is None or math.prod(threads) > MOST_FREE


@handler("setmaxnreg", family=Family.MISCELLANEOUS, destinations=0, collective=Collective.WARP)
def setmaxnreg(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """setmaxnreg.inc and .dec; without effect where the launch does not say how many registers a thread has, or ptxas
    ignores it."""
    if m.launch.registers is None or not is_compiled(m.program.kernel):
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
