"""Replays traces on a model of one SM, or of the SMs of a cluster, in clocks.

Warps run their code concurrently, in the order of SASS if available: code on one scheduler shares its issue slot, pipes
and tensor core, code on one SM its shared memory, and all users of an overloaded resource slow down (`pool`).
Asynchronous units are servers: the TMA engine, the SM's share of L2 and HBM, tcgen05's queue. A warp waits where its
trace says that it waited: for events, for groups of its own asynchronous work, for loads.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from warpspec.sim.clocks.actions import Action, Kind, action_of
from warpspec.sim.clocks.blocks import BlockCost, block_cost
from warpspec.sim.clocks.constants import Chip
from warpspec.sim.clocks.costs import PIPES, Pipe
from warpspec.sim.clocks.pool import Pool
from warpspec.sim.clocks.products import Event, Products, is_product, owner_of
from warpspec.sim.clocks.sass_blocks import Chunk
from warpspec.sim.clocks.sass_order import Jump, Moved, SassOrder
from warpspec.sim.clocks.servers import Sm
from warpspec.sim.clocks.trace import CtaTrace, LaunchTrace, Step

WARP = 32
SCOREBOARDS = 6
CHUNK = 24.0  # clocks of SASS that run as one piece
BRANCH_STALL = 5.0  # clocks of a branch that its control word gives
FLUSH = 12.0  # clocks of native code that may be deferred to a later wait without moving issues in between
CUT = 0.8  # part of a cut trace that is replayed
LONGEST_RUN = 4000.0  # clocks after which native code is cut, so that concurrent code is seen


@dataclass(slots=True)
class Span:
    """A stretch of a warp's time. unit: what the warp waited for, or "run". cause: who released it.

    cause: (unit that worked, number of the warp that issued its work, time of issue), or None.
    """

    start: float
    end: float
    unit: str
    cause: tuple[str, int, float] | None = None


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
            Sm(chip, fresh_share, cold, active_share, written_share, sharers, tensors)
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

    # ---- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Replay until every warp has ended, or has run for long enough to know the pace."""
        programs: list[Iterator] = []
        owner: list[int] = []  # the number of each warp's cluster
        live: list[int] = []  # number of warps of each cluster that have not ended
        numbers = itertools.count()

        def begin(time: float) -> None:
            number = len(live)
            live.append(0)
            for cta, sm in self.clusters[number]:
                name = next(numbers)
                for index, entries in enumerate(cta.warps):
                    warp = len(programs)
                    self.warps.append((name, index))
                    self.spans.append([])
                    owner.append(number)
                    entries = entries if self.order is None else self.order.warp(entries)
                    programs.append(self._warp(warp, entries, sm, index % 4, number))
                    self.push(time, "resume", warp)
                live[number] += len(cta.warps)

        start, warps = (self.chip.clocks(name) for name in ("cta_start", "warp_start"))
        apart = start + warps * len(self.clusters[0][0][0].warps)
        for number in range(min(self.resident, len(self.clusters))):
            begin(number * apart)
        ends: list[float] = []
        turnover = self.chip.clocks("cta_turnover")
        pool, queue = self.pool, self.queue
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
                live[owner[warp]] -= 1
                if not live[owner[warp]]:
                    ends.append(self.now)
                    if len(live) < len(self.clusters):
                        for sm in self.sms:  # from the first CTA's end on, SMs are no longer in step
                            sm.alone_since = self.now if sm.alone_since is None else sm.alone_since
                        begin(self.now + turnover)
            elif type(request) is float:
                self.push(request, "resume", warp)
            elif type(request) is Event:
                request.waiting.append(warp)
            else:
                sm, scheduler, alone, demand = request
                pool.add(self.now, warp, sm, scheduler, alone, demand)
        cut_off = not self.whole
        stuck = [] if cut_off else [w for w in range(len(programs)) if programs[w].gi_frame is not None]
        if stuck:
            raise RuntimeError(f"{len(stuck)} warps never end in the replay of {self.trace.kernel}")
        busy = dict(zip(("issue", "fma", "alu", "mufu", "shared"), pool.used[0], strict=False))
        for name in ("issue", "fma", "alu", "mufu"):
            busy[name] /= 4
        busy |= self.sms[0].busy()
        if not cut_off:
            return Result(max(ends), ends, busy, self.spans, self.warps, self.sms[0].bytes_moved)
        steps, since = self.half
        beyond = max(0, self.total_steps - self.steps) * (self.now - since) / max(self.steps - steps, 1)
        return Result(self.now, ends, busy, self.spans, self.warps, self.sms[0].bytes_moved, beyond)

    def push(self, time: float, what: str, argument: object) -> None:
        self._order += 1
        heapq.heappush(self.queue, (time, self._order, what, argument))

    # ---- events --------------------------------------------------------------------------------------------------

    def _event(self, number: int, copy: int) -> Event:
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

    # ---- one warp ----------------------------------------------------------------------------------------------

    def _action(self, step: Step) -> Action:
        action = self.actions.get(step.ins.index)
        if action is None:
            action = self.actions[step.ins.index] = action_of(step.ins, self.chip)
        return action

    def _cost(self, index: int) -> BlockCost:
        cost = self.costs.get(index)
        if cost is None:
            cost = self.costs[index] = block_cost(self.trace.program, index, self.chip)
        return cost

    def _warp(self, warp: int, entries: list, sm: int, scheduler: int, copy: int) -> Iterator:
        """A warp's life: yields a time to sleep until, an event to wait for, or native code to run."""
        chip, server = self.chip, self.sms[sm]
        place, branch = (sm, scheduler), chip.clocks("branch")
        alone, demand = 0.0, [0.0] * PIPES
        pending: list[tuple[int, float]] = []  # (registers, when loads fill them)
        wgmma: list[Event] = []  # the ends of committed groups
        opened = Event(0)  # the group that is not committed yet
        bulk: list[tuple[float, float]] = []  # (source read, all done) of committed groups
        bulk_open = (0.0, 0.0)
        copies: list[float] = []
        copies_open = 0.0
        tensor_memory = 0.0
        boards = [0.0] * SCOREBOARDS  # when each one's loads are done
        previous = -2
        code_read: set[int] = set()  # lines of code that this warp has run
        cold_code = server.cold and chip.has("code_line")
        depth = chip.clocks("wgmma_depth") if chip.has("wgmma_depth") else 0
        for entry in entries:
            kind_of_entry = type(entry)
            if kind_of_entry is Chunk or kind_of_entry is Moved:
                chunk = entry if kind_of_entry is Chunk else entry.chunk
                if cold_code and chunk.count and chunk.last not in code_read:
                    until = server.fetch(self.now + alone, chunk.first, chunk.last)
                    if until > self.now + alone:
                        alone, demand = yield from self._catch_up(
                            warp, place, (alone, demand), until, "code", "code"
                        )
                    code_read.add(chunk.last)
                if chunk.waits:
                    until = max(boards[b] for b in range(SCOREBOARDS) if chunk.waits >> b & 1)
                    if until > self.now + alone:
                        alone, demand = yield from self._catch_up(
                            warp, place, (alone, demand), until, "memory", "memory"
                        )
                if chunk.demand[Pipe.SHARED]:
                    until = server.lanes_wait(self.now + alone)
                    if until > self.now + alone:
                        alone, demand = yield from self._catch_up(
                            warp, place, (alone, demand), until, "store", "memory"
                        )
                alone += chunk.alone
                for pipe in range(PIPES):
                    demand[pipe] += chunk.demand[pipe]
                if kind_of_entry is Moved:
                    at = self.now + alone
                    for nbytes, board in entry.loads:
                        if nbytes:
                            done = server.load(at, nbytes, 1)
                            if board < SCOREBOARDS:
                                boards[board] = max(boards[board], done)
                    if entry.stored or entry.added:
                        server.store_by_lanes(at, entry.stored, entry.added)
                if alone > CHUNK:
                    yield from self._run(warp, sm, scheduler, alone, demand)
                    alone, demand = 0.0, [0.0] * PIPES
                continue
            if kind_of_entry is Jump:
                alone += branch - BRANCH_STALL
                continue
            if kind_of_entry is not Step:
                index, lanes = (entry, WARP) if type(entry) is int else (entry[0], entry[1].bit_count())
                cost = self.costs.get(index) or self._cost(index)
                if index != previous + 1 and previous >= 0:
                    alone += branch
                previous = index
                if pending:
                    until = max((time for bits, time in pending if bits & cost.uses), default=0.0)
                    if until > self.now:
                        alone, demand = yield from self._catch_up(
                            warp, place, (alone, demand), until, "memory", "memory"
                        )
                        pending = [one for one in pending if one[1] > self.now]
                done = 0.0
                for number, part in enumerate(cost.parts):
                    if number and done > self.now:
                        alone, demand = yield from self._catch_up(
                            warp, place, (alone, demand), done, "memory", "memory"
                        )
                    if part.loads or part.stores or part.additions:
                        if alone > FLUSH:
                            yield from self._run(warp, sm, scheduler, alone, demand)
                            alone, demand = 0.0, [0.0] * PIPES
                        until = server.lanes_wait(self.now)
                        if until > self.now:
                            yield from self._sleep(warp, until, "store", ("memory", warp, self.now))
                        if part.loads:
                            done = server.load(self.now + alone, part.loads * lanes, part.load_count)
                        if part.stores or part.additions:
                            server.store_by_lanes(
                                self.now + alone, part.stores * lanes, part.additions * lanes
                            )
                    alone += part.alone
                    for pipe in range(PIPES):
                        demand[pipe] += part.demand[pipe]
                if cost.filled:
                    pending.append((cost.filled, done))
                if alone > LONGEST_RUN:
                    yield from self._run(warp, sm, scheduler, alone, demand)
                    alone, demand = 0.0, [0.0] * PIPES
                continue
            previous = -2 if previous < 0 else previous + 1
            self.steps += 1
            action = self._action(entry)
            kind = action.kind
            alone += action.issue
            demand[Pipe.ISSUE] += min(action.issue, 1.0)
            if kind is not Kind.WGMMA:
                demand[Pipe.SHARED] += action.shared
            if not entry.lanes or (kind is Kind.PLAIN and not entry.signals):
                continue
            if alone > FLUSH or (kind in WAITS and alone):
                yield from self._run(warp, sm, scheduler, alone, demand)
                alone, demand = 0.0, [0.0] * PIPES
            at = self.now + alone
            if kind is Kind.SIGNAL or kind is Kind.BARRIER or kind is Kind.PLAIN:
                for number in entry.signals:
                    latency = action.latency
                    if action.reads:  # a barrier of threads: warps arrive one after the other
                        latency += chip.clocks("barrier_arrival") * self.trace.contributions[number]
                    self.push(at + latency, "signal", (self._event(number, copy), ("run", warp, at)))
                if kind is Kind.SIGNAL and entry.lanes < WARP:
                    alone += chip.clocks("arrive_hold")
                if kind is Kind.BARRIER and entry.waits is not None:
                    yield from self._wait(warp, self._event(entry.waits, copy), "barrier")
            elif kind is Kind.WAIT:
                event = None if entry.waits is None else self._event(entry.waits, copy)
                if event is not None and event.missing > 0:
                    yield from self._wait(warp, event, "mbarrier")
                    alone += chip.clocks("wait_woken")
                else:
                    alone += action.latency
            elif kind is Kind.WGMMA:
                if self.products.in_flight(warp) >= depth:
                    if alone:
                        yield from self._run(warp, sm, scheduler, alone, demand)
                        alone, demand = 0.0, [0.0] * PIPES
                    while self.products.in_flight(warp) >= depth:
                        yield from self._wait(warp, self.products.slot(warp), "tensor")
                self.products.issue(warp, (sm, scheduler), action, opened)
            elif kind is Kind.WGMMA_COMMIT:
                wgmma.append(opened)
                opened = Event(0)
            elif kind is Kind.WGMMA_WAIT:
                through = max(0, len(wgmma) - action.count)
                for group in wgmma[:through]:
                    yield from self._wait(warp, group, "tensor")
                del wgmma[:through]
            elif kind is Kind.LOAD:
                done = server.tma_load(at, entry.nbytes, entry.fresh, entry.about)
                for number in entry.signals:
                    self.push(done, "signal", (self._event(number, copy), ("tma", warp, at)))
            elif kind is Kind.STORE:
                read, written = server.tma_store(at, entry.nbytes, action.adds)
                bulk_open = max(bulk_open[0], read), max(bulk_open[1], written)
                for number in entry.signals:
                    self.push(written, "signal", (self._event(number, copy), ("tma", warp, at)))
            elif kind is Kind.STORE_COMMIT:
                bulk.append(bulk_open)
                bulk_open = (0.0, 0.0)
            elif kind is Kind.STORE_WAIT:
                which = 0 if action.reads else 1
                done = max((one[which] for one in bulk[: len(bulk) - action.count]), default=0.0)
                if done > self.now:
                    yield from self._sleep(warp, done, "store", ("tma", warp, self.now))
            elif kind is Kind.COPY:
                done = server.load(at, entry.nbytes, 1)
                copies_open = max(copies_open, done)
                for number in entry.signals:
                    self.push(done, "signal", (self._event(number, copy), ("memory", warp, at)))
            elif kind is Kind.COPY_COMMIT:
                copies.append(copies_open)
                copies_open = 0.0
            elif kind is Kind.COPY_WAIT:
                done = max(copies[: len(copies) - action.count], default=0.0)
                del copies[: max(0, len(copies) - action.count)]
                if done > self.now:
                    yield from self._sleep(warp, done, "memory", ("memory", warp, self.now))
            elif kind is Kind.TENSOR_MMA:
                server.tensor_mma(at, entry.about, entry.lanes)
            elif kind is Kind.TENSOR_COMMIT:
                done = server.tensor_commit(at)
                for number in entry.signals:
                    self.push(done, "signal", (self._event(number, copy), ("tensor", warp, at)))
            elif kind is Kind.TENSOR_COPY:
                server.tensor_copy(at, action.count)
            elif kind is Kind.TENSOR_TRANSFER:
                tensor_memory = max(
                    tensor_memory, server.tensor_transfer(scheduler, at, action.count, action.reads)
                )
            elif kind is Kind.TENSOR_WAIT:
                if tensor_memory > self.now:
                    yield from self._sleep(
                        warp, tensor_memory, "tensor memory", ("tensor memory", warp, self.now)
                    )
            elif kind is Kind.MEMORY and action.reads:
                done = server.load(at, action.count * entry.lanes, 1)
                if done > self.now:
                    yield from self._sleep(warp, done, "memory", ("memory", warp, self.now))
            elif kind is Kind.MEMORY and self.order is None:  # SASS has it among its code
                moved = action.count * entry.lanes
                server.store_by_lanes(at, 0 if action.adds else moved, moved if action.adds else 0)
        if alone:
            yield from self._run(warp, sm, scheduler, alone, demand)

    def _run(self, warp: int, sm: int, scheduler: int, alone: float, demand: list[float]) -> Iterator:
        start = self.now
        yield sm, scheduler, alone, demand
        if self.keep_spans:
            self.spans[warp].append(Span(start, self.now, "run"))

    def _catch_up(
        self, warp: int, place: tuple[int, int], gathered: tuple, until: float, unit: str, kind: str
    ) -> Iterator:
        """Run the gathered code, then sleep until a moment unless it has passed; returns what is gathered after it.

        place: (SM, scheduler). gathered: (clocks alone, demand). kind: of the sleep's cause.
        """
        alone, demand = gathered
        if alone:
            yield from self._run(warp, *place, alone, demand)
            gathered = 0.0, [0.0] * PIPES
        if until > self.now:
            yield from self._sleep(warp, until, unit, (kind, warp, self.now))
        return gathered

    def _sleep(self, warp: int, until: float, unit: str, cause: tuple[str, int, float]) -> Iterator:
        start = self.now
        yield float(until)
        if self.keep_spans:
            self.spans[warp].append(Span(start, self.now, unit, cause))

    def _wait(self, warp: int, event: Event, unit: str) -> Iterator:
        if event.missing > 0:
            start = self.now
            yield event
            if self.keep_spans:
                self.spans[warp].append(Span(start, self.now, unit, event.cause))


WAITS = {
    Kind.BARRIER,
    Kind.WAIT,
    Kind.WGMMA_WAIT,
    Kind.STORE_WAIT,
    Kind.COPY_WAIT,
    Kind.TENSOR_WAIT,
}
