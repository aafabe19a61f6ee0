"""Kernels whose CTAs take pieces of work from a queue: what a recorded one took, and what the last to end does.

A piece's number comes from a counter in global memory; a cluster's first piece is that of its own number. In a sample
of the grid, a recorded CTA takes every n-th piece, as if the others took as many (`record.Recorder`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from warpspec.sim.clocks.record import takers
from warpspec.sim.clocks.trace import CtaTrace, LaunchTrace, Step


@dataclass(frozen=True)
class Taken:
    """What the recorded cluster that took most has done: every n-th piece, as many as there are clusters.

    cluster: its number. pieces: how many, the first included; its last number is past the last piece. sizes: steps of
    the busiest warp for each of its pieces, in order and as far as they were recorded; empty: not told apart.
    """

    cluster: int
    pieces: float
    sizes: tuple[int, ...]


def taken_of(trace: LaunchTrace) -> Taken | None:
    """What the recorded CTAs took from a queue; None unless there is one, from which all of them take. Where some do
    other work (main kernels of attention's gradients), no CTA stands for all others."""
    if not trace.stride:
        return None
    counters = takers(trace.program)
    counts = [max(sum(_block(e) in counters for e in warp) for warp in cta.warps) for cta in trace.ctas]
    if not all(count or cta.more_steps for count, cta in zip(counts, trace.ctas, strict=True)):
        return None
    most = int(np.argmax(counts))
    cta = trace.ctas[most]
    return Taken(cta.cluster, counts[most] * cta.longer, _sizes(cta, 1 + counts[most]))


def _block(entry) -> int | None:
    return None if type(entry) is Step else entry if type(entry) is int else entry[0]


def _sizes(cta: CtaTrace, pieces: int) -> tuple[int, ...]:
    """Steps of each piece of the CTA's busiest warp: between the runs of a block that it runs once a piece."""
    steps, runs = 0, {}  # by block: how many steps were before each time that the warp ran it
    for entry in max(cta.warps, key=len):
        if type(entry) is Step:
            steps += 1
        else:
            runs.setdefault(_block(entry), []).append(steps)
    marks = [at for at in runs.values() if len(at) > 1 and abs(len(at) - pieces) <= 1]
    if not marks:
        return ()
    ends = min(marks) if cta.more_steps else [*min(marks), steps]
    return tuple(int(n) for n in np.diff(ends) if n)


def last_share(taken: Taken, clusters: int, longer: float) -> float:
    """How many times the recorded cluster's work the last one to end has done.

    A piece between two of the recorded cluster's has a size between theirs. longer: how many times as long as its trace
    the recorded cluster is; what follows the trace goes on like it.
    """
    if not taken.sizes:
        return 1.0
    sizes = list(taken.sizes)
    total = clusters * sum(sizes) * longer
    places = np.arange(len(sizes)) * clusters
    known = np.interp(np.arange(places[-1] + 1), places, sizes)
    rest = max(round(taken.pieces * clusters) - len(known), 0)
    mean = max(total - known.sum(), 0.0) / max(rest, 1)
    every = np.concatenate([known, np.linspace(known[-1], max(2 * mean - known[-1], 0.0), rest)])
    return last_end(every.tolist(), clusters) * clusters / max(every.sum(), 1e-9)


def last_end(lengths: list[float], places: int) -> float:
    """The end of the last of several pieces of work that are assigned to places in order, as these become free."""
    free = [0.0] * places
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)
