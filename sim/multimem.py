"""multimem on one device: a multicast object's only replica is that device's own memory.

A reduction over all replicas is then a load, and a store or reduction to all replicas goes to the one. PTX ISA 9.7.9.14
("Data Movement and Conversion Instructions: multimem").
"""

from __future__ import annotations

import re

from warpspec.sim.errors import UnsupportedInstruction

OPERATIONS = ("add", "min", "max", "and", "or", "xor")
ELEMENT_BITS = {"e4m3": 8, "e5m2": 8}


def on_one_device(opcode: str) -> str:
    """The ordinary opcode equivalent to a multimem one. Raises UnsupportedInstruction for forms that the ISA lacks."""
    _, kind, *modifiers = opcode.split(".")
    operations = [part for part in modifiers if part in OPERATIONS]
    if kind not in ("ld_reduce", "st", "red") or len(operations) != (kind != "st"):
        raise UnsupportedInstruction(f"`{opcode}`")
    if kind == "red":
        return ".".join(["red", *modifiers])
    kept = [part for part in modifiers[:-1] if part not in OPERATIONS and not part.startswith("acc::")]
    return ".".join(["ld" if kind == "ld_reduce" else "st", *kept, f"b{_bits(modifiers[-1], opcode)}"])


def _bits(element: str, opcode: str) -> int:
    """Bits of an element type, such as f32, bf16x2 or e4m3x4."""
    name, _, count = element.partition("x")
    found = re.fullmatch(r"(?:f|bf|u|s|b)(\d+)", name)
    if found is None and name not in ELEMENT_BITS:
        raise UnsupportedInstruction(f"`{opcode}`")
    return (int(found[1]) if found else ELEMENT_BITS[name]) * int(count or 1)
