"""The kernel that multiplies codes of Q and K as they are: storage, role dispatch, tasks of the value warpgroups."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.latent.gathered.host import GatheredHost, gathered_arguments
from warpspec.latent.gathered.raw.config import (
    COUNT,
    FLAGS,
    P_TURNS,
    RECORD_WORDS,
    ROW_NUMBERS,
    SHORTFALL,
    SLOTS,
    VALUE_GROUPS,
    RawConfig,
)
from warpspec.latent.gathered.raw.load import box_of, load, pages_view
from warpspec.latent.gathered.raw.record import TaskRecord
from warpspec.latent.gathered.raw.results import end_task
from warpspec.latent.gathered.raw.scores import score
from warpspec.latent.gathered.raw.values import Valuer, add_tiles, value_products
from warpspec.latent.gathered.task import score_numbers, start


class RawStorage(NamedTuple):
    """Shared-memory regions, as ``RawConfig.regions_of`` lists them. q, p, codes: pointers. masks (UNIT), maxima (ROW),
    references (ROW, PLACE), flags (1, FLAG), moved (1, TURN), factors (ROW, TURN), weights (COLUMN, THREAD,
    VECTOR, TURN), sums (ROW, WARP), record (WORD, SLOT), rows (ROW, NUMBER,
    SLOT), share (1, VALUE GROUP)."""

    q: cute.Pointer
    p: cute.Pointer
    codes: cute.Pointer
    masks: cute.Tensor
    maxima: cute.Tensor
    references: cute.Tensor
    flags: cute.Tensor
    moved: cute.Tensor
    factors: cute.Tensor
    weights: cute.Tensor
    sums: cute.Tensor
    record: cute.Tensor
    rows: cute.Tensor
    share: cute.Tensor

    @classmethod
    def of(cls, config, storage) -> RawStorage:
        rows, vector = config.count, config.sums_vector
        layouts = {
            "masks": config.units, "maxima": rows, "references": (rows, 2), "flags": (1, FLAGS),
            "moved": (1, P_TURNS), "factors": (rows, P_TURNS), "sums": (rows, WARPGROUP_THREADS // WARP_THREADS),
            "record": (RECORD_WORDS, SLOTS), "rows": (rows, ROW_NUMBERS, SLOTS), "share": (1, VALUE_GROUPS),
            "weights": (vector, WARPGROUP_THREADS, config.columns // vector, P_TURNS),
        }  # fmt: skip
        pointers = {name: getattr(storage, name).data_ptr() for name in ("q", "p", "codes")}
        tensors = {
            name: getattr(storage, name).get_tensor(cute.make_layout(shape))
            for name, shape in layouts.items()
        }
        return cls(**pointers, **tensors)


class RawAttention(GatheredHost):
    """The kernel of one ``RawConfig``."""

    def load_of(self, operands):
        return tma.make_load(pages_view(self.config, operands.sets[0].pool), box_of(self.config))

    @cute.kernel
    def kernel(self, operands, atom, coordinates, units, numbers):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        shared = RawStorage.of(config, storage)
        if thread < P_TURNS:
            shared.moved[0, thread] = Int32(-1)
        units = start(config, storage, operands, units, atom, warp)
        score_registers, value_registers, load_registers = config.registers
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(load_registers)
            if warp == config.load_warp:
                load(config, channels, shared, operands, units, atom, coordinates)
        elif warp >= config.score_warp:
            if cutlass.const_expr(score_registers > 128):
                cute.arch.setmaxregister_increase(score_registers)
            else:
                cute.arch.setmaxregister_decrease(score_registers)
            unit = score_numbers(config, operands, numbers).factor * Float32(1 + SHORTFALL)
            score(config, channels, shared, operands, units, unit)
        else:
            cute.arch.setmaxregister_increase(value_registers)
            evaluate(config, channels, shared, operands, thread)


@cute.jit
def evaluate(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, operands, number):
    """Compute O of each of the CTA's tasks; both value warpgroups run this code. number: of the thread, among those of
    both. Consumes task_full, p_full, rows_full; produces empty, p_empty, task_empty."""
    consumer = cute.arch.make_warp_uniform(number // WARPGROUP_THREADS)
    mma = value_products(config, shared)
    role = Valuer(config, channels, shared, operands, mma, consumer, number % WARPGROUP_THREADS)
    use, task, more = Int32(0), Int32(0), Boolean(True)
    while more:
        channels["task_full"].wait(task)
        count = shared.record[COUNT, task % SLOTS]
        more = count >= 0
        if more:
            add_tiles(role, count, use)
            use = use + count
            channels["rows_full"].wait(task)
            end_task(role, TaskRecord.read(config, shared, task % SLOTS), task)
            channels["task_empty"].arrive_warp(task)
        task = task + 1


def host_and_arguments(config: RawConfig) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    return gathered_arguments(RawAttention, config)
