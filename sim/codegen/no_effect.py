"""Instructions that change no value in the simulator: hints, fences, timing."""

from __future__ import annotations

from warpspec.sim.codegen.emitter import Emitter
from warpspec.sim.instruction import Instr
from warpspec.sim.registry import Family, translator


@translator("nanosleep", "pmevent", family=Family.MISCELLANEOUS, destinations=0)
def timing(e: Emitter, ins: Instr) -> None:
    """Time is not simulated."""


@translator("prefetch", "prefetchu", "discard", "applypriority", family=Family.MEMORY, destinations=0)
def cache_hint(e: Emitter, ins: Instr) -> None:
    """There is no cache."""


def note_fence(order, w, ins: Instr, mask: int) -> None:
    """Tell the order checker of a fence."""
    order.fence(w, ins, mask)


@translator("fence", "membar", family=Family.FENCE, destinations=0, orders=True, order=note_fence)
def fence(e: Emitter, ins: Instr) -> None:
    """Memory is sequentially consistent here: only the order checker notices a missing fence."""


@translator("griddepcontrol", family=Family.BARRIER, destinations=0)
def griddepcontrol(e: Emitter, ins: Instr) -> None:
    """Launches run one after the other, so a dependent grid never waits."""
