"""Exchanges between lanes without a native translation: match.sync, redux.sync on f32 or with a membermask in a
register (PTX ISA 9.7.13)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.families.alu import bools
from warpspec.sim.float_alu import load
from warpspec.sim.instruction import Imm, Instr, Operand, Pair
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.machine import Machine
from warpspec.sim.registry import Collective, Family, fallback, handler
from warpspec.sim.rounding import F32_NAN
from warpspec.sim.warp import Warp

MAGNITUDE = np.uint32(0x7FFFFFFF)
INTEGER_REDUCTIONS = {
    ("add", "u32"): (np.add, np.uint32), ("add", "s32"): (np.add, np.int32),
    ("min", "u32"): (np.minimum, np.uint32), ("min", "s32"): (np.minimum, np.int32),
    ("max", "u32"): (np.maximum, np.uint32), ("max", "s32"): (np.maximum, np.int32),
    ("and", "b32"): (np.bitwise_and, np.uint32), ("or", "b32"): (np.bitwise_or, np.uint32),
    ("xor", "b32"): (np.bitwise_xor, np.uint32),
}  # fmt: skip


def member_groups(w: Warp, membermask: Operand, mask: int) -> Iterator[int]:
    """The executing lanes, one mask for each distinct membermask among them."""
    if isinstance(membermask, Imm):
        yield mask & membermask.value
        return
    masks = w.u32(membermask)
    executing = bools(mask)
    for value in np.unique(masks[executing]).tolist():
        same = executing & (masks == value)
        lanes = sum(1 << lane for lane in np.flatnonzero(same).tolist())
        yield lanes & value


def reduce_f32(bits: np.ndarray, operation: str, absolute: bool, propagate_nan: bool) -> np.uint32:
    """min or max of f32 bit patterns: +0 > -0; NaN counts only with .NaN, or where there is nothing else."""
    if absolute:
        bits = bits & MAGNITUDE
    nan = np.isnan(load(bits, "f32"))
    if nan.all() or (propagate_nan and nan.any()):
        return F32_NAN
    numbers = bits[~nan]
    # Sign-magnitude patterns in the order of their values, -0 below +0.
    order = np.where(numbers >> np.uint32(31) == 1, ~numbers, numbers | ~MAGNITUDE)
    return numbers[order.argmin() if operation == "min" else order.argmax()]


def match_any(values: np.ndarray, lanes: int) -> np.ndarray:
    """uint32[32]: for each lane the lanes of the mask with the same value."""
    members = bools(lanes)
    equal = (values[:, None] == values[None, :]) & members
    return (equal * (np.uint64(1) << np.arange(WARP_SIZE, dtype=np.uint64))).sum(1).astype(np.uint32)


@fallback("redux.sync")
def redux(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """redux.sync.op.type d, a, membermask for integers; redux.sync.min/max[.abs][.NaN].f32."""
    operation, type_ = ins.parts[2], ins.parts[-1]
    if (operation, type_) not in INTEGER_REDUCTIONS and (type_ != "f32" or operation not in ("min", "max")):
        raise UnsupportedInstruction(f"`{ins.opcode}`")
    target, source, membermask = ins.operands
    values = w.u32(source)
    for lanes in member_groups(w, membermask, mask):
        if lanes:
            chosen = values[bools(lanes)]
            if type_ == "f32":
                result = reduce_f32(chosen, operation, ins.has("abs"), ins.has("NaN"))
            else:
                reduction, dtype = INTEGER_REDUCTIONS[operation, type_]
                result = reduction.reduce(chosen.view(dtype), dtype=dtype).view(np.uint32)
            w.set_u32(target, np.full(WARP_SIZE, result), lanes)


@handler(
    "match.any.sync", "match.all.sync", family=Family.WARP, destinations=1, collective=Collective.MEMBERS
)
def match(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """match.any.sync d, a, membermask; match.all.sync d|p, a, membermask."""
    target, source, membermask = ins.operands
    pair = target if isinstance(target, Pair) else Pair(target, None)
    values = w.u64(source) if ins.parts[-1] == "b64" else w.u32(source)
    for lanes in member_groups(w, membermask, mask):
        result = match_any(values, lanes)
        if ins.parts[1] == "all":
            agree = bool(lanes) and result[(lanes & -lanes).bit_length() - 1] == lanes
            result = np.full(WARP_SIZE, lanes if agree else 0, np.uint32)
            w.set_pred(pair.second, lanes if agree else 0, lanes)
        w.set_u32(pair.first, result, lanes)
