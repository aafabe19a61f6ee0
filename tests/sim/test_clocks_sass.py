"""Code by its SASS: what a disassembly says, in which order steps stand, how long code takes."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec import sim
from warpspec.sim.clocks.chips import chip
from warpspec.sim.clocks.sass import NoSass, Sass, SassInstr, parse, sass_of
from warpspec.sim.clocks.sass_blocks import Chunk, Place, SassBlock, cut, fill, near
from warpspec.sim.clocks.sass_order import SassOrder, aligned
from warpspec.sim.clocks.servers import Sm
from warpspec.sim.clocks.trace import Step

H200 = chip("h200")
NONE = 7
# As nvdisasm prints it: a load of shared memory, an exponential that waits for it, a branch.
LISTING = """
\t.section\t.text.other,"ax",@progbits
        /*0000*/                   EXIT ;    /* 0x000000000000794d */
                                             /* 0x000fea0003800000 */
\t.section\t.text.kernel,"ax",@progbits
\t//## File ".nv_debug_ptx_txt", line 12
.L_x_3:
        /*0010*/                   LDS.128 R8, [UR7+0x3c0] ;    /* 0x0003c007ff087984 */
                                                                /* 0x000e680008000c00 */
\t//## File ".nv_debug_ptx_txt", line 14
        /*0020*/                   MUFU.EX2 R33, R8 ;           /* 0x0000002100217308 */
                                                                /* 0x002fe20000000800 */
        /*0030*/              @!P0 BRA `(.L_x_3) ;              /* 0x00000008004c8947 */
                                                                /* 0x000fea0003800000 */
"""


def test_a_listing_is_read_with_its_control_words():
    load, ex2, branch = parse(LISTING, "kernel")
    assert (load.name, load.line, load.label, load.writes, load.stall) == ("LDS.128", 12, ".L_x_3", 1, 4)
    assert (ex2.line, ex2.waits, ex2.writes) == (14, 0b000010, NONE)
    assert (branch.name, branch.guarded, branch.target, branch.stall) == ("BRA", True, ".L_x_3", 5)


def instr(name: str, line: int, stall: int = 1, writes: int = NONE, waits: int = 0, **more) -> SassInstr:
    return SassInstr(
        0, line, name, name, False, stall, writes, NONE, waits, more.get("target"), more.get("label")
    )


def chunks(*instrs: SassInstr) -> list[Chunk | Place]:
    block = SassBlock(0, instrs, False)
    fill(block, H200)
    return block.items


@pytest.mark.parametrize(
    ("code", "clocks"),
    [
        ([instr("FFMA", 1, 4), instr("FFMA", 2, 4)], 8),  # stalls
        ([instr("FMNMX", 1), instr("FMNMX", 2)], 3),  # the ALU takes two clocks
        (
            [instr("MUFU.EX2", 1, 1, writes=0), instr("FADD", 2, 2, waits=1)],
            19,
        ),  # 17 until the result is there
        ([instr("MUFU.EX2", 1, 1, writes=0), instr("FADD", 2, 2, waits=2)], 3),  # another scoreboard
    ],
)
def test_code_issues_in_order(code, clocks):
    assert sum(item.alone for item in chunks(*code)) == pytest.approx(clocks)


def test_a_load_from_global_memory_is_waited_for_by_the_replay():
    first, second = chunks(instr("LDG.E.128", 1, 1, writes=3), instr("FADD", 2, 1, waits=0b1000))
    assert first.loads == ((16, 3, 1, False),)
    assert second.waits == 0b1000


def test_a_load_a_little_behind_an_address_hits_l1():
    """The address's line was loaded before it."""
    sm = Sm(H200, 1.0, True, 1.0, 0.0)
    texts = (
        "LDG.E R0, desc[UR4][R2.64+0x4]",
        "LDG.E R0, desc[UR4][R2.64+0x80]",
        "LDG.E R0, desc[UR4][R2.64]",
    )
    assert [near(replace(instr("LDG.E", 1), text=text)) for text in texts] == [True, False, False]
    assert sm.load(0.0, 128, near=True) == H200.clocks("l1_latency") < sm.load(0.0, 128)


def test_retries_and_slow_paths_are_cold():
    wait = instr("SYNCS.PHASECHK.TRANS64.TRYWAIT", 5)
    code = [
        wait,
        instr("BRA", 5, target=".L_x_1"),
        instr("EXIT", 9),
        wait,
        instr("BRA", 5),
        instr("CALL.REL", 3),
    ]
    assert [block.cold for block in cut(tuple(code))] == [False, False, True, True]


def test_steps_without_their_like_go_to_the_nearest_lines():
    assert aligned([10, 50, 90], [12, 88]) == [(0, 0), (2, 1)]
    assert aligned([12], [10, 13, 40]) == [(0, 1)]


BODY = """
  mov.u32 %r1, %tid.x; mov.b32 %f0, 0f3F800000;
  fma.rn.f32 %f1, %f0, %f0, %f0;
  bar.sync 1, 32;
  ld.param.u64 %rd1, [out];
  st.global.b32 [%rd1], %f1;
"""


def recorded(body: str):
    with sim.recording(None):
        return launch(body, {"out": np.zeros(64, np.float32)}, target="sm_90a").trace


def line_of(trace, opcode: str) -> int:
    return next(ins.line for ins in trace.program.kernel.instrs if ins.opcode.startswith(opcode))


def test_a_step_stands_where_its_sass_does():
    """ptxas has moved the FMA after the barrier, and made two instructions of it."""
    trace = recorded(BODY)
    fma, bar, store = (line_of(trace, name) for name in ("fma", "bar", "st"))
    code = (
        instr("S2R", 1),
        instr("BAR.SYNC.DEFER_BLOCKING", bar),
        instr("FFMA", fma),
        instr("FFMA", fma),
        instr("STG.E", store),
        instr("EXIT", store + 1),
    )
    order = SassOrder(trace.program, Sass(code, "a test"), H200)
    entries = list(order.warp(trace.ctas[0].warps[0]))
    kinds = [type(entry).__name__ for entry in entries]
    assert kinds == ["Chunk", "Step", "Moved"]
    assert entries[2].chunk.count == 4
    assert entries[2].stored == 4 * 32
    assert order.executed == 6
    assert [entry for entry in trace.ctas[0].warps[0] if type(entry) is Step] == [entries[1]]


def test_a_load_that_ptxas_hoists_moves_its_bytes():
    """The second of two guarded loads stands in front of the code that the PTX has between them."""
    load, skip = "ld.global.b32 %f1, [%rd1];", "setp.eq.s32 %p1, %r1, 99;\n@%p1 bra {0};\n"
    body = "ld.param.u64 %rd1, [out]; mov.b32 %r1, 1;\n" + skip.format("A") + load + "\nA:\n"
    body += "fma.rn.f32 %f0, %f1, %f1, %f1;\n" * 3 + skip.format("B") + load.replace("f1", "f2") + "\nB:\n"
    trace = recorded(body + "st.global.b32 [%rd1], %f0;")
    loads = [ins.line for ins in trace.program.kernel.instrs if ins.opcode.startswith("ld.global")]
    fma, store = line_of(trace, "fma"), line_of(trace, "st")
    code = (instr("MOV", 1), *(instr("LDG.E", line, writes=n) for n, line in enumerate(loads)))
    code += (
        instr("BRA", 1, target=".L_x_9"),
        *[instr("FFMA", fma)] * 3,
        instr("STG.E", store),
        instr("EXIT", store),
    )
    entries = SassOrder(trace.program, Sass(code, "a test"), H200).warp(trace.ctas[0].warps[0])
    moved = [entry for entry in entries if type(entry).__name__ == "Moved"]
    assert [nbytes for one in moved for nbytes, *_ in one.loads] == [128, 128]


def test_a_loop_runs_its_block_again():
    trace = recorded(
        "mov.b32 %r2, 0; mov.b32 %f0, 0f3F800000;\nAGAIN:\nfma.rn.f32 %f0, %f0, %f0, %f0;\nadd.s32 %r2, %r2, 1;"
        "\nsetp.lt.s32 %p1, %r2, 5;\n@%p1 bra AGAIN;\nld.param.u64 %rd1, [out];\nst.global.b32 [%rd1], %f0;"
    )
    fma, branch, store = (line_of(trace, name) for name in ("fma", "bra", "st"))
    code = (
        instr("MOV", 1),
        instr("FFMA", fma, label=".L_x_0"),
        instr("BRA", branch, target=".L_x_0"),
        instr("STG.E", store),
        instr("EXIT", store + 1),
    )
    order = SassOrder(trace.program, Sass(code, "a test"), H200)
    assert len(list(order.warp(trace.ctas[0].warps[0]))) > 6
    assert order.executed == 1 + 5 * 2 + 2


def test_a_missing_assembler_is_named(monkeypatch):
    trace = recorded(BODY)
    monkeypatch.setenv("WARPSPEC_PTXAS", "/nowhere/ptxas")
    monkeypatch.setenv("WARPSPEC_NVDISASM", "/nowhere/nvdisasm")
    with pytest.raises(NoSass, match="/nowhere/ptxas"):
        sass_of(trace.ptx + "\n", "kernel", "sm_90a")
