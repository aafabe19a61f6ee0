"""Unordered accesses to one place, and their report."""

from __future__ import annotations

import re
from dataclasses import dataclass

from warpspec.sim.errors import SimError
from warpspec.sim.instruction import Instr
from warpspec.sim.names import placed
from warpspec.sim.order.clocks import (
    ASYNC_GLOBAL,
    ASYNC_SHARED,
    MAP,
    MAP_RELEASED,
    TENSOR,
    TENSOR_OWN,
    WRITES,
)

NOTHING_ORDERS = "accesses that nothing orders"
NO_FENCE_AFTER = "no tcgen05.fence::after_thread_sync"
NO_FENCE_BEFORE = "no tcgen05.fence::before_thread_sync"
# The ISA asks for these fences; kernels that work leave them out.
BY_TEXT_ALONE = (NO_FENCE_AFTER, NO_FENCE_BEFORE)
SOURCE = re.compile(r" from (\S+:\d+)(?: in \S+)?$")  # how an access's text ends if its source line is known


class Access:
    """Accesses of one instruction, by one agent, at one count of a component.

    agent: who in words ("warp 3"). generic: by the generic proxy; else the async proxy, or tensor memory's
    operations. strong: the scope of an atomic, volatile or ordered access (True: the GPU), else False. queued: its
    component's accesses take place in order.
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
        self.pipe: tuple | None = None  # the key of a tcgen05.mma: see `pipelined`
        self.key = 0  # its number among the checker's accesses, once it is kept in shadow memory

    def describe(self) -> str:
        proxy = "" if self.generic else " (asynchronous)"
        what = "writes" if self.write else "reads"
        source = f" from {placed(self.ins.source)}" if self.ins.source else ""
        return (
            f"CTA {self.cta} {self.agent} {what}{proxy}: PTX line {self.ins.line} `{self.ins.opcode}`{source}"
        )


def of_one_queue(first: Access, second: Access) -> bool:
    """Whether both belong to one component whose accesses take place in the order of issue."""
    return first.component == second.component and first.domain is second.domain and first.queued


def pipelined(first: Access, second: Access) -> bool:
    """Whether operations of one queue take effect as they were issued: MMAs if they have one accumulator and shape (PTX
    ISA, "Pipelined tcgen05 instructions"), `pipe` of their accesses. By that text a tcgen05.cp may overtake the MMA
    whose scales it replaces; NVIDIA's own examples do without a wait there."""
    return None in (first.pipe, second.pipe) or first.pipe == second.pipe


def morally_strong(first: Access, second: Access) -> bool:
    """Whether two unordered accesses do not race (PTX ISA, "Morally strong operations"): both are strong, and each
    one's scope includes the other."""
    if not (first.strong and second.strong):
        return False
    scopes = (first.strong, second.strong)
    if first.domain is not second.domain:
        return "cta" not in scopes and "cluster" not in scopes
    return first.cta == second.cta or "cta" not in scopes


def diagnose(first: Access, second: Access, missing: int, memory: str) -> tuple[str, str]:
    """(class of defect, remedy). missing: the row of the second access's clock that lacks the first access."""
    if of_one_queue(first, second):
        return (
            "a tcgen05.mma that may overtake another",
            f"{wait_for(first)}, and tcgen05.fence::after_thread_sync, before the second is issued",
        )
    if missing == WRITES:
        return (
            "an arrival at CTA scope that releases a write to another CTA",
            "mbarrier.arrive.release.cluster on the other CTA's mbarrier, or fence.acq_rel.cluster before it (an "
            "arrival that says no scope has .cta)",
        )
    if missing in (ASYNC_SHARED, ASYNC_GLOBAL):
        space = "shared::cta" if missing == ASYNC_SHARED else "global"
        what = "write" if first.write else "read"
        return (
            f"no proxy fence between a generic {what} and an asynchronous access",
            f"fence.proxy.async.{space} after the {what}, before the barrier that the asynchronous access waits for",
        )
    if missing in (MAP, MAP_RELEASED):
        return (
            "no proxy fence between a write of a tensor map and its use",
            "fence.proxy.tensormap::generic.release (or tensormap.cp_fenceproxy) after the write, a barrier, and "
            "fence.proxy.tensormap::generic.acquire of the map's 128 bytes before the instruction that uses it",
        )
    if missing == TENSOR:
        return (
            NO_FENCE_AFTER,
            "tcgen05.fence::after_thread_sync after the barrier, before the second access",
        )
    if missing == TENSOR_OWN:
        return (
            NO_FENCE_BEFORE,
            "tcgen05.fence::before_thread_sync after the first access (and its wait), before the barrier; then "
            "tcgen05.fence::after_thread_sync",
        )
    return NOTHING_ORDERS, wait_for(first) + ", then a barrier that the second waits for"


def is_tolerated(
    first: Access, second: Access, missing: int, *, freed: bool = False, fenced: bool = False
) -> bool:
    """Whether hardware is known to do without: NVIDIA's own examples read an accumulator after tcgen05.commit and its
    mbarrier without a fence, free tensor memory after loads whose registers they have used, not waited for, and issue
    MMAs that write what those before them, of other accumulators, read. CUTLASS's attention and flash-attn-4 have no
    tcgen05.fence around the barriers between warps that share tensor memory. Triton and DeepGEMM let TMA overwrite,
    after a barrier without a proxy fence, what threads have read, and where tcgen05.alloc has put its address. A
    store to the CTA's own shared memory is done when its proxy fence is (`fenced`): ptxas makes MEMBAR.ALL.CTA of it,
    so that the other CTA's tcgen05.mma, which reads it there, does not need the scope of the arrival after it. A
    st.async whose bytes its mbarrier has counted is in place, too: what is written there next comes after it."""
    name = first.ins.opcode
    return (
        of_one_queue(first, second)
        or missing in (TENSOR, TENSOR_OWN)
        or (missing in (ASYNC_SHARED, ASYNC_GLOBAL) and (not first.write or name.startswith("tcgen05.alloc")))
        or (freed and name.startswith("tcgen05.ld"))
        or (missing == WRITES and fenced and stores_to_own(first))
        or (missing == WRITES and name.startswith("st.async") and second.write)
    )


def stores_to_own(access: Access) -> bool:
    """Whether it is a thread's store to shared memory of its own CTA."""
    parts = access.ins.parts
    return parts[0] in ("st", "stmatrix") and ("shared" in parts or "shared::cta" in parts)


def copies_from_own(access: Access) -> bool:
    """Whether it reads shared memory for a bulk store or reduction, whose source is the CTA's own."""
    return not access.write and "bulk_group" in access.ins.parts


def wait_for(first: Access) -> str:
    """The wait that completes an access, for its own thread or another."""
    name = first.ins.opcode
    if name.startswith("tcgen05.ld"):
        return "tcgen05.wait::ld after the first"
    if name.startswith("tcgen05.st"):
        return "tcgen05.wait::st after the first"
    if name.startswith("tcgen05"):
        return "tcgen05.commit after the first and a wait on its mbarrier"
    if name.startswith("wgmma"):
        return "wgmma.wait_group after the first"
    if "mbarrier::complete_tx::bytes" in first.ins.parts:
        return "a wait on the mbarrier of the first"
    if name.startswith("cp.") and "bulk" in first.ins.parts:
        return f"cp.async.bulk.commit_group and wait_group{'' if first.write else '.read'} after the first"
    if name.startswith("cp.async"):
        return "cp.async.wait_group (or an mbarrier that cp.async.mbarrier.arrive names) after the first"
    return "a release after the first"


@dataclass(frozen=True)
class Finding:
    """Two accesses that the memory model does not order.

    kind: the class of defect, in a few words. place: where in memory. first, second: the accesses, as executed here.
    remedy: what would order them. lines: their PTX lines. tolerated: a warning only, because public kernels that work
    omit what the ISA requires.
    """

    kind: str
    place: str
    first: str
    second: str
    remedy: str
    lines: tuple[int, ...] = ()
    tolerated: bool = False

    @property
    def sources(self) -> tuple[str, ...]:
        """The lines of source of the accesses, "file:line"; "PTX line N" for one that has none."""
        texts = [text for text in (self.first, self.second) if text]
        numbers = [*self.lines[-len(texts) :], *[0] * (len(texts) - len(self.lines))]
        found = [SOURCE.search(text) for text in texts]
        return tuple(
            match[1] if match else f"PTX line {number}" for match, number in zip(found, numbers, strict=True)
        )

    def __str__(self) -> str:
        rows = (("first", self.first), ("second", self.second), ("needed", self.remedy))
        return "\n    ".join(
            [f"{self.kind}: {self.place}", *(f"{name:8}{text}" for name, text in rows if text)]
        )


@dataclass(frozen=True)
class Group:
    """Findings of one kind between the same two lines of source, worst groups first (`grouped`).

    kind, findings: what they have in common, and each of them. where: the lines of source of the first and the second
    access, PTX lines where the kernel has no line information.
    """

    kind: str
    where: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def textual(self) -> bool:
        """Whether only the ISA's text requires it: a fence around tensor memory that no known hardware needs."""
        return self.kind in BY_TEXT_ALONE

    def __str__(self) -> str:
        first = self.findings[0]
        if self.textual:
            return f"{self.kind}: {' to '.join(self.where)}{_times(self.findings)}"
        return f"{first}{_more(self.findings)}"


def grouped(findings: list[Finding]) -> list[Group]:
    """The findings by kind and pair of lines: unordered accesses first, those by the ISA's text alone last."""
    groups: dict[tuple, list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, *sorted(finding.sources)), []).append(finding)
    found = [Group(members[0].kind, members[0].sources, tuple(members)) for members in groups.values()]
    return sorted(found, key=lambda group: (group.textual, group.kind != NOTHING_ORDERS))


def grouped_text(findings: list[Finding]) -> list[str]:
    """Lines that show every group of findings; those by the ISA's text alone take one line per kind."""
    rows: list[str] = []
    textual: dict[str, list[Group]] = {}
    for group in grouped(findings):
        if group.textual:
            textual.setdefault(group.kind, []).append(group)
        else:
            rows.append(str(group))
    for kind, groups in textual.items():
        pairs = "; ".join(f"{' to '.join(g.where)}{_times(g.findings)}" for g in groups)
        rows.append(f"by the ISA's text alone, {kind}: {pairs}")
    return rows


def _times(findings: tuple[Finding, ...]) -> str:
    return f" ({len(findings)} places)" if len(findings) > 1 else ""


def _more(findings: tuple[Finding, ...]) -> str:
    """The other findings of its group that a finding represents."""
    if len(findings) == 1:
        return ""
    lines = ", ".join(dict.fromkeys(" and ".join(map(str, f.lines)) for f in findings[1:]))
    return f"\n    alike   {len(findings) - 1} more of these lines of source (PTX lines {lines})"


class OrderError(SimError):
    """Unordered accesses to one place. `findings` has all of them.

    launch: the report of the launch (a LaunchReport) if it ran to its end, else None.
    """

    def __init__(self, findings: list[Finding], kernel: str, launch: object = None):
        self.findings = findings
        self.kernel = kernel
        self.launch = launch
        count = f"{len(findings)} findings" if len(findings) > 1 else "1 finding"
        groups = len(grouped(findings))
        alike = f", {groups} pairs of lines" if 1 < groups < len(findings) else ""
        shown = "\n  ".join(grouped_text(findings))
        super().__init__(f"memory order of kernel {kernel}: {count}{alike}\n  {shown}")

    def __reduce__(self):
        return _restore, (self.findings, self.kernel, self.launch)


def _restore(findings, kernel, launch):
    return OrderError(findings, kernel, launch)
