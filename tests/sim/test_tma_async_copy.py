"""cp.async, st.async and red.async on the simulated machine, each over several schedules."""

import numpy as np
import pytest
from helpers.tma_run import DUMP, INIT, LEAVE, WAIT, Run

from warpspec.sim.errors import BarrierFault, MemoryFault

SEEDS = range(6)

ADDRESSES = """
    shl.b32 %r20, %r1, 4;
    add.u32 %r21, %r3, %r20;
    cvt.u64.u32 %rd9, %r20;
    add.u64 %rd10, %rd2, %rd9;
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_cp_async(seed, wait):
    body = (
        ADDRESSES
        + f"""
        cp.async.cg.shared.global [%r21+1024], [%rd10], 16;
        {wait}
    """
        + DUMP
    )
    run = Run(body, init="", seed=seed)
    assert np.array_equal(run.output[0], run.input[:2048])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_fills_with_zeros(seed, size):
    """src-size: lane number modulo (size + 1) bytes; a lane that reads nothing may point anywhere."""
    cache = "cg" if size == 16 else "ca"
    body = (
        ADDRESSES
        + f"""
        st.shared.v4.u32 [%r21+1024], {{%r1, %r1, %r1, %r1}};
        rem.u32 %r5, %r1, {size + 1};
        setp.eq.u32 %p3, %r5, 0;
        selp.b64 %rd10, 64, %rd10, %p3;
        cp.async.{cache}.shared.global [%r21+1024], [%rd10], {size}, %r5;
        cp.async.commit_group;
        cp.async.wait_group 0;
    """
        + DUMP
    )
    run = Run(body, init="", seed=seed)
    rows = np.repeat(np.arange(128, dtype=np.uint32), 4).view(np.uint8).reshape(128, 16).copy()
    for thread in range(128):
        wanted = thread % (size + 1)
        rows[thread, :size] = 0
        rows[thread, :wanted] = run.input[16 * thread :][:wanted]
    assert np.array_equal(run.output[0].reshape(128, 16), rows)


def test_cp_async_ignore_src():
    body = (
        ADDRESSES
        + """
        and.b32 %r5, %r1, 1;
        setp.eq.u32 %p3, %r5, 1;
        cp.async.cg.shared.global [%r21+1024], [%rd10], 16, %p3;
        cp.async.wait_all;
    """
        + DUMP
    )
    run = Run(body, init="")
    expected = run.input[:2048].reshape(128, 16).copy()
    expected[1::2] = 0
    assert np.array_equal(run.output[0].reshape(128, 16), expected)


def test_cp_async_without_a_wait_is_caught_by_some_schedule():
    body = ADDRESSES + "cp.async.cg.shared.global [%r21+1024], [%rd10], 16; cp.async.commit_group;" + DUMP
    body += "cp.async.wait_all;"
    runs = [Run(body, init="", seed=seed) for seed in range(6)]
    assert any(not np.array_equal(r.output[0], r.input[:2048]) for r in runs)


def test_cp_async_misaligned():
    with pytest.raises(MemoryFault, match=r"source .* not a multiple of 16"):
        Run(ADDRESSES + "cp.async.cg.shared.global [%r21+1024], [%rd10+4], 16; cp.async.wait_all;", init="")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noinc, count", [(".noinc", 128), ("", 1)])
def test_cp_async_arrives_on_an_mbarrier(seed, noinc, count):
    """With .noinc every thread's arrival is one of the expected ones; without, thread 0 arrives itself."""
    body = (
        ADDRESSES
        + f"""
        cp.async.cg.shared.global [%r21+1024], [%rd10], 16;
        cp.async.mbarrier.arrive{noinc}.shared.b64 [%r3];
        bar.sync 0;
    """
    )
    if not noinc:
        body += "@%p1 mbarrier.arrive.shared.b64 %state, [%r3];"
    run = Run(body + WAIT.format(n=0, parity=0) + DUMP, init=INIT.format(count=count), seed=seed)
    assert np.array_equal(run.output[0], run.input[:2048])


@pytest.mark.parametrize("seed", SEEDS)
def test_remote_stores_and_reductions(seed):
    """Each rank writes to the other's memory, then adds its thread number to every word there."""
    body = (
        """
        xor.b32 %r6, %r2, 1;
        mapa.shared::cluster.u32 %r7, %r3, %r6;
        shl.b32 %r20, %r1, 4;
        add.u32 %r8, %r7, %r20;
        add.u32 %r9, %r1, 1000;
        mad.lo.u32 %r9, %r2, 5000, %r9;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r8+1024], {%r9, %r9, %r9, 7}, [%r7];
    """
        + WAIT.format(n=0, parity=0)
        + LEAVE
        + """
        @%p1 mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 512;
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r8+1024], %r1, [%r7];
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.min.s32 [%r8+1036], -3, [%r7];
    """
        + WAIT.format(n=1, parity=1)
        + LEAVE
        + DUMP
    )
    run = Run(body, seed=seed, ctas=2, threads=64)
    thread = np.arange(64)
    for rank in range(2):
        got = run.output[rank, :1024].copy().view(np.int32).reshape(64, 4)
        value = 1000 + 5000 * (1 - rank) + thread
        assert np.array_equal(got, np.stack([value + thread, value, value, np.full(64, -3)], axis=1))


def test_a_remote_store_needs_its_mbarrier_beside_it():
    body = (
        """
        mapa.shared::cluster.u32 %r7, %r3, 1;
        @%p1 st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r7+1024], %r1, [%r3];
    """
        + LEAVE
    )
    with pytest.raises(BarrierFault, match="destination in CTA 1"):
        Run(body, ctas=2, threads=64)


def test_st_bulk_zeroes_shared_memory():
    body = (
        ADDRESSES
        + """
        cp.async.cg.shared.global [%r21+1024], [%rd10], 16;
        cp.async.wait_all;
        bar.sync 0;
        mov.u64 %rd8, 264;
        @%p1 st.bulk.weak.shared::cta [%r3+1032], %rd8, 0;
        bar.sync 0;
    """
    )
    run = Run(body + DUMP, init="")
    expected = run.input[:2048].copy()
    expected[8:272] = 0
    assert np.array_equal(run.output[0], expected)
    with pytest.raises(MemoryFault, match="not multiples of 8"):
        Run(body.replace("264", "260"), init="")
