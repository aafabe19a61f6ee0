"""The score warpgroup: S^T = K Q^T of codes as they are, softmax over keys, P^T.

Tensor cores of sm_90a add products of e4m3 to 14 bits or so. Therefore sums of a group of columns are taken out of the
tensor core and added in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device import tma
from warpspec.common.device.warp import thread_anew
from warpspec.common.device.wgmma import THREAD_ROWS, WARPGROUP_ROWS, flat
from warpspec.fmha.device.tiles import only_chunk
from warpspec.latent.gathered.raw.config import FULL, LINE_HEAD, SLOTS, SUM_BUFFERS, SUM_COLUMNS
from warpspec.latent.gathered.raw.query import copy_queries
from warpspec.latent.gathered.raw.record import write_end, write_record
from warpspec.latent.gathered.raw.weights import clear_unseen, hide, leave_sums, weigh
from warpspec.latent.gathered.task import each_task

CODE_K = 32  # numbers along K of one product of codes


@dataclass(frozen=True)
class Scorer:
    """The score warpgroup's state for all tasks. k (MMA, MMA_M, MMA_K, UNIT), q (MMA, MMA_N, MMA_K): descriptors. s:
    S^T. sums: of groups of columns, which take turns. unit: factor of scores."""

    config: object
    channels: dict
    shared: object
    operands: object
    k: cute.Tensor
    q: cute.Tensor
    s: cute.Tensor
    sums: tuple
    unit: Float32

    @property
    def thread(self) -> Int32:
        """Number of the thread in the score warpgroup."""
        return thread_anew() - self.config.value_threads

    def unit_at(self, use):
        """Address of a KV tile's codes."""
        return self.shared.codes.toint() + self.channels["full"].stage(use) * self.config.unit_bytes


def make_code_mma(config) -> cute.TiledMma:
    """A product of 64 keys with the task's rows; codes and Q from shared memory."""
    major, shape = OperandMajorMode.K, (WARPGROUP_ROWS, config.count)
    return hopper.make_trivial_tiled_mma(Float8E4M3FN, Float8E4M3FN, major, major, Float32, (1, 1, 1), shape)


def code_operands(config, shared) -> tuple:
    """(k, q, s, sums) of a ``Scorer``."""
    mma, shape = make_code_mma(config), (WARPGROUP_ROWS, config.count, config.heads.qk_room)

    def tensor_at(base, layout):
        pointer = cute.recast_ptr(base.align(tma.TILE_ALIGNMENT), layout.inner, dtype=Float8E4M3FN)
        return cute.make_tensor(pointer, layout.outer)

    a = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, Float8E4M3FN, config.units)
    b = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, Float8E4M3FN, 1)
    thread = mma.get_slice(0)
    keys = mma.make_fragment_A(thread.partition_A(tensor_at(shared.codes, a)))
    queries = mma.make_fragment_B(thread.partition_B(tensor_at(shared.q, b)))
    count = cute.size(mma.partition_shape_C(shape[:2]))
    found = [cute.make_rmem_tensor(mma.partition_shape_C(shape[:2]), Float32) for _ in range(1 + SUM_BUFFERS)]
    assert count == config.columns * THREAD_ROWS
    return keys, queries[None, None, None, 0], found[0], tuple(found[1:])


@cute.jit
def multiply_codes(role, stage):
    """Compute S^T of a KV tile, which is in the ring's unit ``stage``: one group of columns is added to S^T while the
    tensor core computes the next one. Waits for the products."""
    config, product = role.config, make_code_mma(role.config)
    groups, steps = config.heads.qk_room // SUM_COLUMNS, SUM_COLUMNS // CODE_K
    buffers = len(role.sums)
    for group in cutlass.range_constexpr(groups + buffers):
        if cutlass.const_expr(group > buffers):  # the one that has the next group's buffer
            warpgroup.wait_group(min(buffers - 1, groups + buffers - 1 - group))
            add(flat(role.s), flat(role.sums[group % buffers]))
        if cutlass.const_expr(group < groups):
            sums = role.s if group == 0 else role.sums[group % buffers]
            warpgroup.fence()
            for step in cutlass.range_constexpr(steps):
                product.set(warpgroup.Field.ACCUMULATE, step > 0)
                k = group * steps + step
                cute.gemm(product, sums, role.k[None, None, k, stage], role.q[None, None, k], sums)
            warpgroup.commit_group()


def add(s: cute.Tensor, sums: cute.Tensor) -> None:
    """Add a group's sums (n) to S^T (n)."""
    for i in range(cute.size(s)):
        s[i] = s[i] + sums[i]


@cute.jit
def score(config: cutlass.Constexpr, channels: cutlass.Constexpr, shared, operands, units, unit):
    """Compute scores and P of each of the CTA's tasks. Consumes full, p_empty, task_empty; produces task_full,
    p_full, rows_full. unit: factor of scores."""
    role = Scorer(config, channels, shared, operands, *code_operands(config, shared), unit)
    if cutlass.const_expr(config.scheduler.adds_up):
        number = score_pieces(role, units)
    else:
        _, number = each_task(config, operands, units, score_whole, role, (Int32(0), Int32(0)))
    write_end(role, number)


@cute.jit
def score_pieces(role, units) -> Int32:
    """``each_task`` where work is cut by length: finds the CTA's only chunk, and where it is in it, anew for each task,
    so that nothing of it takes registers. Returns the number of tasks."""
    use, number, head = Int32(0), Int32(0), only_chunk(role.config, role.operands, units).last_head
    more = Boolean(head >= only_chunk(role.config, role.operands, units).first_head)
    while more:
        task = only_chunk(role.config, role.operands, units).tile(head, Int32(0))
        if task.piece.some:
            write_record(role, number, use, task, head)
            use, number = score_task(role, task, (use, number))
            head = role.shared.record[LINE_HEAD, (number - 1) % SLOTS]
        chunk = only_chunk(role.config, role.operands, units)
        head -= chunk.step
        more = Boolean(head >= chunk.first_head)
    return number


@cute.jit
def score_whole(role, task, uses):
    """Write a task's record, and ``score_task``."""
    use, number = uses
    write_record(role, number, use, task, Int32(0))
    return score_task(role, task, uses)


@cute.jit
def score_task(role, task, uses):
    """Compute P of a task's KV tiles, then references and sums of its rows. uses: numbers of KV tiles and of tasks
    before it; returns those after it."""
    use, number = uses
    end, place = use + task.span.count, Int32(0)
    copy_queries(role, task)
    for at in cutlass.range(use, end, unroll=1):
        place = take_step(role, number, at, place)
    leave_sums(role, number, end, place)
    return end, number + 1


@cute.jit
def take_step(role, number, use, place):
    """Compute P of a KV tile of task ``number``, which is number ``use`` of all. place: of the references; returns the
    new one."""
    channels = role.channels
    channels["full"].wait(use)
    stage = channels["full"].stage(use)
    multiply_codes(role, stage)
    here = role.shared.masks[stage] != Uint32(0)
    partial = Boolean(use >= role.shared.record[FULL, number % SLOTS])
    if partial | ~here:
        hide(role, number, use, here)
    channels["p_empty"].wait_previous(use)
    place = weigh(role, use, place)
    if partial:  # QK of all warps is over, as barriers stand in ``weigh``
        clear_unseen(role, number, use)
    channels["p_full"].arrive_warp(use)
    return place
