"""Scores of index keys on sm_90a: S = K Q^T on e4m3 tensor cores, then a weighted sum of ReLUs over the heads.

A warpgroup takes 64 keys at a time as rows of A, straight from memory into registers: a row is four blocks of 32
numbers, a lane's each. wgmma wants a row's numbers dealt to lanes by fours; a sum does not mind their order, so the
queries lie in shared memory in the order in which lanes have the keys'. FP4 becomes e4m3 by a table of eight bytes,
which a byte permutation looks up: one power of two for each block, relative to the row's largest, is in the table. What
is left of the scales, one power of two a row, is multiplied in at the end, that of a query's head into its weight: ReLU
commutes with it. Exact while the scales of a row's blocks are at most 2**11 apart, and nearly so beyond.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.common.launch import Kernel
from warpspec.indexer.sm90.config import BLOCKS, E4M3_SHIFT, SCALE_STEPS, TILE_KEYS, ScoresConfig, e4m3_table

E4M3 = cutlass.Float8E4M3FN
WORD_BYTES = 4
ROW_BYTES = 128  # of a query in shared memory: one span of the swizzle
WORDS = 8  # of e4m3, of a block
STEPS = 4  # of 32 numbers, of a product
THREAD_ROWS, ROW_DISTANCE, WARP_ROWS = 2, 8, 16  # as wgmma's fragments have them
SCALE_NAN, SCALE_BIAS = 255, 127
FP32_EXPONENT_BIT = 23
CODES, SIGNS = 0x77777777, 0x80808080
FP32_NAN = 0x7FC00000


class Scores:
    """``Scores(config)(...)`` is the host function."""

    def __init__(self, config: ScoresConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        queries: cute.Tensor,
        weights: cute.Tensor,
        pool: cute.Tensor,
        page_table: cute.Tensor,
        requests: cute.Tensor,
        lengths: cute.Tensor,
        logits: cute.Tensor,
        page_size: Int32,
        parts: Int32,
        stream: CUstream,
    ):
        """queries: [T, words], a page of H rows each. weights: fp32 [T, H]. pool: [pages, words]. page_table: int32
        [R, pages]. requests, lengths: int32 [T]. logits: fp32 [T, N]. parts: CTAs of a query."""
        arguments = (queries, weights, pool, page_table, requests, lengths, logits, page_size, parts)
        self.kernel(*arguments).launch(
            grid=(parts, queries.shape[0], 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, queries, weights, pool, page_table, requests, lengths, logits, page_size, parts):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        part, token, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        layout = hopper.make_smem_layout_b(
            LayoutEnum.ROW_MAJOR, (TILE_KEYS, config.heads, config.fmt.dim), E4M3, 1
        )
        base = smem.allocate(config.heads * ROW_BYTES, 1024)
        q = cute.make_tensor(cute.recast_ptr(base, layout.inner, dtype=E4M3), layout.outer)
        table = smem.allocate_tensor(Uint32, cute.make_layout((2, SCALE_STEPS + 1)), byte_alignment=8)
        factors = smem.allocate_tensor(Float32, cute.make_layout(config.heads), byte_alignment=16)

        # 1. The table; then the query, its scales into its weights.
        for number, entry in enumerate(e4m3_table()):
            if thread == number:
                table[0, number], table[1, number] = Uint32(entry[0]), Uint32(entry[1])
        cute.arch.sync_threads()
        prepare(config, queries[token, None], weights[token, None], base.toint(), table, factors, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

        # 2. Tiles of keys, a warpgroup's own.
        own = thread % WARPGROUP_THREADS
        mma = hopper.make_trivial_tiled_mma(
            E4M3,
            E4M3,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (TILE_KEYS, config.heads),
            warpgroup.OperandSource.RMEM,
        )
        mma_slice = mma.get_slice(own)
        b = mma.make_fragment_B(mma_slice.partition_B(q))[None, None, None, 0]
        a = cute.make_rmem_tensor(mma.partition_shape_A((TILE_KEYS, config.fmt.dim)), E4M3)
        scores = cute.make_rmem_tensor(mma.partition_shape_C((TILE_KEYS, config.heads)), Float32)
        lane = own % WARP_THREADS
        member = lane % BLOCKS
        columns = [8 * (i // 2) + i % 2 for i in range(config.heads // 4)]  # of the quad's first lane
        weight = [factors[column + 2 * member] for column in columns]
        request = cutlass.max(cutlass.min(Int32(requests[token]), page_table.shape[0] - 1), 0)
        pages = page_table[request, None]
        length = cutlass.max(cutlass.min(Int32(lengths[token]), page_table.shape[1] * page_size), 0)
        row = own // WARP_THREADS * WARP_ROWS + lane // BLOCKS
        keys = logits.shape[1]
        step = parts * config.warpgroups
        first = part * config.warpgroups + thread // WARPGROUP_THREADS
        tiles = cute.ceil_div(keys, TILE_KEYS)
        words = cute.make_rmem_tensor((loaded_words(config), THREAD_ROWS), Uint32)
        here = load_tile(config, pool, pages, page_size, length, first * TILE_KEYS + row, member, words)
        for tile in cutlass.range(first, tiles, step, unroll=1):
            row_factors = convert(config, words, table, member, a)
            there = here
            here = load_tile(
                config, pool, pages, page_size, length, (tile + step) * TILE_KEYS + row, member, words
            )
            warpgroup.fence()
            for k in cutlass.range_constexpr(STEPS):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                cute.gemm(mma, scores, a[None, None, k], b[None, None, k], scores)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            store_tile(
                config,
                scores,
                weight,
                row_factors,
                there,
                logits[token, None],
                tile * TILE_KEYS + row,
                member,
            )


def loaded_words(config) -> int:
    """Words that a lane loads of a row: its block, and the row's scales."""
    return (4 if config.format == "mxfp4" else WORDS) + 1


@cute.jit
def prepare(config: cutlass.Constexpr, query, weights, base, table, factors, thread):
    """The query's heads in e4m3, in the order of the keys' numbers; factors (H): weights times the heads' scales."""
    head, block = thread // BLOCKS, thread % BLOCKS
    if head < config.heads:
        fmt = config.fmt
        block_words = loaded_words(config) - 1
        words = cute.make_rmem_tensor((loaded_words(config), 1), Uint32)
        for i in cutlass.range_constexpr(block_words):
            words[i, 0] = query[head * (fmt.data_bytes // WORD_BYTES) + block * block_words + i]
        words[block_words, 0] = query[config.heads * (fmt.data_bytes // WORD_BYTES) + head]
        out, factor = block_of(config, words[None, 0], table, block)
        for i in cutlass.range_constexpr(WORDS):  # i: half of a step, in the order of steps
            chunk = Int32(i) ^ (head % 8)
            at = base + head * ROW_BYTES + chunk * VECTOR_BYTES + block * WORD_BYTES
            pointer = cute.make_ptr(Uint32, Int32(at), cute.AddressSpace.smem, assumed_align=WORD_BYTES)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = out[i]
        if block == 0:
            factors[head] = Float32(weights[head]) * factor


@cute.jit
def load_tile(
    config: cutlass.Constexpr, pool, pages, page_size, length, key, member, words: cute.Tensor
) -> tuple:
    """Issue the loads of the thread's two keys, ``key`` and the one ROW_DISTANCE on: words (WORD, ROW). Returns for
    each whether there is one."""
    here = []
    fmt = config.fmt
    block_words = loaded_words(config) - 1
    for r in cutlass.range_constexpr(THREAD_ROWS):
        index = key + r * ROW_DISTANCE
        present, at, scale_at = Boolean(False), Int64(0), Int64(0)
        if index < length:
            page = Int32(pages[index // page_size])
            present = Boolean(page >= 0) & Boolean(page < pool.shape[0])
            if present:
                within = index % page_size
                at = pool.iterator.toint() + Int64(page) * Int64(pool.stride[0] * WORD_BYTES)
                scale_at = at + Int64(page_size * fmt.data_bytes + within * fmt.scale_bytes)
                at = at + Int64(within * fmt.data_bytes + member * (block_words * WORD_BYTES))
        for first in cutlass.range_constexpr(0, block_words, 4):
            loaded = load_global(at + Int64(first * WORD_BYTES), Int32(present), 4)
            for i in cutlass.range_constexpr(4):
                words[first + i, r] = loaded[i]
        words[block_words, r] = load_global(scale_at, Int32(present), 1)[0]
        here.append(present)
    return tuple(here)


def load_global(address: Int64, present: Int32, count: int) -> list:
    """``count`` words at address, zeros where not present."""
    outputs = [f"{{$w{i}}}" for i in range(count)]
    vector = f".v{count}" if count > 1 else ""
    target = "{" + ", ".join(outputs) + "}" if count > 1 else outputs[0]
    zeros = " ".join(f"@!here mov.b32 {output}, 0;" for output in outputs)
    loaded = cute.arch.inline_ptx(
        "{ .reg .pred here; setp.ne.b32 here, {$r1}, 0; "
        f"@here ld.global.nc.L1::no_allocate{vector}.b32 {target}, [{{$r0}}]; {zeros} }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, present],
    )
    return [loaded] if count == 1 else list(loaded)


@cute.jit
def convert(config: cutlass.Constexpr, words: cute.Tensor, table, member, a: cute.Tensor) -> tuple:
    """The thread's two rows as wgmma's A, a (MMA, MMA_M, MMA_K); returns the rows' factors."""
    target = cute.recast_tensor(cute.make_tensor(a.iterator, cute.make_layout(cute.size(a))), Uint32)
    factors = []
    for r in cutlass.range_constexpr(THREAD_ROWS):
        out, factor = block_of(config, words[None, r], table, member)
        for i in cutlass.range_constexpr(WORDS):
            step, half = i // 2, i % 2
            target[step * 4 + half * THREAD_ROWS + r] = out[i]
        factors.append(factor)
    return tuple(factors)


@cute.jit
def block_of(config: cutlass.Constexpr, words: cute.Tensor, table, block) -> tuple:
    """(WORDS words of e4m3 of the lane's block, what the row's numbers are multiplied with). words: (WORD), the block's
    and then the row's scales. block: which of the row's, 0 to 3."""
    last = loaded_words(config) - 1
    if cutlass.const_expr(config.format == "fp8"):
        return [words[i] for i in range(WORDS)], words[last].bitcast(Float32)
    scales = words[last]
    largest, bad = Uint32(0), Boolean(False)
    for i in cutlass.range_constexpr(BLOCKS):
        scale = (scales >> (8 * i)) & Uint32(0xFF)
        bad = bad | Boolean(scale == SCALE_NAN)
        largest = Uint32(cutlass.select_(Boolean(scale > largest), scale, largest))
    own = (scales >> Uint32(8 * block)) & Uint32(0xFF)
    entry = cutlass.min(Int32(largest - own), Int32(SCALE_STEPS))
    low, high = table[0, entry], table[1, entry]
    out = []
    for word in cutlass.range_constexpr(4):
        for half in cutlass.range_constexpr(2):
            codes = words[word] >> (16 * half) if half else words[word]
            magnitudes = permute(low, high, codes & Uint32(CODES))
            signs = permute(Uint32(SIGNS), Uint32(SIGNS), codes)  # 0x80, or 0xFF where the code's sign is set
            out.append(magnitudes | ((signs << 7) & Uint32(SIGNS)))
    # 2**(largest - 127 - 6), as fp32: exponents from -126 on, 0 below.
    power = cutlass.max(Int32(largest) - E4M3_SHIFT, 0)
    bits = Uint32(power) << FP32_EXPONENT_BIT
    return out, Uint32(cutlass.select_(bad, Uint32(FP32_NAN), bits)).bitcast(Float32)


def permute(low: Uint32, high: Uint32, order: Uint32) -> Uint32:
    """Four bytes of eight, by the low four nibbles of ``order``; a nibble's top bit spreads the byte's."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[low, high, order]
    )


@cute.jit
def store_tile(config: cutlass.Constexpr, scores, weight: cutlass.Constexpr, factors, here, row, key, member):
    """The weighted sums of the thread's two keys, over the four lanes that share them, to logits row (N)."""
    flat = cute.make_tensor(scores.iterator, cute.make_layout(cute.size(scores)))
    for r in cutlass.range_constexpr(THREAD_ROWS):
        total = Float32(0.0)
        for i in cutlass.range_constexpr(len(weight)):
            value = flat[i // 2 * 4 + r * 2 + i % 2]
            value = Float32(cutlass.select_(Boolean(value < 0.0), Float32(0.0), value))  # NaN stays
            total += weight[i] * value
        for distance in (1, 2):
            total += cute.arch.shuffle_sync_bfly(total, distance)
        total = Float32(cutlass.select_(here[r], total * factors[r], -Float32.inf))
        index = key + r * ROW_DISTANCE
        if (member == r) & (index < row.shape[0]):
            row[index] = total


def host_and_arguments(config: ScoresConfig) -> tuple:
    """The host function and its arguments but the stream."""

    def words():
        return fake_rows(Uint32, 2, alignment=VECTOR_BYTES)

    return (
        Scores(config),
        words(),
        fake_rows(Float32, 2),
        words(),
        fake_rows(Int32, 2),
        fake_rows(Int32, 1),
        fake_rows(Int32, 1),
        fake_rows(Float32, 2),
        Int32(1),
        Int32(1),
    )


SCORES = Kernel("indexer.sm90.scores", host_and_arguments)  # by ScoresConfig
