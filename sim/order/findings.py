"""Two accesses to one place that nothing orders, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.sim.errors import SimError
from warpspec.sim.instruction import Instr
from warpspec.sim.names import placed
from warpspec.sim.order.clocks import ASYNC_GLOBAL, ASYNC_SHARED, MAP, MAP_RELEASED, TENSOR, TENSOR_OWN

MOST_SHOWN = 12  # findings in an error's text; the others are counted


class Access:
    """Accesses of one instruction, by one agent, at one count of a component.

    agent: who in words ("warp 3"). generic: by the generic proxy; else the async proxy, or tensor memory's
    operations. strong: the scope of an atomic, volatile or ordered access (True: the GPU), else False. queued:
    those of its component take place in order.
    """

    __slots__ = (
        "agent", "component", "count", "cta", "domain", "generic", "ins", "key", "pipe", "queued", "strong", "write",
    )  # fmt: skip

    def __init__(
        self, domain, component, count, *, ins, agent, cta, write, generic, strong=False, queued=False
    ):
        self.domain, self.component, self.count = domain, component, count
        self.ins: Instr = ins
        self.agent, self.cta = agent, cta
        self.write, self.generic, self.strong = write, generic, strong
        self.queued = queued
        self.pipe: tuple | None = None  # of tcgen05.mma: see `pipelined`
        self.key = 0  # its number among the checker's accesses, once it is kept in shadow memory

    def describe(self) -> str:
        proxy = "" if self.generic else " (asynchronous)"
        what = "writes" if self.write else "reads"
        source = f" from {placed(self.ins.source)}" if self.ins.source else ""
        return (
            f"CTA {self.cta} {self.agent} {what}{proxy}: PTX line {self.ins.line} `{self.ins.opcode}`{source}"
        )


def of_one_queue(first: Access, second: Access) -> bool:
    """Whether both are of one component, the earlier one's accesses in the order of issue."""
    return first.component == second.component and first.domain is second.domain and first.queued


def pipelined(first: Access, second: Access) -> bool:
    """Whether operations of one queue take effect as they were issued: MMAs if they have one accumulator and shape (PTX
    ISA, "Pipelined tcgen05 instructions"), `pipe` of their accesses. By that text a tcgen05.cp may overtake the MMA
    whose scales it replaces; NVIDIA's own examples do without a wait there."""
    return None in (first.pipe, second.pipe) or first.pipe == second.pipe


def morally_strong(first: Access, second: Access) -> bool:
    """Whether two accesses do not race though nothing orders them (PTX ISA, "Morally strong operations"): both are
    strong, and each one's scope includes the other."""
    if not (first.strong and second.strong):
        return False
    scopes = (first.strong, second.strong)
    if first.domain is not second.domain:
        return "cta" not in scopes and "cluster" not in scopes
    return first.cta == second.cta or "cta" not in scopes


def diagnose(first: Access, second: Access, missing: int, memory: str) -> tuple[str, str]:
    """(class of defect, what would order them). missing: the row of the second's clock that lacks the first."""
    if of_one_queue(first, second):
        return (
            "a tcgen05.mma that may overtake another",
            f"{wait_for(first)}, and tcgen05.fence::after_thread_sync, before the second is issued",
        )
    if missing in (ASYNC_SHARED, ASYNC_GLOBAL):
        space = "shared::cta" if missing == ASYNC_SHARED else "global"
        return (
            "no proxy fence between a generic write and an asynchronous access",
            f"fence.proxy.async.{space} behind the write, before the barrier that the asynchronous access waits for",
        )
    if missing in (MAP, MAP_RELEASED):
        return (
            "no proxy fence between a write of a tensor map and its use",
            "fence.proxy.tensormap::generic.release (or tensormap.cp_fenceproxy) behind the write, a barrier, and "
            "fence.proxy.tensormap::generic.acquire of the map's 128 bytes before the instruction that uses it",
        )
    if missing == TENSOR:
        return (
            "no tcgen05.fence::after_thread_sync",
            "tcgen05.fence::after_thread_sync behind the barrier, before the second access",
        )
    if missing == TENSOR_OWN:
        return (
            "no tcgen05.fence::before_thread_sync",
            "tcgen05.fence::before_thread_sync behind the first access (and its wait), before the barrier; then "
            "tcgen05.fence::after_thread_sync",
        )
    return "accesses that nothing orders", wait_for(first) + ", then a barrier that the second waits for"


def is_tolerated(first: Access, second: Access, missing: int, freed: bool = False) -> bool:
    """Whether hardware is known to do without: NVIDIA's own examples read an accumulator behind tcgen05.commit and its
    mbarrier without a fence, free tensor memory behind loads whose registers they have used, not waited for, and issue
    MMAs that write what those before them, of other accumulators, read."""
    name = first.ins.opcode
    return (
        of_one_queue(first, second)
        or (missing == TENSOR and name.startswith(("tcgen05.mma", "tcgen05.cp")))
        or (freed and name.startswith("tcgen05.ld"))
    )


def wait_for(first: Access) -> str:
    """What completes an access, for its own thread or another."""
    name = first.ins.opcode
    if name.startswith("tcgen05.ld"):
        return "tcgen05.wait::ld behind the first"
    if name.startswith("tcgen05.st"):
        return "tcgen05.wait::st behind the first"
    if name.startswith("tcgen05"):
        return "tcgen05.commit behind the first and a wait on its mbarrier"
    if name.startswith("wgmma"):
        return "wgmma.wait_group behind the first"
    if "mbarrier::complete_tx::bytes" in first.ins.parts:
        return "a wait on the mbarrier of the first"
    if name.startswith("cp.") and "bulk" in first.ins.parts:
        return f"cp.async.bulk.commit_group and wait_group{'' if first.write else '.read'} behind the first"
    if name.startswith("cp.async"):
        return "cp.async.wait_group (or an mbarrier that cp.async.mbarrier.arrive names) behind the first"
    return "a release behind the first"


@dataclass(frozen=True)
class Finding:
    """Something that the memory model does not order.

    kind: the class of defect, in a few words. place: where in memory. first, second: the accesses, as executed here.
    remedy: what would order them. lines: their PTX lines. tolerated: the ISA asks for it, and public kernels that work
    leave it out: a warning.
    """

    kind: str
    place: str
    first: str
    second: str
    remedy: str
    lines: tuple[int, ...] = ()
    tolerated: bool = False

    def __str__(self) -> str:
        rows = (("first", self.first), ("second", self.second), ("needed", self.remedy))
        return "\n    ".join(
            [f"{self.kind}: {self.place}", *(f"{name:8}{text}" for name, text in rows if text)]
        )


class OrderError(SimError):
    """Accesses to one place that nothing orders. `findings` has all of them."""

    def __init__(self, findings: list[Finding], kernel: str):
        self.findings = findings
        shown = [str(finding) for finding in findings[:MOST_SHOWN]]
        if len(findings) > MOST_SHOWN:
            shown.append(f"and {len(findings) - MOST_SHOWN} findings more")
        super().__init__(f"memory order of kernel {kernel}:\n  " + "\n  ".join(shown))

    def __reduce__(self):
        return _restore, (self.findings, self.args, self.message)


def _restore(findings, args, message):
    error = OrderError.__new__(OrderError)
    SimError.__init__(error, message)
    error.findings = findings
    return error
