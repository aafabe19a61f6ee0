"""Long rows held on chip, in shared memory and registers, by many CTAs a row. sm_90a and sm_100a.

Persistent CTAs in groups; a group takes one row after another, a CTA always the same share of it. A share is three
parts: chunks in shared memory, vectors in registers, and what fits neither, which is read twice and counts on L2.
Two phases a row: maximum and sum over the share; then, with the state of the whole row, scale and store. The groups
are clusters that exchange states over distributed shared memory, or any number of CTAs of a cooperative launch
(the split of few very long rows over the whole GPU), which exchange them through global memory.

One warp loads: it fills shared memory in the order of use, a chunk as soon as its slot has been stored from, and
so is reading the next row while this one waits for the other CTAs or is being stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.pipeline import Barrier, init_barriers
from warpspec.softmax.exchange import BUFFERS, STATE_WORDS, ClusterRounds, GridRounds, join_slots, warp_join
from warpspec.softmax.online import WARP, absorb, exponential, scale, state_of
from warpspec.softmax.vectors import (
    LAST,
    PLAIN,
    VECTOR_BYTES,
    WORDS,
    Row,
    as_float,
    bulk_load,
    edge_of,
    forget,
    load_edge,
    load_vector,
    locate,
    read_shared,
    store_edge,
    store_vector,
)

CONSUMER_BARRIER = 1  # named barrier of the consumer threads

# Of an SM's L1 and shared memory, as shared memory: all it can have.
SMEM_CARVEOUT_PERCENT = 100


@dataclass(frozen=True)
class ResidentConfig:
    """dtype, edges, store_bytes: as RowsConfig. threads: that compute, whole warps; one warp more loads. chunks: in
    shared memory. chunk_vectors: 16-byte vectors a thread to a chunk. register_vectors: vectors a thread holds in
    registers. cluster: CTAs to a row, or 0: groups of any size over the grid. unroll: vectors loaded at a time of
    the part that is read twice. ctas_per_sm: that an SM has room for."""

    dtype: str
    threads: int
    chunks: int
    edges: bool
    cluster: int = 0
    chunk_vectors: int = 2
    register_vectors: int = 0
    store_bytes: int = VECTOR_BYTES
    unroll: int = 4
    ctas_per_sm: int = 1

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def chunk_size(self) -> int:
        """Vectors in a chunk."""
        return self.threads * self.chunk_vectors

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_size * VECTOR_BYTES

    @property
    def capacity(self) -> int:
        """Vectors of a row that a CTA holds on chip."""
        return self.chunks * self.chunk_size + self.register_vectors * self.threads

    @property
    def barriers(self) -> tuple[Barrier, ...]:
        return (
            Barrier("full", self.chunks, 1, "load warp", "all other warps", "a chunk's bytes have arrived"),
            Barrier("empty", self.chunks, self.warps, "all other warps", "load warp", "a chunk is stored"),
        )


@dataclass(frozen=True)
class Share:
    """What a CTA has of a row: ``size`` vectors from vector ``begin`` on, the first ``in_smem`` of them in shared
    memory, then ``in_registers`` in registers."""

    row: Row
    begin: Int32
    size: Int32
    in_smem: Int32
    in_registers: Int32


class Resident:
    """``cute.compile(Resident(config), x, out, workspace, groups, group, stream)``."""

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
        """x, out: (ROW, ELEMENT), elements contiguous; may be the same memory. groups: of ``group`` CTAs each (a
        cluster's number where there are clusters). workspace: see GridRounds, 1 + rows * group words; unused with
        clusters. groups * group CTAs must fit the GPU at once, unless in clusters."""
        config = self.config
        self.kernel(x, out, workspace, groups, group).launch(
            grid=(groups * group, 1, 1),
            block=(config.threads + WARP, 1, 1),
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

        # 1. Shared memory: chunks, barriers, states.
        smem = cutlass.memory.SmemAllocator()
        ring = smem.allocate_tensor(
            Int32,
            cute.make_layout((WORDS, config.chunk_size, config.chunks)),
            byte_alignment=128,
        )  # (WORD, VECTOR, CHUNK)
        channels = init_barriers(config.barriers, smem.allocate_array(Int64, 2 * config.chunks))
        states = smem.allocate_tensor(
            Float32, cute.make_layout((STATE_WORDS, config.warps)), byte_alignment=8
        )
        if cutlass.const_expr(config.cluster > 0):
            slots = smem.allocate_tensor(
                Float32,
                cute.make_layout((STATE_WORDS, config.cluster, BUFFERS)),
                byte_alignment=16,
            )
            exchange = ClusterRounds(slots, smem.allocate_array(Int64, BUFFERS), config.cluster)
        else:
            scratch = smem.allocate_tensor(
                Float32, cute.make_layout((STATE_WORDS, config.warps)), byte_alignment=8
            )
            leader = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=4)
            exchange = GridRounds(workspace, group, rank, scratch, leader, config.threads, CONSUMER_BARRIER)
        exchange.open(thread)
        cute.arch.sync_threads()

        # 2. Roles.
        if warp == config.warps:
            load(config, x, channels, ring, groups, group)
        else:
            consume(config, x, out, channels, ring, states, exchange, groups, group)


def chunk_count(config: ResidentConfig, x: cute.Tensor, group):
    """Chunks of shared memory that every row takes, filled or not: the same for all rows and CTAs."""
    per_vector = VECTOR_BYTES * 8 // x.element_type.width
    share = cute.ceil_div(cute.ceil_div(x.shape[1], per_vector), group)
    return cutlass.min(cute.ceil_div(share, config.chunk_size), config.chunks)


@cute.jit
def share_of(config: cutlass.Constexpr, x: cute.Tensor, row_index, group, chunks) -> Share:
    """This CTA's share of a row. chunks: as ``chunk_count``."""
    block, _, _ = cute.arch.block_idx()
    row = locate(x, row_index, config.dtype, config.edges)
    even = cute.ceil_div(row.vectors, group)
    begin = cutlass.min(block % group * even, row.vectors)
    size = cutlass.min(even, row.vectors - begin)
    in_smem = cutlass.min(chunks * config.chunk_size, size)
    in_registers = cutlass.min(config.register_vectors * config.threads, size - in_smem)
    return Share(row, begin, size, in_smem, in_registers)


@cute.jit
def load(config: cutlass.Constexpr, x, channels, ring: cute.Tensor, groups, group):
    """The load warp. Consumes ``empty`` chunks, produces ``full`` ones: row after row, in the order of use."""
    block, _, _ = cute.arch.block_idx()
    chunks = chunk_count(config, x, group)
    use = Int32(0)
    for row_index in cutlass.range(block // group, x.shape[0], groups, unroll=1):
        share = share_of(config, x, row_index, group, chunks)
        for chunk in cutlass.range(chunks, unroll=1):
            channels["empty"].wait_previous(use)
            first = chunk * config.chunk_size
            size = cutlass.max(cutlass.min(share.in_smem - first, config.chunk_size), 0) * VECTOR_BYTES
            channels["full"].expect_bytes(use, size)
            if size > 0:
                with cute.arch.elect_one():
                    bulk_load(
                        ring[None, None, channels["full"].stage(use)].iterator,
                        share.row.first + Int64(share.begin + first) * VECTOR_BYTES,
                        size,
                        channels["full"].barrier(use),
                    )
            use += 1


@cute.jit
def consume(
    config: cutlass.Constexpr,
    x: cute.Tensor,
    out: cute.Tensor,
    channels,
    ring: cute.Tensor,
    states: cute.Tensor,
    exchange,
    groups,
    group,
):
    """All other warps. Consume ``full`` chunks, twice, and hand them back ``empty``."""
    dtype = config.dtype
    accurate = dtype == "float32"
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    chunks = chunk_count(config, x, group)
    held = cute.make_rmem_tensor((WORDS, max(config.register_vectors, 1)), Int32)
    round_ = Int32(0)
    for row_index in cutlass.range(block // group, x.shape[0], groups, unroll=1):
        share = share_of(config, x, row_index, group, chunks)
        use = round_ * chunks
        behind = share.in_smem + share.in_registers  # vectors before those read twice
        rest = cute.ceil_div(share.size - behind, config.threads * config.unroll)

        # 1. Maximum and sum of the share. Loads into registers go first: they take longest.
        load_vectors(config, share, share.in_smem, held, PLAIN)
        edge, maximum, total = None, -Float32.inf, Float32(0.0)
        if cutlass.const_expr(config.edges):
            number = thread + Int32(cutlass.select_(Boolean(block % group == 0), 0, config.threads))
            edge = edge_of(share.row, number, dtype)
            maximum, total = state_of(load_edge(share.row, edge, dtype), accurate)
        for chunk in cutlass.range(chunks, unroll=1):
            channels["full"].wait(use + chunk)
            words = read_chunk(config, share, ring, channels["full"].stage(use + chunk), chunk)
            maximum, total = absorb_words((maximum, total), words, dtype)
        for r in cutlass.range(rest, unroll=1):
            words = read_rest(config, share, behind, r, PLAIN)
            maximum, total = absorb_words((maximum, total), words, dtype)
        if cutlass.const_expr(config.register_vectors > 0):
            maximum, total = absorb_words((maximum, total), held, dtype)

        # 2. The row's state, from all CTAs of the group.
        maximum, total = warp_join((maximum, total), WARP)
        if cute.arch.lane_idx() == 0:
            states[0, thread // WARP], states[1, thread // WARP] = maximum, total
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=config.threads)
        if thread < WARP:
            exchange.publish(join_slots(states, config.warps), row_index, round_)
        maximum, total = exchange.collect(row_index, round_, thread)
        inverse = Float32(1.0) / total

        # 3. Scale and store; what counts on L2 first.
        target = locate(out, row_index, dtype, False)
        if cutlass.const_expr(config.edges):
            value = exponential(load_edge(share.row, edge, dtype) - maximum, accurate) * inverse
            store_edge(target, edge, value, dtype)
        for k in cutlass.range(rest, unroll=1):
            words = read_rest(config, share, behind, rest - 1 - k, LAST)
            first = behind + (rest - 1 - k) * config.unroll * config.threads
            scale_and_store(config, share, target, first, share.size, words, maximum, inverse)
        if cutlass.const_expr(config.register_vectors > 0):
            forget(held)
            scale_and_store(config, share, target, share.in_smem, behind, held, maximum, inverse)
        for chunk in cutlass.range(chunks, unroll=1):
            words = read_chunk(config, share, ring, channels["full"].stage(use + chunk), chunk)
            first = chunk * config.chunk_size
            scale_and_store(config, share, target, first, share.in_smem, words, maximum, inverse)
            # Only now: having stored what it read, a thread has surely read it.
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                channels["empty"].arrive(use + chunk)
        round_ += 1
    exchange.finish(thread, config.threads)


@cute.jit
def read_chunk(config: cutlass.Constexpr, share, ring: cute.Tensor, stage, chunk):
    """This thread's vectors of a chunk in shared memory, (WORD, VECTOR); -inf past the share's end."""
    thread, _, _ = cute.arch.thread_idx()
    words = cute.make_rmem_tensor((WORDS, config.chunk_vectors), Int32)
    for i in cutlass.range_constexpr(config.chunk_vectors):
        vector = i * config.threads + thread
        left = share.in_smem - chunk * config.chunk_size
        words[None, i].store(read_shared(ring[None, None, stage], vector, left, config.dtype).load())
    return words


@cute.jit
def load_vectors(config: cutlass.Constexpr, share, first, words: cute.Tensor, hint: cutlass.Constexpr):
    """This thread's vectors of the share from vector ``first`` on into words (WORD, VECTOR); -inf past its end."""
    thread, _, _ = cute.arch.thread_idx()
    address = share.row.first + Int64(share.begin + first + thread) * VECTOR_BYTES
    for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
        present = Boolean(first + i * config.threads + thread < share.size)
        load_vector(words[None, i], address, i * config.threads * VECTOR_BYTES, present, config.dtype, hint)


@cute.jit
def read_rest(config: cutlass.Constexpr, share, behind, r, hint: cutlass.Constexpr):
    """``unroll`` vectors of the part that is read twice, (WORD, VECTOR)."""
    words = cute.make_rmem_tensor((WORDS, config.unroll), Int32)
    load_vectors(config, share, behind + r * config.unroll * config.threads, words, hint)
    return words


@cute.jit
def scale_and_store(
    config: cutlass.Constexpr, share, target, first, limit, words: cute.Tensor, maximum, inverse
):
    """Write the softmax of this thread's vectors, words (WORD, VECTOR), which are those of the share from vector
    ``first`` on; none from ``limit`` on. One at a time: in fp32 all of them may not fit the registers."""
    thread, _, _ = cute.arch.thread_idx()
    address = share.row.first + (target.address - share.row.address)
    address += Int64(share.begin + first + thread) * VECTOR_BYTES
    for i in cutlass.range_constexpr(cute.size(words, mode=[1])):
        scale(words[None, i], maximum, inverse, config.dtype)
        offset, present = i * config.threads, Boolean(first + i * config.threads + thread < limit)
        store_vector(words[None, i], address, offset * VECTOR_BYTES, present, config.store_bytes, LAST)


def absorb_words(state: tuple, words: cute.Tensor, dtype: str) -> tuple:
    """State of a set of elements and of packed words (WORDS, VECTOR) together, a vector at a time."""
    for i in range(cute.size(words, mode=[1])):
        state = absorb(state, as_float(words[None, i], dtype), dtype == "float32")
    return state
