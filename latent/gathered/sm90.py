"""The gathered-attention kernel for sm_90a: storage, role dispatch, consumers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.device.wgmma import (
    PAIR,
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    column,
    elements,
    flat,
)
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.sm90.consumer import ConsumerTile, Products, products
from warpspec.fmha.sm90.epilogue import ROW_RESULTS, epilogue
from warpspec.fmha.sm90.narrow import NARROW_BARRIER, narrow_row
from warpspec.fmha.sm90.pair import Pair, attend_paired, own_stage
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.latent.gathered.cluster import share_keys
from warpspec.latent.gathered.config import ROPE_DIM, TASK_STAGES, GatheredConfig
from warpspec.latent.gathered.float8 import PAIR_FLOAT8
from warpspec.latent.gathered.gather import gather
from warpspec.latent.gathered.host import GatheredHost, gathered_arguments
from warpspec.latent.gathered.task import MASK_BITS, each_task, score_numbers, seen_words, start
from warpspec.latent.gathered.unseen import clear_nan


class GatheredStorage(NamedTuple):
    """Addresses of the shared-memory regions.

    masks: (STAGE WORD) words. raw: bytes of the producer warps' FP8 keys before conversion. factors: (ROW, TASK STAGE)
    fp32 factors of scores, None if queries are multiplied as they are. All others are those of
    ``fmha.sm90.kernel.Buffers``.
    """

    q: cute.Pointer
    k: cute.Pointer
    v: cute.Pointer
    p: cute.Pointer
    statistics: cute.Pointer
    sums: cute.Pointer
    masks: cute.Tensor
    raw: cute.Pointer
    factors: cute.Tensor | None


@dataclass(frozen=True)
class GatheredTile(ConsumerTile):
    """A consumer's work on a task whose keys may be missing. masks: as in ``GatheredStorage``."""

    masks: cute.Tensor = None

    def hide(self, scores: cute.Tensor, r: int, step) -> None:
        """Hide missing keys, as ``ConsumerTile.hide`` does, and those that the row's query does not see."""
        words = self.config.tile_n // MASK_BITS
        stage = (self.use + step) % self.config.kv_stages
        row = self.rows[r]
        mask = [self.masks[stage * words + i] for i in range(words)]
        hide_missing(
            scores, r, row.member, seen_words(mask, row, self.tile.span.tile(step) * self.config.tile_n)
        )

    def clear(self, first_key, stage) -> None:
        clear_nan(self.config, self.span, first_key, self.thread, stage)


@cute.jit
def hide_missing(scores: cute.Tensor, r: cutlass.Constexpr, member, words: cutlass.Constexpr):
    """Set scores (n) of row r of keys whose mask bit is 0 to -inf. words: (key / 32), the tile's mask."""
    every = words[0]
    for word in words[1:]:
        every = every & word
    if every != Uint32(0xFFFFFFFF):
        own = [word >> Uint32(PAIR * member) for word in words]  # bit 0 is the key of the thread's element 0
        for i in elements(scores, r):
            bit = (own[column(i) // MASK_BITS] >> (column(i) % MASK_BITS)) & Uint32(1)
            scores[i] = Float32(cutlass.select_(cutlass.Boolean(bit == 0), -Float32.inf, scores[i]))


class GatheredAttention(GatheredHost):
    """The kernel of one ``GatheredConfig``."""

    @cute.kernel
    def kernel(self, operands, atom, coordinates, units, numbers):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        if cutlass.const_expr(config.gathers.cluster > 1):
            channels = share_keys(channels)
        units = start(config, storage, operands, units, atom, warp)
        k_base = storage.k.data_ptr()
        shared = GatheredStorage(
            storage.q.data_ptr(),
            k_base,
            k_base,
            k_base + config.kv.v_bytes if cutlass.const_expr(config.p_in_keys) else storage.p.data_ptr(),
            storage.statistics.data_ptr(),
            storage.sums.data_ptr(),
            storage.masks.get_tensor(cute.make_layout(config.gathers.mask_words(config.kv_stages))),
            storage.raw.data_ptr(),
            storage.factors.get_tensor(cute.make_layout((WARPGROUP_ROWS, TASK_STAGES)))
            if cutlass.const_expr(config.narrows_q)
            else None,
        )
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.shape.producer_registers)
            gather(config, channels, shared, operands, units, atom, coordinates)
        else:
            cute.arch.setmaxregister_increase(config.shape.consumer_registers)
            for each in cutlass.range_constexpr(config.consumers):
                if warp // (WARPGROUP_THREADS // WARP_THREADS) == each:
                    consume(config, channels, shared, operands, units, numbers, thread, each)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    operands,
    units,
    numbers,
    thread,
    column_group: cutlass.Constexpr,
):
    """One consumer: half of O's columns for each of the CTA's tasks. Consumes q_full and what ``pair.attend_paired``
    consumes; produces what ``attend_paired`` produces."""
    thread = thread % WARPGROUP_THREADS
    mma = products(config, shared.q.align(tma.TILE_ALIGNMENT), shared.k, shared.v, column_group)
    numbers = score_numbers(config, operands, numbers)
    role = Consumer(config, channels, shared, operands, numbers, mma, column_group, thread)
    each_task(config, operands, units, consume_task, role, (Int32(0), Int32(0)))


@dataclass(frozen=True)
class Consumer:
    """A consumer's state for all of its tasks. column_group: which of the two it is. thread: 0..127 within it."""

    config: object
    channels: dict
    shared: GatheredStorage
    operands: object
    numbers: object
    mma: Products
    column_group: int
    thread: Int32


@cute.jit
def consume_task(role, task, uses):
    """One task of a consumer. uses: (KV tiles, tasks with keys) that came before; returns the counts after."""
    config, channels, shared, column_group = role.config, role.channels, role.shared, role.column_group
    operands, mma, thread = role.operands, role.mma, role.thread
    use, task_use = uses
    lane = thread % WARP_THREADS
    first = thread // WARP_THREADS * WARP_ROWS + lane // QUAD
    rows = tuple(task.row(first + r * ROW_DISTANCE, lane % QUAD) for r in range(THREAD_ROWS))
    count = task.span.count
    if count > 0:
        channels["q_full"].wait(task_use)
    row_factors = None
    if cutlass.const_expr(config.narrows_q):
        row_factors = narrow_rows(config, shared, task_use, count, column_group, thread)
    work = GatheredTile(
        config, channels, mma, task, rows, None, column_group, 0, column_group, thread, use, task_use, role.numbers,
        shared, row_factors=row_factors, masks=shared.masks,
    )  # fmt: skip
    state = work.in_units(attend_paired(Pair(work, shared, task_use)))
    if cutlass.const_expr(config.gathers.rotate_back and column_group == config.column_groups - 1):
        turn_back(config, flat(mma.o), rows[0].member, operands, task.token)
    if cutlass.const_expr(config.gathers.has_kv_scale):
        scale_values(flat(mma.o), operands)
    stage, results = None, ROW_RESULTS
    if cutlass.const_expr(config.gathers.float8):
        results = PAIR_FLOAT8
    elif cutlass.const_expr(config.output.normalize and not (config.p_in_keys or config.scheduler.adds_up)):
        stage = own_stage(config, shared, column_group)  # every P has been read by now
    epilogue(work, state, operands, stage, results)
    if count > 0:
        task_use += 1
    return use + count, task_use


@cute.jit
def narrow_rows(
    config: cutlass.Constexpr, shared, task_use, count, column_group: cutlass.Constexpr, thread
) -> tuple:
    """Convert the task's Q to fp16, together with the other consumer; returns the factors of the scores of the
    thread's two rows. A quad has one of its own two rows, and gets the other's factor from the other consumer."""
    found = cute.make_rmem_tensor(THREAD_ROWS, Float32)
    found.fill(1.0)
    if count > 0:
        first = thread // WARP_THREADS * WARP_ROWS + thread % WARP_THREADS // QUAD
        row, told = first + column_group * ROW_DISTANCE, shared.factors[None, task_use % TASK_STAGES]
        factor = narrow_row(config, shared.q.toint(), row, thread % QUAD, QUAD)
        if thread % QUAD == 0:
            told[row] = factor
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=NARROW_BARRIER, number_of_threads=config.consumer_threads)
        for r in cutlass.range_constexpr(THREAD_ROWS):
            found[r] = told[first + r * ROW_DISTANCE]
    return tuple(found[r] for r in range(THREAD_ROWS))


@cute.jit
def turn_back(config: cutlass.Constexpr, o: cute.Tensor, member, operands, token):
    """Rotate O's last columns, o (n) of the consumer, back by the query's position; NaN beyond the table."""
    position = Int32(operands.positions[token])
    table = operands.cos_sin
    inside = cutlass.Boolean(position >= 0) & cutlass.Boolean(position < table.shape[0])
    first_column = config.o_columns - ROPE_DIM
    half = ROPE_DIM // 2
    for block in cutlass.range_constexpr(ROPE_DIM // (PAIR * QUAD)):
        pair = block * QUAD + member
        cos, sin = Float32.nan, Float32.nan
        if inside:
            cos, sin = table[position, pair], table[position, half + pair]
        for r in cutlass.range_constexpr(THREAD_ROWS):
            i = (first_column // (PAIR * QUAD) + block) * PAIR * THREAD_ROWS + r * PAIR
            low, high = o[i], o[i + 1]
            o[i] = low * cos + high * sin
            o[i + 1] = high * cos - low * sin


def scale_values(o: cute.Tensor, operands) -> None:
    """Multiply O (n), which was computed from codes, by the keys' scale, in place."""
    scale = operands.kv_scale[0]
    for i in range(cute.size(o)):
        o[i] = o[i] * scale


def host_and_arguments(config: GatheredConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return gathered_arguments(GatheredAttention, config)
