"""Python ALU, conversion, exchange and call handlers inside the machine: operands, masks, destinations."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.sim.errors import SimError, UnsupportedInstruction
from warpspec.sim.families.calls import format_c
from warpspec.sim.families.warp_exchange import match_any, reduce_f32

LANES = np.arange(32, dtype=np.uint32)
ADDRESS = """
  ld.param.u64 %rd1, [out];
  mov.u32 %r0, %laneid;
  mul.wide.u32 %rd2, %r0, 4;
  add.u64 %rd1, %rd1, %rd2;
"""


def run(body, variables="", **arrays):
    """`body` leaves each lane's result in %r1; %r0 is the lane number."""
    out = np.zeros(32, np.uint32)
    launch(f"{ADDRESS}{body}\n  st.global.b32 [%rd1], %r1;", {"out": out, **arrays}, variables=variables)
    return out


def floats(values):
    return np.array(values, np.float32).view(np.uint32)


def test_rounding_forms_reach_the_handlers():
    out = run("cvt.rn.f32.u32 %f1, %r0; add.rz.f32 %r1, %f1, 0f33000001;")  # lane + a little over 2**-25
    assert (out[1:] == floats(LANES)[1:]).all()
    out = run("cvt.rn.f32.u32 %f1, %r0; add.rp.f32 %r1, %f1, 0f33000001;")
    assert (out[1:] == floats(LANES)[1:] + 1).all()


def test_guarded_lanes_keep_their_value():
    out = run("mov.b32 %r1, 7; setp.lt.u32 %p1, %r0, 4; @%p1 mul24.lo.u32 %r1, %r0, 3;")
    assert (out == np.where(LANES < 4, LANES * 3, 7)).all()


def test_divergent_lanes():
    out = run(
        "setp.lt.u32 %p1, %r0, 9;\n@%p1 bra LOW;\nbfind.u32 %r1, %r0;\nbra.uni END;\n"
        "LOW: dp4a.u32.u32 %r1, %r0, 2, 1;\nEND:"
    )
    want = np.where(LANES < 9, 2 * LANES + 1, np.floor(np.log2(np.maximum(LANES, 1))).astype(np.uint32))
    assert (out == want).all()


def test_carry_crosses_instructions():
    out = run("mov.b32 %r2, 0xFFFFFFF0; add.cc.u32 %r3, %r2, %r0; addc.u32 %r1, %r0, 100;")
    assert (out == LANES + 100 + (LANES >= 16)).all()


def test_two_predicates_and_a_sink():
    out = run(
        "shl.b32 %r2, %r0, 10; mov.b32 %r3, 0x3C003C00;\n"
        "setp.lt.f16x2 %p1|%p2, %r2, %r3;\n"
        "selp.b32 %r4, 1, 0, %p1; selp.b32 %r5, 2, 0, %p2; or.b32 %r1, %r4, %r5;\n"
        "setp.gt.u32 %p3, %r0, 29; lop3.or.b32 _|%p4, %r0, 1, 0, 0xC0, %p3; @%p4 add.u32 %r1, %r1, 4;"
    )
    low = (LANES << 10).astype(np.uint16).view(np.float16) < 1
    assert (out == low * 1 + 2 + np.where((LANES & 1) | (LANES > 29), 4, 0)).all()


def test_eight_bit_registers_of_packed_conversions():
    out = run(
        "cvt.rn.f32.u32 %f1, %r0;\n"
        "{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %f1, 0f3F800000;\n"
        "cvt.rn.satfinite.e2m1x2.f32 b, 0f40000000, %f1;\n"
        "mov.b8 c, a; mov.b8 d, b; mov.b32 %r1, {a, b, c, d}; }"
    )
    codes = np.array([0, 2, 4, 5, 6, 6, 7] + [7] * 25, np.uint32)  # 5 is a tie between 4 and 6: even is 4
    a, b = codes << 4 | 2, 4 << 4 | codes
    assert (out == a | b << 8 | a << 16 | b << 24).all()


def test_sign_extension_into_a_wider_register():
    out = run("sub.u32 %r2, %r0, 16; cvt.rn.f32.s32 %f1, %r2; cvt.rni.sat.s8.f32 %r1, %f1;")
    assert (out.view(np.int32) == LANES.astype(np.int32) - 16).all()


def test_vector_operand_of_stochastic_conversion():
    out = run("mov.b32 %r2, 0f3F880000; cvt.rs.satfinite.e4m3x4.f32 %r1, {%r2, %r2, %r2, %r2}, 0xFFFF0000;")
    assert (out == 0x39393838).all()


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("redux.sync.min.f32", np.min),
        ("redux.sync.max.f32", np.max),
        ("redux.sync.max.abs.f32", lambda v: np.max(np.abs(v))),
    ],
)
def test_redux_f32(opcode, function):
    out = run(f"sub.u32 %r2, %r0, 20; cvt.rn.f32.s32 %f1, %r2; {opcode} %r1, %f1, -1;")
    assert (out == floats(function(LANES.astype(np.float32) - 20))).all()


def test_redux_f32_in_halves_of_a_warp():
    out = run(
        "cvt.rn.f32.u32 %f1, %r0; setp.lt.u32 %p1, %r0, 16; selp.b32 %r2, 0xFFFF, 0xFFFF0000, %p1;\n"
        "redux.sync.max.f32 %r1, %f1, %r2;"
    )
    assert (out == floats(np.where(LANES < 16, 15, 31))).all()


def test_reduction_of_nan_and_zeros():
    nan, zero, minus_zero, one = 0x7FC00000, 0, 0x80000000, 0x3F800000
    bits = np.array([nan, one, zero, minus_zero], np.uint32)
    assert reduce_f32(bits, "min", False, False) == minus_zero
    assert reduce_f32(bits[2:], "max", False, False) == zero
    assert reduce_f32(bits, "min", False, True) == 0x7FFFFFFF
    assert reduce_f32(bits[:1], "max", False, False) == 0x7FFFFFFF


def test_match():
    out = run("and.b32 %r2, %r0, 3; match.any.sync.b32 %r1, %r2, -1;")
    assert (out == 0x11111111 << (LANES & 3)).all()
    out = run(
        "setp.gt.u32 %p1, %r0, 40; match.all.sync.b32 %r1|%p1, %r0, -1; @%p1 add.u32 %r1, %r1, 5;\n"
        "mov.b64 %rd3, 9; match.all.sync.b64 %r2|%p2, %rd3, -1; @%p2 add.u32 %r1, %r1, 1;"
    )
    assert (out == 1).all()
    assert match_any(np.zeros(32, np.uint32), 0b101)[0] == 0b101


PRINTF = ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);"


def text(name, value):
    return f".global .align 1 .b8 {name}[] = {{{', '.join(map(str, value.encode()))}, 0}};"


def test_printf(capfd):
    body = """
    .local .align 8 .b8 depot[16];
    mov.u64 %rd5, depot; cvta.local.u64 %rd6, %rd5;
    st.local.b32 [%rd5], %r0; st.local.b64 [%rd5+8], 0d3FF8000000000000;
    mov.u64 %rd7, message; cvta.global.u64 %rd7, %rd7;
    mov.b32 %r1, 0; setp.gt.u32 %p1, %r0, 29; @!%p1 bra SKIP;
    { .param .b64 p0; .param .b64 p1; .param .b32 got;
    st.param.b64 [p0], %rd7; st.param.b64 [p1], %rd6;
    call.uni (got), vprintf, (p0, p1);
    ld.param.b32 %r1, [got]; }
    SKIP:
    """
    out = run(body, variables=PRINTF + text("message", "lane %d has %.2f\n"))
    assert capfd.readouterr().out == "lane 30 has 1.50\nlane 31 has 1.50\n"
    assert (out == np.where(LANES > 29, 2, 0)).all()


def test_assertion_stops_the_run():
    variables = (
        ".extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l,"
        " .param .b64 g, .param .b64 s);"
        + text("condition", "x < y") + text("file", "kernel.py") + text("place", "main")
    )  # fmt: skip
    arguments = "".join(
        f"mov.u64 %rd{5 + i}, {name}; cvta.global.u64 %rd{5 + i}, %rd{5 + i};st.param.b64 [p{i}], %rd{5 + i};"
        for i, name in ((0, "condition"), (1, "file"), (3, "place"))
    )
    body = f"""
    {{ .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
    {arguments} st.param.b32 [p2], 42; st.param.b64 [p4], 1;
    call.uni __assertfail, (p0, p1, p2, p3, p4); }}
    """
    with pytest.raises(SimError, match=r"x < y \(kernel.py:42, main\)"):
        run(body, variables=variables)


def test_calls_of_other_functions_are_unsupported():
    with pytest.raises(UnsupportedInstruction, match="malloc"):
        run("{ .param .b64 p; .param .b64 r; st.param.b64 [p], 8; call.uni (r), malloc, (p); }",
            variables=".extern .func (.param .b64 r) malloc(.param .b64 n);")  # fmt: skip


def test_printf_formats():
    words = iter([b"\xff\xff\xff\xff", b"\x10\0\0\0\0\0\0\0", b"A\0\0\0", b"\x08\0\0\0", b"\x2a\0\0\0"])
    line, count = format_c("%u %#llx %c%% [%*d]", lambda size: next(words)[:size], str)
    assert (line, count) == ("4294967295 0x10 A% [      42]", 4)
