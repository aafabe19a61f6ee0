"""A whole grid's time from a few recorded CTAs: which of them share an SM, how long each lasts, and the waves.

CTAs are assigned to SMs as by the hardware: in order, as places become free. The time of a CTA that was not recorded is
interpolated between its recorded neighbours in the grid's order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from warpspec.sim.clocks.blocks import BlockCost
from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.costs import memory_bytes
from warpspec.sim.clocks.replay import Placed, Replay, Result
from warpspec.sim.clocks.sass import NoSass, sass_of
from warpspec.sim.clocks.sass_order import SassOrder
from warpspec.sim.clocks.taking import last_end, last_share, taken_of
from warpspec.sim.clocks.trace import CtaTrace, LaunchTrace, Step
from warpspec.sim.device import SHARED_RESERVED, device_of
from warpspec.sim.limits import ctas_by_registers
from warpspec.sim.tcgen05.memory import COLUMNS

WARP = 32
MOST_LISTED = 100_000  # most clusters of a grid that are assigned to places one by one
BISECTIONS = 24
CANDIDATES = 3  # recorded clusters that are replayed to find the one that lasts longest
STREAMED_ROUNDS = 4  # rounds of CTAs that are replayed if there are more
TENSOR = 2  # numbers that say which tensor a step copies (`Step.about`)
MOST_STEPS = 30_000  # most steps of a replay, of whose second half the rest has the pace


@dataclass(frozen=True, slots=True)
class Residency:
    """Number of CTAs that an SM holds, and what limits it."""

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
        limits["registers"] = ctas_by_registers(trace.registers, trace.threads)
    if trace.tmem_columns:
        limits["tensor memory"] = COLUMNS // trace.tmem_columns
    name = min(limits, key=limits.get)
    return Residency(max(1, limits[name]), name)


@dataclass
class Launch:
    """A launch's prediction.

    clocks: the whole launch. main: its representative replay. residency, ctas_an_sm: CTAs that an SM could hold, and
    does hold. waves: rounds of CTAs. overhead: clocks outside of CTAs. hbm_bound: clocks that HBM needs for all bytes.
    code: how native code was timed.
    """

    clocks: float
    main: Result
    residency: Residency
    ctas_an_sm: int
    waves: float
    overhead: float
    hbm_bound: float
    code: str


def moved_bytes(cta: CtaTrace, costs) -> tuple[int, int, int]:
    """Bytes that a CTA loads, stores and adds. costs: the cost of a native block."""
    loaded = stored = added = 0
    for entries in cta.warps:
        for entry in entries:
            if type(entry) is not Step:
                index, lanes = (entry, WARP) if type(entry) is int else (entry[0], entry[1].bit_count())
                for part in costs(index).parts:
                    loaded += part.loads * lanes
                    stored += part.stores * lanes
                    added += part.additions * lanes
                continue
            parts, nbytes = entry.ins.parts, entry.nbytes
            if parts[0] in ("st", "red") and "async" not in parts:
                nbytes = memory_bytes(entry.ins) * entry.lanes
            if entry.signals or (parts[:2] == ("cp", "async") and "bulk" not in parts):
                loaded += nbytes
            elif parts[0] == "red" or "reduce" in parts:
                added += nbytes
            else:
                stored += nbytes
    return loaded, stored, added


def loaded_by_tensor(cta: CtaTrace) -> Counter:
    """Bytes that a CTA loads of each tensor that it has a map of."""
    loaded = Counter()
    for entries in cta.warps:
        for entry in entries:
            if (
                type(entry) is Step
                and entry.signals
                and entry.about is not None
                and len(entry.about) == TENSOR
            ):
                loaded[entry.about] += cta.longer * entry.nbytes
    return loaded


def recorded_clusters(trace: LaunchTrace, whole: bool) -> dict[int, Placed]:
    """The recorded clusters by number. whole: leave out those whose traces were cut, if others are left."""
    groups: dict[int, Placed] = {}
    for cta in sorted(trace.ctas, key=lambda cta: (cta.cluster, cta.rank)):
        groups.setdefault(cta.cluster, []).append((cta, cta.rank))
    uncut = {n: placed for n, placed in groups.items() if not any(cta.more_steps for cta, _ in placed)}
    return uncut if whole and len(uncut) > 1 else groups


class Grid:
    """A launch on a chip: first what does not depend on uncertain constants, then `predict`."""

    def __init__(self, trace: LaunchTrace, chip: Chip, cold: bool, use_sass: bool = True):
        if not trace.ctas:
            raise ValueError(f"the trace of {trace.kernel} has no CTA")
        self.trace, self.cold = trace, cold
        self.residency = residency(trace)
        size = trace.cluster_ctas
        self.clusters = trace.grid_ctas // size
        self.here = min(self.residency.ctas, max(1, -(-trace.grid_ctas // chip.sms)))
        self.places = max(1, chip.sms * self.residency.ctas // size)  # clusters that run at once
        self.running = min(self.clusters, self.places) * size  # CTAs that run at once
        self.active_share = min(1.0, trace.grid_ctas / chip.sms)
        self.queued = taken_of(trace)
        self.groups = recorded_clusters(trace, whole=self.queued is None)
        self.part = 1.0  # of its trace that a recorded cluster does on a GPU
        self.longest: int | None = None  # number of the cluster that lasts longest
        self.sass, self.code = None, "PTX, as asked"
        if use_sass:
            self._assemble()
        self.costs: dict[int, BlockCost] = {}
        self._count_bytes(chip)
        self._share_tensors()
        if self.queued is not None:
            self.groups = {self.queued.cluster: self.groups[self.queued.cluster]}

    def _assemble(self) -> None:
        """Take the kernel's SASS, if it can be had, and say how native code is timed."""
        try:
            self.sass = sass_of(
                self.trace.ptx, self.trace.program.kernel.name, self.trace.program.module.target
            )
        except NoSass as error:
            self.code = f"PTX ({error})"
        else:
            self.code = f"SASS by {self.sass.assembler}"

    def _count_bytes(self, chip: Chip) -> None:
        """Count what the launch loads, stores and adds, and how much of it HBM has to move."""
        probe = Replay(self.trace, [next(iter(self.groups.values()))], chip, costs=self.costs)
        totals = np.array(
            [
                sum(cta.longer * np.array(moved_bytes(cta, probe.cost)) for cta, _ in placed)
                for placed in self.groups.values()
            ]
        )
        if self.queued is not None:
            # The recorded cluster did every n-th piece, as many as there are clusters.
            number = self.queued.cluster
            self.part = last_share(self.queued, self.clusters, self.groups[number][0][0].longer)
        self.loaded, self.stored, self.added = (self._of_all(list(column)) for column in totals.T)
        # What is stored is stored once; what is loaded or added to, again and again.
        again = max(self.trace.tensor_bytes - self.stored, 0.0)
        unique = again * self.loaded / max(self.loaded + self.added, 1.0)
        # CTAs that load the same byte: they are neighbours in the grid, and begin together.
        self.sharers = min(max(1.0, self.loaded / unique), self.running) if unique else 1.0
        # Tensors that do not fit in L2 have left it by the time when they are read again.
        leaves = self.cold or self.trace.tensor_bytes > chip.clocks("l2_mb") * 1e6
        self.to_read = unique if leaves else 0.0
        kept = chip.clocks("l2_dirty_mb") * 1e6  # bytes that L2 holds back
        self.written = max(self.stored + again - unique - kept, 0.0)  # bytes that HBM gets meanwhile

    def _share_tensors(self) -> None:
        """Find of each tensor that is loaded by a map, and of all other loads, the part that comes from HBM."""
        by_tensor = [
            sum((loaded_by_tensor(cta) for cta, _ in placed), Counter()) for placed in self.groups.values()
        ]
        self.tensors: dict[tuple[int, int], tuple[float, float]] = {}  # (part from HBM, sharers)
        left, loaded = self.to_read, self.loaded
        for tensor in set().union(*by_tensor):
            total = self._of_all([float(one[tensor]) for one in by_tensor])
            once = min(tensor[1], total)
            part = once / total if self.to_read else 0.0
            self.tensors[tensor] = part, min(max(1.0, total / once), self.running)
            left, loaded = left - once, loaded - total
        self.fresh_share = min(1.0, max(left, 0.0) / loaded) if loaded > 1.0 else 0.0  # of other loads

    def _of_all(self, values: list[float]) -> float:
        """A sum over all clusters of the grid. values: those of the recorded clusters."""
        numbers = list(self.groups)
        if self.queued is not None:
            return float(self.clusters * values[numbers.index(self.queued.cluster)])
        return _total(numbers, values, self.clusters)

    def predict(self, chip: Chip, *, keep_spans: bool = True) -> Launch:
        """The launch's time with a chip's constants; costs of blocks are recomputed if they differ."""
        chip = chip.with_constants(hbm_gb=self._hbm_gb(chip))
        self.order = None if self.sass is None else SassOrder(self.trace.program, self.sass, chip)
        costs = self.costs if keep_spans else {}
        if self.clusters <= self.places:
            lasts, main = self._together(chip, costs, keep_spans)
        else:
            lasts, main = self._stream(chip, costs, keep_spans)
        hbm = (min(self.to_read, self.loaded) + self.written) / (chip.clocks("hbm_gb") / chip.ghz)
        overhead = chip.clocks("launch")
        waves = self.clusters / self.places
        return Launch(
            max(lasts, hbm) + overhead, main, self.residency, self.here, waves, overhead, hbm, self.code
        )

    def _hbm_gb(self, chip: Chip) -> float:
        """GB/s of HBM for what the launch reads and writes there: the fewer the more is written."""
        written = self.written / max(self.written + min(self.to_read, self.loaded), 1.0)
        mixed, read = chip.clocks("hbm_gb"), chip.clocks("hbm_read_gb")
        return read + (mixed - read) * min(2 * written, 1.0)

    def _replay(
        self,
        chip: Chip,
        costs: dict,
        clusters: list[Placed],
        resident: int,
        keep_spans: bool,
        most_steps: int | None,
    ) -> Result:
        shares = {
            "fresh_share": self.fresh_share,
            "written_share": self.written / max(self.stored + self.added, 1.0),
            "active_share": self.active_share,
            "sharers": self.sharers,
            "tensors": self.tensors,
        }
        options = {"resident": resident, "keep_spans": keep_spans, "cold": self.cold, "costs": costs}
        options |= {"order": self.order, "most_steps": most_steps, "part": self.part}
        return Replay(self.trace, clusters, chip, **options, **shares).run()

    def _together(self, chip: Chip, costs: dict, keep_spans: bool) -> tuple[float, Result]:
        """All clusters of the grid run at once: the longest recorded one decides, beside others of the grid."""
        numbers = self._longest_groups() if self.longest is None else [self.longest]
        found = {}
        for number in numbers:
            beside = self._spread(self.here - 1)
            found[number] = self._replay(
                chip, costs, [self.groups[number], *beside], self.here, keep_spans, MOST_STEPS
            )
        longest = max(found, key=lambda number: found[number].lasts)
        self.longest = longest
        return found[longest].lasts, found[longest]

    def _longest_groups(self) -> list[int]:
        """Numbers of the recorded clusters with the longest traces, one of which lasts longest."""
        return sorted(self.groups, key=self._work, reverse=True)[:CANDIDATES]

    def _work(self, number: int) -> float:
        """Number of entries of a recorded cluster's trace, as if it were whole."""
        return sum(len(entries) * cta.longer for cta, _ in self.groups[number] for entries in cta.warps)

    def _stream(self, chip: Chip, costs: dict, keep_spans: bool) -> tuple[float, Result]:
        """More clusters than places: replay an SM's share of them, one after another as places become free.

        Beyond a few rounds, time grows at the rate of the last rounds.
        """
        here = self.here
        share = -(-self.clusters * self.trace.cluster_ctas // chip.sms)  # clusters that an SM takes part in
        most = min(share, STREAMED_ROUNDS * here)
        # CTAs that begin together take their steps together, so that a part of them has no pace of its own.
        result = self._replay(chip, costs, self._spread(most), here, keep_spans, None)
        lasts = result.lasts
        if share > most and result.beyond:
            lasts *= share / most
        elif share > most:
            begin = (STREAMED_ROUNDS - 1) * here
            ends = sorted(result.ends)
            per_cluster = (ends[-1] - ends[len(ends) - begin - 1]) / begin
            lasts += (share - most) * per_cluster
        return self._listed(lasts, share, chip.clocks("cta_turnover")), result

    def _listed(self, lasts: float, share: int, turnover: float) -> float:
        """The time of a grid whose clusters are assigned to places in order, as these become free.

        lasts: clocks of the `share` clusters that `_stream` has taken for those of one SM. What a cluster takes is
        the turnover and a time for each entry of its trace; clusters that are not recorded lie between the others.
        """
        if self.clusters > MOST_LISTED:
            return lasts
        numbers = sorted(self.groups)
        work = [float(self._work(n)) for n in numbers]
        ours = np.interp(self._nearest(share), numbers, work)
        slowest = lasts / min(work)
        low, high = 0.0, slowest
        for _ in range(BISECTIONS):
            entry = (low + high) / 2
            taken = last_end((turnover + entry * ours).tolist(), max(1, self.here)) - turnover
            low, high = (low, entry) if taken > lasts else (entry, high)
        every = np.interp(np.arange(self.clusters), numbers, work)
        return last_end((turnover + low * every).tolist(), self.places) - turnover

    def _nearest(self, count: int) -> list[int]:
        """Numbers of this many recorded clusters, in the order of the grid and spread over it."""
        numbers = sorted(self.groups)
        wanted = [(i + 0.5) / count * (self.clusters - 1) for i in range(count)]
        return [min(numbers, key=lambda number: abs(number - place)) for place in wanted]

    def _spread(self, count: int) -> list[Placed]:
        """So many clusters, in the order of the grid, each replaced by the nearest recorded one."""
        return [self.groups[number] for number in self._nearest(count)]


def _total(numbers: list[int], values: list[float], clusters: int) -> float:
    """Extrapolate a sum over some clusters to all."""
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
