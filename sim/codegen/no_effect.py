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


@translator(
    "fence", "membar", family=Family.FENCE, destinations=0, no_effect=True, orders=True, order=note_fence
)
def fence(e: Emitter, ins: Instr) -> None:
    """Memory is sequentially consistent here: only the order checker notices a missing fence."""


def note_tensor_fence(order, w, ins: Instr, mask: int) -> None:
    """Tell the order checker of a tcgen05.fence."""
    order.tensor_fence(w, ins, ins.parts[1].endswith("before_thread_sync"))


@translator(
    "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync",
    family=Family.TCGEN05, destinations=0, no_effect=True, orders=True, order=note_tensor_fence,
)  # fmt: skip
def tensor_fence(e: Emitter, ins: Instr) -> None:
    """tcgen05.fence orders tensor-memory accesses with thread synchronisation: only the order checker notices."""


def note_grid_dependency(order, w, ins: Instr, mask: int) -> None:
    """Tell the order checker of griddepcontrol."""
    order.grid_dependency(w, ins, mask)


@translator("griddepcontrol", family=Family.BARRIER, destinations=0, orders=True, order=note_grid_dependency)
def griddepcontrol(e: Emitter, ins: Instr) -> None:
    """Launches run one after the other, so a dependent grid never waits: only the order checker notices."""
