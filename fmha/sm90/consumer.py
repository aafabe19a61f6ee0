"""A consumer warpgroup: S = Q K^T, softmax and O += P V for its 64 query rows, on wgmma.

QK of the next KV tile is issued before PV of this one: a consumer waits for S alone, works on it while PV is still
running, and only then needs O. Consumers take turns at issuing, so that one's softmax overlaps another's products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Boolean, Float16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.device import tma
from warpspec.common.device.warp import warp_anew
from warpspec.common.device.wgmma import COLUMNS, PAIR, THREAD_ROWS, WARP_ROWS, elements, flat, multiply
from warpspec.common.hardware import WARP_THREADS, WARPGROUP_THREADS
from warpspec.fmha.device import unseen
from warpspec.fmha.device.blocks import Visit
from warpspec.fmha.device.logits import LogitNumbers, map_scores, negate_scores, unit, with_factor
from warpspec.fmha.device.mask import hide, keys_of, shifted
from warpspec.fmha.device.record import Record
from warpspec.fmha.device.scales import value_scale
from warpspec.fmha.device.softmax import move_reference
from warpspec.fmha.sm90 import bias, softmax
from warpspec.fmha.sm90.config import CLEAR_BARRIER, FIRST_ORDER_BARRIER
from warpspec.fmha.sm90.fragment import thread_rows
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.fmha.tiles import ELEMENT_BYTES

ONE_WARPGROUP = (1, 1, 1)
DTYPES = {"bfloat16": BFloat16, "float16": Float16}


class Products(NamedTuple):
    """Both products of a consumer. q (MMA, MMA_M, MMA_K, STAGE), k, v (MMA, MMA_N, MMA_K, STAGE): descriptors of
    shared memory. s, o (n): fp32 registers. p (MMA, MMA_M, MMA_K): registers in V's dtype."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    s: cute.Tensor
    p: cute.Tensor
    o: cute.Tensor

    @classmethod
    def of_rows(cls, config) -> Products:
        """Products that do not use wgmma have only registers, those of O for 64 rows."""
        o = cute.make_rmem_tensor(config.heads.v * WARPGROUP_ROWS // WARPGROUP_THREADS, Float32)
        return cls(*(None,) * (len(cls._fields) - 1), o)


def make_qk(config, dtype) -> cute.TiledMma:
    """S [M, N] = Q [M, K] K [N, K]^T: both operands from shared memory, D contiguous."""
    major = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, major, major, Float32, ONE_WARPGROUP, (WARPGROUP_ROWS, config.tile_n)
    )


def make_pv(config, dtype, columns: int | None = None) -> cute.TiledMma:
    """O [M, N] += P [M, K] V [K, N]: P from registers; V from shared memory, N (that is D) contiguous. columns: N,
    those of O by default."""
    return hopper.make_trivial_tiled_mma(
        dtype,
        dtype,
        OperandMajorMode.K,
        OperandMajorMode.MN,
        Float32,
        ONE_WARPGROUP,
        (WARPGROUP_ROWS, columns or config.o_columns),
        warpgroup.OperandSource.RMEM,
    )


def products(config, q_base, k_base, v_base, column_group) -> Products:
    """q_base: of this consumer's Q; v_base is k_base where V is K. column_group: of O."""
    rows, keys, depth, columns = WARPGROUP_ROWS, config.tile_n, config.heads.qk_room, config.o_columns
    room = config.heads.v_room // config.column_groups  # columns of V in shared memory
    dtype, p_dtype = DTYPES[config.qk_dtype], DTYPES[config.p_dtype]
    qk, pv = make_qk(config, dtype), make_pv(config, p_dtype, config.pv_columns)

    def shared(base, layout):
        return cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=dtype), layout.outer)

    row_major, column_major = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
    q = shared(q_base, hopper.make_smem_layout_a(row_major, (rows, keys, depth), dtype, 1))
    k = shared(k_base, hopper.make_smem_layout_b(row_major, (rows, keys, depth), dtype, config.kv_stages))
    # V's blocks of columns lie one after another; a column group begins at some block, a stage has all.
    v_layout = hopper.make_smem_layout_b(column_major, (rows, room, keys), p_dtype, 1)
    stages = cute.make_layout(config.kv_stages, stride=config.kv.v_stage_bytes // ELEMENT_BYTES)
    group_bytes = config.kv.v_bytes // config.column_groups
    v_group = (v_base + column_group * group_bytes).align(tma.TILE_ALIGNMENT)
    v_first = cute.make_tensor(cute.recast_ptr(v_group, v_layout.inner, dtype=p_dtype), v_layout.outer)
    v_first = v_first[None, None, 0]
    v = cute.make_tensor(v_first.iterator, cute.append(v_first.layout, stages))
    wide = pv if room == columns else make_pv(config, p_dtype, room)  # describes whole spans of V
    qk_slice = qk.get_slice(0)
    return Products(
        q=qk.make_fragment_A(qk_slice.partition_A(q)),
        k=qk.make_fragment_B(qk_slice.partition_B(k)),
        v=wide.make_fragment_B(wide.get_slice(0).partition_B(v)),
        s=cute.make_rmem_tensor(qk.partition_shape_C((rows, keys)), Float32),
        p=cute.make_rmem_tensor(pv.partition_shape_A((rows, keys)), p_dtype),
        o=cute.make_rmem_tensor(pv.partition_shape_C((rows, columns)), Float32),
    )


@dataclass(frozen=True)
class ConsumerTile:
    """One consumer's work on a tile. rows: the thread's rows (``thread_rows``). biases: their biases (KEY), or None.
    consumer: which consumer it is. row_group: which 64 rows are its own. column_group: which columns of O. (The last
    three are plain ints for paired consumers.) thread: 0..127 within the consumer. use: how many KV tiles this CTA did
    before. q_use: use count of this tile's Q. numbers: those of the map between S and P. shared: ``kernel.Buffers``.
    row_factors: factors of the scores of the thread's rows (``narrow``), or None. record: the tile's, if it is kept;
    else None."""

    config: object
    channels: dict
    mma: Products
    tile: object
    rows: tuple
    biases: tuple | None
    consumer: Int32 | int
    row_group: Int32 | int
    column_group: Int32 | int
    thread: Int32
    use: Int32
    q_use: Int32
    numbers: LogitNumbers
    shared: tuple
    row_factors: tuple | None = None
    record: Record | None = None

    def again(self) -> ConsumerTile:
        """This tile, with its place read from its record if it has one. Reading late keeps what nobody needs until then
        out of registers."""
        if self.record is None:
            return self
        tile = self.record.read(self.config)
        return replace(self, tile=tile, rows=thread_rows(self.config, tile, self.row_group, self.thread))

    def numbers_of(self, r: int) -> LogitNumbers:
        """The map's numbers for the scores of row r of the thread."""
        if self.row_factors is None:
            return self.numbers
        return with_factor(self.config.logits, self.numbers, self.numbers.factor * self.row_factors[r])

    def in_units(self, state: tuple) -> tuple:
        """A state (references, maxima, sums) whose maxima are in units of true scores."""
        if self.row_factors is None or self.config.logits.in_powers:
            return state
        references, maxima, sums = state
        return references, tuple(m * f for m, f in zip(maxima, self.row_factors, strict=True)), sums

    def value_scale(self, operands) -> Float32 | None:
        """``scales.value_scale`` of the tile."""
        return value_scale(self.config, operands, self.tile)

    @property
    def has_rows(self) -> Boolean:
        """Whether some row of the thread's warp may belong to a query."""
        warp = warp_anew() % (WARPGROUP_THREADS // WARP_THREADS)
        return Boolean(warp * WARP_ROWS < self.tile.row_count)

    @property
    def v_base(self) -> cute.Pointer:
        """Uint8 pointer to the first V stage."""
        return self.shared.v

    @property
    def span(self):
        return self.tile.span

    def clear(self, first_key, stage) -> None:
        """Clear V of a KV tile's keys that no row sees (``unseen.clear``). stage: Uint8 pointer to it."""
        unseen.clear(self.config, self.span, first_key, self.thread, stage)

    @property
    def v_full(self):
        return self.channels[self.config.format.v_ring + "_full"]

    @property
    def v_empty(self):
        return self.channels[self.config.format.v_ring + "_empty"]

    def kv_use(self, step):
        """Number, among all that a ring of K or V had, of the consumer's KV tile of visit ``step``."""
        use = self.use + step
        return use * self.config.rows.kv_heads + self.row_group if self.config.rows.heads_apart else use

    def issue_qk(self, step) -> None:
        """Issue S of the KV tile of visit ``step``."""
        k = self.mma.k[None, None, None, self.kv_use(step) % self.config.kv_stages]
        q = self.mma.q[None, None, None, 0]
        multiply(
            make_qk(self.config, DTYPES[self.config.qk_dtype]),
            self.mma.s,
            q,
            k,
            False,
            count=self.config.heads.qk_steps,
        )

    def issue_pv(self, step) -> None:
        """Issue O += P V of the KV tile of visit ``step``."""
        v = self.mma.v[None, None, None, self.kv_use(step) % self.config.kv_stages]
        pv = make_pv(self.config, self.mma.p.element_type, self.config.pv_columns)
        multiply(pv, self.mma.o, self.mma.p, v, True)

    def release_k(self, step) -> None:
        """Release the K tile after QK, unless it is V, too, and PV is still to come."""
        if not self.config.format.shared_kv:
            self.channels["k_empty"].arrive_warp(self.kv_use(step))

    def origin(self, r: int, tile):
        """Key of the first element of row r in a KV tile."""
        return tile * self.config.tile_n + PAIR * self.rows[r].member

    def read_missing(self, step) -> tuple | None:
        """Read which keys of a KV tile that has arrived are there, if a source of keys of its own says so
        (``config.mask.sparse``)."""
        return None

    def hide_both(self, step, seen: tuple) -> None:
        """``hide`` for both rows at once, and clear what has to be of V, where ``read_missing`` says which keys are
        there. seen: what it returned."""
        raise NotImplementedError

    def visit(self, step) -> Visit | None:
        """The entry of a visit, if there are lists of blocks. It is read one step ahead of its pattern."""
        if not self.config.mask.has_blocks:
            return None
        known = self.span.entry if isinstance(step, int) and step == 0 else None
        return known or self.span.visit(step)

    def read_mask(self, step, entry: Visit | None) -> tuple | None:
        """Read from memory what ``hide`` needs of each row, if there are lists of blocks; QK hides how long that takes.
        entry: ``visit(step)``."""
        if not self.config.mask.has_blocks:
            return None
        tile = self.span.tile(step, entry)
        return tuple(
            keys_of(self.config, row, step, self.origin(r, tile), entry.rule)
            for r, row in enumerate(self.rows)
        )

    def hide(self, scores: cute.Tensor, r: int, step, found: tuple | None = None) -> None:
        """Set scores (n) of the KV tile of visit ``step`` to -inf at keys that row r does not see. found:
        ``read_mask``."""
        row, origin = self.rows[r], self.origin(r, self.span.tile(step))
        drafts = row.drafts.read(origin) if row.drafts else None
        interval, pattern = found[r] if found else keys_of(self.config, row, step, origin)
        if pattern is not None:  # not in ``read_mask``, which would wait for it
            pattern = shifted(pattern, PAIR * row.member)
        hide(scores, elements(scores, r), PAIR, COLUMNS, *interval, drafts, pattern)

    @property
    def idle(self) -> Boolean:
        """Whether none of the consumer's rows belongs to a query."""
        return Boolean(self.tile.first_query_of(self.row_group) >= self.tile.seq_q)

    @property
    def several(self) -> Boolean:
        """Whether other consumers have rows of the tile, too."""
        return Boolean(self.tile.first_query_of(1) < self.tile.seq_q)


@cute.jit
def take_turn(work):
    """Wait until it is this consumer's turn to issue. If only one consumer has rows, there are no turns."""
    if cutlass.const_expr(work.config.skips_idle):
        if work.several:
            wait_turn(work)
    elif cutlass.const_expr(work.config.takes_turns):
        wait_turn(work)


def wait_turn(work) -> None:
    turn = FIRST_ORDER_BARRIER + work.consumer
    cute.arch.barrier(barrier_id=turn, number_of_threads=2 * WARPGROUP_THREADS)


@cute.jit
def end_turn(work):
    """Give the turn to the consumer after this one, if others have rows of the tile."""
    if cutlass.const_expr(work.config.skips_idle):
        if work.several:
            pass_turn(work.config, work.consumer)
    else:
        pass_turn(work.config, work.consumer)


def pass_turn(config, consumer) -> None:
    """Give the turn to issue to the consumer after this one."""
    if config.takes_turns:
        after = FIRST_ORDER_BARRIER + (consumer + 1) % config.consumers
        cute.arch.barrier_arrive(barrier_id=after, number_of_threads=2 * WARPGROUP_THREADS)


@cute.jit
def attend(work):
    """O, in ``work.mma.o``, and the row statistics of one tile.

    Returns (references, maxima, row sums), each of the thread's two rows; sums are of the thread's own columns.
    Consumes: k_full before QK, v_full before PV. Produces: k_empty after QK (after PV if V is K), v_empty after PV,
    q_empty after the last QK, one arrival per warp.
    """
    config, span = work.config, work.tile.span
    work.mma.o.fill(0.0)
    state = ((-Float32.inf,) * THREAD_ROWS, (-Float32.inf,) * THREAD_ROWS, (Float32(0.0),) * THREAD_ROWS)
    entry = work.visit(0)
    if span.count > 0:
        seen = work.read_mask(0, entry)
        entry = work.visit(1)
        work.channels["k_full"].wait(work.kv_use(0))
        work.issue_qk(0)
        warpgroup.wait_group(0)
        work.release_k(0)
        state, _, _ = weigh(work, 0, state, True, seen)
        keep_weights(work.mma)
    whole, partial = unmasked_steps(config, span)
    for step in cutlass.range(1, whole, unroll=1):
        state, entry = advance(work, step, state, True, entry)
    for step in cutlass.range(whole, partial, unroll=1):
        state, _ = advance(work, step, state, False)
    if cutlass.const_expr(config.masks_last):
        entry = work.visit(partial)
        for step in cutlass.range(partial, span.count, unroll=1):
            state, entry = advance(work, step, state, True, entry)
    if span.count > 0:
        last = span.count - 1
        work.channels["q_empty"].arrive_warp(work.q_use)  # earlier, by a branch in the loop: slower
        work.v_full.wait(work.kv_use(last))
        work.issue_pv(last)
        warpgroup.wait_group(0)
        work.v_empty.arrive_warp(work.kv_use(last))
    return work.in_units(state)


@cute.jit
def attend_idle(work):
    """``attend`` for a consumer without query rows: its waits and arrivals, without the work."""
    config, span, channels = work.config, work.tile.span, work.channels
    for step in cutlass.range(span.count, unroll=1):
        use = work.use + step
        channels["k_full"].wait(use)
        if step > 0:
            take_turn(work)
            end_turn(work)
        work.release_k(step)
        work.v_full.wait(use)
        if cutlass.const_expr(config.clears_unseen):  # noqa: SIM102
            if span.has_unseen(span.tile(step), config.tile_n):
                await_scores(config)
                cute.arch.barrier(barrier_id=CLEAR_BARRIER, number_of_threads=config.consumer_threads)
        work.v_empty.arrive_warp(use)
    if span.count > 0:
        channels["q_empty"].arrive_warp(work.q_use)


def await_scores(config) -> None:
    """If V is K, wait until every consumer has S of a tile: QK reads the rows that are about to be cleared."""
    if config.format.shared_kv and config.consumers > 1:
        cute.arch.barrier(barrier_id=CLEAR_BARRIER, number_of_threads=config.consumer_threads)


def unmasked_steps(config, span) -> tuple:
    """(first, end): the steps whose KV tiles every row sees in full. Steps that need a mask come before them (the
    newest keys; the first step always counts as one) and after them (the window's left edge)."""
    if config.mask.has_blocks:
        return span.unmasked_steps()
    end = span.begin + span.count
    low = cutlass.min(cutlass.max((span.inner_first + config.tile_n - 1) // config.tile_n, span.begin), end)
    high = cutlass.min(cutlass.max(span.inner_end // config.tile_n, low), end)
    whole = cutlass.min(cutlass.max(end - high, 1), span.count)
    return whole, cutlass.max(whole, end - low)


@cute.jit
def advance(work, step, state, masked: cutlass.Constexpr, entry=None):
    """QK and softmax of the KV tile of visit ``step``, PV of the previous one. entry: ``work.visit(step)`` if the step
    is masked. Returns the state and the next step's entry."""
    seen = None
    if cutlass.const_expr(masked):
        seen = work.read_mask(step, entry)
        entry = work.visit(step + 1)
    work.channels["k_full"].wait(work.kv_use(step))
    take_turn(work)
    work.issue_qk(step)
    work.v_full.wait(work.kv_use(step - 1))
    work.issue_pv(step - 1)
    end_turn(work)
    warpgroup.wait_group(1)  # S; PV goes on
    work.release_k(step)
    state, factors, moved = weigh(work, step, state, masked, seen)
    warpgroup.wait_group(0)
    work.v_empty.arrive_warp(work.kv_use(step - 1))
    rescale(work, factors, moved)
    keep_weights(work.mma)
    return state, entry


@cute.jit
def rescale(work, factors, moved):
    """Multiply O by the rows' factors, if some row of the warp has one. No PV may be in flight."""
    if cute.arch.vote_any_sync(moved):
        for r in cutlass.range_constexpr(THREAD_ROWS):
            softmax.scale_by(flat(work.mma.o), r, factors[r])


def keep_weights(mma: Products) -> None:
    """Convert P to the dtype and the registers that PV reads, in the order of S.

    Written as words: halves of registers, carried around the loop, would be packed anew in front of every wgmma.
    """
    scores, words = flat(mma.s), cute.recast_tensor(flat(mma.p), Int32)
    for i in range(cute.size(words)):
        pair = cute.make_rmem_tensor(PAIR, mma.p.element_type)
        pair.store(cute.local_tile(scores, (PAIR,), (i,)).load().to(mma.p.element_type))
        words[i] = cute.recast_tensor(pair, Int32)[0]


@cute.jit
def weigh(work, step, state, masked: cutlass.Constexpr, seen: cutlass.Constexpr = None):
    """Turn S into the weights of its tile, in place. Returns the state, the factors of O, and whether either is not 1.

    masked: some row may not see some key of the tile. seen: ``ConsumerTile.read_mask``, or ``read_missing``.
    """
    config, span = work.config, work.tile.span
    references, maxima, sums = state
    scores = flat(work.mma.s)
    first_key = span.tile(step) * config.tile_n
    negate_scores(config.logits, scores)
    new = []
    if cutlass.const_expr(config.mask.sparse):
        work.hide_both(step, seen)
    caps = config.caps_small and not masked
    if cutlass.const_expr(caps):
        softmax.cap_scores(config.logits, scores, work.numbers, references)
    for r in cutlass.range_constexpr(THREAD_ROWS):
        row, numbers = work.rows[r], work.numbers_of(r)
        score_unit = unit(config.logits, numbers)
        origin = first_key + PAIR * row.member  # key of element 0
        if cutlass.const_expr(config.logits.bias is not None):
            bias.add(config, scores, r, work.biases[r], origin, numbers, masked)
        elif cutlass.const_expr(config.logits.in_powers and not caps):
            map_scores(config.logits, scores, elements(scores, r), numbers)
        if cutlass.const_expr(masked and not config.mask.sparse):
            work.hide(scores, r, step, seen)
        highest = softmax.over_quad(softmax.maximum(scores, r), cute.arch.fmax)
        if cutlass.const_expr(config.lags_if_light):  # state: see ``pair``
            threshold, second = maxima[r], maxima[r]
        else:
            highest = cute.arch.fmax(maxima[r], highest)
            threshold, second = config.output.rescale_threshold, highest
        reference, factor, moved = move_reference(references[r], highest, score_unit, threshold)
        total = softmax.exponentiate(scores, r, reference, score_unit)
        before = sums[r] * factor
        total = before if cutlass.const_expr(config.lags_if_light) else before + total
        new.append((reference, second, total, factor, moved))
    references, maxima, sums, factors, moved = zip(*new, strict=True)
    if cutlass.const_expr(masked and config.clears_unseen and not config.mask.sparse):
        clear_unseen(work, step, first_key)
    return (references, maxima, sums), factors, moved[0] | moved[1]


@cute.jit
def clear_unseen(work, step, first_key):
    """Zero the V rows of keys that no row of the tile sees, if the KV tile of visit ``step`` has some, before PV reads
    them. One consumer writes, because two writers of one place are a race, even of zeros. Paired consumers have KV
    tiles of their own until they hand over P, and those with a KV head each all the time, so each clears its own."""
    config, span = work.config, work.tile.span
    if span.has_unseen(span.tile(step), config.tile_n):
        use = work.kv_use(step)
        barrier, threads = CLEAR_BARRIER, config.consumer_threads
        if cutlass.const_expr(config.rows.heads_apart):
            barrier, threads = CLEAR_BARRIER + work.consumer, WARPGROUP_THREADS
        if cutlass.const_expr(config.paired):
            barrier, threads = CLEAR_BARRIER + work.consumer, WARPGROUP_THREADS
            if cutlass.const_expr(not config.in_groups):  # otherwise V is there since QK
                work.v_full.wait(use)
        else:
            work.v_full.wait(use)
            await_scores(config)
        stage = work.v_base + use % config.kv_stages * config.kv.v_stage_bytes
        if cutlass.const_expr(config.paired or config.rows.heads_apart):  # noqa: SIM114
            work.clear(first_key, stage)
            cute.arch.fence_view_async_shared()
        elif work.consumer == 0:
            work.clear(first_key, stage)
            cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)
