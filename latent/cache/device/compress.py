"""Compress: pool 4 or 128 tokens to an entry by a softmax over each channel, store it, and update the tails.

Each of the first CTAs has one request. It makes the entries that need tokens of earlier calls (two at most) and then
writes the request's tail. A thread keeps the same channels from the first load to the last store, so it has read its
part of the tail before it writes there. Each further CTA has ``stride`` neighbouring tokens of the call. At most one of
them completes an entry that is made of new tokens alone: two such tokens of one request are ``stride`` apart, and the
request's first is its ``reach``-th token or a later one. The host knows neither the lengths nor which entries are
complete.

A start before the end of the settled tokens, or past the tokens written, asks for tokens that the state does not hold.
Entries that would need them become NaN.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS
from warpspec.common.launch import Kernel
from warpspec.common.logarithms import LOG2_E
from warpspec.common.operands import fakes
from warpspec.latent.cache.config import VECTOR, CompressConfig
from warpspec.latent.cache.device.insert import load_weights
from warpspec.latent.cache.device.rows import (
    hadamard_transform,
    load_angles,
    normalize,
    rotate,
    store_row,
    to_bf16,
)
from warpspec.latent.cache.models import CONTENT_AND_GATE, ONLINE_NUMBERS
from warpspec.latent.cache.operands import CompressOperands, PoolNumbers
from warpspec.latent.cache.state import SETTLED, WRITTEN

FOLD_BATCH = 8  # tokens whose loads are in flight together
CONTENT, GATE = range(CONTENT_AND_GATE)


class Compress:
    """``Compress(config)(...)`` is the host function."""

    def __init__(self, config: CompressConfig):
        self.config = config

    @host_function(CompressOperands, PoolNumbers)
    def __call__(self, operands: CompressOperands, numbers: PoolNumbers, stream: CUstream):
        """Launch the kernel."""
        groups = cute.ceil_div(operands.new.shape[0], self.config.stride)
        self.kernel(operands, *numbers).launch(
            grid=(operands.requests.shape[0] + groups, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, operands, page_size, eps):
        block, _, _ = cute.arch.block_idx()
        requests = operands.requests.shape[0]
        if block < requests:
            request_cta(self.config, operands, page_size, eps, block)
        else:
            group_cta(self.config, operands, page_size, eps, block - requests)


@cute.jit
def request_cta(config: cutlass.Constexpr, operands, page_size, eps, number):
    """Make the entries of one request that need its tail, then update the tail."""
    progress, tokens = operands.progress, operands.new.shape[0]
    request = Int32(operands.requests[number])
    begin, count = extent_of(operands.cu_seqlens, number, tokens)
    start = Int32(operands.starts[number])
    if (count > 0) & (start >= 0) & (request >= 0) & (request < progress.shape[0]):
        written, before = Int32(progress[request, WRITTEN]), Int32(progress[request, SETTLED])
        cute.arch.sync_threads()  # every thread has read progress before one of them writes it at the end
        whole = Boolean(start == 0) | (Boolean(before <= start) & Boolean(start <= written))
        if (start == 0) | (whole == Boolean(False)):
            before = start
        settled = cutlass.max(before, start + count - config.max_draft)
        at = (begin, start, start + count)
        if cutlass.const_expr(config.tail == "csa"):
            csa_request(config, operands, page_size, eps, operands.tail[request, None, None, None], at, whole)
        else:
            of_request = (operands.tail[request, None, None, None], operands.online[request, None, None])
            hca_request(config, operands, page_size, eps, of_request, at, whole, (before, settled))
        if cute.arch.thread_idx()[0] == 0:
            progress[request, WRITTEN] = start + count
            progress[request, SETTLED] = settled


@cute.jit
def group_cta(config: cutlass.Constexpr, operands, page_size, eps, group):
    """Make the entry of new tokens alone that one of ``stride`` neighbouring tokens completes, if there is one."""
    new, ape, cu_seqlens = operands.new, operands.ape, operands.cu_seqlens
    tokens, states = new.shape[0], operands.progress.shape[0]
    number = request_of(cu_seqlens, group * config.stride, tokens)
    begin, count = extent_of(cu_seqlens, number, tokens)
    start, request = Int32(operands.starts[number]), Int32(operands.requests[number])
    # The first position in the group that completes an entry.
    position = start + cutlass.max(group * config.stride - begin, 0)
    last = (position // config.stride + 1) * config.stride - 1
    token = begin + last - start
    mine = Boolean(token < cutlass.min((group + 1) * config.stride, begin + count))
    mine = mine & Boolean(start >= 0) & Boolean(request >= 0) & Boolean(request < states)
    if mine & (last - config.reach + 1 >= start):
        at = (begin, start, start + count)
        if cutlass.const_expr(config.tail == "csa"):
            pooled = csa_pooled(config, new, ape, None, at, last, Boolean(True))
        else:
            state = fold_new(config, new, ape, at, last - config.stride + 1, last + 1, empty_fold())
            pooled = pooled_of(state)
        finish(config, operands, page_size, eps, pooled, last, token)


@cute.jit
def csa_request(config: cutlass.Constexpr, operands, page_size, eps, tail, at, whole):
    """Make the entries of a CSA request that need its tail, then write the new tokens to the tail.

    tail: the request's (RING, 2, 2 dim). at: (index of its first token, that token's position, end of its positions).
    """
    new, ape = operands.new, operands.ape
    begin, start, end = at
    for i in cutlass.range_constexpr(2):
        last = (start // config.stride + i + 1) * config.stride - 1
        if (last < end) & (last - config.reach + 1 < start):
            pooled = csa_pooled(config, new, ape, tail, at, last, whole)
            finish(config, operands, page_size, eps, pooled, last, begin + last - start)
    if whole == Boolean(False):
        nothing = [Float32.nan] * VECTOR
        for row in cutlass.range(config.ring, unroll=1):
            for half in cutlass.range_constexpr(config.series):
                for which in cutlass.range_constexpr(CONTENT_AND_GATE):
                    store_channels(tail[row, which, None], half, nothing)
    for position in cutlass.range(cutlass.max(start, end - config.ring), end, unroll=1):
        for half in cutlass.range_constexpr(config.series):
            content, gate = new_channels(config, new, ape, at, position, half)
            store_channels(tail[position % config.ring, CONTENT, None], half, content)
            store_channels(tail[position % config.ring, GATE, None], half, gate)


@cute.jit
def csa_pooled(config: cutlass.Constexpr, new, ape, tail, at, last, whole) -> list:
    """fp32 [VECTOR]: the thread's channels of the entry that the token at position ``last`` completes.

    A softmax over the reach's tokens; the earlier half contributes its first channels, the later half its second. tail:
    (RING, 2, 2 dim), or None where all tokens are new. whole: whether the tail holds the tokens before start; if not,
    tokens read from it count as NaN.
    """
    _, start, _ = at
    contents = cute.make_rmem_tensor((VECTOR, config.reach), Float32)
    gates = cute.make_rmem_tensor((VECTOR, config.reach), Float32)
    gates.fill(-Float32.inf)
    contents.fill(0.0)
    for i in cutlass.range_constexpr(config.reach):
        position = last - config.reach + 1 + i
        half = i // config.stride
        if cutlass.const_expr(tail is None):
            content, gate = new_channels(config, new, ape, at, position, half)
            put(contents[None, i], content), put(gates[None, i], gate)
        else:
            if position >= start:
                content, gate = new_channels(config, new, ape, at, position, half)
                put(contents[None, i], content), put(gates[None, i], gate)
            elif position >= 0:
                row = tail[position % config.ring, None, None]
                put(contents[None, i], load_channels(row[CONTENT, None], half))
                put(gates[None, i], load_channels(row[GATE, None], half))
                if whole == Boolean(False):
                    gates[None, i].fill(Float32.nan)
    pooled = []
    for v in cutlass.range_constexpr(VECTOR):
        largest = gates[v, 0]
        for i in cutlass.range_constexpr(1, config.reach):
            largest = cute.arch.fmax(largest, gates[v, i], nan=True)
        total, weighted = Float32(0.0), Float32(0.0)
        for i in cutlass.range_constexpr(config.reach):
            weight = cute.math.exp2((gates[v, i] - largest) * LOG2_E, fastmath=True)
            total += weight
            weighted += weight * contents[v, i]
        pooled.append(weighted / total)
    return pooled


@cute.jit
def hca_request(config: cutlass.Constexpr, operands, page_size, eps, of_request, at, whole, settled):
    """Make the entry of an HCA request that needs its fold, then update fold and ring.

    of_request: the request's (RING, 2, dim) and (3, dim). settled: how many tokens its fold holds before and after the
    call; the tokens from there to the end stand in the ring, max_draft at most.
    """
    new, ape = operands.new, operands.ape
    tail, online = of_request
    begin, start, end = at
    before, settled = settled
    # 1. Load the state's fold and add the ring's tokens that this call settles.
    state = empty_fold()
    if before % config.stride != 0:
        for i in cutlass.range_constexpr(ONLINE_NUMBERS):
            put(state[None, i], load_channels(online[i, None], 0))
    if (whole == Boolean(False)) & (start % config.stride != 0):
        state.fill(Float32.nan)
    reached = cutlass.min(settled, start)
    state = fold_kept(config, tail, before, reached, state)
    # 2. Complete the window that start lies in, if this call reaches its end.
    last = (start // config.stride + 1) * config.stride - 1
    if (last < end) & (start % config.stride != 0):
        complete = cute.make_rmem_tensor((VECTOR, ONLINE_NUMBERS), Float32)
        copy(state, complete)
        complete = fold_kept(config, tail, reached, start, complete)
        complete = fold_new(config, new, ape, at, start, last + 1, complete)
        finish(config, operands, page_size, eps, pooled_of(complete), last, begin + last - start)
    # 3. Store the fold of all settled tokens, and the other new tokens as rows of the ring.
    first = settled // config.stride * config.stride
    if first > start:
        clear(state)
    state = fold_new(config, new, ape, at, cutlass.max(first, start), settled, state)
    for i in cutlass.range_constexpr(ONLINE_NUMBERS):
        store_channels(online[i, None], 0, [state[v, i] for v in range(VECTOR)])
    if cutlass.const_expr(config.ring > 0):
        for position in cutlass.range(cutlass.max(start, settled), end, unroll=1):
            content, gate = new_channels(config, new, ape, at, position, 0)
            store_channels(tail[position % config.ring, CONTENT, None], 0, content)
            store_channels(tail[position % config.ring, GATE, None], 0, gate)


def empty_fold() -> cute.Tensor:
    """(VECTOR, 3): an empty fold of the thread's channels: largest gate, sum, weighted sum."""
    state = cute.make_rmem_tensor((VECTOR, ONLINE_NUMBERS), Float32)
    clear(state)
    return state


def clear(state: cute.Tensor) -> None:
    for v in range(VECTOR):
        state[v, 0], state[v, 1], state[v, 2] = -Float32.inf, Float32(0.0), Float32(0.0)


def copy(source: cute.Tensor, target: cute.Tensor) -> None:
    for i in range(cute.size(source)):
        target[i] = source[i]


def pooled_of(state: cute.Tensor) -> list:
    """The pooled channels of a fold: weighted sum / sum."""
    return [state[v, 2] / state[v, 1] for v in range(VECTOR)]


@cute.jit
def fold_kept(config: cutlass.Constexpr, tail, first, end, state: cute.Tensor) -> cute.Tensor:
    """Add the ring's tokens at positions ``first`` to ``end`` - 1 to the fold, in place; a new window empties it."""
    if cutlass.const_expr(config.ring > 0):
        for position in cutlass.range(first, end, unroll=1):
            row = tail[position % config.ring, None, None]
            fold(state, load_channels(row[CONTENT, None], 0), load_channels(row[GATE, None], 0))
            if (position + 1) % config.stride == 0:
                clear(state)
    return state


@cute.jit
def fold_new(config: cutlass.Constexpr, new, ape, at, first, end, state: cute.Tensor) -> cute.Tensor:
    """Add the new tokens at positions ``first`` to ``end`` - 1 to the fold, in place."""
    count = cutlass.max(end - first, 0)
    batches = count // FOLD_BATCH
    for batch in cutlass.range(batches, unroll=1):
        loaded = cute.make_rmem_tensor((VECTOR, CONTENT_AND_GATE, FOLD_BATCH), Float32)
        for i in cutlass.range_constexpr(FOLD_BATCH):
            content, gate = new_channels(config, new, ape, at, first + batch * FOLD_BATCH + i, 0)
            put(loaded[None, CONTENT, i], content), put(loaded[None, GATE, i], gate)
        for i in cutlass.range_constexpr(FOLD_BATCH):
            fold(state, *([loaded[v, which, i] for v in range(VECTOR)] for which in (CONTENT, GATE)))
    for position in cutlass.range(first + batches * FOLD_BATCH, end, unroll=1):
        content, gate = new_channels(config, new, ape, at, position, 0)
        fold(state, content, gate)
    return state


def fold(state: cute.Tensor, content: list, gate: list) -> None:
    """Add one token to the fold, in place, as ``reference.fold`` does."""
    for v in range(VECTOR):
        largest, total, weighted = state[v, 0], state[v, 1], state[v, 2]
        apart = gate[v] - largest
        above = Boolean(gate[v] > largest)
        down = Float32(cutlass.select_(Boolean(apart > 0.0), -apart, apart))  # NaN stays
        factor = cute.math.exp2(down * LOG2_E, fastmath=True)
        factor = Float32(cutlass.select_(Boolean(gate[v] == -Float32.inf), Float32(0.0), factor))
        state[v, 0] = Float32(cutlass.select_(above, gate[v], largest))
        state[v, 1] = Float32(cutlass.select_(above, total * factor + 1.0, total + factor))
        state[v, 2] = Float32(
            cutlass.select_(above, weighted * factor + content[v], weighted + factor * content[v])
        )


@cute.jit
def finish(config: cutlass.Constexpr, operands, page_size, eps, pooled: cutlass.Constexpr, last, token):
    """Store the entry that position ``last`` completes. pooled: the thread's channels, a list."""
    thread, _, _ = cute.arch.thread_idx()
    numbers = config.dim // WARP_THREADS
    smem = cutlass.memory.SmemAllocator()
    channels = smem.allocate_tensor(Float32, cute.make_layout(config.dim), byte_alignment=VECTOR_BYTES)
    cute.arch.sync_threads()  # the previous entry has been read
    store_channels(channels, 0, pooled)
    cute.arch.sync_threads()
    if thread < WARP_THREADS:
        row = cute.make_rmem_tensor(numbers, Float32)
        cute.autovec_copy(cute.local_tile(channels, (numbers,), (thread,)), row)
        angles = load_angles(operands.cos_sin, last - (config.stride - 1), thread, numbers)
        weights = load_weights(operands.weight, thread, numbers)
        values = to_bf16([row[i] for i in range(numbers)])
        values = to_bf16(rotate(to_bf16(normalize(values, eps, weights)), angles))
        if cutlass.const_expr(config.hadamard):
            values = to_bf16(hadamard_transform(values, thread))
        store_row(config.fmt, operands.pool, page_size, Int32(operands.slots[token]), values, thread)


@cute.jit
def request_of(cu_seqlens: cute.Tensor, token, tokens) -> Int32:
    """The request that a token belongs to: the last one that begins at or before it. Executed by a whole warp."""
    lane = cute.arch.lane_idx()
    requests = Int32(cute.size(cu_seqlens) - 1)
    begun = Int32(0)
    for i in cutlass.range(lane, requests, WARP_THREADS, unroll=4):
        begun += Int32(Boolean(entry(cu_seqlens, i, tokens) <= token))
    begun = Int32(cute.arch.warp_redux_sync(begun, "add"))
    return cutlass.max(begun - 1, 0)


def entry(cu_seqlens: cute.Tensor, number, tokens) -> Int32:
    """Offset of a request's first token, clamped to 0..tokens."""
    return cutlass.max(cutlass.min(Int32(cu_seqlens[number]), tokens), 0)


def extent_of(cu_seqlens: cute.Tensor, number, tokens) -> tuple[Int32, Int32]:
    """(first token, number of tokens) of a request; the number is never negative, whatever cu_seqlens hold."""
    first = entry(cu_seqlens, number, tokens)
    return first, cutlass.max(entry(cu_seqlens, number + 1, tokens) - first, 0)


def new_channels(config, new, ape, at, position, half) -> tuple[list, list]:
    """(C, Z + positional bias) of a new token: the thread's channels of one half."""
    begin, start, _ = at
    token = new[begin + position - start, None, None]
    content, gate = (load_channels(token[which, None], half) for which in (CONTENT, GATE))
    bias = load_channels(ape[position % config.stride, None], half)
    return content, [x + y for x, y in zip(gate, bias, strict=True)]


def load_channels(row: cute.Tensor, half) -> list:
    """The thread's channels, fp32, of half ``half`` of row (c dim)."""
    thread, _, _ = cute.arch.thread_idx()
    loaded = cute.make_rmem_tensor(VECTOR, row.element_type)
    threads, _, _ = cute.arch.block_dim()
    cute.autovec_copy(cute.local_tile(row, (VECTOR,), (half * threads + thread,)), loaded)
    return [loaded[v].to(Float32) for v in range(VECTOR)]


def store_channels(row: cute.Tensor, half, values: list) -> None:
    """Store the thread's channels to half ``half`` of an fp32 row (c dim)."""
    thread, _, _ = cute.arch.thread_idx()
    threads, _, _ = cute.arch.block_dim()
    vector = cute.make_rmem_tensor(VECTOR, Float32)
    put(vector, values)
    cute.autovec_copy(vector, cute.local_tile(row, (VECTOR,), (half * threads + thread,)))


def put(target: cute.Tensor, values: list) -> None:
    """Copy values to registers target (n)."""
    for i, value in enumerate(values):
        target[i] = value


def host_and_arguments(config: CompressConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return (Compress(config), *fakes(CompressOperands, config), *fakes(PoolNumbers, config))


COMPRESS = Kernel("cache.compress", host_and_arguments)  # by CompressConfig
