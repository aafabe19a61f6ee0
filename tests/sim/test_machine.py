"""The machine: divergence, barriers, clusters, determinism, asynchronous completion."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

from warpspec.sim import SimError

INDEX = """
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %ntid.x;
  mad.lo.s32 %r4, %r2, %r3, %r1;
  mul.wide.u32 %rd2, %r4, 4;
  add.s64 %rd1, %rd1, %rd2;
"""


def test_divergent_loop_runs_each_lane_its_own_number_of_times():
    out = np.zeros(64, np.uint32)
    launch(
        INDEX
        + """
      mov.b32 %r5, 0; mov.b32 %r6, 0;
    LOOP: setp.ge.u32 %p1, %r6, %r1; @%p1 bra DONE;
      add.u32 %r5, %r5, %r6; add.u32 %r6, %r6, 1; bra.uni LOOP;
    DONE: st.global.b32 [%rd1], %r5;
    """,
        {"out": out},
        grid=(2, 1, 1),
    )
    lanes = np.arange(32)
    assert (out == np.tile(lanes * (lanes - 1) // 2, 2)).all()


def test_nested_branches_reconverge_before_a_shuffle():
    out = np.zeros(32, np.uint32)
    launch(
        INDEX
        + """
      and.b32 %r5, %r1, 1; setp.eq.u32 %p1, %r5, 0; mov.b32 %r6, 100;
      @%p1 bra EVEN;
      and.b32 %r7, %r1, 2; setp.eq.u32 %p2, %r7, 0; @%p2 bra ODD1; mov.b32 %r6, 3; bra.uni JOIN;
    ODD1: mov.b32 %r6, 1; bra.uni JOIN;
    EVEN: mov.b32 %r6, 0;
    JOIN: shfl.sync.bfly.b32 %r8, %r6, 1, 31, -1;
      st.global.b32 [%rd1], %r8;
    """,
        {"out": out},
    )
    mine = np.array([0 if i % 2 == 0 else (1 if i & 2 == 0 else 3) for i in range(32)])
    assert (out == mine[np.arange(32) ^ 1]).all()


BRX = """
  ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
  and.b32 %r2, %r1, 3; setp.lt.u32 %p1, %r1, 20; mov.u32 %r3, 7;
  T: .branchtargets A, B, A, C;
  {guard} brx.idx %r2, T;
  add.u32 %r3, %r3, 1; bra E;
A: mov.u32 %r3, 10; bra E;
B: mov.u32 %r3, 20; bra E;
C: mov.u32 %r3, 30;
E: add.u32 %r3, %r3, %r2;
  st.global.u32 [%rd1], %r3;
"""


@pytest.mark.parametrize("guard", ["", "@%p1"])
def test_indirect_branches_go_where_each_lane_s_index_says(guard):
    out = np.zeros(32, np.uint32)
    launch(BRX.format(guard=guard), {"out": out})
    wanted = [(10, 20, 10, 30)[i % 4] + i % 4 for i in range(32)]
    if guard:
        wanted[20:] = [8 + i % 4 for i in range(20, 32)]
    assert out.tolist() == wanted


def test_an_indirect_branch_beyond_its_targets():
    with pytest.raises(SimError, match="index beyond its targets") as error:
        launch(BRX.format(guard="").replace("%r1, 3;", "%r1, 7;"), {"out": np.zeros(32, np.uint32)})
    assert "brx.idx" in str(error.value)


def test_lanes_that_exit_early_do_not_take_part():
    out = np.zeros(32, np.uint32)
    launch(
        INDEX
        + """
      setp.ge.u32 %p1, %r1, 20; @%p1 exit;
      bar.warp.sync 0xfffff;
      activemask.b32 %r5; st.global.b32 [%rd1], %r5;
    """,
        {"out": out},
    )
    assert (out[:20] == 0xFFFFF).all() and (out[20:] == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_named_barriers_order_producer_and_consumer_warps(seed):
    out = np.zeros(64, np.uint32)
    launch(
        INDEX
        + """
      mov.b32 %r10, sm; and.b32 %r11, %r1, 31; shl.b32 %r12, %r11, 2; add.s32 %r12, %r10, %r12;
      setp.ge.u32 %p1, %r1, 32; @%p1 bra CONSUME;
      add.u32 %r13, %r11, 7; st.shared.b32 [%r12], %r13;
      barrier.arrive 3, 64; bra.uni END;
    CONSUME: barrier.sync 3, 64; ld.shared.b32 %r13, [%r12]; st.global.b32 [%rd1], %r13;
    END:
    """,
        {"out": out},
        block=(64, 1, 1),
        seed=seed,
    )
    assert (out[32:] == np.arange(32) + 7).all() and (out[:32] == 0).all()


def test_barrier_reduction_reaches_every_thread():
    out = np.zeros(96, np.uint32)
    launch(
        INDEX
        + """
      setp.lt.u32 %p1, %r1, 40;
      barrier.red.popc.u32 %r5, 1, %p1;
      setp.lt.u32 %p2, %r1, 96; barrier.red.and.pred %p3, 2, %p2;
      selp.b32 %r6, 1000, 0, %p3; add.u32 %r5, %r5, %r6;
      st.global.b32 [%rd1], %r5;
    """,
        {"out": out},
        block=(96, 1, 1),
    )
    assert (out == 1040).all()


@pytest.mark.parametrize("seed", range(3))
def test_cluster_barrier_and_distributed_shared_memory(seed):
    out = np.zeros(128, np.uint32)
    launch(
        INDEX
        + """
      mov.b32 %r10, sm; shl.b32 %r12, %r1, 2; add.s32 %r12, %r10, %r12;
      mov.u32 %r13, %cluster_ctarank; mad.lo.s32 %r14, %r13, 1000, %r1; st.shared.b32 [%r12], %r14;
      barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
      add.u32 %r15, %r13, 1; and.b32 %r15, %r15, 3; mapa.shared::cluster.u32 %r16, %r12, %r15;
      ld.shared::cluster.b32 %r17, [%r16]; st.global.b32 [%rd1], %r17;
      barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """,
        {"out": out},
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
        seed=seed,
    )
    rank = np.arange(4)
    assert (out.reshape(4, 32) == ((rank + 1) % 4 * 1000)[:, None] + np.arange(32)).all()


MBARRIER_RING = (
    INDEX
    + """
  mov.b32 %r10, sm; add.s32 %r11, %r10, 8; add.s32 %r12, %r10, 64;
  setp.ne.u32 %p1, %r1, 0; @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r10], 32; mbarrier.init.shared::cta.b64 [%r11], 32;
READY: bar.sync 0;
  mov.b32 %r20, 0; mov.b32 %r21, 0; mov.b32 %r22, 0;
  setp.ge.u32 %p2, %r1, 32; @%p2 bra CONSUMER;
PRODUCER: xor.b32 %r23, %r21, 1;
PWAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r11], %r23; @!%p3 bra PWAIT;
  shl.b32 %r24, %r1, 2; add.s32 %r24, %r24, %r12; add.u32 %r25, %r20, %r1; st.shared.b32 [%r24], %r25;
  mbarrier.arrive.shared::cta.b64 _, [%r10];
  xor.b32 %r21, %r21, 1; add.u32 %r20, %r20, 1; setp.lt.u32 %p4, %r20, 10; @%p4 bra PRODUCER; bra.uni END;
CONSUMER:
CWAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r10], %r21; @!%p3 bra CWAIT;
  and.b32 %r26, %r1, 31; shl.b32 %r24, %r26, 2; add.s32 %r24, %r24, %r12; ld.shared.b32 %r25, [%r24];
  add.u32 %r22, %r22, %r25;
  mbarrier.arrive.shared::cta.b64 _, [%r11];
  xor.b32 %r21, %r21, 1; add.u32 %r20, %r20, 1; setp.lt.u32 %p4, %r20, 10; @%p4 bra CONSUMER;
  st.global.b32 [%rd1], %r22;
END:
"""
)


@pytest.mark.parametrize("seed", range(6))
def test_mbarrier_pipeline_of_one_stage(seed):
    out = np.zeros(64, np.uint32)
    report = launch(MBARRIER_RING, {"out": out}, block=(64, 1, 1), seed=seed)
    assert (out[32:] == 45 + 10 * np.arange(32)).all()
    assert sum(report.barrier_waits.values()) > 0


def test_the_same_seed_gives_the_same_run():
    runs = []
    for seed in (5, 5, 6):
        out = np.zeros(256, np.uint32)
        report = launch(MBARRIER_RING, {"out": out}, block=(64, 1, 1), grid=(4, 1, 1), seed=seed)
        runs.append((report.events, report.barrier_waits))
    assert runs[0] == runs[1] and runs[0] != runs[2]


def test_one_process_and_two_give_the_same_run(monkeypatch):
    runs = []
    for processes in ("1", "2"):
        monkeypatch.setenv("WARPSPEC_SIM_PROCESSES", processes)
        out = np.zeros(512, np.uint32)
        report = launch(MBARRIER_RING, {"out": out}, block=(64, 1, 1), grid=(8, 1, 1))
        runs.append((out.tolist(), report.barrier_waits, report.instructions, report.events))
    assert runs[0] == runs[1]


def test_atomics_between_ctas():
    out = np.zeros(4, np.uint32)
    launch(
        """
      ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x;
      atom.global.add.u32 %r2, [%rd1], 1;
      red.global.max.u32 [%rd1+4], %r1;
      mov.b32 %r3, 0; atom.global.cas.b32 %r4, [%rd1+8], %r3, 9;
      atom.global.inc.u32 %r5, [%rd1+12], 99;
    """,
        {"out": out},
        grid=(5, 1, 1),
        block=(64, 1, 1),
    )
    assert out.tolist() == [320, 63, 9, 320 % 100]


def test_spinning_on_a_flag_that_a_later_cta_sets():
    """More clusters are admitted when the resident ones only spin."""
    out = np.zeros(8, np.uint32)
    launch(
        """
      ld.param.u64 %rd1, [out]; mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 5; @%p1 bra SET;
    SPIN: ld.acquire.gpu.global.b32 %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra SPIN; bra.uni END;
    SET: st.release.gpu.global.b32 [%rd1], 1;
    END: red.global.add.u32 [%rd1+4], 1;
    """,
        {"out": out},
        grid=(6, 1, 1),
    )
    assert out[:2].tolist() == [1, 6 * 32]


def test_special_registers():
    out = np.zeros((4, 8), np.uint32)
    launch(
        """
      ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; setp.ne.u32 %p1, %r1, 3; @%p1 exit;
      setp.ne.u32 %p1, %r2, 1; @%p1 exit;
      mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.y; shl.b32 %r5, %r4, 1; add.u32 %r5, %r5, %r3;
      mul.wide.u32 %rd2, %r5, 32; add.s64 %rd1, %rd1, %rd2;
      mov.u32 %r6, %nctaid.y; mov.u32 %r7, %ntid.x; mov.u32 %r8, %laneid; mov.u32 %r9, %lanemask_lt;
      st.global.v4.b32 [%rd1], {%r3, %r4, %r6, %r7}; st.global.v2.b32 [%rd1+16], {%r8, %r9};
    """,
        {"out": out},
        grid=(2, 2, 1),
        block=(8, 4, 1),
    )
    for cta in range(4):
        assert out[cta].tolist() == [cta % 2, cta // 2, 2, 8, 11, (1 << 11) - 1, 0, 0]


def test_report_counts_what_ran():
    out = np.zeros(128, np.uint32)
    report = launch(INDEX + "st.global.b32 [%rd1], %r1;", {"out": out}, grid=(2, 1, 1), block=(64, 1, 1))
    assert report.opcodes["st.global.b32"] == 4
    assert report.instructions[0]["memory"] == report.instructions[1]["memory"] == 4
    assert report.warp_instructions == 4 * 9


def test_timeline_is_a_chrome_trace(tmp_path):
    import json

    from warpspec.sim.report import SimReport

    out = np.zeros(64, np.uint32)
    report = SimReport([launch(MBARRIER_RING, {"out": out}, block=(64, 1, 1))])
    events = json.loads(report.timeline(tmp_path / "t" / "trace.json").read_text())["traceEvents"]
    waits = [e for e in events if e["name"].startswith("wait mbarrier 0x")]
    assert waits and all(e["dur"] >= 0 and e["ph"] == "X" for e in waits)
    assert {e["ph"] for e in events} == {"X", "M", "s", "f"}
    assert "mbarrier" in str(report) and "times blocked" in str(report)


def test_a_parity_beyond_one_counts_by_its_lowest_bit():
    report = launch(
        "mov.b32 %r1, sm; mbarrier.init.shared.b64 [%r1], 1; mbarrier.arrive.shared.b64 _, [%r1]; mov.b32 %r2, 12;"
        "mbarrier.test_wait.parity.shared.b64 %p1, [%r1], %r2; selp.u32 %r3, 1, 0, %p1; ld.param.u64 %rd1, [out];"
        "st.global.u32 [%rd1], %r3;",
        {"out": (out := np.zeros(1, np.uint32))},
        block=(1, 1, 1),
    )
    assert out[0] == 1 and "a phase parity of 12 (the ISA allows 0 and 1), PTX line" in report.warnings[0]
