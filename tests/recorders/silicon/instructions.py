"""Element-wise instructions by group, in the notation of assembly.py. One kernel runs one group.

Operands for which the ISA leaves the result open (zero divisors, bit-field positions beyond 255 in the 64-bit
forms) are kept out; NaN payloads are not compared. Left out because silicon does not do what the ISA says:
mad.hi.sat.s32, compiled by ptxas 13.4, does not clamp on an H200.
"""

from __future__ import annotations

from itertools import product

ROUNDINGS = ("rn", "rz", "rm", "rp")
SIGNED = ("s", "u")


def _each(pattern: str, *choices: tuple[str, ...]) -> list[str]:
    """`pattern` with {0}, {1}, ... replaced by every combination of the choices."""
    return [pattern.format(*combination) for combination in product(*choices)]


INTEGER = (
    *_each(
        "{0}.s32 d, a, b", ("add", "sub", "add.sat", "sub.sat", "mul.lo", "mul.hi", "mul24.lo", "mul24.hi")
    ),
    "mul.hi.u32 d, a, b",
    *_each("mul24.{0}.u32 d, a, b", ("lo", "hi")),
    *_each("mul.wide.{0}32 dx, a, b", SIGNED),
    *_each("mul.wide.{0}16 d, ah, bh", SIGNED),
    *_each("mad.{0}.{1}32 d, a, b, c", ("lo", "hi"), SIGNED),
    *_each("mad.wide.{0}32 dx, a, b, z", SIGNED),
    *_each("mad24.{0}.{1}32 d, a, b, c", ("lo", "hi"), SIGNED),
    "mad24.hi.sat.s32 d, a, b, c",
    *_each("sad.{0}32 d, a, b, c", SIGNED),
    *_each("{0}.{1}32 d, a, bn", ("div", "rem"), SIGNED),
    *_each("{0}.{1}32 d, a, b", ("min", "max"), SIGNED),
    *_each("{0}.{1}16x2 d, a, b", ("min", "max"), SIGNED),
    *_each("{0}.relu.s16x2 d, a, b", ("min", "max")),
    *_each("{0}.relu.s32 d, a, b", ("min", "max")),
    *_each("add.{0}16x2 d, a, b", SIGNED),
    *_each("{0}.s32 d, a", ("abs", "neg")),
    *_each("dp4a.{0}32.{1}32 d, a, b, c", SIGNED, SIGNED),
    *_each("dp2a.{0}.{1}32.{2}32 d, a, b, c", ("lo", "hi"), SIGNED, SIGNED),
    "add.cc.u32 d, a, b; addc.u32 t, a, c; xor.b32 d, d, t",
    "add.cc.s32 t, a, b; addc.cc.s32 t, b, c; addc.s32 d, a, c",
    "sub.cc.u32 t, a, b; subc.u32 d, b, c",
    "sub.cc.u32 t, a, b; subc.cc.u32 t, b, c; subc.u32 d, a, c",
    "mad.lo.cc.u32 t, a, b, c; madc.hi.u32 d, a, b, c",
    "mad.hi.cc.u32 t, a, b, c; madc.lo.u32 d, c, b, a",
    *_each("{0}.s16 dh, ah, bh", ("add", "sub", "mul.lo", "mul.hi", "min", "max")),
    *_each("{0}.u16 dh, ah, bh", ("add", "mul.hi", "min", "max")),
    "mad.lo.s16 dh, ah, bh, ch",
    *_each("{0}.s16 dh, ah", ("abs", "neg")),
    *_each("setp.{0}.s32 p, a, b", ("eq", "ne", "lt", "le", "gt", "ge")),
    *_each("setp.{0}.u32 p, a, b", ("lo", "ls", "hi", "hs")),
    "setp.lt.u32 p, a, b; setp.ge.and.s32 q, b, c, p",
    "setp.lt.s32 p, a, b; setp.ne.xor.u32 p|q, b, c, !p",
    *_each("set.{0}.u32.s32 d, a, b", ("lt", "ge")),
    "set.hi.f32.u32 d, a, b",
    "setp.gt.s32 p, a, b; selp.b32 d, b, c, p",
    "slct.s32.s32 d, a, b, c",
    "slct.u32.f32 d, a, b, c",
)

WIDE_INTEGER = (
    *_each("{0}.s64 dx, x, y", ("add", "sub", "mul.lo", "mul.hi", "min", "max")),
    *_each("{0}.u64 dx, x, y", ("mul.hi", "min", "max")),
    *_each("{0}.{1}64 dx, x, yn", ("div", "rem"), SIGNED),
    "mad.lo.s64 dx, x, y, z",
    "mad.hi.u64 dx, x, y, z",
    *_each("{0}.s64 dx, x", ("abs", "neg")),
    *_each("{0}.b64 dx, x, y", ("and", "or", "xor")),
    "not.b64 dx, x",
    "shl.b64 dx, x, c",
    "shr.u64 dx, x, c",
    "shr.s64 dx, x, c",
    "popc.b64 d, x",
    "clz.b64 d, x",
    "brev.b64 dx, x",
    *_each("bfind.{0}64 d, x", SIGNED),
    "and.b32 t, b, 255; and.b32 u, c, 255; bfe.u64 dx, x, t, u",
    "and.b32 t, b, 255; and.b32 u, c, 255; bfe.s64 dx, x, t, u",
    "and.b32 t, b, 255; and.b32 u, c, 255; bfi.b64 dx, x, y, t, u",
    "add.cc.u64 dx, x, y; addc.u64 ux, y, z; xor.b64 dx, dx, ux",
    *_each("setp.{0}.s64 p, x, y", ("eq", "lt", "ge")),
    *_each("setp.{0}.u64 p, x, y", ("lo", "hs")),
    "setp.lt.s64 p, x, y; selp.b64 dx, y, z, p",
    "cvt.u32.u64 d, x",
    "cvt.s64.s32 dx, a",
    "cvt.u64.u32 dx, a",
    "cvt.sat.s32.s64 d, x",
    "cvt.sat.u32.s64 d, x",
)

BITS = (
    *_each("{0}.b32 d, a, b", ("and", "or", "xor")),
    *_each("{0}.b32 d, a", ("not", "cnot", "popc", "clz", "brev")),
    *_each("{0}.b16 dh, ah, bh", ("and", "or", "xor")),
    *_each(
        "lop3.b32 d, a, b, c, {0}", ("0x96", "0xe8", "0xca", "0x1b", "0x80", "0xfe", "0x6a", "0x00", "0xd8")
    ),
    "setp.eq.u32 q, c, 0; lop3.or.b32 d|p, a, b, c, 0x3f, q",
    "setp.ne.u32 q, c, 0; lop3.and.b32 d|p, a, b, c, 0x80, q",
    *_each("shf.{0}.{1}.b32 d, a, b, c", ("l", "r"), ("wrap", "clamp")),
    "shl.b32 d, a, c",
    *_each("shr.{0}32 d, a, c", SIGNED),
    "shl.b16 dh, ah, c",
    *_each("shr.{0}16 dh, ah, c", SIGNED),
    "prmt.b32 d, a, b, c",
    *_each("prmt.b32 d, a, b, {0}", ("0x3210", "0x0123", "0x7531", "0xba98", "0x0f84", "0x5410")),
    *_each("prmt.b32.{0} d, a, b, c", ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")),
    *_each("bfe.{0}32 d, a, b, c", SIGNED),
    *_each("bfe.{0}32 d, a, 5, 9", SIGNED),
    *_each("bfe.{0}32 d, a, 24, 8", SIGNED),
    "bfi.b32 d, a, b, c, 7",
    "bfi.b32 d, a, b, 3, c",
    "bfi.b32 d, a, b, 8, 16",
    *_each("bfind.{0}32 d, a", SIGNED),
    *_each("bfind.shiftamt.{0}32 d, a", SIGNED),
    *_each("bmsk.{0}.b32 d, a, c", ("clamp", "wrap")),
    *_each("szext.{0}.{1}32 d, a, c", ("clamp", "wrap"), SIGNED),
    "and.b32 t, c, 31; fns.b32 d, a, t, 2",
    "and.b32 t, c, 31; fns.b32 d, a, t, -1",
    "and.b32 t, c, 31; fns.b32 d, a, t, 0",
    "setp.lt.s32 p, a, b; setp.gt.s32 q, b, c; and.pred p, p, q; not.pred q, q",
    "mov.b32 d, {ah, bh}",
    "mov.b32 {dh, _}, a",
)

FLOAT = (
    *_each("{0}.{1}.f32 d, a, b", ("add", "sub", "mul"), ROUNDINGS),
    *_each("{0}.{1}.f32 d, a, b", ("add", "sub", "mul"), ("rn.ftz", "rz.ftz", "rn.sat", "rn.ftz.sat")),
    *_each("fma.{0}.f32 d, a, b, c", (*ROUNDINGS, "rn.ftz", "rp.ftz", "rn.sat", "rm.ftz.sat")),
    *_each("div.{0}.f32 d, a, b", (*ROUNDINGS, "rn.ftz")),
    *_each("{0}.{1}.f32 d, a", ("rcp", "sqrt"), (*ROUNDINGS, "rn.ftz")),
    *_each("{0}.f32 d, a", ("abs", "neg", "abs.ftz", "neg.ftz")),
    *_each("{0}.f32 d, a, b", ("min", "max", "min.ftz", "max.ftz", "min.NaN", "max.NaN", "min.ftz.NaN")),
    *_each("{0}.xorsign.abs.f32 d, a, b", ("min", "max", "min.NaN", "max.ftz.NaN")),
    "copysign.f32 d, a, b",
    *_each("testp.{0}.f32 p, a", ("finite", "infinite", "number", "notanumber", "normal", "subnormal")),
    *_each("setp.{0}.f32 p, a, b", ("eq", "ne", "lt", "le", "gt", "ge", "num", "nan")),
    *_each("setp.{0}.f32 p, a, b", ("equ", "neu", "ltu", "leu", "gtu", "geu")),
    "setp.lt.ftz.f32 p|q, a, b",
    "setp.gtu.f32 p, b, c; setp.le.or.ftz.f32 q, a, b, !p",
    "set.lt.u32.f32 d, a, b",
    "set.geu.ftz.s32.f32 d, a, b",
    "set.gt.f32.f32 d, a, b",
)

APPROXIMATE = (
    *_each("{0}.f32 d, a, b", ("div.approx", "div.approx.ftz", "div.full", "div.full.ftz")),
    *_each(
        "{0}.{1}.f32 d, a", ("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2"), ("approx", "approx.ftz")
    ),
    "tanh.approx.f32 d, a",
)

DOUBLE = (
    *_each("{0}.{1}.f64 dx, x, y", ("add", "sub", "mul"), ROUNDINGS),
    *_each("fma.{0}.f64 dx, x, y, z", ROUNDINGS),
    *_each("div.{0}.f64 dx, x, y", ROUNDINGS),
    *_each("{0}.{1}.f64 dx, x", ("rcp", "sqrt"), ROUNDINGS),
    *_each("{0}.f64 dx, x", ("abs", "neg")),
    *_each("{0}.f64 dx, x, y", ("min", "max", "copysign")),
    *_each("testp.{0}.f64 p, x", ("finite", "number", "subnormal")),
    *_each("setp.{0}.f64 p, x, y", ("eq", "lt", "geu", "nan")),
    *_each("cvt.{0}.f32.f64 d, x", ROUNDINGS),
    "cvt.rn.ftz.f32.f64 d, x",
    "cvt.f64.f32 dx, b",
    *_each("cvt.{0}.s32.f64 d, x", ("rni", "rzi", "rmi", "rpi")),
    *_each("cvt.{0}.u64.f64 dx, x", ("rni", "rzi")),
    *_each("cvt.rzi.{0}64.f64 dx, x", SIGNED),
    *_each("cvt.rn.f64.{0}64 dx, x", SIGNED),
    *_each("cvt.rn.f64.{0}32 dx, b", SIGNED),
    "cvt.rni.f64.f64 dx, x",
    "cvt.rn.f16.f64 dh, x",
)

_PACKED = ("f16x2", "bf16x2")


def half(type_: str) -> tuple[str, ...]:
    """Arithmetic on packed halves, `type_` f16x2 or bf16x2, and the scalar forms."""
    scalar = type_[:-2]
    f16_only = type_ == "f16x2"
    saturating = ("rn.sat", "rn.ftz", "rn.ftz.sat") if f16_only else ()
    return (
        *_each("{0}.{1} d, a, b", ("add.rn", "sub.rn", "mul.rn"), (type_,)),
        *_each("{0}.{1}.f16x2 d, a, b", ("add", "sub", "mul"), saturating),
        *_each("fma.{0}.{1} d, a, b, c", ("rn", "rn.relu"), (type_,)),
        *_each("fma.{0}.f16x2 d, a, b, c", (*saturating, "rn.ftz.relu") if f16_only else ()),
        *_each("{0}.{1} d, a", ("abs", "neg"), (type_,)),
        *_each(
            "{0}{1}.{2} d, a, b", ("min", "max"), ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"), (type_,)
        ),
        *_each("{0}.ftz.f16x2 d, a, b", ("min", "max") if f16_only else ()),
        *_each("{0}.{1} dh, ah, bh", ("add.rn", "mul.rn", "min", "max.NaN"), (scalar,)),
        *_each("fma.rn.{0} dh, ah, bh, ch", (scalar,)),
        *_each("setp.{0}.{1} p, ah, bh", ("eq", "lt", "geu", "num", "neu"), (scalar,)),
        *_each("setp.{0}.{1} p|q, a, b", ("lt", "ge", "equ", "nan"), (type_,)),
        *_each("set.{0}.{1}.{1} d, a, b", ("gt", "leu"), (type_,)),
        *_each("set.le.u32.{0} d, ah, bh", (scalar,)),
        *_each("tanh.approx.{0} d, a", (type_,)),
        "ex2.approx.f16x2 d, a" if f16_only else "ex2.approx.ftz.bf16x2 d, a",
        *_each("cvt.f32.{0} d, ah", (scalar,)),
        *_each("cvt.{0}.s32.{1} d, ah", ("rni", "rzi", "rmi", "rpi"), (scalar,)),
        *_each("cvt.{0}.u16.{1} dh, ah", ("rni", "rzi"), (scalar,)),
        *_each("cvt.{0}.{1}.{1} dh, ah", ("rni", "rzi", "rmi", "rpi"), (scalar,)),
        *_each("cvt.rn.{0}.s32 dh, a", (scalar,)),
        *_each("cvt.rn.{0}.u16 dh, ah", (scalar,)),
        *_each(
            "cvt.rn.satfinite{0}.{1}.f16x2 dh, a", ("", ".relu"), ("e4m3x2", "e5m2x2") if f16_only else ()
        ),
    )


CONVERSIONS = (
    *_each("cvt.{0}.{1}.f32 dh, a", ("rn", "rz", "rn.relu", "rz.relu", "rn.satfinite"), ("f16", "bf16")),
    *_each("cvt.{0}.{1}.f32 d, a, b", ("rn", "rz", "rn.relu", "rz.relu"), _PACKED),
    *_each("cvt.{0}.f16.f32 dh, a", ("rm", "rp", "rn.ftz", "rn.sat")),
    *_each("cvt.{0}.tf32.f32 d, a", ("rna", "rn", "rz", "rn.relu")),
    *_each("cvt.rn.satfinite{0}.{1}.f32 dh, a, b", ("", ".relu"), ("e4m3x2", "e5m2x2")),
    *_each("cvt.rn{0}.f16x2.{1} d, ah", ("", ".relu"), ("e4m3x2", "e5m2x2")),
    *_each("cvt.{0}.f32.f32 d, a", ("rni", "rzi", "rmi", "rpi", "rni.ftz", "sat", "ftz", "rpi.ftz.sat")),
    "cvt.f64.f32 dx, a",
    "cvt.ftz.f64.f32 dx, a",
)

TO_INTEGER = (
    *_each("cvt.{0}.{1}32.f32 d, a", ("rni", "rzi", "rmi", "rpi", "rni.ftz"), SIGNED),
    *_each("cvt.{0}.{1}16.f32 dh, a", ("rni", "rzi"), SIGNED),
    *_each("cvt.{0}.{1}8.f32 d, a", ("rni", "rzi"), SIGNED),
    *_each("cvt.{0}.{1}64.f32 dx, a", ("rni", "rzi", "rpi"), SIGNED),
    *_each("cvt.rni.{0}32.f16 d, ah", SIGNED),
)

FROM_INTEGER = (
    *_each("cvt.{0}.f32.{1}32 d, a", ROUNDINGS, SIGNED),
    *_each("cvt.{0}.f32.{1}64 d, x", ROUNDINGS, SIGNED),
    *_each("cvt.rn.{0}.{1}32 dh, a", ("f16", "bf16"), SIGNED),
    *_each("cvt.rz.f16.{0}64 dh, x", SIGNED),
    *_each("cvt.rn.f32.{0}16 d, ah", SIGNED),
    *_each("cvt.rn.f32.{0}8 d, a", SIGNED),
    *_each("cvt.sat.{0}8.{1}32 d, a", SIGNED, SIGNED),
    *_each("cvt.sat.{0}16.{1}32 dh, a", SIGNED, SIGNED),
    "cvt.sat.u32.s32 d, a",
    "cvt.sat.s32.u32 d, a",
    *_each("cvt.{0}32.{1}8 d, a", SIGNED, SIGNED),
    *_each("cvt.{0}32.{1}16 d, ah", SIGNED, SIGNED),
    *_each("cvt.pack.sat.{0}16.s32 d, a, b", SIGNED),
    *_each("cvt.pack.sat.{0}8.s32.b32 d, a, b, c", SIGNED),
)

_LOWER = "mov.u32 t, %laneid; setp.lt.u32 q, t, 16"  # q: the lower half of the warp

# Lanes of whole warps together; the same inputs a lane as above. Results of lanes that take no part stay 0.
WARP = (
    "shfl.sync.idx.b32 d|p, a, b, 0x1f, -1",
    "shfl.sync.idx.b32 d|p, a, b, 0x181f, -1",
    "shfl.sync.idx.b32 d|p, a, b, 0x1c07, -1",
    "shfl.sync.up.b32 d|p, a, b, 0, -1",
    "shfl.sync.up.b32 d|p, a, 3, 0x1800, -1",
    "shfl.sync.down.b32 d|p, a, b, 0x1f, -1",
    "shfl.sync.down.b32 d|p, a, 2, 0x181f, -1",
    "shfl.sync.bfly.b32 d|p, a, b, 0x1f, -1",
    "shfl.sync.bfly.b32 d|p, a, 5, 0x1c1f, -1",
    "shfl.sync.bfly.b32 d|p, a, 9, 0x1003, -1",
    "mov.u32 t, %laneid; shfl.sync.idx.b32 d|p, t, b, c, -1",
    *_each("redux.sync.{0}.{1}32 d, a, -1", ("add", "min", "max"), SIGNED),
    *_each("redux.sync.{0}.b32 d, a, -1", ("and", "or", "xor")),
    *_each(_LOWER + "; mov.b32 d, 0; @q redux.sync.{0}.s32 d, a, 0xffff", ("add", "min")),
    *_each("setp.lt.s32 p, a, b; vote.sync.{0}.pred q, p, -1", ("all", "any", "uni")),
    *_each("setp.lt.s32 p, a, b; vote.sync.{0}.pred q, !p, -1", ("all", "any", "uni")),
    "setp.gt.u32 p, a, b; vote.sync.ballot.b32 d, p, -1",
    _LOWER + "; setp.gt.u32 p, a, b; mov.b32 d, 0; @q vote.sync.ballot.b32 d, p, 0xffff",
    _LOWER + "; mov.b32 d, 0; @!q shfl.sync.down.b32 d, a, 1, 0x1f, 0xffff0000",
    "and.b32 t, a, 3; match.any.sync.b32 d, t, -1",
    "and.b32 t, b, 1; mov.b64 ux, {t, t}; match.any.sync.b64 d, ux, -1",
    "and.b32 t, a, 0; match.all.sync.b32 d|p, t, -1",
    "and.b32 t, a, 1; match.all.sync.b32 d|p, t, -1",
    _LOWER + "; and.b32 t, t, 16; mov.b32 d, 0; @q match.all.sync.b32 d|p, t, 0xffff; setp.ne.u32 p, d, 0",
    "elect.sync d|p, -1",
    _LOWER + "; mov.b32 d, 77; setp.ne.u32 p, d, d; @!q elect.sync d|p, 0xffff0000",
    "activemask.b32 d",
    *_each(
        "mov.u32 d, %{0}",
        ("laneid", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt"),
    ),
    *_each("mov.u32 d, %{0}.x", ("tid", "ntid", "ctaid", "nctaid")),
    *_each("mov.u32 d, %{0}.y", ("tid", "ntid", "ctaid", "nctaid")),
)
