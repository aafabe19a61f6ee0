"""The kernel with keys as rows of the products: storage, role dispatch, a consumer's tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from warpspec.common.device import tma
from warpspec.common.device.pipeline import init_barriers
from warpspec.common.device.storage import allocate
from warpspec.common.device.wgmma import flat
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.latent.gathered.host import GatheredHost, gathered_arguments
from warpspec.latent.gathered.task import each_task, start
from warpspec.latent.gathered.transposed.attend import attend
from warpspec.latent.gathered.transposed.config import CONSUMERS, FLAGS, UNITS, TransposedConfig
from warpspec.latent.gathered.transposed.load import box_of, load, pages_view
from warpspec.latent.gathered.transposed.maxima import NO_REFERENCE
from warpspec.latent.gathered.transposed.pieces import end_piece
from warpspec.latent.gathered.transposed.products import Products, products
from warpspec.latent.gathered.transposed.query import load_queries, prepare_queries
from warpspec.latent.gathered.transposed.results import add_sums, write_results


class TransposedStorage(NamedTuple):
    """Shared-memory regions, as ``TransposedConfig.regions_of`` lists them. q, p, codes: pointers. masks (UNIT),
    factors, maxima (ROW), references (ROW, PLACE), flags (1, FLAG), sums (ROW, WARP)."""

    q: cute.Pointer
    p: cute.Pointer
    codes: cute.Pointer
    masks: cute.Tensor
    factors: cute.Tensor
    maxima: cute.Tensor
    references: cute.Tensor
    flags: cute.Tensor
    sums: cute.Tensor


@dataclass(frozen=True)
class Consumer:
    """A consumer's state for all of its tasks.

    consumer: which of the two it is. In S^T it has the step's keys 64 * consumer and on; in O^T the value columns
    256 * consumer and on. thread: 0..127 within it; number: among the threads of both. key_scale: scale of all keys.
    """

    config: object
    channels: dict
    shared: TransposedStorage
    operands: object
    numbers: object
    mma: Products
    consumer: Int32
    thread: Int32
    number: Int32
    key_scale: Float32

    def unit_at(self, use):
        """Address of a unit of codes."""
        return self.shared.codes.toint() + self.channels["full"].stage(use) * self.config.unit_bytes


class TransposedAttention(GatheredHost):
    """The kernel of one ``TransposedConfig``."""

    def load_of(self, operands):
        pool = pages_view(self.config, operands.sets[0].pool)
        return tma.make_load(pool, box_of(self.config), swizzled=False)

    @cute.kernel
    def kernel(self, operands, atom, coordinates, units, numbers):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = allocate(config.smem_regions)
        channels = init_barriers(config.barriers, storage.barriers.data_ptr())
        units = start(config, storage, operands, units, atom, warp)
        shared = TransposedStorage(
            storage.q.data_ptr(),
            storage.p.data_ptr(),
            storage.codes.data_ptr(),
            storage.masks.get_tensor(cute.make_layout(config.units)),
            storage.factors.get_tensor(cute.make_layout(config.count)),
            storage.maxima.get_tensor(cute.make_layout(config.count)),
            storage.references.get_tensor(cute.make_layout((config.count, 2))),
            storage.flags.get_tensor(cute.make_layout((1, FLAGS))),
            storage.sums.get_tensor(cute.make_layout((config.count, config.consumer_warps))),
        )
        if warp >= config.load_warp:
            cute.arch.setmaxregister_decrease(config.shape.producer_registers)
            if warp == config.load_warp:
                load(config, channels, shared, operands, units, atom, coordinates)
        else:
            cute.arch.setmaxregister_increase(config.shape.consumer_registers)
            consume(config, channels, shared, operands, units, numbers, thread)


@cute.jit
def consume(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, operands, units, numbers, number):
    """Compute the rows of each of the CTA's tasks; both consumers run this code. number: of the thread, among those of
    both. Consumes full, p_empty; produces empty, p_empty."""
    mma = products(config, shared)
    consumer = cute.arch.make_warp_uniform(number // WARPGROUP_THREADS)
    thread = number % WARPGROUP_THREADS
    scale = Float32(operands.kv_scale[0])  # nobody waits for it before the task's lengths are loaded, too
    role = Consumer(config, channels, shared, operands, numbers, mma, consumer, thread, number, scale)
    each_task(config, operands, units, consume_task, role, (Int32(0), Int32(0)))


@cute.jit
def consume_task(role, task, uses):
    """Compute a task, and write its results or leave its state. uses: numbers of units and of steps before it; returns
    those after it."""
    use, step_use = uses
    columns, count = role.config.columns, task.span.count
    state = ((Float32(NO_REFERENCE),) * columns, (Float32(0.0),) * columns)
    found = load_queries(role, task)
    if count > 0:
        prepare_queries(role, found)
        state = add_sums(role, attend(role, task, use, step_use))
    elif cutlass.const_expr(role.config.scheduler.reads_cuts):  # a piece of a task that has become shorter
        for tile in cutlass.range_constexpr(role.config.value_tiles):
            flat(role.mma.o[tile]).fill(0.0)
    if cutlass.const_expr(role.config.scheduler.adds_up):
        end_piece(role, task, state)
    else:
        write_results(role, task, state)
    return use + count * UNITS, step_use + (count + 1) // CONSUMERS


def host_and_arguments(config: TransposedConfig) -> tuple:
    """The host function of a configuration and its arguments without the stream."""
    return gathered_arguments(TransposedAttention, config)
