"""f32, f64 and f32x2 arithmetic in native code (PTX ISA 9.7.3); other roundings and half types go to Python."""

from __future__ import annotations

import struct
from collections.abc import Callable

from warpspec.sim.codegen import integer
from warpspec.sim.codegen.emitter import Emitter, NotNative, fvec, ivec
from warpspec.sim.codegen.integer import flush
from warpspec.sim.instruction import Instr
from warpspec.sim.registry import Family, translator


def float_bits(ins: Instr, *allowed: str) -> int:
    """32 or 64 for an f32/f64 instruction whose modifiers are all in `allowed`; NotNative otherwise."""
    type_ = ins.parts[-1]
    if type_ not in ("f32", "f64"):
        raise NotNative(ins.opcode)
    for part in ins.parts[1:-1]:
        if part not in allowed:
            raise NotNative(ins.opcode)
    return int(type_[1:])


def _operand(e: Emitter, ins: Instr, position: int, bits: int) -> str:
    value = e.getf(ins.operands[position], bits)
    return flush(e, value) if ins.has("ftz") and bits == 32 else value


def _result(e: Emitter, ins: Instr, value: str, bits: int) -> None:
    if ins.has("ftz") and bits == 32:
        value = flush(e, value)
    e.setf(ins.operands[0], value, bits)


def _fma(e: Emitter, a: str, b: str, c: str, bits: int) -> str:
    t = fvec(bits)
    return e.call(t, f"llvm.fma.v32f{bits}", f"{t} {a}", f"{t} {b}", f"{t} {c}")


def _flush_tiny(e: Emitter, value: str, exact: Callable[[], str]) -> str:
    """.ftz of a rounded f32 product or fused sum whose exact value is below the least normal number.

    An H200 looks at the exact value, so what rounds up to the least normal number becomes zero too (flush()
    alone would keep it). exact: emits that value in f64; executed only when a lane has the least normal number.
    """
    raw = e.op(f"bitcast {fvec(32)} {value} to {ivec(32)}")
    magnitude = e.op(f"and {ivec(32)} {raw}, {e.imm(32, 0x7FFFFFFF)}")
    least = e.op(f"icmp eq {ivec(32)} {magnitude}, {e.imm(32, 0x00800000)}")
    some = e.call("i1", "llvm.vector.reduce.or.v32i1", f"{ivec(1)} {least}")
    place = e.buffer(ivec(32), 4)
    check, go = e.label("tiny"), e.label("ok")
    e.do(f"store {ivec(32)} {raw}, ptr {place}, align 32")
    e.do(f"br i1 {some}, label %{check}, label %{go}")
    e.lines.append(f"{check}:")
    size = e.call(fvec(64), "llvm.fabs.v32f64", f"{fvec(64)} {exact()}")
    below = e.op(f"fcmp olt {fvec(64)} {size}, {_constant64(e, 2.0**-126)}")
    zero = e.op(f"and {ivec(32)} {raw}, {e.imm(32, 0x80000000)}")
    tiny = e.op(f"and {ivec(1)} {least}, {below}")
    e.do(f"store {ivec(32)} {e.select(tiny, zero, raw, ivec(32))}, ptr {place}, align 32")
    e.do(f"br label %{go}")
    e.lines.append(f"{go}:")
    return e.op(f"bitcast {ivec(32)} {e.op(f'load {ivec(32)}, ptr {place}, align 32')} to {fvec(32)}")


def _wide(e: Emitter, value: str) -> str:
    return e.op(f"fpext {fvec(32)} {value} to {fvec(64)}")


def _halves(e: Emitter, operand) -> tuple[str, str]:
    """Split an f32x2 operand into its two f32 values."""
    joined = e.get(operand, 64)
    low = e.resize(joined, 64, 32)
    high = e.resize(e.op(f"lshr {ivec(64)} {joined}, {e.imm(64, 32)}"), 64, 32)
    return tuple(e.op(f"bitcast {ivec(32)} {part} to {fvec(32)}") for part in (low, high))


def _set_halves(e: Emitter, operand, low: str, high: str) -> None:
    parts = [e.resize(e.op(f"bitcast {fvec(32)} {p} to {ivec(32)}"), 32, 64) for p in (low, high)]
    up = e.op(f"shl {ivec(64)} {parts[1]}, {e.imm(64, 32)}")
    e.set(operand, e.op(f"or {ivec(64)} {parts[0]}, {up}"), 64)


def _packed(e: Emitter, ins: Instr, word: str) -> None:
    for part in ins.parts[1:-1]:
        if part not in ("rn", "ftz"):
            raise NotNative(ins.opcode)
    sources = [_halves(e, o) for o in ins.operands[1:]]
    results = []
    for half in range(2):
        values = [flush(e, s[half]) if ins.has("ftz") else s[half] for s in sources]
        if word == "fma":
            value = _fma(e, *values, 32)
        else:
            value = e.op(f"f{word} {fvec(32)} {values[0]}, {values[1]}")
        results.append(flush(e, value) if ins.has("ftz") else value)
    _set_halves(e, ins.operands[0], *results)


def _arithmetic(e: Emitter, ins: Instr) -> None:
    word = ins.parts[0]
    if ins.parts[-1] == "f32x2":
        return _packed(e, ins, word)
    bits = float_bits(ins, "rn", "ftz")
    a, b = _operand(e, ins, 1, bits), _operand(e, ins, 2, bits)
    value = e.op(f"f{word} {fvec(bits)} {a}, {b}")
    if word == "mul" and ins.has("ftz"):  # sums of f32 that small are exact
        value = _flush_tiny(e, value, lambda: e.op(f"fmul {fvec(64)} {_wide(e, a)}, {_wide(e, b)}"))
    _result(e, ins, value, bits)


@translator("add", "sub", family=Family.ARITHMETIC, destinations=1)
def add(e: Emitter, ins: Instr) -> None:
    """add and sub of integers, f32, f64 and f32x2, rounded to nearest even."""
    if ins.parts[-1] in integer.INTEGER_TYPES:
        integer.add_sub(e, ins)
    else:
        _arithmetic(e, ins)


@translator("mul", family=Family.ARITHMETIC, destinations=1)
def mul(e: Emitter, ins: Instr) -> None:
    """mul of integers (lo, hi, wide), f32, f64 and f32x2, rounded to nearest even."""
    if ins.parts[-1] in integer.INTEGER_TYPES:
        integer.mul_integer(e, ins)
    else:
        _arithmetic(e, ins)


@translator("fma", family=Family.ARITHMETIC, destinations=1)
def fma(e: Emitter, ins: Instr) -> None:
    """fma of f32, f64 and f32x2, rounded to nearest even."""
    if ins.parts[-1] == "f32x2":
        return _packed(e, ins, "fma")
    bits = float_bits(ins, "rn", "ftz")
    sources = [_operand(e, ins, i, bits) for i in (1, 2, 3)]
    value = _fma(e, *sources, bits)
    if ins.has("ftz"):
        value = _flush_tiny(e, value, lambda: _fma(e, *(_wide(e, s) for s in sources), 64))
    _result(e, ins, value, bits)


@translator("div", family=Family.ARITHMETIC, destinations=1)
def div(e: Emitter, ins: Instr) -> None:
    """div.rn exactly; div.full and div.approx as the exact quotient (within their documented error).

    div.approx is a * (1/b): for 2**126 < |b| < 2**128 the reciprocal is 0, as if b were infinite (9.7.3.8).
    """
    if ins.parts[-1] in integer.INTEGER_TYPES:
        return integer.div_rem_integer(e, ins)
    bits = float_bits(ins, "rn", "full", "approx", "ftz")
    a, b = _operand(e, ins, 1, bits), _operand(e, ins, 2, bits)
    if ins.has("approx"):
        t = fvec(bits)
        infinity = e.call(t, f"llvm.copysign.v32f{bits}", f"{t} {_constant(e, float('inf'))}", f"{t} {b}")
        magnitude = e.call(t, f"llvm.fabs.v32f{bits}", f"{t} {b}")
        huge = e.op(f"fcmp ogt {t} {magnitude}, {_constant(e, 2.0**126)}")
        b = e.select(huge, infinity, b, t)
    _result(e, ins, e.op(f"fdiv {fvec(bits)} {a}, {b}"), bits)


@translator("neg", "abs", family=Family.ARITHMETIC, destinations=1)
def neg_abs(e: Emitter, ins: Instr) -> None:
    """neg and abs of integers and, by their sign bits, of floats and pairs of half floats."""
    if ins.parts[-1] in integer.INTEGER_TYPES:
        return integer.neg_abs_integer(e, ins)
    type_ = ins.parts[-1]
    masks = {
        "f16": (16, 0x8000), "bf16": (16, 0x8000), "f32": (32, 1 << 31), "f64": (64, 1 << 63),
        "f16x2": (32, 0x80008000), "bf16x2": (32, 0x80008000),
    }  # fmt: skip
    if type_ not in masks or (ins.has("ftz") and type_ != "f32"):
        raise NotNative(ins.opcode)
    bits, sign = masks[type_]
    value = e.get(ins.operands[1], bits)
    if ins.has("ftz"):
        value = e.op(f"bitcast {fvec(32)} {flush(e, e.getf(ins.operands[1], 32))} to {ivec(32)}")
    if ins.parts[0] == "neg":
        result = e.op(f"xor {ivec(bits)} {value}, {e.imm(bits, sign)}")
    else:
        result = e.op(f"and {ivec(bits)} {value}, {e.imm(bits, ~sign)}")
    e.set(ins.operands[0], result, bits)


@translator("min", "max", family=Family.ARITHMETIC, destinations=1)
def min_max(e: Emitter, ins: Instr) -> None:
    """f32 min/max of two or three inputs (9.7.3.11): without .NaN a NaN input loses; -0 < +0; a NaN is canonical."""
    if ins.parts[-1] in integer.INTEGER_TYPES:
        return integer.min_max_integer(e, ins)
    bits = float_bits(ins, "ftz", "NaN")
    t = fvec(bits)
    nan = ins.has("NaN")
    name = f"llvm.{ins.parts[0]}imum{'' if nan else 'num'}.v32f{bits}"
    value = _operand(e, ins, 1, bits)
    for position in range(2, len(ins.operands)):
        other = _operand(e, ins, position, bits)
        if nan:
            value = e.call(t, name, f"{t} {value}", f"{t} {other}")
        else:
            value = _number_min_max(e, ins.parts[0], value, other, bits)
    if bits == 32:
        unordered = e.op(f"fcmp uno {t} {value}, zeroinitializer")
        raw = e.op(f"bitcast {t} {value} to {ivec(32)}")
        raw = e.select(unordered, e.imm(32, 0x7FFFFFFF), raw, ivec(32))
        value = e.op(f"bitcast {ivec(32)} {raw} to {t}")
    _result(e, ins, value, bits)


def _number_min_max(e: Emitter, word: str, a: str, b: str, bits: int) -> str:
    """min/max where a NaN operand loses, and -0 counts as less than +0."""
    t, it = fvec(bits), ivec(bits)
    order = "olt" if word == "min" else "ogt"
    pick_a = e.op(f"fcmp {order} {t} {a}, {b}")
    equal = e.op(f"fcmp oeq {t} {a}, {b}")
    raw_a, raw_b = e.op(f"bitcast {t} {a} to {it}"), e.op(f"bitcast {t} {b} to {it}")
    # equal values differ at most in the sign of zero: OR of the bits is -0 if either is, AND is +0 if either is
    same = e.op(f"{'or' if word == 'min' else 'and'} {it} {raw_a}, {raw_b}")
    value = e.select(equal, same, e.select(pick_a, raw_a, raw_b, it), it)
    b_nan = e.op(f"fcmp uno {t} {b}, {b}")
    value = e.select(b_nan, raw_a, value, it)
    return e.op(f"bitcast {it} {value} to {t}")


@translator("rcp", "sqrt", "rsqrt", family=Family.SPECIAL_FUNCTION, destinations=1)
def roots(e: Emitter, ins: Instr) -> None:
    """rcp, sqrt, rsqrt: .rn exactly; .approx as the correctly rounded f32 value (the ISA allows 1 to 2 ulp)."""
    bits = float_bits(ins, "rn", "approx", "ftz")
    a = _operand(e, ins, 1, bits)
    word, t = ins.parts[0], fvec(bits)
    one = e.op(f"bitcast {ivec(bits)} {e.imm(bits, 0x3F800000 if bits == 32 else 0x3FF0000000000000)} to {t}")
    if word == "rsqrt" and bits == 32:
        wide = e.op(f"fpext {t} {a} to {fvec(64)}")
        root = e.call(fvec(64), "llvm.sqrt.v32f64", f"{fvec(64)} {wide}")
        unit = e.op(f"bitcast {ivec(64)} {e.imm(64, 0x3FF0000000000000)} to {fvec(64)}")
        value = e.op(f"fptrunc {fvec(64)} {e.op(f'fdiv {fvec(64)} {unit}, {root}')} to {t}")
    else:
        value = a
        if word in ("sqrt", "rsqrt"):
            value = e.call(t, f"llvm.sqrt.v32f{bits}", f"{t} {a}")
        if word in ("rcp", "rsqrt"):
            value = e.op(f"fdiv {t} {one}, {value}")
    _result(e, ins, canonical(e, value, bits), bits)


def canonical(e: Emitter, value: str, bits: int) -> str:
    """NaN results of f32 instructions are the canonical NaN 0x7fffffff."""
    if bits != 32:
        return value
    t = fvec(32)
    unordered = e.op(f"fcmp uno {t} {value}, {value}")
    raw = e.select(unordered, e.imm(32, 0x7FFFFFFF), e.op(f"bitcast {t} {value} to {ivec(32)}"), ivec(32))
    return e.op(f"bitcast {ivec(32)} {raw} to {t}")


# 2^f on [-0.5, 0.5], Taylor terms ln(2)^k / k!, in f64: error far below an f32 ulp
_EXP2_TERMS = (
    1.0, 0.6931471805599453, 0.2402265069591007, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443,
    0.00015403530393381608, 1.525273380405984e-05, 1.3215486790144307e-06,
)  # fmt: skip


@translator("ex2", family=Family.SPECIAL_FUNCTION, destinations=1)
def ex2(e: Emitter, ins: Instr) -> None:
    """ex2.approx[.ftz].f32 (9.7.3.21), here correctly rounded; .ftz flushes subnormal inputs and results."""
    bits = float_bits(ins, "approx", "ftz")
    if bits != 32:
        raise NotNative(ins.opcode)
    t, wide = fvec(32), fvec(64)
    a = _operand(e, ins, 1, 32)
    nan = e.op(f"fcmp uno {t} {a}, {a}")
    low, high = _constant(e, -200.0), _constant(e, 200.0)
    a = _clamp(e, a, low, high)
    x = e.op(f"fpext {t} {a} to {wide}")
    n = e.call(wide, "llvm.rint.v32f64", f"{wide} {x}")
    f = e.op(f"fsub {wide} {x}, {n}")
    value = _constant64(e, _EXP2_TERMS[-1])
    for term in reversed(_EXP2_TERMS[:-1]):
        value = _fma(e, value, f, _constant64(e, term), 64)
    whole = e.op(f"fptosi {wide} {n} to {ivec(64)}")
    exponent = e.op(f"shl {ivec(64)} {whole}, {e.imm(64, 52)}")
    raw = e.op(f"add {ivec(64)} {e.op(f'bitcast {wide} {value} to {ivec(64)}')}, {exponent}")
    result = e.op(f"fptrunc {wide} {e.op(f'bitcast {ivec(64)} {raw} to {wide}')} to {t}")
    raw32 = e.select(nan, e.imm(32, 0x7FFFFFFF), e.op(f"bitcast {t} {result} to {ivec(32)}"), ivec(32))
    _result(e, ins, e.op(f"bitcast {ivec(32)} {raw32} to {t}"), 32)


def _clamp(e: Emitter, a: str, low: str, high: str) -> str:
    t = fvec(32)
    below = e.op(f"fcmp ult {t} {a}, {low}")
    a = e.select(below, low, a, t)
    above = e.op(f"fcmp ugt {t} {a}, {high}")
    return e.select(above, high, a, t)


def _constant(e: Emitter, value: float) -> str:
    (raw,) = struct.unpack("<I", struct.pack("<f", value))
    return e.op(f"bitcast {ivec(32)} {e.imm(32, raw)} to {fvec(32)}")


def _constant64(e: Emitter, value: float) -> str:
    (raw,) = struct.unpack("<Q", struct.pack("<d", value))
    return e.op(f"bitcast {ivec(64)} {e.imm(64, raw)} to {fvec(64)}")


@translator("lg2", "sin", "cos", family=Family.SPECIAL_FUNCTION, destinations=1)
def transcendental(e: Emitter, ins: Instr) -> None:
    """lg2.approx, sin.approx, cos.approx of f32 through double precision (errors below those the ISA documents)."""
    bits = float_bits(ins, "approx", "ftz")
    if bits != 32:
        raise NotNative(ins.opcode)
    name = {"lg2": "log2", "sin": "sin", "cos": "cos"}[ins.parts[0]]
    x = e.op(f"fpext {fvec(32)} {_operand(e, ins, 1, 32)} to {fvec(64)}")
    value = e.call(fvec(64), f"llvm.{name}.v32f64", f"{fvec(64)} {x}")
    value = e.op(f"fptrunc {fvec(64)} {value} to {fvec(32)}")
    _result(e, ins, canonical(e, value, 32), 32)
