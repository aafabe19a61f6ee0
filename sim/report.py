"""The report of a simulated run: resources, instruction counts, bytes, FLOPs, waits, a timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from warpspec.sim.clocks.answer import Clocks, clocks_of
from warpspec.sim.clocks.constants import Chip
from warpspec.sim.codegen.program import Program
from warpspec.sim.instruction import Instr
from warpspec.sim.operation import Op
from warpspec.sim.registry import Family, find, row_of
from warpspec.sim.warp import Warp

TIMELINE_CTAS = 4  # the timeline shows the grid's first CTAs
TIMELINE_EVENTS = 200_000


@cache
def family(opcode: str) -> str:
    """The name under which an opcode is counted: its family; arithmetic by type, tcgen05 by operation."""
    found = row_of(opcode).family
    parts = opcode.split(".")
    if found is Family.TCGEN05:
        return f"{found}: {'.'.join(parts[:2])}"
    if found is not Family.ARITHMETIC:
        return found.value
    if parts[-1].startswith(("f", "bf", "tf")):
        return "float packed" if "x2" in parts[-1] else "float"
    return "integer"


class Span(NamedTuple):
    """An interval on the timeline. warp: None for asynchronous work. start, end: steps of the scheduler. source: the
    waiting source line. by: who ended a wait, as (CTA, warp, source line)."""

    cta: int
    warp: int | None
    name: str
    start: int
    end: int
    source: str = ""
    by: tuple[int, int, str] | None = None


# A finished wait as the machine notes it; it is formatted only on demand: CTA, warp, start,
# end, instruction, what was waited for, and who ended it (a warp and its instruction, or None).
Wait = tuple[int, int, int, int, Instr, object, tuple[Warp, Instr] | None]


def spans(events: Iterable[Span | Wait]) -> list[Span]:
    """Format events."""
    return [event if type(event) is Span else _span(*event) for event in events]


def _span(cta: int, warp: int, start: int, end: int, ins: Instr, on: object, by) -> Span:
    label = getattr(on, "label", None)
    name = f"wait {label() if label is not None else ins.opcode}"
    ended = None if by is None else (by[0].cta.number, by[0].index, by[1].source or "")
    return Span(cta, warp, name, start, end, ins.source or "", ended)


@dataclass
class LaunchStats:
    """Counters of one launch, filled in by the machine and by instruction handlers."""

    tma_bytes_loaded: int = 0
    tma_bytes_stored: int = 0
    tma_bytes_prefetched: int = 0
    mma_flops: int = 0
    peak_tmem_columns: int = 0
    barrier_waits: dict[int, int] = field(default_factory=dict)  # warp index -> times blocked
    # Warp index -> executions of each block.
    block_counts: dict[int, np.ndarray] = field(default_factory=dict)
    events: list[Span | Wait] = field(default_factory=list)
    warnings: dict[str, str] = field(default_factory=dict)  # first words -> warning

    findings: dict[tuple, object] = field(default_factory=dict)  # findings of the order checker
    touched: list[dict] = field(default_factory=list)  # accesses to global memory, by share
    kept: list = field(default_factory=list)  # reductions into global memory (`reductions.Kept`), in order
    seen: object = None  # uses of griddepcontrol

    def warn(self, text: str) -> None:
        """Record, once per kind, something that hardware tolerates and the programming model forbids."""
        self.warnings.setdefault(text.split(",")[0], text)

    def counters(self, warp: int, blocks: int) -> np.ndarray:
        """Execution counts of blocks, shared by the warps of one index in all CTAs."""
        if warp not in self.block_counts:
            self.block_counts[warp] = np.zeros(blocks + 1, np.uint64)
        return self.block_counts[warp]

    def waited(
        self, w: Warp, ins: Instr, since: int, now: int, on: object, by: tuple[Warp, Instr] | None
    ) -> None:
        """Note the end of some lanes' wait at an instruction. since, now: ticks of the machine's clock. on: what they
        waited for. by: who ended it."""
        self.barrier_waits[w.index] = self.barrier_waits.get(w.index, 0) + 1
        if w.cta.number < TIMELINE_CTAS and len(self.events) < TIMELINE_EVENTS:
            self.events.append((w.cta.number, w.index, since, now, ins, on, by))

    def completed(self, op: Op, now: int) -> None:
        """An asynchronous operation has taken effect."""
        if op.origin is not None and len(self.events) < TIMELINE_EVENTS:
            cta = op.origin[0].cta.number
            if cta < TIMELINE_CTAS:
                self.events.append(Span(cta, None, op.text or op.origin[1].opcode, now, now + 1))

    def warp_done(self, w: Warp, now: int) -> None:
        """A warp has exited."""
        if w.cta.number < TIMELINE_CTAS:
            self.events.append(Span(w.cta.number, w.index, "run", 0, now))

    def __getstate__(self) -> dict:
        """The report as another process gets it: with formatted events, without their machine."""
        return self.__dict__ | {"events": spans(self.events)}

    def merge(self, other: LaunchStats) -> None:
        """Add the counters of another process's share of the launch."""
        self.tma_bytes_loaded += other.tma_bytes_loaded
        self.tma_bytes_stored += other.tma_bytes_stored
        self.tma_bytes_prefetched += other.tma_bytes_prefetched
        self.mma_flops += other.mma_flops
        self.peak_tmem_columns = max(self.peak_tmem_columns, other.peak_tmem_columns)
        for warp, count in other.barrier_waits.items():
            self.barrier_waits[warp] = self.barrier_waits.get(warp, 0) + count
        for warp, counts in other.block_counts.items():
            if warp in self.block_counts:
                self.block_counts[warp] += counts
            else:
                self.block_counts[warp] = counts
        self.events += other.events
        self.findings |= other.findings
        if other.seen is not None:
            self.seen.merge(other.seen)
        self.warnings = {**other.warnings, **self.warnings}


@dataclass
class LaunchReport:
    """One launch as it ran. `instructions`: warp index -> family -> warp-instructions."""

    kernel: str  # its name in PTX
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int | None
    local_bytes: int | None  # stack and spills per thread
    static_smem: int
    dynamic_smem: int
    tmem_columns: int
    instructions: dict[int, dict[str, int]]
    opcodes: dict[str, int]
    tma_bytes_loaded: int
    tma_bytes_stored: int
    tma_bytes_prefetched: int
    mma_flops: int
    barrier_waits: dict[int, int]
    seconds: float
    warnings: list[str] = field(default_factory=list)
    noted: list[Span | Wait] = field(repr=False, default_factory=list)  # see `events`
    function: str = ""  # the kernel's name in messages: its function in the DSL
    findings: list = field(repr=False, default_factory=list)  # the order checker's, except tolerated ones
    storage: tuple = field(repr=False, default=())  # fields of dynamic shared memory: name, bytes, offset
    # Recorded traces (clocks/record.py); None: nothing was recorded.
    trace: object = field(repr=False, default=None)

    @cached_property
    def events(self) -> list[Span]:
        """The stretches in which the first CTAs ran or waited, ordered by their ends."""
        return spans(self.noted)

    @property
    def warp_instructions(self) -> int:
        """Number of instructions executed, each counted once per executing warp."""
        return sum(sum(f.values()) for f in self.instructions.values())


def count_instructions(
    program: Program, stats: LaunchStats
) -> tuple[dict[int, dict[str, int]], dict[str, int]]:
    """Counts by warp index and family, and by opcode over all warps."""
    by_warp: dict[int, dict[str, int]] = {}
    families, opcodes, block_of = _kinds(program)
    total = np.zeros(len(block_of), np.int64)
    for warp, counts in sorted(stats.block_counts.items()):
        executed = np.asarray(counts)[block_of].astype(np.int64)
        total += executed
        by_warp[warp] = _sums(families, executed)
    return by_warp, _sums(opcodes, total)


def _sums(kinds: tuple[list[str], np.ndarray], counts: np.ndarray) -> dict[str, int]:
    """The sum of the counts of each kind; kinds: names, and the number of each instruction's."""
    names, numbers = kinds
    sums = np.bincount(numbers, counts, len(names))
    return {name: int(count) for name, count in zip(names, sums.tolist(), strict=True) if count}


@lru_cache(maxsize=64)
def _kinds(program: Program) -> tuple:
    """Families and opcodes of a kernel's instructions, each as (names, number of each instruction's), their blocks."""

    def numbered(found: list[str]) -> tuple[list[str], np.ndarray]:
        number = {name: i for i, name in enumerate(dict.fromkeys(found))}
        return list(number), np.array([number[name] for name in found], np.intp)

    instrs, sizes = program.kernel.instrs, [block.end - block.start for block in program.blocks]
    opcodes = [ins.opcode for block in program.blocks for ins in instrs[block.start : block.end]]
    families = [family(opcode) if find(opcode) is not None else "" for opcode in opcodes]
    return numbered(families), numbered(opcodes), np.repeat(np.arange(len(sizes)), sizes)


@dataclass
class SimReport:
    """All launches of one `run`; prints as a table. `roles` may name warp indices for printing."""

    launches: list[LaunchReport] = field(default_factory=list)
    seconds: float = 0.0
    seed: int = 0
    roles: dict[int, str] = field(default_factory=dict)

    def __add__(self, other: SimReport) -> SimReport:
        """The launches of two runs, in order."""
        if not isinstance(other, SimReport):
            return NotImplemented
        launches = self.launches + other.launches
        return SimReport(launches, self.seconds + other.seconds, self.seed, {**other.roles, **self.roles})

    def __str__(self) -> str:
        return "\n\n".join(self._table(launch) for launch in self.launches) or "no launches"

    def _table(self, launch: LaunchReport) -> str:
        lines = [
            f"kernel {launch.function or launch.kernel}",
            f"  grid {launch.grid}  cluster {launch.cluster}  block {launch.block}",
            f"  registers {launch.registers}  stack and spills {launch.local_bytes} B  "
            f"shared {launch.static_smem} + {launch.dynamic_smem} B  TMEM {launch.tmem_columns} columns",
            f"  TMA {launch.tma_bytes_loaded:,} B in, {launch.tma_bytes_stored:,} B out, "
            f"{launch.tma_bytes_prefetched:,} B prefetched  "
            f"MMA {launch.mma_flops:,} FLOP",
            f"  {launch.warp_instructions:,} warp instructions in {launch.seconds:.2f} s",
        ]
        lines += [f"  warning: {text}" for text in launch.warnings]
        names = sorted({f for counts in launch.instructions.values() for f in counts})
        columns = self._columns(launch)
        width = max([len(n) for n in names] + [14]) + 2
        heads = [title for title, _ in columns]
        lines.append("  " + "family".ljust(width) + "".join(h.rjust(max(len(h) + 2, 12)) for h in heads))
        for name in names:
            row = [sum(launch.instructions[w].get(name, 0) for w in warps) for _, warps in columns]
            cells = "".join(f"{v:,}".rjust(max(len(h) + 2, 12)) for v, h in zip(row, heads, strict=True))
            lines.append("  " + name.ljust(width) + cells)
        waits = [sum(launch.barrier_waits.get(w, 0) for w in warps) for _, warps in columns]
        cells = "".join(f"{v:,}".rjust(max(len(h) + 2, 12)) for v, h in zip(waits, heads, strict=True))
        lines.append("  " + "times blocked".ljust(width) + cells)
        return "\n".join(lines)

    def _columns(self, launch: LaunchReport) -> list[tuple[str, list[int]]]:
        """Columns of the table: roles where they are named, else warp indices (at most eight)."""
        columns: dict[str, list[int]] = {}
        many = len(launch.instructions) > 8 and not self.roles
        for warp in sorted(launch.instructions):
            columns.setdefault("all warps" if many else self.roles.get(warp, f"warp {warp}"), []).append(warp)
        return list(columns.items())

    def clocks(self, chip: str | Chip, *, cold: bool = True) -> Clocks:
        """Predict the launches' times on a chip: "h100", "h200", "b200", "b300", or a `Chip` with other constants.

        cold: no tensor data are in L2 when a launch begins. The run must have been made inside `sim.recording()`. A
        prediction is not a measurement. Raises TypeError for anything but a name or a `Chip`; ValueError for an unknown
        chip, for a chip that cannot run what the kernels were compiled for, and for a run that was not recorded.
        """
        traces = [launch.trace for launch in self.launches]
        if None in traces:
            raise ValueError("the run was not recorded: make it inside `with warpspec.sim.recording():`")
        return clocks_of(traces, chip, cold=cold)

    def timeline(self, path: str | Path) -> Path:
        """Write a Chrome/Perfetto trace to a file and return its path. Raises OSError if the file cannot be written.

        CTAs are shown as processes, warps as threads, and scheduler steps as microseconds.
        """
        events = []
        for number, launch in enumerate(self.launches):
            for span in launch.events:
                pid, tid = number * TIMELINE_CTAS + span.cta, 99 if span.warp is None else span.warp
                event = {"name": span.name, "ph": "X", "pid": pid, "tid": tid, "ts": span.start}
                event["dur"] = span.end - span.start
                if span.source:
                    event["args"] = {"line": span.source}
                events.append(event)
                # An arrow from the arrival to the wait.
                if span.by is not None and span.by[0] < TIMELINE_CTAS:
                    cta, warp, _ = span.by
                    flow = {"name": "ends the wait", "cat": "wait", "id": len(events), "ts": span.end}
                    events.append(flow | {"ph": "s", "pid": number * TIMELINE_CTAS + cta, "tid": warp})
                    events.append(flow | {"ph": "f", "bp": "e", "pid": pid, "tid": tid})
            for cta in {span.cta for span in launch.events}:
                pid = number * TIMELINE_CTAS + cta
                title = {"name": f"launch {number} {launch.function or launch.kernel} CTA {cta}"}
                events.append({"name": "process_name", "ph": "M", "pid": pid, "args": title})
                threads = {w: self.roles.get(w, f"warp {w}") for w in launch.instructions}
                for tid, label in {**threads, 99: "asynchronous"}.items():
                    args = {"name": f"{tid} {label}" if tid != 99 else label}
                    events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": args})
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        return path
