"""What the consumers of both kernels share: a consumer warpgroup has 64 rows of a tile, whose gradients it adds up in
registers, on wgmma."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from warpspec.common.device import tma
from warpspec.common.device.wgmma import QUAD, WARP_ROWS, WARPGROUP_ROWS, flat, multiply, settle
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.backward.device.clear import clear_rows
from warpspec.fmha.backward.sm90.apart.config import CLEARED_BARRIER, CONSUMERS
from warpspec.fmha.backward.sm90.products import K_MAJOR, MMA_K, MN_MAJOR, batched, make_mma, ring, rows_of
from warpspec.fmha.backward.sm90.results import block_of
from warpspec.fmha.heads import BLOCK, STEP
from warpspec.fmha.sm90.staging import (
    CHUNKS,
    LOADS,
    TILE_WORDS,
    chunk_read,
    row_read,
    store_chunk,
    store_rows,
)


def make_scores(config, dtype) -> cute.TiledMma:
    """S or dP [64, rows of a block], one of the consumer's rows per row: both operands from shared memory. Each place
    in the program that issues a product makes it anew."""
    return make_mma(dtype, K_MAJOR, K_MAJOR, config.block_rows)


def make_sums(config, dtype, name: str) -> cute.TiledMma:
    """A gradient [64, columns] from P or dS in registers. name: see ``ApartKernel.columns``."""
    return make_mma(dtype, K_MAJOR, MN_MAJOR, config.columns(name), registers=True)


def kept_operand(config, dtype, shared: dict, name: str, consumer) -> cute.Tensor:
    """(MMA, MMA_M, MMA_K): the consumer's rows of a tile's operand."""
    scores = make_scores(config, dtype)
    rows, columns = config.rows_of(name), config.room_of(name)
    layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, config.block_rows, columns), dtype, 1)
    tiles = ring(dtype, shared[name], layout, 1, 0)
    fragment = scores.make_fragment_A(scores.get_slice(0).partition_A(tiles))
    return batched(fragment[None, consumer, None, 0])


def streamed_operand(config, dtype, shared: dict, name: str, columns: bool) -> cute.Tensor:
    """(MMA, MMA_N, MMA_K, STAGE): a step's operand, of S and dP, or of the products that sum over a step's rows
    (``columns``)."""
    rows, size = config.rows_of(name), config.room_of(name)
    mma, major, shape = make_scores(config, dtype), LayoutEnum.ROW_MAJOR, (WARPGROUP_ROWS, rows, size)
    if columns:  # describes whole spans, of which products may read some columns
        size = BLOCK * config.spans_of(name)
        mma = make_mma(dtype, K_MAJOR, MN_MAJOR, size, registers=True)
        major, shape = LayoutEnum.COL_MAJOR, (WARPGROUP_ROWS, size, rows)
    layout = hopper.make_smem_layout_b(major, shape, dtype, 1)
    tiles = ring(dtype, shared[name], layout, config.stages_of(name), config.tile_bytes(name))
    return mma.make_fragment_B(mma.get_slice(0).partition_B(tiles))


def depth_of(config, name: str) -> int:
    """Instructions that sum over a row of this operand."""
    return -(-(config.sizes.v if name in ("v", "do") else config.sizes.qk) // MMA_K)


@dataclass(frozen=True)
class OwnRows:
    """A consumer's share of a tile. thread: 0..127 within the consumer. use: steps that the CTA did before.
    results: the gradients that the kernel makes. stores: their TMA descriptors and coordinate tensors, if TMA stores
    them."""

    config: object
    channels: dict
    shared: dict
    operands: object
    results: tuple
    stores: tuple
    mma: object
    tile: object
    consumer: Int32
    thread: Int32
    use: Int32

    @property
    def row(self):
        """The first of the thread's rows among the consumer's 64."""
        return self.thread // WARP_THREADS * WARP_ROWS + self.thread % WARP_THREADS // QUAD

    @property
    def member(self):
        """The thread's number in its quad."""
        return self.thread % QUAD

    @property
    def index(self):
        """Number of this thread among those that clear together."""
        return self.consumer * WARPGROUP_THREADS + self.thread

    @property
    def threads(self) -> int:
        return self.config.consumer_threads

    @property
    def dtype(self):
        return self.operands.q.element_type

    def stage(self, step):
        """Buffer of a step in the rings."""
        return (self.use + step) % self.config.stages_of(self.config.streamed[0])

    def issue_s(self, step, block: int = 0) -> None:
        """Issue S of a block of a step, one of the consumer's rows per row."""
        self.issue_scores(0, self.mma.s[block], step, block)

    def issue_dp(self, step, block: int = 0) -> None:
        """Issue dP of a block of a step."""
        self.issue_scores(1, self.mma.dp, step, block)

    def issue_scores(self, number: int, scores: cute.Tensor, step, block: int) -> None:
        """Issue S (0) or dP (1)."""
        kept, streamed = self.config.kept[number], self.config.streamed[number]
        mma, count = make_scores(self.config, self.dtype), depth_of(self.config, streamed)
        rows = rows_of(getattr(self.mma, streamed), block, self.stage(step))
        multiply(mma, scores, getattr(self.mma, kept), rows, False, count=count)

    def issue_sums(self, name: str, products: tuple, step, block: int, accumulate=True) -> None:
        """Issue a gradient's product of a block of a step. name: as of ``make_sums``. products: (the gradient, P or dS,
        columns of the streamed operand)."""
        sums, weights, columns = products
        columns, first = columns[None, None, None, self.stage(step)], block * BLOCK // MMA_K
        multiply(make_sums(self.config, self.dtype, name), sums, weights, columns, accumulate, first)

    def wait(self, name: str, step) -> None:
        """Wait until a step's operand has arrived."""
        self.channels[name + "_full"].wait(self.use + step)

    def release(self, name: str, step) -> None:
        self.channels[name + "_empty"].arrive_warp(self.use + step)

    def release_own(self, number: int, tile_use) -> None:
        """One of the tile's own operands has been read: that of S (0), of dP (1)."""
        self.channels[self.config.kept[number] + "_empty"].arrive_warp(tile_use)

    def release_tile(self, tile_use) -> None:
        """The tile's own operands have been read."""
        for name in self.config.kept:
            self.channels[name + "_empty"].arrive_warp(tile_use)

    def clear(self, name: str, step, first, end) -> None:
        """Clear a step's rows outside [first, end)."""
        base = self.shared[name] + self.stage(step) * self.config.tile_bytes(name)
        clear_rows(self, name, base, first, end)

    def meet(self) -> None:
        """Wait for all consumers, and make what they have cleared visible to products."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=CLEARED_BARRIER, number_of_threads=self.config.consumer_threads)


def fence_reads() -> None:
    """Let the thread's loads of statistics be over before TMA, told by an arrival, writes others in their place."""
    cute.arch.fence_proxy("async.shared", space="cta")


def clear_sums(*sums: cute.Tensor) -> None:
    """Set sums to 0, in front of the fence of their first product, which may stand in a branch."""
    for each in sums:
        each.fill(0.0)
        settle(cute.recast_tensor(flat(each), Int32))


def write_rows(work, number: int, values: cute.Tensor, place: tuple) -> None:
    """Write values, in 16 bits, to the consumer's rows of a gradient: each warp stages its 16 rows, 64 columns at a
    time. number: which of ``work.results``. place: (head, batch row, the tile's first row there, rows of the batch row
    or request from that one on)."""
    narrow = cute.make_rmem_tensor(cute.size(values), work.dtype)
    narrow.store(values.load().to(work.dtype))
    words = cute.recast_tensor(narrow, Int32)
    (store_tiles if work.config.stores_tiles else store_chunks)(work, number, words, place)


def result_base(work):
    """Where the consumer's results are staged."""
    return work.shared["results"].toint() + work.consumer * (WARPGROUP_ROWS * tma.ROW_BYTES)


@cute.jit
def store_tiles(work, number: cutlass.Constexpr, words: cute.Tensor, place: cutlass.Constexpr):
    """``write_rows`` by TMA, which leaves out rows past the batch row's last."""
    config, thread, (head, batch, first, _) = work.config, work.thread, place
    (atom, coordinates), buffers = work.stores[number], config.result_buffers
    first += work.consumer * WARPGROUP_ROWS + thread // WARP_THREADS * WARP_ROWS
    view = cute.domain_offset((0, first, 0), coordinates[None, None, None, head, batch])
    box, buffer_bytes = (BLOCK, WARP_ROWS, 1), CONSUMERS * WARPGROUP_ROWS * tma.ROW_BYTES
    tiles = cute.local_tile(view, box, (0, 0, None) if config.rows is None else (None, 0, 0))
    own = work.shared["results"] + work.index // WARP_THREADS * (WARP_ROWS * tma.ROW_BYTES)
    shared = tma.shared_tiles(own.align(tma.TILE_ALIGNMENT), work.dtype, box, buffers, buffer_bytes)
    ring = tma.TileRing.make(atom, tiles, shared)
    blocks = -(-cute.size(words) // TILE_WORDS)
    for block in cutlass.range_constexpr(blocks):
        place = number * blocks + block  # among the tile's stores
        buffer = place % buffers
        cute.arch.cp_async_bulk_wait_group(buffers - 1 if place > 0 else 0, read=True)
        cute.arch.sync_warp()
        store_rows(result_base(work) + buffer * buffer_bytes, thread, block_of(words, block, TILE_WORDS))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        ring.store(block, buffer)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def store_chunks(work, number: cutlass.Constexpr, words: cute.Tensor, place: cutlass.Constexpr):
    """``write_rows`` by threads, for rows after which those of another request come."""
    config, thread, (head, batch, first, rows) = work.config, work.thread, place
    tensor, base = work.results[number], result_base(work)
    for block in cutlass.range_constexpr(-(-cute.size(words) // TILE_WORDS)):
        cute.arch.sync_warp()
        store_rows(base, thread, block_of(words, block, TILE_WORDS))
        cute.arch.sync_warp()
        for load in cutlass.range_constexpr(LOADS):
            row = work.consumer * WARPGROUP_ROWS + row_read(thread, load)
            inside = Boolean(row < rows)
            if cutlass.const_expr(config.rows is not None):
                inside &= Boolean(block * CHUNKS + chunk_read(thread) < tensor.shape[3] // STEP)
            store_chunk(base, thread, load, tensor[batch, first + row, head, None], block, inside)


def end_stores() -> None:
    """Wait until stores have read shared memory, before the CTA ends."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)
