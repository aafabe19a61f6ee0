"""Both products of a consumer, with codes of keys as A: loaded from shared memory, converted in registers.

Rows of A and numbers along K are numbered so that lanes load whole vectors without bank conflicts. With g = lane / 4
and m = lane % 4 (``common.device.wgmma``), key row g of a warp's 16 stands for the key ``key_of(g)`` of its half unit,
row g + 8 for the one 8 further on. P has both next to each other, at 2 g and 2 g + 1 of the warp's step of 16. In V^T a
warp has 64 neighbouring value columns, and a lane eight of them: rows g and g + 8 of product i are numbers 2 i and
2 i + 1 of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device import tma
from warpspec.common.device.float8 import to_fp16
from warpspec.common.device.wgmma import QUAD, THREAD_ROWS, WARP_ROWS, WARPGROUP_ROWS, settle
from warpspec.common.device.words import interleave, load_shared
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.fmha.heads import BLOCK, MMA_K
from warpspec.latent.gathered.config import PAGE_ROWS
from warpspec.latent.gathered.transposed.config import CONSUMERS, KEY_BYTES, UNIT_KEYS, UNITS

BUFFERS = 2  # of A: one is filled while products read the other
STEPS = BLOCK // MMA_K  # products along a block of 64 columns, or of 64 keys
UNIT_STEPS = UNIT_KEYS // MMA_K  # products along the keys of a unit
STEP_WORDS = 4  # words of A of a thread in a product
LANE_VALUES = 8  # value columns of a lane
LANE_WORDS = LANE_VALUES // WORD_BYTES
LOW_BYTES, HIGH_BYTES = 0x5140, 0x7362  # prmt selectors: bytes of two words in turn
ROWS_APART = 8  # from row g to row g + 8


@dataclass(frozen=True)
class Products:
    """q (MMA, MMA_N, MMA_K), p (.., KEY BLOCK): descriptors. a: registers of A, BUFFERS times (MMA, MMA_M, STEP). s, o:
    fp32 registers; o of each product of 64 value columns."""

    q: cute.Tensor
    p: cute.Tensor
    a: tuple
    s: cute.Tensor
    o: tuple


def make_mma(config) -> cute.TiledMma:
    """A product of 64 rows, with as many columns as the task has rows: A from registers."""
    major, shape = OperandMajorMode.K, (WARPGROUP_ROWS, config.count)
    source = warpgroup.OperandSource.RMEM
    return hopper.make_trivial_tiled_mma(Float16, Float16, major, major, Float32, (1, 1, 1), shape, source)


def products(config, shared) -> Products:
    mma, shape = make_mma(config), (WARPGROUP_ROWS, config.count)

    def descriptors(base, depth, stages):
        layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (*shape, depth), Float16, stages)
        base = base.align(tma.TILE_ALIGNMENT)
        t = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=Float16), layout.outer)
        return mma.make_fragment_B(mma.get_slice(0).partition_B(t))

    def accumulators():
        return cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32)

    return Products(
        descriptors(shared.q, config.heads.qk_room, 1)[None, None, None, 0],
        descriptors(shared.p, BLOCK, CONSUMERS),
        tuple(cute.make_rmem_tensor(mma.partition_shape_A((WARPGROUP_ROWS, BLOCK)), Float16) for _ in range(BUFFERS)),
        accumulators(),
        tuple(accumulators() for _ in range(config.value_tiles)),
    )  # fmt: skip


def words_of(a: cute.Tensor) -> cute.Tensor:
    """(n): the words of A's registers."""
    return cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(cute.size(a))), Uint32)


def key_of(row):
    """Key, of a warp's 16, of its row below 8; row 8 and on are 8 keys further on. Pairs of rows that shared memory
    reads at a time are two keys apart."""
    return (row // QUAD) * QUAD + row % 2 * 2 + row % QUAD // 2


def issue(mma, a, b, d, accumulate) -> None:
    """Issue one product."""
    mma.set(warpgroup.Field.ACCUMULATE, accumulate)
    cute.gemm(mma, d, a, b, d)


@cute.jit
def multiply_queries(role, unit):
    """Compute S^T = K Q^T of the consumer's 64 keys. unit: address of the unit that has the warp's keys. Waits for the
    products."""
    config, mma, product = role.config, role.mma, make_mma(role.config)
    lane, warp = role.thread % WARP_THREADS, role.thread // WARP_THREADS
    g, member = lane // QUAD, lane % QUAD
    key = warp % UNITS * WARP_ROWS + key_of(g)
    row = unit + key * KEY_BYTES + member * VECTOR_BYTES
    raw = load_keys(row, 0)
    for block in cutlass.range_constexpr(config.heads.qk_blocks):
        last = block + 1 == config.heads.qk_blocks
        ahead = None if last else load_keys(row, block + 1)
        a = mma.a[block % BUFFERS]
        words = words_of(a)
        for r in cutlass.range_constexpr(THREAD_ROWS):
            halves = to_fp16([raw[r][i] for i in range(STEPS)], "e4m3")
            for step in cutlass.range_constexpr(STEPS):
                for half in cutlass.range_constexpr(2):
                    words[step * STEP_WORDS + half * THREAD_ROWS + r] = halves[2 * step + half]
        settle(cute.recast_tensor(words, Int32))
        warpgroup.fence()
        for step in cutlass.range_constexpr(STEPS):
            b = mma.q[None, None, block * STEPS + step]
            issue(product, a[None, None, step], b, mma.s, block + step > 0)
        warpgroup.commit_group()
        warpgroup.wait_group(0 if last else 1)
        raw = ahead


def load_keys(row, block: int) -> list:
    """The lane's 16 codes of a block of 64 columns, of both of its keys."""
    return [load_shared(row + r * (ROWS_APART * KEY_BYTES) + block * BLOCK) for r in range(THREAD_ROWS)]


@cute.jit
def add_values(role, use, blocks: cutlass.Constexpr):
    """Add V^T P^T to O^T, of the keys of P's first ``blocks`` blocks (one of each consumer). Their units are number
    ``use`` and those after it; produces their empty. Waits for the products. ``score`` has waited for the units, some
    warp for each, and a barrier of all consumers stands behind it."""
    config, mma = role.config, role.mma
    product = make_mma(config)
    lane, warp = role.thread % WARP_THREADS, role.thread // WARP_THREADS
    g, member = lane // QUAD, lane % QUAD
    column = role.consumer * (config.heads.v // CONSUMERS) + warp * BLOCK + g * LANE_VALUES
    offset = key_of(member) * KEY_BYTES + column
    base = role.unit_at(use) + offset
    raw = load_values(base, 0)
    for step in cutlass.range_constexpr(blocks * STEPS):
        unit, after, ahead = step // UNIT_STEPS, step + 1, None
        if cutlass.const_expr(after < blocks * STEPS):
            if cutlass.const_expr(after % UNIT_STEPS == 0):
                base = role.unit_at(use + after // UNIT_STEPS) + offset
            ahead = load_values(base, after % UNIT_STEPS)
        a = mma.a[step % BUFFERS]
        words = words_of(a)
        for half in cutlass.range_constexpr(2):  # keys 2 m, 2 m + 1 of the step; then those 8 further on
            for word in cutlass.range_constexpr(LANE_WORDS):
                low, high = (raw[half][second][word] for second in range(2))
                pairs = [interleave(low, high, order) for order in (LOW_BYTES, HIGH_BYTES)]
                halves = to_fp16(pairs, "e4m3")  # of four value columns
                for i in cutlass.range_constexpr(WORD_BYTES):
                    value = WORD_BYTES * word + i
                    words[value // 2 * STEP_WORDS + half * THREAD_ROWS + value % 2] = halves[i]
        settle(cute.recast_tensor(words, Int32))
        warpgroup.fence()
        for tile in cutlass.range_constexpr(config.value_tiles):
            b = mma.p[None, None, step % STEPS, step // STEPS]
            issue(product, a[None, None, tile], b, mma.o[tile], True)
        warpgroup.commit_group()
        if cutlass.const_expr(after % UNIT_STEPS == 0):
            cute.arch.fence_view_async_shared()  # orders these reads before TMA's writes
            role.channels["empty"].arrive_warp(use + unit)
        warpgroup.wait_group(1 if after < blocks * STEPS else 0)
        raw = ahead


def load_values(base, within: int) -> list:
    """The lane's eight codes of four keys of a step: [half][which of two neighbours along K]."""
    first = base + within * (WARP_ROWS * KEY_BYTES)
    return [
        [
            load_shared(first + (half * QUAD + second * ROWS_APART) * KEY_BYTES, LANE_WORDS)
            for second in range(2)
        ]
        for half in range(2)
    ]


assert UNIT_KEYS == UNITS * WARP_ROWS and PAGE_ROWS == WARPGROUP_ROWS
