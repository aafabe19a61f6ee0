"""Traces in files, to time a recorded run again without running it."""

from __future__ import annotations

import lzma
import pickle
from pathlib import Path

from warpspec.sim.clocks.trace import CtaTrace, Entry, LaunchTrace, Step

FIELDS = (
    "kernel",
    "grid",
    "block",
    "cluster",
    "shared_bytes",
    "registers",
    "tensor_bytes",
    "sampled",
    "tmem_columns",
    "stride",
)


def save(traces: list[LaunchTrace], path: Path) -> None:
    """Write launches, with their PTX, in order."""
    launches = []
    for trace in traces:
        ctas = [
            (
                cta.number,
                cta.coords,
                cta.cluster,
                cta.rank,
                [[_packed(one) for one in warp] for warp in cta.warps],
                cta.more_steps,
            )
            for cta in trace.ctas
        ]
        about = {name: getattr(trace, name) for name in FIELDS}
        launches.append((about, trace.ptx, trace.program.kernel.name, trace.contributions, ctas))
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", preset=1) as file:
        pickle.dump(launches, file)


def load(path: Path) -> list[LaunchTrace]:
    """Load launches from a file written by ``save``. It unpickles: load only files that you trust."""
    from warpspec.sim.runtime import load_program

    with lzma.open(path) as file:
        launches = pickle.load(file)
    found = []
    for about, ptx, kernel, contributions, ctas in launches:
        program = load_program(ptx, kernel)
        trace = LaunchTrace(program=program, **about, contributions=contributions, ptx=ptx)
        instrs = program.kernel.instrs
        for number, coords, cluster, rank, warps, *more in ctas:
            unpacked = [[_unpacked(one, instrs) for one in warp] for warp in warps]
            trace.ctas.append(CtaTrace(number, coords, cluster, rank, unpacked, *more))
        found.append(trace)
    return found


def _packed(entry: Entry) -> object:
    if type(entry) is not Step:
        return entry
    return [entry.ins.index, entry.lanes, entry.signals, entry.waits, entry.nbytes, entry.fresh, entry.about]


def _unpacked(entry: object, instrs: list) -> Entry:
    if type(entry) is not list:
        return entry
    index, lanes, signals, waits, nbytes, fresh, about = entry
    step = Step(instrs[index], lanes)
    step.signals, step.waits, step.nbytes, step.fresh, step.about = signals, waits, nbytes, fresh, about
    return step
