"""Replays traces on a model of one SM, or of the SMs of a cluster, in clocks.

Warps run their code concurrently, in the order of SASS if available: code on one scheduler shares its issue slot, pipes
and tensor core, code on one SM its shared memory, and all users of an overloaded resource slow down (`pool`).
Asynchronous units are servers: the TMA engine, the SM's share of L2 and HBM, tcgen05's queue. A warp waits where its
trace says that it waited: for events, for groups of its own asynchronous work, for loads.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from warpspec.sim.clocks.actions import Action, action_of
from warpspec.sim.clocks.blocks import BlockCost, block_cost
from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.pool import SCHEDULERS, Pool
from warpspec.sim.clocks.products import Event, Products, is_product, owner_of
from warpspec.sim.clocks.sass_order import SassOrder
from warpspec.sim.clocks.servers import Sm
from warpspec.sim.clocks.trace import CtaTrace, LaunchTrace, Step
from warpspec.sim.clocks.warps import Span, WarpReplay

SASS_BYTES = 16  # of an instruction
CUT = 0.8  # part of a cut trace that is replayed


@dataclass
class Result:
    """clocks: when the last warp has ended, or where the replay was cut off. ends: when each cluster has ended. busy:
    clocks of each unit of the first SM. beyond: clocks that the rest takes at the pace of the second half of what was
    replayed; 0: all was.
    """

    clocks: float
    ends: list[float]
    busy: dict[str, float]
    spans: list[list[Span]]
    warps: list[tuple[int, int]]  # (number of the CTA as given, warp) of each list of spans
    bytes_moved: float
    beyond: float = 0.0

    @property
    def lasts(self) -> float:
        """Clocks of all clusters, those that were not replayed included."""
        return self.clocks + self.beyond


Placed = list[tuple[CtaTrace, int]]
"""The CTAs of a cluster, each with the SM that it is on."""


class Replay:
    """Clusters on an SM, or on as many SMs as a cluster has CTAs.

    resident: number of clusters resident from the start; each of the others begins when one has ended. fresh_share:
    part of the bytes read that come from HBM. cold, active_share, written_share, sharers, tensors: as in
    `servers.Sm`.
    most_steps: steps of all warps after which the replay is cut off; None: none. part: of their traces that the
    clusters do on a GPU; less than 1 where recorded ones did the work of others.
    """

    def __init__(
        self,
        trace: LaunchTrace,
        clusters: list[Placed],
        chip: Chip,
        *,
        resident: int | None = None,
        fresh_share: float = 1.0,
        keep_spans: bool = True,
        cold: bool = True,
        costs: dict[int, BlockCost] | None = None,
        active_share: float = 1.0,
        written_share: float = 1.0,
        sharers: float = 1.0,
        tensors: dict[tuple[int, int], tuple[float, float]] | None = None,
        order: SassOrder | None = None,
        most_steps: int | None = None,
        part: float = 1.0,
    ):
        self.trace, self.clusters, self.chip, self.order = trace, clusters, chip, order
        steps = [(cta.steps, cta.more_steps) for placed in clusters for cta, _ in placed]
        self.total_steps = int(part * sum(map(sum, steps)))
        # Towards the end of traces that are cut, warps wait for steps that were not recorded.
        recorded = sum(here if not more else int(here * CUT) for here, more in steps)
        self.most_steps = min(recorded, most_steps or recorded, self.total_steps)
        self.whole = part == 1.0 and self.most_steps == self.total_steps
        self.steps = 0  # that warps have reached
        self.half = (0, 0.0)  # steps and clocks in the middle of what is replayed
        self.resident = len(clusters) if resident is None else resident
        self.costs = {} if costs is None else costs
        self.actions: dict[int, Action] = {}
        self.sms = [
            Sm(chip, fresh_share, cold, active_share, written_share, sharers, tensors, self._code_bytes())
            for _ in range(1 + max(sm for _, sm in clusters[0]))
        ]
        beside = ("operands_first", "crowd_beside_wgmma")
        self.pool = Pool(len(self.sms), *(chip.clocks(name) if chip.has(name) else 1.0 for name in beside))
        self.products = Products(self)
        self.events: dict[tuple[int, int], Event] = {}
        self.queue: list[tuple[float, int, int, object]] = []
        self._order = 0
        self.now = 0.0
        self.keep_spans = keep_spans
        self.spans: list[list[Span]] = []
        self.warps: list[tuple[int, int]] = []
        self.programs: list[Iterator] = []  # of every warp that has begun
        self.owner: list[int] = []  # number of each warp's cluster
        self.live: list[int] = []  # number of warps of each cluster that have not ended
        self.ends: list[float] = []  # when clusters ended
        self.ctas, self.begun = 0, Counter()  # CTAs that have begun; their warps on each SM

    # ---- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Replay until every warp has ended, or has run for long enough to know the pace."""
        start, warps = (self.chip.clocks(name) for name in ("cta_start", "warp_start"))
        apart = start + warps * len(self.clusters[0][0][0].warps)
        for number in range(min(self.resident, len(self.clusters))):
            self._begin(number * apart)
        turnover = self.chip.clocks("cta_turnover")
        pool, queue, programs = self.pool, self.queue, self.programs
        while self.steps < self.most_steps or self.whole:
            if not self.half[0] and self.steps >= self.most_steps / 2:
                self.half = (self.steps, self.now)
            soonest = pool.next_end()
            if queue and (soonest is None or queue[0][0] <= soonest):
                self.now, _, what, argument = heapq.heappop(queue)
            elif soonest is not None:
                self.now, what, argument = soonest, "resume", pool.take(soonest)
                if is_product(argument):
                    self.products.ended(owner_of(argument))
                    continue
            else:
                break
            if what == "signal":
                self.signal(*argument)
                continue
            if what == "through":
                self.products.through(*argument)
                continue
            warp = argument
            request = next(programs[warp], None)
            if request is None:
                self._ended(warp, turnover)
            elif type(request) is float:
                self.push(request, "resume", warp)
            elif type(request) is Event:
                request.waiting.append(warp)
            else:
                sm, scheduler, alone, demand = request
                pool.add(self.now, warp, sm, scheduler, alone, demand)
        return self._result()

    def _begin(self, time: float) -> None:
        """Start the warps of the next cluster. A CTA's take the schedulers that follow those of the CTA before."""
        cluster = len(self.live)
        self.live.append(0)
        for cta, sm in self.clusters[cluster]:
            name, first = self.ctas, self.begun[sm]
            self.ctas += 1
            self.begun[sm] += len(cta.warps)
            for index, entries in enumerate(cta.warps):
                warp = len(self.programs)
                self.warps.append((name, index))
                self.spans.append([])
                self.owner.append(cluster)
                entries = entries if self.order is None else self.order.warp(entries)
                place = sm, (first + index) % SCHEDULERS
                self.programs.append(WarpReplay(self, warp, place, cluster).run(entries))
                self.push(time, "resume", warp)
            self.live[cluster] += len(cta.warps)

    def _ended(self, warp: int, turnover: float) -> None:
        """A warp has ended. The last one of a cluster makes room for the next cluster."""
        cluster = self.owner[warp]
        self.live[cluster] -= 1
        if self.live[cluster]:
            return
        self.ends.append(self.now)
        if len(self.live) < len(self.clusters):
            for sm in self.sms:  # from the first CTA's end on, SMs are no longer in step
                sm.alone_since = self.now if sm.alone_since is None else sm.alone_since
            self._begin(self.now + turnover)

    def _result(self) -> Result:
        """What the replay has found. RuntimeError if it came to a stop before every warp had ended."""
        if self.whole and (stuck := sum(program.gi_frame is not None for program in self.programs)):
            raise RuntimeError(f"{stuck} warps never end in the replay of {self.trace.kernel}")
        busy = dict(zip(("issue", "fma", "alu", "mufu", "shared"), self.pool.used[0], strict=False))
        for name in ("issue", "fma", "alu", "mufu"):
            busy[name] /= SCHEDULERS
        busy |= self.sms[0].busy()
        found = self.ends, busy, self.spans, self.warps, self.sms[0].bytes_moved
        drained = max(sm.drained() for sm in self.sms)  # a launch has ended when its stores have
        if self.whole:
            return Result(max(drained, *self.ends), *found)
        steps, since = self.half
        beyond = max(0, self.total_steps - self.steps) * (self.now - since) / max(self.steps - steps, 1)
        return Result(self.now, *found, beyond + max(0.0, drained - self.now))

    def _code_bytes(self) -> int:
        """Bytes of the kernel's SASS; 0: not known."""
        return 0 if self.order is None else SASS_BYTES * len(self.order.sass.instrs)

    def push(self, time: float, what: str, argument: object) -> None:
        self._order += 1
        heapq.heappush(self.queue, (time, self._order, what, argument))

    # ---- events --------------------------------------------------------------------------------------------------

    def event(self, number: int, copy: int) -> Event:
        event = self.events.get((number, copy))
        if event is None:
            event = self.events[number, copy] = Event(self.trace.contributions[number])
        return event

    def signal(self, event: Event, cause: tuple[str, int, float]) -> None:
        event.missing -= 1
        if self.now >= event.time:
            event.time, event.cause = self.now, cause
        if event.missing == 0:
            for warp in event.waiting:
                self.push(self.now, "resume", warp)
            event.waiting.clear()

    def action(self, step: Step) -> Action:
        """What a step does."""
        action = self.actions.get(step.ins.index)
        if action is None:
            action = self.actions[step.ins.index] = action_of(step.ins, self.chip)
        return action

    def cost(self, index: int) -> BlockCost:
        """The cost of a block of native code."""
        cost = self.costs.get(index)
        if cost is None:
            cost = self.costs[index] = block_cost(self.trace.program, index, self.chip)
        return cost
