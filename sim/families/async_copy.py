"""Asynchronous copies that are not bulk copies: cp.async, st.async and red.async; and st.bulk.

Like every asynchronous operation they take effect when scheduled; values that come from registers are taken
at issue. PTX ISA 9.7.9.25.3 (Non-bulk copy), 9.7.9.12 (st.async), 9.7.9.13 (st.bulk), 9.7.13.7 (red.async),
9.7.13.15.17 (cp.async.mbarrier.arrive).
"""

from __future__ import annotations

import numpy as np

from warpspec.sim.codegen.memory import ordered_in_global, outside_shared
from warpspec.sim.errors import BarrierFault, MemoryFault, UnsupportedInstruction
from warpspec.sim.families import mbarrier
from warpspec.sim.families.bulk_copy import COMPLETE_TX, located, shared_view
from warpspec.sim.instruction import Imm, Instr, Not, Reg, Vec
from warpspec.sim.lanes import WARP_SIZE, lanes
from warpspec.sim.machine import Machine
from warpspec.sim.operation import CallOp, Op, Wait
from warpspec.sim.registry import Family, handler
from warpspec.sim.tma import reduction
from warpspec.sim.warp import Warp

COPY_SIZES = (4, 8, 16)
BULK_STORE_UNIT = 8  # bytes: address and size of st.bulk
UNIT = {4: np.uint32, 8: np.uint64, 16: np.complex128}  # complex128 stands for "16 bytes"


class LaneCopies:
    """The cp.async copies of a warp's threads; `open` holds those that are not committed to a group yet, `started` all
    that may not have happened yet, of all lanes."""

    __slots__ = ("groups", "open", "started")

    def __init__(self) -> None:
        self.open: list[list[AsyncCopy]] = [[] for _ in range(WARP_SIZE)]
        self.groups: list[list[list[AsyncCopy]]] = [[] for _ in range(WARP_SIZE)]
        self.started: list[AsyncCopy] = []

    def pending(self, mask: int) -> dict[int, tuple[AsyncCopy, ...]]:
        """The copies of each of these lanes that have not happened yet."""
        self.started = [copy for copy in self.started if not copy.done]
        if all(copy.mask & mask in (0, mask) for copy in self.started):
            return dict.fromkeys(lanes(mask), tuple(copy for copy in self.started if copy.mask & mask))
        return {lane: tuple(copy for copy in self.started if copy.mask >> lane & 1) for lane in lanes(mask)}


def _copies(w: Warp) -> LaneCopies:
    return w.state.setdefault("cp.async", LaneCopies())


class AsyncCopy(Op):
    """One warp-wide cp.async: `size` bytes a lane, `wanted` of them from global memory and the rest 0."""

    __slots__ = ("arrivals", "done", "mask", "order", "size", "source", "target", "wanted", "warp")

    def __init__(
        self, warp: Warp, size: int, source: np.ndarray, target: np.ndarray, wanted: np.ndarray, mask: int
    ):
        super().__init__(f"cp.async of {size} bytes by {source.size} lanes")
        self.warp, self.size, self.mask = warp, size, mask
        self.source, self.target, self.wanted = source, target, wanted  # [lanes]
        self.done = False
        self.arrivals: list[Arrival] = []
        self.order = None  # the order checker's operation

    def execute(self, m: Machine) -> None:
        if self.order is not None:
            m.order.copied(self.order, self.warp.cta, self.source, self.target, self.wanted, self.size)
        first = int(self.target.min())
        smem = shared_view(self.warp.cta, first, int(self.target.max()) + self.size - first)
        unit = UNIT[self.size]
        # A CTA's shared memory begins at an aligned address and `first` is a multiple of the size.
        padded = smem if smem.size % self.size == 0 else smem[: smem.size // self.size * self.size]
        padded.view(unit)[(self.target - first) // self.size] = self._load(m, unit)
        self.done = True
        m.notify(self)
        for arrival in self.arrivals:
            arrival.copied(m)

    def _load(self, m: Machine, unit: type) -> np.ndarray:
        """The bytes to write, one element of `unit` a lane."""
        if (self.wanted == self.size).all():
            low = int(self.source.min())
            span = int(self.source.max()) + self.size - low
            try:
                view = m.gmem.view(low, span)
            except MemoryFault:
                pass  # lanes read from several allocations, or one of them faults: look at each
            else:
                return view.view(unit)[(self.source - np.uint64(low)).astype(np.int64) // self.size]
        data = np.zeros((self.source.size, self.size), np.uint8)
        for i, (address, nbytes) in enumerate(zip(self.source.tolist(), self.wanted.tolist(), strict=True)):
            if nbytes:
                data[i, :nbytes] = m.gmem.view(address, nbytes)
        return data.view(unit)[:, 0]


class Arrival:
    """A deferred arrive on an mbarrier, which takes effect once a thread's copies are done."""

    __slots__ = ("count", "cta", "offset", "order", "remaining")

    def __init__(self, cta, offset: int, count: int, remaining: int, order=None):
        self.cta, self.offset, self.count, self.remaining = cta, offset, count, remaining
        self.order = order  # the order checker's operation

    def copied(self, m: Machine) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            self.arrive(m)

    def arrive(self, m: Machine) -> None:
        m.defer(
            CallOp(
                lambda: mbarrier.arrive(m, self.cta, self.offset, self.count, op=self.order),
                "cp.async.mbarrier.arrive",
            )
        )


@handler("cp.async.ca", "cp.async.cg", family=Family.ASYNC_COPY, destinations=0)
def cp_async(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.{ca,cg}.shared.global [dst], [src], cp-size{, src-size | ignore-src}{, cache-policy}."""
    operands = ins.operands[: -1 if ins.has("L2::cache_hint") else None]
    size = w.scalar(operands[2], mask)
    if size not in COPY_SIZES or (ins.has("cg") and size != 16):
        raise UnsupportedInstruction(f"`{ins.opcode}` of {size} bytes")
    chosen = np.array(lanes(mask))
    wanted = _source_bytes(w, operands, size)[chosen]
    source = w.address(operands[1])[chosen]
    target = w.address(operands[0])[chosen].astype(np.int64)
    for what, address in (("source", source), ("destination", target)):
        if (address % address.dtype.type(size)).any():
            bad = int(address[np.argmax(address % address.dtype.type(size) != 0)])
            raise MemoryFault(f"cp.async {what} {bad:#x} is not a multiple of {size} bytes")
    offsets = np.array([located(w, int(address), True)[1] for address in target.tolist()])
    copy = AsyncCopy(w, size, source, offsets, wanted, mask)
    if m.order is not None:
        copy.order = m.order.issue(w, ins, "cp.async", mask)
        m.order.lane_copies(w, copy.order, offsets, size, mask)
    copies = _copies(w)
    copies.started.append(copy)
    for lane in chosen.tolist():
        copies.open[lane].append(copy)
    m.defer(copy)


def _source_bytes(w: Warp, operands: tuple, size: int) -> np.ndarray:
    """The number of bytes that each lane reads from global memory."""
    if len(operands) < 4:
        return np.full(WARP_SIZE, size)
    last = operands[3]
    if isinstance(last, Not) or (isinstance(last, Reg) and w.bits(last) == 1):
        ignored = w.pred(last) >> np.arange(WARP_SIZE) & 1
        return np.where(ignored, 0, size)
    asked = w.u32(last).astype(np.int64)
    if (asked > size).any() and isinstance(last, Imm):
        raise UnsupportedInstruction(f"cp.async with src-size {int(asked[0])} above cp-size {size}")
    return np.minimum(asked, size)


def _commit(w: Warp, mask: int) -> None:
    copies = _copies(w)
    for lane in lanes(mask):
        copies.groups[lane].append(copies.open[lane])
        copies.open[lane] = []


@handler("cp.async.commit_group", family=Family.ASYNC_COPY, destinations=0)
def cp_async_commit_group(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.commit_group: group the thread's copies since the last commit."""
    _commit(w, mask)


def _wait(m: Machine, w: Warp, mask: int, newest: int) -> Wait | None:
    copies = _copies(w)
    waited: dict[AsyncCopy, None] = {}
    for lane in lanes(mask):
        groups = copies.groups[lane]
        settled = len(groups) - newest
        for i in range(settled):
            for copy in groups[i]:
                if not copy.done:
                    return Wait(on=copy, text=f"cp.async-group {i} of {len(groups)} of lane {lane}")
        if settled > 0:
            if m.order is not None:
                waited |= dict.fromkeys(copy for group in groups[:settled] for copy in group)
            del groups[:settled]
    if waited:
        m.order.passed(w, "cp.async", max(copy.order.queue_count for copy in waited))
        for copy in waited:
            m.order.lane_copies_waited(w, copy.order, copy.target, copy.size, copy.mask, mask)
    return None


@handler("cp.async.wait_group", family=Family.ASYNC_COPY, destinations=0)
def cp_async_wait_group(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """cp.async.wait_group N: wait until at most the N newest groups are pending."""
    return _wait(m, w, mask, w.scalar(ins.operands[0], mask))


@handler("cp.async.wait_all", family=Family.ASYNC_COPY, destinations=0)
def cp_async_wait_all(m: Machine, w: Warp, ins: Instr, mask: int) -> Wait | None:
    """cp.async.wait_all: commit_group, wait_group 0. Called again after a wait, it commits empty groups."""
    _commit(w, mask)
    return _wait(m, w, mask, 0)


@handler("cp.async.mbarrier.arrive", family=Family.ASYNC_COPY, destinations=0)
def cp_async_mbarrier_arrive(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.mbarrier.arrive{.noinc}: arrive once the thread's copies so far are done.

    Without .noinc the pending count grows by one first, so that its own arrival leaves the count as it was.
    """
    addresses = w.address(ins.operands[0])
    together: dict[tuple, int] = {}  # (address, copies waited for) -> lanes
    for lane, waited in _copies(w).pending(mask).items():
        key = (int(addresses[lane]), waited)
        together[key] = together.get(key, 0) + 1
    order = None if m.order is None else m.order.after(w, ins, "cp.async", mask)
    for (address, waited), count in together.items():
        cta, offset = located(w, address, False)
        if not ins.has("noinc"):
            mbarrier.lookup(cta, offset).pending += count
        arrival = Arrival(cta, offset, count, len(waited), order)
        for copy in waited:
            copy.arrivals.append(arrival)
        if not waited:
            arrival.arrive(m)


# ---- st.async and red.async --------------------------------------------------------------------------------


def _operand_bytes(w: Warp, operand, bits: int) -> np.ndarray:
    """Convert an operand, a value or a vector of `bits`-bit values, to uint8 [32 lanes, bytes]."""
    items = operand.items if isinstance(operand, Vec) else (operand,)
    read = {8: w.u16, 16: w.u16, 32: w.u32, 64: w.u64}[bits]
    columns = [np.ascontiguousarray(read(item)).view(np.uint8).reshape(WARP_SIZE, -1) for item in items]
    return np.concatenate([column[:, : bits // 8] for column in columns], axis=1)


def _issue_remote(m: Machine, w: Warp, ins: Instr, mask: int, meet) -> None:
    """Defer `meet(destination bytes, value bytes)` for each lane, and complete-tx on its mbarrier."""
    bits = int(ins.parts[-1][1:])
    values = _operand_bytes(w, ins.operands[1], bits)
    targets = w.address(ins.operands[0])
    nbytes = values.shape[1]
    order = None if m.order is None else m.order.issue(w, ins, mask=mask)
    for lane in lanes(mask):
        address, value = int(targets[lane]), values[lane].copy()
        if address % nbytes:
            raise MemoryFault(f"{ins.opcode} to {address:#x}, which is not a multiple of {nbytes} bytes")
        if not ins.has("global"):
            cta, offset = located(w, address, False)
            barrier = located(w, int(w.address(ins.operands[2])[lane]), False)
            if barrier[0] is not cta:
                raise BarrierFault(f"mbarrier in CTA {barrier[0].rank}, destination in CTA {cta.rank}")

            def act(cta=cta, offset=offset, value=value, barrier=barrier):
                if order is not None:
                    access = m.order.loads_on(order, mbarrier.lookup(*barrier), generic=True)
                    m.order.shared_range(cta, offset, nbytes, access, order.clock)
                meet(shared_view(cta, offset, nbytes), value)
                mbarrier.complete_tx(m, *barrier, nbytes, op=order)

        else:

            def act(address=address, value=value):
                meet(m.gmem.view(address, nbytes, write=True), value)

        m.defer(CallOp(act, f"{ins.parts[0]}.async of {nbytes} bytes to {address:#x}"))


def _store(destination: np.ndarray, value: np.ndarray) -> None:
    destination[:] = value


@handler("st.async", family=Family.MEMORY, destinations=0, shares_memory=ordered_in_global)
def st_async(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """st.async: to another CTA's shared memory with complete-tx, or a release store to global memory."""
    if ins.has("mmio"):
        raise UnsupportedInstruction(f"`{ins.opcode}`")
    if not ins.has(COMPLETE_TX) and not ins.has("global"):
        raise UnsupportedInstruction(f"`{ins.opcode}` in generic address space")
    _issue_remote(m, w, ins, mask, _store)


@handler("red.async", family=Family.MEMORY, destinations=0, shares_memory=outside_shared)
def red_async(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """red.async: reduces into another CTA's shared memory with complete-tx, or into global memory."""
    if ins.has("mmio"):
        raise UnsupportedInstruction(f"`{ins.opcode}`")
    operation = next(part for part in ins.parts if part in reduction.OPERATIONS)
    _issue_remote(m, w, ins, mask, reduction.combine(operation, ins.parts[-1]))


@handler("st.bulk", family=Family.MEMORY, destinations=0)
def st_bulk(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """st.bulk sets shared memory to zero, at once."""
    addresses, sizes = w.address(ins.operands[0]), w.u64(ins.operands[1])
    if w.scalar(ins.operands[2], mask) != 0:
        raise UnsupportedInstruction(f"`{ins.opcode}` with another value than 0")
    for lane in lanes(mask):
        address, nbytes = int(addresses[lane]), int(sizes[lane])
        if address % BULK_STORE_UNIT or nbytes % BULK_STORE_UNIT:
            raise MemoryFault(
                f"st.bulk of {nbytes} bytes at {address:#x}: not multiples of {BULK_STORE_UNIT}"
            )
        place = located(w, address, True)
        if m.order is not None:
            m.order.shared_range(*place, nbytes, m.order.generic(w, ins, True), w.order)
        shared_view(*place, nbytes)[:] = 0
