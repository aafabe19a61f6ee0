"""The rows phases: vectors summed up, exchanged with banks, written with 1 / RMS. Four rows at a time, by 256 threads.

Two warps have a row, a thread of them neighbouring columns, VECTOR at a time. The router's z is a product on mma.sync:
its A rows are the four rows in two terms each, for a vector's number times its norm weight, both bf16, is exactly the
sum of two bf16 numbers; so z is summed in fp32 of exact products. Each warp has eight outputs of z, whose
weights are fetched before the phase waits for what it reads: into registers, or into the fused kernel's ring.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint8

from warpspec.common import tma
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.wgmma import QUAD
from warpspec.swap.config import (
    GROUP_ROWS,
    K_TILE,
    ROUTER_CHUNK,
    ROUTER_WIDTH,
    ROW_THREADS,
    ROW_WARPS,
    TILE_GROUPS,
    VECTOR,
    WARPS,
)
from warpspec.swap.device.flow import count, synchronize, wait_together
from warpspec.swap.weights import BANKS, LANE_BITS

WORDS = 4  # of a quad thread's part of a chunk of the router's weights: 8 bf16
MMA_N = 8
ROUTER_CHAINS = 4  # of products, each waiting for the one before
SCORES = 1 + BANKS  # of a row: the gate's logit, a score of each bank
PARTS = ROUTER_WIDTH // WARP_THREADS  # outputs of z that a lane has
SWIZZLE_ROWS = 8  # after which the 128-byte swizzle repeats
GATE = 4  # of a decision's word
SPLITS_AT_ONCE = 4  # whose partial sums a thread loads before it adds them up
ROUTER_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
    "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
)


class Scratch(NamedTuple):
    """Shared memory of the phase. terms: bf16 (COLUMN, ROW) of GROUP_ROWS high terms and as many low ones; z: fp32
    (OUTPUT, ROW); both None without a router. sums: fp32, two buffers of a number a warp."""

    terms: cute.Tensor | None
    z: cute.Tensor | None
    sums: cute.Tensor


class RowThread(NamedTuple):
    """A thread's place. row: of all rows, clamped. in_range: whether there is such a row. slot: of the group's rows.
    member: of the row's ROW_THREADS."""

    row: Int32
    in_range: Boolean
    slot: Int32
    member: Int32


def warp_sum(value) -> Float32:
    """The same bits in all lanes."""
    for offset in (16, 8, 4, 2, 1):
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
    return value


def columns_of(config) -> int:
    """Columns of a row that a thread has."""
    return config.d_model // ROW_THREADS


def vector_of(row: cute.Tensor, i, member) -> cute.Tensor:
    """(VECTOR): a thread's i-th of a row (D)."""
    return cute.local_tile(row, (VECTOR,), (i * ROW_THREADS + member,))


@cute.jit
def rows_phase(
    config: cutlass.Constexpr,
    kind: cutlass.Constexpr,
    ops,
    scratch,
    flow,
    place,
    event,
    step,
    ring=None,
):
    """All groups of this CTA, neighbours, group after group. By the threads of ``flow.synchronize``.

    kind: of ROWS_PHASES. place: (thread, CTA, CTAs). event: which one. step: FFN steps done. ring: fused,
    ``RouterTile``. Fused, consumes a row tile's down counts and produces its rows counts.
    """
    thread, cta, ctas = place
    rows = ops.vectors.shape[0]
    routes = cutlass.const_expr(kind != "rows")
    router = ring
    if cutlass.const_expr(routes and not config.fused):
        router = load_router(config, ops, thread)
    head, norm = None, None
    if cutlass.const_expr(routes):
        head, norm = load_head(ops), load_norm(config, ops, thread % ROW_THREADS)
    if cutlass.const_expr(not config.fused):
        cute.arch.griddepcontrol_wait()
    groups = cute.ceil_div(rows, GROUP_ROWS)
    first, end = Int32(cta * groups // ctas), Int32((cta + 1) * groups // ctas)
    done = Int32(0)  # groups of the row tile, not counted yet
    for group in cutlass.range(first, end, unroll=1):
        row_tile = group // TILE_GROUPS
        row = group * GROUP_ROWS + thread // ROW_THREADS
        at = RowThread(
            cutlass.min(row, rows - 1), Boolean(row < rows), thread // ROW_THREADS, thread % ROW_THREADS
        )
        held = load_held(config, ops, at) if cutlass.const_expr(routes) else None
        if cutlass.const_expr(config.fused and kind != "first"):  # noqa: SIM102
            if (group == first) | (group % TILE_GROUPS == 0):
                down_tiles = config.d_model // config.tiles.down_n
                wait_together(flow.tile("down", row_tile), step * down_tiles * config.splits, thread)
        values = summed(config, ops, at) if cutlass.const_expr(kind != "first") else spread(config, ops, at)
        if cutlass.const_expr(routes):
            exchange(config, ops, scratch, router, (head, norm, held), at, thread, values, event)
        store(config, ops, at, values)
        put_squares(values, scratch, at, 0)
        synchronize()
        total = row_sum(scratch, at, 0)
        if at.in_range & (at.member == 0):
            ops.inverse[at.row] = inverse_rms(config, total)
        done += 1
        if cutlass.const_expr(config.fused):
            if (group + 1 == end) | ((group + 1) % TILE_GROUPS == 0):
                count(config, flow.tile("rows", row_tile), thread, done)
                done = Int32(0)
            else:
                synchronize()
        else:
            synchronize()  # before the next group writes the scratch


@cute.jit
def spread(config: cutlass.Constexpr, ops, at) -> cute.Tensor:
    """A core's first vector: x * core_scale + core_shift. fp32, rounded to bf16, as the vectors always are."""
    cores = ops.core_scale.shape[0]
    request, core = at.row // cores, at.row % cores
    values = cute.make_rmem_tensor(columns_of(config), Float32)
    for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
        x = cute.make_rmem_tensor(VECTOR, BFloat16)
        scale, shift = (cute.make_rmem_tensor(VECTOR, Float32) for _ in range(2))
        cute.autovec_copy(vector_of(ops.x[request, None], i, at.member), x)
        cute.autovec_copy(vector_of(ops.core_scale[core, None], i, at.member), scale)
        cute.autovec_copy(vector_of(ops.core_shift[core, None], i, at.member), shift)
        for j in cutlass.range_constexpr(VECTOR):
            value = x[j].to(Float32) * scale[j] + shift[j]
            values[i * VECTOR + j] = value.to(BFloat16).to(Float32)
    return values


@cute.jit
def summed(config: cutlass.Constexpr, ops, at) -> cute.Tensor:
    """An FFN step's result: the splits' sums in their order, plus the vector itself where there is a residual."""
    vectors = columns_of(config) // VECTOR
    values = cute.make_rmem_tensor(columns_of(config), Float32)
    for first in cutlass.range_constexpr(0, config.splits, SPLITS_AT_ONCE):
        taken = min(SPLITS_AT_ONCE, config.splits - first)
        parts = cute.make_rmem_tensor((VECTOR, vectors, taken), Float32)
        for split in cutlass.range_constexpr(taken):  # all loads first: they overlap
            for i in cutlass.range_constexpr(vectors):
                source = vector_of(ops.partial[first + split, at.row, None], i, at.member)
                cute.autovec_copy(source, parts[None, i, split])
        for split in cutlass.range_constexpr(taken):
            for i in cutlass.range_constexpr(columns_of(config)):
                part = parts[i % VECTOR, i // VECTOR, split]
                values[i] = part if cutlass.const_expr(first + split == 0) else values[i] + part
    for i in cutlass.range_constexpr(vectors):
        old = cute.make_rmem_tensor(VECTOR, BFloat16)
        if cutlass.const_expr(config.residual):
            cute.autovec_copy(vector_of(ops.vectors[at.row, None], i, at.member), old)
        for j in cutlass.range_constexpr(VECTOR):
            value = values[i * VECTOR + j]
            if cutlass.const_expr(config.residual):
                value = value + old[j].to(Float32)
            values[i * VECTOR + j] = value.to(BFloat16).to(Float32)
    return values


def squares(values: cute.Tensor) -> Float32:
    total = Float32(0.0)
    for i in range(cute.size(values)):
        total = total + values[i] * values[i]
    return total


@cute.jit
def put_squares(values: cute.Tensor, scratch, at, buffer: cutlass.Constexpr):
    """Write the warp's sum of squares of its part of a row to one of two buffers, for ``row_sum`` behind a barrier."""
    value = warp_sum(squares(values))
    if cute.arch.lane_idx() == 0:
        scratch.sums[buffer * WARPS + at.slot * ROW_WARPS + at.member // WARP_THREADS] = value


def row_sum(scratch, at, buffer: int) -> Float32:
    """The sum over a row's warps, the same bits in all threads."""
    total = Float32(0.0)
    for warp in range(ROW_WARPS):
        total = total + scratch.sums[buffer * WARPS + at.slot * ROW_WARPS + warp]
    return total


def inverse_rms(config, total) -> Float32:
    """1 / sqrt(mean of squares + eps)."""
    return cute.math.rsqrt(total * (1.0 / config.d_model) + config.eps)


@cute.jit
def store(config: cutlass.Constexpr, ops, at, values: cute.Tensor):
    """Write the vector in bf16."""
    if at.in_range:
        for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
            rounded = cute.make_rmem_tensor(VECTOR, BFloat16)
            for j in cutlass.range_constexpr(VECTOR):
                rounded[j] = values[i * VECTOR + j].to(BFloat16)
            cute.autovec_copy(rounded, vector_of(ops.vectors[at.row, None], i, at.member))


# The router and the exchange.


class RouterTile(NamedTuple):
    """The router's weights in the fused kernel's ring: its base, their full channel, which use of it."""

    base: cute.Pointer
    full: object
    use: Int32


@cute.jit
def load_router(config: cutlass.Constexpr, ops, thread) -> cute.Tensor:
    """(WORDS, CHUNK) Int32: a thread's part of the router's weights, of output lane / 4 of the warp's eight. They are
    constant: no phase need be waited for."""
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    chunks = config.d_model // ROUTER_CHUNK
    words = cute.make_rmem_tensor((WORDS, chunks), Int32)
    row = ops.router_w[warp * MMA_N + lane // QUAD, None]
    for chunk in cutlass.range_constexpr(chunks):
        source = cute.local_tile(row, (2 * WORDS,), (chunk * QUAD + lane % QUAD,))
        cute.autovec_copy(source, cute.recast_tensor(words[None, chunk], BFloat16))
    return words


def chunk_of(config, router, chunk: int, warp, lane) -> cute.Tensor:
    """(WORDS): a thread's part of a chunk of the router's weights, in registers or, fused, in the ring."""
    if not config.fused:
        return router[None, chunk]
    k_tile, row = chunk * ROUTER_CHUNK // K_TILE, warp * MMA_N + lane // QUAD
    address = router.base.toint() + (k_tile * ROUTER_WIDTH + row) * tma.ROW_BYTES
    column = chunk * ROUTER_CHUNK % K_TILE // (2 * WORDS) + lane % QUAD  # in units of 16 bytes
    address += (column ^ row % SWIZZLE_ROWS) * VECTOR_BYTES
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WORDS)), words)
    return words


class Held(NamedTuple):
    """What a thread's row holds before a swap: its map; banks: (VECTOR, VECTORS, BANK) bf16, the thread's columns of
    all of them, or None. No other CTA ever writes them, so they are fetched before the phase waits."""

    map: Int32
    banks: cute.Tensor | None


@cute.jit
def load_held(config: cutlass.Constexpr, ops, at) -> Held:
    banks = None
    if cutlass.const_expr("P" in config.tiles.tricks):
        banks = cute.make_rmem_tensor((VECTOR, columns_of(config) // VECTOR, BANKS), BFloat16)
        for bank in cutlass.range_constexpr(BANKS):
            for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
                cute.autovec_copy(vector_of(ops.ram[at.row, bank, None], i, at.member), banks[None, i, bank])
    return Held(Int32(ops.map[at.row]), banks)


@cute.jit
def load_norm(config: cutlass.Constexpr, ops, member) -> cute.Tensor:
    """(VECTOR, VECTORS) bf16: the router's norm weights of a thread's columns."""
    norm = cute.make_rmem_tensor((VECTOR, columns_of(config) // VECTOR), BFloat16)
    for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
        cute.autovec_copy(vector_of(ops.router_norm, i, member), norm[None, i])
    return norm


@cute.jit
def exchange(config: cutlass.Constexpr, ops, scratch, router, early, at, thread, values, event):
    """The router's decision on each row; where its gate is open, ``values`` and a bank change places, in place. All
    threads call it.

    early: what was fetched before the phase waited: the router's head, norm weights, ``Held``.
    """
    head, norm, held = early
    map_, banks = held
    put_squares(values, scratch, at, 1)
    write_terms(config, scratch, norm, at, values)
    synchronize()
    multiply_router(config, scratch, router, thread)
    synchronize()
    total = row_sum(scratch, at, 1)
    gate, logical = decide(ops, scratch, head, at, inverse_rms(config, total), event)
    physical = map_ >> (logical * LANE_BITS) & (BANKS - 1)
    gate = gate & at.in_range
    if gate:
        bank = ops.ram[at.row, physical, None]
        for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
            read, written = (cute.make_rmem_tensor(VECTOR, BFloat16) for _ in range(2))
            if cutlass.const_expr(banks is None):
                cute.autovec_copy(vector_of(bank, i, at.member), read)
            else:
                chosen = cute.recast_tensor(read, Int32)
                for word in cutlass.range_constexpr(cute.size(chosen)):
                    found = cute.recast_tensor(banks[None, i, 0], Int32)[word]
                    for other in cutlass.range_constexpr(1, BANKS):
                        of_other = cute.recast_tensor(banks[None, i, other], Int32)[word]
                        found = Int32(cutlass.select_(physical == other, of_other, found))
                    chosen[word] = found
            for j in cutlass.range_constexpr(VECTOR):
                written[j] = values[i * VECTOR + j].to(BFloat16)
                values[i * VECTOR + j] = read[j].to(Float32)
            cute.autovec_copy(written, vector_of(bank, i, at.member))
        if at.member == 0:
            # Lane 0 and the selected one change places.
            change = (map_ ^ physical) & (BANKS - 1)
            ops.map[at.row] = Uint8(map_ ^ change ^ (change << (logical * LANE_BITS)))


@cute.jit
def write_terms(config: cutlass.Constexpr, scratch, norm, at, values: cute.Tensor):
    """Each number times its norm weight as two bf16 that sum to it: row ``slot`` and row GROUP_ROWS + slot."""
    for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
        high, low = (cute.make_rmem_tensor(VECTOR, BFloat16) for _ in range(2))
        for j in cutlass.range_constexpr(VECTOR):
            product = values[i * VECTOR + j] * norm[j, i].to(Float32)
            high[j] = product.to(BFloat16)
            low[j] = (product - high[j].to(Float32)).to(BFloat16)
        cute.autovec_copy(high, vector_of(scratch.terms[None, at.slot], i, at.member))
        cute.autovec_copy(low, vector_of(scratch.terms[None, GROUP_ROWS + at.slot], i, at.member))


@cute.jit
def multiply_router(config: cutlass.Constexpr, scratch, router, thread):
    """z before 1 / RMS, eight outputs a warp.

    K is permuted in every chunk of 32, alike for both operands, so that a thread's 8 numbers of it lie together.
    """
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    if cutlass.const_expr(config.fused):
        router.full.wait(router.use)
    sums = [[Float32(0.0)] * 4 for _ in range(ROUTER_CHAINS)]
    zero = Int32(0)
    row = scratch.terms[None, lane // QUAD]
    for chunk in cutlass.range_constexpr(config.d_model // ROUTER_CHUNK):
        weights = chunk_of(config, router, chunk, warp, lane)
        words = cute.make_rmem_tensor(WORDS, Int32)
        source = cute.local_tile(row, (2 * WORDS,), (chunk * QUAD + lane % QUAD,))
        cute.autovec_copy(source, cute.recast_tensor(words, BFloat16))
        for half in cutlass.range_constexpr(2):
            a = (words[2 * half], zero, words[2 * half + 1], zero)  # rows 8 to 15 of A are zeros
            b = (weights[2 * half], weights[2 * half + 1])
            chain = (2 * chunk + half) % ROUTER_CHAINS
            sums[chain] = cute.arch.inline_ptx(
                ROUTER_MMA, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *sums[chain]]
            )
    for i in cutlass.range_constexpr(2):
        value = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])
        value = value + cute.arch.shuffle_sync_bfly(value, GROUP_ROWS * QUAD)  # the low terms' rows
        if lane < GROUP_ROWS * QUAD:
            scratch.z[warp * MMA_N + lane % QUAD * 2 + i, lane // QUAD] = value


@cute.jit
def load_head(ops) -> cute.Tensor:
    """(SCORES, PARTS + 1): what a lane multiplies its outputs of z by for the gate's logit and the banks' scores, then
    their biases. Constant: no phase need be waited for."""
    lane = cute.arch.lane_idx()
    head = cute.make_rmem_tensor((SCORES, PARTS + 1), Float32)
    for part in cutlass.range_constexpr(PARTS):
        output = part * WARP_THREADS + lane
        head[0, part] = ops.swap_w[output].to(Float32)
        for bank in cutlass.range_constexpr(BANKS):
            head[1 + bank, part] = ops.bank_w[output, bank].to(Float32)
    head[0, PARTS] = ops.swap_b[0].to(Float32)
    for bank in cutlass.range_constexpr(BANKS):
        head[1 + bank, PARTS] = ops.bank_b[bank].to(Float32)
    return head


@cute.jit
def decide(ops, scratch, head, at, inverse, event) -> tuple:
    """(gate, logical bank) of the thread's row, the same in all its threads."""
    lane = cute.arch.lane_idx()
    found = [Float32(0.0)] * SCORES
    for part in cutlass.range_constexpr(PARTS):
        z = scratch.z[part * WARP_THREADS + lane, at.slot] * inverse
        for i in cutlass.range_constexpr(SCORES):
            found[i] = found[i] + z * head[i, part]
    logit, *scores = (warp_sum(found[i]) + head[i, PARTS] for i in range(SCORES))
    gate = Boolean(logit > Float32(0.0))
    logical, best, second = Int32(0), scores[0], -Float32.inf
    for bank in cutlass.range_constexpr(1, BANKS):
        higher = Boolean(scores[bank] > best)
        second = Float32(cutlass.select_(higher, best, cute.arch.fmax(second, scores[bank])))
        logical = Int32(cutlass.select_(higher, Int32(bank), logical))
        best = Float32(cutlass.select_(higher, scores[bank], best))
    if cutlass.const_expr(ops.recorded is not None):  # noqa: SIM102
        if (at.member == 0) & at.in_range:
            ops.recorded[event, at.row] = Uint8(logical + Int32(gate) * GATE)
            ops.margins[event, at.row, 0] = logit
            ops.margins[event, at.row, 1] = best - second
    if cutlass.const_expr(ops.forced is not None):
        word = Int32(ops.forced[event, at.row])
        gate, logical = Boolean(word >= GATE), word % GATE
    return gate, logical
