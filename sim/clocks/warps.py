"""One warp of a replay: what it gathers of its trace as code, where it waits, and what it asks of its SM's units.

A warp is an iterator that yields a time to sleep until, an event to wait for, or code to run: (SM, scheduler, clocks
alone, demand of pipes).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warpspec.sim.clocks.actions import Action, Kind
from warpspec.sim.clocks.costs import PIPES, Pipe
from warpspec.sim.clocks.products import Event
from warpspec.sim.clocks.sass_blocks import Chunk
from warpspec.sim.clocks.sass_order import Jump, Moved
from warpspec.sim.clocks.trace import Step

WARP = 32
SCOREBOARDS = 6
CHUNK = 24.0  # clocks of SASS that run as one piece
BRANCH_STALL = 5.0  # clocks of a branch that its control word gives
FLUSH = 12.0  # clocks of native code that may be deferred to a later wait without moving issues in between
LONGEST_RUN = 4000.0  # clocks after which native code is cut, so that concurrent code is seen
WAITS = {
    Kind.BARRIER,
    Kind.WAIT,
    Kind.WGMMA_WAIT,
    Kind.STORE_WAIT,
    Kind.COPY_WAIT,
    Kind.TENSOR_WAIT,
}


@dataclass(slots=True)
class Span:
    """A stretch of a warp's time. unit: what the warp waited for, or "run". cause: who released it.

    cause: (unit that worked, number of the warp that issued its work, time of issue), or None.
    """

    start: float
    end: float
    unit: str
    cause: tuple[str, int, float] | None = None


class WarpReplay:
    """A warp. number: among the replay's. place: (SM, scheduler). copy: number of its cluster, which has own events.

    alone, demand: the code gathered since it last ran any: its clocks alone, and those of each pipe.
    """

    def __init__(self, replay, number: int, place: tuple[int, int], copy: int):
        self.replay, self.number, self.place, self.copy = replay, number, place, copy
        self.server = replay.sms[place[0]]
        chip = replay.chip
        self.branch = chip.clocks("branch")
        self.depth = chip.clocks("wgmma_depth") if chip.has("wgmma_depth") else 0
        self.fetches = self.server.fetches
        self.alone, self.demand = 0.0, [0.0] * PIPES
        self.pending: list[tuple[int, float]] = []  # (registers, when loads fill them)
        self.groups: list[Event] = []  # the ends of committed groups of wgmma
        self.opened = Event(0)  # the group that is not committed yet
        self.bulk: list[tuple[float, float]] = []  # (source read, all done) of committed groups of stores
        self.bulk_open = (0.0, 0.0)
        self.copies: list[float] = []  # when committed groups of cp.async are done
        self.copies_open = 0.0
        self.tensor_memory = 0.0  # when its accesses of tensor memory are done
        self.boards = [0.0] * SCOREBOARDS  # when each one's loads are done
        self.previous = -2  # block of native code before
        self.code_read: set[int] = set()  # lines of code that it has run

    def run(self, entries) -> Iterator:
        """Replay the warp's trace from its first entry to its last. Yields what the warp waits for (``Replay.run``)."""
        for entry in entries:
            kind = type(entry)
            if kind is Chunk or kind is Moved:
                waiting = self._sass(entry)
            elif kind is Jump:
                self.alone += self.branch - BRANCH_STALL
                continue
            elif kind is Step:
                waiting = self._step(entry)
            else:
                waiting = self._native(entry)
            yield from waiting
        yield from self._flush()

    # ---- code ----------------------------------------------------------------------------------------------------

    def _flush(self) -> Iterator:
        """Run what is gathered."""
        alone, demand = self.alone, self.demand
        if alone:
            self.alone, self.demand = 0.0, [0.0] * PIPES
            replay = self.replay
            start = replay.now
            yield (*self.place, alone, demand)
            if replay.keep_spans:
                replay.spans[self.number].append(Span(start, replay.now, "run"))

    def _catch_up(self, until: float, unit: str, kind: str) -> Iterator:
        """Run what is gathered, then sleep until a moment unless it has passed. kind: of the sleep's cause."""
        yield from self._flush()
        if until > self.replay.now:
            yield from self._sleep(until, unit, kind)

    def _gather(self, alone: float, demand) -> None:
        self.alone += alone
        mine = self.demand
        for pipe in range(PIPES):
            mine[pipe] += demand[pipe]

    def _sass(self, entry: Chunk | Moved) -> Iterator:
        """SASS, which may access global memory at its end."""
        replay, server = self.replay, self.server
        moves = type(entry) is Moved
        chunk = entry.chunk if moves else entry
        if self.fetches and chunk.count and chunk.last not in self.code_read:
            now = replay.now + self.alone
            until = server.fetch(now, chunk.first, chunk.last)
            if until > now:
                yield from self._catch_up(until, "code", "code")
            self.code_read.add(chunk.last)
        if chunk.waits:
            until = max(self.boards[b] for b in range(SCOREBOARDS) if chunk.waits >> b & 1)
            if until > replay.now + self.alone:
                yield from self._catch_up(until, "memory", "memory")
        if chunk.demand[Pipe.SHARED]:
            now = replay.now + self.alone
            until = server.lanes_wait(now)
            if until > now:
                yield from self._catch_up(until, "store", "memory")
        self._gather(chunk.alone, chunk.demand)
        if moves:
            self._move(entry)
        if self.alone > CHUNK:
            yield from self._flush()

    def _move(self, moved: Moved) -> None:
        """The accesses of global memory of SASS."""
        server, boards = self.server, self.boards
        at = self.replay.now + self.alone
        for nbytes, board, near in moved.loads:
            if nbytes:
                done = server.load(at, nbytes, near)
                if board < SCOREBOARDS:
                    boards[board] = max(boards[board], done)
        if moved.stored or moved.added:
            server.store_by_lanes(at, moved.stored, moved.added)

    def _native(self, entry: int | tuple[int, int]) -> Iterator:
        """A block of PTX."""
        replay = self.replay
        index, lanes = (entry, WARP) if type(entry) is int else (entry[0], entry[1].bit_count())
        cost = replay.cost(index)
        if index != self.previous + 1 and self.previous >= 0:
            self.alone += self.branch
        self.previous = index
        if self.pending:
            until = max((time for bits, time in self.pending if bits & cost.uses), default=0.0)
            if until > replay.now:
                yield from self._catch_up(until, "memory", "memory")
                self.pending = [one for one in self.pending if one[1] > replay.now]
        done = 0.0
        for number, part in enumerate(cost.parts):
            if number and done > replay.now:
                yield from self._catch_up(done, "memory", "memory")
            if part.loads or part.stores or part.additions:
                done = yield from self._access(part, lanes, done)
            self._gather(part.alone, part.demand)
        if cost.filled:
            self.pending.append((cost.filled, done))
        if self.alone > LONGEST_RUN:
            yield from self._flush()

    def _access(self, part, lanes: int, done: float) -> Iterator:
        """The accesses of global memory of a part of a block; returns when its loads are done. done: those before."""
        replay, server = self.replay, self.server
        if self.alone > FLUSH:
            yield from self._flush()
        until = server.lanes_wait(replay.now)
        if until > replay.now:
            yield from self._sleep(until, "store", "memory")
        at = replay.now + self.alone
        if part.loads:
            done = server.load(at, part.loads * lanes)
        if part.stores or part.additions:
            server.store_by_lanes(at, part.stores * lanes, part.additions * lanes)
        return done

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> Iterator:
        replay = self.replay
        self.previous = -2 if self.previous < 0 else self.previous + 1
        replay.steps += 1
        action = replay.action(step)
        kind = action.kind
        self.alone += action.issue
        self.demand[Pipe.ISSUE] += min(action.issue, 1.0)
        if kind is not Kind.WGMMA:
            self.demand[Pipe.SHARED] += action.shared
        if not step.lanes or (kind is Kind.PLAIN and not step.signals):
            return
        if self.alone > FLUSH or (kind in WAITS and self.alone):
            yield from self._flush()
        waiting = HANDLERS[kind](self, step, action, replay.now + self.alone)
        if waiting is not None:
            yield from waiting

    def _signals(self, step: Step, at: float, cause: tuple[str, int, float]) -> None:
        """The step's events get its contribution at a time."""
        replay = self.replay
        for number in step.signals:
            replay.push(at, "signal", (replay.event(number, self.copy), cause))

    def _plain(self, step: Step, action: Action, at: float) -> None:
        for number in step.signals:
            latency = action.latency
            if action.reads:  # a barrier of threads: warps arrive one after the other
                latency += (
                    self.replay.chip.clocks("barrier_arrival") * self.replay.trace.contributions[number]
                )
            event = self.replay.event(number, self.copy)
            self.replay.push(at + latency, "signal", (event, ("run", self.number, at)))

    def _signal(self, step: Step, action: Action, at: float) -> None:
        self._plain(step, action, at)
        if step.lanes < WARP:
            self.alone += self.replay.chip.clocks("arrive_hold")

    def _barrier(self, step: Step, action: Action, at: float) -> Iterator | None:
        self._plain(step, action, at)
        return None if step.waits is None else self._wait(self.replay.event(step.waits, self.copy), "barrier")

    def _await(self, step: Step, action: Action, at: float) -> Iterator | None:
        event = None if step.waits is None else self.replay.event(step.waits, self.copy)
        if event is None or event.missing <= 0:
            self.alone += action.latency
            return None
        return self._woken(event)

    def _woken(self, event: Event) -> Iterator:
        yield from self._wait(event, "mbarrier")
        self.alone += self.replay.chip.clocks("wait_woken")

    def _wgmma(self, step: Step, action: Action, at: float) -> Iterator:
        products = self.replay.products
        if products.in_flight(self.number) >= self.depth:
            yield from self._flush()
            while products.in_flight(self.number) >= self.depth:
                yield from self._wait(products.slot(self.number), "tensor")
        products.issue(self.number, self.place, action, self.opened)

    def _wgmma_commit(self, step: Step, action: Action, at: float) -> None:
        self.groups.append(self.opened)
        self.opened = Event(0)

    def _wgmma_wait(self, step: Step, action: Action, at: float) -> Iterator:
        through = max(0, len(self.groups) - action.count)
        for group in self.groups[:through]:
            yield from self._wait(group, "tensor")
        del self.groups[:through]

    def _load(self, step: Step, action: Action, at: float) -> None:
        done = self.server.tma_load(at, step.nbytes, step.fresh, step.about)
        self._signals(step, done, ("tma", self.number, at))

    def _store(self, step: Step, action: Action, at: float) -> None:
        read, written = self.server.tma_store(at, step.nbytes, action.adds)
        self.bulk_open = max(self.bulk_open[0], read), max(self.bulk_open[1], written)
        self._signals(step, written, ("tma", self.number, at))

    def _store_commit(self, step: Step, action: Action, at: float) -> None:
        self.bulk.append(self.bulk_open)
        self.bulk_open = (0.0, 0.0)

    def _store_wait(self, step: Step, action: Action, at: float) -> Iterator | None:
        which = 0 if action.reads else 1
        done = max((one[which] for one in self.bulk[: len(self.bulk) - action.count]), default=0.0)
        return self._sleep(done, "store", "tma") if done > self.replay.now else None

    def _copy(self, step: Step, action: Action, at: float) -> None:
        done = self.server.load(at, step.nbytes)
        self.copies_open = max(self.copies_open, done)
        self._signals(step, done, ("memory", self.number, at))

    def _copy_commit(self, step: Step, action: Action, at: float) -> None:
        self.copies.append(self.copies_open)
        self.copies_open = 0.0

    def _copy_wait(self, step: Step, action: Action, at: float) -> Iterator | None:
        through = max(0, len(self.copies) - action.count)
        done = max(self.copies[: len(self.copies) - action.count], default=0.0)
        del self.copies[:through]
        return self._sleep(done, "memory", "memory") if done > self.replay.now else None

    def _tensor_mma(self, step: Step, action: Action, at: float) -> None:
        self.server.tensor_mma(at, step.about, step.lanes)

    def _tensor_commit(self, step: Step, action: Action, at: float) -> None:
        self._signals(step, self.server.tensor_commit(at), ("tensor", self.number, at))

    def _tensor_copy(self, step: Step, action: Action, at: float) -> None:
        self.server.tensor_copy(at)

    def _tensor_transfer(self, step: Step, action: Action, at: float) -> None:
        done = self.server.tensor_transfer(self.place[1], at, action.count, action.reads)
        self.tensor_memory = max(self.tensor_memory, done)

    def _tensor_wait(self, step: Step, action: Action, at: float) -> Iterator | None:
        if self.tensor_memory <= self.replay.now:
            return None
        return self._sleep(self.tensor_memory, "tensor memory", "tensor memory")

    def _memory(self, step: Step, action: Action, at: float) -> Iterator | None:
        moved = action.count * step.lanes
        if action.reads:
            done = self.server.load(at, moved)
            return self._sleep(done, "memory", "memory") if done > self.replay.now else None
        if self.replay.order is None:  # SASS has it among its code
            self.server.store_by_lanes(at, 0 if action.adds else moved, moved if action.adds else 0)
        return None

    # ---- waiting -------------------------------------------------------------------------------------------------

    def _sleep(self, until: float, unit: str, kind: str) -> Iterator:
        replay = self.replay
        start = replay.now
        yield float(until)
        if replay.keep_spans:
            replay.spans[self.number].append(Span(start, replay.now, unit, (kind, self.number, start)))

    def _wait(self, event: Event, unit: str) -> Iterator:
        if event.missing > 0:
            replay = self.replay
            start = replay.now
            yield event
            if replay.keep_spans:
                replay.spans[self.number].append(Span(start, replay.now, unit, event.cause))


HANDLERS = {
    Kind.PLAIN: WarpReplay._plain,
    Kind.SIGNAL: WarpReplay._signal,
    Kind.BARRIER: WarpReplay._barrier,
    Kind.WAIT: WarpReplay._await,
    Kind.WGMMA: WarpReplay._wgmma,
    Kind.WGMMA_COMMIT: WarpReplay._wgmma_commit,
    Kind.WGMMA_WAIT: WarpReplay._wgmma_wait,
    Kind.LOAD: WarpReplay._load,
    Kind.STORE: WarpReplay._store,
    Kind.STORE_COMMIT: WarpReplay._store_commit,
    Kind.STORE_WAIT: WarpReplay._store_wait,
    Kind.COPY: WarpReplay._copy,
    Kind.COPY_COMMIT: WarpReplay._copy_commit,
    Kind.COPY_WAIT: WarpReplay._copy_wait,
    Kind.TENSOR_MMA: WarpReplay._tensor_mma,
    Kind.TENSOR_COMMIT: WarpReplay._tensor_commit,
    Kind.TENSOR_COPY: WarpReplay._tensor_copy,
    Kind.TENSOR_TRANSFER: WarpReplay._tensor_transfer,
    Kind.TENSOR_WAIT: WarpReplay._tensor_wait,
    Kind.MEMORY: WarpReplay._memory,
}
"""What a step does, by kind: a function of the warp, the step, its action and when it is issued; it returns an iterator
where the warp may wait."""
