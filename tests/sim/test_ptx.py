"""PTX parser: every form of operand, scope and directive that CuTe DSL and NVVM emit."""

import struct
import time

import pytest

from warpspec.sim.errors import PtxSyntaxError
from warpspec.sim.instruction import Imm, Label, Mem, Not, Pair, Param, Reg, Sym, Variable, Vec
from warpspec.sim.ptx import parse
from warpspec.sim.ptx_lexis import constant_expression, integer

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
REGISTERS = """.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;
.reg .f32 %f<9>; .reg .b128 %rq;
"""
TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"


def kernel(body, before="", params="", directives=""):
    module = parse(f"{HEADER}{before}.visible .entry k({params}){directives}\n{{\n{REGISTERS}{body}\n}}\n")
    return module.kernels["k"]


def operands(text):
    (instr,) = kernel(text, before=".extern .shared .align 1024 .b8 smem[];").instrs
    return instr.operands


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mov.b32 %r1, %r2;", (Reg("%r1"), Reg("%r2"))),
        ("mov.u32 %r1, %tid.x;", (Reg("%r1"), Reg("%tid.x"))),
        ("mov.u32 %r1, %laneid;", (Reg("%r1"), Reg("%laneid"))),
        ("mov.u64 %rd1, %clock64;", (Reg("%rd1"), Reg("%clock64"))),
        ("mov.u32 %r1, %cluster_ctarank;", (Reg("%r1"), Reg("%cluster_ctarank"))),
        ("mov.b32 %r1, 0x1F;", (Reg("%r1"), Imm(31))),
        ("mov.b32 %r1, 0b101U;", (Reg("%r1"), Imm(5))),
        ("mov.b32 %r1, 017;", (Reg("%r1"), Imm(15))),
        ("mov.b32 %r1, -1;", (Reg("%r1"), Imm(-1))),
        ("mov.b64 %rd1, 4611756662049538048;", (Reg("%rd1"), Imm(4611756662049538048))),
        ("mov.f32 %f1, 0f3F800000;", (Reg("%f1"), Imm(0x3F800000, True))),
        ("mov.f64 %rd1, 0d3FF0000000000000;", (Reg("%rd1"), Imm(0x3FF0000000000000, True))),
        ("mul.f32 %f1, %f2, -1.5;", (Reg("%f1"), Reg("%f2"), Imm(0xBFC00000, True))),
        ("mul.f64 %rd1, %rd2, 1e3;", (Reg("%rd1"), Reg("%rd2"), Imm(0x408F400000000000, True))),
        ("mov.b32 %r1, WARP_SZ;", (Reg("%r1"), Imm(32))),
        ("mov.b32 %r1, (3+4)*2;", (Reg("%r1"), Imm(14))),
        ("mov.b32 %r1, smem;", (Reg("%r1"), Sym("smem"))),
        ("mov.b32 %r1, smem+16;", (Reg("%r1"), Sym("smem", 16))),
        ("mov.b64 {%r1, _}, %rd1;", (Vec((Reg("%r1"), None)), Reg("%rd1"))),
        ("mov.b64 %rd1, {%r1, 7};", (Reg("%rd1"), Vec((Reg("%r1"), Imm(7))))),
        ("setp.lt.s32 %p1|%p2, %r1, %r2;", (Pair(Reg("%p1"), Reg("%p2")), Reg("%r1"), Reg("%r2"))),
        ("elect.sync _|%p1, -1;", (Pair(None, Reg("%p1")), Imm(-1))),
        ("setp.ne.and.b32 %p1, %r1, 0, !%p2;", (Reg("%p1"), Reg("%r1"), Imm(0), Not(Reg("%p2")))),
        ("ld.shared.b32 %r1, [%r2];", (Reg("%r1"), Mem(Reg("%r2")))),
        ("ld.shared.b32 %r1, [%r2+-16];", (Reg("%r1"), Mem(Reg("%r2"), -16))),
        ("ld.shared.b32 %r1, [ %r2 + 0x10 ];", (Reg("%r1"), Mem(Reg("%r2"), 16))),
        ("ld.shared.b32 %r1, [smem];", (Reg("%r1"), Mem(Sym("smem")))),
        ("ld.shared.b32 %r1, [smem+8];", (Reg("%r1"), Mem(Sym("smem"), 8))),
        ("ld.shared.b32 %r1, [64];", (Reg("%r1"), Mem(Imm(64)))),
        (
            "st.shared.v4.b32 [%r1], {%r2, %r3, 0f00000000, 4};",
            (Mem(Reg("%r1")), Vec((Reg("%r2"), Reg("%r3"), Imm(0, True), Imm(4)))),
        ),
        (
            f"{TMA_LOAD} [%r1+64], [%rd1, {{%r2, %r3}}], [%r4], %rd2;",
            (
                Mem(Reg("%r1"), 64),
                Mem(Reg("%rd1"), 0, (Reg("%r2"), Reg("%r3"))),
                Mem(Reg("%r4")),
                Reg("%rd2"),
            ),
        ),
        ("bar.sync 1, 128;", (Imm(1), Imm(128))),
        ("ret;", ()),
    ],
)  # fmt: skip
def test_operands(text, expected):
    assert operands(text) == expected


def test_opcode_parts_keep_double_colons():
    (instr,) = kernel("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], %r60;").instrs
    assert instr.parts == ("tcgen05", "alloc", "cta_group::1", "sync", "aligned", "shared::cta", "b32")
    assert instr.has("shared::cta") and not instr.has("shared")


def test_guards():
    instrs = kernel("@%p1 mov.b32 %r1, 1;\n@!%p2 mov.b32 %r1, 2;\nmov.b32 %r1, 3;").instrs
    assert [(i.guard, i.guard_negated) for i in instrs] == [
        (Reg("%p1"), False),
        (Reg("%p2"), True),
        (None, False),
    ]


INLINE_WAIT = """
    // begin inline asm
    {
    .reg .pred P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2;
    @P1 bra.uni DONE;
    bra.uni LAB_WAIT;
    DONE:
    }
    // end inline asm
"""


def test_inline_assembly_scopes_are_renamed_apart():
    k = kernel(INLINE_WAIT + INLINE_WAIT + "ret;")
    first, second = k.instrs[0], k.instrs[3]
    assert first.operands[0] != second.operands[0]
    for wait, jump_out, jump_back in (k.instrs[0:3], k.instrs[3:6]):
        predicate = wait.operands[0]
        assert k.registers[predicate.name] == 1
        assert jump_out.guard == predicate
        assert k.labels[jump_out.operands[0].name] == wait.index + 3
        assert k.labels[jump_back.operands[0].name] == wait.index
    assert len(k.labels) == 4


def test_inner_scope_hides_outer_and_jumps_outwards():
    k = kernel("{ .reg .b32 %r1; mov.b32 %r1, 1; bra OUT; } mov.b32 %r1, 2; OUT: ret;")
    inner, jump, outer, _ = k.instrs
    assert inner.operands[0] != Reg("%r1")
    assert k.registers[inner.operands[0].name] == 32
    assert outer.operands[0] == Reg("%r1")
    assert jump.operands == (Label("OUT"),)
    assert k.labels["OUT"] == 3


def test_label_on_the_line_of_its_instruction_and_at_the_end():
    k = kernel("bra END; START: mov.b32 %r1, 1;\nbra.uni START;\nEND:")
    assert k.labels == {"START": 1, "END": 3}
    assert k.instrs[1].opcode == "mov.b32"


def test_entry_directives_and_parameter_offsets():
    k = kernel(
        "ret;",
        params=".param .u32 a, .param .align 64 .b8 map[128],\n"
        ".param .u64 .ptr .global .align 16 p, .param .u8 flag, .param .align 4 .b8 t[8]",
        directives="\n.reqntid 192, 1, 1\n.maxntid 256\n.minnctapersm 1\n"
        ".explicitcluster\n.reqnctapercluster 2, 1, 1\n.maxnreg 128\n",
    )
    assert k.params == [
        Param("a", 0, 4, 4),
        Param("map", 64, 128, 64),
        Param("p", 192, 8, 8),
        Param("flag", 200, 1, 1),
        Param("t", 204, 8, 4),
    ]
    assert (k.reqntid, k.maxntid, k.cluster_dims) == ((192, 1, 1), (256, 1, 1), (2, 1, 1))


def test_variables():
    module = parse(
        HEADER
        + """
        .extern .shared .align 1024 .b8 dynamic[];
        .visible .global .align 4 .u32 counter;
        .global .align 1 .b8 $str[6] = {72, 0x69, 10};
        .const .align 8 .f64 one = 0d3FF0000000000000;
        .const .align 4 .f32 pair[2] = {0f3F800000, -2.0};
        .shared .align 16 .v4 .b32 tile[4][8];
        .weak .global .b8 name[] = {1, 2, 3};
        """
    )
    v = module.variables
    assert v["dynamic"] == Variable("dynamic", "shared", 0, 1024)
    assert v["counter"] == Variable("counter", "global", 4, 4)
    assert v["$str"] == Variable("$str", "global", 6, 1, b"Hi\n\0\0\0")
    assert v["one"].init == struct.pack("<d", 1.0)
    assert v["tile"] == Variable("tile", "shared", 4 * 8 * 16, 16)
    assert v["name"].init == bytes([1, 2, 3])


def test_function_scope_variables():
    k = kernel(
        ".local .align 16 .b8 __local_depot0[64];\n"
        "{ .shared .b32 s; st.shared.b32 [s], 1; }\nmov.b64 %rd1, __local_depot0;"
    )
    assert k.variables["__local_depot0"] == Variable("__local_depot0", "local", 64, 16)
    (name,) = [n for n, v in k.variables.items() if v.space == "shared"]
    assert k.instrs[0].operands[0] == Mem(Sym(name))


def test_branch_targets():
    k = kernel(
        "$L_brx_0: .branchtargets\n  $A,\n  $B;\nbrx.idx %r1, $L_brx_0;\n$A: mov.b32 %r1, 1;\n$B: ret;"
    )
    assert k.instrs[0].operands == (Reg("%r1"), Label("$L_brx_0"))
    assert k.branch_targets == {"$L_brx_0": ("$A", "$B")}
    assert "$L_brx_0" not in k.labels


def test_calls():
    k = kernel(
        "{ .param .b64 param0; st.param.b64 [param0], %rd1; .param .b64 param1; .param .b32 retval0;\n"
        "call.uni (retval0), vprintf, (param0, param1);\nld.param.b32 %r1, [retval0]; }\n"
        "call trap_now;",
        before=".extern .func (.param .b32 ret) vprintf(.param .b64 a, .param .b64 b);\n"
        ".extern .func trap_now()\n.noreturn;\n",
    )
    call = k.instrs[1]
    assert call.operands[1] == Sym("vprintf")
    assert [k.variables[s.name].space for s in call.operands[2].items] == ["param", "param"]
    assert k.instrs[2].operands[1].base == call.operands[0].items[0]
    assert k.instrs[3].operands == (Sym("trap_now"),)


def test_device_functions_are_kept_apart():
    module = parse(
        HEADER
        + ".func (.param .b32 out) twice(.param .b32 in)\n{\n.reg .b32 %r<3>;\nld.param.b32 %r1, [in];\n"
        + "add.s32 %r2, %r1, %r1;\nst.param.b32 [out], %r2;\nret;\n}\n"
    )
    assert not module.kernels
    assert [i.opcode for i in module.functions["twice"].instrs][-1] == "ret"


def test_line_information_and_debug_sections():
    module = parse(
        HEADER
        + ".entry k()\n{\n.reg .b32 %r<3>;\n$L__func_begin0:\n.loc 1 42 7\nmov.b32 %r1, 1;\n"
        + ".loc 2 10 3, function_name $L__info_string0, inlined_at 1 44 9\nmov.b32 %r2, 1;\n}\n"
        + '.file 1 "/src/kernel.py"\n.file 2 "/src/helper.py"\n'
        + ".section .debug_str\n{\n$L__info_string0:\n.b8 104,101,0\n}\n"
    )
    first, second = module.kernels["k"].instrs
    assert (first.source, second.source) == ("/src/kernel.py:42", "/src/helper.py:10")
    assert (first.line, second.line) == (9, 11)


def test_comments_keep_line_numbers():
    k = kernel("/* two\nlines; bra X; */ mov.b32 %r1, /* inside */ 1; // tail; }\nret;")
    assert [i.opcode for i in k.instrs] == ["mov.b32", "ret"]
    assert k.instrs[1].line == k.instrs[0].line + 1
    assert k.instrs[0].text == "mov.b32 %r1, 1;"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r1, %r500;", "%r500"),
        ("mov.b32 %r1, nowhere;", "nowhere"),
        ("bra $nowhere;", "nowhere"),
        ("@%q bra X; X:", "%q"),
        ("X: X: ret;", "twice"),
        ("mov.b32 %r1 %r2;", "not understood"),
        ("mov.b32 %r1, ;", "empty"),
        (".reg .b7 %z;", "reg"),
        ("brx.idx %r1, missing;", "missing"),
        ("?;", "statement"),
    ],
)
def test_errors_name_the_line(body, message):
    lines_before = HEADER.count("\n") + 2 + REGISTERS.count("\n")
    with pytest.raises(PtxSyntaxError, match=message) as caught:
        kernel("\n" + body)
    assert caught.value.where.ptx_line == lines_before + 2


def test_unclosed_body():
    with pytest.raises(PtxSyntaxError, match="not closed"):
        parse(HEADER + ".entry k()\n{\nret;\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3*(4+1)", 15),
        ("-7/2", -3),
        ("1<<4|1", 17),
        ("~0", -1),
        ("0x10+010", 24),
        ("7%4", 3),
        ("WARP_SZ*2", 64),
    ],
)
def test_constant_expressions(text, value):
    assert constant_expression(text) == value


def test_integer_literals():
    assert [integer(t) for t in ("0", "0xFFFFFFFFU", "-0x10", "010", "0b11")] == [0, 0xFFFFFFFF, -16, 8, 3]


def test_speed():
    body = "\n".join(
        f"add.s32 %r{i % 90}, %r{(i + 1) % 90}, {i};\n@%p1 ld.shared.v2.b32 {{%r1, %r2}}, [%r{i % 80}+{i}];"
        for i in range(5000)
    )
    text = f"{HEADER}.entry k()\n{{\n{REGISTERS}{body}\n}}\n"
    best = min(_seconds(lambda: parse(text)) for _ in range(3))
    assert best < 0.9  # 10,000 instructions take 0.1 s on an idle core; the bound allows for a busy one


def _seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def test_vector_registers():
    """A vector register is its elements, by either of their names (PTX ISA 5.4.2)."""
    code = """{ .reg .v4 .s32 abcd; .reg .v2 .f32 xy;
      mov.s32 abcd.x, %r1; mov.s32 abcd.a, %r2; mov.f32 xy.g, %f1;
      st.shared.v4.s32 [%r3], abcd; ld.shared.v2.f32 xy, [%r3]; }"""
    first, last, second, store, load = kernel(code).instrs
    elements = [Reg(f"abcd.{letter}$1") for letter in "xyzw"]
    assert first.operands[0] == elements[0] and last.operands[0] == elements[3]
    assert store.operands[1] == Vec(tuple(elements))
    assert load.operands[0] == Vec((Reg("xy.x$1"), Reg("xy.y$1"))) and second.operands[0] == Reg("xy.y$1")
    assert {kernel(code).registers[f"abcd.{letter}$1"] for letter in "xyzw"} == {32}


def test_lines_of_inline_assembly_are_not_lines_of_the_source():
    text = f"""{HEADER}
.visible .entry k()
{{
{REGISTERS}
.loc 1 21 4
// begin inline asm
.loc 1 23 4
mov.b32 %r1, 1;
// end inline asm
mov.b32 %r2, 1;
.loc 1 30 4
mov.b32 %r3, 1;
}}
.file 1 "a.py"
"""
    assert [ins.source for ins in parse(text).kernels["k"].instrs] == ["a.py:21", "a.py:21", "a.py:30"]
