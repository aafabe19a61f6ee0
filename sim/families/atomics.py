"""atom and red without a native translation: 16-bit floats, vectors, b16 and b128 (PTX ISA 9.7.13).

A vector is atomic element by element; the lanes of a warp go one after the other, or at once where each has elements
of its own.
"""

from __future__ import annotations

import numpy as np

from warpspec.sim.codegen.memory import reduces_in_global, space_of
from warpspec.sim.errors import MemoryFault, UnsupportedInstruction
from warpspec.sim.families.alu import form_of
from warpspec.sim.families.wide import bytes_at, place, read, write
from warpspec.sim.instruction import Instr, Operand, Vec
from warpspec.sim.lanes import lanes
from warpspec.sim.machine import Machine
from warpspec.sim.memory import in_local_window, in_shared_window
from warpspec.sim.reductions import SeenReductions
from warpspec.sim.registry import fallback
from warpspec.sim.tma import reduction
from warpspec.sim.warp import LANE_NUMBERS, Warp

# bits of an element, operations
TYPES = {
    "f16": (16, ("add", "min", "max")),
    "bf16": (16, ("add", "min", "max")),
    "f16x2": (32, ("add", "min", "max")),
    "bf16x2": (32, ("add", "min", "max")),
    "f32": (32, ("add",)),
    "b16": (16, ("cas",)),
    "b128": (128, ("exch", "cas")),
}
KEPT_TYPES = {  # element of a reduction that is kept back (`reduction.combine`), bits of an operand
    "f16": ("f16", 16), "bf16": ("bf16", 16), "f16x2": ("f16", 32), "bf16x2": ("bf16", 32), "f32": ("f32.ftz", 32),
    "f64": ("f64", 64), **{name: (name, int(name[1:])) for name in ("u32", "s32", "b32", "u64", "s64", "b64")},
}  # fmt: skip
VECTORS = {"v2": 2, "v4": 4, "v8": 8}
MAX_BYTES = 16


def parse(ins: Instr) -> tuple[str, str, int]:
    """(operation, type, elements), in the order of the ISA's grammar, operation first, or of its examples."""
    type_ = next((part for part in ins.parts[1:] if part in TYPES), None)
    count = next((VECTORS[part] for part in ins.parts[1:] if part in VECTORS), 1)
    bits, operations = TYPES.get(type_, (0, ()))
    operation = next((part for part in ins.parts[1:] if part in operations), None)
    vector_type = type_ not in ("b16", "b128") and count * bits // 8 <= MAX_BYTES
    if operation is None or (count > 1 and not vector_type):
        raise UnsupportedInstruction(f"the simulator does not execute `{ins.opcode}`")
    return operation, type_, count


def operand_lanes(w: Warp, operand: Operand, bits: int) -> np.ndarray:
    """Read a source operand as uint [elements, 32], or as uint64 [1, 32, 2] for 128 bits."""
    if bits == 128:
        return read(w, operand)[None]
    items = operand.items if isinstance(operand, Vec) else (operand,)
    return np.stack([w.values(item, bits) for item in items])


def all_at_once(m, w, ins, mask, addresses, nbytes, combine, source, old) -> bool:
    """Do an operation for the lanes of a mask together, if no two have the same address; whether it is done.

    nbytes: of a lane. source: uint [elements, 32]. old: its like, which receives what was there.
    """
    active = np.flatnonzero(mask >> LANE_NUMBERS & 1)
    places = addresses[active]
    low, high = int(places.min()), int(places.max())
    if (places % nbytes).any() or len(set(places.tolist())) < len(places):
        return False
    try:
        cells = bytes_at(m, w, ins, low, high - low + nbytes, True).view(old.dtype)
    except MemoryFault:  # several allocations; or the slow path tells which lane's access is wrong
        return False
    first = (places - low) // old.itemsize
    index = (first[:, None] + np.arange(len(old), dtype=first.dtype)).ravel()
    before = cells[index]
    cells[index] = combine(before, np.ascontiguousarray(source[:, active].T).ravel())
    old[:, active] = before.reshape(len(active), len(old)).T
    return True


def keep_back(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """Note a reduction into global memory, until all shares of the launch have ended."""
    operation = next(part for part in ins.parts[1:] if part in reduction.OPERATIONS)
    type_ = next(part for part in reversed(ins.parts) if part in KEPT_TYPES)
    element, bits = KEPT_TYPES[type_]
    first = int(ins.parts[0] == "atom")
    address, source = ins.operands[first : first + 2]  # a cache policy may follow
    active = np.flatnonzero(mask >> LANE_NUMBERS & 1)
    places = w.address(address)[active]
    if any(in_shared_window(place) or in_local_window(place) for place in places.tolist()):
        raise SeenReductions  # whose native code this program does not have
    values = np.ascontiguousarray(operand_lanes(w, source, bits)[:, active].T).view(np.uint8)
    if (places % np.uint64(values.shape[1])).any():
        raise MemoryFault(f"`{ins.opcode}` at {int(places[0]):#x} is not aligned to its size")
    m.reductions.lanes(operation, element, places, values)


@fallback("atom", "red")
def atomic(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """atom d, [a], b[, c]; red [a], b."""
    if m.reductions is not None and reduces_in_global(ins):
        keep_back(m, w, ins, mask)
        return
    operation, type_, count = parse(ins)
    bits = TYPES[type_][0]
    operands = list(ins.operands)
    target = operands.pop(0) if ins.parts[0] == "atom" else None
    addresses = w.address(operands[0])
    sources = [operand_lanes(w, operand, bits) for operand in operands[1 : 3 if operation == "cas" else 2]]
    old = np.zeros_like(sources[0])
    # Like the scalar form in global memory.
    flush = ".ftz" if type_ == "f32" and space_of(ins) != "shared" else ""
    combine = None if operation in ("exch", "cas") else form_of(f"{operation}{flush}.{type_}", 2).function
    nbytes = count * bits // 8
    if combine is None or not all_at_once(m, w, ins, mask, addresses, nbytes, combine, sources[0], old):
        for lane in lanes(mask):
            cells = place(m, w, ins, int(addresses[lane]), nbytes, True).view(old.dtype)
            before = cells.copy().reshape(old[:, lane].shape)
            old[:, lane] = before
            if combine is not None:
                after = combine(before, sources[0][:, lane])
            elif operation == "exch":
                after = sources[0][:, lane]
            else:
                after = sources[1][:, lane] if (before == sources[0][:, lane]).all() else before
            cells[:] = after.reshape(-1)
    if target is None:
        return
    if bits == 128:
        write(w, target, old[0], mask)
        return
    for item, values in zip(target.items if isinstance(target, Vec) else (target,), old, strict=True):
        w.set_values(item, values, bits, mask)
