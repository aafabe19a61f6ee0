"""Which instructions of a launch are executed and matter: without the others a kernel is as right as with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

from shared.mutant_classes import TELLING, group_of
from shared.mutant_launches import Launch
from warpspec.sim import runtime
from warpspec.sim.codegen.program import Program
from warpspec.sim.order.checker import OrderChecker

# Methods of the checker that tell what a warp does.
ACTS = ("generic", "issue", "arrive", "join_barrier", "tensor_transfer")


def decisive(launch: Launch, seeds: int) -> tuple[dict[int, int], dict[int, int]]:
    """(the instructions that are executed, those that matter) in runs under seeds 0, 1 and so on, each with the first
    of these seeds under which it is, or does.

    Executed: without waits on mbarriers that never wait for a phase (a producer's first passes on a fresh barrier).
    What matters: fences, warp barriers and waits that ever tell a thread what it did not know; of waits, those that the
    warp does something after (a load warp's last ones keep its CTA alive, and the checker sees what comes too late).
    Of wgmma.wait_group, those after which the warp writes or signals something before the next one that tells it
    something: products read shared memory only, and its registers are checked along all paths (`wgmma_registers`).
    """
    watch, executed, useful = Watch(launch.program), {}, {}
    with watch.watching(), mock.patch.dict(os.environ, {"WARPSPEC_SIM_PROCESSES": "1"}):
        for seed in range(seeds):
            launch.run(launch.program, seed)
            watch.ended()
            for found, first in zip(watch.result(), (executed, useful), strict=True):
                first.update(dict.fromkeys(found - first.keys(), seed))
    return executed, useful


class Watch:
    """What the order checker is told in runs of a program.

    waits: those on mbarriers that waited for a phase. useful: instructions that told their warp something. pending:
    warp -> waits that it has done nothing after. products: warp -> its last wgmma.wait_group, if it has written and
    signalled nothing since.
    """

    def __init__(self, program: Program):
        self.program = program
        self.executed = np.zeros(len(program.blocks) + 1, np.uint64)  # by block
        self.waits: set[int] = set()
        self.useful: set[int] = set()
        self.pending: dict[object, set[int]] = {}
        self.products: dict[object, int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, the simulator's runs are those of the program."""
        telling = ("fence", "grid_dependency", "tensor_fence")
        with (
            mock.patch.object(runtime, "count_instructions", self._counted(runtime.count_instructions)),
            mock.patch.multiple(
                OrderChecker,
                waited=self._waited(OrderChecker.waited),
                passed_queue=staticmethod(self._passed_queue(OrderChecker.passed_queue)),
                warp_barrier=self._met(OrderChecker.warp_barrier),
                **{name: self._told(getattr(OrderChecker, name)) for name in telling},
                **{name: self._acted(getattr(OrderChecker, name)) for name in ACTS},
            ),
        ):
            yield

    def ended(self) -> None:
        """A run has ended."""
        self.useful.update(self.products.values())
        self.products.clear()

    def result(self) -> tuple[set[int], set[int]]:
        """(the instructions that are executed, those that matter) so far."""
        blocks, instrs = self.program.blocks, self.program.kernel.instrs
        executed = {b.start for b in blocks if self.executed[b.index] and self.program.system[b.index]}
        groups = {i: group_of(instrs[i]) for i in executed}
        executed = {i for i in executed if groups[i] != "mbarrier wait" or i in self.waits}
        telling = {
            i
            for i in executed
            if groups[i] in (*TELLING, "mbarrier wait") or instrs[i].opcode.startswith("wgmma.wait_group")
        }
        return executed, executed - telling | self.useful & executed

    def _counted(self, count: Callable) -> Callable:
        def call(program, stats):
            for counts in stats.block_counts.values():
                self.executed[:] += counts
            return count(program, stats)

        return call

    def _waited(self, waited: Callable) -> Callable:
        def call(order, w, ins, barrier, complete):
            before, foreign = w.order.rows.copy(), w.order.foreign
            waited(order, w, ins, barrier, complete)
            if barrier.order.done is not None and complete:
                self.waits.add(ins.index)
                if _differs(w.order, before, foreign):
                    self.pending.setdefault(w, set()).add(ins.index)

        return call

    def _passed_queue(self, passed_queue: Callable) -> Callable:
        def call(w, ins, *arguments):
            self.products[w] = ins.index
            return passed_queue(w, ins, *arguments)

        return call

    def _acted(self, method: Callable) -> Callable:
        def call(order, w, *arguments, **options):
            self.useful.update(self.pending.pop(w, ()))
            if w in self.products and _conflicts(method.__name__, *arguments):
                self.useful.add(self.products.pop(w))
            return method(order, w, *arguments, **options)

        return call

    def _told(self, method: Callable) -> Callable:
        def call(order, w, ins, *arguments):
            before, foreign = w.order.rows.copy(), w.order.foreign
            method(order, w, ins, *arguments)
            if _differs(w.order, before, foreign):
                self.useful.add(ins.index)

        return call

    def _met(self, warp_barrier: Callable) -> Callable:
        def call(order, w, ins):
            if w.order.loose:
                self.useful.add(ins.index)
            warp_barrier(order, w, ins)

        return call


def _conflicts(name: str, what, *arguments) -> bool:
    """Whether what a warp does (a method in `ACTS`) may conflict with products' reads, or signals others. what: the
    instruction, or a barrier."""
    if name == "generic":
        return arguments[0]
    return name == "join_barrier" or not what.opcode.startswith("wgmma.")


def _differs(clock, rows: np.ndarray, foreign: dict) -> bool:
    """Whether a clock says more than these rows and other clusters' clocks."""
    return clock.rows.shape != rows.shape or bool((clock.rows != rows).any()) or clock.foreign is not foreign
