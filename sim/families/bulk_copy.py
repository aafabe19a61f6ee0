"""Bulk copies: of contiguous bytes, and what tensor copies have in common with them.

A copy takes effect when its operation is scheduled, not when it is issued. Loads write shared memory and then
complete-tx their mbarrier; a multicast does so in each destination at a time of its own. Stores read shared
memory in one scheduled step and write global memory in a later one, so that `wait_group.read` waits for less
than `wait_group`. PTX ISA 9.7.9.25 (Asynchronous copy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from warpspec.sim.errors import BarrierFault, MemoryFault, UnsupportedInstruction
from warpspec.sim.families import mbarrier
from warpspec.sim.families.bulk_groups import BulkGroup, BulkStore, issuers, open_group
from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import WARP_SIZE, lanes
from warpspec.sim.machine import Machine
from warpspec.sim.memory import CTA_RANK_SHIFT, SHARED_BASE_OFFSET
from warpspec.sim.operation import Op
from warpspec.sim.registry import Family, handler
from warpspec.sim.tma import copy, reduction
from warpspec.sim.warp import Cta, Warp

BULK_ALIGN = 16  # bytes: addresses and sizes of bulk copies
OFFSET_MASK = (1 << CTA_RANK_SHIFT) - 1
BYTE_MASK_PERIOD = 16  # bytes: what a bit mask of .cp_mask covers
COMPLETE_TX = "mbarrier::complete_tx::bytes"
CACHE_HINT = "L2::cache_hint"
MULTICAST = "multicast::cluster"
IM2COL = ("im2col", "im2col::w", "im2col::w::128", "im2col_no_offs", "im2col_no_offs::w")
COMMON_MODIFIERS = frozenset(
    {"cp", "async", "bulk", "global", "shared::cta", "shared::cluster", "bulk_group"}
    | {COMPLETE_TX, CACHE_HINT, MULTICAST}
)
BULK_MODIFIERS = COMMON_MODIFIERS | {"cp_mask"}
BULK_REDUCE_TYPES = ("f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")
BULK_REDUCE_MODIFIERS = COMMON_MODIFIERS | {"reduce", "noftz", *reduction.OPERATIONS, *BULK_REDUCE_TYPES}


# ---- operands and places -----------------------------------------------------------------------------------


def check_modifiers(ins: Instr, known: frozenset[str]) -> None:
    """Raise UnsupportedInstruction for an unknown modifier. Each instruction is checked once."""
    if ins.plan is not None:
        return
    for part in ins.parts:
        if part in IM2COL:
            raise UnsupportedInstruction(f"im2col tensor copy `{ins.opcode}`")
        if part not in known:
            raise UnsupportedInstruction(f"modifier .{part} of `{ins.opcode}`")
    ins.plan = CopyPlan(
        completes=COMPLETE_TX in ins.parts,
        own="shared::cluster" not in ins.parts,
        pair="cta_group::2" in ins.parts,
        multicast=MULTICAST in ins.parts,
        gathers="tile::gather4" in ins.parts,
        optional=(MULTICAST in ins.parts) + (CACHE_HINT in ins.parts),
    )


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The meaning of a copy's opcode.

    completes: the copy completes on an mbarrier. own: the destination belongs to the executing CTA. pair:
    .cta_group::2. multicast: the copy goes to several CTAs. optional: number of operands after those that every copy
    has.
    """

    completes: bool
    own: bool
    pair: bool
    multicast: bool
    gathers: bool
    optional: int


def located(w: Warp, address: int, own: bool) -> tuple[Cta, int]:
    """The CTA and the offset of a shared address. `own`: the state space is .shared::cta."""
    address &= 0xFFFFFFFF
    rank, offset = address >> CTA_RANK_SHIFT, address & OFFSET_MASK
    if rank >= len(w.cta.cluster.ctas):
        size = len(w.cta.cluster.ctas)
        raise MemoryFault(f"shared address {address:#x} is in CTA {rank} of a cluster of {size}")
    if own and rank != w.cta.rank:
        raise MemoryFault(
            f".shared::cta address {address:#x} is in CTA {rank}, not in the executing {w.cta.rank}"
        )
    return w.cta.cluster.ctas[rank], offset


def shared_view(cta: Cta, offset: int, nbytes: int) -> np.ndarray:
    """uint8 view of a CTA's shared memory; MemoryFault outside it, or once all its warps have exited."""
    if cta.exited:
        raise MemoryFault(f"asynchronous access to shared memory of CTA {cta.coords}, which has exited")
    if offset < SHARED_BASE_OFFSET or offset + nbytes > cta.smem.size:
        limits = f"{SHARED_BASE_OFFSET:#x} to {cta.smem.size:#x}"
        raise MemoryFault(f"{nbytes} bytes at shared offset {offset:#x}: shared memory is {limits}")
    return cta.smem[offset : offset + nbytes]


def aligned(value: int, what: str) -> int:
    if value % BULK_ALIGN:
        raise MemoryFault(f"{what} {value:#x} of a bulk copy is not a multiple of {BULK_ALIGN}")
    return value


# ---- loads -------------------------------------------------------------------------------------------------


class BulkLoad(Op):
    """One destination of a load: writes shared memory and completes the transaction on an mbarrier."""

    __slots__ = ("barrier", "load", "nbytes", "order", "place", "target")

    def __init__(
        self, load: Callable, place: Callable, target: Cta, barrier: tuple[Cta, int], text: str, order=None
    ):
        super().__init__(text)
        self.load, self.place, self.target, self.barrier = load, place, target, barrier
        self.order: LoadOrder | None = order

    def execute(self, m: Machine) -> None:
        if self.order is None:
            data, nbytes = self.load(m)
        else:
            data, nbytes = self.order.load(m, self)
        self.place(self.target, data)
        mbarrier.complete_tx(m, *self.barrier, nbytes, op=None if self.order is None else self.order.op)


@dataclass(slots=True)
class LoadOrder:
    """The order checker's view of a load. op: its operation. source: (CTA, offset) of a copy from shared memory.

    offset: where it writes shared memory.
    """

    op: object
    offset: int
    source: tuple[Cta, int] | None

    def load(self, m: Machine, load: BulkLoad) -> tuple:
        """Read the source and report what is read and written to the order checker."""
        order, op = m.order, self.op
        barrier = mbarrier.lookup(*load.barrier)
        read, written = order.loads_on(op, barrier, write=False), order.loads_on(op, barrier)
        with order.watching(read, op.clock):
            data, nbytes = load.load(m)
        if self.source is not None:
            order.shared_range(*self.source, nbytes, read, op.clock)
        covered = nbytes
        if isinstance(data, tuple):  # a tensor load, whose gaps in shared memory count as written
            covered = copy.shared_bytes(data[0], data[1].size // copy.box_bytes(data[0]))
            order.layouts.written(load.target, self.offset, covered, data[0], op.ins)
        else:
            order.layouts.overwritten(load.target, self.offset, covered)
        order.shared_range(load.target, self.offset, covered, written, op.clock)
        return data, nbytes


def _once(function: Callable) -> Callable:
    """Read the source for the first destination that asks and hand the same data to the others."""
    result = []

    def call(m: Machine):
        if not result:
            result.append(function(m))
        return result[0]

    return call


def _destinations(
    w: Warp, ins: Instr, target: tuple[Cta, int], barrier: tuple[Cta, int], cta_mask: int | None
) -> list[tuple[Cta, tuple[Cta, int]]]:
    """(CTA written, mbarrier to signal) of each destination, by .multicast::cluster and .cta_group."""
    ctas = w.cta.cluster.ctas
    barrier_cta, barrier_offset = barrier
    pair = ins.plan.pair
    if cta_mask is None:
        cta = target[0]
        allowed = (cta.rank, cta.rank ^ 1) if pair else (cta.rank,)
        if barrier_cta.rank not in allowed:
            group = "" if pair else " without .cta_group::2"
            raise BarrierFault(f"mbarrier in CTA {barrier_cta.rank}, destination in CTA {cta.rank}{group}")
        return [(cta, barrier)]
    if cta_mask >> len(ctas):
        raise MemoryFault(f"multicast mask {cta_mask:#x} names CTAs outside a cluster of {len(ctas)}")
    found = []
    for rank in range(len(ctas)):
        if cta_mask >> rank & 1:
            signalled = (rank & ~1) | (barrier_cta.rank & 1) if pair else rank
            if signalled >= len(ctas):
                raise BarrierFault(f"mbarrier in CTA {signalled}, the cluster has {len(ctas)}")
            found.append((ctas[rank], (ctas[signalled], barrier_offset)))
    return found


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """A load that one lane issues.

    dst, mbar: shared addresses of its destination and its mbarrier. cta_mask: the CTAs of a multicast, else None. read:
    reads the source, (data, bytes) of a machine. place: writes such data into a CTA's shared memory. what: the load in
    words. source: (CTA, offset) of a copy from shared memory, else None.
    """

    lane: int
    dst: int
    mbar: int
    cta_mask: int | None
    read: Callable
    place: Callable
    what: str
    source: tuple[Cta, int] | None = None


def issue_load(m: Machine, w: Warp, ins: Instr, load: LaneLoad) -> None:
    """Defer a load, once for each CTA that it writes."""
    own = ins.plan.own
    target, barrier = located(w, load.dst, own), located(w, load.mbar, own)
    read = load.read if load.cta_mask is None else _once(load.read)
    order = None
    if m.order is not None:
        order = LoadOrder(m.order.issue(w, ins, mask=1 << load.lane), target[1], load.source)
    for cta, signalled in _destinations(w, ins, target, barrier, load.cta_mask):
        text = f"{load.what} to CTA {cta.rank} +{target[1]:#x}"
        m.defer(BulkLoad(read, load.place, cta, signalled, text, order))


def trailing(w: Warp, ins: Instr, first: int, lane: int) -> int | None:
    """The multicast CTA mask of a load whose optional operands begin at `first`."""
    plan = ins.plan
    if len(ins.operands) != first + plan.optional:
        raise UnsupportedInstruction(f"`{ins.opcode}` with {len(ins.operands)} operands")
    return w.scalar(ins.operands[first], 1 << lane) & 0xFFFF if plan.multicast else None


def _bulk_load(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """global or shared::cta to shared::cluster or shared::cta."""
    dst, src, size, mbar = ins.operands[:4]
    from_global = ins.has("global")
    dsts, srcs, mbars = (w.address(operand) for operand in (dst, src, mbar))
    sizes = w.u32(size)
    for lane in lanes(mask):
        nbytes = aligned(int(sizes[lane]), "size")
        source = aligned(int(srcs[lane]), "source")
        offset = aligned(int(dsts[lane]), "destination") & OFFSET_MASK

        if from_global:
            origin = None

            def load(m: Machine, source=source, nbytes=nbytes):
                m.stats.tma_bytes_loaded += nbytes
                if m.gmem.watch is not None:
                    m.gmem.watch(source, (nbytes,), (1,))
                return m.gmem.view(source, nbytes), nbytes

        else:
            origin = located(w, source, True)

            def load(m: Machine, origin=origin, nbytes=nbytes):
                return shared_view(*origin, nbytes), nbytes

        def place(cta: Cta, data: np.ndarray, offset=offset):
            shared_view(cta, offset, data.size)[:] = data

        cta_mask = trailing(w, ins, 4, lane)
        what = f"bulk copy of {nbytes} bytes"
        issue_load(
            m, w, ins, LaneLoad(lane, int(dsts[lane]), int(mbars[lane]), cta_mask, load, place, what, origin)
        )


# ---- stores ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StoreOrder:
    """The order checker's view of a store: its operation and its accesses."""

    op: object
    read: object
    written: object

    @classmethod
    def issue(cls, m: Machine, w: Warp, ins: Instr, group: BulkGroup, reduces: bool, lane: int) -> StoreOrder:
        """Record a store that a thread issues into a bulk async-group."""
        order = m.order
        op = order.issue(w, ins, mask=1 << lane)
        reads, writes = order.queue(w, "bulk reads"), order.queue(w, "bulk writes")
        read = order.of(op, False, component=reads.component, count=group.number)
        written = order.of(op, True, component=writes.component, count=group.number, strong=reduces)
        return cls(op, read, written)

    def reads(self, m: Machine, cta: Cta, offset: int, nbytes: int) -> None:
        """Report that the store reads shared memory."""
        m.order.shared_range(cta, offset, nbytes, self.read, self.op.clock)

    def writing(self, m: Machine):
        """Report the write to global memory while it takes place."""
        return m.order.watching(self.written, self.op.clock)


def _bulk_store(m: Machine, w: Warp, ins: Instr, mask: int, meet: Callable) -> None:
    """shared::cta to global; `meet(destination, source)` assigns or reduces."""
    dst, src, size = ins.operands[:3]
    dsts, srcs, sizes = w.address(dst), w.address(src), w.u32(size)
    byte_masks = w.u16(ins.operands[-1]) if ins.has("cp_mask") else None
    masks = [0] * WARP_SIZE if byte_masks is None else byte_masks.tolist()
    keys = list(zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), masks, strict=True))
    for together in issuers(mask, keys, once=meet is copy.assign):
        lane = together[0]
        nbytes = aligned(int(sizes[lane]), "size")
        target = aligned(int(dsts[lane]), "destination")
        cta, offset = located(w, aligned(int(srcs[lane]), "source"), True)
        chosen = None if byte_masks is None else _bytes_chosen(int(byte_masks[lane]), nbytes)

        groups = [open_group(w, lane) for lane in together]
        order = (
            None if m.order is None else StoreOrder.issue(m, w, ins, groups[0], meet is not copy.assign, lane)
        )

        def read(m: Machine, cta=cta, offset=offset, nbytes=nbytes, order=order):
            if order is not None:
                order.reads(m, cta, offset, nbytes)
            return shared_view(cta, offset, nbytes).copy()

        def write(m: Machine, data: np.ndarray, target=target, chosen=chosen, order=order):
            if order is not None:
                with order.writing(m):
                    m.gmem.watch(target, (data.size,), (1,))
            with m.gmem.viewed_by(meet is not copy.assign):
                view = m.gmem.view(target, data.size, write=True)
            if chosen is None:
                meet(view, data)
            else:
                view[chosen] = data[chosen]
            m.stats.tma_bytes_stored += data.size

        m.defer(BulkStore(groups, read, write, f"bulk store of {nbytes} bytes"))


def _bytes_chosen(byte_mask: int, nbytes: int) -> np.ndarray:
    """.cp_mask: which bytes are copied; bit i stands for byte i of every 16."""
    bits = (byte_mask >> np.arange(BYTE_MASK_PERIOD) & 1).astype(bool)
    return np.tile(bits, nbytes // BYTE_MASK_PERIOD)


# ---- instructions ------------------------------------------------------------------------------------------


@handler("cp.async.bulk", family=Family.TMA, destinations=0)
def bulk_copy(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk: a load where it completes on an mbarrier, else a store."""
    check_modifiers(ins, BULK_MODIFIERS)
    if ins.plan.completes:
        _bulk_load(m, w, ins, mask)
    else:
        _bulk_store(m, w, ins, mask, copy.assign)


@handler("cp.reduce.async.bulk", family=Family.TMA, destinations=0, reduces=True)
def bulk_reduce(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.reduce.async.bulk to global memory or, with an mbarrier, to another CTA's shared memory."""
    check_modifiers(ins, BULK_REDUCE_MODIFIERS)
    operation = next(part for part in ins.parts if part in reduction.OPERATIONS)
    if not ins.plan.completes:
        _bulk_store(m, w, ins, mask, m.reduction(operation, ins.parts[-1]))
        return
    meet = reduction.combine(operation, ins.parts[-1])
    dst, src, size, mbar = ins.operands
    dsts, srcs, mbars = (w.address(operand) for operand in (dst, src, mbar))
    sizes = w.u32(size)
    for lane in lanes(mask):
        nbytes = aligned(int(sizes[lane]), "size")
        origin = located(w, aligned(int(srcs[lane]), "source"), True)
        offset = aligned(int(dsts[lane]), "destination") & OFFSET_MASK

        def load(m: Machine, origin=origin, nbytes=nbytes):
            return shared_view(*origin, nbytes), nbytes

        def place(cta: Cta, data: np.ndarray, offset=offset):
            meet(shared_view(cta, offset, data.size), data)

        what = f"bulk {operation} of {nbytes} bytes"
        issue_load(
            m, w, ins, LaneLoad(lane, int(dsts[lane]), int(mbars[lane]), None, load, place, what, origin)
        )


@handler("cp.async.bulk.prefetch", "prefetch.global", family=Family.TMA, destinations=0)
def prefetch(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk.prefetch and prefetch change nothing that a program can see."""
