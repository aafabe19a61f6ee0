"""Basic blocks, register reads and writes, and liveness; liveness also against a per-path model."""

import random

import pytest

from warpspec.sim.cfg import CARRY, Block, cut, immediate_membermask, liveness, reads_writes, targets
from warpspec.sim.instruction import Kernel
from warpspec.sim.ptx import parse

TMA_LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
REGISTERS = ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .b128 %rq<2>;\n"


def kernel(body) -> Kernel:
    head = ".version 9.0\n.target sm_100a\n.address_size 64\n.extern .shared .b8 smem[];\n"
    text = f"{head}.entry k(.param .u64 a)\n{{\n{REGISTERS}{body}\n}}\n"
    return parse(text).kernels["k"]


def is_native(instr):
    return instr.parts[0] not in ("bar", "mbarrier", "tcgen05", "cp")


def blocks_of(body):
    k = kernel(body)
    return k, cut(k, is_native)


def regs(text):
    """'r1 p2' -> {'%r1', '%p2'}."""
    return {"%" + name if name != "cc" else CARRY for name in text.split()}


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("add.s32 %r1, %r2, %r3;", "r2 r3", "r1"),
        ("mov.u32 %r1, %tid.x;", "", "r1"),
        ("@%p1 add.s32 %r1, %r2, 4;", "p1 r2 r1", "r1"),
        ("setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p3;", "r1 r2 p3", "p1 p2"),
        ("mov.b64 {%r1, _}, %rd1;", "rd1", "r1"),
        ("mov.b64 %rd1, {%r1, %r2};", "r1 r2", "rd1"),
        ("ld.global.v2.b32 {%r1, %r2}, [%rd1+8];", "rd1", "r1 r2"),
        ("ld.param.u64 %rd1, [a];", "", "rd1"),
        ("st.shared.v2.b32 [%r1], {%r2, %r3};", "r1 r2 r3", ""),
        ("st.shared.b32 [smem], %r3;", "r3", ""),
        ("red.relaxed.gpu.global.add.s32 [%rd1], %r1;", "rd1 r1", ""),
        ("atom.global.add.u32 %r1, [%rd1], %r2;", "rd1 r2", "r1"),
        ("atom.global.cas.b32 _, [%rd1], %r2, %r3;", "rd1 r2 r3", ""),
        ("shfl.sync.idx.b32 %r1|%p1, %r2, 0, 31, -1;", "r2", "r1 p1"),
        ("elect.sync _|%p1, -1;", "", "p1"),
        ("vote.sync.ballot.b32 %r1, %p1, %r2;", "p1 r2", "r1"),
        ("bar.sync %r1, %r2;", "r1 r2", ""),
        ("barrier.cta.sync %r1;", "r1", ""),
        ("barrier.red.and.pred %p1, 0, %p2;", "p2", "p1"),
        ("bar.red.popc.u32 %r1, 1, 64, %p2;", "p2", "r1"),
        ("barrier.cluster.arrive;", "", ""),
        ("bar.warp.sync %r1;", "r1", ""),
        ("mbarrier.init.shared.b64 [%r1], %r2;", "r1 r2", ""),
        ("mbarrier.arrive.shared.b64 %rd1, [%r1], %r2;", "r1 r2", "rd1"),
        ("mbarrier.arrive.shared.b64 _, [%r1];", "r1", ""),
        ("mbarrier.arrive.release.cluster.shared::cluster.b64 [%r1];", "r1", ""),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2, %r3;", "r1 r2 r3", "p1"),
        ("mbarrier.inval.shared.b64 [%r1];", "r1", ""),
        (
            f"{TMA_LOAD} [%r1], [%rd1, {{%r2, %r3}}], [%r4], %rd2;",
            "r1 rd1 r2 r3 r4 rd2",
            "",
        ),
        ("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r4];", "rd1 r2 r4", ""),
        ("cp.async.bulk.wait_group.read 0;", "", ""),
        ("cp.async.wait_group %r1;", "r1", ""),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r5], %r6;", "r5 r6", ""),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, %r6;", "r5 r6", ""),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3+16];", "r3", "r1 r2"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r1, %r2}, %r4, [%r3];", "r3", "r1 r2 r4"),
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {%r1, %r2};", "r1 r2 r3", ""),
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r8], %rd1, %rd2, %r2, {%r3, %r4, %r5, %r6}, %p1;",
            "r8 rd1 rd2 r2 r3 r4 r5 r6 p1",
            "",
        ),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];", "r1", ""),
        ("tcgen05.wait::ld.sync.aligned;", "", ""),
        ("tcgen05.fence::before_thread_sync;", "", ""),
        (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2}, {%r3, %r4}, {%r5}, {%r1, %r2};",
            "r1 r2 r3 r4 r5",
            "r1 r2",
        ),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
            "r1 r2 rd1 rd2 p1",
            "r1 r2",
        ),
        ("wgmma.wait_group.sync.aligned 0;", "", ""),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r3];", "r3", "r1 r2"),
        ("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r3], {%r1, %r2};", "r1 r2 r3", ""),
        ("setmaxnreg.inc.sync.aligned.u32 232;", "", ""),
        ("prefetch.tensormap [%rd1];", "rd1", ""),
        ("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r1], %rd1;", "r1 rd1", ""),
        ("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %rq0;", "rq0", "p1"),
        (
            "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];",
            "r1 r2",
            "",
        ),
        ("add.cc.u32 %r1, %r2, %r3;", "r2 r3", "r1 cc"),
        ("addc.cc.u32 %r1, %r2, %r3;", "r2 r3 cc", "r1 cc"),
        ("madc.hi.u32 %r1, %r2, %r3, 0;", "r2 r3 cc", "r1"),
        ("ret;", "", ""),
        ("nanosleep.u32 %r1;", "r1", ""),
        ("fence.proxy.async;", "", ""),
    ],
)  # fmt: skip
def test_reads_and_writes(text, reads, writes):
    (instr,) = kernel(text).instrs
    got_reads, got_writes = reads_writes(instr)
    assert (set(got_reads), set(got_writes)) == (regs(reads), regs(writes))


def test_calls_write_return_values_only():
    body = (
        "{ .param .b64 x; .param .b32 y; call.uni (y), vprintf, (x, x); call.uni done, (x); call.uni done; }"
    )
    text = ".version 9.0\n.target sm_100a\n"
    text += ".extern .func (.param .b32 a) vprintf(.param .b64 b, .param .b64 c);\n"
    k = parse(f"{text}.extern .func done(.param .b64 a);\n.entry k()\n{{\n{body}\n}}\n").kernels["k"]
    assert [reads_writes(i) for i in k.instrs] == [((), ())] * 3


def summary(blocks):
    return [(b.start, b.end, b.successors, b.kind) for b in blocks]


def test_straight_code_is_one_block():
    _, blocks = blocks_of("mov.b32 %r1, 1; mov.b32 %r2, 2; ret;")
    assert blocks == [Block(0, 0, 3, (), "native")]


def test_loop_and_diamond():
    _, blocks = blocks_of(
        """
        mov.b32 %r1, 0;
        LOOP: add.s32 %r1, %r1, 1;
        @%p1 bra ELSE;
        mov.b32 %r2, 1;
        bra JOIN;
        ELSE: mov.b32 %r2, 2;
        JOIN: @!%p2 bra LOOP;
        ret;
        """
    )
    assert summary(blocks) == [
        (0, 1, (1,), "native"),
        (1, 3, (3, 2), "native"),
        (3, 5, (4,), "native"),
        (5, 6, (4,), "native"),
        (6, 7, (1, 5), "native"),
        (7, 8, (), "native"),
    ]


def test_a_label_nobody_branches_to_cuts_nothing():
    _, blocks = blocks_of("mov.b32 %r1, 1; HERE: mov.b32 %r2, 2; ret;")
    assert len(blocks) == 1


def test_system_instructions_stand_alone():
    _, blocks = blocks_of("mov.b32 %r1, 1; bar.sync 0; bar.sync 1; mov.b32 %r2, %r1; ret;")
    assert summary(blocks) == [
        (0, 1, (1,), "native"),
        (1, 2, (2,), "system"),
        (2, 3, (3,), "system"),
        (3, 5, (), "native"),
    ]


def test_collectives_start_a_block_unless_all_lanes_are_there():
    full = "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;"
    partial = "shfl.sync.idx.b32 %r1, %r2, 0, 31, %r3;"
    guarded = "@%p1 elect.sync %r5|%p2, -1;"
    move = "mov.b32 %r4, 4;"
    _, blocks = blocks_of(move + full + move + full + move + partial + full + guarded + full + "ret;")
    assert [(b.start, b.end) for b in blocks] == [(0, 1), (1, 5), (5, 6), (6, 7), (7, 8), (8, 10)]
    assert [b.kind for b in blocks] == ["native"] + ["collective"] * 5


def test_collective_after_a_join_is_not_covered_by_one_before_it():
    full = "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;"
    _, blocks = blocks_of(full + "@%p1 bra OUT; mov.b32 %r2, 1; OUT: mov.b32 %r3, 1;" + full + "ret;")
    assert [(b.start, b.kind) for b in blocks] == [
        (0, "collective"),
        (2, "native"),
        (3, "native"),
        (4, "collective"),
    ]


def test_exits_and_branches_to_the_closing_brace():
    k, blocks = blocks_of("@%p1 ret; @%p2 bra END; mov.b32 %r1, 1; trap; END:")
    assert summary(blocks) == [
        (0, 1, (1,), "native"),
        (1, 2, (3, 2), "native"),
        (2, 4, (), "native"),
        (4, 4, (), "native"),
    ]
    assert liveness(k, blocks).live_in[3] == 0


def test_indexed_branches():
    k, blocks = blocks_of(
        "$T: .branchtargets A, B, A;\nbrx.idx %r1, $T;\nA: mov.b32 %r2, 1;\nB: mov.b32 %r3, %r2; ret;"
    )
    assert targets(k.instrs[0], k) == ("A", "B", "A")
    assert summary(blocks) == [(0, 1, (1, 2), "native"), (1, 2, (2,), "native"), (2, 4, (), "native")]


def test_membermask():
    k = kernel(
        "shfl.sync.idx.b32 %r1, %r2, 0, 31, 15; vote.sync.any.pred %p1, %p2, %r3; elect.sync _|%p1, -1;"
    )
    assert [immediate_membermask(i) for i in k.instrs] == [15, None, -1]


# -- liveness


def test_liveness_of_a_loop():
    k, blocks = blocks_of(
        """
        mov.b32 %r1, 0;
        mov.b32 %r2, 7;
        LOOP: add.s32 %r3, %r1, %r2;
        mov.b32 %r1, %r3;
        setp.lt.s32 %p1, %r1, 100;
        @%p1 bra LOOP;
        st.shared.b32 [smem], %r1;
        ret;
        """
    )
    live = liveness(k, blocks)
    assert [set(live.names(x)) for x in live.live_in] == [set(), regs("r1 r2"), regs("r1")]
    assert [set(live.names(x)) for x in live.live_out] == [regs("r1 r2"), regs("r1 r2"), set()]
    assert set(live.names(live.homes)) == regs("r1 r2")  # %r3 and %p1 stay inside their block
    assert live.bits(["%r1", "%r2"]) == live.live_in[1]


def test_guarded_writes_keep_the_old_value_alive():
    k, blocks = blocks_of("mov.b32 %r1, 0; bar.sync 0; @%p1 mov.b32 %r1, 1; st.shared.b32 [smem], %r1; ret;")
    live = liveness(k, blocks)
    assert set(live.names(live.live_in[2])) == regs("r1 p1")


def test_registers_of_system_instructions_have_homes():
    k, blocks = blocks_of("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2]; ret;")
    assert set(liveness(k, blocks).names(liveness(k, blocks).homes)) == regs("r1 r2")


def test_carry_is_live_between_blocks():
    k, blocks = blocks_of("add.cc.u32 %r1, %r2, %r3; bar.sync 0; addc.u32 %r4, %r5, %r6; ret;")
    live = liveness(k, blocks)
    assert CARRY in live.names(live.live_out[0]) and CARRY in live.names(live.homes)


def random_kernel(rng, length=40):
    """Random code over few registers with branches everywhere."""
    lines = []
    for i in range(length):
        a, b, c = (f"%r{rng.randrange(6)}" for _ in range(3))
        guard = rng.choice(["", "", "", f"@%p{rng.randrange(3)} "])
        choice = rng.random()
        if choice < 0.2:
            lines.append(f"L{i}: {guard}bra L{rng.randrange(length)};")
        elif choice < 0.3:
            lines.append(f"L{i}: setp.eq.s32 %p{rng.randrange(3)}, {a}, {b};")
        elif choice < 0.4:
            lines.append(f"L{i}: bar.sync {a};")
        elif choice < 0.45:
            lines.append(f"L{i}: {guard}ret;")
        else:
            lines.append(f"L{i}: {guard}add.s32 {a}, {b}, {c};")
    return kernel("\n".join(lines))


@pytest.mark.parametrize("seed", range(12))
def test_liveness_against_instruction_level_data_flow(seed):
    """Round-robin data flow over single instructions, with sets, gives the same sets at block borders."""
    k = random_kernel(random.Random(seed))
    blocks = cut(k, is_native)
    live = liveness(k, blocks)
    after = {i.index: set() for i in k.instrs}
    before = {i.index: set() for i in k.instrs} | {len(k.instrs): set()}
    changed = True
    while changed:
        changed = False
        for instr in k.instrs:
            follow = [k.labels[t] for t in targets(instr, k)]
            if instr.parts[0] not in ("bra", "ret") or instr.guard is not None:
                follow.append(instr.index + 1)
            out = set().union(*(before[f] for f in follow))
            reads, writes = reads_writes(instr)
            into = set(reads) | (out - set(writes))
            changed |= into != before[instr.index] or out != after[instr.index]
            before[instr.index], after[instr.index] = into, out
    for block in blocks:
        assert set(live.names(live.live_in[block.index])) == before[block.start]
        assert set(live.names(live.live_out[block.index])) == after[block.end - 1]
    covered = [i for b in blocks for i in range(b.start, b.end)]
    assert covered == list(range(len(k.instrs)))
