"""The gathered-attention kernel for sm_100a: storage, role dispatch, softmax over keys that may be missing.

Products, softmax and epilogue are the attention kernel's. A CTA has one task (``task.Task``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32

from warpspec.common.device import tmem
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.fmha.sm100.epilogue import ROW_RESULTS, epilogue
from warpspec.fmha.sm100.mma import fragments, mma
from warpspec.fmha.sm100.softmax_warps import Columns, softmax
from warpspec.latent.gathered.config import ROPE_DIM, Sm100GatheredConfig
from warpspec.latent.gathered.float8 import ROW_FLOAT8
from warpspec.latent.gathered.gather import gather
from warpspec.latent.gathered.host import GatheredHost, gathered_arguments
from warpspec.latent.gathered.task import MASK_BITS, score_numbers, seen_words, start, task_at
from warpspec.latent.gathered.unseen import clear_nan


class GatheredStorage(NamedTuple):
    """Addresses of the shared-memory regions that ``gather`` fills.

    masks: (STAGE WORD) words. raw: bytes of the producer warps' FP8 keys before conversion.
    """

    q: cute.Pointer
    k: cute.Pointer
    masks: cute.Tensor
    raw: cute.Pointer


@dataclass(frozen=True)
class GatheredColumns(Columns):
    """The columns of a task's tiles from the point of view of a softmax thread.

    masks: as in ``GatheredStorage``. operands: ``task.Gathered``. token: the task's token.
    """

    masks: cute.Tensor
    operands: object
    token: Int32

    def hide(self, config, channels, row, step, first_key, scores) -> None:
        """Hide missing keys, as ``Columns.hide`` does, and those that the row's query does not see."""
        channels["k_full"].wait(step)  # the warps that wrote the mask arrived on k_full
        words = config.tile_n // MASK_BITS
        mask = [self.masks[step % config.kv_stages * words + i] for i in range(words)]
        hide_missing(scores, seen_words(mask, row, first_key))

    def clear(self, config, span, first_key, stage) -> None:
        clear_nan(config, span, first_key, self.thread, stage)

    def finish(self, config, row, first, values) -> None:
        """Rotate the row's last columns back, and scale O if keys are codes; called like ``Columns.finish``."""
        size = cute.size(values)
        if config.gathers.has_kv_scale:
            scale = self.operands.kv_scale[0]
            for i in range(size):
                values[i] = values[i] * scale
        if config.gathers.rotate_back and first + size == config.o_columns:
            last = cute.local_tile(values, (ROPE_DIM,), (size // ROPE_DIM - 1,))
            turn_back(config, row, last, self.operands, self.token)


@cute.jit
def hide_missing(scores: cute.Tensor, words: cutlass.Constexpr):
    """Set scores (KEY) of keys whose mask bit is 0 to -inf. words: (key / 32), the tile's mask."""
    every = words[0]
    for word in words[1:]:
        every = every & word
    if every != Uint32(0xFFFFFFFF):
        for i in cutlass.range_constexpr(cute.size(scores)):
            bit = (words[i // MASK_BITS] >> (i % MASK_BITS)) & Uint32(1)
            scores[i] = Float32(cutlass.select_(Boolean(bit == 0), -Float32.inf, scores[i]))


@cute.jit
def turn_back(config: cutlass.Constexpr, row, values: cute.Tensor, operands, token):
    """Rotate a row's last ROPE_DIM columns back by the query's position; NaN for a position beyond the table."""
    if row.member == config.column_groups - 1:
        position = Int32(operands.positions[token])
        table = operands.cos_sin
        inside = Boolean(position >= 0) & Boolean(position < table.shape[0])
        for pair in cutlass.range_constexpr(ROPE_DIM // 2):
            cos, sin = Float32.nan, Float32.nan
            if inside:
                cos, sin = table[position, pair], table[position, ROPE_DIM // 2 + pair]
            low, high = values[2 * pair], values[2 * pair + 1]
            values[2 * pair] = low * cos + high * sin
            values[2 * pair + 1] = high * cos - low * sin


class GatheredAttention(GatheredHost):
    """The kernel of one ``Sm100GatheredConfig``."""

    @cute.kernel
    def kernel(self, operands, atom, coordinates, units, numbers):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        tmem.allocate(warp, config.tmem_allocation, storage.tmem_address.data_ptr())
        units = start(config, storage, operands, units, atom, warp)
        columns = tmem.base(storage.tmem_address.data_ptr())

        masks = storage.masks.get_tensor(cute.make_layout(config.gathers.mask_words(config.kv_stages)))
        shared = GatheredStorage(storage.q.data_ptr(), storage.k.data_ptr(), masks, storage.raw.data_ptr())
        if warp < len(config.softmax_warps):
            cute.arch.setmaxregister_increase(config.softmax_registers)
            task = task_at(config, operands, units, cute.arch.block_idx()[0])
            places = GatheredColumns(
                thread=thread,
                s=columns + config.tmem_s,
                p=cute.recast_ptr(columns + config.tmem_p, dtype=Int32),
                o=columns + config.tmem_o,
                p_smem=storage.p.data_ptr(),
                v_smem=shared.k,
                bias=None,
                use=0,
                masks=masks,
                operands=operands,
                token=task.token,
            )
            row = task.row(config.row_of(thread), config.column_group_of(thread))
            scaled = score_numbers(config, operands, numbers)  # reads memory, so after the wait
            state = softmax(config, channels, row, task.span, places, scaled, BFloat16)
            results = ROW_FLOAT8 if cutlass.const_expr(config.gathers.float8) else ROW_RESULTS
            place = task.place(row.index)
            epilogue(config, channels, row, place, task, state, places, operands, scaled, results)
            cute.arch.barrier(barrier_id=1, number_of_threads=config.softmax_threads)
            tmem.free(warp, columns, config.tmem_allocation)
        elif warp < config.mma_warp:
            cute.arch.setmaxregister_increase(config.producer_registers)
            gather(config, channels, shared, operands, units, atom, coordinates)
        else:
            cute.arch.setmaxregister_decrease(config.other_registers)
            if warp == config.mma_warp:
                task = task_at(config, operands, units, cute.arch.block_idx()[0])
                bases = (shared.q, shared.k, shared.k, storage.p.data_ptr())
                mma(config, channels, fragments(config, BFloat16, *bases, columns), task.span, BFloat16)


def host_and_arguments(config: Sm100GatheredConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return gathered_arguments(GatheredAttention, config)
