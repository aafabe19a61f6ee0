"""Forms of instructions that have been translated in this process: like ones need not be translated again.

Two instructions are alike if they have the same opcode, guard and immediates, and registers of the same widths in the
same pattern: they have one form, and their parameters differ by where registers lie and by the instruction's number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from warpspec.sim.codegen.emitter import Emitter, Form, Origin, Place
from warpspec.sim.codegen.layout import CLOCK_REGISTERS, RegisterFile
from warpspec.sim.instruction import Imm, Instr, Mem, Not, Pair, Reg, Vec


class Template(NamedTuple):
    """A form, and where each of its parameters comes from: what, and which register or which value."""

    form: Form
    parameters: tuple[tuple[Origin, int], ...]


_templates: dict[tuple, Template] = {}


class _NotShared(Exception):
    """The translation depends on more than a template's key has."""


class _Key:
    """The key that decides an instruction's form, and the registers in the order in which the key numbers them."""

    def __init__(self, ins: Instr, registers: RegisterFile, place: Place, logging: bool):
        self._registers, self._place = registers, place
        self.names: dict[str, int] = {}
        self.described: list[tuple] = []
        guard = None if ins.guard is None else (self._register(ins.guard.name), ins.guard_negated)
        operands = tuple([self._of(operand) for operand in ins.operands])
        for name in (*place.sources, *place.targets):  # as the carry flag, which is no operand
            if name not in self.names:
                self._register(name)
                self.described.append((name,))
        self.key = ins.opcode, guard, operands, tuple(self.described), ins.used_bytes, logging

    def _register(self, name: str) -> int:
        number = self.names.get(name)
        if number is None:
            if name in CLOCK_REGISTERS:
                raise _NotShared
            number = self.names[name] = len(self.names)
            place, registers = self._place, self._registers
            target = place.targets.get(name)
            read = name in place.sources or name in registers.offset
            self.described.append((registers.bits[name], read, target and target[1]))
        return number

    def _of(self, operand) -> object:
        kind = type(operand)
        if kind is Reg:
            return self._register(operand.name)
        if operand is None:
            return None
        if kind is Imm:
            return "i", operand.value, operand.is_float
        if kind is Not:
            return "n", self._register(operand.reg.name)
        if kind is Vec:
            return "v", *[self._of(item) for item in operand.items]
        if kind is Mem and operand.coords is None:
            return "m", self._of(operand.base), operand.offset
        if kind is Pair:
            return "p", self._of(operand.first), self._of(operand.second)
        raise _NotShared


def translated(
    ins: Instr, registers: RegisterFile, place: Place, logging: bool, emitter: Callable[[], Emitter]
) -> tuple[Form, list[int]]:
    """An instruction's form and the parameters of this use of it. emitter: makes one, with this place and logging."""
    try:
        key = _Key(ins, registers, place, logging)
    except _NotShared:
        e = emitter()
        e.translate(ins)
        return e.form(), e.parameters
    template = _templates.get(key.key)
    if template is None:
        e = emitter()
        e.translate(ins)
        origins = [
            (origin, key.names[what] if origin in (Origin.SOURCE, Origin.TARGET) else what)
            for origin, what in e.origins
        ]
        template = _templates[key.key] = Template(e.form(), tuple(origins))
        return template.form, e.parameters
    names, parameters = list(key.names), []
    for origin, what in template.parameters:
        if origin is Origin.SOURCE:
            name = names[what]
            offset = place.sources.get(name)
            parameters.append(registers.offset[name] if offset is None else offset)
        elif origin is Origin.TARGET:
            parameters.append(place.targets[names[what]][0])
        else:
            parameters.append(ins.index if origin is Origin.INSTRUCTION else what)
    return template.form, parameters
