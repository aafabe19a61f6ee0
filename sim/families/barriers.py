"""Named, warp and cluster barriers, cluster launch control (PTX ISA 9.7.13.1 to 9.7.13.4, 9.7.13.17)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from warpspec.sim.errors import BarrierFault, UnsupportedInstruction
from warpspec.sim.families import mbarrier
from warpspec.sim.instruction import Instr, Not, Reg
from warpspec.sim.lanes import FULL_MASK, WARP_SIZE
from warpspec.sim.machine import Machine
from warpspec.sim.names import placed
from warpspec.sim.operation import CallOp, Wait
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.warp import Cluster, Cta, Warp

NAMED_BARRIERS = 16


@dataclass(eq=False)
class NamedBarrier:
    """A CTA barrier 0 to 15. `expected` is None while nobody has arrived, or the thread count of this use."""

    cta: Cta
    number: int
    expected: int | None = None
    all_threads: bool = False
    arrived: int = 0
    generation: int = 0
    votes: list[int] = field(default_factory=list)  # set predicate bits of each arriving group, for .red
    results: list = field(default_factory=list)  # groups to which a reduction is delivered
    order: object = None  # the order checker's clock of this use
    # The rest is kept where memory order is checked.
    waiting: list[Warp] = field(default_factory=list)  # warps that wait in this use
    users: set[int] = field(default_factory=set)  # warps that have used it with the count of the last use
    counted: int | None = None  # that count
    last: tuple[Warp, Instr] | None = None  # the last arrival

    def describe(self) -> str:
        counts = f"{self.arrived} of {self.expected} threads"
        return f"waits at named barrier {self.number} of CTA {self.cta.coords}: {counts}"

    def threads_left(self, m: Machine, w: Warp, count: int) -> None:
        """Threads of a warp have exited: a barrier of all threads of the CTA expects fewer."""
        if self.expected is not None and self.all_threads:
            self.expected -= count
            if self.arrived and self.arrived == self.expected:
                if m.order is not None:
                    w, ins = self.last
                    m.order.threads_missing(w, ins, self, m.launch.threads - self.expected)
                _complete(m, self)


def _barrier(cta: Cta, number: int) -> NamedBarrier:
    if not 0 <= number < NAMED_BARRIERS:
        raise BarrierFault(f"named barrier {number}; 0 to {NAMED_BARRIERS - 1} exist")
    if number not in cta.named_barriers:
        cta.named_barriers[number] = NamedBarrier(cta, number)
    return cta.named_barriers[number]


def _live_threads(cta: Cta) -> int:
    return sum(w.alive.bit_count() for w in cta.warps)


def _arrive(m: Machine, w: Warp, barrier: NamedBarrier, count: int | None, mask: int) -> bool:
    """Arrive with a warp's lanes, which count as a whole warp. Returns True if that completes the barrier."""
    if count is not None and (count % WARP_SIZE or count <= 0):
        raise BarrierFault(
            f"named barrier {barrier.number} with {count} threads; a multiple of {WARP_SIZE} is needed"
        )
    if barrier.expected is None:
        barrier.expected, barrier.all_threads = (
            _live_threads(w.cta) if count is None else count,
            count is None,
        )
    elif count is not None and barrier.expected != count:
        raise BarrierFault(
            f"named barrier {barrier.number}: {count} threads here, but {barrier.expected} where others arrived"
        )
    barrier.arrived += WARP_SIZE if count is not None else mask.bit_count()
    m.progress += 1
    if barrier.arrived > barrier.expected:
        raise BarrierFault(
            f"named barrier {barrier.number}: {barrier.arrived} threads arrived, {barrier.expected} expected"
        )
    return barrier.arrived == barrier.expected


def _complete(m: Machine, barrier: NamedBarrier) -> None:
    barrier.expected, barrier.arrived, barrier.all_threads = None, 0, False
    barrier.generation += 1
    for w in barrier.waiting:
        m.order.pass_barrier(w, barrier.order)
    barrier.order, barrier.waiting = None, []
    for w, target, kind, mask in barrier.results:
        _deliver(w, target, kind, mask, barrier.votes)
    barrier.votes, barrier.results = [], []
    m.notify(barrier)


def _deliver(w: Warp, target: Reg, kind: str, mask: int, votes: list) -> None:
    total = sum(bits.bit_count() for bits, _ in votes)
    threads = sum(group.bit_count() for _, group in votes)
    if kind == "popc":
        w.set_u32(target, total, mask)
    else:
        value = total == threads if kind == "and" else total > 0
        w.set_pred(target, FULL_MASK if value else 0, mask)


def _operands(ins: Instr) -> tuple[str, list]:
    """('sync' | 'arrive' | 'red', operands) of bar/barrier[.cta].kind."""
    kind = next((p for p in ins.parts[1:] if p in ("sync", "arrive", "red")), None)
    if kind is None:
        raise UnsupportedInstruction(f"`{ins.opcode}`")
    return kind, list(ins.operands)


def _note(m: Machine, w: Warp, ins: Instr, barrier: NamedBarrier, count: int | None) -> None:
    """Tell the order checker of an arrival."""
    m.order.join_barrier(w, barrier)
    if barrier.counted != count:
        barrier.users, barrier.counted = set(), count
    barrier.users.add(w.index)
    barrier.last = w, ins
    missing = m.launch.threads - _live_threads(w.cta)
    if count is None and missing and barrier.expected is None:
        m.order.threads_missing(w, ins, barrier, missing)


@handler("bar", "barrier", family=Family.BARRIER, destinations=0, collective=Collective.WARP)
@handler(
    "bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red",
    family=Family.BARRIER, destinations=1, collective=Collective.WARP,
)  # fmt: skip
def named_barrier(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """bar.sync, bar.arrive and bar.red, under all their names: the lanes of a warp arrive together."""
    kind, operands = _operands(ins)
    if kind == "red":
        return _reduce(m, w, ins, operands, mask)
    barrier = _barrier(w.cta, w.scalar(operands[0], mask))
    count = w.scalar(operands[1], mask) if len(operands) > 1 else None
    if m.order is not None:
        _note(m, w, ins, barrier, count)
        if kind == "sync":
            barrier.waiting.append(w)
    if _arrive(m, w, barrier, count, mask):
        _complete(m, barrier)
        return None
    return None if kind == "arrive" else Wait(on=barrier, text=barrier.describe, resume_after=True)


def _reduce(m: Machine, w: Warp, ins: Instr, operands: list, mask: int) -> Wait | None:
    """barrier.red.popc|and|or d, a[, b], c: every thread gets the reduction of predicate c over all threads."""
    target, number, *rest = operands
    predicate = w.pred(rest[-1])
    if isinstance(rest[-1], Not | Reg):
        predicate &= mask
    count = w.scalar(rest[0], mask) if len(rest) > 1 else None
    barrier = _barrier(w.cta, w.scalar(number, mask))
    operation = next(p for p in ins.parts if p in ("popc", "and", "or"))
    barrier.votes.append((predicate & mask, mask))
    barrier.results.append((w, target, operation, mask))
    if m.order is not None:
        _note(m, w, ins, barrier, count)
        barrier.waiting.append(w)
    if _arrive(m, w, barrier, count, mask):
        _complete(m, barrier)
        return None
    return Wait(on=barrier, text=barrier.describe, resume_after=True)


@handler("bar.warp", family=Family.BARRIER, destinations=0, collective=Collective.MEMBERS_ANYWHERE)
def warp_barrier(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """bar.warp.sync: the machine has gathered the lanes of the membermask."""
    if m.order is not None:
        m.order.warp_barrier(w, ins)


# ---- cluster barrier ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ClusterBarrier:
    """barrier.cluster: every live thread of the cluster arrives; `arrived` counts those of this phase."""

    cluster: Cluster
    arrived: int = 0
    phase: int = 0
    order: object = None  # the order checker's clock of this phase
    passed: object = None  # the checker's clock of the last phase

    def describe(self) -> str:
        """A text for messages: how many threads have arrived."""
        return f"{self.arrived} of {sum(_live_threads(cta) for cta in self.cluster.ctas)} threads"

    def complete_if_done(self, m: Machine) -> None:
        """End the phase if all threads that are left have arrived."""
        alive = sum(_live_threads(cta) for cta in self.cluster.ctas)
        if self.arrived == alive > 0:
            self.arrived = 0
            self.phase += 1
            self.order, self.passed = None, self.order
            m.notify(self)

    def threads_left(self, m: Machine, w: Warp, count: int) -> None:
        """Threads of a warp have exited: if they had arrived, they are not among those expected any more."""
        if w.state.get("cluster_arrived") == self.phase:
            self.arrived -= count
        self.complete_if_done(m)


def _cluster(cluster: Cluster) -> ClusterBarrier:
    if cluster.barrier is None:
        cluster.barrier = ClusterBarrier(cluster)
    return cluster.barrier


ARRIVE_ONCE = (
    'PTX ISA, "barrier.cluster": "After using barrier.cluster.wait to detect completion of the barrier, a thread may '
    "immediately arrive at the barrier once again. Each thread must arrive at the barrier only once before the barrier "
    'completes."'
)


@handler("barrier.cluster.arrive", family=Family.BARRIER, destinations=0, collective=Collective.WARP)
def cluster_arrive(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """barrier.cluster.arrive: the lanes arrive and go on; they should wait before they arrive again (ARRIVE_ONCE).

    Hopper and Blackwell run kernels that do not (flash-attn-4's MLA in pairs of CTAs): here a second arrival is for the
    next phase, and as many waits may follow as there were arrivals.
    """
    state = _cluster(w.cta.cluster)
    if "cluster_arrived" in w.state:
        m.stats.warn(
            f"barrier.cluster.arrive twice without barrier.cluster.wait between, warp {w.index} of CTA "
            f"{w.cta.coords} the first: PTX line {ins.line}{' from ' if ins.source else ''}{placed(ins.source)}; "
            f"{ARRIVE_ONCE}; hardware runs kernels that do, and here the second is for the next phase"
        )
        if w.state["cluster_arrived"] == state.phase:
            return Wait(on=state, text=lambda: "arrives at the cluster barrier again: " + state.describe())
        w.state["cluster_waits_owed"] = w.state.get("cluster_waits_owed", 0) + 1
    w.state["cluster_arrived"] = state.phase
    state.arrived += mask.bit_count()
    if m.order is not None:
        m.order.join_barrier(w, state, ins.has("relaxed"))
    m.progress += 1
    state.complete_if_done(m)
    return None


@handler("barrier.cluster.wait", family=Family.BARRIER, destinations=0, collective=Collective.WARP)
def cluster_wait(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """barrier.cluster.wait: the lanes wait until all live threads of the cluster have arrived."""
    state = _cluster(w.cta.cluster)
    arrived = w.state.get("cluster_arrived")
    if arrived is None:
        owed = w.state.get("cluster_waits_owed", 0)
        if owed:  # a wait for an earlier arrival, whose phase is over
            w.state["cluster_waits_owed"] = owed - 1
            return None
        raise BarrierFault("barrier.cluster.wait without barrier.cluster.arrive before it")
    if state.phase > arrived:
        if m.order is not None and state.passed is not None:
            m.order.pass_barrier(w, state.passed, ins.has("relaxed"))
        del w.state["cluster_arrived"]
        return None
    return Wait(on=state, text=lambda: "waits at the cluster barrier: " + state.describe())


# ---- cluster launch control ---------------------------------------------------------------------------------------

RESPONSE_BYTES = 16
CANCELED = 1  # flag word of the simulator's response format


@handler("clusterlaunchcontrol.try_cancel", family=Family.BARRIER, destinations=0)
def try_cancel(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """clusterlaunchcontrol.try_cancel: write the 16-byte response to shared memory and complete-tx an mbarrier."""
    address, bar = w.shared_address(ins.operands[0], mask), w.shared_address(ins.operands[1], mask)
    ctas = w.cta.cluster.ctas if ins.has("multicast::cluster::all") else [m.cta_at(w, address)[0]]
    _, offset = m.cta_at(w, address)
    _, bar_offset = m.cta_at(w, bar)
    m.shared(w, address, RESPONSE_BYTES)

    op = None if m.order is None else m.order.issue(w, ins, mask=mask)

    def respond() -> None:
        first = m.factory.cancel()
        words = np.array([*(first or (0, 0, 0)), CANCELED if first else 0], np.uint32)
        for cta in ctas:
            if op is not None:
                access = m.order.loads_on(op, mbarrier.lookup(cta, bar_offset))
                m.order.shared_range(cta, offset, RESPONSE_BYTES, access, op.clock)
            cta.smem[offset : offset + RESPONSE_BYTES] = words.view(np.uint8)
            mbarrier.complete_tx(m, cta, bar_offset, RESPONSE_BYTES, op=op)

    m.defer(CallOp(respond, "clusterlaunchcontrol.try_cancel"))


def _response(w: Warp, operand) -> np.ndarray:
    """The four 32-bit words of a 128-bit response register, uint32 [32, 4]."""
    return np.ascontiguousarray(w._view(operand.name)).view(np.uint32).reshape(WARP_SIZE, 4)


@handler("clusterlaunchcontrol.query_cancel", family=Family.BARRIER, destinations=1)
def query_cancel(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """is_canceled -> predicate; get_first_ctaid.v4 -> {x, y, z, _}; get_first_ctaid::x|y|z -> one coordinate."""
    words = _response(w, ins.operands[1])
    if ins.has("is_canceled"):
        bits = sum(1 << lane for lane in range(WARP_SIZE) if words[lane, 3] == CANCELED)
        w.set_pred(ins.operands[0], bits, mask)
        return
    axis = next((p for p in ins.parts if p.startswith("get_first_ctaid::")), None)
    if axis is not None:
        w.set_u32(ins.operands[0], words[:, "xyz".index(axis[-1])].copy(), mask)
        return
    rows = words.T.copy()
    rows[3] = 0
    w.write_vec(ins.operands[0], rows, mask)
