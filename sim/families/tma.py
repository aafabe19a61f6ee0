"""Bulk and tensor copies, their completion groups, and tensor maps changed on the device.

A copy takes effect when its operation is scheduled, not when it is issued. Loads write shared memory and then
complete-tx their mbarrier; a multicast does so in each destination at a time of its own. Stores read shared
memory in one scheduled step and write global memory in a later one, so that `wait_group.read` waits for less
than `wait_group`. PTX ISA 9.7.9.25 (Asynchronous copy), 9.7.9.27 (Tensor copy), 9.7.9.28 (tensormap.replace).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from warpspec.sim import tma
from warpspec.sim.errors import BadDescriptor, BarrierFault, MemoryFault, UnsupportedInstruction
from warpspec.sim.families import mbarrier
from warpspec.sim.families.bulk_groups import BulkGroup, BulkStore, MapRead, issuers, open_group
from warpspec.sim.instruction import Instr, Mem
from warpspec.sim.lanes import WARP_SIZE, lanes
from warpspec.sim.machine import Machine
from warpspec.sim.memory import CTA_RANK_SHIFT, SHARED_BASE_OFFSET, SHARED_WINDOW
from warpspec.sim.operation import Op
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.tma import copy, reduction
from warpspec.sim.warp import Cta, Warp

TENSOR_MAP_ALIGN = 64  # bytes
BULK_ALIGN = 16  # bytes: addresses and sizes of bulk copies
OFFSET_MASK = (1 << CTA_RANK_SHIFT) - 1
BYTE_MASK_PERIOD = 16  # bytes: what a bit mask of .cp_mask covers
COMPLETE_TX = "mbarrier::complete_tx::bytes"
CACHE_HINT = "L2::cache_hint"
MULTICAST = "multicast::cluster"
IM2COL = ("im2col", "im2col::w", "im2col::w::128", "im2col_no_offs", "im2col_no_offs::w")
COMMON_MODIFIERS = {"cp", "async", "bulk", "global", "shared::cta", "shared::cluster", "bulk_group"}
COMMON_MODIFIERS |= {COMPLETE_TX, CACHE_HINT, MULTICAST}
TENSOR_MODIFIERS = COMMON_MODIFIERS | {"tensor", "1d", "2d", "3d", "4d", "5d", "tile", "tile::gather4"}
TENSOR_MODIFIERS |= {"tile::scatter4", "cta_group::1", "cta_group::2"}
TENSOR_PREFETCH_MODIFIERS = TENSOR_MODIFIERS | {"prefetch", "L2"}
TENSOR_REDUCE_MODIFIERS = TENSOR_MODIFIERS | {"reduce", *reduction.OPERATIONS}
BULK_REDUCE_MODIFIERS = COMMON_MODIFIERS | {"reduce", "noftz", *reduction.OPERATIONS}
BULK_REDUCE_TYPES = ("f16", "bf16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")


# ---- operands and places -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _check_modifiers(opcode: str, parts: tuple[str, ...], known: frozenset[str]) -> None:
    for part in parts:
        if part in IM2COL:
            raise UnsupportedInstruction(f"im2col tensor copy `{opcode}`")
        if part not in known:
            raise UnsupportedInstruction(f"modifier .{part} of `{opcode}`")


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


def _box_memory(cta: Cta, offset: int) -> np.ndarray:
    """All of a CTA's shared memory, in which a box lies at `offset`; the copy checks its end."""
    shared_view(cta, offset, 0)
    return cta.smem


def _aligned(value: int, what: str) -> int:
    if value % BULK_ALIGN:
        raise MemoryFault(f"{what} {value:#x} of a bulk copy is not a multiple of {BULK_ALIGN}")
    return value


def _tensor_map(m: Machine, address: int) -> tma.TensorMap:
    if address % TENSOR_MAP_ALIGN:
        raise BadDescriptor(f"tensor map address {address:#x} is not a multiple of {TENSOR_MAP_ALIGN}")
    try:
        raw = m.gmem.view(address, tma.DESCRIPTOR_BYTES)
    except MemoryFault as fault:
        raise BadDescriptor(f"no tensor map at {address:#x}: {fault.message}") from fault
    return tma.decode(raw)


def _coordinates(w: Warp, mem: Mem, lane: int) -> tuple[int, ...]:
    """Signed coordinates, dimension 0 first."""
    values = (w.scalar(item, 1 << lane) & 0xFFFFFFFF for item in mem.coords)
    return tuple(value - (value >> 31 << 32) for value in values)


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
    """What the order checker is told of a load. op: its operation. source: (CTA, offset) of a copy from shared memory.

    offset: where it writes shared memory.
    """

    op: object
    offset: int
    source: tuple[Cta, int] | None

    def load(self, m: Machine, load: BulkLoad) -> tuple:
        """Take the source, and tell of what is read and written."""
        order, op = m.order, self.op
        barrier = mbarrier.lookup(*load.barrier)
        read, written = order.loads_on(op, barrier, write=False), order.loads_on(op, barrier)
        with order.watching(read, op.clock):
            data, nbytes = load.load(m)
        if self.source is not None:
            order.shared_range(*self.source, nbytes, read, op.clock)
        covered = nbytes
        if isinstance(data, tuple):  # of a tensor load: gaps in shared memory count as written
            covered = copy.shared_bytes(data[0], data[1].size // copy.box_bytes(data[0]))
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
    pair = ins.has("cta_group::2")
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


def _issue_load(
    m: Machine,
    w: Warp,
    ins: Instr,
    dst: int,
    mbar: int,
    cta_mask: int | None,
    load: Callable,
    place: Callable,
    what: str,
    lane: int,
    source: tuple[Cta, int] | None = None,
) -> None:
    """source: (CTA, offset) of a copy from shared memory."""
    own = not ins.has("shared::cluster")
    target, barrier = located(w, dst, own), located(w, mbar, own)
    load = _once(load)
    order = None if m.order is None else LoadOrder(m.order.issue(w, ins, mask=1 << lane), target[1], source)
    for cta, signalled in _destinations(w, ins, target, barrier, cta_mask):
        m.defer(BulkLoad(load, place, cta, signalled, f"{what} to CTA {cta.rank} +{target[1]:#x}", order))


def _trailing(w: Warp, ins: Instr, first: int, lane: int) -> int | None:
    """The CTA mask of a load whose optional operands begin at `first`."""
    expected = ins.has(MULTICAST) + ins.has(CACHE_HINT)
    if len(ins.operands) != first + expected:
        raise UnsupportedInstruction(f"`{ins.opcode}` with {len(ins.operands)} operands")
    return w.scalar(ins.operands[first], 1 << lane) & 0xFFFF if ins.has(MULTICAST) else None


def _read(
    m: Machine, ins: Instr, tensor_map: tma.TensorMap, coords: tuple[int, ...]
) -> tuple[np.ndarray, int]:
    """(data, bytes that count) of a box, or of the rows that tile::gather4 names."""
    if ins.has("tile::gather4"):
        data = tma.load_rows(tensor_map, coords[0], coords[1:], m.gmem)
        return data, copy.transfer_bytes(tensor_map, copy.GATHER_ROWS)
    return tma.load_box(tensor_map, coords, m.gmem), copy.transfer_bytes(tensor_map)


def _tensor_load(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    for lane in lanes(mask):
        dst, map_address, mbar = (w.address_scalar(operand, 1 << lane) for operand in ins.operands[:3])
        coords = _coordinates(w, ins.operands[1], lane)
        if m.order is not None:
            m.order.map_used(w, ins, map_address, 1 << lane)
        map_read = MapRead(partial(_tensor_map, address=map_address), open_group(w, lane))
        offset = dst & OFFSET_MASK

        def load(m: Machine, map_read=map_read, coords=coords):
            tensor_map = map_read.get(m)
            data, nbytes = _read(m, ins, tensor_map, coords)
            m.stats.tma_bytes_loaded += nbytes
            return (tensor_map, data), nbytes

        def place(cta: Cta, loaded, offset=offset):
            tma.write_shared(loaded[0], _box_memory(cta, offset), offset, loaded[1])

        cta_mask = _trailing(w, ins, 3, lane)
        what = f"tensor load at {coords}"
        _issue_load(m, w, ins, dst, mbar, cta_mask, load, place, what, lane)


def _bulk_load(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """global or shared::cta to shared::cluster or shared::cta."""
    dst, src, size, mbar = ins.operands[:4]
    from_global = ins.has("global")
    dsts, srcs, mbars = (w.address(operand) for operand in (dst, src, mbar))
    sizes = w.u32(size)
    for lane in lanes(mask):
        nbytes = _aligned(int(sizes[lane]), "size")
        source = _aligned(int(srcs[lane]), "source")
        offset = _aligned(int(dsts[lane]), "destination") & OFFSET_MASK

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

        cta_mask = _trailing(w, ins, 4, lane)
        what = f"bulk copy of {nbytes} bytes"
        _issue_load(m, w, ins, int(dsts[lane]), int(mbars[lane]), cta_mask, load, place, what, lane, origin)


# ---- stores ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StoreOrder:
    """What the order checker is told of a store: its operation and its accesses."""

    op: object
    read: object
    written: object

    @classmethod
    def issue(cls, m: Machine, w: Warp, ins: Instr, group: BulkGroup, reduces: bool, lane: int) -> StoreOrder:
        """Of a store that a thread issues into a bulk async-group."""
        order = m.order
        op = order.issue(w, ins, mask=1 << lane)
        reads, writes = order.queue(w, "bulk reads"), order.queue(w, "bulk writes")
        read = order.of(op, False, component=reads.component, count=group.number)
        written = order.of(op, True, component=writes.component, count=group.number, strong=reduces)
        return cls(op, read, written)

    def reads(self, m: Machine, cta: Cta, offset: int, nbytes: int) -> None:
        """It reads shared memory."""
        m.order.shared_range(cta, offset, nbytes, self.read, self.op.clock)

    def writing(self, m: Machine):
        """Meanwhile it writes global memory."""
        return m.order.watching(self.written, self.op.clock)


def _tensor_store(m: Machine, w: Warp, ins: Instr, mask: int, operation: str | None) -> None:
    tensor, src = ins.operands[:2]
    rows = ins.has("tile::scatter4")
    boxes = copy.GATHER_ROWS if rows else 1
    maps, srcs = w.address(tensor), w.address(src)
    keys = list(zip(maps.tolist(), srcs.tolist(), *(w.u32(c).tolist() for c in tensor.coords), strict=True))
    for together in issuers(mask, keys, once=operation is None):
        lane = together[0]
        coords = _coordinates(w, tensor, lane)
        cta, offset = located(w, int(srcs[lane]), True)

        groups = [open_group(w, lane) for lane in together]
        order = (
            None if m.order is None else StoreOrder.issue(m, w, ins, groups[0], operation is not None, lane)
        )
        if m.order is not None:
            m.order.map_used(w, ins, int(maps[lane]), 1 << lane)

        def read(m: Machine, map_address=int(maps[lane]), cta=cta, offset=offset, order=order):
            tensor_map = _tensor_map(m, map_address)
            if order is not None:
                order.reads(m, cta, offset, copy.shared_bytes(tensor_map, boxes))
            return tensor_map, tma.read_shared(tensor_map, _box_memory(cta, offset), offset, boxes)

        def write(m: Machine, taken, coords=coords, order=order):
            tensor_map, data = taken
            meet = copy.assign if operation is None else reduction.combine(operation, tensor_map.element.name)
            with nullcontext() if order is None else order.writing(m):
                if rows:
                    nbytes = tma.store_rows(tensor_map, coords[0], coords[1:], data, m.gmem, meet)
                else:
                    nbytes = tma.store_box(tensor_map, coords, data, m.gmem, meet)
            m.stats.tma_bytes_stored += nbytes

        text = f"tensor {operation or 'store'} at {coords}"
        m.defer(BulkStore(groups, read, write, text))


def _bulk_store(m: Machine, w: Warp, ins: Instr, mask: int, meet: Callable) -> None:
    """shared::cta to global; `meet(destination, source)` assigns or reduces."""
    dst, src, size = ins.operands[:3]
    dsts, srcs, sizes = w.address(dst), w.address(src), w.u32(size)
    byte_masks = w.u16(ins.operands[-1]) if ins.has("cp_mask") else None
    masks = [0] * WARP_SIZE if byte_masks is None else byte_masks.tolist()
    keys = list(zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), masks, strict=True))
    for together in issuers(mask, keys, once=meet is copy.assign):
        lane = together[0]
        nbytes = _aligned(int(sizes[lane]), "size")
        target = _aligned(int(dsts[lane]), "destination")
        cta, offset = located(w, _aligned(int(srcs[lane]), "source"), True)
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


@handler("cp.async.bulk.tensor", family=Family.TMA, destinations=0)
def tensor_copy(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk.tensor: a load where it completes on an mbarrier, else a store."""
    _check_modifiers(ins.opcode, ins.parts, frozenset(TENSOR_MODIFIERS))
    if ins.has(COMPLETE_TX):
        _tensor_load(m, w, ins, mask)
    else:
        _tensor_store(m, w, ins, mask, None)


@handler("cp.reduce.async.bulk.tensor", family=Family.TMA, destinations=0, shares_memory=True)
def tensor_reduce(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.reduce.async.bulk.tensor: the element type is the tensor map's."""
    _check_modifiers(ins.opcode, ins.parts, frozenset(TENSOR_REDUCE_MODIFIERS))
    operation = next(part for part in ins.parts if part in reduction.OPERATIONS)
    _tensor_store(m, w, ins, mask, operation)


@handler("cp.async.bulk", family=Family.TMA, destinations=0)
def bulk_copy(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk: a load where it completes on an mbarrier, else a store."""
    _check_modifiers(ins.opcode, ins.parts, frozenset(COMMON_MODIFIERS | {"cp_mask"}))
    if ins.has(COMPLETE_TX):
        _bulk_load(m, w, ins, mask)
    else:
        _bulk_store(m, w, ins, mask, copy.assign)


@handler("cp.reduce.async.bulk", family=Family.TMA, destinations=0, shares_memory=True)
def bulk_reduce(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.reduce.async.bulk to global memory or, with an mbarrier, to another CTA's shared memory."""
    _check_modifiers(ins.opcode, ins.parts, frozenset(BULK_REDUCE_MODIFIERS.union(BULK_REDUCE_TYPES)))
    operation = next(part for part in ins.parts if part in reduction.OPERATIONS)
    meet = reduction.combine(operation, ins.parts[-1])
    if not ins.has(COMPLETE_TX):
        _bulk_store(m, w, ins, mask, meet)
        return
    dst, src, size, mbar = ins.operands
    dsts, srcs, mbars = (w.address(operand) for operand in (dst, src, mbar))
    sizes = w.u32(size)
    for lane in lanes(mask):
        nbytes = _aligned(int(sizes[lane]), "size")
        origin = located(w, _aligned(int(srcs[lane]), "source"), True)
        offset = _aligned(int(dsts[lane]), "destination") & OFFSET_MASK

        def load(m: Machine, origin=origin, nbytes=nbytes):
            return shared_view(*origin, nbytes), nbytes

        def place(cta: Cta, data: np.ndarray, offset=offset):
            meet(shared_view(cta, offset, data.size), data)

        what = f"bulk {operation} of {nbytes} bytes"
        _issue_load(m, w, ins, int(dsts[lane]), int(mbars[lane]), None, load, place, what, lane, origin)


@handler("cp.async.bulk.prefetch", "prefetch.global", family=Family.TMA, destinations=0)
def prefetch(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk.prefetch and prefetch change nothing that a program can see."""


@handler("cp.async.bulk.prefetch.tensor", family=Family.TMA, destinations=0)
def tensor_prefetch(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk.prefetch.tensor reads a box as a load would, so that a bad map or bad coordinates are found.

    Lanes that prefetch the same box count once.
    """
    _check_modifiers(ins.opcode, ins.parts, frozenset(TENSOR_PREFETCH_MODIFIERS))
    tensor = ins.operands[0]
    maps = w.address(tensor)
    for address, coords in {(int(maps[lane]), _coordinates(w, tensor, lane)) for lane in lanes(mask)}:
        _, nbytes = _read(m, ins, _tensor_map(m, address), coords)
        m.stats.tma_bytes_prefetched += nbytes


def _map_place(w: Warp, ins: Instr, address: int) -> int | tuple[Cta, int]:
    """Where tensormap.replace finds its map: an address in global memory, or (CTA, offset) in shared memory."""
    generic = not ins.has("global") and not ins.has("shared::cta") and not ins.has("shared")
    if ins.has("global") or (generic and address < SHARED_WINDOW):
        return address
    return located(w, address, True)


def _tensor_map_bytes(m: Machine, w: Warp, ins: Instr, address: int) -> np.ndarray:
    """The 128 bytes of a tensor map in shared, global or generic address space, writable."""
    if address % TENSOR_MAP_ALIGN:
        raise BadDescriptor(f"tensor map address {address:#x} is not a multiple of {TENSOR_MAP_ALIGN}")
    place = _map_place(w, ins, address)
    if isinstance(place, tuple):
        return shared_view(*place, tma.DESCRIPTOR_BYTES)
    return m.gmem.view(place, tma.DESCRIPTOR_BYTES, write=True)


@handler("tensormap.replace", family=Family.TMA, destinations=0)
def tensormap_replace(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tensormap.replace.tile.field: a generic-proxy write, done at once."""
    field = ins.parts[3]
    if ins.parts[2] != "tile":
        raise UnsupportedInstruction(f"`{ins.opcode}` in mode .{ins.parts[2]}")
    addresses = w.address(ins.operands[0])
    ordinals = w.u32(ins.operands[1]) if len(ins.operands) == 3 else None
    values = w.u64(ins.operands[-1]) if ins.has("b64") else w.u32(ins.operands[-1])
    for lane in lanes(mask):
        raw = _tensor_map_bytes(m, w, ins, int(addresses[lane]))
        if m.order is not None:
            m.order.map_written(w, ins, _map_place(w, ins, int(addresses[lane])), 1 << lane)
        tma.replace_field(raw, field, 0 if ordinals is None else int(ordinals[lane]), int(values[lane]))


@handler("tensormap.cp_fenceproxy", family=Family.TMA, destinations=0, collective=Collective.WARP)
def tensormap_cp_fenceproxy(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tensormap.cp_fenceproxy: copies a tensor map from shared to global memory, once for the warp."""
    dst, src, size = ins.operands
    lane = lanes(mask)[0]
    if w.scalar(size, mask) != tma.DESCRIPTOR_BYTES:
        raise BadDescriptor(f"tensormap.cp_fenceproxy of {w.scalar(size, mask)} bytes")
    place, target = located(w, int(w.address(src)[lane]), True), int(w.address(dst)[lane])
    m.gmem.view(target, tma.DESCRIPTOR_BYTES, write=True)[:] = shared_view(*place, tma.DESCRIPTOR_BYTES)
    if m.order is not None:
        m.order.map_copied(w, ins, place, target)
