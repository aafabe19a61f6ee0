"""Kernels of thread-block clusters: distributed shared memory, remote barriers, asynchronous writes."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Int32
from silicon import inputs
from silicon.assembly import ptx
from silicon.case import Case, unwritten
from silicon.memory_kernels import words64

CLUSTER = 4
WORDS = 64  # words a block

_MAPA = "{ .reg .b32 %m; mapa.shared::cluster.u32 %m, $1, $2; mov.b32 $0, %m; }"


def remote(address, rank):
    """shared::cluster address of `address` in the block of that rank."""
    return ptx(_MAPA, address, rank)[0]


@cute.kernel
def _dsmem(values: cute.Tensor, out: cute.Tensor, counters: cute.Tensor, ids: cute.Tensor):
    """Blocks of a cluster write to, read from and count in each other's shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    smem = cutlass.memory.SmemAllocator()
    mine = smem.allocate_tensor(cutlass.Int32, cute.make_layout(WORDS), byte_alignment=16)
    inbox = smem.allocate_tensor(cutlass.Int32, cute.make_layout(WORDS), byte_alignment=16)
    counts = smem.allocate_tensor(cutlass.Int32, cute.make_layout(4), byte_alignment=16)
    asynchronous = smem.allocate_tensor(cutlass.Int32, cute.make_layout(WORDS), byte_alignment=16)
    barrier = smem.allocate_array(cutlass.Int64, 2)
    mine[thread] = values[block, thread]
    inbox[thread] = Int32(0)
    asynchronous[thread] = Int32(0)
    if thread < 4:
        counts[thread] = Int32(0)
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init(barrier + 1, CLUSTER)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, WORDS * 4)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    # Write into the next block, read from the one before.
    ahead = (rank + 1) % CLUSTER
    behind = (rank + CLUSTER - 1) % CLUSTER
    target = remote(inbox.iterator.toint() + thread * 4, ahead)
    ptx("st.shared::cluster.u32 [$0], $1;", target, mine[thread] + rank, results=0)
    source = remote(mine.iterator.toint() + (thread ^ 5) * 4, behind)
    read = ptx("ld.shared::cluster.u32 $0, [$1];", source)[0]
    # Everybody counts in rank 2's memory.
    cell = remote(counts.iterator.toint() + (thread % 4) * 4, Int32(2))
    ptx("red.relaxed.cluster.shared::cluster.add.u32 [$0], $1;", cell, thread + rank, results=0)
    # Asynchronous stores into the block across, counted by its barrier.
    across = (rank + 2) % CLUSTER
    place = remote(asynchronous.iterator.toint() + thread * 4, across)
    there = remote(barrier.toint(), across)
    store = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [$0], $1, [$2];"
    ptx(store, place, mine[thread] ^ 0x55, there, results=0)
    cute.arch.mbarrier_wait(barrier, 0)
    # Every block arrives at every block's second barrier.
    if thread < CLUSTER:
        there = remote((barrier + 1).toint(), thread)
        ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", there, results=0)
    cute.arch.mbarrier_wait(barrier + 1, 0)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    out[0, block, thread] = inbox[thread]
    out[1, block, thread] = read
    out[2, block, thread] = asynchronous[thread]
    # Generic addresses reach other blocks too.
    generic = (
        "{ .reg .b64 %g; .reg .b32 %l; cvta.shared::cluster.u64 %g, 0; "
        "cvt.u64.u32 %g, $1; cvta.shared::cluster.u64 %g, %g; ld.u32 $0, [%g]; }"
    )
    out[3, block, thread] = ptx(generic.replace("cvta.shared::cluster.u64 %g, 0; ", ""), source)[0]
    if thread < 4:
        counters[block, thread] = counts[thread]
    if thread == 0:
        names = (
            "clusterid.x",
            "nclusterid.x",
            "cluster_ctaid.x",
            "cluster_nctaid.x",
            "cluster_ctarank",
            "cluster_nctarank",
        )
        for n in cutlass.range_constexpr(len(names)):
            ids[block, n] = ptx(f"mov.u32 $0, %{names[n]};")[0]
        ids[block, 6] = ptx("{ .reg .pred %p; mov.pred %p, %is_explicit_cluster; selp.b32 $0, 1, 0, %p; }")[0]
        ids[block, 7] = ptx("{ getctarank.shared::cluster.u32 $0, $1; }", target)[0]
    # Nobody leaves while others may still read.
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def dsmem(values: cute.Tensor, out: cute.Tensor, counters: cute.Tensor, ids: cute.Tensor):
    blocks = values.shape[0]
    _dsmem(values, out, counters, ids).launch(
        grid=(blocks, 1, 1), block=(WORDS, 1, 1), cluster=(CLUSTER, 1, 1)
    )


# ---- asynchronous copies and reductions into another block ---------------------------------------------

PAIR = 2
BULK_WORDS = 64
SUMS = 8
SLOT = 16  # bytes a thread of cp.async


@cute.kernel
def _pairs(
    values: cute.Tensor, out: cute.Tensor, sums: cute.Tensor, copied: cute.Tensor, floats: cute.Tensor
):
    """Two blocks: bulk copies and red.async into the peer; cp.async to an mbarrier; generic atomics."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.block_idx_in_cluster()
    peer = rank ^ 1
    smem = cutlass.memory.SmemAllocator()
    mine = smem.allocate_tensor(cutlass.Int32, cute.make_layout(BULK_WORDS), byte_alignment=128)
    inbox = smem.allocate_tensor(cutlass.Int32, cute.make_layout(BULK_WORDS), byte_alignment=128)
    counts = smem.allocate_tensor(cutlass.Int32, cute.make_layout(SUMS), byte_alignment=16)
    local = smem.allocate_tensor(
        cutlass.Int32, cute.make_layout((BULK_WORDS, 4), stride=(4, 1)), byte_alignment=16
    )
    cells = smem.allocate_tensor(cutlass.Int32, cute.make_layout(BULK_WORDS), byte_alignment=16)
    barriers = smem.allocate_array(cutlass.Int64, 3)
    mine[thread] = values[block, thread]
    inbox[thread] = Int32(0)
    cells[thread] = values[block, thread]
    if thread < SUMS:
        counts[thread] = Int32(0)
    if thread == 0:
        cute.arch.mbarrier_init(barriers, 1)
        cute.arch.mbarrier_init(barriers + 1, 1)
        cute.arch.mbarrier_init(barriers + 2, BULK_WORDS)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(barriers, BULK_WORDS * 4)
        cute.arch.mbarrier_arrive_and_expect_tx(barriers + 1, BULK_WORDS * 4)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if thread == 0:
        copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
        target = remote(inbox.iterator.toint(), peer)
        ptx(
            copy,
            target,
            mine.iterator.toint(),
            Int32(BULK_WORDS * 4),
            remote(barriers.toint(), peer),
            results=0,
        )
    add = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [$0], $1, [$2];"
    target = remote(counts.iterator.toint() + thread % SUMS * 4, peer)
    ptx(add, target, thread + 100 * rank, remote((barriers + 1).toint(), peer), results=0)
    # cp.async whose completion arrives at an mbarrier.
    start = words64(values.iterator.toint() + cutlass.Int64((thread % 16 + 16 * block) * SLOT))
    load = "{ .reg .b64 %at; mov.b64 %at, {$1, $2}; cp.async.ca.shared.global [$0], [%at], 16; }"
    ptx(load, local.iterator.toint() + thread * SLOT, *start, results=0)
    ptx("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", (barriers + 2).toint(), results=0)
    cute.arch.mbarrier_wait(barriers, 0)
    cute.arch.mbarrier_wait(barriers + 1, 0)
    cute.arch.mbarrier_wait(barriers + 2, 0)
    out[block, thread] = inbox[thread]
    if thread < SUMS:
        sums[block, thread] = counts[thread]
    for i in cutlass.range_constexpr(4):
        copied[block, thread, i] = local[(thread + 7) % BULK_WORDS, i]
    # f32 sums by generic addresses, once in shared and once in global memory.
    value = values[block, thread ^ 1]
    inside = (
        "{ .reg .b64 %g; .reg .b32 %o; cvt.u64.u32 %g, $1; cvta.shared.u64 %g, %g; "
        "atom.add.f32 %o, [%g], $2; mov.b32 $0, %o; }"
    )
    floats[0, block, thread] = ptx(inside, cells.iterator.toint() + thread * 4, value)[0]
    floats[1, block, thread] = cells[thread]
    floats[2, block, thread] = values[block, thread]
    outside = (
        "{ .reg .b64 %g; .reg .b32 %o; mov.b64 %g, {$1, $2}; atom.add.f32 %o, [%g], $3; mov.b32 $0, %o; }"
    )
    place = floats.iterator.toint() + cutlass.Int64(((2 * PAIR + block) * BULK_WORDS + thread) * 4)
    floats[3, block, thread] = ptx(outside, *words64(place), value)[0]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def pairs(values: cute.Tensor, out: cute.Tensor, sums: cute.Tensor, copied: cute.Tensor, floats: cute.Tensor):
    _pairs(values, out, sums, copied, floats).launch(
        grid=(PAIR, 1, 1), block=(BULK_WORDS, 1, 1), cluster=(PAIR, 1, 1)
    )


def _small_floats() -> np.ndarray:
    """f32 bits about the least normal number, so that sums of them are and are not subnormal."""
    words = inputs.words(98, PAIR * BULK_WORDS)
    return (words & np.uint32(0x80FFFFFF)).reshape(PAIR, BULK_WORDS)


CASES = (
    Case(
        "dsmem",
        dsmem,
        lambda: [inputs.tensor(inputs.words(95, 2 * CLUSTER * WORDS).reshape(2 * CLUSTER, WORDS))],
        lambda: [
            unwritten(torch.int32, 4, 2 * CLUSTER, WORDS),
            unwritten(torch.int32, 2 * CLUSTER, 4),
            unwritten(torch.int32, 2 * CLUSTER, 8),
        ],
    ),
    Case(
        "cluster_async",
        pairs,
        lambda: [inputs.tensor(_small_floats())],
        lambda: [
            unwritten(torch.int32, PAIR, BULK_WORDS),
            unwritten(torch.int32, PAIR, SUMS),
            unwritten(torch.int32, PAIR, BULK_WORDS, 4),
            unwritten(torch.int32, 4, PAIR, BULK_WORDS),
        ],
    ),
)
