"""Tensor maps that kernels make, change, prefetch through or lack: PTX kernels on the simulated machine."""

from contextlib import nullcontext

import numpy as np
import pytest
from helpers.tma_run import DUMP, LOAD, SEEDS, WAIT, Run, expected_box, source_map

from warpspec.sim import OrderError
from warpspec.sim.errors import BadDescriptor

ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd13], 128;"
MADE = f"""
        setp.lt.u32 %p3, %r1, 32;
        @!%p3 bra L1;
        shl.b32 %r20, %r1, 2;
        cvt.u64.u32 %rd9, %r20;
        add.u64 %rd10, %rd1, %rd9;
        ld.global.u32 %r22, [%rd10];
        add.u32 %r21, %r3, %r20;
        st.shared.u32 [%r21+8192], %r22;
        bar.warp.sync -1;
        @!%p1 bra L0;
        add.u32 %r7, %r3, 8192;
        add.u64 %rd11, %rd2, 256;
        mov.u32 %r8, 12;
        mov.u64 %rd12, 512;
        tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r7], %rd11;
        tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r7], 1, %r8;
        tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r7], 0, %rd12;
        tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r7], 0;
    L0:
        bar.warp.sync -1;
        add.u32 %r7, %r3, 8192;
        add.u64 %rd13, %rd3, 4096;
        tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
            [%rd13], [%r7], 128;
        {ACQUIRE}
        @!%p1 bra L1;
        mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
        mov.u32 %r5, 8;
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
            [%r3+1024], [%rd13, {{%r5, 8}}], [%r3];
    L1:
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_tensor_map_made_on_the_device(seed):
    """Copy the map to shared memory, change address, size and stride there, publish it, load through it."""
    run = Run(MADE + WAIT.format(n=0, parity=0) + DUMP, seed=seed, make_map=source_map, threads=64)
    expected = np.zeros((8, 128), np.uint8)
    for i in range(4):  # rows 8 to 11 of 12
        expected[i] = run.input[256 + (8 + i) * 512 + 16 :][:128]
    assert np.array_equal(run.output[0, :1024], expected.reshape(-1))


@pytest.mark.parametrize("without", [False, True])
def test_the_acquire_of_a_tensor_map_is_asked_for(without):
    body = (MADE.replace(ACQUIRE, "") if without else MADE) + WAIT.format(n=0, parity=0) + DUMP
    with pytest.raises(OrderError, match="write of a tensor map") if without else nullcontext():
        Run(body, make_map=source_map, threads=64, check="order")


MAP_REUSED = """
    shl.b32 %r20, %r1, 2;
    cvt.u64.u32 %rd9, %r20;
    add.u64 %rd10, %rd1, %rd9;
    add.u64 %rd13, %rd3, 4096;
    add.u64 %rd14, %rd13, %rd9;
    @%p3 bra L0;
    ld.global.u32 %r22, [%rd10];
    st.global.u32 [%rd14], %r22;
L0:
    bar.sync 0;
    @!%p1 bra L1;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
    mov.u32 %r5, 64;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [%r3+1024], [%rd13, {{%r5, 16}}], [%r3];
    {wait}
    st.global.v4.u32 [%rd13], {{0, 0, 0, 0}};
    st.global.v4.u32 [%rd13+16], {{0, 0, 0, 0}};
    st.global.v4.u32 [%rd13+32], {{0, 0, 0, 0}};
    st.global.v4.u32 [%rd13+48], {{0, 0, 0, 0}};
L1:
"""
CLEAR_FROM_32 = "setp.ge.u32 %p3, %r1, 32;"


@pytest.mark.parametrize("seed", SEEDS)
def test_wait_group_read_covers_the_tensor_maps_of_loads(seed):
    """A load through a map in global memory, which is cleared once wait_group.read has returned."""
    wait = "cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"
    body = CLEAR_FROM_32 + MAP_REUSED.format(wait=wait) + WAIT.format(n=0, parity=0) + DUMP
    run = Run(body, seed=seed, make_map=source_map, threads=64)
    assert np.array_equal(run.output[0, :1024], expected_box(run, 64, 16))


def test_a_tensor_map_cleared_under_a_load_is_caught_by_some_schedule():
    body = CLEAR_FROM_32 + MAP_REUSED.format(wait="") + WAIT.format(n=0, parity=0) + DUMP
    with pytest.raises(BadDescriptor, match="never written"):
        for seed in range(20):
            Run(body, seed=seed, make_map=source_map, threads=64)


def test_a_missing_tensor_map_is_named():
    with pytest.raises(BadDescriptor, match="never written"):
        Run(LOAD + WAIT.format(n=0, parity=0), threads=64)


@pytest.mark.parametrize("seed", SEEDS)
def test_prefetches_do_nothing(seed):
    body = """
        prefetch.tensormap [%rd1];
        prefetch.global.L2 [%rd2];
        mov.u32 %r5, 0;
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r5, 0}];
        cp.async.bulk.prefetch.L2.global [%rd2], 64;
    """
    run = Run(body, init="", seed=seed, make_map=source_map)
    assert not run.output.any()
    assert (
        run.report.tma_bytes_prefetched == 1024 * (run.report.block[0] // 32)
        and run.report.tma_bytes_loaded == 0
    )


def test_a_prefetch_needs_a_tensor_map():
    with pytest.raises(BadDescriptor, match="never written"):
        Run("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {0, 0}];", init="")
