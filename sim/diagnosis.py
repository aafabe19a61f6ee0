"""Error texts of a stopped machine: what went wrong, and where."""

from __future__ import annotations

import re
from collections.abc import Iterable

from warpspec.sim.codegen.layout import Ctx, Fault, guard_text
from warpspec.sim.codegen.program import Program
from warpspec.sim.errors import (
    BEGINS,
    EXPECTED,
    MISSED,
    NO_LINES,
    Deadlock,
    MemoryFault,
    SimError,
    Where,
    format_lanes,
)
from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import lanes
from warpspec.sim.memory import (
    CTA_RANK_SHIFT,
    SHARED_BASE_OFFSET,
    GlobalMemory,
    in_local_window,
    in_shared_window,
)
from warpspec.sim.names import placed
from warpspec.sim.registry import row_of
from warpspec.sim.warp import Cluster, Group, Warp

CAUSES = (EXPECTED, BEGINS, MISSED)  # texts of rows that name a cause, which stand first
MOST_CTAS = 6  # CTAs that a row of a deadlock report names besides its own
LAST_ARRIVAL = re.compile(r"last arrival by warp \d+")
MOST_ROWS = 64  # lines of a deadlock report; what is left out is counted
OUTSIDE = (
    "CTAs outside of the recorded sample do not run; recording(sample=None), or --sample, records them all"
)


def where(
    program: Program, w: Warp | None = None, ins: Instr | None = None, mask: int | None = None
) -> Where:
    """The place of an instruction executed by lanes of a warp."""
    return Where(
        kernel=program.name,
        cta=None if w is None else w.cta.coords,
        warp=None if w is None else w.index,
        lanes=None if mask is None else tuple(lanes(mask)),
        ptx_line=None if ins is None else ins.line,
        ptx_text=None if ins is None else guard_text(ins) + (ins.text or ins.opcode),
        source=None if ins is None else ins.source,
    )


def locate(
    program: Program, error: Exception, w: Warp | None, ins: Instr | None, mask: int | None = None
) -> None:
    """Add a place to an error that has none."""
    if not isinstance(error, SimError):
        error.add_note(f"an error of the simulator itself, at {where(program, w, ins, mask)}")
    elif error.where is None:
        error.where = where(program, w, ins, mask)


def instruction_at(program: Program, group: Group) -> Instr:
    """The instruction at which a group stands."""
    block = program.blocks[min(group.block, len(program.blocks) - 1)]
    return program.kernel.instrs[min(block.start, len(program.kernel.instrs) - 1)]


def use_after_exit(w: Warp, ins: Instr) -> str:
    """The warning of a CTA that has exited while an operation still uses its shared memory. w, ins: what issued it."""
    return (
        f"a CTA exits before its `{ins.opcode}` is done with shared memory, CTA {w.cta.coords} the first: warp "
        f"{w.index}, PTX line {ins.line}{' from ' if ins.source else ''}{placed(ins.source)}; hardware keeps the "
        "memory until then, the programming model does not promise it"
    )


def deadlock(
    program: Program, resident: Iterable[Cluster], pending: int, headline: str, whole: bool
) -> Deadlock:
    """A report of every unfinished warp and what it waits for, those whose cause is known first; warps of a CTA that
    wait for the same share a line.

    resident: the clusters that have started and not finished. pending: asynchronous operations not done yet.
    whole: all clusters of the grid run, not only those of a recorded sample.
    """
    alike: dict[tuple, list[int]] = {}
    for cluster in resident:
        for cta in cluster.ctas:
            for warp in cta.warps:
                for group in warp.groups:
                    key = (
                        cta.coords,
                        format_lanes(tuple(lanes(group.mask))),
                        stuck_text(program, warp, group),
                    )
                    alike.setdefault(key, []).append(warp.index)
    rows = sorted(_one_row_for_alike(alike), key=lambda row: not any(cause in row for cause in CAUSES))
    if len(rows) > MOST_ROWS:
        rows[MOST_ROWS:] = [f"and {len(rows) - MOST_ROWS} lines more"]
    if not any(ins.source for ins in program.kernel.instrs):
        rows.append(NO_LINES)
    if pending:
        rows.append(f"{pending} asynchronous operations pending")
    if not whole:
        headline += f" ({OUTSIDE})"
    return Deadlock("\n  ".join([f"{headline}:", *rows]), where(program))


def _one_row_for_alike(stuck: dict[tuple, list[int]]) -> list[str]:
    """Rows of a deadlock report: what the first CTA's warps wait for, and which other CTAs' warps wait for the same.

    stuck: the warps of a CTA that wait alike, by the CTA's coordinates, the lanes and what they wait for.
    """
    groups: dict[tuple, list[tuple]] = {}
    for (coords, lane_text, what), warps in stuck.items():
        anyone = LAST_ARRIVAL.sub("", what.replace(f"CTA {coords}", "own CTA"))
        groups.setdefault((lane_text, tuple(warps), anyone), []).append((coords, what))
    rows = []
    for (lane_text, warps, _), members in groups.items():
        (coords, what), *others = members
        plural = "s" if len(warps) > 1 else ""
        row = f"CTA {coords} warp{plural} {format_lanes(warps)} lanes {lane_text}: {what}"
        if others:
            shown = ", ".join(str(other) for other, _ in others[:MOST_CTAS])
            more = f" and {len(others) - MOST_CTAS} more" if len(others) > MOST_CTAS else ""
            row += f"; alike in CTA{'s' if len(others) > 1 else ''} {shown}{more}"
        rows.append(row)
    return rows


def stuck_text(program: Program, w: Warp, group: Group) -> str:
    """A text that says what a group of lanes executes or waits for, and where."""
    ins = instruction_at(program, group)
    if group.wait is not None:
        what = group.wait.describe()
    elif group.converge:
        what = f"waits for lanes {format_lanes(tuple(lanes(w.alive & ~group.mask)))} at `{ins.opcode}`"
    elif group.timed_out is not None:
        what = group.timed_out.describe() or "runs"
    else:
        what = "runs without effect"
    source = f" from {placed(ins.source)}" if ins.source else ""
    return f"{what} (PTX line {ins.line}{source})"


def fault(program: Program, gmem: GlobalMemory, w: Warp, group: Group) -> SimError:
    """The error that generated code stopped with."""
    kind, address, size = (int(w.ctx[f]) for f in (Ctx.FAULT_KIND, Ctx.FAULT_ADDRESS, Ctx.FAULT_SIZE))
    ins = program.kernel.instrs[int(w.ctx[Ctx.FAULT_INSTR])]
    lane = int(w.ctx[Ctx.FAULT_LANE])
    if kind == Fault.BRANCH_INDEX:
        return SimError("brx.idx with an index beyond its targets", where(program, w, ins, group.mask))
    if kind == Fault.TRAP:
        return SimError("the kernel executed trap", where(program, w, ins, group.mask))
    write = not row_of(ins.opcode).loads
    if kind == Fault.MISALIGNED:
        text = f"{size}-byte access at {address:#x} is not aligned to its size"
    elif kind == Fault.REMOTE_SHARED:
        text = f"shared::cta access with the address {address:#x} of another CTA (own rank {w.cta.rank})"
    elif "shared" in ins.opcode or in_shared_window(address):
        low = address & ((1 << CTA_RANK_SHIFT) - 1)
        bounds = f"{SHARED_BASE_OFFSET:#x} to {len(w.cta.smem):#x}"
        text = f"{size}-byte access at shared offset {low:#x} (address {address:#x}): "
        text += f"the CTA's shared memory is {bounds}"
    elif ".local" in ins.opcode or in_local_window(address):
        text = f"{size}-byte access at local offset {address & 0xFFFFFFFF:#x} of {int(w.ctx[Ctx.LOCAL_SIZE])}"
    else:
        text = gmem.describe(address, size, write)
    return MemoryFault(text, where(program, w, ins, 1 << lane))
