"""Two consumers for the same 64 query rows, when a row of O is too long for one: each has half of O's columns.

They take turns at the KV tiles. The tile's consumer computes S and P of all its keys, keeps P in registers for its own
half of O, and hands P and what it did to the running maximum to the other through shared memory: so the tensor core
computes every S once. Only two KV tiles fit, one of each consumer. So a tile is released in halves, each
by the consumer whose columns of V it holds, after its PV (QK was over before). QK begins with the half that this
consumer released itself, which is back first; the other half waits for the other consumer's PV. PV of the other's tile,
which that tile's buffer waits for, goes into the middle of QK.

    tile j's consumer   QK(j) half   PV(j-1)   QK(j) half   softmax(j) -> P    PV(j)       QK(j+2) half
    the other           PV(j-1)                QK(j+1) half                    PV(j)       QK(j+1) half   softmax(j+1)

Where K and V are two tensors (``config.in_groups`` is False), a K tile is its consumer's alone and released after QK, a
V tile is released by both, and each has a load warp of its own. QK waits for no PV then, and is issued before that of
the other's tile, which runs under the softmax. Both consumers sum up S in one order: which of them begins a tile
depends on the KV tiles that the CTA had before, and a tile from a queue must not depend on its CTA:

    tile j's consumer   QK(j)    PV(j-1), softmax(j) -> P    PV(j)     QK(j+2)
    the other           PV(j-1)  QK(j+1)                     PV(j), softmax(j+1) -> P    PV(j+1)

If consumers mostly wait for tiles (``config.pv_first``), PV of the other's tile goes before QK instead. It runs while
the next tile is being filled, and its buffer is released before QK waits for that: whoever fills it can go on.

Where ``config.lags_if_light``, each consumer tells its sums of the tiles before with P, and works out from both how far
references may lag. A state then has that lag in the place of maxima, and sums of whole rows, of P in bf16.

Which half comes first is fixed when the kernel is compiled, once for either consumer: chosen at run time, the
descriptors of every wgmma would have to be computed, and registers spill. The end of a tile needs no such copies
(``config.shares_end``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device import tma
from warpspec.common.device.wgmma import settle
from warpspec.common.hardware import WARPGROUP_THREADS
from warpspec.fmha.device.softmax import lag_of_light
from warpspec.fmha.heads import BLOCK, MMA_K
from warpspec.fmha.sm90 import softmax
from warpspec.fmha.sm90.config import SCORED_BARRIER, STATISTICS, SUMS_BARRIER, WEIGHT_STAGES
from warpspec.fmha.sm90.consumer import (
    ONE_WARPGROUP,
    ConsumerTile,
    flat,
    keep_weights,
    make_qk,
    multiply,
    products,
    rescale,
    unmasked_steps,
    weigh,
)
from warpspec.fmha.sm90.fragment import THREAD_ROWS, thread_of
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.fmha.sm90.staging import store_words
from warpspec.fmha.tiles import ELEMENT_BYTES

DEPTH_HALVES = 2  # of QK's depth D, with PV between them
TURNS = 2  # tiles after which it is a consumer's turn again


@dataclass(frozen=True)
class Pair:
    """One of two paired consumers' state for a tile. shared: ``kernel.Buffers``. tile_use: tiles with keys that this
    CTA has finished before."""

    work: ConsumerTile
    shared: tuple
    tile_use: Int32

    @property
    def config(self):
        return self.work.config

    @property
    def column_group(self) -> int:
        """Which of the two this consumer is, and which columns of O it has."""
        return self.work.column_group

    @property
    def own_p(self) -> Int32:
        """Where this consumer's P goes: the address of its stage."""
        return own_stage(self.config, self.shared, self.column_group)

    def use(self, step):
        """Ring use count of the KV tile of this step."""
        return self.work.use + step

    def issue_qk(self, step, depth_half: int) -> None:
        """Issue S of the KV tile of visit ``step`` over one half of D, as its subtiles arrive; one group. depth_half:
        0, the columns that this consumer releases, if it releases a half; 1, the others."""
        config, mma = self.config, self.work.mma
        tiled_mma = make_qk(config, mma.p.element_type)
        use = self.use(step)
        k = mma.k[None, None, None, use % config.kv_stages]
        half = config.heads.v_room // MMA_K // DEPTH_HALVES  # instructions over half of V's columns
        first = self.column_group if config.in_groups else 0
        begin = (first if depth_half == 0 else 1 - first) * half
        blocks = list(range(begin, begin + half))
        if depth_half > 0:  # and over the columns that are not V's
            blocks += range(DEPTH_HALVES * half, config.heads.qk_steps)
        # The first subtile's mbarrier, and the phase of all of them: computed once, not for each.
        full = self.work.channels["k_full"].base + use % config.kv_stages * config.subtiles
        phase = use // config.kv_stages % 2
        subtile = None
        warpgroup.fence()
        for block in blocks:
            if config.subtile_of(block, self.column_group) != subtile:
                subtile = config.subtile_of(block, self.column_group)
                cute.arch.mbarrier_wait(full + subtile, phase)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, depth_half > 0 or block != begin)
            cute.gemm(tiled_mma, mma.s, mma.q[None, None, block, 0], k[None, None, block], mma.s)
        warpgroup.commit_group()

    def issue_others_pv(self, step) -> None:
        """Issue O += P V for the other's tile, P from shared memory."""
        config, mma = self.config, self.work.mma
        dtype, keys = mma.p.element_type, config.tile_n
        k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN
        shape = (WARPGROUP_ROWS, config.o_columns)
        tiled_mma = hopper.make_trivial_tiled_mma(
            dtype, dtype, k_major, n_major, Float32, ONE_WARPGROUP, shape
        )
        layout = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (*shape, BLOCK), dtype, 1)
        base = self.shared.p.align(tma.TILE_ALIGNMENT)
        p = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)[None, None, 0]
        stages = cute.make_layout(WEIGHT_STAGES, stride=config.p_stage_bytes // ELEMENT_BYTES)
        p = cute.make_tensor(p.iterator, cute.append(p.layout, stages))
        p = tiled_mma.make_fragment_A(tiled_mma.get_slice(0).partition_A(p))
        use = self.use(step)
        v = mma.v[None, None, None, use % config.kv_stages]
        self.await_values(step)
        p = p[None, None, None, use % WEIGHT_STAGES]
        multiply(tiled_mma, mma.o, p, v, True, count=keys // MMA_K)

    def await_values(self, step) -> None:
        """Wait for V, if it is not in the tile's keys."""
        if not self.config.in_groups:
            self.work.v_full.wait(self.use(step))

    def release_keys(self, step) -> None:
        """QK of this consumer's tile is over: release its keys, if V is not in them."""
        if not self.config.in_groups:
            self.work.channels["k_empty"].arrive_warp(self.use(step))

    def release(self, step) -> None:
        """Release this consumer's column group of the tile: its PV has read them, and QK before it."""
        if self.config.in_groups:
            self.work.channels["k_empty"].arrive_warp(
                self.use(step) * self.config.kv_groups + self.column_group
            )
        else:
            self.work.v_empty.arrive_warp(self.use(step))

    def release_other(self, step) -> None:
        """Release the other consumer's tile, and its P."""
        self.release(step)
        if cutlass.const_expr(not self.config.p_in_keys):
            self.work.channels["p_empty"].arrive_warp(self.use(step))

    def statistics(self, step) -> cute.Tensor:
        """(NUMBER, ROW): the numbers stored with P of a tile: reference, maximum, factor. If ``config.lags_if_light``,
        the sum of the consumer's tiles before takes the place of the maximum."""
        stage = self.shared.statistics + self.use(step) % WEIGHT_STAGES * (STATISTICS * WARPGROUP_ROWS)
        return cute.make_tensor(stage, cute.make_layout((STATISTICS, WARPGROUP_ROWS)))


def own_stage(config, shared, column_group: int) -> Int32:
    """The address of a consumer's stage of P: the other's P is in the other stage, for consumers and stages take turns
    alike."""
    return (shared.p + column_group * config.p_stage_bytes).toint()


@cute.jit
def attend_paired(pair):
    """Compute this consumer's columns of O, in ``work.mma.o``, and the row statistics of one tile, like
    ``consumer.attend``.

    Consumes: k_full subtile by subtile, p_full. Produces: p_full, p_empty, k_empty, q_empty, one arrival per warp.
    """
    work, config = pair.work, pair.config
    span = work.tile.span
    work.mma.o.fill(0.0)
    state = ((-Float32.inf,) * THREAD_ROWS, (-Float32.inf,) * THREAD_ROWS, (Float32(0.0),) * THREAD_ROWS)
    first = (work.use + pair.column_group) % TURNS  # own tiles: first, first + TURNS, ...
    if (first == 1) & (span.count == 1):
        release_q(work, 0)  # without QK
    if (first == 0) & (span.count > 0):
        for depth_half in cutlass.range_constexpr(DEPTH_HALVES):
            pair.issue_qk(0, depth_half)
        seen = work.read_missing(0)
        warpgroup.wait_group(0)
        pair.release_keys(0)
        release_q(work, 0)
        state = weigh_and_add(pair, 0, state, True, seen)
    whole, partial = unmasked_steps(config, span)
    start = TURNS - first  # own tiles with something before them: 2, 4, ... or 1, 3, ...
    masked, unmasked, total = (own_below(at, start) for at in (whole, partial, span.count))
    own_turn = turn if cutlass.const_expr(config.in_groups) else turn_apart
    for i in cutlass.range(masked, unroll=1):
        state = own_turn(pair, start + TURNS * i, state, True)
    if cutlass.const_expr(not config.mask.sparse):
        for i in cutlass.range(masked, unmasked, unroll=1):
            state = own_turn(pair, start + TURNS * i, state, False)
    if cutlass.const_expr(config.masks_last):
        for i in cutlass.range(unmasked, total, unroll=1):
            state = own_turn(pair, start + TURNS * i, state, True)
    if span.count > 0:
        state = finish(pair, state)
    return state


def products_of_both(config, q_base, k_base, v_base) -> tuple:
    """``consumer.products`` of either consumer, in the same registers."""
    first, other = (
        products(config, q_base, k_base, v_base, column_group) for column_group in range(config.column_groups)
    )
    return first, other._replace(s=first.s, p=first.p, o=first.o)


@cute.jit
def attend_either(work, both: cutlass.Constexpr, tile_use):
    """``attend_paired`` where the consumer's number, ``work.column_group``, is known at run time: by own code. both:
    ``products_of_both``. Returns the state and, for the end of the tile, ``work`` of the consumer.

    The number and the thread that it has then are made anew, so that they take no registers during KV tiles.
    """
    config, column_group, thread = work.config, Int32(0), thread_of(work.rows[0])
    told = cute.make_rmem_tensor((STATISTICS, THREAD_ROWS), Float32)
    # Behind two branches, the compiler would keep what the tile before left in these registers.
    both[0].o.fill(0.0)
    told.fill(0.0)
    for each in cutlass.range_constexpr(config.consumers):
        if work.column_group == each:
            own = replace(work, mma=both[each], consumer=each, column_group=each, thread=thread)
            state = attend_paired(Pair(own, work.shared, tile_use))
            column_group = Int32(each)
            for number in cutlass.range_constexpr(STATISTICS):
                for r in cutlass.range_constexpr(THREAD_ROWS):
                    told[number, r] = state[number][r]
    state = tuple(tuple(told[number, r] for r in range(THREAD_ROWS)) for number in range(STATISTICS))
    return state, replace(work, mma=both[0], consumer=column_group, column_group=column_group, thread=thread)


@cute.jit
def release_q(work, step):
    """QK of the KV tile of visit ``step`` is over: if it was this consumer's last, release Q for the next rows."""
    if step >= work.span.count - TURNS:
        work.channels["q_empty"].arrive_warp(work.q_use)


def own_below(at, start):
    """How many of the tiles start, start + TURNS, ... lie below ``at``."""
    return cutlass.max(at - start + TURNS - 1, 0) // TURNS


@cute.jit
def turn(pair, step, state, masked: cutlass.Constexpr):
    """The KV tile of visit ``step``, which is this consumer's, with PV of the other's tile before it."""
    if cutlass.const_expr(pair.config.pv_first):
        state = follow(pair, step - 1, state)
        if cutlass.const_expr(pair.config.qk_at_once):
            pair.issue_qk(step, 0)
            warpgroup.wait_group(1)  # PV; QK goes on
            pair.release_other(step - 1)
            pair.issue_qk(step, 1)
        else:
            warpgroup.wait_group(0)
            pair.release_other(step - 1)
            for depth_half in cutlass.range_constexpr(DEPTH_HALVES):
                pair.issue_qk(step, depth_half)
    else:
        pair.issue_qk(step, 0)
        state = follow(pair, step - 1, state)
        pair.issue_qk(step, 1)
        warpgroup.wait_group(1)  # PV; QK goes on
        pair.release_other(step - 1)
    seen = pair.work.read_missing(step)
    warpgroup.wait_group(0)
    pair.release_keys(step)
    release_q(pair.work, step)
    return weigh_and_add(pair, step, state, masked, seen)


@cute.jit
def turn_apart(pair, step, state, masked: cutlass.Constexpr):
    """Like ``turn``, where K and V are two tensors: QK waits for K only, and PV of the other's tile runs under the
    softmax."""
    for depth_half in cutlass.range_constexpr(DEPTH_HALVES):
        pair.issue_qk(step, depth_half)
    state = follow(pair, step - 1, state)
    warpgroup.wait_group(1)  # QK; PV goes on
    pair.release_keys(step)
    release_q(pair.work, step)
    state, factors, moved = weigh(pair.work, step, state, masked)
    publish(pair, step, state, factors)
    warpgroup.wait_group(0)
    pair.release_other(step - 1)
    return add(pair, step, state, factors, moved)


@cute.jit
def weigh_and_add(pair, step, state, masked: cutlass.Constexpr, seen: cutlass.Constexpr = None):
    """Softmax of S of the KV tile of visit ``step``; P to the other consumer; O += P V, P from registers. seen: as in
    ``weigh``."""
    state, factors, moved = weigh(pair.work, step, state, masked, seen)
    publish(pair, step, state, factors)
    return add(pair, step, state, factors, moved)


@cute.jit
def add(pair, step, state, factors, moved):
    """O += P V for this consumer's tile, P from registers; returns the state."""
    rescale(pair.work, factors, moved)
    pair.await_values(step)
    pair.work.issue_pv(step)
    if cutlass.const_expr(pair.config.lags_if_light):
        state = (*state[:2], add_weights(pair.work, state[2]))
    warpgroup.wait_group(0)
    pair.release(step)
    return state


@cute.jit
def add_weights(work, sums) -> tuple:
    """Add the weights in P to sums of whole rows, while PV runs. Additions are in a block of their own, behind a branch
    that is always taken: ptxas would put them between PV's instructions."""
    totals = cute.make_rmem_tensor(THREAD_ROWS, Float32)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        totals[r] = sums[r]
    if work.use >= 0:
        added = softmax.rounded_totals(cute.recast_tensor(flat(work.mma.p), Int32))
        for r in cutlass.range_constexpr(THREAD_ROWS):
            totals[r] = totals[r] + added[r]
    return tuple(totals[r] for r in range(THREAD_ROWS))


@cute.jit
def publish(pair, step, state, factors):
    """Put P of a tile into registers and, with its rows' statistics, into shared memory for the other consumer."""
    work = pair.work
    use = pair.use(step)
    keep_weights(work.mma)
    words = cute.recast_tensor(flat(work.mma.p), Int32)
    settle(words)  # PV comes behind a branch
    if cutlass.const_expr(work.config.p_in_keys):  # other warps' QK reads it, too
        cute.arch.barrier(barrier_id=SCORED_BARRIER + work.column_group, number_of_threads=WARPGROUP_THREADS)
    else:
        work.channels["p_empty"].wait_previous(use)
    store_words(pair.own_p, work.rows[0], [words[i] for i in range(cute.size(words))])
    told, second = pair.statistics(step), state[2 if cutlass.const_expr(work.config.lags_if_light) else 1]
    if work.rows[0].member == 0:
        for r in cutlass.range_constexpr(THREAD_ROWS):
            for number, value in enumerate((state[0][r], second[r], factors[r])):
                told[number, work.rows[r].index] = value
    cute.arch.fence_view_async_shared()
    work.channels["p_full"].arrive_warp(use)


@cute.jit
def follow(pair, step, state):
    """Issue PV of the other's tile, once its P has arrived; returns the state as updated by its softmax."""
    work = pair.work
    work.channels["p_full"].wait(pair.use(step))
    told = pair.statistics(step)
    references, second, factors = (
        tuple(told[number, row.index] for row in work.rows) for number in range(STATISTICS)
    )
    sums = tuple(total * factor for total, factor in zip(state[2], factors, strict=True))
    rescale(work, factors, Boolean(factors[0] != 1.0) | Boolean(factors[1] != 1.0))
    pair.issue_others_pv(step)
    if cutlass.const_expr(pair.config.lags_if_light):
        second = tuple(lag_of_light(own + others) for own, others in zip(sums, second, strict=True))
    return references, second, sums


@cute.jit
def finish(pair, state):
    """PV of a last tile that is the other's, and the sums of both consumers' tiles added up: the whole rows' state."""
    work = pair.work
    last = work.span.count - 1
    if (pair.use(last) + pair.column_group) % TURNS != 0:
        state = follow(pair, last, state)
        warpgroup.wait_group(0)
        pair.release_other(last)
    references, second, sums = state
    # (THREAD ROW, THREAD, CONSUMER, TILE): a buffer comes back only after the barrier of the tile between.
    layout = cute.make_layout((THREAD_ROWS, WARPGROUP_THREADS, pair.config.consumers, TURNS))
    told = cute.make_tensor(pair.shared.sums, layout)[None, work.thread, None, pair.tile_use % TURNS]
    for r in cutlass.range_constexpr(THREAD_ROWS):
        told[r, pair.column_group] = sums[r]
    cute.arch.barrier(barrier_id=SUMS_BARRIER, number_of_threads=pair.config.consumer_threads)
    sums = tuple(sums[r] + told[r, 1 - pair.column_group] for r in range(THREAD_ROWS))
    if cutlass.const_expr(pair.config.lags_if_light):  # each thread that shares a row has its sum: one counts
        sums = tuple(
            Float32(cutlass.select_(Boolean(row.member == 0), total, Float32(0.0)))
            for row, total in zip(work.rows, sums, strict=True)
        )
        second = references  # any number: results have no use for maxima
    return references, second, sums
