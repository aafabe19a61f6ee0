"""tcgen05.ld and tcgen05.st: registers and tensor memory. They touch tensor memory either at once or when the data
must be there, as the seed decides. PTX ISA: "TensorCore 5th Generation Instructions"."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.instruction import Imm, Instr, Mem, Operand, Vec
from warpspec.sim.machine import Machine
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.tcgen05 import transfer
from warpspec.sim.tcgen05.memory import POISON
from warpspec.sim.tcgen05.transfer import TransferMap
from warpspec.sim.warp import Warp

POISONED = np.uint32(POISON)
CANONICAL_NAN = np.uint32(0x7FFFFFFF)
EARLY = 0.5  # chance that a tcgen05.ld or .st touches tensor memory when issued, not in the wait


@dataclass(slots=True)
class Transfer:
    """A tcgen05.ld or tcgen05.st between its issue and its wait. values: uint32[registers, 32], None if not
    read. reduced: of tcgen05.ld.red, where the minimum or maximum goes and the opcode's parts."""

    registers: object
    lane: int
    column: int
    map: TransferMap
    packed: bool
    mask: int
    values: np.ndarray | None
    reduced: tuple[Operand, tuple[str, ...]] | None = None


@lru_cache(maxsize=512)
def transfer_form(parts: tuple[str, ...]) -> tuple[str, int, bool]:
    """(shape, repeat, packed)."""
    shape = next((p for p in parts if p in transfer.REGISTERS_PER_REPEAT), "")
    if "red" in parts and (shape != "32x32b" or parts[-1] not in ("f32", "u32", "s32")):
        raise UnsupportedInstruction(
            f"`{'.'.join(parts)}`: of tcgen05.ld.red only .32x32b of .f32, .u32 and .s32"
        )
    repeat = next((int(p[1:]) for p in parts if p[0] == "x" and p[1:].isdigit()), 1)
    return shape, repeat, "pack::16b" in parts or "unpack::16b" in parts


def place(
    w: Warp, ins: Instr, address: Mem, split: Imm | None, mask: int
) -> tuple[TransferMap, bool, int, int]:
    """(map, packed, lane, column) of a tcgen05.ld or .st."""
    plan = ins.plan
    if plan is None:
        shape, repeat, packed = transfer_form(ins.parts)
        tmap = transfer.transfer_map(shape, repeat, packed, split.value if split is not None else 0)
        plan = ins.plan = tmap, packed, f"tcgen05.{ins.parts[1]}"
    tmap, packed, what = plan
    lane, column = transfer.place(w.cta.tmem, w.address_scalar(address, mask), w.index, tmap, what)
    return tmap, packed, lane, column


@handler("tcgen05.ld", family=Family.TCGEN05, destinations=1, collective=Collective.WARP)
@handler("tcgen05.ld.red", family=Family.TCGEN05, destinations=2, collective=Collective.WARP)
def ld(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.ld: tensor memory to registers, which are scoreboarded: the data is there at their first use.

    When tensor memory is read is open until then or tcgen05.wait::ld: a kernel that lets others overwrite it
    without that wait reads what they wrote.
    """
    registers, *rest = ins.operands
    reduced = (rest.pop(0), ins.parts) if "red" in ins.parts else None
    address = rest[0]
    split = rest[1] if len(rest) > 1 else None
    tmap, packed, lane, column = place(w, ins, address, split, mask)
    number = 0
    if m.order is not None:
        number = m.order.tensor_transfer(w, ins, transfer.cells(lane, column, tmap, packed), write=False)
        w.state.setdefault("tcgen05.ld", set()).add(number)
    values = None
    if m.rng.random() < EARLY:
        values = transfer.load(w.cta.tmem, lane, column, tmap, packed).copy()
    w.write_vec(registers, POISONED, mask)
    load = Transfer(registers, lane, column, tmap, packed, mask, values, reduced)
    if reduced is not None:
        w.set_u32(reduced[0], POISONED, mask)
        registers = _joined(registers, reduced[0])

    def fill() -> None:
        finish_load(w, load)
        if number:
            w.state["tcgen05.ld"].discard(number)
            m.order.load_used(w)

    w.in_flight(registers, fill)


@lru_cache(maxsize=512)
def _joined(registers: Operand, target: Operand) -> Vec:
    """All registers that a tcgen05.ld.red writes."""
    return Vec((*(registers.items if isinstance(registers, Vec) else (registers,)), target))


def finish_load(w: Warp, load: Transfer) -> None:
    """Put a load's data into its registers."""
    values = load.values
    if values is None:
        values = transfer.load(w.cta.tmem, load.lane, load.column, load.map, load.packed)
    w.write_vec(load.registers, values, load.mask)
    if load.reduced is not None:
        target, parts = load.reduced
        w.set_u32(target, reduction(values, parts), load.mask)


def reduction(values: np.ndarray, parts: tuple[str, ...]) -> np.ndarray:
    """tcgen05.ld.red: uint32[32], the minimum or maximum of what each thread loads, uint32[registers, 32].

    .f32: -0 is less than +0. NaNs are left out, unless all values are NaN, or with .NaN one is: then a NaN. .abs takes
    magnitudes.
    """
    is_max = "max" in parts
    if parts[-1] != "f32":
        typed = values.view(np.int32) if parts[-1] == "s32" else values
        return (typed.max(axis=0) if is_max else typed.min(axis=0)).view(np.uint32)
    bits = values & np.uint32(0x7FFFFFFF) if "abs" in parts else values
    nan = np.isnan(bits.view(np.float32))
    # As integers that sort as the floats do: negative ones in reverse.
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = np.where(nan, np.uint32(0 if is_max else 0xFFFFFFFF), keys)
    best = keys.max(axis=0) if is_max else keys.min(axis=0)
    best = np.where(best >> 31, best & np.uint32(0x7FFFFFFF), ~best)
    return np.where(nan.any(axis=0) if "NaN" in parts else nan.all(axis=0), CANONICAL_NAN, best).astype(
        np.uint32
    )


@handler("tcgen05.wait::ld", family=Family.TCGEN05, destinations=0, collective=Collective.WARP)
def wait_ld(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.wait::ld: this warp's loads are in their registers."""
    w.settle()
    if m.order is not None:
        m.order.tensor_waited(w, write=False)


@handler("tcgen05.st", family=Family.TCGEN05, destinations=0, collective=Collective.WARP)
def st(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.st: registers to tensor memory, there at the latest after tcgen05.wait::st."""
    address, *middle, registers = ins.operands
    tmap, packed, lane, column = place(w, ins, address, middle[0] if middle else None, mask)
    values = w.read_vec(registers)
    if m.order is not None:
        m.order.tensor_transfer(w, ins, transfer.cells(lane, column, tmap, packed), write=True)
    if m.rng.random() < EARLY:
        transfer.store(w.cta.tmem, lane, column, tmap, packed, values)
        return
    pending = w.state.setdefault("tcgen05.st", [])
    pending.append(Transfer(None, lane, column, tmap, packed, mask, values))


@handler("tcgen05.wait::st", family=Family.TCGEN05, destinations=0, collective=Collective.WARP)
def wait_st(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """tcgen05.wait::st: this warp's stores are in tensor memory."""
    for t in w.state.get("tcgen05.st", ()):
        transfer.store(w.cta.tmem, t.lane, t.column, t.map, t.packed, t.values)
    w.state.pop("tcgen05.st", None)
    if m.order is not None:
        m.order.tensor_waited(w, write=True)
