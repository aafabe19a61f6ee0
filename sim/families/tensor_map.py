"""Tensor maps in memory, and changed on the device. PTX ISA 9.7.9.28 (tensormap.replace)."""

from __future__ import annotations

import numpy as np

from warpspec.sim import tma
from warpspec.sim.errors import BadDescriptor, MemoryFault, UnsupportedInstruction
from warpspec.sim.families.bulk_copy import located, shared_view
from warpspec.sim.instruction import Instr
from warpspec.sim.lanes import lanes
from warpspec.sim.machine import Machine
from warpspec.sim.memory import SHARED_WINDOW
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.warp import Cta, Warp

TENSOR_MAP_ALIGN = 64  # bytes


def tensor_map_at(m: Machine, address: int) -> tma.TensorMap:
    """The map at an address of global memory. BadDescriptor where there is none."""
    if address % TENSOR_MAP_ALIGN:
        raise BadDescriptor(f"tensor map address {address:#x} is not a multiple of {TENSOR_MAP_ALIGN}")
    try:
        raw = m.gmem.view(address, tma.DESCRIPTOR_BYTES)
    except MemoryFault as fault:
        raise BadDescriptor(f"no tensor map at {address:#x}: {fault.message}") from fault
    return tma.decode(raw)


def _map_place(w: Warp, ins: Instr, address: int) -> int | tuple[Cta, int]:
    """The place of tensormap.replace's map: an address in global memory, or (CTA, offset) in shared memory."""
    generic = not ins.has("global") and not ins.has("shared::cta") and not ins.has("shared")
    if ins.has("global") or (generic and address < SHARED_WINDOW):
        return address
    return located(w, address, True)


def _map_bytes(m: Machine, w: Warp, ins: Instr, address: int) -> np.ndarray:
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
        raw = _map_bytes(m, w, ins, int(addresses[lane]))
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
