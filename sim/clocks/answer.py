"""A prediction: clocks as an interval, the bottleneck, the critical path, who waits for what."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from warpspec.sim.clocks.chips import chip as find_chip
from warpspec.sim.clocks.constants import VARIED, Chip
from warpspec.sim.clocks.replay import Result
from warpspec.sim.clocks.trace import LaunchTrace
from warpspec.sim.clocks.waves import Grid, Launch

BOUND_BY_LATENCY = 0.6  # share of the time: no unit that is busy for less is called the bottleneck
UNITS_TIMED = ("tensor", "mufu", "fma", "alu", "issue", "shared", "tma", "l2", "hbm", "tensor memory")


@dataclass
class LaunchClocks:
    """A launch's predicted time on a chip; not a measurement.

    clocks: SM clocks from the launch to the last CTA's end. low, high: with all uncertain constants 20% faster and
    slower. busy: share of a CTA's time in which each unit of its SM works. path: each unit's share of the critical
    path. waits: warp number -> what it waits for -> clocks. binding: the busiest unit, or "latency". code: how native
    code was timed: "SASS", and who assembled it, or "PTX", and why.
    """

    kernel: str
    chip: str
    clocks: float
    low: float
    high: float
    microseconds: float
    binding: str
    busy: dict[str, float]
    path: dict[str, float]
    waits: dict[int, dict[str, float]]
    running: dict[int, float]
    ctas_an_sm: int
    limit: str
    waves: float
    cta_clocks: float
    code: str
    main: Result = field(repr=False)

    def __str__(self) -> str:
        units = sorted(self.busy.items(), key=lambda one: -one[1])
        path = sorted(self.path.items(), key=lambda one: -one[1])
        lines = [
            f"kernel {self.kernel} on {self.chip} (predicted, not measured)",
            f"  {self.clocks:,.0f} clocks ({self.low:,.0f} to {self.high:,.0f}), {self.microseconds:.1f} us; "
            f"{self.ctas_an_sm} CTAs an SM (limit: {self.limit}), {self.waves:.2f} waves, "
            f"{self.cta_clocks:,.0f} clocks a CTA",
            f"  binds: {self.binding}; code: {self.code}",
            "  busy: " + ", ".join(f"{name} {part:.0%}" for name, part in units if part >= 0.005),
            "  critical path: " + ", ".join(f"{name} {part:.0%}" for name, part in path if part >= 0.005),
        ]
        for warp, waits in sorted(self.waits.items()):
            text = ", ".join(
                f"{name} {clocks:,.0f}" for name, clocks in sorted(waits.items(), key=lambda o: -o[1])
            )
            lines.append(
                f"  warp {warp}: runs {self.running[warp]:,.0f}" + (f", waits for {text}" if text else "")
            )
        return "\n".join(lines)


@dataclass
class Clocks:
    """Predicted times of a run's launches, in order."""

    launches: list[LaunchClocks]

    @property
    def clocks(self) -> float:
        return sum(launch.clocks for launch in self.launches)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.launches)) or "no launches"

    def timeline(self, path: str | Path) -> Path:
        """Write a Chrome/Perfetto trace of the replayed CTAs; its axis is clocks (shown as microseconds)."""
        events = []
        for number, launch in enumerate(self.launches):
            title = f"launch {number} {launch.kernel} on {launch.chip}, clocks"
            for (cta, warp), spans in zip(launch.main.warps, launch.main.spans, strict=True):
                pid = number * 1000 + cta
                meta = {"ph": "M", "pid": pid}
                events.append({**meta, "name": "process_name", "args": {"name": f"{title}, CTA {cta}"}})
                events.append({**meta, "name": "thread_name", "tid": warp, "args": {"name": f"warp {warp}"}})
                for span in spans:
                    name = "run" if span.unit == "run" else f"wait {span.unit}"
                    place = {
                        "ph": "X",
                        "pid": pid,
                        "tid": warp,
                        "ts": span.start,
                        "dur": span.end - span.start,
                    }
                    events.append({"name": name, **place})
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
        return path


def clocks_of(traces: list[LaunchTrace], name: str | Chip, *, cold: bool = True) -> Clocks:
    """Predicted times of launches on a chip, by its name or as a changed `Chip`.

    TypeError for anything else, ValueError for an unknown chip, or if a kernel was compiled for another architecture
    than the chip's.
    """
    if not isinstance(name, str | Chip):
        raise TypeError(f"chip is {name!r}; a name or a Chip is needed")
    chip = find_chip(name) if isinstance(name, str) else name
    found = []
    for trace in traces:
        target = trace.program.module.target
        if target[:5] != chip.target[:5]:
            raise ValueError(
                f"chip is {chip.name}, which runs {chip.target}; {trace.kernel} was compiled for {target}"
            )
        grid = Grid(trace, chip, cold)
        launch = grid.predict(chip)
        low, high = (
            grid.predict(chip.varied(factor), keep_spans=False).clocks
            for factor in (1 / (1 + VARIED), 1 + VARIED)
        )
        found.append(_answer(trace, chip, launch, min(low, launch.clocks), max(high, launch.clocks)))
    return Clocks(found)


def _answer(trace: LaunchTrace, chip: Chip, launch: Launch, low: float, high: float) -> LaunchClocks:
    main = launch.main
    busy = {name: main.busy.get(name, 0.0) / main.clocks for name in UNITS_TIMED if main.busy.get(name)}
    busy["hbm"] = max(busy.get("hbm", 0.0), launch.hbm_bound / launch.clocks)
    unit = max(busy, key=busy.get, default="latency")
    binding = (
        unit
        if busy.get(unit, 0.0) >= BOUND_BY_LATENCY
        else f"latency ({unit} is busiest, {busy.get(unit, 0):.0%})"
    )
    waits: dict[int, dict[str, float]] = {}
    running: dict[int, float] = {}
    for (cta, warp), spans in zip(main.warps, main.spans, strict=True):
        if cta:
            continue
        waits[warp], running[warp] = {}, 0.0
        for span in spans:
            if span.unit == "run":
                running[warp] += span.end - span.start
            else:
                waits[warp][span.unit] = waits[warp].get(span.unit, 0.0) + span.end - span.start
    return LaunchClocks(
        kernel=trace.kernel,
        chip=chip.name,
        clocks=launch.clocks,
        low=low,
        high=high,
        microseconds=launch.clocks / chip.ghz / 1000,
        binding=binding,
        busy=busy,
        path=critical_path(main),
        waits=waits,
        running=running,
        ctas_an_sm=launch.ctas_an_sm,
        limit=launch.residency.limit,
        waves=launch.waves,
        cta_clocks=main.clocks,
        code=launch.code,
        main=main,
    )


def critical_path(result: Result) -> dict[str, float]:
    """Shares of the time along the chain of causes that ends with the last warp: what ran, or which unit worked."""
    parts: dict[str, float] = {}
    last = max(range(len(result.spans)), key=lambda w: result.spans[w][-1].end if result.spans[w] else 0.0)
    warp, now = last, result.clocks
    position = {w: len(spans) - 1 for w, spans in enumerate(result.spans)}
    while now > 0:
        spans = result.spans[warp]
        at = position[warp]
        while at >= 0 and spans[at].start >= now:
            at -= 1
        position[warp] = at
        if at < 0:
            parts["start"] = parts.get("start", 0.0) + now
            break
        span = spans[at]
        if span.end < now - 1e-9:
            parts["run"] = parts.get("run", 0.0) + now - span.end  # short code deferred to a later wait
            now = span.end
        if span.unit == "run" or span.cause is None:
            unit, start = ("run" if span.unit == "run" else span.unit), span.start
            parts[unit] = parts.get(unit, 0.0) + now - start
            now = start
            continue
        unit, source, issued = span.cause
        issued = min(issued, now)
        name = "signal" if unit == "run" else unit
        parts[name] = parts.get(name, 0.0) + now - issued
        if issued >= now:
            position[warp] -= source == warp
        warp, now = source, issued
    return {name: clocks / result.clocks for name, clocks in parts.items()}
