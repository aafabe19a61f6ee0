"""Kernels of control flow, of arithmetic as CuTe DSL writes it, of barriers and pipelines."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import BFloat16, Float16, Float32, Int32, pipeline
from silicon import inputs
from silicon.assembly import ptx
from silicon.case import Case, unwritten

WARP = 32
BLOCK = 128
THREADS = 384


# ---- divergence ----------------------------------------------------------------------------------------


@cute.kernel
def _divergence(values: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * BLOCK + thread
    # A loop of as many turns as each thread's value takes (Collatz), with a branch in it.
    x = values[i]
    turns = Int32(0)
    while x != 1:
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
        turns += 1
    out[0, i] = turns
    # Lanes meet again: the loop's result crosses lanes.
    out[1, i] = cute.arch.shuffle_sync_bfly(turns, 1) - turns
    # Nested loops and branches of different lengths; a vote among those inside.
    total = Int32(0)
    for step in range(thread % 7 + 1):
        if step % 3 == 1:
            for inner in range(step + block):
                if (inner ^ thread) & 1 == 0:
                    total += inner * values[i]
                else:
                    total -= step
        elif step % 3 == 2:
            total = total ^ (turns << step)
        else:
            total += 1
    out[2, i] = total
    out[3, i] = Int32(cute.arch.vote_ballot_sync(total > 0))
    # Half of each warp together in a branch.
    part = Int32(-1)
    if thread % WARP < 16:
        part = ptx("shfl.sync.down.b32 $0, $1, 3, 0x101f, 0xffff;", turns)[0]
    else:
        part = ptx("redux.sync.add.s32 $0, $1, 0xffff0000;", turns)[0]
    cute.arch.sync_warp()
    out[4, i] = part


@cute.jit
def divergence(values: cute.Tensor, out: cute.Tensor):
    _divergence(values, out).launch(grid=(THREADS // BLOCK, 1, 1), block=(BLOCK, 1, 1))


LOCAL_WORDS = 16


@cute.kernel
def _local_memory(values: cute.Tensor, out: cute.Tensor):
    """A register array indexed at run time lies in local memory."""
    thread, _, _ = cute.arch.thread_idx()
    array = cute.make_rmem_tensor((LOCAL_WORDS,), cutlass.Int32)
    for n in cutlass.range_constexpr(LOCAL_WORDS):
        array[n] = values[n, thread]
    place = thread % LOCAL_WORDS
    for step in range(3 * LOCAL_WORDS):
        other = (array[place] & 0x7FFFFFFF) % LOCAL_WORDS
        array[other] = array[other] * 3 + step
        place = (place + other + 1) % LOCAL_WORDS
    for n in cutlass.range_constexpr(LOCAL_WORDS):
        out[n, thread] = array[n]


@cute.jit
def local_memory(values: cute.Tensor, out: cute.Tensor):
    _local_memory(values, out).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))


# ---- arithmetic as the DSL compiles it -----------------------------------------------------------------


@cute.kernel
def _dsl_integers(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * BLOCK + thread
    x, y = a[i], b[i]
    divisor = cutlass.max(y & 0xFFFF, 1)
    results = (
        x // divisor,
        x % divisor,
        x // 7,
        x % 7,
        x // -10,
        (x >> 3) ^ (y << 5),
        cutlass.min(x, y) - cutlass.max(x, 0),
        Int32(x < y) + 2 * Int32(x == y),
        x * y + (x & ~y),
        Int32(cutlass.Uint32(x) // 10),
        Int32((cutlass.Int64(x) * cutlass.Int64(y)) >> 17),
        cutlass.max(x - y, y - x),
    )
    for n in cutlass.range_constexpr(len(results)):
        out[n, i] = results[n]


@cute.jit
def dsl_integers(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    _dsl_integers(a, b, out).launch(grid=(THREADS // BLOCK, 1, 1), block=(BLOCK, 1, 1))


@cute.kernel
def _dsl_floats(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, halves: cute.Tensor, brains: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * BLOCK + thread
    x, y = a[i], b[i]
    results = (
        x + y,
        x * y - x,
        x * y + y * y,
        x / (y * y + Float32(1.0)),
        cute.arch.fmax(x, y),
        Float32(Float16(x)) + Float32(BFloat16(y)),
        Float32(Int32(x * Float32(1000.0))),
        Float32(x > y),
        cute.arch.warp_reduction(x, lambda p, q: p + q),
        cute.arch.warp_reduction(x * y, lambda p, q: cute.arch.fmax(p, q), threads_in_group=8),
    )
    for n in cutlass.range_constexpr(len(results)):
        out[n, i] = results[n]
    halves[i] = Float16(x) * Float16(y)
    brains[i] = BFloat16(x) + BFloat16(y)


@cute.jit
def dsl_floats(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, halves: cute.Tensor, brains: cute.Tensor):
    _dsl_floats(a, b, out, halves, brains).launch(grid=(THREADS // BLOCK, 1, 1), block=(BLOCK, 1, 1))


# ---- named barriers, reductions over a barrier ---------------------------------------------------------

ROUNDS = 6


@cute.kernel
def _named_barriers(values: cute.Tensor, out: cute.Tensor, reduced: cute.Tensor):
    """Warps 0 and 1 hand words to warps 2 and 3 through one buffer, both with bar.arrive and bar.sync."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    buffer = smem.allocate_tensor(cutlass.Int32, cute.make_layout(2 * WARP))
    lane = thread % (2 * WARP)
    full, empty = 1, 2
    if thread < 2 * WARP:
        for step in range(ROUNDS):
            cute.arch.barrier(barrier_id=empty, number_of_threads=BLOCK)
            buffer[lane] = values[step * 2 * WARP + lane] + step
            cute.arch.barrier_arrive(barrier_id=full, number_of_threads=BLOCK)
    else:
        total = Int32(0)
        for _ in range(ROUNDS):
            cute.arch.barrier_arrive(barrier_id=empty, number_of_threads=BLOCK)
            cute.arch.barrier(barrier_id=full, number_of_threads=BLOCK)
            total = total * 5 + buffer[(lane + 13) % (2 * WARP)]
        out[lane] = total
    cute.arch.sync_threads()
    value = values[thread]
    odd = "{ .reg .pred %p, %q; and.b32 $0, $1, 1; setp.ne.u32 %p, $0, 0; "
    reduced[0, thread] = ptx(odd + "barrier.cta.red.popc.aligned.u32 $0, 3, 128, %p; }", value)[0]
    small = "{ .reg .pred %p, %q; setp.lt.u32 %p, $1, 0xff000000; "
    both = " selp.b32 $0, 1, 0, %q; }"
    reduced[1, thread] = ptx(small + "barrier.cta.red.and.aligned.pred %q, 3, 128, %p;" + both, value)[0]
    reduced[2, thread] = ptx(odd + "barrier.cta.red.or.aligned.pred %q, 4, 128, %p;" + both, value)[0]
    if thread < 2 * WARP:
        reduced[3, thread] = ptx(odd + "barrier.cta.red.popc.u32 $0, 5, 64, %p; }", value)[0]
    else:
        reduced[3, thread] = ptx(odd + "bar.red.popc.u32 $0, 6, 64, !%p; }", value)[0]


@cute.jit
def named_barriers(values: cute.Tensor, out: cute.Tensor, reduced: cute.Tensor):
    _named_barriers(values, out, reduced).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))


# ---- mbarriers -----------------------------------------------------------------------------------------

STAGES = 3
STEPS = 8
STAGE_WORDS = 64


@cute.kernel
def _ring(values: cute.Tensor, out: cute.Tensor):
    """Warp 0 fills a ring by bulk copies, warps 1 to 3 read each stage; plain mbarriers."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    buffer = smem.allocate_tensor(
        cutlass.Int32, cute.make_layout((STAGES, STAGE_WORDS), stride=(STAGE_WORDS, 1)), byte_alignment=128
    )
    full = smem.allocate_array(cutlass.Int64, STAGES)
    empty = smem.allocate_array(cutlass.Int64, STAGES)
    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 3 * WARP)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    size = STAGE_WORDS * 4
    load = (
        "{ .reg .b64 %at; mov.b64 %at, {$1, $2}; "
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [%at], $3, [$4]; }"
    )
    if warp == 0:
        if thread == 0:
            for step in range(STEPS):
                stage = step % STAGES
                cute.arch.mbarrier_wait(empty + stage, (step // STAGES + 1) % 2)
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, size)
                place = values.iterator.toint() + cutlass.Int64(step * size)
                target = buffer.iterator.toint() + stage * size
                barrier = (full + stage).toint()
                ptx(
                    load,
                    target,
                    Int32(place & 0xFFFFFFFF),
                    Int32(place >> 32),
                    Int32(size),
                    barrier,
                    results=0,
                )
    else:
        total = Int32(0)
        consumer = thread - WARP
        for step in range(STEPS):
            stage = step % STAGES
            cute.arch.mbarrier_wait(full + stage, step // STAGES % 2)
            total = total * 3 + buffer[stage, (consumer * 5 + step) % STAGE_WORDS]
            cute.arch.mbarrier_arrive(empty + stage)
        out[consumer] = total


@cute.jit
def ring(values: cute.Tensor, out: cute.Tensor):
    _ring(values, out).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))


@cute.kernel
def _async_pipeline(values: cute.Tensor, out: cute.Tensor):
    """The DSL's own PipelineAsync between two producer and two consumer warps."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    buffer = smem.allocate_tensor(
        cutlass.Int32, cute.make_layout((STAGES, STAGE_WORDS), stride=(STAGE_WORDS, 1)), byte_alignment=128
    )
    barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES)
    channel = pipeline.PipelineAsync.create(
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 2 * WARP),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 2 * WARP),
        barrier_storage=barriers,
    )
    cute.arch.sync_threads()
    lane = thread % (2 * WARP)
    if warp < 2:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        for step in range(STEPS):
            channel.producer_acquire(state)
            buffer[state.index, lane] = values[step * STAGE_WORDS + lane] ^ step
            channel.producer_commit(state)
            state.advance()
    else:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        total = Int32(0)
        for _ in range(STEPS):
            channel.consumer_wait(state)
            total = total * 7 + buffer[state.index, STAGE_WORDS - 1 - lane]
            channel.consumer_release(state)
            state.advance()
        out[lane] = total


@cute.jit
def async_pipeline(values: cute.Tensor, out: cute.Tensor):
    _async_pipeline(values, out).launch(grid=(1, 1, 1), block=(BLOCK, 1, 1))


_STATES = """{
.reg .pred %p; .reg .b64 %s, %t;
mbarrier.init.shared.b64 [$8], 5;
mbarrier.arrive.shared.b64 %s, [$8];
mbarrier.pending_count.b64 $0, %s;
mbarrier.arrive.shared.b64 %t, [$8], 2;
mbarrier.pending_count.b64 $1, %t;
mbarrier.test_wait.shared.b64 %p, [$8], %t;
selp.b32 $2, 1, 0, %p;
mbarrier.arrive.noComplete.shared.b64 %s, [$8], 1;
mbarrier.pending_count.b64 $3, %s;
mbarrier.arrive_drop.shared.b64 %s, [$8];
mbarrier.test_wait.shared.b64 %p, [$8], %t;
selp.b32 $4, 1, 0, %p;
mbarrier.test_wait.parity.shared.b64 %p, [$8], 0;
selp.b32 $5, 1, 0, %p;
mbarrier.arrive.shared.b64 %s, [$8];
mbarrier.pending_count.b64 $6, %s;
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$8], 48;
mbarrier.arrive.shared.b64 %s, [$8], 3;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [$8], 32;
mbarrier.test_wait.parity.shared.b64 %p, [$8], 1;
selp.b32 $7, 1, 0, %p;
mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [$8], 16;
mbarrier.test_wait.parity.shared.b64 %p, [$8], 1;
@%p add.u32 $7, $7, 2;
mbarrier.inval.shared.b64 [$8];
}"""
STATE_WORDS = 8


@cute.kernel
def _mbarrier_states(out: cute.Tensor):
    """One thread takes an mbarrier through two phases: pending counts, drops, transactions, tests."""
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.memory.SmemAllocator()
    barrier = smem.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        words = ptx(_STATES, barrier.toint(), results=STATE_WORDS)
        for n in cutlass.range_constexpr(STATE_WORDS):
            out[n] = words[n]


@cute.jit
def mbarrier_states(out: cute.Tensor):
    _mbarrier_states(out).launch(grid=(1, 1, 1), block=(WARP, 1, 1))


# ---- cases ---------------------------------------------------------------------------------------------


def _words(seed: int, *shape: int) -> torch.Tensor:
    return inputs.tensor(inputs.words(seed, int(np.prod(shape))).reshape(shape))


def _floats(seed: int) -> torch.Tensor:
    return torch.from_numpy(inputs.normals(seed, THREADS, 3.0))


CASES = (
    Case(
        "divergence",
        divergence,
        lambda: [inputs.tensor(inputs.below(50, THREADS, 900).astype(np.int32) + 1)],
        lambda: [unwritten(torch.int32, 5, THREADS)],
    ),
    Case(
        "local_memory",
        local_memory,
        lambda: [_words(49, LOCAL_WORDS, BLOCK)],
        lambda: [unwritten(torch.int32, LOCAL_WORDS, BLOCK)],
    ),
    Case(
        "dsl_integers",
        dsl_integers,
        lambda: [inputs.tensor(w) for w in inputs.integer_operands(51)[:2]],
        lambda: [unwritten(torch.int32, 12, THREADS)],
    ),
    Case(
        "dsl_floats",
        dsl_floats,
        lambda: [_floats(52), _floats(56)],
        lambda: [
            unwritten(torch.float32, 10, THREADS),
            unwritten(torch.float16, THREADS),
            unwritten(torch.bfloat16, THREADS),
        ],
    ),
    Case(
        "named_barriers",
        named_barriers,
        lambda: [_words(53, ROUNDS * 2 * WARP)],
        lambda: [unwritten(torch.int32, 2 * WARP), unwritten(torch.int32, 4, BLOCK)],
    ),
    Case(
        "mbarrier_ring",
        ring,
        lambda: [_words(54, STEPS * STAGE_WORDS)],
        lambda: [unwritten(torch.int32, 3 * WARP)],
    ),
    Case(
        "async_pipeline",
        async_pipeline,
        lambda: [_words(55, STEPS * STAGE_WORDS)],
        lambda: [unwritten(torch.int32, 2 * WARP)],
    ),
    Case("mbarrier_states", mbarrier_states, list, lambda: [unwritten(torch.int32, STATE_WORDS)]),
)
