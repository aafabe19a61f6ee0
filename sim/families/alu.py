"""Arithmetic, logic and comparison instructions that have no native translation (PTX ISA 9.7.1 to 9.7.8)."""

from __future__ import annotations

from functools import cache

import numpy as np

from warpspec.sim.cfg import CARRY
from warpspec.sim.compare_alu import select_form, set_form, setp_form
from warpspec.sim.float_alu import PRED, Form, float_form
from warpspec.sim.instruction import Instr, Operand, Pair, Reg
from warpspec.sim.integer_alu import integer_form, integer_type
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.machine import Machine
from warpspec.sim.registry import Family, fallback, handler
from warpspec.sim.warp import Warp

_LANES = np.arange(WARP_SIZE, dtype=np.uint64)
_CARRY = Reg(CARRY)
_BY_NAME = {"setp": setp_form, "set": set_form, "selp": select_form, "slct": select_form}
_INTEGER_ONLY = frozenset({"pred", "s16x2", "u16x2", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"})


@cache
def form_of(opcode: str, sources: int) -> Form:
    """The form of an arithmetic opcode with `sources` source operands; raises UnsupportedInstruction."""
    name, _, rest = opcode.partition(".")
    kind = rest.rpartition(".")[2]
    if name in _BY_NAME:
        return _BY_NAME[name](opcode)
    if kind in _INTEGER_ONLY or integer_type(kind) is not None:
        return integer_form(opcode)
    return float_form(opcode, sources)


def bools(mask: int) -> np.ndarray:
    """A lane mask as bool[32]."""
    return (np.uint64(mask) >> _LANES & np.uint64(1)).astype(bool)


def mask_of(lanes: np.ndarray) -> int:
    """bool[32] as a lane mask."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def read_bits(w: Warp, operand: Operand, bits: int) -> np.ndarray:
    """A source operand as an unsigned array of `bits` (1: bool), the low bits of a wider register."""
    return bools(w.pred(operand)) if bits == PRED else w.values(operand, bits)


def write_bits(w: Warp, target: Operand, values: np.ndarray, mask: int, is_signed: bool = False) -> None:
    """Write an unsigned or bool array to a register, sign- or zero-extended when the register is wider."""
    if target is None:
        return
    if values.dtype == bool:
        w.set_pred(target, mask_of(values), mask)
        return
    want = w.bits(target) // 8 if isinstance(target, Reg) else values.dtype.itemsize
    if is_signed and want > values.dtype.itemsize:
        values = values.view(f"i{values.dtype.itemsize}").astype(f"i{want}").view(f"u{want}")
    w.set_values(target, values, values.dtype.itemsize * 8, mask)


def apply(w: Warp, ins: Instr, form: Form, sources: tuple[Operand, ...], mask: int) -> None:
    """Compute an arithmetic form for the lanes in `mask` and write its destinations."""
    values = [read_bits(w, operand, bits) for operand, bits in zip(sources, form.sources, strict=True)]
    if form.carry_in:
        values.append(read_bits(w, _CARRY, 32) != 0)
    result = form.function(*values)
    target = ins.operands[0]
    if form.carry_out:
        result, carry = result
        w.set_u32(_CARRY, carry.astype(np.uint32), mask)
    results = result if isinstance(result, tuple) else (result,)
    targets = (target.first, target.second) if isinstance(target, Pair) else (target,)
    for register, value in zip(targets, results, strict=False):  # setp without |q leaves the second result
        write_bits(w, register, value, mask, form.signed)


@handler("addc", "subc", "madc", family=Family.ARITHMETIC, destinations=1, carry_in=True)
@handler(
    "mul24", "mad24", "sad", "dp4a", "dp2a", "bfind", "fns", "bfi", "szext", "bmsk", "testp", "copysign", "set", "slct",
    family=Family.ARITHMETIC, destinations=1,
)  # fmt: skip
@handler("tanh", family=Family.SPECIAL_FUNCTION, destinations=1)
@fallback(
    "add", "sub", "mul", "mad", "fma", "div", "rem", "abs", "neg", "min", "max", "popc", "clz", "brev", "bfe",
    "and", "or", "xor", "not", "cnot", "lop3", "shf", "shl", "shr", "prmt",
    "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "setp", "selp",
)  # fmt: skip
def arithmetic(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """d = op(a, b, ...) lane by lane."""
    sources = ins.operands[1:]
    apply(w, ins, form_of(ins.opcode, len(sources)), sources, mask)
