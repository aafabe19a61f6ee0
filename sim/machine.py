"""The machine: runs one launch by interleaving warps and asynchronous operations in an order drawn from a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable

import numpy as np

from warpspec.sim import convergence, diagnosis
from warpspec.sim.codegen.layout import BUDGET_BIT, HOOKED_BIT, START_BIT, Ctx, Stop
from warpspec.sim.codegen.program import Program
from warpspec.sim.errors import Deadlock, MemoryFault, TmemFault, Where
from warpspec.sim.grid import ClusterFactory, Launch
from warpspec.sim.instruction import Instr
from warpspec.sim.memory import CTA_RANK_SHIFT, SHARED_BASE_OFFSET, GlobalMemory
from warpspec.sim.operation import Op, Wait
from warpspec.sim.reductions import Reductions, SeenReductions
from warpspec.sim.registry import Opcode, find, unsupported
from warpspec.sim.report import LaunchStats
from warpspec.sim.spinning import SpinWatch
from warpspec.sim.starving import Starving
from warpspec.sim.tma import reduction
from warpspec.sim.warp import Cluster, Cta, Group, Warp

BLOCK_BUDGET = 64  # native blocks a warp runs before the scheduler switches
DIVERGED_TURNS = 4  # consecutive turns of a diverged warp from which on it is watched
LAG_TURNS = 32  # turns of a diverged warp after which a random group goes first though none seems to spin
SYSTEM_QUOTA = 8  # most system instructions a warp executes in one turn
FIRST_CLUSTERS = 2  # clusters resident at first; more are admitted when all of these are stuck
PATIENCE = 200  # turns without any event after which clusters are admitted or bounded waits return
TIMEOUT_CHANCE = 1 / 32  # chance that a wait which the hardware bounds in time gives up instead of waiting
STUCK_ROUNDS = 3  # retries of timed-out waits without any event before it is a deadlock
PYTHON, BUDGET, DIVERGED, EXIT = (int(why) for why in (Stop.PYTHON, Stop.BUDGET, Stop.DIVERGED, Stop.EXIT))
COLLECTIVE = int(Stop.COLLECTIVE)
LOG_COUNT, FORCE, TAKEN, TARGET = (int(field) for field in (Ctx.LOG_COUNT, Ctx.FORCE, Ctx.TAKEN, Ctx.TARGET))
ASYNC_EAGERNESS = (0.02, 0.1, 0.3, 0.6)  # chance a turn goes to asynchronous work; one is drawn for each run


class Machine:
    """One launch of one kernel. order: its memory-order checker, or None."""

    def __init__(
        self, program: Program, launch: Launch, gmem: GlobalMemory, seed: int, stats: LaunchStats, order=None
    ):
        self.program = program
        self.order = order
        self.launch = launch
        self.gmem = gmem
        self.stats = stats
        self.rng = random.Random(seed)
        self.eagerness = self.rng.choice(ASYNC_EAGERNESS)
        self.starving = Starving(self.rng, launch.starved.what) if launch.starved else None
        self.timeout_chance = launch.starved.gives_up if launch.starved else TIMEOUT_CHANCE
        self.clock = 0
        # Who executes, or issued the operation that is taking effect.
        self.executing: tuple[Warp, Instr] | None = None
        self.progress = 0  # counts events that can unblock somebody
        self.ready: list[Warp] = []
        self.waiters: dict[Hashable, list[tuple[Warp, Group]]] = {}
        self.queues: dict[Hashable, deque[Op]] = {}
        self.queue_keys: list[Hashable] = []  # keys of non-empty queues
        self._unordered = 0
        kernel = program.kernel
        # By block, including the one after the kernel's end.
        self.system_instr: list[Instr | None] = [
            kernel.instrs[b.start] if program.system[b.index] else None for b in program.blocks
        ] + [None]
        self.system_row: list[Opcode | None] = [
            None if ins is None else find(ins.opcode) for ins in self.system_instr
        ]
        self._hooked = program.hooked
        self._reads_clock = program.reads_clock
        self.factory = ClusterFactory(program, launch, gmem, stats)
        self.reductions = Reductions(gmem, self.factory.ranges) if launch.keeps_back else None
        self.resident: list[Cluster] = []
        self.watch = SpinWatch(program)
        self.done = 0  # clusters finished
        self.on_cluster_done = None  # called with `done`
        self.recorder = launch.recorder  # recorder of a trace to be timed; None: none
        if self.recorder is not None:
            self.timeout_chance = 0.0

    def _fault(self, w: Warp, group: Group) -> Exception:
        """The error that generated code stopped with."""
        if self.reductions is not None and self.reductions.holds(int(w.ctx[Ctx.FAULT_ADDRESS])):
            return SeenReductions()
        return diagnosis.fault(self.program, self.gmem, w, group)

    # ---- services for instruction handlers --------------------------------------------------------------------

    def defer(self, op: Op) -> None:
        """Add asynchronous work; it takes effect when the scheduler picks it."""
        key = op.queue
        if key is None:
            self._unordered += 1
            key = ("unordered", self._unordered)
        op.origin = self.executing
        if self.recorder is not None:
            self.recorder.issued(op)
        self.progress += 1
        if op.origin is not None:
            op.origin[0].cta.pending += 1
        queue = self.queues.get(key)
        if queue is None:
            self.queues[key] = deque((op,))
            self.queue_keys.append(key)
        else:
            queue.append(op)

    def notify(self, on: Hashable) -> None:
        """Wake every group that waits on an object."""
        self.progress += 1
        for warp, group in self.waiters.pop(on, ()):
            wait, group.wait = group.wait, None
            self.stats.waited(
                warp, self.system_instr[group.block], group.since, self.clock, on, self.executing
            )
            if wait is not None and wait.resume_after:
                group.block += 1
            self.wake(warp)

    def wake(self, warp: Warp) -> None:
        """Let the scheduler pick a warp again, unless it has exited."""
        if not warp.ready and warp.alive:
            warp.ready = True
            self.ready.append(warp)

    def reduction(self, operation: str, element: str) -> Callable[[np.ndarray, np.ndarray], None]:
        """How a source is reduced into a view of global memory, at once or when all shares of the launch have ended."""
        if self.reductions is not None:
            return self.reductions.meet(operation, element)
        return reduction.combine(operation, element)

    def shared(self, w: Warp, address: int, nbytes: int) -> np.ndarray:
        """uint8 view of shared memory at a 32-bit shared or shared::cluster address, bounds-checked."""
        rank, offset = address >> CTA_RANK_SHIFT & 0xFF, address & ((1 << CTA_RANK_SHIFT) - 1)
        ctas = w.cta.cluster.ctas
        if rank >= len(ctas):
            raise MemoryFault(
                f"shared address {address:#x} names CTA rank {rank} of a cluster of {len(ctas)}"
            )
        smem = ctas[rank].smem
        if offset < SHARED_BASE_OFFSET or offset + nbytes > smem.size:
            raise MemoryFault(
                f"{nbytes}-byte access at shared offset {offset:#x} (rank {rank}): the CTA's shared memory is "
                f"{SHARED_BASE_OFFSET:#x} to {len(smem):#x}"
            )
        return smem[offset : offset + nbytes]

    def cta_at(self, w: Warp, address: int) -> tuple[Cta, int]:
        """(CTA, offset) of a shared::cluster address."""
        self.shared(w, address, 1)
        return w.cta.cluster.ctas[address >> CTA_RANK_SHIFT & 0xFF], address & ((1 << CTA_RANK_SHIFT) - 1)

    # ---- the run ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Execute the whole grid."""
        sampled = self.recorder is not None and not self.recorder.whole
        for _ in range(1 if sampled else FIRST_CLUSTERS):
            self.admit()
        rng = self.rng
        stuck_at, stuck_rounds = -1, 0
        while self.resident:
            if self.starving is not None and (self.queue_keys or self.ready):
                completes, position = self.starving.choose(self.ready, self.queues, self.queue_keys)
            elif self.queue_keys and (not self.ready or rng.random() < self.eagerness):
                completes, position = True, int(rng.random() * len(self.queue_keys))
            else:
                completes, position = False, int(rng.random() * len(self.ready))
            if completes:
                self.complete(position)
            elif self.ready:
                warp = self.ready[position]
                before = self.progress
                if not self.turn(warp):
                    warp.ready = False
                    self.ready[position] = self.ready[-1]
                    self.ready.pop()
                if self.starving is not None:
                    self.starving.ran(warp, self.progress != before)
                if self.progress != before:
                    self.watch.event()
                elif self.watch.stuck(warp, self.ready):
                    if not self.queue_keys:
                        raise self.deadlock("warps spin, and nothing that they wait for can still happen")
                    while self.queue_keys:  # a starving schedule may hold them back for ever
                        self.complete(0)
                    self.watch.event()
                elif self.watch.turns % PATIENCE == 0:
                    admitted = [self.admit() for _ in range(len(self.resident))]
                    if not any(admitted):
                        self.release_timed_waits()
            else:
                stuck_rounds = stuck_rounds + 1 if self.progress == stuck_at else 0
                stuck_at = self.progress
                if self.admit():
                    continue
                if stuck_rounds >= STUCK_ROUNDS or not self.release_timed_waits():
                    raise self.deadlock("nothing can make progress")

    def deadlock(self, headline: str) -> Deadlock:
        """The report of a machine in which nothing can make progress."""
        pending = sum(len(queue) for queue in self.queues.values())
        whole = self.recorder is None or self.recorder.whole
        return diagnosis.deadlock(self.program, self.resident, pending, headline, whole)

    def admit(self) -> bool:
        """Make one more cluster resident; False if the grid has none left or the device is full."""
        cluster = self.factory.next(len(self.resident))
        if cluster is None:
            return False
        self.progress += 1
        self.resident.append(cluster)
        if self.order is not None:
            self.order.admit(cluster)
        if self.recorder is not None:
            self.recorder.admit(cluster)
        for cta in cluster.ctas:
            self.ready.extend(cta.warps)
        return True

    def complete(self, position: int) -> None:
        """Let the first pending asynchronous operation of a queue take effect."""
        key = self.queue_keys[position]
        queue = self.queues[key]
        op = queue.popleft()
        self.clock += 1
        self.progress += 1
        self.executing = op.origin  # operations it defers belong to the same instruction
        recorder = self.recorder
        if recorder is not None:
            recorder.step, stored = op.step, self.stats.tma_bytes_stored
        try:
            op.execute(self)
        except Exception as error:
            diagnosis.locate(self.program, error, *(op.origin or (None, None)))
            raise
        self.stats.completed(op, self.clock)
        if recorder is not None:
            recorder.moved(self.stats.tma_bytes_stored - stored)
            recorder.step = None
        if not queue:
            del self.queues[key]
            self.queue_keys[position] = self.queue_keys[-1]
            self.queue_keys.pop()
        if op.origin is not None:
            cta = op.origin[0].cta
            cta.pending -= 1
            if cta.exited:
                self.cta_done(cta)

    def turn(self, w: Warp) -> bool:
        """Run a warp until it blocks, its turn ends or it exits; whether it can run again."""
        program, system_instr, groups = self.program, self.system_instr, w.groups
        recorded = w.trace is not None or (self.recorder is not None and self.recorder.watches)
        call, context = program.call, w.ctx_ptr
        quota = 1 + int(self.rng.random() * SYSTEM_QUOTA) if self.starving is None else 1
        steps = BLOCK_BUDGET
        favoured = self.favoured(w) if len(groups) > 1 else None
        forced = None  # a group whose collective instruction may run although other lanes are elsewhere
        while forced is not None or (quota > 0 and steps > 0):
            groups = w.groups
            single = len(groups) == 1
            if forced is not None:
                group, forced = forced, None
            elif single:
                group = groups[0]
            elif favoured is not None and favoured in groups and favoured.free:
                group = favoured
            else:
                group = w.runnable()
            if group is None or group.wait is not None or group.converge:
                return False
            block = group.block
            if w.flying and block < len(program.blocks):
                w.settle(program.touches(block), block)
            ins = system_instr[block]
            if ins is not None:
                quota -= 1
                self.clock += 1
                if not self.execute(w, group, block, ins):
                    return bool(w.alive) and w.runnable() is not None
                continue
            # After every block, look for lanes that could join this group.
            alone = single or w.alone(group)
            budget = BLOCK_BUDGET if alone and not w.flying and not recorded else 1
            steps -= 1
            if self._reads_clock:
                w.ctx[Ctx.CLOCK] = self.clock
            executed = w.executed[block] if recorded else 0
            answer = call(context, group.mask | block << START_BIT | budget << BUDGET_BIT)
            why, at = answer >> 32, answer & 0xFFFFFFFF
            if recorded and w.executed[block] != executed:
                self.recorder.native(w, block, group.mask)
            self.clock += 1
            group.block = at
            if self.order is not None and w.context[LOG_COUNT]:
                self.order.native(w)
            if why == PYTHON:
                if not single:
                    w.merge()
            elif why == BUDGET:
                if not single:
                    w.merge()
                if budget > 1 or (recorded and not steps):
                    return True
            elif why == DIVERGED:
                self.diverge(w, group, at)
            elif why == EXIT:
                self.exit(w, group)
                if not w.alive:
                    return False
            elif why == COLLECTIVE:
                if not convergence.gathered(
                    program, w, group, program.kernel.instrs[program.blocks[at].start]
                ):
                    continue
                w.context[FORCE] = 1
                forced = group
            else:
                raise self._fault(w, group)
        return True

    def favoured(self, w: Warp) -> Group | None:
        """The group of a diverged warp that goes first in this turn; None: the group at the lowest address."""
        free = [group for group in w.groups if group.free]
        if len(free) < 2:
            w.diverged_states.clear()
            w.diverged_turns = 0
            return None
        w.diverged_turns += 1
        if w.diverged_turns < DIVERGED_TURNS:
            return None
        seen, state = w.diverged_states, w.state_hash()
        if state in seen or len(seen) >= LAG_TURNS:
            seen.clear()
            return self.rng.choice(free)
        seen.add(state)
        return None

    def diverge(self, w: Warp, group: Group, block: int) -> None:
        """Split a group at a branch taken only by the lanes in the context's TAKEN field."""
        taken = w.context[TAKEN]
        target, others = self.program.split(block)
        if target is None:
            target = w.context[TARGET]
        if len(w.groups) > 1:
            w.groups.remove(group)
            w.groups += [Group(target, taken), Group(others, group.mask & ~taken)]
        else:
            group.block, group.mask, group.timed_out = others, group.mask & ~taken, None
            w.groups.append(Group(target, taken))
        w.merge()

    def exit(self, w: Warp, group: Group) -> None:
        """The lanes of a group leave the kernel."""
        w.groups.remove(group)
        w.alive &= ~group.mask
        w.ctx[Ctx.ALIVE] = w.alive
        self.progress += 1
        for other in w.groups:
            other.converge = False
        cta = w.cta
        for barrier in (*cta.named_barriers.values(), cta.cluster.barrier):
            if barrier is not None:
                barrier.threads_left(self, w, group.mask.bit_count())
        if w.alive:
            return
        cta.live_warps -= 1
        if self.order is not None and cta.live_warps == 0:
            self.order.cta_exits(cta)
        self.stats.warp_done(w, self.clock)
        if cta.exited:
            self.cta_done(cta)
        elif cta.live_warps == 0:
            self.warn_of_use(cta)

    def warn_of_use(self, cta: Cta) -> None:
        """A CTA's last warp has exited: warn of operations that still use its shared memory."""
        for queue in self.queues.values():
            for op in queue:
                if op.uses_shared and op.origin is not None and op.origin[0].cta is cta:
                    self.stats.warn(diagnosis.use_after_exit(*op.origin))

    def cta_done(self, cta: Cta) -> None:
        """A CTA has exited: TmemFault if it leaks tensor memory; the last of a cluster makes room for another."""
        if cta.uses_tmem:
            self.stats.peak_tmem_columns = max(self.stats.peak_tmem_columns, cta.tmem.peak_columns)
            leaked = cta.tmem.allocated_columns
            if leaked:
                raise TmemFault(
                    f"{leaked} columns of tensor memory are still allocated at the end of the CTA; "
                    f"{cta.tmem.describe()}",
                    Where(self.program.name, cta.coords),
                )
        for barrier in cta.mbarriers.values():
            for text in barrier.at_exit():
                self.stats.warn(text)
        cluster = cta.cluster
        cluster.live_ctas -= 1
        if cluster.live_ctas == 0:
            self.resident.remove(cluster)
            if self.order is not None:
                self.order.retire(cluster)
            if self.recorder is not None:
                self.recorder.retire(cluster)
            self.factory.retire(cluster)
            self.done += 1
            if self.on_cluster_done is not None:
                self.on_cluster_done(self.done)
            self.admit()

    # ---- one system instruction -------------------------------------------------------------------------------

    def execute(self, w: Warp, group: Group, block: int, ins: Instr) -> bool:
        """Execute a system instruction for a group; False if the warp's turn ends here."""
        row, hooked = self.system_row[block], self._hooked[block]
        trace = w.trace
        try:
            if row is None or (row.handler is None and not hooked and not row.no_effect):
                raise unsupported(ins.opcode)
            mask = group.mask
            if row.collective is not None and mask != w.alive:
                if not convergence.gathered(self.program, w, group, ins):
                    return w.runnable() is not None
                mask = group.mask
            if ins.guard is not None:
                allowed = w.pred(ins.guard)
                mask &= ~allowed if ins.guard_negated else allowed
            if trace is not None:
                self.recorder.begin(w, group, ins, mask)
            if mask:
                w.current = group
                self.executing = (w, ins)
                if self.order is not None and row.order is not None:
                    row.order(self.order, w, ins, mask)
                if hooked:
                    self.run_hooked(w, group, block)
                elif not row.no_effect:
                    wait = row.handler(self, w, ins, mask)
                    if wait is not None:
                        if trace is not None and wait.resume_after:
                            self.recorder.end(w, group)
                        elif trace is not None:
                            self.recorder.wait(group)
                        self.block(w, group, wait)
                        return False
                group.timed_out = None
        except Exception as error:
            diagnosis.locate(self.program, error, w, ins, group.mask)
            raise
        if trace is not None:
            self.recorder.end(w, group)
        if not (mask and hooked):  # native code counts itself
            w.executed[block] += 1
        group.block = block + 1
        if len(w.groups) > 1:
            w.merge()
        return True

    def run_hooked(self, w: Warp, group: Group, block: int) -> None:
        """Execute the native instruction of a block at which the order checker stops."""
        if self._reads_clock:
            w.ctx[Ctx.CLOCK] = self.clock
        what = group.mask | block << START_BIT | 1 << BUDGET_BIT | 1 << HOOKED_BIT
        if self.program.call(w.ctx_ptr, what) >> 32 == Stop.FAULT:
            raise self._fault(w, group)

    def block(self, w: Warp, group: Group, wait: Wait) -> None:
        """Park a group until its wait's object is notified."""
        if wait.resume_after:
            w.executed[group.block] += 1
        group.wait = wait
        group.since = self.clock
        self.waiters.setdefault(wait.on, []).append((w, group))

    def release_timed_waits(self) -> bool:
        """Let waits that the hardware bounds in time return without their event; whether there were any."""
        released = False
        for on in list(self.waiters):
            keep = []
            for warp, group in self.waiters[on]:
                if group.wait is not None and group.wait.poll:
                    group.wait, group.timed_out = None, group.wait
                    self.wake(warp)
                    released = True
                else:
                    keep.append((warp, group))
            if keep:
                self.waiters[on] = keep
            else:
                del self.waiters[on]
        return released
