"""A value warpgroup: O^T = V^T P^T of its half of the value columns, with codes of V converted to fp16 in registers.

Rows of A and numbers along K are numbered as in ``transposed.products``, but for the keys of a step of 16, which lie in
swizzled blocks of 64 columns here.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float16, Float32, Int32
from cutlass.cute.nvgpu import warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device import tma
from warpspec.common.device.float8 import to_fp16
from warpspec.common.device.wgmma import QUAD, THREAD_ROWS, WARP_ROWS, WARPGROUP_ROWS, flat, settle
from warpspec.common.device.words import interleave, load_shared
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.fmha.heads import BLOCK, MMA_K
from warpspec.latent.gathered.config import PAGE_ROWS
from warpspec.latent.gathered.raw.config import P_TURNS, VALUE_GROUPS
from warpspec.latent.gathered.transposed.attend import element, own_columns
from warpspec.latent.gathered.transposed.products import (
    HIGH_BYTES,
    LANE_VALUES,
    LANE_WORDS,
    LOW_BYTES,
    ROWS_APART,
    STEP_WORDS,
    STEPS,
    issue,
    make_mma,
    words_of,
)

CHUNKS = BLOCK // VECTOR_BYTES  # 16-byte chunks of a swizzled row of 64 codes
GROUP = 2  # products that are issued together: those of a word of a lane's codes
COLUMN_BLOCKS = 4  # blocks of 64 value columns of a value warpgroup, one a warp


@dataclass(frozen=True)
class ValueProducts:
    """p (.., TURN): descriptors. a: registers of A, several times (MMA, MMA_M, PRODUCT). o: fp32 registers of each
    product of 64 value columns."""

    p: cute.Tensor
    a: tuple
    o: tuple


@dataclass(frozen=True)
class Valuer:
    """A value warpgroup's state for all tasks. consumer: which of the two it is. thread: 0..127 within it."""

    config: object
    channels: dict
    shared: object
    operands: object
    mma: ValueProducts
    consumer: Int32
    thread: Int32

    def unit_at(self, use):
        """Address of a KV tile's codes."""
        return self.shared.codes.toint() + self.channels["full"].stage(use) * self.config.unit_bytes


def value_products(config, shared) -> ValueProducts:
    mma, shape = make_mma(config), (WARPGROUP_ROWS, config.count)
    of_a = mma.partition_shape_A((WARPGROUP_ROWS, GROUP * MMA_K))
    layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (*shape, PAGE_ROWS), Float16, P_TURNS)
    base = shared.p.align(tma.TILE_ALIGNMENT)
    p = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=Float16), layout.outer)
    return ValueProducts(
        mma.make_fragment_B(mma.get_slice(0).partition_B(p)),
        tuple(cute.make_rmem_tensor(of_a, Float16) for _ in range(config.a_buffers)),
        tuple(cute.make_rmem_tensor(mma.partition_shape_C(shape), Float32) for _ in range(config.value_tiles)),
    )  # fmt: skip


def half_of(g, half):
    """Half of P's 16 keys that has the pair of keys g and g + 8, of ``half`` = g / 4; and the other way round, with the
    lane's number in its quad as g. The quads' lanes 2 and 3 have the halves exchanged, so that the keys that shared
    memory reads at a time lie in different banks."""
    return half ^ (g % QUAD // 2)


def places_of(role) -> list:
    """Offsets of the lane's first codes in a KV tile: [half]. Its blocks of 64 columns follow each other."""
    lane, warp = role.thread % WARP_THREADS, role.thread // WARP_THREADS
    g, member = lane // QUAD, lane % QUAD
    found = []
    for half in range(2):
        key = member + QUAD * half_of(member, half)
        chunk = (g // 2) ^ (key // 2 % CHUNKS)
        block = role.consumer * COLUMN_BLOCKS + warp
        found.append(block * (PAGE_ROWS * BLOCK) + key * BLOCK + chunk * VECTOR_BYTES + g % 2 * LANE_VALUES)
    return found


def load_values(places: list, step: int) -> list:
    """The lane's eight codes of four keys of a step: [half][which of two neighbours along K]."""
    first = step * (WARP_ROWS * BLOCK)
    return [
        [load_shared(place + (first + second * ROWS_APART * BLOCK), LANE_WORDS) for second in range(2)]
        for place in places
    ]


def convert_values(raw: list, word: int, a: cute.Tensor) -> None:
    """Convert a word of each of the lane's codes, from ``load_values``, to A of two products."""
    words = words_of(a)
    for half in range(2):
        low, high = (raw[half][second][word] for second in range(2))
        pairs = [interleave(low, high, order) for order in (LOW_BYTES, HIGH_BYTES)]
        halves = to_fp16(pairs, "e4m3")  # of four value columns
        for i in range(WORD_BYTES):
            words[i // 2 * STEP_WORDS + half * THREAD_ROWS + i % 2] = halves[i]
    settle(cute.recast_tensor(words, Int32))


@cute.jit
def add_tiles(role, count, use):
    """Compute O^T of a task of ``count`` KV tiles. use: number of KV tiles before it."""
    for o in role.mma.o:
        o.fill(0.0)
    for step in cutlass.range(count, unroll=1):
        add_values(role, use + step)


@cute.jit
def add_values(role, use):
    """Add V^T P^T of KV tile number ``use`` to O^T, rescaled before that if references have moved. Consumes p_full;
    produces empty, p_empty."""
    config, mma, channels = role.config, role.mma, role.channels
    product, turn = make_mma(config), use % P_TURNS
    channels["p_full"].wait(use)
    if role.shared.moved[0, turn] == use:
        rescale(role, turn)
    base = role.unit_at(use)
    places = [base + place for place in places_of(role)]
    ahead = load_values(places, 0)
    groups, buffers = STEPS * LANE_WORDS, config.a_buffers
    for group in cutlass.range_constexpr(groups):
        step, word = group // LANE_WORDS, group % LANE_WORDS
        if cutlass.const_expr(word == 0):
            raw = ahead
        if cutlass.const_expr(word + 1 == LANE_WORDS and step + 1 < STEPS):
            ahead = load_values(places, step + 1)
        a = mma.a[group % buffers]
        convert_values(raw, word, a)
        warpgroup.fence()
        for i in cutlass.range_constexpr(GROUP):
            o = mma.o[word * GROUP + i]
            issue(product, a[None, None, i], mma.p[None, None, step, turn], o, True)
        warpgroup.commit_group()
        if cutlass.const_expr(group + 1 == groups):
            cute.arch.fence_view_async_shared()  # orders these reads before TMA's writes
            channels["empty"].arrive_warp(use)
        warpgroup.wait_group(buffers - 1 if group + 1 < groups else 0)
    channels["p_empty"].arrive_warp(use)


@cute.jit
def rescale(role, turn):
    """Multiply O^T by the factors of its columns."""
    columns = own_columns(role)
    for v in cutlass.range_constexpr(role.config.columns):
        factor = role.shared.factors[columns[v], turn]
        for tile in cutlass.range_constexpr(role.config.value_tiles):
            o = flat(role.mma.o[tile])
            for r in cutlass.range_constexpr(THREAD_ROWS):
                o[element(v, r)] = o[element(v, r)] * factor


assert VALUE_GROUPS * COLUMN_BLOCKS * BLOCK == 512
