"""Bulk and tensor copies as instructions: PTX kernels on the simulated machine, over several schedules."""

import numpy as np
import pytest
from helpers.tma_run import DUMP, FILL, IN_BYTES, LEAVE, LOAD, SEEDS, WAIT, Run, expected_box, source_map

from warpspec.sim.errors import BarrierFault, Deadlock, MemoryFault, UnsupportedInstruction
from warpspec.sim.tma import TensorMap
from warpspec.sim.tma.descriptor import ELEMENT_BY_NAME


def target_map(run: Run) -> TensorMap:
    """The output as u32 [64, 64], box 8 x 32 elements, no swizzle."""
    return TensorMap(run.target.address, ELEMENT_BY_NAME["u32"], (64, 64), (256,), (32, 8), (1, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_tensor_load(seed):
    run = Run(LOAD + WAIT.format(n=0, parity=0) + DUMP, seed=seed, make_map=source_map, threads=64)
    assert np.array_equal(run.output[0, :1024], expected_box(run, 64, 16))
    assert run.report.tma_bytes_loaded == 1024


def test_reading_before_the_wait_is_caught_by_some_schedule():
    """Without the wait the threads see poison, whenever the copy is not scheduled first."""
    runs = [
        Run(LOAD + DUMP + WAIT.format(n=0, parity=0), seed=seed, make_map=source_map, threads=64)
        for seed in range(8)
    ]
    wrong = [not np.array_equal(r.output[0, :1024], expected_box(r, 64, 16)) for r in runs]
    assert any(wrong)


def test_expecting_too_much_is_a_deadlock():
    body = LOAD.replace("1024;", "1040;", 1) + WAIT.format(n=0, parity=0) + DUMP
    with pytest.raises(Deadlock, match="1040 bytes expected, 1024 came"):
        Run(body, make_map=source_map, threads=64)


MULTICAST = """
    @!%p1 bra L1;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
    setp.ne.u32 %p3, %r2, 1;
    @%p3 bra L1;
    mov.u32 %r5, 0;
    mov.u16 %h1, {mask};
    mov.u64 %rd8, 0;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint
        [%r3+1024], [%rd1, {{%r5, 3}}], [%r3], %h1, %rd8;
L1:
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast_writes_and_signals_every_destination(seed):
    body = MULTICAST.format(mask=0xF) + WAIT.format(n=0, parity=0) + DUMP + LEAVE
    run = Run(body, seed=seed, ctas=4, make_map=source_map, threads=64)
    for rank in range(4):
        assert np.array_equal(run.output[rank, :1024], expected_box(run, 0, 3)), rank
    assert run.report.tma_bytes_loaded == 1024


def test_multicast_outside_the_cluster():
    body = MULTICAST.format(mask=0x1F) + WAIT.format(n=0, parity=0) + LEAVE
    with pytest.raises(MemoryFault, match="outside a cluster of 4"):
        Run(body, ctas=4, make_map=source_map, threads=64)


# Both CTAs of a pair load into their own memory and signal the even one's mbarrier, as 2-CTA kernels do.
PAIR = """
    and.b32 %r6, %r3, 0xFEFFFFFF;
    setp.eq.u32 %p3, %r2, 0;
    @!%p1 bra L1;
    @!%p3 bra L0;
    mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 2048;
L0:
    mul.lo.u32 %r5, %r2, 64;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{group}
        [%r3+1024], [%rd1, {{%r5, 8}}], [%r6];
L1:
    @!%p3 bra L2;
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_cta_group_2_signals_the_leader(seed):
    body = PAIR.format(group=".cta_group::2") + WAIT.format(n=0, parity=0) + "L2:" + LEAVE + DUMP
    run = Run(body, seed=seed, ctas=2, make_map=source_map, threads=64)
    assert np.array_equal(run.output[0, :1024], expected_box(run, 0, 8))
    assert np.array_equal(run.output[1, :1024], expected_box(run, 64, 8))


def test_a_peer_s_mbarrier_needs_cta_group_2():
    body = PAIR.format(group="") + WAIT.format(n=0, parity=0) + "L2:" + LEAVE
    with pytest.raises(BarrierFault, match=r"without \.cta_group::2"):
        Run(body, ctas=2, make_map=source_map, threads=64)


@pytest.mark.parametrize("seed", SEEDS)
def test_multicast_with_cta_group_2_signals_one_cta_of_each_pair(seed):
    """Rank 1 sends to ranks 1 and 2; the mbarrier is an even CTA's, so ranks 0 and 2 are signalled."""
    body = """
        @!%p1 bra L1;
        setp.eq.u32 %p3, %r2, 1;
        @!%p3 bra L0;
        mov.u32 %r5, 0;
        mov.u16 %h1, 6;
        and.b32 %r6, %r3, 0xFEFFFFFF;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2
            [%r3+1024], [%rd1, {%r5, 0}], [%r6], %h1;
        bra L1;
    L0:
        mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
    L1:
        and.b32 %r7, %r2, 1;
        setp.eq.u32 %p4, %r7, 1;
        @%p4 bra L3;
    """
    # Rank 3 is odd: it expects bytes that never come and does not wait.
    body += WAIT.format(n=0, parity=0) + "L3:" + LEAVE + DUMP
    run = Run(body, seed=seed, ctas=4, make_map=source_map, threads=64)
    for rank in (1, 2):
        assert np.array_equal(run.output[rank, :1024], expected_box(run, 0, 0))
    for rank in (0, 3):
        assert (run.output[rank, :1024] == 0xFF).all()  # poison


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("read", ["", ".read"])
def test_tensor_store(seed, read):
    body = (
        FILL
        + f"""
        @!%p1 bra L1;
        mov.u32 %r5, 32;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {{%r5, 60}}], [%r3+1024];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group{read} 0;
    L1:
    """
    )
    run = Run(body, init="", seed=seed, make_map=target_map, each=256)
    expected = np.zeros((64, 256), np.uint8)
    expected[60:64, 128:] = run.input[:512].reshape(4, 128)  # rows 64 and up do not exist
    assert np.array_equal(run.output, expected)
    assert run.report.tma_bytes_stored == 512


@pytest.mark.parametrize("seed", SEEDS)
def test_reading_the_source_is_done_when_wait_group_read_returns(seed):
    """The second fill must not reach the first store."""
    body = (
        FILL
        + """
        @!%p1 bra L1;
        mov.u32 %r5, 0;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r5, 0}], [%r3+1024];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
    L1:
        bar.sync 0;
        st.shared.u32 [%r21+1024], 0;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @!%p1 bra L2;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r5, 8}], [%r3+1024];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    L2:
    """
    )
    run = Run(body, init="", seed=seed, make_map=target_map, each=256)
    first = run.input[:1024].reshape(8, 128)
    assert np.array_equal(run.output[:8, :128], first)
    second = run.input[:1024].copy()
    second.view(np.uint32)[::4] = 0
    assert np.array_equal(run.output[8:16, :128], second.reshape(8, 128))


def test_overwriting_the_source_without_waiting_is_caught_by_some_schedule():
    body = (
        FILL
        + """
        @!%p1 bra L1;
        mov.u32 %r5, 0;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r5, 0}], [%r3+1024];
        cp.async.bulk.commit_group;
    L1:
        st.shared.u32 [%r21+1024], 0;
        bar.sync 0;
        cp.async.bulk.wait_group 0;
    """
    )
    runs = [Run(body, init="", seed=seed, make_map=target_map, each=256) for seed in range(8)]
    assert any(not np.array_equal(r.output[:8, :128], r.input[:1024].reshape(8, 128)) for r in runs)


@pytest.mark.parametrize("seed", SEEDS)
def test_wait_group_n_leaves_the_newest_groups_pending(seed):
    """After wait_group 1 the first store is complete: a load of what it wrote sees it."""
    body = (
        FILL
        + """
        @!%p1 bra L1;
        mov.u32 %r5, 32;
        cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r3+1024], %r5;
        cp.async.bulk.commit_group;
        cp.async.bulk.global.shared::cta.bulk_group [%rd3+64], [%r3+1088], %r5;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 1;
        ld.global.u32 %r8, [%rd3];
        st.global.u32 [%rd3+128], %r8;
        cp.async.bulk.wait_group 0;
    L1:
    """
    )
    run = Run(body, init="", seed=seed)
    assert np.array_equal(run.output[0, :32], run.input[:32])
    assert np.array_equal(run.output[0, 64:96], run.input[64:96])
    assert np.array_equal(run.output[0, 128:132], run.input[:4])


@pytest.mark.parametrize("seed", SEEDS)
def test_tensor_reduction_adds_to_global_memory(seed):
    body = (
        FILL
        + """
        @!%p1 bra L1;
        mov.u32 %r5, 0;
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r5, 0}], [%r3+1024];
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd1, {%r5, 0}], [%r3+1024];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    L1:
    """
    )
    run = Run(body, init="", seed=seed, make_map=target_map, each=256)
    doubled = run.input[:1024].view(np.uint32) * np.uint32(2)
    assert np.array_equal(run.output[:8, :128].copy().view(np.uint32).reshape(-1), doubled)


STORES = {
    "tensor": "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r5, 60}], [%r3+1024];",
    "bulk": "cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r3+1024], 512;",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", STORES)
def test_a_store_that_a_warp_issues_is_one_operation(seed, kind):
    """All lanes issue it; thread 0 alone waits, and then overwrites the source."""
    body = (
        FILL
        + f"""
        mov.u32 %r5, 32;
        {STORES[kind]}
        @!%p1 bra L1;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        st.shared.v4.u32 [%r3+1024], {{0, 0, 0, 0}};
    L1:
    """
    )
    run = Run(body, init="", seed=seed, make_map=target_map, threads=32, each=256)
    written = run.output[60:64, 128:].reshape(-1) if kind == "tensor" else run.output.reshape(-1)[:512]
    assert np.array_equal(written, run.input[:512])
    assert run.report.tma_bytes_stored == 512


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reduction_takes_place_for_each_lane(seed):
    """As on an H200: 32 lanes that add the same box add it 32 times."""
    operation = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
    body = FILL + f"mov.u32 %r5, 0; {operation} [%rd1, {{%r5, 0}}], [%r3+1024];"
    run = Run(
        body + "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        init="",
        seed=seed,
        make_map=target_map,
        threads=32,
        each=256,
    )
    added = run.input[:512].view(np.uint32) * np.uint32(32)
    assert np.array_equal(run.output[:4, :128].copy().view(np.uint32).reshape(-1), added)


@pytest.mark.parametrize("seed", SEEDS)
def test_bulk_copies_in_a_cluster(seed):
    """global to shared::cta in rank 0, on to rank 1's shared memory, and added to it there."""
    body = (
        """
        mov.u32 %r9, 1024;
        mapa.shared::cluster.u32 %r6, %r3, 1;
        @!%p1 bra L2;
        setp.eq.u32 %p3, %r2, 0;
        @!%p3 bra L1;
        mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3+1024], [%rd2+512], %r9, [%r3];
    """
        + WAIT.format(n=0, parity=0)
        + """
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
            [%r6+1024], [%r3+1024], %r9, [%r6];
        bra L2;
    L1:
        mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 1024;
    """
        + WAIT.format(n=1, parity=0)
        + """
        mbarrier.arrive.expect_tx.shared.b64 %state, [%r3], 512;
    L2:
    """
        + LEAVE
        + """
        @!%p1 bra L4;
        setp.eq.u32 %p3, %r2, 0;
        @!%p3 bra L3;
        mov.u32 %r9, 512;
        cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32
            [%r6+1536], [%r3+1024], %r9, [%r6];
        bra L4;
    L3:
    """
        + WAIT.format(n=2, parity=1)
        + "L4:"
        + LEAVE
        + DUMP
    )
    run = Run(body, seed=seed, ctas=2, threads=64)
    sent = run.input[512:1536]
    assert np.array_equal(run.output[0, :1024], sent)
    assert np.array_equal(run.output[1, :512], sent[:512])
    summed = sent[512:].view(np.uint32) + sent[:512].view(np.uint32)
    assert np.array_equal(run.output[1, 512:1024].view(np.uint32), summed)


def test_bulk_copy_rules():
    def body(address, size):
        return f"""
            mov.u32 %r9, {size};
            @!%p1 bra L1;
            cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3+1024], [{address}], %r9, [%r3];
        L1:
        """ + WAIT.format(n=0, parity=0)

    with pytest.raises(MemoryFault, match=r"source .* not a multiple of 16"):
        Run(body("%rd2+8", 64))
    with pytest.raises(MemoryFault, match=r"size .* not a multiple of 16"):
        Run(body("%rd2", 40))
    with pytest.raises(MemoryFault, match="past the end of input"):
        Run(body(f"%rd2+{IN_BYTES - 16}", 32))
    with pytest.raises(MemoryFault, match="shared memory is"):
        Run(body("%rd2", 8192).replace("%r3+1024", "%r3+12288"))


@pytest.mark.parametrize("seed", SEEDS)
def test_byte_mask_of_a_bulk_store(seed):
    body = (
        FILL
        + """
        @!%p1 bra L1;
        mov.u32 %r9, 64;
        mov.u16 %h1, 0x8001;
        cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd3], [%r3+1024], %r9, %h1;
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    L1:
    """
    )
    run = Run(body, init="", seed=seed)
    chosen = np.arange(64) % 16 % 15 == 0
    assert np.array_equal(run.output[0, :64], np.where(chosen, run.input[:64], 0))


def test_im2col_and_unknown_modifiers_are_unsupported():
    im2col = LOAD.replace(".tile.", ".im2col.")
    with pytest.raises(UnsupportedInstruction, match="im2col"):
        Run(im2col + WAIT.format(n=0, parity=0), make_map=source_map, threads=64)
    override = LOAD.replace("complete_tx::bytes", "complete_tx::bytes.override::global_address")
    with pytest.raises(UnsupportedInstruction, match="override"):
        Run(override + WAIT.format(n=0, parity=0), make_map=source_map, threads=64)
