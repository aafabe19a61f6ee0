"""Kernels whose CTAs take pieces of work from a queue: what the recorded ones took, and what each would on a GPU.

In a sample of the grid, the few CTAs that run take all pieces but those that the others begin with. A piece's number
comes from a counter in global memory; a cluster's first piece is that of its own number.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from warpspec.sim.clocks.trace import CtaTrace, LaunchTrace, Step


@dataclass(frozen=True)
class Taken:
    """What the recorded CTAs took.

    numbers: how many from the counter. They did as many pieces: each begins with one that it takes no number for, and
    its last number is past the last piece. sizes: steps of the busiest warp of the CTA that took most for each of its
    pieces, in order and as far as they were recorded; empty: not told apart.
    """

    numbers: float
    sizes: tuple[int, ...]


def taken_of(trace: LaunchTrace) -> Taken | None:
    """What the recorded CTAs took from a queue; None unless a warp takes a number again and again."""
    counters = {
        block.index
        for block in trace.program.blocks
        for ins in trace.program.kernel.instrs[block.start : block.end]
        if ins.parts[0] == "atom" and {"global", "add"} <= set(ins.parts)
    }
    if not trace.sampled or not counters:
        return None
    counts = [max(sum(_block(e) in counters for e in warp) for warp in cta.warps) for cta in trace.ctas]
    if max(counts) < 2:
        return None
    numbers = sum(count * cta.longer for count, cta in zip(counts, trace.ctas, strict=True))
    most = int(np.argmax(counts))
    return Taken(numbers, _sizes(trace.ctas[most], 1 + counts[most]))


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


def last_share(sizes: tuple[int, ...], clusters: int, pieces: int, total: float | None) -> float:
    """How many times the mean work of all clusters the last one to end has done.

    sizes: of the first pieces that one cluster took, in front of others that go on like them. total: the sum over all
    pieces in the same unit; None: the others are like these.
    """
    if not sizes:
        every = np.ones(pieces)
    else:
        places = [0, *range(clusters, clusters + len(sizes) - 1)]
        known = np.interp(np.arange(min(places[-1] + 1, pieces)), places, sizes)
        rest = pieces - len(known)
        mean = np.mean(sizes) if total is None else max(total - known.sum(), 0.0) / max(rest, 1)
        every = np.concatenate([known, np.linspace(known[-1], max(2 * mean - known[-1], 0.0), rest)])
    return last_end(every.tolist(), clusters) * clusters / max(every.sum(), 1e-9)


def last_end(lengths: list[float], places: int) -> float:
    """The end of the last of several pieces of work that are assigned to places in order, as these become free."""
    free = [0.0] * places
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)
