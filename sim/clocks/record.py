"""Records the trace of a functional run, from which `replay` predicts its time.

`with recording():` makes every launch inside run some of its clusters only (`sample` of them, spread evenly over the
grid) and keep their traces. The other clusters' results are missing: this is the price of predicting a large grid in
seconds. `recording(sample=None)` runs and records all. A cluster that waits until another has announced something in
global memory does not wait for one that does not run (`Absent`); other ways of waiting deadlock. One that takes work
from a queue takes a share of it, as if the others took as much.

The machine calls a `Recorder` at every block and system instruction of a recorded warp, when asynchronous work is
issued and takes effect, and when something arrives at an mbarrier.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from warpspec.sim import tma
from warpspec.sim.cfg import ATOMICS, unread
from warpspec.sim.clocks.costs import memory_bytes
from warpspec.sim.clocks.trace import CtaTrace, LaunchTrace, Step
from warpspec.sim.codegen.program import Program
from warpspec.sim.errors import SimError
from warpspec.sim.instruction import Instr, Mem
from warpspec.sim.lanes import FULL_MASK, lanes
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.tcgen05 import instruction_descriptor

SAMPLE = 6  # default number of clusters recorded per launch
ENOUGH = 60_000  # steps of a launch's trace after which a sample's other steps are only counted
TWICE = 2
RANK_SHIFT, OFFSET_MASK = 24, (1 << 24) - 1  # a shared::cluster address has the CTA rank above the offset


@dataclass(frozen=True)
class Recording:
    """The options of `recording`."""

    sample: int | None


_active: Recording | None = None


def active() -> Recording | None:
    """The options of the recording that is active; None: none is."""
    return _active


def times() -> bool:
    """Whether current runs are recorded to predict their time."""
    return _active is not None


@contextmanager
def recording(sample: int | None = SAMPLE) -> Iterator[None]:
    """Context in which runs keep traces, so that their report has `clocks`.

    sample: how many clusters of each launch are recorded (and, if clusters are independent, executed); where their
    traces are long, the last ends after `ENOUGH` steps, and what follows is only counted: wgmma no longer multiplies.
    None: all. Raises ValueError unless it is None or a positive int.
    """
    global _active
    if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int) or sample < 1):
        raise ValueError(f"sample is {sample!r}; a positive int or None is needed")
    before, _active = _active, Recording(sample)
    try:
        yield
    finally:
        _active = before


_captured: list[list[LaunchTrace]] = []


@contextmanager
def captured() -> Iterator[list[LaunchTrace]]:
    """Context that collects the traces of all launches inside, in order."""
    traces: list[LaunchTrace] = []
    _captured.append(traces)
    try:
        yield traces
    finally:
        _captured.remove(traces)


def captures() -> bool:
    """Whether a context collects traces."""
    return bool(_captured)


def chosen_clusters(total: int, sample: int | None) -> list[int]:
    """Numbers of the clusters to record: the first, the last, and others evenly between.

    They are in an order of which every beginning is spread over the grid, unless they are the whole grid.
    """
    if sample is None or total <= sample:
        return list(range(total))
    if sample == 1:
        return [0]
    evenly = sorted({round(i * (total - 1) / (sample - 1)) for i in range(sample)})
    order, gap = [evenly[0], evenly[-1]], len(evenly)
    while gap > 1:
        gap = -(-gap // 2)
        order += evenly[gap::gap]
    return list(dict.fromkeys(order))


def takers(program: Program) -> dict[int, Instr]:
    """Instructions that may take a number from a counter in global memory, by their block of native code."""
    unused = unread(program.kernel)
    return _atomics(program, lambda position: position not in unused)


def _atomics(program: Program, wanted: Callable[[int], bool]) -> dict[int, Instr]:
    """Additions of integers to global memory whose positions are wanted, by their block of native code."""
    found = {}
    for block in program.blocks:
        for position in range(block.start, block.end):
            ins = program.kernel.instrs[position]
            parts = ins.parts
            if (
                parts[0] in ATOMICS
                and {"global", "add"} <= set(parts)
                and parts[-1] in ("u32", "s32", "u64", "s64")
                and wanted(position)
            ):
                found[block.index] = ins
    return found


class Absent:
    """What the CTAs outside of a sample would have announced to those that wait for it.

    A CTA announces by an addition to a counter in global memory whose result it does not use, and others read the
    counter again and again until they find it there (`fmha.sm90.add_up`). A counter that a warp reads for the second
    time without a change gets 1 more, as if the CTA that it waits for had just announced.
    """

    def __init__(self, program: Program, ctas: int):
        self.announcers = _atomics(program, unread(program.kernel).__contains__)
        self.polls = {}
        self._limit = ctas  # how many a counter is given; who then still waits, waits for something else
        self._given: Counter = Counter()
        self._seen: dict[tuple, int] = {}  # by (CTA, warp, address)
        if self.announcers:
            for block in program.blocks:
                for ins in program.kernel.instrs[block.start : block.end]:
                    if ins.parts[0] == "ld" and {"global", "acquire"} <= set(ins.parts):
                        self.polls[block.index] = ins

    def polled(self, key: tuple, address: int, counter: np.ndarray) -> None:
        """A warp has read a counter. key: (CTA, warp). counter: [1], its value."""
        value, key = int(counter[0]), (*key, address)
        if self._seen.get(key) != value:
            self._seen[key] = value
        elif self._given[address] < self._limit:
            self._given[address] += 1
            counter += counter.dtype.type(1)


def _allowed(w, ins: Instr, mask: int) -> int:
    """The lanes of a mask in which an instruction's guard lets it execute."""
    if ins.guard is None:
        return mask
    allowed = w.pred(ins.guard)
    return mask & (~allowed if ins.guard_negated else allowed)


class Recorder:
    """Traces one launch. clusters: numbers of the clusters that run and are recorded, in order. whole: they are the
    whole grid, all of which must run. memory: the global memory, where tensor maps are read.
    """

    def __init__(self, trace: LaunchTrace, clusters: Sequence[int], memory: GlobalMemory, whole: bool = True):
        self.trace, self.memory, self.whole = trace, memory, whole
        self._tensors: dict[int, tuple[int, int] | None] = {}  # by the address of a tensor map
        self.steps = 0
        self.enough = False  # steps are only counted
        self._live: list[tuple[object, CtaTrace]] = []  # CTAs that run
        self._system = np.array(trace.program.system, bool)
        for traces in _captured:
            traces.append(trace)
        self.clusters = frozenset(clusters)
        self.order = list(clusters)
        self.step: Step | None = None  # step of the current instruction or asynchronous operation
        self._open: dict[object, Step] = {}  # steps of lanes that wait
        self._events: dict[tuple[object, int], int] = {}
        self._moved: set[tuple] = set()
        self._takers = {} if whole else takers(trace.program)
        self._absent = None if whole else Absent(trace.program, trace.grid_ctas)
        self._takes: Counter = Counter()  # numbers taken, by (CTA, warp, address of the counter)
        self._counters: dict[int, np.ndarray] = {}  # value of each before the launch, by address

    # ---- called by the machine ---------------------------------------------------------------------------------

    def following(self) -> Iterator[int]:
        """Numbers of the clusters to run, until there is enough of a trace."""
        for number in self.order:
            if self.enough:
                return
            yield number

    def admit(self, cluster) -> None:
        """A cluster becomes resident: its warps get a trace if it is one of those to record."""
        if cluster.number not in self.clusters:
            return
        for cta in cluster.ctas:
            one = CtaTrace(cta.number, cta.coords, cluster.number, cta.rank)
            for w in cta.warps:
                w.trace = []
                one.warps.append(w.trace)
            self.trace.ctas.append(one)
            self._live.append((cta, one))

    def retire(self, cluster) -> None:
        """A cluster has ended: its steps are counted."""
        for cta, one in [pair for pair in self._live if pair[0].cluster is cluster]:
            self._live.remove((cta, one))
            if one.uncounted is not None:
                one.more_steps = self._executed(cta) - one.uncounted

    def _executed(self, cta) -> int:
        """Steps that the CTA's warps, and those before them in their places, have executed."""
        return sum(int(np.asarray(w.executed)[: len(self._system)][self._system].sum()) for w in cta.warps)

    def _stop(self, now) -> None:
        """Stop recording steps and only count them. now: the warp that has just recorded a step, which is not counted
        yet."""
        self.enough = True
        for cta, one in self._live:
            one.uncounted = self._executed(cta) + (cta is now.cta)
            for w in cta.warps:
                w.trace = None

    def native(self, w, block: int, mask: int) -> None:
        """A warp has executed a block of native code."""
        if w.trace is not None:
            w.trace.append(block if mask == FULL_MASK else (block, mask))
        if block in self._takers:
            self._take(w, self._takers[block], mask)
        if self._absent is not None:
            self._announced(w, block, mask)

    @property
    def watches(self) -> bool:
        """Whether the blocks of CTAs without a trace matter, too: they take work from a queue, or wait for others."""
        return self.trace.stride > 0 or (self._absent is not None and bool(self._absent.polls))

    def _take(self, w, ins: Instr, mask: int) -> None:
        """A warp may have taken a number from a queue's counter: the CTAs that do not run take one each, too.

        A counter is one to which a lane adds 1 alone, again and again. The launch's end restores it.
        """
        mask = _allowed(w, ins, mask)
        if mask.bit_count() != 1 or w.scalar(ins.operands[2], mask) != 1:
            return
        address, nbytes = w.address_scalar(ins.operands[1], mask), memory_bytes(ins)
        counter = self.memory.view(address, nbytes).view(f"u{nbytes}")
        self._counters.setdefault(address, counter - counter.dtype.type(1))
        key = (w.cta.number, w.index, address)
        self._takes[key] += 1
        taken = self._takes[key]
        if taken > 1:
            trace = self.trace
            trace.stride = trace.grid_ctas // trace.cluster_ctas
            counter += counter.dtype.type((trace.stride - 1) * (2 if taken == TWICE else 1))

    def _announced(self, w, block: int, mask: int) -> None:
        """A warp may have announced something in a counter, or looked whether another has. The launch's end restores
        the counters."""
        ins, polls = self._absent.announcers.get(block), False
        if ins is None:
            ins, polls = self._absent.polls.get(block), True
        if ins is None or not self._absent.polls:
            return
        mask, place = _allowed(w, ins, mask), ins.operands[-1 if polls else -2]
        nbytes = memory_bytes(ins)
        for lane in lanes(mask):
            address = w.address_scalar(place, 1 << lane)
            counter = self.memory.view(address, nbytes).view(f"u{nbytes}")
            added = 0 if polls else w.scalar(ins.operands[-1], 1 << lane)
            self._counters.setdefault(address, counter - np.array(added).astype(counter.dtype))
            if polls:
                self._absent.polled((w.cta.number, w.index), address, counter)

    def restore(self) -> None:
        """Give counters the values that they had before the launch."""
        for address, value in self._counters.items():
            self.memory.view(address, value.nbytes).view(value.dtype)[:] = value

    def begin(self, w, group, ins: Instr, mask: int) -> None:
        """A warp is about to execute a system instruction, possibly again after a wait."""
        step = self._open.get(group)
        if step is None:
            step = Step(ins, mask.bit_count())
            if mask:
                self._describe(step, w, ins, mask)
        self.step = step

    def end(self, w, group) -> None:
        """A warp has executed the instruction that it began, or will only wait before it goes on."""
        step, self.step = self.step, None
        self._open.pop(group, None)
        if step.waits is None and step.lanes:
            self._find_wait(step, w)
        if w.trace is not None:
            w.trace.append(step)
            self.steps += 1
            if self.steps == ENOUGH and not self.whole:
                self._stop(w)

    def wait(self, group) -> None:
        """The instruction waits and will be executed again."""
        self._open[group] = self.step
        self.step = None

    def issued(self, op) -> None:
        """Asynchronous work was issued, by an instruction or by other such work."""
        op.step = self.step

    def signal(self, barrier, nbytes: int = 0) -> None:
        """The current instruction or operation contributes to the current phase of an mbarrier."""
        if self.step is not None:
            self._contribute(barrier, barrier.phase)
            self.step.nbytes += nbytes

    def moved(self, nbytes: int) -> None:
        """The current operation has written global memory."""
        if self.step is not None:
            self.step.nbytes += nbytes

    # ---- what steps are about ----------------------------------------------------------------------------------

    def _contribute(self, what: object, phase: int) -> int:
        event = self._event(what, phase)
        self.step.signals.append(event)
        self.trace.contributions[event] += 1
        return event

    def _event(self, what: object, phase: int) -> int:
        event = self._events.get((what, phase))
        if event is None:
            event = self._events[what, phase] = len(self.trace.contributions)
            self.trace.contributions.append(0)
        return event

    def _describe(self, step: Step, w, ins: Instr, mask: int) -> None:
        parts = ins.parts
        self.step = step
        if parts[0] in ("bar", "barrier"):
            self._barrier(step, w, ins, mask)
        elif parts[0] == "cp" and "tensor" in parts:
            memory = (
                ins.operands[0]
                if type(ins.operands[0]) is Mem and ins.operands[0].coords
                else ins.operands[1]
            )
            lane = mask & -mask
            coords = tuple(w.scalar(item, lane) & 0xFFFFFFFF for item in memory.coords or ())
            address = w.address_scalar(memory, lane)
            self._touch(step, (address, coords))
            step.about = self._tensor(address)
        elif parts[:2] == ("cp", "async") and parts[2] in ("ca", "cg"):
            lane = mask & -mask
            self._touch(step, (w.address_scalar(ins.operands[1], lane),))
            step.nbytes = w.scalar(ins.operands[2], mask) * step.lanes
        elif parts[:3] == ("cp", "async", "bulk") and len(ins.operands) > 2:
            lane = mask & -mask
            self._touch(step, (w.address_scalar(ins.operands[1], lane),))
        elif parts[:2] == ("tcgen05", "mma"):
            self._tensor_mma(step, w, ins, mask)

    def _tensor(self, address: int) -> tuple[int, int] | None:
        """(Address, bytes) of the tensor of a map, dimensions of stride 0 left out; None if there is no map."""
        if address not in self._tensors:
            try:
                found = tma.decode(self.memory.view(address, tma.DESCRIPTOR_BYTES))
            except SimError:  # the instruction will say so
                return None
            dims = [
                found.dims[0],
                *(n for n, stride in zip(found.dims[1:], found.strides, strict=False) if stride),
            ]
            self._tensors[address] = found.address, math.prod(dims) * found.element.bits // 8
        return self._tensors[address]

    def _touch(self, step: Step, key: tuple) -> None:
        step.fresh = key not in self._moved
        self._moved.add(key)

    def _barrier(self, step: Step, w, ins: Instr, mask: int) -> None:
        parts = ins.parts
        if "warp" in parts:
            return
        if "cluster" in parts:
            state = w.cta.cluster
            phase = 0 if state.barrier is None else state.barrier.phase
            if "arrive" in parts:
                self._contribute(state, phase)
            else:
                arrived = w.state.get("cluster_arrived")
                step.waits = None if arrived is None else self._event(state, arrived)
            return
        first = 1 if "red" in parts else 0
        number = w.scalar(ins.operands[first], mask)
        barrier = w.cta.named_barriers.get(number)
        event = self._contribute((w.cta, number), 0 if barrier is None else barrier.generation)
        if "arrive" not in parts:
            step.waits = event

    def _tensor_mma(self, step: Step, w, ins: Instr, mask: int) -> None:
        kind = next((part[len("kind::") :] for part in ins.parts if part.startswith("kind::")), "")
        group = 2 if "cta_group::2" in ins.parts else 1
        sparse = "sp" in ins.parts
        bits = w.scalar(ins.operands[3 + sparse], mask & -mask) & 0xFFFFFFFF
        found = instruction_descriptor.decode(bits, kind, group, "ws" in ins.parts, sparse)
        step.about = (found.m, found.n, kind, group, type(ins.operands[1]) is Mem)

    def _find_wait(self, step: Step, w) -> None:
        """The event that an mbarrier.try_wait or test_wait has waited for: the last phase that is complete."""
        parts = step.ins.parts
        if parts[0] != "mbarrier" or parts[1] not in ("try_wait", "test_wait"):
            return
        if not w.pred(step.ins.operands[0]):
            return
        mask = w.current.mask
        address = w.address_scalar(step.ins.operands[1], mask & -mask) & 0xFFFFFFFF
        cta = w.cta.cluster.ctas[address >> RANK_SHIFT & 0xFF]
        barrier = cta.mbarriers.get(address & OFFSET_MASK)
        if barrier is not None and barrier.phase:
            step.waits = self._events.get((barrier, barrier.phase - 1))
