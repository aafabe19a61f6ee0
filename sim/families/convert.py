"""Conversions that have no native translation: cvt, cvt.pack (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

from functools import lru_cache

from warpspec.sim.conversions import convert_form
from warpspec.sim.families.alu import apply
from warpspec.sim.instruction import Instr, Vec
from warpspec.sim.machine import Machine
from warpspec.sim.registry import fallback
from warpspec.sim.warp import Warp

form_of = lru_cache(maxsize=None)(convert_form)


@fallback("cvt")
def convert(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """d = convert(a) or, for packed types, of {a, b} or {a, b, e, f} with random bits."""
    sources = ins.operands[1:]
    if sources and isinstance(sources[0], Vec):  # cvt.rs to four values: d, {a, b, e, f}, rbits
        sources = (*sources[0].items, *sources[1:])
    apply(w, ins, form_of(ins.opcode, len(sources)), sources, mask)
