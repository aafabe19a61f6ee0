"""The words of PTX: literals, constant expressions, comments, types, special registers (PTX ISA 4, 5, 10)."""

from __future__ import annotations

import ast
import operator
import re
import struct

from warpspec.sim.lanes import WARP_SIZE

TYPE_BITS = {
    "pred": 1,
    **{f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)},
    "b128": 128,
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "f32": 32,
    "f64": 64,
}

SPECIAL_REGISTERS = frozenset(
    (
        "%tid", "%ntid", "%ctaid", "%nctaid", "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%gridid",
        "%clusterid", "%nclusterid", "%cluster_ctaid", "%cluster_nctaid", "%cluster_ctarank",
        "%cluster_nctarank", "%is_explicit_cluster",
        "%lanemask_eq", "%lanemask_le", "%lanemask_lt", "%lanemask_ge", "%lanemask_gt",
        "%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi",
        "%total_smem_size", "%aggr_smem_size", "%dynamic_smem_size", "%reserved_smem_offset_begin",
        "%reserved_smem_offset_end", "%reserved_smem_offset_cap", "%current_graph_exec",
        *(f"%pm{i}" for i in range(8)),
        *(f"%pm{i}_64" for i in range(8)),
        *(f"%envreg{i}" for i in range(32)),
        *(f"%reserved_smem_offset_{i}" for i in range(2)),
    )
)  # fmt: skip

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.S)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"(-?)0([fF])([0-9a-fA-F]{8})$|(-?)0([dD])([0-9a-fA-F]{16})$")
_DECIMAL_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?$")

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}


def is_special(name: str) -> bool:
    """Whether a register name is one of PTX's special registers (chapter 10)."""
    return name.partition(".")[0] in SPECIAL_REGISTERS


def integer(text: str) -> int:
    """The value of an integer literal: decimal, 0x hexadecimal, 0b binary, 0 octal; U may follow."""
    digits = text.rstrip("U")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("-")
    if digits[:2] in ("0x", "0X", "0b", "0B"):
        return sign * int(digits, 0)
    return sign * int(digits, 8 if len(digits) > 1 and digits[0] == "0" else 10)


def constant_expression(text: str) -> int:
    """The value of a constant integer expression (PTX ISA 4.5.5); ValueError when it is not one."""
    source = re.sub(r"\(\s*\.([us])64\s*\)", "", text).replace("WARP_SZ", str(WARP_SIZE))
    source = re.sub(r"\b(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?\b", lambda m: str(integer(m.group(1))), source)

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return int(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp):
            inner = value(node.operand)
            if isinstance(node.op, ast.USub):
                return -inner
            return ~inner if isinstance(node.op, ast.Invert) else inner
        raise ValueError(text)

    try:
        return value(ast.parse(source.strip().replace("/", "//"), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(text) from error


def float_literal(text: str, kind: str = "f64") -> tuple[int, int] | None:
    """(bit pattern, bits) of a 0f, 0d or decimal floating-point literal, which takes the type `kind`."""
    match = _FLOAT_BITS.match(text)
    if match is not None:
        sign, _, digits = [g for g in match.groups() if g is not None]
        bits = 4 * len(digits)
        return int(digits, 16) ^ (1 << (bits - 1) if sign else 0), bits
    if _DECIMAL_FLOAT.match(text):
        if kind == "f32":
            return int.from_bytes(struct.pack("<f", float(text)), "little"), 32
        return int.from_bytes(struct.pack("<d", float(text)), "little"), 64
    return None


def is_integer(text: str) -> bool:
    """Whether the text is an integer literal."""
    return _INTEGER.match(text) is not None


def without_comments(text: str) -> str:
    """The text with comments blanked; line numbers stay as they were, and strings too."""
    return _COMMENT.sub(_blank_comment, text)


def _blank_comment(match: re.Match) -> str:
    """A comment as nothing but its newlines (line numbers stay right); strings as they are."""
    text = match.group()
    if text[0] == '"':
        return text
    return "\n" * text.count("\n") if text[1] == "*" else ""
