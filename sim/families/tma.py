"""Tensor copies: boxes by tensor map. `bulk_copy` says when they take effect. PTX ISA 9.7.9.27 (Tensor copy)."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np

from warpspec.sim import tma
from warpspec.sim.families.bulk_copy import (
    COMMON_MODIFIERS,
    OFFSET_MASK,
    LaneLoad,
    StoreOrder,
    check_modifiers,
    issue_load,
    located,
    shared_view,
    trailing,
)
from warpspec.sim.families.bulk_groups import BulkStore, MapRead, issuers, open_group
from warpspec.sim.families.tensor_map import tensor_map_at
from warpspec.sim.instruction import Instr, Mem
from warpspec.sim.lanes import lanes
from warpspec.sim.machine import Machine
from warpspec.sim.registry import Family, handler
from warpspec.sim.tma import copy, reduction
from warpspec.sim.warp import Cta, Warp

TENSOR_MODIFIERS = (
    COMMON_MODIFIERS
    | {"tensor", "1d", "2d", "3d", "4d", "5d", "tile", "tile::gather4", "tile::scatter4"}
    | {"cta_group::1", "cta_group::2"}
)
TENSOR_PREFETCH_MODIFIERS = TENSOR_MODIFIERS | {"prefetch", "L2"}
TENSOR_REDUCE_MODIFIERS = TENSOR_MODIFIERS | {"reduce", *reduction.OPERATIONS}


def _box_memory(cta: Cta, offset: int) -> np.ndarray:
    """All of a CTA's shared memory, in which a box lies at `offset`; the copy checks its end."""
    shared_view(cta, offset, 0)
    return cta.smem


def _coordinates(w: Warp, mem: Mem, lane: int) -> tuple[int, ...]:
    """Signed coordinates, dimension 0 first."""
    values = [w.scalar(item, 1 << lane) & 0xFFFFFFFF for item in mem.coords]
    return tuple([value - (value >> 31 << 32) for value in values])


def _read(
    m: Machine, ins: Instr, tensor_map: tma.TensorMap, coords: tuple[int, ...]
) -> tuple[np.ndarray, int]:
    """(data, bytes that count) of a box, or of the rows that tile::gather4 names."""
    if ins.plan.gathers:
        data = tma.load_rows(tensor_map, coords[0], coords[1:], m.gmem)
        return data, copy.transfer_bytes(tensor_map, copy.GATHER_ROWS)
    return tma.load_box(tensor_map, coords, m.gmem), copy.transfer_bytes(tensor_map)


def _tensor_load(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    for lane in lanes(mask):
        dst, map_address, mbar = [w.address_scalar(operand, 1 << lane) for operand in ins.operands[:3]]
        coords = _coordinates(w, ins.operands[1], lane)
        if m.order is not None:
            m.order.map_used(w, ins, map_address, 1 << lane)
        map_read = MapRead(partial(tensor_map_at, address=map_address), open_group(w, lane))
        offset = dst & OFFSET_MASK

        def load(m: Machine, map_read=map_read, coords=coords):
            tensor_map = map_read.get(m)
            data, nbytes = _read(m, ins, tensor_map, coords)
            m.stats.tma_bytes_loaded += nbytes
            return (tensor_map, data), nbytes

        def place(cta: Cta, loaded, offset=offset):
            tma.write_shared(loaded[0], _box_memory(cta, offset), offset, loaded[1])

        cta_mask = trailing(w, ins, 3, lane)
        what = f"tensor load at {coords}"
        issue_load(m, w, ins, LaneLoad(lane, dst, mbar, cta_mask, load, place, what))


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
            tensor_map = tensor_map_at(m, map_address)
            if order is not None:
                order.reads(m, cta, offset, copy.shared_bytes(tensor_map, boxes))
            return tensor_map, tma.read_shared(tensor_map, _box_memory(cta, offset), offset, boxes)

        def write(m: Machine, taken, coords=coords, order=order):
            tensor_map, data = taken
            reduces = operation is not None
            meet = m.reduction(operation, tensor_map.element.name) if reduces else copy.assign
            with nullcontext() if order is None else order.writing(m), m.gmem.viewed_by(reduces):
                if rows:
                    nbytes = tma.store_rows(tensor_map, coords[0], coords[1:], data, m.gmem, meet)
                else:
                    nbytes = tma.store_box(tensor_map, coords, data, m.gmem, meet)
            m.stats.tma_bytes_stored += nbytes

        text = f"tensor {operation or 'store'} at {coords}"
        m.defer(BulkStore(groups, read, write, text))


@handler("cp.async.bulk.tensor", family=Family.TMA, destinations=0)
def tensor_copy(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk.tensor: a load where it completes on an mbarrier, else a store."""
    check_modifiers(ins, TENSOR_MODIFIERS)
    if ins.plan.completes:
        _tensor_load(m, w, ins, mask)
    else:
        _tensor_store(m, w, ins, mask, None)


@handler("cp.reduce.async.bulk.tensor", family=Family.TMA, destinations=0, reduces=True)
def tensor_reduce(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.reduce.async.bulk.tensor: the element type is the tensor map's."""
    check_modifiers(ins, TENSOR_REDUCE_MODIFIERS)
    operation = next(part for part in ins.parts if part in reduction.OPERATIONS)
    _tensor_store(m, w, ins, mask, operation)


@handler("cp.async.bulk.prefetch.tensor", family=Family.TMA, destinations=0)
def tensor_prefetch(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """cp.async.bulk.prefetch.tensor reads a box as a load would, so that a bad map or bad coordinates are found.

    Lanes that prefetch the same box count once.
    """
    check_modifiers(ins, TENSOR_PREFETCH_MODIFIERS)
    tensor = ins.operands[0]
    maps = w.address(tensor)
    for address, coords in {(int(maps[lane]), _coordinates(w, tensor, lane)) for lane in lanes(mask)}:
        _, nbytes = _read(m, ins, tensor_map_at(m, address), coords)
        m.stats.tma_bytes_prefetched += nbytes
