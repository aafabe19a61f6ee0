"""Lanes and warps that wait for each other: fairness, tiles of a warp, barriers met at different places."""

import numpy as np
import pytest
from helpers.ptx_launch import launch

OUT = """
  ld.param.u64 %rd1, [out];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd2, %rd1, %rd2;
"""
TILE_OF_16 = """
  shr.u32 %r2, %r1, 4; mul.lo.u32 %r2, %r2, 16; mov.b32 %r3, 0xffff; shl.b32 %r3, %r3, %r2;
  and.b32 %r4, %r1, 1; setp.ne.u32 %p1, %r4, 0;
"""


@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_spin_let_the_lane_run_that_they_wait_for(seed):
    out = np.zeros(32, np.uint32)
    launch(
        OUT
        + """
      mov.b32 %r5, sm; st.shared.u32 [%r5], 0; bar.sync 0;
      setp.eq.u32 %p1, %r1, 0; @%p1 bra SET;
    SPIN: ld.volatile.shared.u32 %r6, [%r5]; setp.eq.u32 %p2, %r6, 0; @%p2 bra SPIN;
      bra END;
    SET: st.volatile.shared.u32 [%r5], 7; mov.u32 %r6, 9;
    END: st.global.u32 [%rd2], %r6;
    """,
        {"out": out},
        seed=seed,
    )
    assert out.tolist() == [9] + [7] * 31


def test_every_thread_takes_a_spin_lock():
    lock = np.zeros(2, np.uint32)
    launch(
        """
      ld.param.u64 %rd1, [lock];
    SPIN: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra SPIN;
      ld.volatile.global.u32 %r2, [%rd1+4]; add.u32 %r2, %r2, 1; st.volatile.global.u32 [%rd1+4], %r2;
      atom.global.exch.b32 %r3, [%rd1], 0;
    """,
        {"lock": lock},
        grid=(2, 1, 1),
        block=(64, 1, 1),
    )
    assert lock.tolist() == [0, 128]


@pytest.mark.parametrize("seed", range(3))
def test_diverged_lanes_that_spin_let_other_warps_run(seed):
    out = np.zeros(64, np.uint32)
    launch(
        OUT
        + """
      mov.b32 %r5, sm; st.shared.u32 [%r5], 0; bar.sync 0; mov.b32 %r6, 1;
      setp.ge.u32 %p1, %r1, 32; @%p1 bra SET;
      setp.ge.u32 %p1, %r1, 3; @%p1 bra END;
    SPIN: ld.volatile.shared.u32 %r6, [%r5]; setp.eq.u32 %p2, %r6, 0; @%p2 bra SPIN;
      bra END;
    SET: st.volatile.shared.u32 [%r5], 7;
    END: st.global.u32 [%rd2], %r6;
    """,
        {"out": out},
        block=(64, 1, 1),
        seed=seed,
    )
    assert out.tolist() == [7] * 3 + [1] * 61


def test_a_long_loop_is_no_deadlock(monkeypatch):
    monkeypatch.setattr("warpspec.sim.spinning.IDLE_TURNS", 100)
    out = np.zeros(32, np.uint32)
    launch(
        OUT
        + """
      mov.b32 %r5, 0; mov.b32 %r6, 1;
    LOOP: mad.lo.u32 %r6, %r6, 1664525, 1013904223; add.u32 %r5, %r5, 1;
      setp.lt.u32 %p1, %r5, 100000; @%p1 bra LOOP;
      st.global.u32 [%rd2], %r5;
    """,
        {"out": out},
    )
    assert (out == 100000).all()


def test_a_barrier_of_the_whole_grid():
    out, counter = np.zeros(60, np.uint32), np.zeros(1, np.uint32)
    launch(
        """
      ld.param.u64 %rd1, [out]; ld.param.u64 %rd3, [counter]; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;
      mul.wide.u32 %rd2, %r1, 4; add.s64 %rd2, %rd1, %rd2;
      mov.u32 %r3, %tid.x; setp.ne.u32 %p1, %r3, 0; @%p1 bra JOIN;
      atom.global.add.u32 %r4, [%rd3], 1;
    SPIN: ld.acquire.gpu.global.u32 %r5, [%rd3]; setp.lt.u32 %p2, %r5, %r2; @%p2 bra SPIN;
    JOIN: bar.sync 0; @!%p1 st.global.u32 [%rd2], %r5;
    """,
        {"out": out, "counter": counter},
        grid=(60, 1, 1),
        block=(64, 1, 1),
    )
    assert (out == 60).all()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("vote.sync.ballot.b32 %r6, %p1, %r3;", [0xAAAA] * 16 + [0xAAAA0000] * 16),
        ("vote.sync.all.pred %p2, %p3, %r3; selp.u32 %r6, 1, 0, %p2;", [1] * 16 + [0] * 16),
        ("vote.sync.any.pred %p2, !%p3, %r3; selp.u32 %r6, 1, 0, %p2;", [0] * 16 + [1] * 16),
        ("elect.sync %r6|%p2, %r3;", [0] * 16 + [16] * 16),
        ("elect.sync _|%p2, %r3; selp.u32 %r6, 1, 0, %p2;", [1, *[0] * 15] * 2),
        ("redux.sync.add.u32 %r6, %r1, %r3;", [120] * 16 + [376] * 16),
        ("redux.sync.max.s32 %r6, %r1, %r3;", [15] * 16 + [31] * 16),
        ("match.any.sync.b32 %r6, %r4, %r3;", [0x5555, 0xAAAA] * 8 + [0x55550000, 0xAAAA0000] * 8),
    ],
)
def test_each_tile_of_a_warp_has_its_own_membermask(code, expected):
    out = np.zeros(32, np.uint32)
    launch(OUT + TILE_OF_16 + "setp.lt.u32 %p3, %r1, 17;" + code + "st.global.u32 [%rd2], %r6;", {"out": out})
    assert out.tolist() == expected


def test_a_tile_does_not_wait_for_the_other_tile():
    """Lanes 20 to 31 vote only after lanes 0 to 15, which vote at the same place, set a flag after it."""
    out = np.zeros(32, np.uint32)
    launch(
        OUT
        + TILE_OF_16
        + """
      mov.b32 %r5, sm; st.shared.u32 [%r5], 0; bar.warp.sync -1;
      setp.lt.u32 %p2, %r1, 20; @%p2 bra VOTE;
    SPIN: ld.volatile.shared.u32 %r7, [%r5]; setp.eq.u32 %p3, %r7, 0; @%p3 bra SPIN;
    VOTE: vote.sync.ballot.b32 %r6, %p1, %r3; st.volatile.shared.u32 [%r5], 1; st.global.u32 [%rd2], %r6;
    """,
        {"out": out},
    )
    assert out.tolist() == [0xAAAA] * 16 + [0xAAAA0000] * 16


def test_warp_barrier_joins_lanes_at_different_places():
    out = np.zeros(32, np.uint32)
    launch(
        OUT
        + """
      mov.b32 %r5, sm; mad.lo.u32 %r6, %r1, 4, %r5; xor.b32 %r7, %r1, 31; mad.lo.u32 %r7, %r7, 4, %r5;
      setp.lt.u32 %p1, %r1, 16; @%p1 bra LOW;
      st.shared.u32 [%r6], %r1; bar.warp.sync -1; bra JOIN;
    LOW: st.shared.u32 [%r6], 77; bar.warp.sync -1;
    JOIN: ld.shared.u32 %r8, [%r7]; st.global.u32 [%rd2], %r8;
    """,
        {"out": out},
    )
    assert out.tolist() == list(range(31, 15, -1)) + [77] * 16


@pytest.mark.parametrize("seed", range(6))
def test_cluster_barrier_waits_for_those_alive_although_others_arrived_and_left(seed):
    out = np.zeros(1, np.uint32)
    launch(
        """
      ld.param.u64 %rd1, [out]; mov.u32 %r1, %cluster_ctarank; mov.b32 %r5, sm; st.shared.u32 [%r5], 0;
      barrier.cluster.arrive; barrier.cluster.wait;
      setp.eq.u32 %p1, %r1, 0; @%p1 bra LEAVES; setp.eq.u32 %p1, %r1, 1; @%p1 bra LATE;
      barrier.cluster.arrive; barrier.cluster.wait; ld.shared.u32 %r6, [%r5]; st.global.u32 [%rd1], %r6; exit;
    LEAVES: barrier.cluster.arrive; exit;
    LATE: mov.b32 %r7, 0;
    LOOP: add.u32 %r7, %r7, 1; bar.warp.sync -1; setp.lt.u32 %p2, %r7, 200; @%p2 bra LOOP;
      mapa.shared::cluster.u32 %r8, %r5, 2; st.shared::cluster.u32 [%r8], 42;
      barrier.cluster.arrive; barrier.cluster.wait;
    """,
        {"out": out},
        grid=(3, 1, 1),
        cluster=(3, 1, 1),
        seed=seed,
    )
    assert out[0] == 42
