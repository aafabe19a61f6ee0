"""Runs the function behind an arithmetic opcode on plain Python lists, for its tests."""

from __future__ import annotations

import numpy as np

from warpspec.sim.families.alu import form_of

DTYPE = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def run(opcode, *operands):
    """The result(s) of an opcode on lists of bit patterns (bools for predicates)."""
    form = form_of(opcode, len(operands))
    arrays = [
        np.array(o, bool) if bits == 1 else np.array([x & ((1 << bits) - 1) for x in o], DTYPE[bits])
        for o, bits in zip(operands, form.sources, strict=True)
    ]
    result = form.function(*arrays)
    return tuple(r.tolist() for r in result) if isinstance(result, tuple) else result.tolist()
