"""Calls of the functions that the CUDA runtime provides: vprintf and __assertfail (PTX ISA 7.1, 9.7.12.5).

Arguments go through `.param` variables of the calling scope: st.param, call, ld.param.
"""

from __future__ import annotations

import ctypes
import re
import sys

import numpy as np

from warpspec.sim.codegen.layout import Ctx
from warpspec.sim.errors import MemoryFault, SimError, UnsupportedInstruction
from warpspec.sim.instruction import Instr, Mem, Operand, Sym, Vec
from warpspec.sim.lanes import WARP_SIZE, lanes
from warpspec.sim.machine import Machine
from warpspec.sim.memory import in_local_window
from warpspec.sim.registry import Family, fallback, handler
from warpspec.sim.warp import Warp

LONGEST_STRING = 4096  # bytes read of a string before it counts as not terminated
_CONVERSION = re.compile(
    r"%(?P<flags>[-+ #0]*[\d*]*(?:\.[\d*]*)?)(?P<length>hh|h|ll|l|z|j|t)?(?P<kind>[diouxXcsfFeEgGaAp%])"
)


class _Buffers:
    """The .param variables of a warp's calls, by name, as uint8 [32, size]."""

    def __init__(self) -> None:
        self.by_name: dict[str, np.ndarray] = {}

    def get(self, w: Warp, name: str) -> np.ndarray:
        found = self.by_name.get(name)
        if found is None:
            variable = w.program.kernel.variables.get(name)
            if variable is None or variable.space != "param":
                raise UnsupportedInstruction(f"{name} is not a parameter of a call")
            found = self.by_name[name] = np.zeros((WARP_SIZE, variable.size), np.uint8)
        return found


def _buffers(w: Warp) -> _Buffers:
    return w.state.setdefault("call", _Buffers())


def _place(w: Warp, operand: Operand) -> tuple[np.ndarray, int]:
    """(the variable's bytes, the offset in it) of [param+offset]."""
    if not isinstance(operand, Mem) or not isinstance(operand.base, Sym):
        raise UnsupportedInstruction(f"parameter address {operand}")
    return _buffers(w).get(w, operand.base.name), operand.base.offset + operand.offset


def _registers(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _type_bytes(ins: Instr) -> int:
    return int(ins.parts[-1].lstrip("busf")) // 8


@fallback("st.param")
def store_argument(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """st.param writes an argument into the .param variable with which a call passes it."""
    data, at = _place(w, ins.operands[0])
    size = _type_bytes(ins)
    chosen = lanes(mask)
    for item in _registers(ins.operands[1]):
        values = np.ascontiguousarray(w.values(item, 8 * size)).view(np.uint8).reshape(WARP_SIZE, size)
        data[chosen, at : at + size] = values[chosen]
        at += size


@fallback("ld.param")
def load_result(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """ld.param reads a call's result from the .param variable that the call wrote."""
    data, at = _place(w, ins.operands[1])
    size = _type_bytes(ins)
    for item in _registers(ins.operands[0]):
        values = np.ascontiguousarray(data[:, at : at + size]).view(f"u{size}")[:, 0]
        w.set_values(item, values, 8 * size, mask)
        at += size


def _returned_values(ins: Instr) -> int:
    """1 for `call (values), function, (arguments)`; 0 where the first operand is the function's name."""
    return int(isinstance(ins.operands[0], Vec))


@handler("call", family=Family.CALL, destinations=_returned_values)
def call(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """call (results), function, (arguments)."""
    operands = list(ins.operands)
    results = operands.pop(0).items if isinstance(operands[0], Vec) else ()
    target = operands[0]
    arguments = operands[1].items if len(operands) > 1 and isinstance(operands[1], Vec) else ()
    function = _FUNCTIONS.get(target.name) if isinstance(target, Sym) else None
    if function is None:
        raise UnsupportedInstruction(f"call of {getattr(target, 'name', target)}")
    values = [np.ascontiguousarray(_buffers(w).get(w, a.name)) for a in arguments]
    for lane in lanes(mask):
        words = [int.from_bytes(v[lane].tobytes(), "little") for v in values]
        result = function(m, w, lane, *words)
        for variable in results:
            data = _buffers(w).get(w, variable.name)
            data[lane] = np.frombuffer(int(result).to_bytes(data.shape[1], "little"), np.uint8)


def vprintf(m: Machine, w: Warp, lane: int, text: int, arguments: int) -> int:
    """Print to standard output as C's printf does; returns the number of arguments printed."""
    fmt = read_string(m, w, lane, text)
    offset = 0

    def take(size: int) -> bytes:
        nonlocal offset
        offset = -(-offset // size) * size
        data = read_generic(m, w, lane, arguments + offset, size)
        offset += size
        return data

    line, count = format_c(fmt, take, lambda address: read_string(m, w, lane, address))
    sys.stdout.write(line)
    return count


def assert_fail(
    m: Machine, w: Warp, lane: int, message: int, file: int, line: int, function: int, _size: int
):
    """__assertfail stops the run; raises SimError with the assertion's text and place."""
    text, name, place = (read_string(m, w, lane, a) for a in (message, file, function))
    raise SimError(f"assertion failed in lane {lane}: {text} ({name}:{line & 0xFFFFFFFF}, {place})")


_FUNCTIONS = {"vprintf": vprintf, "__assertfail": assert_fail}


def read_generic(m: Machine, w: Warp, lane: int, address: int, size: int) -> bytes:
    """Bytes at a generic address of the lane's local memory or of global memory."""
    if not in_local_window(address):
        return m.gmem.view(address, size).tobytes()
    offset, limit = address & 0xFFFFFFFF, int(w.ctx[Ctx.LOCAL_SIZE])
    if offset + size > limit:
        raise MemoryFault(f"{size} bytes at local offset {offset} of {limit}")
    return ctypes.string_at(int(w.ctx[Ctx.LOCAL_BASE]) + lane * limit + offset, size)


def read_string(m: Machine, w: Warp, lane: int, address: int) -> str:
    """The C string at a generic address."""
    found = bytearray()
    while len(found) < LONGEST_STRING:
        byte = read_generic(m, w, lane, address + len(found), 1)
        if byte == b"\0":
            return found.decode("utf-8", "replace")
        found += byte
    raise MemoryFault(f"string at {address:#x} is not terminated")


def format_c(fmt: str, take, string_at) -> tuple[str, int]:
    """C's printf: (text, number of conversions). `take(size)` gives the next argument's bytes."""
    count = 0

    def convert(match: re.Match) -> str:
        nonlocal count
        kind, flags = match["kind"], match["flags"]
        if kind == "%":
            return "%"
        while "*" in flags:
            flags = flags.replace("*", str(int.from_bytes(take(4), "little", signed=True)), 1)
        count += 1
        if kind in "fFeEgGaA":
            value = float(np.frombuffer(take(8), np.float64)[0])
            return value.hex() if kind in "aA" else f"%{flags}{kind}" % value
        if kind == "s":
            return f"%{flags}s" % string_at(int.from_bytes(take(8), "little"))
        size = 8 if kind == "p" or match["length"] in ("l", "ll", "z", "j", "t") else 4
        value = int.from_bytes(take(size), "little", signed=kind in "dic")
        if kind == "c":
            return f"%{flags}c" % (value & 0xFF)
        if kind == "p":
            return f"%{flags}s" % hex(value)
        return f"%{flags}{'d' if kind in 'diu' else kind}" % value

    return _CONVERSION.sub(convert, fmt), count
