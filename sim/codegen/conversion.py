"""cvt between integers, f16, bf16, f32, f64 and pairs of small formats in native code (PTX ISA 9.7.9.21).

The rest goes to Python.
"""

from __future__ import annotations

from warpspec.sim.codegen.emitter import Emitter, NotNative, fvec, ivec
from warpspec.sim.codegen.floating import canonical
from warpspec.sim.codegen.integer import INTEGER_TYPES, flush
from warpspec.sim.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FloatFormat
from warpspec.sim.instruction import Instr
from warpspec.sim.registry import Family, translator

_ROUND_TO_INTEGER = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def bf16_round(e: Emitter, value: str) -> str:
    """f32 to bf16 bits, round to nearest even, NaN to 0x7fff, as `<32 x i16>`."""
    raw = e.op(f"bitcast {fvec(32)} {value} to {ivec(32)}")
    upper = e.op(f"lshr {ivec(32)} {raw}, {e.imm(32, 16)}")
    odd = e.op(f"and {ivec(32)} {upper}, {e.imm(32, 1)}")
    bias = e.op(f"add {ivec(32)} {odd}, {e.imm(32, 0x7FFF)}")
    rounded = e.op(f"lshr {ivec(32)} {e.op(f'add {ivec(32)} {raw}, {bias}')}, {e.imm(32, 16)}")
    nan = e.op(f"fcmp uno {fvec(32)} {value}, {value}")
    rounded = e.select(nan, e.imm(32, 0x7FFF), rounded, ivec(32))
    return e.resize(rounded, 32, 16)


def f16_round(e: Emitter, value: str) -> str:
    """f32 to f16 bits, round to nearest even, NaN to 0x7fff, as `<32 x i16>`."""
    half = e.op(f"bitcast {fvec(16)} {e.op(f'fptrunc {fvec(32)} {value} to {fvec(16)}')} to {ivec(16)}")
    nan = e.op(f"fcmp uno {fvec(32)} {value}, {value}")
    return e.select(nan, e.imm(16, 0x7FFF), half, ivec(16))


_NARROW = {"bf16": bf16_round, "f16": f16_round}


def widen(e: Emitter, bits16: str, type_: str) -> str:
    """f16 or bf16 bits (`<32 x i16>`) as f32."""
    if type_ == "f16":
        half = e.op(f"bitcast {ivec(16)} {bits16} to {fvec(16)}")
        return canonical(e, e.op(f"fpext {fvec(16)} {half} to {fvec(32)}"), 32)
    raw = e.op(f"shl {ivec(32)} {e.resize(bits16, 16, 32)}, {e.imm(32, 16)}")
    return e.op(f"bitcast {ivec(32)} {raw} to {fvec(32)}")


@translator("cvt", family=Family.CONVERT, destinations=1)
def cvt(e: Emitter, ins: Instr) -> None:
    """cvt among integers, f16, bf16, f32, f64, and to and from pairs of small formats, in the common roundings."""
    to, from_ = ins.parts[-2], ins.parts[-1]
    modifiers = set(ins.parts[1:-2])
    if to in _PAIRS and from_ == "f32":
        return _pack_small(e, ins, _PAIRS[to], modifiers)
    if to == "f16x2" and from_ in _PAIRS:
        return _unpack_small(e, ins, _PAIRS[from_], modifiers)
    if to in ("bf16x2", "f16x2") and from_ == "f32":
        return _pack_halves(e, ins, to, modifiers)
    if to in INTEGER_TYPES and from_ in INTEGER_TYPES:
        return _integer(e, ins, to, from_, modifiers)
    if to in INTEGER_TYPES and from_ in ("f32", "f64", "f16"):
        return _float_to_integer(e, ins, to, from_, modifiers)
    if from_ in INTEGER_TYPES and to in ("f32", "f64"):
        return _integer_to_float(e, ins, to, from_, modifiers)
    if to in ("f16", "bf16") and from_ == "f32" and modifiers == {"rn"}:
        value = _NARROW[to](e, e.getf(ins.operands[1], 32))
        return e.set(ins.operands[0], value, 16)
    if to == "f32" and from_ in ("f16", "bf16") and modifiers <= {"ftz"}:
        return e.setf(ins.operands[0], widen(e, e.get(ins.operands[1], 16), from_), 32)
    if to == from_ == "f32" and modifiers and modifiers <= {"ftz", *_ROUND_TO_INTEGER}:
        return _round_f32(e, ins, modifiers)
    if (to, from_) == ("f64", "f32") and not modifiers:
        value = e.op(f"fpext {fvec(32)} {e.getf(ins.operands[1], 32)} to {fvec(64)}")
        return e.setf(ins.operands[0], value, 64)
    if (to, from_) == ("f32", "f64") and modifiers == {"rn"}:
        value = e.op(f"fptrunc {fvec(64)} {e.getf(ins.operands[1], 64)} to {fvec(32)}")
        return e.setf(ins.operands[0], value, 32)
    raise NotNative(ins.opcode)


def _round_f32(e: Emitter, ins: Instr, modifiers: set[str]) -> None:
    value = e.getf(ins.operands[1], 32)
    if "ftz" in modifiers:
        value = flush(e, value)
    for mode in modifiers - {"ftz"}:
        value = e.call(fvec(32), f"llvm.{_ROUND_TO_INTEGER[mode]}.v32f32", f"{fvec(32)} {value}")
    e.setf(ins.operands[0], value, 32)


def _pack_halves(e: Emitter, ins: Instr, to: str, modifiers: set[str]) -> None:
    """cvt.rn.f16x2.f32 d, a, b: a to the upper half, b to the lower."""
    if modifiers != {"rn"} or len(ins.operands) != 3:
        raise NotNative(ins.opcode)
    narrow = _NARROW[to[:-2]]
    upper = e.resize(narrow(e, e.getf(ins.operands[1], 32)), 16, 32)
    lower = e.resize(narrow(e, e.getf(ins.operands[2], 32)), 16, 32)
    shifted = e.op(f"shl {ivec(32)} {upper}, {e.imm(32, 16)}")
    e.set(ins.operands[0], e.op(f"or {ivec(32)} {shifted}, {lower}"), 32)


def _integer(e: Emitter, ins: Instr, to: str, from_: str, modifiers: set[str]) -> None:
    if modifiers:
        raise NotNative(ins.opcode)
    have, want = int(from_[1:]), int(to[1:])
    value = e.resize(e.get(ins.operands[1], have), have, want, signed=from_[0] == "s")
    e.set(ins.operands[0], value, want, signed=to[0] == "s")


def _float_to_integer(e: Emitter, ins: Instr, to: str, from_: str, modifiers: set[str]) -> None:
    """Convert floats to integers. Out-of-range values saturate; NaN gives 0 for f32 to 32 bits or fewer (ISA)."""
    mode = next((m for m in modifiers if m in _ROUND_TO_INTEGER), None)
    want, have = int(to[1:]), int(from_[1:])
    if mode is None or modifiers - {mode, "ftz", "sat"} or want < 32 or have == 64 or want == 64:
        raise NotNative(ins.opcode)
    if from_ == "f16":
        value, have = widen(e, e.get(ins.operands[1], 16), "f16"), 32
    else:
        value = e.getf(ins.operands[1], have)
    if "ftz" in modifiers:
        value = flush(e, value)
    value = e.call(fvec(have), f"llvm.{_ROUND_TO_INTEGER[mode]}.v32f{have}", f"{fvec(have)} {value}")
    name = f"llvm.fpto{'si' if to[0] == 's' else 'ui'}.sat.v32i{want}.v32f{have}"
    e.set(ins.operands[0], e.call(ivec(want), name, f"{fvec(have)} {value}"), want, signed=to[0] == "s")


def _integer_to_float(e: Emitter, ins: Instr, to: str, from_: str, modifiers: set[str]) -> None:
    if modifiers - {"rn"}:
        raise NotNative(ins.opcode)
    have, want = int(from_[1:]), int(to[1:])
    word = "sitofp" if from_[0] == "s" else "uitofp"
    value = e.op(f"{word} {ivec(have)} {e.get(ins.operands[1], have)} to {fvec(want)}")
    e.setf(ins.operands[0], value, want)


# ---- pairs of small formats ---------------------------------------------------------------------------------------

_PAIRS = {f"{fmt.name}x2": fmt for fmt in (E2M1, E2M3, E3M2, E4M3, E5M2)}


def _field(fmt: FloatFormat) -> int:
    """The bits that a value takes in a pair: 6-bit formats are padded to 8."""
    return 4 if fmt is E2M1 else 8


def _pack_small(e: Emitter, ins: Instr, fmt: FloatFormat, modifiers: set[str]) -> None:
    """cvt.rn[.satfinite][.relu].fmtx2.f32 d, a, b: a to the upper half, b to the lower."""
    if not {"rn"} <= modifiers <= {"rn", "satfinite", "relu"} or len(ins.operands) != 3:
        raise NotNative(ins.opcode)
    upper, lower = (encode(e, e.get(operand, 32), fmt, modifiers) for operand in ins.operands[1:])
    field = _field(fmt)
    both = e.op(f"or {ivec(32)} {e.op(f'shl {ivec(32)} {upper}, {e.imm(32, field)}')}, {lower}")
    e.set(ins.operands[0], e.resize(both, 32, 2 * field), 2 * field)


def encode(e: Emitter, raw: str, fmt: FloatFormat, modifiers: set[str]) -> str:
    """Codes of f32 bits, rounded to nearest even, in `<32 x i32>`: `formats.encode`, whose names these are."""
    t = ivec(32)

    def op(word: str, a: str, b: str | int) -> str:
        return e.op(f"{word} {t} {a}, {e.imm(32, b) if isinstance(b, int) else b}")

    def at_least(a: str, b: int) -> str:
        return e.call(t, "llvm.smax.v32i32", f"{t} {a}", f"{t} {e.imm(32, b)}")

    magnitude = op("and", raw, 0x7FFFFFFF)
    negative, nan = op("icmp slt", raw, 0), op("icmp ugt", magnitude, 0x7F800000)
    exponent, fraction = op("lshr", magnitude, 23), op("and", magnitude, 0x7FFFFF)
    implicit = e.select(op("icmp ne", exponent, 0), e.imm(32, 1 << 23), e.imm(32, 0), t)
    significand = op("or", fraction, implicit)
    # Exponent over that of the smallest normal number.
    above = op("sub", at_least(exponent, 1), 127 + 1 - fmt.bias)
    below = at_least(e.op(f"sub {t} zeroinitializer, {above}"), 0)
    shift = op("add", below, 23 - fmt.mantissa_bits)
    shift = e.call(t, "llvm.umin.v32i32", f"{t} {shift}", f"{t} {e.imm(32, 31)}")
    kept = op("lshr", significand, shift)
    unit = e.op(f"shl {t} {e.imm(32, 1)}, {shift}")
    remainder, half = op("and", significand, op("sub", unit, 1)), op("lshr", unit, 1)
    odd = op("icmp ne", op("and", kept, 1), 0)
    tie = e.op(f"and {ivec(1)} {op('icmp eq', remainder, half)}, {odd}")
    up = e.op(f"or {ivec(1)} {op('icmp ugt', remainder, half)}, {tie}")
    kept = op("add", kept, e.op(f"zext {ivec(1)} {up} to {t}"))
    code = op("add", kept, op("shl", at_least(above, 0), fmt.mantissa_bits))
    limit = fmt.max_code
    if "satfinite" not in modifiers and (fmt.inf_code is not None or fmt.has_nan):
        limit = fmt.nan_code if fmt.inf_code is None else fmt.inf_code
    code = e.select(op("icmp sgt", code, fmt.max_code), e.imm(32, limit), code, t)
    signed = e.imm(32, 0) if "relu" in modifiers else op("or", code, 1 << fmt.sign_shift)
    code = e.select(negative, signed, code, t)
    return e.select(nan, e.imm(32, fmt.nan_code), code, t)


def _unpack_small(e: Emitter, ins: Instr, fmt: FloatFormat, modifiers: set[str]) -> None:
    """cvt.rn[.relu].f16x2.fmtx2 d, a: exact, as f16 has more exponents and a longer mantissa."""
    if not {"rn"} <= modifiers <= {"rn", "relu"} or len(ins.operands) != 2:
        raise NotNative(ins.opcode)
    field, t = _field(fmt), ivec(32)
    pair = e.resize(e.get(ins.operands[1], 2 * field), 2 * field, 32)
    halves = []
    for position in (0, 1):
        code = e.op(f"lshr {t} {pair}, {e.imm(32, position * field)}")
        magnitude = e.op(f"and {t} {code}, {e.imm(32, (1 << fmt.sign_shift) - 1)}")
        # In an f16 these fields stand for a value that is 2**(bias - 15) times too large.
        wide = e.resize(e.op(f"shl {t} {magnitude}, {e.imm(32, 10 - fmt.mantissa_bits)}"), 32, 16)
        half = e.op(f"bitcast {ivec(16)} {wide} to {fvec(16)}")
        scale = e.op(f"bitcast {t} {e.imm(32, 127 + 15 - fmt.bias << 23)} to {fvec(32)}")
        value = e.op(f"fmul {fvec(32)} {e.op(f'fpext {fvec(16)} {half} to {fvec(32)}')}, {scale}")
        bits = e.op(f"bitcast {fvec(16)} {e.op(f'fptrunc {fvec(32)} {value} to {fvec(16)}')} to {ivec(16)}")
        bits = e.resize(bits, 16, 32)
        sign = e.op(f"and {t} {code}, {e.imm(32, 1 << fmt.sign_shift)}")
        negative = e.op(f"icmp ne {t} {sign}, zeroinitializer")
        signed = e.imm(32, 0) if "relu" in modifiers else e.op(f"or {t} {bits}, {e.imm(32, 0x8000)}")
        bits = e.select(negative, signed, bits, t)
        if fmt.has_nan:
            last = fmt.max_code if fmt.inf_code is None else fmt.inf_code
            nan = e.op(f"icmp ugt {t} {magnitude}, {e.imm(32, last)}")
            bits = e.select(nan, e.imm(32, 0x7FFF), bits, t)
        halves.append(bits)
    upper = e.op(f"shl {t} {halves[1]}, {e.imm(32, 16)}")
    e.set(ins.operands[0], e.op(f"or {t} {halves[0]}, {upper}"), 32)
