"""Inline PTX in CuTe DSL kernels: instructions on 32-bit words, written as the ISA writes them.

`word_function("mad.hi.s32 d, a, b, c")` makes an assembly text whose inputs are three 32-bit words and whose
outputs are 32-bit words. Operand names say how words become operands:

    a b c        the input words, as 32-bit registers
    ah bh ch     their low 16 bits
    x y z        64-bit operands {b:a}, {c:a}, {b:c} (high word first)
    bn yn        b and y, or 1 where they are 0 (divisors)
    d dh dx      results of 32, 16 (zero-extended) and 64 bits (two words, low first)
    p q          predicate results, 0 or 1; p also serves as a guard
    t u ux       scratch registers, 32 and 64 bits
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

_TOKEN = re.compile(r"(?<![\w.%])(ah|bh|ch|bn|yn|dh|dx|ux|a|b|c|x|y|z|d|p|q|t|u)(?!\w)")
_WIDE = {"x": ("a", "b"), "y": ("a", "c"), "z": ("c", "b")}  # name: low word, high word
_BITS = {"ah": 16, "bh": 16, "ch": 16, "dh": 16, "bn": 32, "d": 32, "t": 32, "u": 32}
_RESULTS = ("d", "dh", "dx", "p", "q")


@dataclass(frozen=True)
class Assembly:
    """Assembly text with `$0...` for `results` result words, then three source words."""

    text: str
    results: int


def _declarations(names: set[str]) -> list[str]:
    lines = []
    for name in sorted(names - {"a", "b", "c"}):
        kind = "pred" if name in ("p", "q") else f"b{_BITS.get(name, 64)}"
        lines.append(f".reg .{kind} %{name};")
    return lines


def _load(name: str, source: dict[str, str]) -> list[str]:
    """Statements that set an operand register from the input words."""
    if name[0] in "abc" and name.endswith("h"):
        return [f"cvt.u16.u32 %{name}, {source[name[0]]};"]
    if name in _WIDE:
        low, high = (source[word] for word in _WIDE[name])
        return [f"mov.b64 %{name}, {{{low}, {high}}};"]
    if name == "bn":
        b = source["b"]
        return [f".reg .pred %z0; setp.eq.u32 %z0, {b}, 0; selp.b32 %bn, 1, {b}, %z0;"]
    if name == "yn":
        return [".reg .pred %z1; setp.eq.u64 %z1, %y, 0; selp.b64 %yn, 1, %y, %z1;"]
    return []


def _store(name: str, outputs: list[str]) -> str:
    if name == "d":
        return f"mov.b32 {outputs[0]}, %d;"
    if name == "dh":
        # Not cvt.u32.u16: after cvt.sat.s16.s32, ptxas 13.4 leaves the sign extension in the upper half.
        return f".reg .b16 %h0; mov.b16 %h0, 0; mov.b32 {outputs[0]}, {{%dh, %h0}};"
    if name == "dx":
        return f"mov.b64 {{{outputs[0]}, {outputs[1]}}}, %dx;"
    return f"selp.b32 {outputs[0]}, 1, 0, %{name};"


@cache
def word_function(body: str) -> Assembly:
    """The assembly of one or more statements (separated by `;`) over the operand names of this module."""
    names = set(_TOKEN.findall(re.sub(r"(^|;)\s*(@!?[pq] )?[\w.:]+ ", r"\1\2", body)))
    if "yn" in names:
        names.add("y")
    results = [name for name in _RESULTS if name in names]
    count = sum(2 if name == "dx" else 1 for name in results)
    source = {word: f"${count + i}" for i, word in enumerate("abc")}
    lines = _declarations(names)
    for name in sorted(names, key=lambda n: (n == "yn", n)):
        lines += _load(name, source)

    def operand(match: re.Match) -> str:
        return source.get(match[1], f"%{match[1]}")

    for statement in body.split(";"):
        guard, opcode, operands = re.fullmatch(r"\s*(@!?[pq] )?([\w.:]+)(.*)", statement).groups()
        guard = _TOKEN.sub(operand, guard) if guard else ""
        lines.append(f"{guard}{opcode}{_TOKEN.sub(operand, operands)};")
    place = 0
    for name in results:
        lines.append(_store(name, [f"${place}", f"${place + 1}"]))
        place += 2 if name == "dx" else 1
    return Assembly("{\n" + "\n".join(lines) + "\n}", count)


@dsl_user_op
def ptx(text: str, *sources, results: int = 1, loc=None, ip=None):
    """Assembly text with 32-bit result words `$0...` and source words after them; a tuple of Int32.

    Ordered against other memory accesses and never removed.
    """
    values = [Int32(s).ir_value(loc=loc, ip=ip) for s in sources]
    word = T.i32()
    if results == 0:
        kind = None
    elif results == 1:
        kind = word
    else:
        kind = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * results)})>")
    constraints = ",".join(["=r"] * results + ["r"] * len(values) + ["~{memory}"])
    answer = llvm.inline_asm(
        kind,
        values,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if results == 0:
        return ()
    if results == 1:
        return (Int32(answer),)
    return tuple(Int32(llvm.extractvalue(word, answer, [i], loc=loc, ip=ip)) for i in range(results))
