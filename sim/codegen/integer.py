"""Integer, logic, comparison and data-movement instructions in native code (PTX ISA 9.7.1, 9.7.6 to 9.7.9)."""

from __future__ import annotations

from warpspec.sim.codegen.emitter import Emitter, NotNative, fvec, ivec
from warpspec.sim.codegen.memory import element_bits
from warpspec.sim.instruction import Imm, Instr, Pair
from warpspec.sim.registry import Family, translator

INTEGER_TYPES = frozenset(f"{k}{b}" for k in "sub" for b in (8, 16, 32, 64))


def integer_type(ins: Instr) -> tuple[bool, int]:
    """(signed, bits) of the instruction's type; NotNative for other types."""
    type_ = ins.parts[-1]
    if type_ not in INTEGER_TYPES:
        raise NotNative(ins.opcode)
    return type_[0] == "s", int(type_[1:])


def _plain(ins: Instr, *allowed: str) -> None:
    """Raise NotNative for a modifier that is not in `allowed`."""
    for part in ins.parts[1:-1]:
        if part not in allowed:
            raise NotNative(ins.opcode)


def binary(e: Emitter, ins: Instr, word: str) -> None:
    _, bits = integer_type(ins)
    a, b = e.get(ins.operands[1], bits), e.get(ins.operands[2], bits)
    e.set(ins.operands[0], e.op(f"{word} {ivec(bits)} {a}, {b}"), bits)


@translator("mov", family=Family.MOVE, destinations=1)
def mov(e: Emitter, ins: Instr) -> None:
    """mov of registers, immediates and addresses; it packs and unpacks vectors of up to 64 bits."""
    type_ = ins.parts[-1]
    if type_ == "pred":
        e.set(ins.operands[0], e.pred(ins.operands[1]), 1)
        return
    bits = element_bits(type_)
    if bits == 128:
        raise NotNative(ins.opcode)
    e.set(ins.operands[0], e.get(ins.operands[1], bits), bits)


@translator("and", "or", "xor", family=Family.ARITHMETIC, destinations=1)
def logic(e: Emitter, ins: Instr) -> None:
    """and, or and xor of integers and predicates."""
    word = ins.parts[0]
    if ins.parts[-1] == "pred":
        a, b = e.pred(ins.operands[1]), e.pred(ins.operands[2])
        e.set(ins.operands[0], e.op(f"{word} {ivec(1)} {a}, {b}"), 1)
    else:
        binary(e, ins, word)


@translator("not", family=Family.ARITHMETIC, destinations=1)
def not_(e: Emitter, ins: Instr) -> None:
    """not of integers and predicates."""
    if ins.parts[-1] == "pred":
        e.set(ins.operands[0], e.op(f"xor {ivec(1)} {e.pred(ins.operands[1])}, splat (i1 true)"), 1)
        return
    _, bits = integer_type(ins)
    e.set(ins.operands[0], e.op(f"xor {ivec(bits)} {e.get(ins.operands[1], bits)}, {e.imm(bits, -1)}"), bits)


@translator("cnot", family=Family.ARITHMETIC, destinations=1)
def cnot(e: Emitter, ins: Instr) -> None:
    """cnot gives 1 where the operand is 0, else 0."""
    _, bits = integer_type(ins)
    zero = e.op(f"icmp eq {ivec(bits)} {e.get(ins.operands[1], bits)}, zeroinitializer")
    e.set(ins.operands[0], e.op(f"zext {ivec(1)} {zero} to {ivec(bits)}"), bits)


@translator("shl", "shr", family=Family.ARITHMETIC, destinations=1)
def shift(e: Emitter, ins: Instr) -> None:
    """shl and shr: shift amounts clamp at the width (9.7.8.7)."""
    signed, bits = integer_type(ins)
    _plain(ins)
    value = e.get(ins.operands[1], bits)
    amount = e.resize(e.get(ins.operands[2], 32), 32, bits)
    if bits < 32 and not isinstance(ins.operands[2], Imm):
        raise NotNative("variable 16-bit shift")
    arithmetic = ins.parts[0] == "shr" and signed
    if isinstance(ins.operands[2], Imm):
        if ins.operands[2].value >= bits:
            amount = e.imm(bits, bits - 1)
            if not arithmetic:
                e.set(ins.operands[0], e.imm(bits, 0), bits)
                return
        word = "shl" if ins.parts[0] == "shl" else ("ashr" if signed else "lshr")
        e.set(ins.operands[0], e.op(f"{word} {ivec(bits)} {value}, {amount}"), bits)
        return
    over = e.op(f"icmp uge {ivec(bits)} {amount}, {e.imm(bits, bits)}")
    safe = e.select(over, e.imm(bits, bits - 1 if arithmetic else 0), amount, ivec(bits))
    word = "shl" if ins.parts[0] == "shl" else ("ashr" if signed else "lshr")
    result = e.op(f"{word} {ivec(bits)} {value}, {safe}")
    if not arithmetic:
        result = e.select(over, e.imm(bits, 0), result, ivec(bits))
    e.set(ins.operands[0], result, bits)


def add_sub(e: Emitter, ins: Instr) -> None:
    _plain(ins)
    binary(e, ins, ins.parts[0])


def multiply(e: Emitter, ins: Instr) -> str:
    """mul.lo, mul.hi and mul.wide of operands 1 and 2; returns the product, of the destination's width."""
    signed, bits = integer_type(ins)
    _plain(ins, "lo", "hi", "wide")
    a, b = e.get(ins.operands[1], bits), e.get(ins.operands[2], bits)
    if ins.has("lo"):
        return e.op(f"mul {ivec(bits)} {a}, {b}")
    a, b = e.resize(a, bits, 2 * bits, signed), e.resize(b, bits, 2 * bits, signed)
    product = e.op(f"mul {ivec(2 * bits)} {a}, {b}")
    if ins.has("hi"):
        product = e.op(f"lshr {ivec(2 * bits)} {product}, {e.imm(2 * bits, bits)}")
        return e.resize(product, 2 * bits, bits)
    return product


def mul_integer(e: Emitter, ins: Instr) -> None:
    _, bits = integer_type(ins)
    e.set(ins.operands[0], multiply(e, ins), 2 * bits if ins.has("wide") else bits)


@translator("mad", family=Family.ARITHMETIC, destinations=1)
def mad(e: Emitter, ins: Instr) -> None:
    """mad of integers: lo, hi and wide."""
    if ins.parts[-1] in ("f32", "f64"):
        raise NotNative(ins.opcode)
    _, bits = integer_type(ins)
    product = multiply(e, ins)
    wide = 2 * bits if ins.has("wide") else bits
    e.set(ins.operands[0], e.op(f"add {ivec(wide)} {product}, {e.get(ins.operands[3], wide)}"), wide)


def div_rem_integer(e: Emitter, ins: Instr) -> None:
    """Division by zero has an unspecified result; here all ones for div and the dividend for rem."""
    signed, bits = integer_type(ins)
    a, b = e.get(ins.operands[1], bits), e.get(ins.operands[2], bits)
    zero = e.op(f"icmp eq {ivec(bits)} {b}, zeroinitializer")
    unsafe = zero
    if signed:
        minus = e.op(f"icmp eq {ivec(bits)} {b}, {e.imm(bits, -1)}")
        least = e.op(f"icmp eq {ivec(bits)} {a}, {e.imm(bits, 1 << (bits - 1))}")
        both = e.op(f"and {ivec(1)} {minus}, {least}")
        unsafe = e.op(f"or {ivec(1)} {zero}, {both}")
    safe = e.select(unsafe, e.imm(bits, 1), b, ivec(bits))
    sign = "s" if signed else "u"
    if ins.parts[0] == "div":
        value = e.op(f"{sign}div {ivec(bits)} {a}, {safe}")
        value = e.select(zero, e.imm(bits, -1), value, ivec(bits))
    else:
        value = e.op(f"{sign}rem {ivec(bits)} {a}, {safe}")
        value = e.select(zero, a, value, ivec(bits))
    e.set(ins.operands[0], value, bits)


@translator("rem", family=Family.ARITHMETIC, destinations=1)
def rem(e: Emitter, ins: Instr) -> None:
    """rem of integers."""
    div_rem_integer(e, ins)


def min_max_integer(e: Emitter, ins: Instr) -> None:
    """min and max; .relu, of s32, makes negative results 0."""
    signed, bits = integer_type(ins)
    _plain(ins, "relu")
    a, b = e.get(ins.operands[1], bits), e.get(ins.operands[2], bits)
    word = ("s" if signed else "u") + ins.parts[0]
    value = e.call(ivec(bits), f"llvm.{word}.v32i{bits}", f"{ivec(bits)} {a}", f"{ivec(bits)} {b}")
    if ins.has("relu"):
        zero = e.imm(bits, 0)
        value = e.call(ivec(bits), f"llvm.smax.v32i{bits}", f"{ivec(bits)} {value}", f"{ivec(bits)} {zero}")
    e.set(ins.operands[0], value, bits)


def neg_abs_integer(e: Emitter, ins: Instr) -> None:
    _, bits = integer_type(ins)
    a = e.get(ins.operands[1], bits)
    minus = e.op(f"sub {ivec(bits)} zeroinitializer, {a}")
    if ins.parts[0] == "abs":
        below = e.op(f"icmp slt {ivec(bits)} {a}, zeroinitializer")
        minus = e.select(below, minus, a, ivec(bits))
    e.set(ins.operands[0], minus, bits)


_INTEGER_COMPARE = {
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "gt": "gt",
    "ge": "ge",
    "lo": "lt",
    "ls": "le",
    "hi": "gt",
    "hs": "ge",
}
_FLOAT_COMPARE = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge",
    "equ": "ueq", "neu": "une", "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno",
}  # fmt: skip


def compare(e: Emitter, ins: Instr, a, b) -> str:
    """The comparison of set/setp as `<32 x i1>`."""
    word, type_ = ins.parts[1], ins.parts[-1]
    if type_ in ("f32", "f64", "f16"):
        bits = int(type_[1:])
        if word not in _FLOAT_COMPARE:
            raise NotNative(ins.opcode)
        left, right = e.getf(a, bits), e.getf(b, bits)
        if ins.has("ftz"):
            left, right = flush(e, left), flush(e, right)
        return e.op(f"fcmp {_FLOAT_COMPARE[word]} {fvec(bits)} {left}, {right}")
    if type_ not in INTEGER_TYPES or word not in _INTEGER_COMPARE:
        raise NotNative(ins.opcode)
    bits = int(type_[1:])
    order = _INTEGER_COMPARE[word]
    if order not in ("eq", "ne"):
        order = ("s" if type_[0] == "s" else "u") + order
    return e.op(f"icmp {order} {ivec(bits)} {e.get(a, bits)}, {e.get(b, bits)}")


def flush(e: Emitter, value: str) -> str:
    """Replace f32 subnormals by zeros of the same sign."""
    raw = e.op(f"bitcast {fvec(32)} {value} to {ivec(32)}")
    exponent = e.op(f"and {ivec(32)} {raw}, {e.imm(32, 0x7F800000)}")
    tiny = e.op(f"icmp eq {ivec(32)} {exponent}, zeroinitializer")
    sign = e.op(f"and {ivec(32)} {raw}, {e.imm(32, 0x80000000)}")
    return e.op(f"bitcast {ivec(32)} {e.select(tiny, sign, raw, ivec(32))} to {fvec(32)}")


@translator("setp", family=Family.COMPARE, destinations=1)
def setp(e: Emitter, ins: Instr) -> None:
    """setp.cmp[.bool][.ftz].type p[|q], a, b[, c] (9.7.6.2): p = (a cmp b) bool c, q = !(a cmp b) bool c."""
    result = compare(e, ins, ins.operands[1], ins.operands[2])
    combine = next((p for p in ins.parts[2:-1] if p in ("and", "or", "xor")), None)
    target = ins.operands[0]
    pair = target if isinstance(target, Pair) else Pair(target, None)
    outcomes = [result]
    if pair.second is not None:
        outcomes.append(e.op(f"xor {ivec(1)} {result}, splat (i1 true)"))
    if combine:
        c = e.pred(ins.operands[3])
        outcomes = [e.op(f"{combine} {ivec(1)} {o}, {c}") for o in outcomes]
    e.set(pair.first, outcomes[0], 1)
    if pair.second is not None:
        e.set(pair.second, outcomes[1], 1)


@translator("selp", family=Family.SELECT, destinations=1)
def selp(e: Emitter, ins: Instr) -> None:
    """selp d, a, b, p gives a where p, else b."""
    bits = element_bits(ins.parts[-1])
    a, b = e.get(ins.operands[1], bits), e.get(ins.operands[2], bits)
    e.set(ins.operands[0], e.select(e.pred(ins.operands[3]), a, b, ivec(bits)), bits)


@translator("lop3", family=Family.ARITHMETIC, destinations=1)
def lop3(e: Emitter, ins: Instr) -> None:
    """Any function of three bits by its truth table (9.7.8.6): sum of the minterms in the table, or of the others."""
    table = ins.operands[4]
    if ins.parts[-1] != "b32" or not isinstance(table, Imm) or len(ins.parts) > 2:
        raise NotNative(ins.opcode)
    operands = [e.get(o, 32) for o in ins.operands[1:4]]
    inverse = [None, None, None]
    table_bits = table.value & 0xFF
    invert = table_bits.bit_count() > 4
    if invert:
        table_bits ^= 0xFF
    total = None
    for row in range(8):
        if not table_bits >> row & 1:
            continue
        term = None
        for position in range(3):
            value = operands[position]
            if not row >> (2 - position) & 1:
                if inverse[position] is None:
                    inverse[position] = e.op(f"xor {ivec(32)} {value}, {e.imm(32, -1)}")
                value = inverse[position]
            term = value if term is None else e.op(f"and {ivec(32)} {term}, {value}")
        total = term if total is None else e.op(f"or {ivec(32)} {total}, {term}")
    if total is None:
        total = e.imm(32, 0)
    if invert:
        total = e.op(f"xor {ivec(32)} {total}, {e.imm(32, -1)}")
    e.set(ins.operands[0], total, 32)


@translator("shf", family=Family.ARITHMETIC, destinations=1)
def shf(e: Emitter, ins: Instr) -> None:
    """Funnel shift of b:a (9.7.8.8); .wrap takes the amount modulo 32, .clamp limits it to 32."""
    a, b = e.get(ins.operands[1], 32), e.get(ins.operands[2], 32)
    amount = e.get(ins.operands[3], 32)
    if ins.has("wrap"):
        amount = e.op(f"and {ivec(32)} {amount}, {e.imm(32, 31)}")
    else:
        amount = e.call(ivec(32), "llvm.umin.v32i32", f"{ivec(32)} {amount}", f"{ivec(32)} {e.imm(32, 32)}")
    low, high = e.resize(a, 32, 64), e.resize(b, 32, 64)
    joined = e.op(f"or {ivec(64)} {low}, {e.op(f'shl {ivec(64)} {high}, {e.imm(64, 32)}')}")
    wide = e.resize(amount, 32, 64)
    if ins.has("l"):
        value = e.op(f"lshr {ivec(64)} {e.op(f'shl {ivec(64)} {joined}, {wide}')}, {e.imm(64, 32)}")
    else:
        value = e.op(f"lshr {ivec(64)} {joined}, {wide}")
    e.set(ins.operands[0], e.resize(value, 64, 32), 32)


@translator("prmt", family=Family.ARITHMETIC, destinations=1)
def prmt(e: Emitter, ins: Instr) -> None:
    """Byte permute with a constant selector (9.7.9.7): nibble j picks byte j of the result from b:a."""
    selector = ins.operands[3]
    if ins.parts[-1] != "b32" or len(ins.parts) > 2 or not isinstance(selector, Imm):
        raise NotNative(ins.opcode)
    sources = [e.get(ins.operands[1], 32), e.get(ins.operands[2], 32)]
    total = None
    for j in range(4):
        nibble = selector.value >> (4 * j) & 15
        source, byte = sources[(nibble & 7) // 4], nibble & 3
        shift_ = 8 * (byte - j)
        if nibble & 8:
            up = e.op(f"shl {ivec(32)} {source}, {e.imm(32, 24 - 8 * byte)}")
            piece = e.op(f"ashr {ivec(32)} {up}, {e.imm(32, 31)}")
        elif shift_ > 0:
            piece = e.op(f"lshr {ivec(32)} {source}, {e.imm(32, shift_)}")
        elif shift_ < 0:
            piece = e.op(f"shl {ivec(32)} {source}, {e.imm(32, -shift_)}")
        else:
            piece = source
        piece = e.op(f"and {ivec(32)} {piece}, {e.imm(32, 0xFF << (8 * j))}")
        total = piece if total is None else e.op(f"or {ivec(32)} {total}, {piece}")
    e.set(ins.operands[0], total, 32)


@translator("bfe", family=Family.ARITHMETIC, destinations=1)
def bfe(e: Emitter, ins: Instr) -> None:
    """Unsigned bit-field extract with constant position and length (9.7.1.19)."""
    signed, bits = integer_type(ins)
    if signed or not all(isinstance(o, Imm) for o in ins.operands[2:4]):
        raise NotNative(ins.opcode)
    position, length = ins.operands[2].value & 255, ins.operands[3].value & 255
    if position >= bits:
        e.set(ins.operands[0], e.imm(bits, 0), bits)
        return
    value = e.op(f"lshr {ivec(bits)} {e.get(ins.operands[1], bits)}, {e.imm(bits, position)}")
    mask = (1 << min(length, bits)) - 1
    e.set(ins.operands[0], e.op(f"and {ivec(bits)} {value}, {e.imm(bits, mask)}"), bits)


@translator("popc", "clz", "brev", family=Family.ARITHMETIC, destinations=1)
def bit_count(e: Emitter, ins: Instr) -> None:
    """popc, clz and brev of 32 and 64 bits."""
    bits = element_bits(ins.parts[-1])
    value = e.get(ins.operands[1], bits)
    name = {"popc": "ctpop", "clz": "ctlz", "brev": "bitreverse"}[ins.parts[0]]
    extra = ["i1 false"] if name == "ctlz" else []
    result = e.call(ivec(bits), f"llvm.{name}.v32i{bits}", f"{ivec(bits)} {value}", *extra)
    if name == "bitreverse":
        e.set(ins.operands[0], result, bits)
    else:
        e.set(ins.operands[0], e.resize(result, bits, 32), 32)
