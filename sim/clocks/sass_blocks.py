"""Blocks of SASS as a replay runs them: code in chunks, and the places of steps between.

Code is timed by in-order issue: a warp issues its next instruction when the previous one's stall is over and its
scoreboards and pipe are free. The replay handles waits for global memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.costs import PIPES, Pipe
from warpspec.sim.clocks.sass import NO_SCOREBOARD, SCOREBOARDS, SassInstr
from warpspec.sim.clocks.sass_costs import base_name, sass_cost
from warpspec.sim.instruction import Instr

CHUNK = 32.0  # clocks of code after which a chunk ends, so that a replay sees which pipe each part wants
CODE_LINE = 128  # bytes that caches hold or not
OPERANDS_READ = 10.0  # clocks until a store or shared access has read its operands
OFFSET = re.compile(r"\+0x([0-9a-f]+)\]")
ENDS = ("BRA", "EXIT", "BRX", "BRXU", "JMP", "RET", "CALL", "KILL", "BREAK")

# Trace steps with a kind of SASS instruction of their own: by the instruction's name, and by the PTX.
SASS_KINDS = {
    "HGMMA": "wgmma", "QGMMA": "wgmma", "IGMMA": "wgmma", "BGMMA": "wgmma",
    "WARPGROUP.ARRIVE": "wgmma fence", "WARPGROUP.DEPBAR": "wgmma wait",
    "SYNCS.PHASECHK": "wait", "SYNCS.ARRIVE": "arrive", "SYNCS": "barrier setup",
    "BAR.SYNC": "bar", "BAR.RED": "bar", "BAR.ARV": "bar arrive",
    "UCGABAR_ARV": "cluster arrive", "UCGABAR_WAIT": "cluster wait",
    "UTMALDG": "tma", "UTMASTG": "tma", "UTMAREDG": "tma", "UBLKCP": "bulk", "UBLKRED": "bulk",
    "UTMACMDFLUSH": "bulk commit", "DEPBAR.LE": "group wait",
    "LDGSTS": "copy", "LDGDEPBAR": "copy commit", "ARRIVES": "copy arrive",
    "UTCBAR": "commit", "UTCCP": "tensor copy", "LDTM": "tensor load", "STTM": "tensor store",
    "USETMAXREG": "setmaxnreg", "HMMA": "mma", "IMMA": "mma", "QMMA": "mma", "OMMA": "mma", "DMMA": "mma",
}  # fmt: skip


def sass_kind(ins: SassInstr) -> str | None:
    """The kind of step of an instruction; None: it is code."""
    name = base_name(ins)
    if name.startswith("UTC") and name.endswith("MMA"):
        return "tensor mma"
    parts = ins.name.split(".")
    return SASS_KINDS.get(".".join(parts[:2])) or SASS_KINDS.get(name)


def ptx_kind(ins: Instr) -> str | None:
    """The kind of SASS instruction that a step's PTX becomes; None: no kind of its own, or not known."""
    parts = ins.parts
    family = parts[0]
    if family == "wgmma":
        return {"fence": "wgmma fence", "wait_group": "wgmma wait", "mma_async": "wgmma"}.get(parts[1])
    if family == "mbarrier":
        if parts[1] in ("try_wait", "test_wait"):
            return "wait"
        return "arrive" if parts[1] in ("arrive", "arrive_drop", "expect_tx") else "barrier setup"
    if family in ("bar", "barrier") and "warp" not in parts:
        if "cluster" in parts:
            return "cluster arrive" if "arrive" in parts else "cluster wait"
        return "bar arrive" if "arrive" in parts else "bar"
    if family == "cp" or parts[:2] == ("cp", "reduce"):
        return _copy_kind(parts)
    if family == "tcgen05":
        kinds = {
            "mma": "tensor mma",
            "commit": "commit",
            "cp": "tensor copy",
            "ld": "tensor load",
            "st": "tensor store",
        }
        return kinds.get(parts[1])
    return {"setmaxnreg": "setmaxnreg", "mma": "mma"}.get(family)


def _copy_kind(parts: tuple[str, ...]) -> str | None:
    if "commit_group" in parts:
        return "bulk commit" if "bulk" in parts else "copy commit"
    if "wait_group" in parts or "wait_all" in parts:
        return "group wait"
    if "bulk" in parts:
        if "prefetch" in parts:
            return None
        return "tma" if "tensor" in parts else "bulk"
    return "copy arrive" if "mbarrier" in parts else "copy"


@dataclass(slots=True)
class Chunk:
    """Consecutive code.

    alone: clocks in a warp that has the SM to itself. demand: clocks of each pipe. waits: scoreboards of loads that it
    waits for. loads: (bytes per lane, scoreboard, PTX line, whether it is `near`) each; stores, additions: (bytes per
    lane, PTX line) each. count: instructions. first, last: addresses of its code, in lines of CODE_LINE bytes.
    """

    alone: float
    demand: tuple[float, ...]
    waits: int
    loads: tuple[tuple[int, int, int, bool], ...]
    stores: tuple[tuple[int, int], ...]
    additions: tuple[tuple[int, int], ...]
    count: int
    first: int = 0
    last: int = 0


@dataclass(slots=True)
class Place:
    """The place of a step of some kind. line: line of its PTX."""

    kind: str
    line: int


@dataclass
class SassBlock:
    """Instructions first to last (inclusive) of a kernel. cold: a wait's retries, or what diverged warps run."""

    index: int
    instrs: tuple[SassInstr, ...]
    cold: bool
    items: list[Chunk | Place] = field(default_factory=list)


def cut(instrs: tuple[SassInstr, ...]) -> list[SassBlock]:
    """Blocks of a kernel, in order of address."""
    targets = {ins.target for ins in instrs if ins.target and base_name(ins) in ("BRA", "BRX", "JMP")}
    groups: list[list[SassInstr]] = [[]]
    for ins in instrs:
        if groups[-1] and (ins.label in targets or base_name(groups[-1][-1]) in ENDS):
            groups.append([])
        groups[-1].append(ins)
    blocks, waited = [], set()
    for index, group in enumerate(groups):
        waits = {ins.line for ins in group if sass_kind(ins) == "wait"}
        cold = any(base_name(ins) in ("WARPSYNC", "CALL") for ins in group) or (
            bool(waits) and waits <= waited
        )
        waited |= waits
        blocks.append(SassBlock(index, tuple(group), cold))
    return blocks


def near(ins: SassInstr) -> bool:
    """Whether a load is of an address a little after that in its register: of a line that was loaded before it."""
    found = OFFSET.search(ins.text)
    return found is not None and 0 < int(found[1], 16) < CODE_LINE


class _Issue:
    """In-order issue of one block's code by a warp alone on its SM."""

    def __init__(self, chip: Chip):
        self.chip = chip
        self.items: list[Chunk | Place] = []
        self.now = self.began = 0.0
        self.ready: list[float | None] = [None] * SCOREBOARDS  # None: not filled in this block, or by a load
        self.free = [0.0] * PIPES
        self._clear(0)

    def _clear(self, waits: int) -> None:
        self.demand, self.waits, self.count = [0.0] * PIPES, waits, 0
        self.first = self.last = 0
        self.loads: list[tuple[int, int, int, bool]] = []
        self.stores: list[tuple[int, int]] = []
        self.additions: list[tuple[int, int]] = []
        self.began = self.now

    def close(self, waits: int = 0) -> None:
        if self.count or self.waits:
            alone = self.now - self.began
            moved = (tuple(self.loads), tuple(self.stores), tuple(self.additions))
            self.items.append(
                Chunk(alone, tuple(self.demand), self.waits, *moved, self.count, self.first, self.last)
            )
        self._clear(waits)

    def place(self, ins: SassInstr, kind: str) -> None:
        self.close()
        self.items.append(Place(kind, ins.line))
        for board in (ins.writes, ins.reads):
            if board != NO_SCOREBOARD:
                self.ready[board] = self.now

    def code(self, ins: SassInstr) -> None:
        cost = sass_cost(ins, self.chip)
        pending = 0
        for board in range(SCOREBOARDS):
            if ins.waits >> board & 1:
                if self.ready[board] is None:
                    pending |= 1 << board
                else:
                    self.now = max(self.now, self.ready[board])
        if pending:
            self.close(pending)
        if cost.pipe is not Pipe.ISSUE:
            self.now = max(self.now, self.free[cost.pipe])
            busy = 2 * cost.shared + 2 if cost.pipe is Pipe.SHARED else cost.busy
            self.free[cost.pipe] = self.now + busy
            self.demand[cost.pipe] += cost.shared if cost.pipe is Pipe.SHARED else cost.busy
        self.demand[Pipe.ISSUE] += 1
        self.demand[Pipe.BESIDE] += cost.beside(self.chip)
        self.last = ins.address // CODE_LINE
        if not self.count:
            self.first = self.last
        self.count += 1
        if ins.writes != NO_SCOREBOARD:
            self.ready[ins.writes] = None if cost.load else self.now + cost.latency
        if ins.reads != NO_SCOREBOARD:
            self.ready[ins.reads] = self.now + OPERANDS_READ
        if cost.load:
            self.loads.append((cost.global_bytes, ins.writes, ins.line, near(ins)))
        elif cost.adds:
            self.additions.append((cost.global_bytes, ins.line))
        elif cost.global_bytes:
            self.stores.append((cost.global_bytes, ins.line))
        self.now += max(ins.stall, 1) + cost.stall
        if self.now - self.began >= CHUNK:
            self.close()


def fill(block: SassBlock, chip: Chip) -> None:
    """Work out a block's items for a chip."""
    issue = _Issue(chip)
    previous = None
    for ins in block.instrs:
        kind = sass_kind(ins)
        if kind is not None:
            issue.place(ins, kind)
        elif not (previous == "wait" and base_name(ins) == "BRA"):  # the wait's own time has its branch
            issue.code(ins)
        previous = kind
    issue.close()
    block.items = issue.items
