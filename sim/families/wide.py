"""128-bit registers: mov.b128, ld.b128, st.b128 (PTX ISA 9.7.9)."""

from __future__ import annotations

import numpy as np

from warpspec.sim.codegen.memory import says_its_order, space_of, vector_count
from warpspec.sim.errors import MemoryFault, UnsupportedInstruction
from warpspec.sim.instruction import Instr, Operand, Reg, Vec
from warpspec.sim.lanes import lanes
from warpspec.sim.machine import Machine
from warpspec.sim.memory import in_local_window, in_shared_window
from warpspec.sim.registry import Family, fallback, handler
from warpspec.sim.warp import Warp

BYTES = 16


def read(w: Warp, operand: Operand) -> np.ndarray:
    """Read a 128-bit operand, one register or two of 64 bits, as uint64 [32, 2], low half first."""
    if isinstance(operand, Vec):
        return np.stack([w.u64(item) for item in operand.items], axis=1)
    return w._view(operand.name).copy()


def write(w: Warp, operand: Operand, values: np.ndarray, mask: int) -> None:
    """Write uint64 [32, 2], low half first, to a 128-bit operand in the lanes of the mask."""
    if isinstance(operand, Vec):
        for position, item in enumerate(operand.items):
            w.set_u64(item, values[:, position], mask)
        return
    view = w._view(operand.name)
    for lane in lanes(mask):
        view[lane] = values[lane]


@handler("mov.b128", family=Family.MOVE, destinations=1)
def mov(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mov.b128 copies, packs or unpacks a 128-bit register."""
    write(w, ins.operands[0], read(w, ins.operands[1]), mask)


def place(m: Machine, w: Warp, ins: Instr, address: int, nbytes: int, store: bool) -> np.ndarray:
    """uint8 view of the bytes at an address of the instruction's state space, aligned to their number."""
    if address % nbytes:
        raise MemoryFault(f"{nbytes}-byte access at {address:#x} is not aligned to its size")
    return bytes_at(m, w, ins, address, nbytes, store)


def bytes_at(m: Machine, w: Warp, ins: Instr, address: int, nbytes: int, store: bool) -> np.ndarray:
    """uint8 view of bytes in the instruction's state space, whatever their alignment. MemoryFault unless they are in
    one allocation."""
    space = space_of(ins)
    if space in ("shared", "cluster"):
        return m.shared(w, address & 0xFFFFFFFF, nbytes)
    if space == "generic" and in_shared_window(address):
        return m.shared(w, address & 0xFFFFFFFF, nbytes)
    if space == "local" or in_local_window(address):
        raise MemoryFault(f"`{ins.opcode}` on local memory")
    return m.gmem.view(address, nbytes, write=store)


@fallback("ld")
def ld(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """ld.b128 into a 128-bit register; other forms of ld are native."""
    require_b128(ins)
    addresses = w.address(ins.operands[1])
    values = np.zeros((32, 2), np.uint64)
    if m.order is not None and not says_its_order(ins):
        m.order.lane_access(w, ins, addresses[lanes(mask)], mask)
    for lane in lanes(mask):
        values[lane] = place(m, w, ins, int(addresses[lane]), BYTES, False).view(np.uint64)
    write(w, ins.operands[0], values, mask)


@fallback("st")
def st(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """st.b128 of a 128-bit register; other forms of st are native."""
    require_b128(ins)
    addresses, values = w.address(ins.operands[0]), read(w, ins.operands[1])
    if m.order is not None and not says_its_order(ins):
        m.order.lane_access(w, ins, addresses[lanes(mask)], mask)
    for lane in lanes(mask):
        place(m, w, ins, int(addresses[lane]), BYTES, True).view(np.uint64)[:] = values[lane]


def require_b128(ins: Instr) -> None:
    if (
        ins.parts[-1] != "b128"
        or vector_count(ins) > 1
        or not isinstance(ins.operands[0 if ins.parts[0] == "ld" else 1], (Reg, Vec))
    ):
        raise UnsupportedInstruction(f"`{ins.opcode}`")
