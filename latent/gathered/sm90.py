"""The gathered-attention kernel for sm_90a: storage, role dispatch, consumers."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

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
from warpspec.fmha.device.record import Record, records_of
from warpspec.fmha.sm90.config import SCORED_BARRIER
from warpspec.fmha.sm90.consumer import ConsumerTile, Products, clear_unseen, products
from warpspec.fmha.sm90.epilogue import ROW_RESULTS, epilogue
from warpspec.fmha.sm90.fragment import thread_rows
from warpspec.fmha.sm90.narrow import NARROW_BARRIER, narrow_row
from warpspec.fmha.sm90.pair import Pair, attend_either, attend_paired, own_stage, products_of_both
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.latent.gathered.cluster import share_keys
from warpspec.latent.gathered.config import ROPE_DIM, TASK_STAGES, GatheredConfig
from warpspec.latent.gathered.float8 import PAIR_FLOAT8
from warpspec.latent.gathered.gather import gather
from warpspec.latent.gathered.host import GatheredHost, gathered_arguments
from warpspec.latent.gathered.task import MASK_BITS, each_task, score_numbers, seen_words, start
from warpspec.latent.gathered.unseen import clear_nan

ALL_KEYS = 0xFFFFFFFF  # a word of a mask without missing keys


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

    def read_missing(self, step) -> tuple:
        """The words of the tile's mask, and whether any key is missing or some row does not see it."""
        tile, count = self.span.tile(step), self.config.tile_n // MASK_BITS
        first = (self.use + step) % self.config.kv_stages * count
        mask = tuple(self.masks[first + i] for i in range(count))
        some = Boolean(reduce(operator.and_, mask) != Uint32(ALL_KEYS))
        if self.config.clears_unseen:
            some = some | self.span.has_unseen(tile, self.config.tile_n)
        return mask, some

    def hide_both(self, step, seen: tuple) -> None:
        hide_missing(self, step, *seen)

    def value_scale(self, operands) -> Float32 | None:
        """The scale of all keys, if they have one, except in means: O is computed from codes."""
        scales = self.config.gathers.has_kv_scale and not self.config.output.means
        return operands.kv_scale[0] if scales else None

    def clear(self, first_key, stage) -> None:
        clear_nan(self.config, self.span, first_key, self.thread, stage)


@cute.jit
def hide_missing(work, step, mask: cutlass.Constexpr, some):
    """Set the scores of the thread's rows to -inf at keys of the KV tile of visit ``step`` that a row does not see:
    those whose bit in the tile's mask is 0, and, if rows differ in that, those past a row's end. NaN in the latter is
    cleared in V, too. One branch leaves nearly all tiles out, and stands in front of all else, so that nothing parts
    the exponentials from each other or from the stores of P."""
    config, scores = work.config, flat(work.mma.s)
    first_key = work.span.tile(step) * config.tile_n
    if some:
        for r, row in enumerate(work.rows):
            words = seen_words(mask, row, first_key)
            # Bit 0 is the key of the thread's element 0.
            own = [word >> Uint32(PAIR * row.member) for word in words]
            for i in elements(scores, r):
                bit = (own[column(i) // MASK_BITS] >> (column(i) % MASK_BITS)) & Uint32(1)
                scores[i] = Float32(cutlass.select_(Boolean(bit == 0), -Float32.inf, scores[i]))
        if cutlass.const_expr(config.clears_unseen):
            cute.arch.barrier(  # QK of all warps has read the keys
                barrier_id=SCORED_BARRIER + work.column_group, number_of_threads=WARPGROUP_THREADS
            )
            clear_unseen(work, step, first_key)


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
        tasks = None
        if cutlass.const_expr(config.scheduler.has_warp):
            tasks = records_of(config, storage.records.data_ptr(), units, operands)
        units = start(config, storage, operands, units, atom, warp, channels, tasks)
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
        tasks = units if tasks is None else tasks
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.shape.producer_registers)
            gather(config, channels, shared, operands, units, atom, coordinates, tasks)
        else:
            cute.arch.setmaxregister_increase(config.shape.consumer_registers)
            consumer = warp // (WARPGROUP_THREADS // WARP_THREADS)
            if cutlass.const_expr(config.shares_end):
                consume(config, channels, shared, operands, tasks, numbers, thread, consumer)
            else:
                for each in cutlass.range_constexpr(config.consumers):
                    if consumer == each:
                        consume(config, channels, shared, operands, tasks, numbers, thread, each)


@cute.jit
def consume(
    config: cutlass.Constexpr,
    channels: cutlass.Constexpr,
    shared,
    operands,
    tasks,
    numbers,
    thread,
    column_group,
):
    """One consumer: half of O's columns for each of the CTA's tasks. column_group: which half, a compile-time constant
    unless ``config.shares_end``. Consumes q_full and what ``pair.attend_paired`` consumes; produces what
    ``attend_paired`` produces."""
    thread = thread % WARPGROUP_THREADS
    operand_bases = (shared.q.align(tma.TILE_ALIGNMENT), shared.k, shared.v)
    if cutlass.const_expr(config.shares_end):
        mma = products_of_both(config, *operand_bases)
    else:
        mma = products(config, *operand_bases, column_group)
    numbers = score_numbers(config, operands, numbers)
    role = Consumer(config, channels, shared, operands, tasks, numbers, mma, column_group, thread)
    uses = (Int32(0), Int32(0), Int32(0))
    if cutlass.const_expr(config.shares_end):
        uses = (*uses, Int32(column_group), Int32(thread))
    each_task(config, operands, tasks, consume_task, role, uses, config.rereads)


@dataclass(frozen=True)
class Consumer:
    """A consumer's state for all of its tasks. tasks: how they are found. column_group: which of the two it is. thread:
    0..127 within it. mma, column_group and thread are what they are in ``fmha.sm90.kernel.Consumer`` if consumers share
    the code of a task's end."""

    config: object
    channels: dict
    shared: GatheredStorage
    operands: object
    tasks: object
    numbers: object
    mma: Products | tuple
    column_group: Int32 | int
    thread: Int32


@cute.jit
def consume_task(role, task, uses):
    """One task of a consumer. uses: (KV tiles, tasks with keys, tasks) that came before; returns the counts after. If
    consumers share the code of a task's end, the column group and the thread follow."""
    config, channels, shared, operands = role.config, role.channels, role.shared, role.operands
    use, task_use, number, *carried = uses
    if cutlass.const_expr(config.shares_end):
        role = replace(role, column_group=carried[0], thread=carried[1])
    column_group, thread = role.column_group, role.thread
    rows = thread_rows(config, task, 0, thread)
    count = task.span.count
    if count > 0:
        channels["q_full"].wait(task_use)
    row_factors = None
    if cutlass.const_expr(config.narrows_q):
        row_factors = narrow_rows(config, shared, task_use, count, column_group, thread)
    record = Record(role.tasks, number) if cutlass.const_expr(config.rereads) else None
    work = GatheredTile(
        config, channels, role.mma, task, rows, None, column_group, 0, column_group, thread, use, task_use,
        role.numbers, shared, row_factors, record, shared.masks,
    )  # fmt: skip
    if cutlass.const_expr(config.shares_end):
        state, work = attend_either(work, role.mma, task_use)
        carried = (work.column_group, work.thread)
    else:
        state = attend_paired(Pair(work, shared, task_use))
    state, work, o = work.in_units(state), work.again(), flat(work.mma.o)
    if cutlass.const_expr(config.gathers.rotate_back and column_group == config.column_groups - 1):
        turn_back(config, o, work.rows[0].member, operands, work.tile.token)
    stage, results = None, ROW_RESULTS
    if cutlass.const_expr(config.gathers.float8):
        results = PAIR_FLOAT8
    elif cutlass.const_expr(config.output.normalize and not (config.p_in_keys or config.scheduler.adds_up)):
        stage = own_stage(config, shared, column_group)  # every P has been read by now
    epilogue(work, state, operands, stage, results)
    if count > 0:
        task_use += 1
    return use + count, task_use, number + 1, *carried


@cute.jit
def narrow_rows(config: cutlass.Constexpr, shared, task_use, count, column_group, thread) -> tuple:
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


def host_and_arguments(config: GatheredConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return gathered_arguments(GatheredAttention, config)
