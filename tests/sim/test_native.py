# ruff: noqa: E501  (tables of instructions)
"""Native code against the Python handlers: two implementations of each instruction, on edge values and random ones.

The Python handlers are tested against exact arithmetic in test_alu.py and test_convert.py.
"""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.sim import runtime
from warpspec.sim.codegen.program import Program

COUNT = 1024
EDGES_32 = np.array(
    [0, 1, 2, 3, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFF, 0x10000, 0x8000, 0x00FF00FF,
     0x3F800000, 0xBF800000, 0x3F000000, 0x40490FDB, 0x00800000, 0x007FFFFF, 0x00000001, 0x80000001, 0x7F7FFFFF,
     0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x4F000000, 0xCF000000, 0x4F800000, 0x4B800001,
     0x3FC00000, 0x40200000, 0x477FE000, 0x477FF000, 0x33000000, 0x387FC000, 0x3F7FFFFF, 0xC2FC0000, 0x42FE0000],
    np.uint32,
)  # fmt: skip


def inputs(seed: int) -> dict[str, np.ndarray]:
    """Three operands of COUNT 64-bit words; the first words pair up edge values, floats are of moderate size."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in "abc":
        words = rng.integers(0, 1 << 32, 2 * COUNT, dtype=np.uint64).astype(np.uint32)
        floats = (rng.standard_normal(COUNT) * 2.0 ** rng.integers(-8, 9, COUNT)).astype(np.float32)
        words[: 2 * COUNT : 4] = floats.view(np.uint32)[: COUNT // 2]
        edges = rng.choice(EDGES_32, COUNT)
        words[COUNT // 2 : COUNT // 2 + len(edges)] = edges
        arrays[name] = words.view(np.uint64)
    arrays["out"] = np.full(COUNT, 0xDEADBEEFDEADBEEF, np.uint64)
    return arrays


PROLOGUE = """
  mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 128, %r1; mul.wide.u32 %rd9, %r3, 8;
  ld.param.u64 %rd10, [a]; add.s64 %rd10, %rd10, %rd9; ld.global.b64 %rd1, [%rd10];
  ld.param.u64 %rd11, [b]; add.s64 %rd11, %rd11, %rd9; ld.global.b64 %rd2, [%rd11];
  ld.param.u64 %rd12, [c]; add.s64 %rd12, %rd12, %rd9; ld.global.b64 %rd3, [%rd12];
  ld.param.u64 %rd13, [out]; add.s64 %rd13, %rd13, %rd9;
  mov.b64 {%r11, %r12}, %rd1; mov.b64 {%r21, %r22}, %rd2; mov.b64 {%r31, %r32}, %rd3;
  mov.b32 {%h1, %h2}, %r11; mov.b32 {%h3, %h4}, %r21; mov.b32 {%h5, %h6}, %r31;
  mov.b64 %rd4, 0; mov.b32 %r4, 0; mov.b16 %h7, 0;
  setp.lt.s32 %p1, %r31, 0; mov.pred %p2, 0; mov.pred %p3, 0;
"""
EPILOGUE = {
    "r": "cvt.u64.u32 %rd4, %r4; st.global.b64 [%rd13], %rd4;",
    "rd": "st.global.b64 [%rd13], %rd4;",
    "h": "cvt.u64.u16 %rd4, %h7; st.global.b64 [%rd13], %rd4;",
    "p": "selp.b32 %r4, 1, 0, %p2; selp.b32 %r5, 2, 0, %p3; or.b32 %r4, %r4, %r5;"
    " cvt.u64.u32 %rd4, %r4; st.global.b64 [%rd13], %rd4;",
}
INTEGER = [
    *(f"{op}.{t} %r4, %r11, %r21;" for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem") for t in ("s32", "u32")),
    *(f"{op}.{t} %rd4, %rd1, %rd2;" for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem") for t in ("s64", "u64")),
    *(f"{op}.{t} %h7, %h1, %h3;" for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem") for t in ("s16", "u16")),
    *(f"{op}.{t} %rd4, %r11, %r21;" for op in ("mul.wide",) for t in ("s32", "u32")),
    *(f"mad.lo.{t} %r4, %r11, %r21, %r31;" for t in ("s32", "u32")),
    *(f"mad.wide.{t} %rd4, %r11, %r21, %rd3;" for t in ("s32", "u32")),
    "mad.hi.s32 %r4, %r11, %r21, %r31;", "mad.lo.s64 %rd4, %rd1, %rd2, %rd3;", "mul.wide.s16 %r4, %h1, %h3;",
    *(f"{op}.b32 %r4, %r11, %r21;" for op in ("and", "or", "xor")), "not.b64 %rd4, %rd1;", "cnot.b32 %r4, %r11;",
    *(f"{op} %r4, %r11, %r21;" for op in ("shl.b32", "shr.u32", "shr.s32")), "shr.s64 %rd4, %rd1, %r21;",
    "shl.b64 %rd4, %rd1, %r21;", "shl.b32 %r4, %r11, 5;", "shr.s32 %r4, %r11, 40;", "shl.b32 %r4, %r11, 32;",
    "shl.b16 %h7, %h1, 3;", "shr.s16 %h7, %h1, 20;", "shr.u16 %h7, %h1, 9;",
    "neg.s32 %r4, %r11;", "abs.s32 %r4, %r11;", "abs.s64 %rd4, %rd1;", "neg.s16 %h7, %h1;",
    *(f"lop3.b32 %r4, %r11, %r21, %r31, {table};" for table in (0, 0xE8, 0x96, 0xCA, 0x3C, 0xFE, 0xFF, 0x40)),
    *(f"shf.{d}.{mode}.b32 %r4, %r11, %r21, %r31;" for d in "lr" for mode in ("wrap", "clamp")), "shf.l.wrap.b32 %r4, %r11, %r21, 7;",
    *(f"prmt.b32 %r4, %r11, %r21, {selector};" for selector in (0x3210, 0x5410, 0x7632, 0x0123, 0xBA98, 0xF0C4)),
    "bfe.u32 %r4, %r11, 3, 7;", "bfe.u64 %rd4, %rd1, 30, 20;", "bfe.u32 %r4, %r11, 28, 12;", "bfe.u32 %r4, %r11, 40, 12;",
    "min.relu.s32 %r4, %r11, %r21;", "max.relu.s32 %r4, %r11, %r21;",
    "popc.b32 %r4, %r11;", "clz.b32 %r4, %r11;", "brev.b32 %r4, %r11;", "popc.b64 %r4, %rd1;", "clz.b64 %r4, %rd1;",
    "selp.b32 %r4, %r11, %r21, %p1;", "selp.b64 %rd4, %rd1, %rd2, %p1;", "selp.b16 %h7, %h1, %h3, %p1;",
]  # fmt: skip
COMPARE = [
    *(f"setp.{c}.{t} %p2|%p3, %r11, %r21;" for c in ("eq", "ne", "lt", "le", "gt", "ge") for t in ("s32", "u32", "f32")),
    *(f"setp.{c}.f32 %p2, %r11, %r21;" for c in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")),
    *(f"setp.{c}.u32 %p2, %r11, %r21;" for c in ("lo", "ls", "hi", "hs")),
    *(f"setp.lt.{b}.s32 %p2|%p3, %r11, %r21, %p1;" for b in ("and", "or", "xor")), "setp.lt.and.s32 %p2, %r11, %r21, !%p1;",
    "setp.lt.s64 %p2, %rd1, %rd2;", "setp.gt.s16 %p2, %h1, %h3;", "setp.lt.ftz.f32 %p2, %r11, %r21;", "setp.eq.f64 %p2, %rd1, %rd2;",
]  # fmt: skip
FLOAT = [
    *(f"{op}{ftz}.f32 %r4, %r11, %r21;" for op in ("add", "sub", "mul", "add.rn", "min", "max", "min.NaN", "max.NaN") for ftz in ("", ".ftz") if not (op.endswith("NaN") and ftz)),
    "min.ftz.NaN.f32 %r4, %r11, %r21;", "max.f32 %r4, %r11, %r21, %r31;", "min.NaN.f32 %r4, %r11, %r21, %r31;",
    "fma.rn.f32 %r4, %r11, %r21, %r31;", "fma.rn.ftz.f32 %r4, %r11, %r21, %r31;",
    "add.f64 %rd4, %rd1, %rd2;", "mul.rn.f64 %rd4, %rd1, %rd2;", "fma.rn.f64 %rd4, %rd1, %rd2, %rd3;",
    "div.rn.f32 %r4, %r11, %r21;", "sqrt.rn.f32 %r4, %r11;", "rcp.rn.f32 %r4, %r11;", "neg.f32 %r4, %r11;", "abs.ftz.f32 %r4, %r11;",
    "add.rn.f32x2 %rd4, %rd1, %rd2;", "mul.f32x2 %rd4, %rd1, %rd2;", "fma.rn.f32x2 %rd4, %rd1, %rd2, %rd3;", "fma.rn.ftz.f32x2 %rd4, %rd1, %rd2, %rd3;",
    "neg.bf16x2 %r4, %r11;", "abs.f16x2 %r4, %r11;",
]  # fmt: skip
CONVERT = [
    *(f"cvt.{to}.{frm} %{'rd' if to[1:] == '64' else 'r'}4, %{'rd1' if frm[1:] == '64' else 'r11'};" for to in ("u32", "s32", "u64", "s64") for frm in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64") if to != frm and frm[1:] not in ("8", "16")),
    "cvt.s32.s16 %r4, %h1;", "cvt.u32.u16 %r4, %h1;", "cvt.s64.s16 %rd4, %h1;", "cvt.u16.u32 %h7, %r11;", "cvt.s16.s8 %h7, %h1;", "cvt.u32.u8 %r4, %r11;", "cvt.s32.s8 %r4, %r11;",
    *(f"cvt.{mode}{x}.{to}.f32 %r4, %r11;" for mode in ("rni", "rzi", "rmi", "rpi") for to in ("s32", "u32") for x in ("", ".ftz")),
    *(f"cvt.{mode}.f32.f32 %r4, %r11;" for mode in ("rni", "rzi", "rmi", "rpi")),
    "cvt.rn.f32.s32 %r4, %r11;", "cvt.rn.f32.u32 %r4, %r11;", "cvt.rn.f32.u64 %r4, %rd1;", "cvt.rn.f64.s64 %rd4, %rd1;",
    "cvt.rn.bf16.f32 %h7, %r11;", "cvt.rn.f16.f32 %h7, %r11;", "cvt.rn.bf16x2.f32 %r4, %r11, %r21;", "cvt.rn.f16x2.f32 %r4, %r11, %r21;",
    *(f"cvt.rn{sat}{relu}.{fmt}x2.f32 %h7, %r11, %r21;" for fmt in ("e4m3", "e5m2", "e2m3", "e3m2") for sat in ("", ".satfinite") for relu in ("", ".relu")),
    *(f"cvt.rn.satfinite{relu}.e2m1x2.f32 %h7, %r11, %r21;" for relu in ("", ".relu")),
    *(f"cvt.rn{relu}.f16x2.{fmt}x2 %r4, %h1;" for fmt in ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2") for relu in ("", ".relu")),
    "cvt.f32.bf16 %r4, %h1;", "cvt.f32.f16 %r4, %h1;", "cvt.f64.f32 %rd4, %r11;", "cvt.rn.f32.f64 %r4, %rd1;",
]  # fmt: skip


def kind_of(line: str) -> str:
    target = line.split()[1]
    return (
        "p"
        if target.startswith("%p")
        else "rd"
        if target.startswith("%rd")
        else "h"
        if target.startswith("%h")
        else "r"
    )


def run(lines: list[str], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Results of each instruction: one kernel for all, the CTA's y coordinate picks the instruction."""
    results = []
    cases = "".join(f"\nC{i}: {line} {EPILOGUE[kind_of(line)]} bra.uni END;" for i, line in enumerate(lines))
    choose = "mov.u32 %r50, %ctaid.y;" + "".join(
        f" setp.eq.u32 %p9, %r50, {i}; @%p9 bra C{i};" for i in range(len(lines))
    )
    shift = f" mul.wide.u32 %rd20, %r50, {COUNT * 8}; add.s64 %rd13, %rd13, %rd20;"
    body = PROLOGUE + "mov.u32 %r50, %ctaid.y;" + shift + choose + cases + "\nEND:"
    data = {**{k: arrays[k].copy() for k in "abc"}, "out": np.tile(arrays["out"], len(lines))}
    launch(body, data, grid=(COUNT // 128, len(lines), 1), block=(128, 1, 1))
    results = list(data["out"].reshape(len(lines), COUNT))
    return results


def as_comparable(line: str, values: np.ndarray) -> np.ndarray:
    """NaN payloads are not defined: every NaN of a float result becomes the same value."""
    type_ = line.split()[0].split(".")
    produced = type_[-2] if type_[0] == "cvt" else type_[-1]
    if produced in ("f32", "f32x2"):
        words = values.view(np.uint32).copy()
        words[np.isnan(words.view(np.float32))] = 0x7FFFFFFF
        return words.view(np.uint64)
    if produced == "f64":
        words = values.copy()
        words[np.isnan(words.view(np.float64))] = 0x7FFFFFFFFFFFFFFF
        return words
    return values


@pytest.fixture
def python_only(monkeypatch):
    """A switch that makes every arithmetic instruction under test run in its Python handler."""

    def switch():
        native = Program.is_native
        moves = ("mov", "ld", "st", "bra", "ret", "exit", "cvta")

        def is_native(self, ins):
            helper = ins.parts[0] in moves or any(
                r in str(ins.operands) for r in ("%r50", "%rd13", "%rd9", "%rd20")
            )
            return native(self, ins) if helper else False

        monkeypatch.setattr(Program, "is_native", is_native)
        runtime._program.cache_clear()

    yield switch
    monkeypatch.undo()
    runtime._program.cache_clear()


@pytest.mark.parametrize("family", ["INTEGER", "COMPARE", "FLOAT", "CONVERT"])
def test_native_code_agrees_with_the_python_handlers(family, python_only, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    lines = globals()[family]
    arrays = inputs(seed=len(lines))
    native = run(lines, arrays)
    python_only()
    handled = run(lines, arrays)
    wrong = []
    for line, left, right in zip(lines, native, handled, strict=True):
        left, right = as_comparable(line, left), as_comparable(line, right)
        bad = np.flatnonzero(left != right)
        if len(bad):
            i = bad[0]
            a, b, c = (hex(arrays[n][i]) for n in "abc")
            wrong.append(
                f"{line} [{len(bad)} lanes] a={a} b={b} c={c}: native {left[i]:#x} python {right[i]:#x}"
            )
        assert (native[0] != 0xDEADBEEFDEADBEEF).all()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("instruction", "reference", "error"),
    [
        ("ex2.approx.f32", np.exp2, 2**-22),
        ("ex2.approx.ftz.f32", np.exp2, 2**-22),
        ("rcp.approx.f32", lambda x: 1 / x, 2**-23),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x), 2**-22.9),
        ("sqrt.approx.f32", np.sqrt, 2**-23),
        ("lg2.approx.f32", np.log2, 2**-22),
    ],
)
def test_approximations_stay_within_the_documented_error(instruction, reference, error):
    arrays = inputs(7)
    (result,) = run([f"{instruction} %r4, %r11;"], arrays)
    x = arrays["a"].view(np.float32)[::2]
    got = result.view(np.float32)[::2].astype(np.float64)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64))
        want = np.where(np.abs(want) > 3.4028235e38, np.copysign(np.inf, want), want)
    tiny = (np.abs(want) < 2.0**-126) | (np.abs(x) < 2.0**-126)  # flushed with .ftz, gradual without
    normal = np.isfinite(want) & ~tiny
    assert normal.sum() > 200
    slack = error * np.maximum(np.abs(want), 1.0 if "lg2" in instruction else 0.0)
    assert (np.abs(got - want)[normal] <= slack[normal]).all()
    assert (np.isnan(got) == np.isnan(want))[~tiny].all()
    infinite = np.isinf(want) & ~tiny
    assert (got[infinite] == want[infinite]).all()


def test_ex2_ftz_flushes_and_plain_does_not():
    x = np.array([-127.5, -140.0, -149.0, -160.0, 2.0**-140], np.float32)
    arrays = inputs(3)
    arrays["a"].view(np.float32)[: 2 * len(x) : 2] = x
    plain, flushed = run(["ex2.approx.f32 %r4, %r11;", "ex2.approx.ftz.f32 %r4, %r11;"], arrays)
    plain, flushed = (r.view(np.float32)[::2][: len(x)] for r in (plain, flushed))
    assert (plain == np.exp2(x.astype(np.float64)).astype(np.float32)).all() and plain[0] > 0
    assert (flushed == [0, 0, 0, 0, 1]).all()
