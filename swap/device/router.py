"""The router of a swap: decides for each row of a group, and exchanges rows with banks of memory.

z is computed by mma.sync with fp32 sums of exact products. A number of the vector times its norm weight, both bf16, is
exactly the sum of two bf16 numbers, so A has two rows for each of the group's four. Each warp computes eight outputs of
z. Everything that does not depend on the previous phase is fetched before waiting for it: the router's weights, to
registers or to the fused kernel's ring, its norm and head, and each row's map and banks.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint8

from warpspec.common.device import tma
from warpspec.common.device.wgmma import QUAD
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.swap.config import GROUP_ROWS, K_TILE, ROUTER_CHUNK, ROUTER_WIDTH, VECTOR
from warpspec.swap.device.flow import synchronize
from warpspec.swap.device.row_group import columns_of, inverse_rms, put_squares, row_sum, vector_of, warp_sum
from warpspec.swap.weights import BANKS, LANE_BITS

WORDS = 4  # words of a thread's part of a chunk of the router's weights: 8 bf16
MMA_N = 8
ROUTER_CHAINS = 4  # independent chains of products; products of one chain wait for each other
SCORES = 1 + BANKS  # scores of a row: the gate's logit and a score for each bank
PARTS = ROUTER_WIDTH // WARP_THREADS  # outputs of z that a lane has
SWIZZLE_ROWS = 8  # period of the 128-byte swizzle
GATE = 4  # bit of a decision: the gate is open
ROUTER_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
    "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
)


class Router(NamedTuple):
    """The router's constants.

    weights: registers (``load_weights``) or ``RouterTile``. head: from ``load_head``. norm: from ``load_norm``.
    """

    weights: object
    head: cute.Tensor
    norm: cute.Tensor


class RouterTile(NamedTuple):
    """The router's weights in the fused kernel's ring: base, full channel, and the channel's use count."""

    base: cute.Pointer
    full: object
    use: Int32


@cute.jit
def load_weights(config: cutlass.Constexpr, ops, thread) -> cute.Tensor:
    """(WORDS, CHUNK) Int32: a thread's part of the router's weights, for output lane / 4 of the warp's eight.

    They are constant, so this need not wait for another phase.
    """
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    chunks = config.d_model // ROUTER_CHUNK
    words = cute.make_rmem_tensor((WORDS, chunks), Int32)
    row = ops.router_w[warp * MMA_N + lane // QUAD, None]
    for chunk in cutlass.range_constexpr(chunks):
        source = cute.local_tile(row, (2 * WORDS,), (chunk * QUAD + lane % QUAD,))
        cute.autovec_copy(source, cute.recast_tensor(words[None, chunk], BFloat16))
    return words


def chunk_of(config, router, chunk: int, warp, lane) -> cute.Tensor:
    """(WORDS): a thread's part of a chunk of the router's weights, from registers or, if fused, from the ring."""
    if not config.fused:
        return router[None, chunk]
    k_tile, row = chunk * ROUTER_CHUNK // K_TILE, warp * MMA_N + lane // QUAD
    address = router.base.toint() + (k_tile * ROUTER_WIDTH + row) * tma.ROW_BYTES
    column = chunk * ROUTER_CHUNK % K_TILE // (2 * WORDS) + lane % QUAD  # counted in 16 bytes
    address += (column ^ row % SWIZZLE_ROWS) * VECTOR_BYTES
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(WORDS)), words)
    return words


class Held(NamedTuple):
    """A row's map and banks before a swap. No other CTA ever writes them.

    banks: (VECTOR, VECTORS, BANK) bf16, the thread's columns of all banks.
    """

    map: Int32
    banks: cute.Tensor


@cute.jit
def load_held(config: cutlass.Constexpr, ops, at) -> Held:
    vectors = columns_of(config) // VECTOR
    banks = cute.make_rmem_tensor((VECTOR, vectors, BANKS), BFloat16)
    for bank in cutlass.range_constexpr(BANKS):
        for i in cutlass.range_constexpr(vectors):
            cute.autovec_copy(vector_of(ops.ram[at.row, bank, None], i, at.member), banks[None, i, bank])
    return Held(Int32(ops.map[at.row]), banks)


@cute.jit
def load_norm(config: cutlass.Constexpr, ops, member) -> cute.Tensor:
    """(VECTOR, VECTORS) bf16: the router's norm weights for a thread's columns."""
    norm = cute.make_rmem_tensor((VECTOR, columns_of(config) // VECTOR), BFloat16)
    for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
        cute.autovec_copy(vector_of(ops.router_norm, i, member), norm[None, i])
    return norm


@cute.jit
def exchange(config: cutlass.Constexpr, ops, scratch, router, held, at, thread, values, event):
    """Decide for each row; where the gate is open, exchange ``values`` with a bank, in place. All threads call it.

    router: ``Router``. held: the ``Held`` of the thread's row.
    """
    map_, banks = held
    put_squares(values, scratch, at, 1)
    write_terms(config, scratch, router.norm, at, values)
    synchronize()
    multiply(config, scratch, router.weights, thread)
    synchronize()
    total = row_sum(scratch, at, 1)
    gate, logical = decide(ops, scratch, router.head, at, inverse_rms(config, total), event)
    physical = map_ >> (logical * LANE_BITS) & (BANKS - 1)
    gate = gate & at.in_range
    if gate:
        bank = ops.ram[at.row, physical, None]
        for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
            read, written = (cute.make_rmem_tensor(VECTOR, BFloat16) for _ in range(2))
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
            # Lane 0 and the selected lane of the map change places.
            change = (map_ ^ physical) & (BANKS - 1)
            ops.map[at.row] = Uint8(map_ ^ change ^ (change << (logical * LANE_BITS)))


@cute.jit
def write_terms(config: cutlass.Constexpr, scratch, norm, at, values: cute.Tensor):
    """Write each number times its norm weight as two bf16 that sum to it: to rows
    ``row_of_group`` and GROUP_ROWS + ``row_of_group``."""
    for i in cutlass.range_constexpr(columns_of(config) // VECTOR):
        high, low = (cute.make_rmem_tensor(VECTOR, BFloat16) for _ in range(2))
        for j in cutlass.range_constexpr(VECTOR):
            product = values[i * VECTOR + j] * norm[j, i].to(Float32)
            high[j] = product.to(BFloat16)
            low[j] = (product - high[j].to(Float32)).to(BFloat16)
        cute.autovec_copy(high, vector_of(scratch.terms[None, at.row_of_group], i, at.member))
        cute.autovec_copy(low, vector_of(scratch.terms[None, GROUP_ROWS + at.row_of_group], i, at.member))


@cute.jit
def multiply(config: cutlass.Constexpr, scratch, weights, thread):
    """z before the factor 1 / RMS, eight outputs a warp.

    Both operands permute K in every chunk of 32 in the same way, so that a thread's 8 numbers are contiguous.
    """
    warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
    if cutlass.const_expr(config.fused):
        weights.full.wait(weights.use)
    sums = [[Float32(0.0)] * 4 for _ in range(ROUTER_CHAINS)]
    zero = Int32(0)
    row = scratch.terms[None, lane // QUAD]
    for chunk in cutlass.range_constexpr(config.d_model // ROUTER_CHUNK):
        b_words = chunk_of(config, weights, chunk, warp, lane)
        words = cute.make_rmem_tensor(WORDS, Int32)
        source = cute.local_tile(row, (2 * WORDS,), (chunk * QUAD + lane % QUAD,))
        cute.autovec_copy(source, cute.recast_tensor(words, BFloat16))
        for half in cutlass.range_constexpr(2):
            a = (words[2 * half], zero, words[2 * half + 1], zero)  # rows 8 to 15 of A are zeros
            b = (b_words[2 * half], b_words[2 * half + 1])
            chain = (2 * chunk + half) % ROUTER_CHAINS
            sums[chain] = cute.arch.inline_ptx(
                ROUTER_MMA, write_only_types=[Float32] * 4, read_only_args=[*a, *b, *sums[chain]]
            )
    for i in cutlass.range_constexpr(2):
        value = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i])
        # Adds the rows of the low terms.
        value = value + cute.arch.shuffle_sync_bfly(value, GROUP_ROWS * QUAD)
        if lane < GROUP_ROWS * QUAD:
            scratch.z[warp * MMA_N + lane % QUAD * 2 + i, lane // QUAD] = value


@cute.jit
def load_head(ops) -> cute.Tensor:
    """(SCORES, PARTS + 1): factors of a lane's outputs of z for the gate's logit and the banks' scores, then the
    biases.

    They are constant, so this need not wait for another phase.
    """
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
    """(gate, logical bank) of the thread's row; all threads of the row get the same."""
    lane = cute.arch.lane_idx()
    found = [Float32(0.0)] * SCORES
    for part in cutlass.range_constexpr(PARTS):
        z = scratch.z[part * WARP_THREADS + lane, at.row_of_group] * inverse
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
