"""A whole grid's time from a few recorded CTAs: which of them share an SM, how long each lasts, and the waves.

CTAs are given to SMs as the hardware does, in order, as places come free. CTAs that were not recorded last as long as
what lies between the recorded ones next to them in the grid's order.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from warpspec.sim.clocks.blocks import BlockCost
from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.replay import Replay, Result
from warpspec.sim.clocks.trace import CtaTrace, LaunchTrace, Step
from warpspec.sim.device import REGISTERS_PER_SM, REGISTERS_PER_WARP_STEP, SHARED_RESERVED, device_of

WARP = 32


@dataclass(frozen=True, slots=True)
class Residency:
    """How many CTAs an SM holds, and what does not let it hold more."""

    ctas: int
    limit: str


def residency(trace: LaunchTrace) -> Residency:
    """CTAs of a launch that an SM holds at once: by threads, shared memory, registers, tensor memory."""
    warps = -(-trace.threads // WARP)
    device = device_of(trace.program.module.target)
    limits = {
        "CTAs": device.ctas_per_sm,
        "threads": device.threads_per_sm // (warps * WARP),
        "shared memory": device.shared_per_sm // (trace.shared_bytes + SHARED_RESERVED),
    }
    if trace.registers:
        step = REGISTERS_PER_WARP_STEP
        limits["registers"] = REGISTERS_PER_SM // (warps * (-(-trace.registers * WARP // step) * step))
    if trace.tmem_columns:
        limits["tensor memory"] = device.tmem_columns // trace.tmem_columns
    name = min(limits, key=limits.get)
    return Residency(max(1, limits[name]), name)


@dataclass
class Launch:
    """A launch's prediction. clocks: of the whole. main: the replay that stands for it. work: clocks of each recorded
    CTA among its neighbours. ctas_an_sm: at once. waves: rounds of CTAs. active_sms: that have any."""

    clocks: float
    main: Result
    main_ctas: list[CtaTrace]
    work: dict[int, float]
    residency: Residency
    ctas_an_sm: int
    waves: float
    active_sms: int
    overhead: float
    hbm_bound: float


def load_bytes(cta: CtaTrace) -> tuple[int, int]:
    """Bytes that a CTA loads and stores by asynchronous copies."""
    loaded = stored = 0
    for entries in cta.warps:
        for entry in entries:
            if type(entry) is Step and entry.nbytes:
                if entry.signals or (
                    entry.ins.parts[:2] == ("cp", "async") and "bulk" not in entry.ins.parts
                ):
                    loaded += entry.nbytes
                else:
                    stored += entry.nbytes
    return loaded, stored


def lane_bytes(cta: CtaTrace, costs) -> tuple[int, int]:
    """Bytes that a CTA's lanes load and store themselves."""
    loaded = stored = 0
    for entries in cta.warps:
        for entry in entries:
            if type(entry) is Step:
                continue
            index, lanes = (entry, WARP) if type(entry) is int else (entry[0], entry[1].bit_count())
            for part in costs(index).parts:
                loaded += part.loads * lanes
                stored += part.stores * lanes
    return loaded, stored


def predict(trace: LaunchTrace, chip: Chip, *, cold: bool = True, keep_spans: bool = True) -> Launch:
    """Clocks of a launch. cold: L2 holds nothing of its tensors at the start. ValueError without recorded CTAs."""
    if not trace.ctas:
        raise ValueError(f"the trace of {trace.kernel} has no CTA")
    costs: dict[int, BlockCost] = {}
    found = residency(trace)
    size, total = trace.cluster_ctas, trace.grid_ctas
    clusters = total // size
    places = max(1, chip.sms * found.ctas // size)  # of clusters
    here = min(found.ctas, max(1, -(-total // chip.sms)))  # CTAs an SM has at once
    active = min(chip.sms, -(-total // here) if here > 1 else total)
    groups: dict[int, list[CtaTrace]] = {}
    for cta in trace.ctas:
        groups.setdefault(cta.cluster, []).append(cta)
    probe = Replay(trace, [(trace.ctas[0], 0)], chip, costs=costs)
    moved = {}
    for number, ctas in groups.items():
        totals = [0, 0]
        for cta in ctas:
            for one in (load_bytes(cta), lane_bytes(cta, probe._cost)):
                totals[0] += one[0]
                totals[1] += one[1]
        moved[number] = totals
    numbers = sorted(groups)
    loaded = _total(numbers, [moved[n][0] for n in numbers], clusters)
    stored = _total(numbers, [moved[n][1] for n in numbers], clusters)
    to_read = max(trace.tensor_bytes - stored, 0.0) if cold else 0.0
    fresh_share = min(1.0, to_read / loaded) if loaded else 0.0
    durations: dict[int, float] = {}
    main: Result | None = None
    for number in numbers:
        resident = [(cta, min(cta.rank, size - 1)) for cta in groups[number] for _ in range(here)]
        result = Replay(
            trace, resident, chip, fresh_share=fresh_share, keep_spans=keep_spans, cold=cold, costs=costs,
            active_share=active / chip.sms,
        ).run()  # fmt: skip
        durations[number] = result.clocks
        if main is None or result.clocks > main.clocks:
            main, main_ctas = result, groups[number]
    turnover = chip.clocks("cta_turnover")
    ends = [0.0] * min(places, clusters)
    heapq.heapify(ends)
    lasts = 0.0
    for number in range(clusters):
        start = heapq.heappop(ends)
        end = start + _between(numbers, durations, number) + (turnover if start else 0.0)
        lasts = max(lasts, end)
        heapq.heappush(ends, end)
    hbm = (min(to_read, loaded) + stored) / (chip.clocks("hbm_gb") / chip.ghz)
    overhead = chip.clocks("launch")
    clocks = max(lasts, hbm) + overhead
    waves = clusters / places
    return Launch(clocks, main, main_ctas, durations, found, here, waves, active, overhead, hbm)


def _between(numbers: list[int], durations: dict[int, float], number: int) -> float:
    """The duration of a cluster, from those recorded next to it."""
    at = bisect_left(numbers, number)
    if (at < len(numbers) and numbers[at] == number) or at == 0:
        return durations[numbers[at]]
    if at == len(numbers):
        return durations[numbers[-1]]
    low, high = numbers[at - 1], numbers[at]
    part = (number - low) / (high - low)
    return durations[low] * (1 - part) + durations[high] * part


def _total(numbers: list[int], values: list[float], clusters: int) -> float:
    """The sum over all clusters of what is known of some."""
    if len(numbers) == clusters:
        return float(sum(values))
    by_number = dict(zip(numbers, map(float, values), strict=True))
    total = 0.0
    for low, high in pairwise(numbers):
        total += (by_number[low] + by_number[high]) / 2 * (high - low)
    return (
        (total + (by_number[numbers[0]] + by_number[numbers[-1]]) / 2)
        if len(numbers) > 1
        else values[0] * clusters
    )
