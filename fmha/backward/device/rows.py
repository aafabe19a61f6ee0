"""Prepare every query row for the main kernel: lse', delta, and zeros where it sums dQ. For every architecture.

A CTA has one query tile of one head; the heads of a tile, whose rows are neighbours in memory, come one after another.
``features`` gives the layout of statistics and sums. With packed requests, CTAs also clear gradients of rows that
belong to no request, and further CTAs, which come first, sort the key tiles. Where heads are sliced, CTAs clear the
sums of dK and dV.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import FP32_BYTES, WARP_THREADS
from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.backward.device.host import batched
from warpspec.fmha.backward.device.order import sort_key_tiles
from warpspec.fmha.backward.device.runs import lay_out_requests
from warpspec.fmha.backward.features import COLUMN_BYTES, SUBTILE_ELEMENTS, WARP_ELEMENTS, WARPS
from warpspec.fmha.backward.operands import BackwardOperands, RowOperands
from warpspec.fmha.backward.pieces import PieceLength
from warpspec.fmha.device.host import SMEM_CARVEOUT_PERCENT
from warpspec.fmha.device.packed import entry, extent_of, request_of
from warpspec.fmha.heads import BLOCK, class_of

THREADS = 128
VECTOR = 8  # elements of o and do that a thread loads at a time: 16 bytes
LOADS = 8  # rows of a thread in flight together
PIECES = 3  # bf16 numbers whose sum is an fp32 number: 3 x 8 bits
UPPER_HALF, LOWER_HALF = -65536, 65535  # of a word's bits
HIDDEN = 2.0**63  # S - lse' / factor of hidden rows is at most minus this where products subtract lse'


class RowStatistics:
    """The kernel of one ``rows.RowConfig``."""

    def __init__(self, config):
        self.config = config

    @host_function(RowOperands)
    def __call__(self, operands: RowOperands, stream: CUstream):
        sorting, operands = int(self.config.main is not None), batched(self.config, operands)
        ctas = operands.statistics.shape[1] * (sorting + operands.o.shape[2])
        self.kernel(operands).launch(
            grid=(ctas, 1, 1),
            block=(THREADS, 1, 1),
            preferred_smem_carveout=SMEM_CARVEOUT_PERCENT,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands):
        config = self.config
        cta, _, _ = cute.arch.block_idx()
        tiles, heads = operands.statistics.shape[1], operands.o.shape[2]
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(config.main is None):
            index = tiles * heads - 1 - cta  # what the main kernel reads first comes last, and is still in L2
            prepare_rows(config, operands, index // heads, index % heads)
        elif cta < tiles:
            sort_requests(config, operands)
        else:
            prepare_rows(config, operands, (cta - tiles) // heads, (cta - tiles) % heads)


@cute.jit
def prepare_rows(config: cutlass.Constexpr, operands, tile_index, head):
    """Write the statistics of a query tile of one head, and clear its sums."""
    o = operands.o
    thread, _, _ = cute.arch.thread_idx()
    batch, number, first, rows = place_of(config.packed, config.tile_m, operands.cu_seqlens_q, o, tile_index)
    if cutlass.const_expr(operands.turns is not None):  # noqa: SIM102
        if thread < operands.turns.shape[2]:
            operands.turns[head, tile_index, thread] = 0
    lanes = min(class_of(config.heads.qk) // VECTOR, WARP_THREADS)
    lane, group, groups = thread % lanes, thread // lanes, THREADS // lanes
    statistics = operands.statistics[head, tile_index, None, None]  # (ROW PAIR, 4)
    sink_sum = Float32(0.0)
    for start in cutlass.range_constexpr(0, config.tile_m // groups, LOADS):
        held = []
        if cutlass.const_expr(operands.do is not None):
            for i in cutlass.range_constexpr(start, start + LOADS):
                row = row_of(number * config.tile_m + i * groups + group, first, rows, o)
                lines = (o[batch, row, head, None], operands.do[batch, row, head, None])
                held.append(load_vectors(config, lines, lane, lanes))
        index = (start + row_of_lane(lane)) * groups + group  # of the lane's row in the tile
        query = number * config.tile_m + index
        row = row_of(query, first, rows, o)
        lse, dlse, sink, dot = operands.lse[batch, head, row], None, None, Float32(0.0)
        if cutlass.const_expr(operands.dlse is not None):
            dlse = operands.dlse[batch, head, row]
        if cutlass.const_expr(operands.sink is not None):
            sink = operands.sink[head].to(Float32)
        zero = zero_after_loads(thread)
        if cutlass.const_expr(start == 0 and operands.dq_sums is not None):
            clear_queries(config, operands.dq_sums[head, tile_index, None], thread)
        if cutlass.const_expr(operands.do is not None):
            dot = sum_of_lanes([part_of_dot(config, each, lane, lanes, zero) for each in held], lane, lanes)
        if lane < LOADS:
            total, delta, of_sink = row_statistics(config, lse, dlse, sink, Boolean(query < rows), dot)
            if cutlass.const_expr(config.subtracts):
                factor = operands.inverse_factor
                write_columns(config, statistics, 0, index, hide_finitely(total * -factor, factor))
                write_columns(config, statistics, 1, index, -delta)
            else:
                statistics[index // 2, index % 2] = total
                statistics[index // 2, 2 + index % 2] = delta * -config.delta_factor
            sink_sum += of_sink
    if cutlass.const_expr(operands.dsink is not None):
        add_up(operands.dsink, (head, tile_index), thread, sink_sum)
    clear_share(config, operands, tile_index, head, thread)


def hide_finitely(value, factor) -> Float32:
    """-lse' / factor, where it is infinite a finite number: products multiply it by 0, too. factor: has the sign."""
    limit = Float32(cutlass.select_(Boolean(factor > 0.0), Float32(-HIDDEN), Float32(HIDDEN)))
    return Float32(cutlass.select_(Boolean(value * limit >= HIDDEN * HIDDEN), limit, value))


def write_columns(config, statistics: cute.Tensor, number: cutlass.Constexpr, index, value) -> None:
    """Write a row's statistic as columns of a product. number: lse' (0), delta (1). index: of the row in the tile."""
    words = cute.make_rmem_tensor(COLUMN_BYTES // FP32_BYTES, Int32)
    words.fill(0)
    for piece in range(PIECES):
        bits = value.bitcast(Int32) & UPPER_HALF
        value -= bits.bitcast(Float32)
        words[piece // 2] |= bits if piece % 2 else Int32(bits >> 16) & LOWER_HALF
    cute.autovec_copy(words, cute.recast_tensor(statistics, Int32)[number * config.tile_m + index, None])


def row_of(query, first, rows, o: cute.Tensor) -> Int32:
    """Row of ``o`` of a query of a request, one that exists. first, rows: the request's."""
    return cutlass.min(first + cutlass.max(cutlass.min(query, rows - 1), 0), o.shape[1] - 1)


def load_vectors(config, lines: tuple, lane, lanes: int) -> list[tuple]:
    """Load one lane's part of a row that ``lanes`` lanes share. lines: the row of O and of dO (D). Returns pairs of
    vectors of the two."""
    row_vectors, found = config.sizes.v // VECTOR, []
    for place in range(0, row_vectors, lanes):
        vectors = []
        for line in lines:
            own = place + lane
            if config.rows is not None:
                own = cutlass.min(own, row_vectors - 1)
            vector = cute.make_rmem_tensor(VECTOR, line.element_type)
            cute.autovec_copy(cute.local_tile(line, (VECTOR,), (own,)), vector)
            vectors.append(vector)
        found.append(tuple(vectors))
    return found


def part_of_dot(config, held: list[tuple], lane, lanes: int, zero) -> Float32:
    """One lane's part of rowsum(dO * O) of a row, from ``zero`` on. held: what ``load_vectors`` returned."""
    row_vectors, dot = config.sizes.v // VECTOR, Float32(0.0)
    for i, vectors in enumerate(held):
        more = zero
        for j in range(VECTOR):
            more += vectors[0][j].to(Float32) * vectors[1][j].to(Float32)
        if config.rows is not None:
            more = Float32(cutlass.select_(Boolean(i * lanes + lane < row_vectors), more, Float32(0.0)))
        dot += more
    return dot


def zero_after_loads(thread) -> Float32:
    """0, of which the compiler only knows that a shuffle gives it. It would otherwise multiply as soon as a row is
    there, and have few rows' loads in flight, for the sake of fewer registers."""
    cute.arch.sync_warp()
    lane = cute.arch.inline_ptx(
        "and.b32 {$w0}, {$r0}, 31;", write_only_types=[Int32], read_only_args=[thread]
    )
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = cute.arch.shuffle_sync_bfly(lane, 1) >> 5
    return cute.recast_tensor(bits, Float32)[0]


def row_of_lane(lane) -> Int32:
    """Which of LOADS rows ``sum_of_lanes`` gives a lane: three bits of its number, the lowest first."""
    return (lane & 1) * 4 + (lane & 2) + (lane >> 2 & 1)


def sum_of_lanes(values: list, lane, lanes: int) -> Float32:
    """Sum each of LOADS values over as many neighbouring lanes. A lane gets the sum of ``row_of_lane``: in each of the
    first steps it sends half of its values to a neighbour and gets those of the other half."""
    distance = 1
    while len(values) > 1:
        half, upper = len(values) // 2, Boolean((lane & distance) != 0)
        sums = []
        for low, high in zip(values[:half], values[half:], strict=True):
            kept, sent = cutlass.select_(upper, high, low), cutlass.select_(upper, low, high)
            sums.append(Float32(kept) + Float32(cute.arch.shuffle_sync_bfly(Float32(sent), distance)))
        values, distance = sums, 2 * distance
    total = values[0]
    while distance < lanes:
        total += Float32(cute.arch.shuffle_sync_bfly(total, distance))
        distance *= 2
    return total


@cute.jit
def clear_share(config: cutlass.Constexpr, operands, tile_index, head, thread):
    """Clear a CTA's share of what belongs to no query tile: ``done``, the sums of dK and dV, and gradients of rows past
    the last request."""
    heads = operands.o.shape[2]
    cta, ctas = tile_index * heads + head, operands.statistics.shape[1] * heads
    if cutlass.const_expr(operands.done is not None):
        for i in cutlass.range(cta * THREADS + thread, cute.size(operands.done), ctas * THREADS, unroll=1):
            operands.done[i] = 0
    for sums in (operands.dk_sums, operands.dv_sums):
        if cutlass.const_expr(sums is not None):
            for place in cutlass.range(cta, sums.shape[0] * sums.shape[1], ctas, unroll=1):
                clear(sums[place // sums.shape[1], place % sums.shape[1], 0, None], thread)
    if cutlass.const_expr(config.main is not None):
        for tensor, cu_seqlens in (
            (operands.dq, operands.cu_seqlens_q),
            (operands.dk, operands.cu_seqlens_k),
            (operands.dv, operands.cu_seqlens_k),
        ):
            if cutlass.const_expr(tensor is not None):
                clear_rest(tensor, cu_seqlens, cta, ctas, thread)


@cute.jit
def place_of(
    packed: cutlass.Constexpr,
    tile_rows: cutlass.Constexpr,
    cu_seqlens: cute.Tensor | None,
    rows: cute.Tensor,
    tile_index,
) -> tuple:
    """(batch row, tile, first row, rows) of a tile, counted in its request or batch row. rows: [B, S, H, D], in tiles
    of ``tile_rows``. Called by whole warps."""
    total = rows.shape[1]
    if cutlass.const_expr(packed):
        request, number = request_of(cu_seqlens, tile_index, tile_rows, total)
        first, length = extent_of(cu_seqlens, request, total)
        return Int32(0), number, first, length
    tiles = cute.ceil_div(total, tile_rows)
    return tile_index // tiles, tile_index % tiles, Int32(0), total


@cute.jit
def sort_requests(config: cutlass.Constexpr, operands):
    """Sort the key tiles of packed requests."""
    cta, _, _ = cute.arch.block_idx()
    main = BackwardOperands(
        operands.o,
        operands.k,
        *(None,) * 3,
        q_start=operands.q_start,
        cu_seqlens_q=operands.cu_seqlens_q,
        cu_seqlens_k=operands.cu_seqlens_k,
        tile_order=operands.tile_order,
        tile_pieces=operands.tile_pieces,
        ranges=operands.ranges,
        seen_by=operands.seen_by,
    )
    window = (operands.window_left, operands.window_right)
    numbers = ("start", "share", "cost", "last", "further")
    length, slices = PieceLength(*(getattr(operands, f"piece_{name}") for name in numbers)), operands.slices
    if cutlass.const_expr(not config.main.keeps_requests):
        sort_key_tiles(
            config.main,
            main,
            window,
            length,
            slices,
            cta,
            operands.statistics.shape[1],
            THREADS // WARP_THREADS,
        )
    elif cta == 0:
        lay_out_requests(config.main, main, length, slices, THREADS)


@cute.jit
def clear_rest(tensor: cute.Tensor, cu_seqlens: cute.Tensor, cta, ctas, thread):
    """Clear rows [1, ROW, H, D] past the last request. All CTAs of a launch share the work."""
    _, total, heads, depth = tensor.shape
    vectors = depth // VECTOR
    zeros = cute.make_rmem_tensor(VECTOR, tensor.element_type)
    zeros.fill(0.0)
    first = entry(cu_seqlens, cute.size(cu_seqlens) - 1, total)
    for row in cutlass.range(first + cta, total, ctas, unroll=1):
        for i in cutlass.range(thread, heads * vectors, THREADS, unroll=1):
            line = tensor[0, row, i // vectors, None]
            cute.autovec_copy(zeros, cute.local_tile(line, (VECTOR,), (i % vectors,)))


def clear_queries(config, sums: cute.Tensor, thread) -> None:
    """Clear the sums of a query tile's dQ: of each subtile (``features``) the columns that are added to."""
    if config.dq_width == config.heads.qk:
        clear(sums, thread)
        return
    zeros = cute.make_rmem_tensor(4, Float32)
    zeros.fill(0.0)
    columns, share = config.heads.qk // BLOCK, WARP_ELEMENTS // 4  # vectors of a warp's share
    for number in range(config.tile_m * config.heads.qk // SUBTILE_ELEMENTS):
        subtile = cute.local_tile(sums, (SUBTILE_ELEMENTS,), (number,))
        cleared = min(max(config.dq_width - number % columns * BLOCK, 0), BLOCK) * share // BLOCK
        for i in range(cleared * WARPS // THREADS):
            vector = i * THREADS + thread
            place = vector // cleared * share + vector % cleared
            cute.autovec_copy(zeros, cute.local_tile(subtile, (4,), (place,)))


@cute.jit
def clear(target: cute.Tensor, thread):
    """Clear an fp32 row whose length is a multiple of 4 THREADS."""
    zeros = cute.make_rmem_tensor(4, Float32)
    zeros.fill(0.0)
    for i in cutlass.range(cute.size(target) // (4 * THREADS), unroll=8):
        cute.autovec_copy(zeros, cute.local_tile(target, (4,), (i * THREADS + thread,)))


@cute.jit
def row_statistics(config: cutlass.Constexpr, lse, dlse, sink, in_range, dot) -> tuple:
    """(lse' in log2 units, delta, the row's part of dsink) of a row. dlse, sink: None if there is none. dot: rowsum(dO
    * O). A sink adds at most ``sink_limit`` to lse': then delta is finite, and so is all that follows, also of an
    infinite sink."""
    own = lse * LOG2_E
    empty = Boolean(own == -Float32.inf) | ~in_range
    total, of_sink = own, Float32(0.0)
    delta = dot
    if cutlass.const_expr(sink is not None):
        power = sink * LOG2_E
        high = cute.arch.fmax(own, power)
        total = high + cute.math.log2(cute.math.exp2(own - high) + cute.math.exp2(power - high))
        of_sink = -cute.arch.fmin(cute.math.exp2(power - total), Float32(1.0)) * dot  # of NaN and 1 it is 1
        total = cute.arch.fmin(total, own + config.sink_limit)
    if cutlass.const_expr(dlse is not None):
        delta = dot - dlse * cute.math.exp2(total - own)
    total = Float32(cutlass.select_(empty, Float32.inf, total))
    delta = Float32(cutlass.select_(empty, Float32(0.0), delta))
    of_sink = Float32(cutlass.select_(empty, Float32(0.0), of_sink))
    return total, delta, of_sink


@cute.jit
def add_up(dsink: cute.Tensor, place: cutlass.Constexpr, thread, value):
    """Sum all threads' values in a fixed order into one element."""
    sums = cutlass.memory.SmemAllocator().allocate_tensor(
        Float32, cute.make_layout(THREADS // WARP_THREADS), byte_alignment=4
    )
    value = cute.arch.warp_reduction_sum(value)
    if thread % WARP_THREADS == 0:
        sums[thread // WARP_THREADS] = value
    cute.arch.sync_threads()
    if thread == 0:
        total = sums[0]
        for i in cutlass.range_constexpr(1, THREADS // WARP_THREADS):
            total += sums[i]
        dsink[place] = total
