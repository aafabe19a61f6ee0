"""Long rows held in shared memory, by many CTAs a row. One kernel for sm_90a and sm_100a.

CTAs are persistent and form groups. A group takes one row after another, and each of its CTAs always has the same share
of the row. A row has two phases. The first computes maximum and sum over the share. The second, which needs the state
of the whole row, scales and stores. As many chunks of the share as fit stay in shared memory between the phases; these
are resident. The others stream through a few further buffers, once in each phase, and rely on L2 for the second time. A
group is either a cluster, which reduces states over distributed shared memory, or any number of CTAs of a cooperative
launch, which reduce through global memory; the latter splits few very long rows over the whole GPU.

One warp loads the chunks in the order of use, each as soon as its buffer is free. It thus reads ahead while the others
wait for other CTAs, and reads the next row while this one is being stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.barriers import Barrier
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.tma import bulk_load
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.online import absorb, exponential, scale, state_of
from warpspec.softmax.reduction import BUFFERS, STATE_WORDS, ClusterRounds, GridRounds, join_states, warp_join
from warpspec.softmax.vectors import (
    LAST,
    WORDS,
    RowSpan,
    blank,
    edge_in_group,
    load_edge,
    read_shared,
    row_span,
    store_edge,
    store_vector,
)

CONSUMER_BARRIER = 1  # named barrier of the consumer threads
CHUNK_VECTORS = 2  # 16-byte vectors of a thread in a chunk
# L2 eviction priority of chunks that are read once, for the first time, and for the second time.
RESIDENT_POLICY, FIRST_POLICY, SECOND_POLICY = "first", "last", "first"

# Per cent of L1 and shared memory that are used as shared memory: all.
SMEM_CARVEOUT_PERCENT = 100


@dataclass(frozen=True)
class ResidentConfig:
    """Configuration of the kernel.

    dtype, edges, store_bytes: as in RowsConfig. threads: threads that compute, in whole warps; one more warp loads.
    resident, streaming: number of chunks of either kind in shared memory. cluster: CTAs that share a row, or 0 if
    groups of any size over the grid share it. ctas_per_sm: CTAs that must fit an SM.
    """

    dtype: str
    threads: int
    resident: int
    streaming: int
    edges: bool
    cluster: int = 0
    ctas_per_sm: int = 1
    store_bytes: int = VECTOR_BYTES

    @property
    def warps(self) -> int:
        return self.threads // WARP_THREADS

    @property
    def chunk_size(self) -> int:
        """Vectors of a chunk."""
        return self.threads * CHUNK_VECTORS

    @property
    def capacity(self) -> int:
        """Vectors of a row that a CTA keeps between the phases."""
        return self.resident * self.chunk_size

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of all chunks."""
        return (self.resident + self.streaming) * self.chunk_size * VECTOR_BYTES

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        others = "all other warps"
        return (
            Barrier("full", self.resident, 1, "load warp", others, "a resident chunk's bytes have arrived"),
            Barrier("empty", self.resident, self.warps, others, "load warp", "a resident chunk is stored"),
            Barrier("stream full", self.streaming, 1, "load warp", others, "a streaming chunk has arrived"),
            Barrier("stream empty", self.streaming, self.warps, others, "load warp", "it has been read"),
        )


@dataclass(frozen=True)
class Share:
    """The part of a row that a CTA has: ``size`` vectors from vector ``begin`` on."""

    row: RowSpan
    begin: Int32
    size: Int32


@dataclass(frozen=True)
class Chunks:
    """Number of chunks of either kind in a share, filled or not; it is the same for all rows and CTAs."""

    resident: Int32
    streaming: Int32


class Resident:
    """The kernel. Compile with ``cute.compile(Resident(config), x, out, workspace, groups, group, stream)``."""

    def __init__(self, config: ResidentConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        workspace: cute.Tensor,
        groups: Int32,
        group: Int32,
        stream: CUstream,
    ):
        """Launch the kernel.

        x, out: (ROW, ELEMENT), elements contiguous; may be the same memory. groups: number of groups of ``group`` CTAs
        each (if there are clusters, of a cluster's size). workspace: see GridRounds, 1 + rows * group words; not used
        with clusters. Without clusters, groups * group CTAs must fit the GPU at once.
        """
        config = self.config
        self.kernel(x, out, workspace, groups, group).launch(
            grid=(groups * group, 1, 1),
            block=(config.threads + WARP_THREADS, 1, 1),
            cluster=(config.cluster, 1, 1) if cutlass.const_expr(config.cluster > 1) else None,
            cooperative=config.cluster == 0,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, workspace: cute.Tensor, groups: Int32, group: Int32):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = block % group
        accurate = config.dtype == "float32"

        # 1. Shared memory: chunks, barriers, states.
        smem = cutlass.memory.SmemAllocator()
        rings = tuple(
            smem.allocate_tensor(
                Int32, cute.make_layout((WORDS, config.chunk_size, count)), byte_alignment=128
            )
            for count in (config.resident, config.streaming)
        )  # (WORD, VECTOR, CHUNK) each
        mbarriers = smem.allocate_array(Int64, 2 * (config.resident + config.streaming))
        channels = init_barriers(config.barriers, mbarriers)
        states = smem.allocate_tensor(
            Float32, cute.make_layout((STATE_WORDS, config.warps)), byte_alignment=8
        )
        if cutlass.const_expr(config.cluster > 0):
            round_states = smem.allocate_tensor(
                Float32,
                cute.make_layout((STATE_WORDS, config.cluster, BUFFERS)),
                byte_alignment=16,
            )
            reduction = ClusterRounds(
                round_states, smem.allocate_array(Int64, BUFFERS), config.cluster, accurate
            )
        else:
            scratch = smem.allocate_tensor(
                Float32, cute.make_layout((STATE_WORDS, config.warps)), byte_alignment=8
            )
            leader = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
            reduction = GridRounds(
                workspace, group, rank, scratch, leader, config.threads, CONSUMER_BARRIER, accurate
            )
        reduction.open(thread)
        cute.arch.sync_threads()

        # 2. Roles.
        if warp == config.warps:
            load(config, x, channels, rings, groups, group)
        else:
            consume(config, x, out, channels, rings, states, reduction, groups, group)


def cut(config: ResidentConfig, x: cute.Tensor, group) -> Chunks:
    """The chunks of a share."""
    per_vector = VECTOR_BYTES * 8 // x.element_type.width
    share = cute.ceil_div(cute.ceil_div(x.shape[1], per_vector), group)
    chunks = cute.ceil_div(share, config.chunk_size)
    kept = cutlass.min(chunks, config.resident)
    return Chunks(kept, chunks - kept)


@cute.jit
def share_of(config: cutlass.Constexpr, x: cute.Tensor, row_index, group) -> Share:
    """This CTA's share of a row."""
    block, _, _ = cute.arch.block_idx()
    row = row_span(x, row_index, config.dtype, config.edges)
    even = cute.ceil_div(row.vectors, group)
    begin = cutlass.min(block % group * even, row.vectors)
    return Share(row, begin, cutlass.min(even, row.vectors - begin))


@cute.jit
def load(config: cutlass.Constexpr, x, channels, rings, groups, group):
    """The load warp: fills chunks, row after row in the order of use. Consumes empty.

    Streaming chunks are loaded twice, the second time backwards, because what was read last is most likely still in L2.
    """
    block, _, _ = cute.arch.block_idx()
    chunks = cut(config, x, group)
    use, stream_use = Int32(0), Int32(0)
    for row_index in cutlass.range(block // group, x.shape[0], groups, unroll=1):
        share = share_of(config, x, row_index, group)
        for chunk in cutlass.range(chunks.resident, unroll=1):
            fill(config, share, chunk, channels["full"], channels["empty"], rings[0], use, RESIDENT_POLICY)
            use += 1
        stream = (channels["stream full"], channels["stream empty"], rings[1])
        for chunk in cutlass.range(chunks.streaming, unroll=1):
            fill(config, share, chunks.resident + chunk, *stream, stream_use, FIRST_POLICY)
            stream_use += 1
        for backwards in cutlass.range(chunks.streaming, unroll=1):
            chunk = chunks.resident + chunks.streaming - 1 - backwards
            fill(config, share, chunk, *stream, stream_use, SECOND_POLICY)
            stream_use += 1


@cute.jit
def fill(
    config: cutlass.Constexpr, share, chunk, full, empty, ring: cute.Tensor, use, policy: cutlass.Constexpr
):
    """Load a chunk of the share into the use-th buffer of the ring, once that is empty."""
    empty.wait_previous(use)
    first = chunk * config.chunk_size
    size = cutlass.max(cutlass.min(share.size - first, config.chunk_size), 0) * VECTOR_BYTES
    full.expect_bytes(use, size)
    if size > 0:
        with cute.arch.elect_one():
            bulk_load(
                ring[None, None, full.stage(use)].iterator,
                share.row.first + Int64(share.begin + first) * VECTOR_BYTES,
                size,
                full.barrier(use),
                policy,
            )


@cute.jit
def consume(
    config: cutlass.Constexpr,
    x: cute.Tensor,
    out: cute.Tensor,
    channels,
    rings,
    states: cute.Tensor,
    reduction,
    groups,
    group,
):
    """All other warps: read full chunks, each in both phases of a row, and release them to ``empty``."""
    dtype = config.dtype
    accurate = dtype == "float32"
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    chunks = cut(config, x, group)
    round_, use, stream_use = Int32(0), Int32(0), Int32(0)
    for row_index in cutlass.range(block // group, x.shape[0], groups, unroll=1):
        share = share_of(config, x, row_index, group)

        # 1. Maximum and sum of the share.
        edge, maximum, total = None, -Float32.inf, Float32(0.0)
        if cutlass.const_expr(config.edges):
            edge = edge_in_group(share.row, thread, config.threads, block % group, dtype)
            maximum, total = state_of(load_edge(share.row, edge, dtype), accurate)
        for chunk in cutlass.range(chunks.resident, unroll=1):
            words = read(config, share, chunk, channels["full"], rings[0], use + chunk)
            maximum, total = absorb((maximum, total), words, dtype)
        for chunk in cutlass.range(chunks.streaming, unroll=1):
            words = read(
                config, share, chunks.resident + chunk, channels["stream full"], rings[1], stream_use
            )
            maximum, total = absorb((maximum, total), words, dtype)
            release(channels["stream empty"], stream_use)
            stream_use += 1

        # 2. The row's state, from all CTAs of the group.
        maximum, total = warp_join((maximum, total), WARP_THREADS, accurate)
        if cute.arch.lane_idx() == 0:
            states[0, thread // WARP_THREADS], states[1, thread // WARP_THREADS] = maximum, total
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=config.threads)
        if thread < WARP_THREADS:
            reduction.publish(join_states(states, config.warps, accurate), row_index, round_)
        maximum, total = reduction.collect(row_index, round_, thread)
        inverse = Float32(1.0) / total

        # 3. Scale and store; first the chunks that L2 may lose.
        target = row_span(out, row_index, dtype, False)
        if cutlass.const_expr(config.edges):
            value = exponential(load_edge(share.row, edge, dtype) - maximum, accurate) * inverse
            store_edge(target, edge, value, dtype)
        for backwards in cutlass.range(chunks.streaming, unroll=1):
            chunk = chunks.resident + chunks.streaming - 1 - backwards
            words = read(config, share, chunk, channels["stream full"], rings[1], stream_use)
            scale_and_store(config, share, target, chunk, words, maximum, inverse)
            release(channels["stream empty"], stream_use)
            stream_use += 1
        for chunk in cutlass.range(chunks.resident, unroll=1):
            words = read(config, share, chunk, channels["full"], rings[0], use + chunk)
            scale_and_store(config, share, target, chunk, words, maximum, inverse)
            release(channels["empty"], use + chunk)
        use += chunks.resident
        round_ += 1
    reduction.finish(thread, config.threads)


@cute.jit
def read(config: cutlass.Constexpr, share, chunk, full, ring: cute.Tensor, use) -> cute.Tensor:
    """This thread's vectors of a chunk, the ring's use number ``use``: (WORD, VECTOR); -inf past the share's end."""
    thread, _, _ = cute.arch.thread_idx()
    full.wait(use)
    words = cute.make_rmem_tensor((WORDS, CHUNK_VECTORS), Int32)
    place = ring[None, None, full.stage(use)]
    for i in cutlass.range_constexpr(CHUNK_VECTORS):
        words[None, i].store(read_shared(place, i * config.threads + thread).load())
    left = share.size - chunk * config.chunk_size
    if left < config.chunk_size:
        for i in cutlass.range_constexpr(CHUNK_VECTORS):
            blank(words[None, i], i * config.threads + thread < left, config.dtype)
    return words


@cute.jit
def release(empty, use):
    """Let the copy engine overwrite the use-th chunk of the ring, which the calling warp has read."""
    cute.arch.fence_view_async_shared()  # orders these reads before the copy engine's writes
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        empty.arrive(use)


@cute.jit
def scale_and_store(config: cutlass.Constexpr, share, target, chunk, words: cute.Tensor, maximum, inverse):
    """Write the softmax of this thread's vectors of a chunk, words (WORD, VECTOR)."""
    thread, _, _ = cute.arch.thread_idx()
    first = chunk * config.chunk_size + thread
    address = share.row.first + (target.address - share.row.address)
    address += Int64(share.begin + first) * VECTOR_BYTES
    scale(words, maximum, inverse, config.dtype)
    for i in cutlass.range_constexpr(CHUNK_VECTORS):
        offset, present = i * config.threads, Boolean(first + i * config.threads < share.size)
        store_vector(words[None, i], address, offset * VECTOR_BYTES, present, config.store_bytes, LAST)
