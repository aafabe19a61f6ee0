"""Consumers for few query rows over FP8 or NVFP4 keys: their warps take KV tiles in turn, each alone.

A warp converts a tile's codes to 16 bits on their way from shared memory to mma.sync fragments, whose 16 rows are keys,
not queries: S^T = K Q^T and O^T += V^T P^T. So the eight columns of an instruction suffice for eight query rows, no
16-bit keys pass through shared memory, and a thread has few scores. The warps' states are merged at the end of a tile
of rows (``warp_merge``).

The order of D within products is free. A lane reads chunks of a row whose banks no other lane of its phase reads, and
neighbours in a chunk become neighbours in a fragment (``codes``):

- Of K, a lane (g, t) of 4 g + t reads a quarter of rows g and g + 8.
- Of V, it reads an eighth of the rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9. Two rows' codes of one column are neighbours in a
  fragment of V^T; so O^T has an eighth of D in a lane, in two columns, queries 2 t and 2 t + 1.

The order of keys is free, too, as long as K and V have the same. If rows have less than 128 bytes, one transaction
reads several, and some pairs are exchanged (``Lane.place``), so that even rows do not share half of the banks.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from warpspec.common.device import tma
from warpspec.common.device.float4 import scale_of_each, scales_twice
from warpspec.common.device.mma import C_WORDS, MMA_COLUMNS, MMA_ROWS, multiply, transpose
from warpspec.common.device.wgmma import PAIR, QUAD, flat
from warpspec.common.device.words import VECTOR_WORDS, load_shared, load_shared_byte, load_shared_half
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.fmha.device.block_scales import scale_address, tile_scales
from warpspec.fmha.device.codes import NUMBERS, codes_of, paired
from warpspec.fmha.device.logits import map_scores, negate_scores, unit
from warpspec.fmha.device.softmax import move_reference, offset_of
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.sm90.consumer import DTYPES, unmasked_steps
from warpspec.fmha.sm90.narrow import factors, largest, maximum_of_halves, narrowed
from warpspec.fmha.sm90.warp_merge import OCTET, merge, over_keys


class Lane:
    """g and t of this lane, and which warp it is in. config: compile-time."""

    def __init__(self, config, thread):
        lane = thread % WARP_THREADS
        self.g, self.t, self.warp = lane // QUAD, lane % QUAD, thread // WARP_THREADS
        self.config, self.codes = config, codes_of(config, config.p_dtype)
        self.columns = PAIR * config.shape.row_tiles
        self.spans = config.format.kv_row(config.heads.qk) // config.codes.row_bytes
        self.words = config.codes.row_bytes // QUAD // WORD_BYTES  # words of a quarter of a row
        self.vector = config.codes.row_bytes // OCTET // WORD_BYTES  # words of an eighth of a row
        self.steps = self.words * self.codes.WORD // QUAD  # steps of QK within a span
        self.mmas = self.codes.WORD // PAIR  # products of PV for a word of V
        self.key = self.place(self.g)

    def place(self, row):
        """The row of shared memory, of eight, that holds a row of a fragment."""
        rows = tma.ROW_BYTES // self.config.codes.row_bytes  # rows that cover all banks together
        return row if rows == 1 else row ^ (row // rows % 2)

    def chunk(self, base, span, row, byte):
        """Address of a byte of a row in a swizzled tile. byte: in the row's span."""
        config = self.config
        swizzled = row // (tma.ROW_BYTES // config.codes.row_bytes) % (config.codes.row_bytes // VECTOR_BYTES)
        place = (byte // VECTOR_BYTES) ^ swizzled
        at = base + (span * config.tile_n + row) * config.codes.row_bytes
        return at + place * VECTOR_BYTES + byte % VECTOR_BYTES


@cute.jit
def attend_by_warp(work, merger):
    """Like ``consumer.attend``, but the results of warp ``merger`` are the tile's; those of the others are undefined.

    Consumes: k_full, v_full of the warp's own tiles. Produces: k_empty, v_empty of these, one arrival each; q_empty,
    one arrival per warp.
    """
    config, span = work.config, work.tile.span
    lane = Lane(config, work.thread)
    columns = lane.spans * lane.vector * lane.mmas
    o = cute.make_rmem_tensor((C_WORDS, columns, config.shape.row_tiles), Float32)
    o.fill(0.0)
    q = cute.make_rmem_tensor((PAIR, lane.spans * lane.steps, config.shape.row_tiles), Uint32)
    q.fill(0)
    scaled = (Float32(1.0),) * lane.columns
    if span.count > 0:
        scaled = read_queries(work, lane, q)
        release(work.channels["q_empty"], work.q_use)
    work = replace(work, row_factors=scaled if config.narrows_q else None)
    references, maxima = (-Float32.inf,) * lane.columns, (-Float32.inf,) * lane.columns
    state = (references, maxima, (Float32(0.0),) * lane.columns)
    whole, partial = unmasked_steps(config, span)
    warps = config.consumer_warps
    first = (lane.warp - work.use) % warps
    for step in cutlass.range((first + warps) % warps, span.count, warps, unroll=1):
        masked = Boolean(step < whole) | Boolean(step >= partial)
        state = take_tile(work, lane, q, o, step, masked, state)
    return merge(work, lane, o, work.in_units(state), merger)


@cute.jit
def read_queries(work, lane: cutlass.Constexpr, q: cute.Tensor) -> tuple:
    """q (2, STEP, ROW TILE) from shared memory: for query g of each row tile, the elements that match this lane's
    columns of K. Returns the factors of the scores of the lane's columns."""
    config, found = work.config, []
    block_bytes = config.q_bytes // config.heads.qk_blocks
    base = work.shared.q.toint()
    for row_tile in cutlass.range_constexpr(config.shape.row_tiles):
        row = row_tile * MMA_COLUMNS + lane.g
        for span in cutlass.range_constexpr(lane.spans):
            for chunk in cutlass.range_constexpr(lane.steps // PAIR):
                column = (span * QUAD + lane.t) * (lane.steps * QUAD) + chunk * NUMBERS
                place = (column % BLOCK // NUMBERS) ^ (row % 8)
                at = base + column // BLOCK * block_bytes + row * tma.ROW_BYTES + place * VECTOR_BYTES
                words = load_shared(at)
                pairs = paired([words[i] for i in range(VECTOR_WORDS)], lane.codes.PAIRS)
                for i in cutlass.range_constexpr(VECTOR_WORDS):
                    q[i % PAIR, span * lane.steps + chunk * PAIR + i // PAIR, row_tile] = pairs[i]
        down = Float32(1.0)
        if cutlass.const_expr(config.narrows_q):
            own = flat(q[None, None, row_tile])
            pair = largest([own[i] for i in range(cute.size(own))])
            for distance in cutlass.range_constexpr(1, QUAD):  # 1 and 2, and both: the quad
                pair = maximum_of_halves(pair, Uint32(cute.arch.shuffle_sync_bfly(pair, distance)))
            up, down = factors(pair)
            for i in cutlass.range_constexpr(cute.size(own)):
                own[i] = narrowed(own[i], up)
        for e in cutlass.range_constexpr(PAIR):
            found.append(cute.arch.shuffle_sync(down, QUAD * (PAIR * lane.t + e)))
    return tuple(found)


@cute.jit
def take_tile(work, lane: cutlass.Constexpr, q, o, step, masked, state):
    """S^T, softmax and O^T of one KV tile; returns the state. masked: some row may not see some key of it."""
    config, channels = work.config, work.channels
    use, key_tiles = work.use + step, config.tile_n // MMA_ROWS
    number = use % config.kv_stages
    stage = number * config.codes.tile_bytes
    first_key = work.span.tile(step) * config.tile_n
    s = cute.make_rmem_tensor((C_WORDS, key_tiles, config.shape.row_tiles), Float32)
    s.fill(0.0)
    channels["k_full"].wait(use)
    score(work, lane, q, s, work.shared.k.toint() + stage, scales_at(work, 0, number))
    if cutlass.const_expr(not config.format.shared_kv):
        release(channels["k_empty"], use)
    state = weigh(work, lane, s, o, first_key, masked, state)
    if cutlass.const_expr(not config.format.shared_kv):
        channels["v_full"].wait(use)
    blocks = scales_at(work, len(config.format.rings) - 1, number)
    add_values(work, lane, s, o, work.shared.v.toint() + stage, blocks, first_key, masked)
    release(channels[config.format.v_ring + "_empty"], use)
    return state


def release(channel, use) -> None:
    """Release a stage for the warp. The fence waits for its loads; an arrival alone would overtake them."""
    cute.arch.fence_view_async_shared()
    channel.arrive_warp(use)


def scales_at(work, ring: int, stage):
    """Address of a tile's block scales (``tile_scales``); None without."""
    return tile_scales(work.config, work.shared.scales, ring, stage) if work.config.format.kv_block else None


@cute.jit
def score(work, lane: cutlass.Constexpr, q, s, base, blocks):
    """s (4, KEY TILE, ROW TILE) += K Q^T of a tile at an address. blocks: address of its block scales."""
    config, count = work.config, min(lane.words, VECTOR_WORDS)
    for key_tile in cutlass.range_constexpr(config.tile_n // MMA_ROWS):
        rows = [key_tile * MMA_ROWS + lane.key + 8 * i for i in range(2)]
        scales = [quarter_scales(lane, blocks, row) for row in rows]
        for span in cutlass.range_constexpr(lane.spans):
            for vector in cutlass.range_constexpr(lane.words // count):
                byte = lane.t * (config.codes.row_bytes // QUAD) + vector * VECTOR_BYTES
                codes = [load_shared(lane.chunk(base, span, row, byte), count) for row in rows]
                for word in cutlass.range_constexpr(count):
                    number = vector * count + word
                    low, high = (
                        lane.codes.row(codes[i][word], scale_of(lane, scales[i], number)) for i in range(2)
                    )
                    steps = len(low) // PAIR
                    for i in cutlass.range_constexpr(steps):
                        a = [low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1]]
                        at = span * lane.steps + number * steps + i
                        for row_tile in cutlass.range_constexpr(config.shape.row_tiles):
                            b = [q[0, at, row_tile], q[1, at, row_tile]]
                            multiply(config.qk_dtype, s[None, key_tile, row_tile], a, b)


def quarter_scales(lane, blocks, row):
    """The block scales of this lane's quarter of a row of K, in fp16, each twice in a word; None without."""
    if blocks is None:
        return None
    count = lane.config.codes.row_blocks // QUAD
    address = blocks + row * lane.config.codes.row_blocks + lane.t * count
    if count == 1:
        word = load_shared_byte(address)
    elif count == 2:
        word = load_shared_half(address)
    else:
        word = load_shared(address, 1)[0]
    return scales_twice(word, count)


def scale_of(lane, scales, word: int):
    """The scale that a word of codes belongs to; None if there are no block scales."""
    return None if scales is None else scales[word * lane.codes.WORD // lane.config.format.kv_block]


@cute.jit
def weigh(work, lane: cutlass.Constexpr, s, o, first_key, masked, state):
    """Turn S^T into P^T of the tile, in place; scale O^T where references move. Returns the state."""
    config, scores = work.config, flat(s)
    negate_scores(config.logits, scores)
    if cutlass.const_expr(config.logits.in_powers):
        for c in cutlass.range_constexpr(lane.columns):
            map_scores(config.logits, scores, elements(s, c), work.numbers_of(c))
    units = [unit(config.logits, work.numbers_of(c)) for c in range(lane.columns)]
    if masked:
        hide(work, lane, s, first_key)
    references, maxima, sums = state
    threshold = config.output.rescale_threshold
    highest, moves = [], Boolean(False)
    for c in cutlass.range_constexpr(lane.columns):
        own = elements(s, c)
        chains = [scores[own[0]], scores[own[1]]]
        for n, i in enumerate(own[2:]):
            chains[n % 2] = cute.arch.fmax(chains[n % 2], scores[i])
        highest.append(cute.arch.fmax(maxima[c], cute.arch.fmax(chains[0], chains[1])))
        moves = moves | Boolean(highest[c] * units[c] - references[c] > threshold)
    maxima = tuple(highest)
    if cute.arch.vote_any_sync(moves):
        maxima, references, sums = move(work, lane, o, units, maxima, references, sums)
    totals = []
    for c in cutlass.range_constexpr(lane.columns):
        offset = offset_of(references[c])
        chains = [Float32(0.0), Float32(0.0)]
        for n, i in enumerate(elements(s, c)):
            power = cute.math.exp2(scores[i] * units[c] + offset, fastmath=True)
            scores[i] = power
            chains[n % 2] = chains[n % 2] + power
        totals.append(sums[c] + (chains[0] + chains[1]))
    return references, maxima, tuple(totals)


@cute.jit
def move(work, lane: cutlass.Constexpr, o, units: cutlass.Constexpr, maxima, references, sums):
    """Move the references of the warp's rows to their maxima and scale O^T. Returns (maxima, references, sums)."""
    config = work.config
    values, found = flat(o), []
    for c in cutlass.range_constexpr(lane.columns):
        highest = over_keys(maxima[c], cute.arch.fmax)
        reference, factor, _ = move_reference(
            references[c], highest, units[c], config.output.rescale_threshold
        )
        for i in elements(o, c):
            values[i] = values[i] * factor
        found.append((highest, reference, sums[c] * factor))
    return tuple(zip(*found, strict=True))


def elements(t: cute.Tensor, column: int) -> list[int]:
    """Indices of the numbers of t (4, n, ROW TILE) that belong to one of the lane's query rows.

    column: number of the row; 0 and 1 belong to the first row tile.
    """
    count = cute.size(t, mode=[1])
    return [
        (column // PAIR * count + n) * C_WORDS + half * PAIR + column % PAIR
        for n in range(count)
        for half in (0, 1)
    ]


@cute.jit
def hide(work, lane: cutlass.Constexpr, s, first_key):
    """Set scores at keys that a row does not see to -inf."""
    config, scores, tile = work.config, flat(s), work.again().tile
    for c in cutlass.range_constexpr(lane.columns):
        row = tile.row(c // PAIR * MMA_COLUMNS + PAIR * lane.t + c % PAIR, 0)
        drafts = row.drafts.read() if cutlass.const_expr(config.mask.has_tree) else None
        for n, i in enumerate(elements(s, c)):
            key = first_key + n * 8 + lane.key
            seen = Boolean(key < row.end)
            if cutlass.const_expr(config.mask.has_left):
                seen = seen & Boolean(key >= row.first)
            if cutlass.const_expr(config.mask.has_tree):
                seen = seen | drafts.sees(key)
            scores[i] = Float32(cutlass.select_(seen, scores[i], -Float32.inf))


@cute.jit
def add_values(work, lane: cutlass.Constexpr, s, o, base, blocks, first_key, masked):
    """O^T += V^T P^T of a tile at an address. Rows of V that no row of the tile sees count as zeros. blocks: address of
    its block scales."""
    config = work.config
    p_type = DTYPES[config.p_dtype]
    for key_tile in cutlass.range_constexpr(config.tile_n // MMA_ROWS):
        b = []
        for row_tile in cutlass.range_constexpr(config.shape.row_tiles):
            words = []
            for half in cutlass.range_constexpr(2):
                pair = cute.make_rmem_tensor(PAIR, p_type)
                for i in cutlass.range_constexpr(PAIR):
                    pair[i] = s[half * PAIR + i, key_tile, row_tile].to(p_type)
                words.append(transpose(cute.recast_tensor(pair, Uint32)[0]))
            b.append(words)
        rows = [key_tile * MMA_ROWS + lane.place(PAIR * lane.t + i % 2) + i // 2 * 8 for i in range(4)]
        scales = eighth_scales(work, lane, blocks, rows, first_key, masked)
        for span in cutlass.range_constexpr(lane.spans):
            codes = [load_vector(lane, base, span, row) for row in rows]
            if cutlass.const_expr(blocks is None):
                clear_unseen(work, codes, rows, first_key, masked)
            for w in cutlass.range_constexpr(lane.vector):
                low, high = (
                    lane.codes.columns(codes[i][w], codes[i + 1][w], scale_of(lane, scales[i // 2], w))
                    for i in (0, 2)
                )
                for i in cutlass.range_constexpr(lane.mmas):
                    a = [low[2 * i], low[2 * i + 1], high[2 * i], high[2 * i + 1]]
                    at = (span * lane.vector + w) * lane.mmas + i
                    for row_tile in cutlass.range_constexpr(config.shape.row_tiles):
                        multiply(config.p_dtype, o[None, at, row_tile], a, b[row_tile])


@cute.jit
def clear_unseen(work, words: cutlass.Constexpr, rows: cutlass.Constexpr, first_key, masked):
    """Clear words of V's rows that no row of the tile sees. words: (n) of each of some rows."""
    config, span = work.config, work.span
    if cutlass.const_expr(config.clears_unseen):  # noqa: SIM102
        if masked:
            for own, row in zip(words, rows, strict=True):
                seen = Boolean(first_key + row >= span.first) & Boolean(first_key + row < span.end)
                for w in cutlass.range_constexpr(cute.size(own)):
                    own[w] = Uint32(cutlass.select_(seen, own[w], Uint32(0)))


@cute.jit
def eighth_scales(work, lane: cutlass.Constexpr, blocks, rows: cutlass.Constexpr, first_key, masked) -> tuple:
    """The block scales of this lane's eighth of four rows of V, in fp16.

    Returns (words of rows 0 and 1, words of rows 2 and 3), one word for each block. Scales of rows that no row of the
    tile sees are 0. Returns (None, None) for formats without block scales.
    """
    config, found = work.config, (None, None)
    if cutlass.const_expr(blocks is not None):
        count = max(config.codes.row_blocks // OCTET, 1)
        first = lane.g * config.codes.row_blocks // OCTET
        bytes_ = [cute.make_rmem_tensor(count, Uint32) for _ in rows]
        for own, row in zip(bytes_, rows, strict=True):
            for i in cutlass.range_constexpr(count):
                own[i] = load_shared_byte(scale_address(config, blocks, config.format.v_ring, row, first + i))
        clear_unseen(work, bytes_, rows, first_key, masked)
        found = tuple([scale_of_each(bytes_[r][i], bytes_[r + 1][i]) for i in range(count)] for r in (0, 2))
    return found


def load_vector(lane, base, span, row) -> cute.Tensor:
    """(vector): this lane's eighth of a row of V."""
    words = cute.make_rmem_tensor(lane.vector, Uint32)
    size = lane.vector * WORD_BYTES
    address = lane.chunk(base, span, row, lane.g * size)
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=size)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(lane.vector)), words)
    return words
