"""Insert: normalise and rotate queries and keys, quantise keys and values, store them by slot. One launch.

A CTA takes queries, keys or values. A group of lanes holds a row, and takes some heads of one token at a time, so that
several loads are under way and the token's angles are loaded once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Uint8

from warpspec.cache.config import InsertConfig, RowLayout
from warpspec.cache.device.quantize import float8_words, nvfp4_words
from warpspec.cache.device.rows import (
    load_angles,
    load_row,
    load_weights,
    normalize,
    unpack,
)
from warpspec.cache.operands import InsertNumbers, Operands
from warpspec.common.device.host import host_function
from warpspec.common.device.nvfp4 import reciprocal_of
from warpspec.common.device.words import store_words
from warpspec.common.hardware import WORD_BYTES
from warpspec.common.kv_formats import swizzled_place
from warpspec.common.launch import Kernel
from warpspec.common.operands import fakes


class Insert:
    """``Insert(config)(...)`` is the host function."""

    def __init__(self, config: InsertConfig):
        self.config = config

    @host_function(Operands, InsertNumbers)
    def __call__(self, operands: Operands, numbers: InsertNumbers, stream: CUstream):
        """Launch the kernel."""
        config, ops = self.config, operands
        tokens = ops.slots.shape[0]
        q_ctas, q_items = Int32(0), None
        if config.q_heads > 0:
            q_items = items(config, config.query_layout, ops.q, config.q_heads)
            q_ctas = ctas(config, config.query_layout, ops.q.shape[0], q_items)
        k_items = items(config, config.key_layout, ops.k, config.kv_heads)
        v_items = items(config, config.value_layout, ops.v, config.kv_heads)
        k_ctas = ctas(config, config.key_layout, tokens, k_items)
        v_ctas = ctas(config, config.value_layout, tokens, v_items)
        page_size = cute.FastDivmodDivisorV2(Int32(ops.k_cache.shape[1]))
        queries = (ops.q, ops.out, ops.q_weight, q_items)
        keys = (ops.k, ops.k_weight, ops.k_cache, ops.k_block_scales, ops.k_scale, k_items)
        values = (ops.v, None, ops.v_cache, ops.v_block_scales, ops.v_scale, v_items)
        shared = (ops.cos_sin, ops.positions, (ops.slots, page_size), numbers.eps)
        total, stored = q_ctas + k_ctas + v_ctas, k_ctas + v_ctas
        step = total // cutlass.max(stored, 1)
        self.kernel(queries, keys, values, *shared, k_ctas, stored, step).launch(
            grid=(total, 1, 1), block=(config.threads, 1, 1), use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        queries,
        keys,
        values,
        cos_sin,
        positions,
        places,
        eps,
        k_ctas: Int32,
        stored: Int32,
        step: Int32,
    ):
        """Divide the CTAs among queries, keys and values.

        Every ``step``-th CTA takes keys or values, ``stored`` CTAs in all; the CTAs between them take queries. The two
        kinds alternate because keys and values take more computing, while queries wait more for memory.
        """
        config = self.config
        index, _, _ = cute.arch.block_idx()
        cta, queries_before = index, Int32(0)
        if cutlass.const_expr(config.q_heads > 0):
            cta = Int32(cutlass.select_(index % step == 0, index // step, stored))
            queries_before = index - cutlass.min(index // step + 1, stored)
        if cta < k_ctas:
            insert_rows(config, False, keys, cos_sin, positions, places, eps, cta)
        elif cta < stored:
            insert_rows(config, True, values, None, None, places, eps, cta - k_ctas)
        else:
            if cutlass.const_expr(config.q_heads > 0):
                write_queries(config, queries, cos_sin, positions, eps, queries_before)


def items(config: InsertConfig, layout: RowLayout, source, most_heads: int) -> cute.FastDivmodDivisorV2:
    """Items of a token, as a divisor."""
    return cute.FastDivmodDivisorV2(
        Int32(cute.ceil_div(source.shape[1], config.item_heads(layout, most_heads)))
    )


def ctas(config: InsertConfig, layout: RowLayout, tokens, items: cute.FastDivmodDivisorV2):
    """CTAs for all items of this many tokens."""
    return cute.ceil_div(tokens * items.divisor, config.groups(layout))


def wait_for_launch() -> None:
    """Wait for the end of the launch before, then let the next one in, which waits likewise."""
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def write_queries(config: cutlass.Constexpr, queries: cutlass.Constexpr, cos_sin, positions, eps, cta):
    """Normalise and rotate the queries of a CTA's items and write them."""
    q, q_out, weight, items = queries
    layout = config.query_layout
    item = Item.of(config, layout, cta, (q.shape[0], q.shape[1], items), config.q_heads)
    wait_for_launch()
    token, lane = item.token, item.lane
    rows = item.load(q)
    rows = project(config, rows, item, weight, config.q_weight, cos_sin, positions, eps)
    for i in cutlass.range_constexpr(item.heads):
        words, head = [rows[i][w] for w in range(layout.words)], item.head(i)
        if item.live(i):
            store_words(q_out[token, head, None], lane * layout.words, words)


@cute.jit
def insert_rows(
    config: cutlass.Constexpr,
    is_value: cutlass.Constexpr,
    side: cutlass.Constexpr,
    cos_sin,
    positions,
    places: cutlass.Constexpr,
    eps,
    cta,
):
    """Normalise and rotate the keys of a CTA's items (or take values as they are), quantise them and store them.
    places: the tokens' slots, and the divisor that makes pages of them."""
    (source, weight, cache, blocks, scale, items), (slots, page_size) = side, places
    layout = config.value_layout if is_value else config.key_layout
    per = config.v_scale if is_value else config.k_scale
    item = Item.of(config, layout, cta, (slots.shape[0], source.shape[1], items), config.kv_heads)
    wait_for_launch()
    token, lane = item.token, item.lane
    slot = slots.element_type(-1)
    if token < slots.shape[0]:
        slot = slots[token]
    rows = item.load(source)
    if cutlass.const_expr(not is_value):
        rows = project(config, rows, item, weight, config.k_weight, cos_sin, positions, eps)
    stored = Boolean(slot >= 0) & Boolean(slot < cache.shape[0] * cache.shape[1])
    page, row = divmod(Int32(cutlass.select_(stored, Int32(slot), Int32(0))), page_size)
    factor = scale[0] if cutlass.const_expr(per == "tensor") else Float32(1.0)
    reciprocal = reciprocal_of(factor)
    for i in cutlass.range_constexpr(item.heads):
        head = item.head(i)
        if cutlass.const_expr(per == "head"):
            factor = scale[cutlass.min(head, source.shape[1] - 1)]
            reciprocal = reciprocal_of(factor)
        words, code = quantized(config, layout, rows[i], factor, reciprocal)
        # Outside of the branch, where all heads share what they have in common.
        target = cache[page, row, head, None]
        scales = blocks[page, None, head, None] if cutlass.const_expr(code is not None) else None
        if stored & item.live(i):
            store_words(target, lane * len(words), words)
            if cutlass.const_expr(code is not None):
                store_block_scale(config, layout, scales, row, lane, code, is_value)


def quantized(config: InsertConfig, layout: RowLayout, words, scale, reciprocal) -> tuple:
    """Quantise a lane's words: (words to store, the block's scale or None). reciprocal: fl(1 / scale)."""
    if not config.fmt.scaled:
        return [words[i] for i in range(layout.words)], None
    if config.format == "nvfp4":
        return nvfp4_words(words, config.dtype, scale, reciprocal, config.fmt.block // layout.numbers)
    values = unpack(words, config.dtype)
    return float8_words(values, scale, reciprocal, config.format, config.fmt.largest), None


@cute.jit
def store_block_scale(
    config: cutlass.Constexpr, layout: cutlass.Constexpr, blocks, row, lane, code, is_value: cutlass.Constexpr
):
    """Store the scale of the lane's block; the first of a block's lanes does. blocks: (row, block) of the page."""
    block_lanes = config.fmt.block // layout.numbers
    if lane % block_lanes == 0:
        block = lane // block_lanes
        if cutlass.const_expr(is_value and config.swizzled):
            at, column = swizzled_place(row, block, layout.dim // config.fmt.block)
            blocks[at, column] = Uint8(code)
        else:
            blocks[row, block] = Uint8(code)


class Item:
    """Some heads of one token, which a group of lanes takes. lane: the lane's number in the group."""

    def __init__(self, layout: RowLayout, token, tokens, first, count, heads: int, lane):
        self.layout, self.token, self.tokens = layout, token, tokens
        self.first, self.count, self.heads, self.lane = first, count, heads, lane

    @staticmethod
    def of(config: InsertConfig, layout: RowLayout, cta, sizes: tuple, most_heads: int) -> Item:
        """The item of this thread's group. sizes: tokens, heads of a token, items of a token."""
        thread, _, _ = cute.arch.thread_idx()
        (tokens, count, items), heads = sizes, config.item_heads(layout, most_heads)
        token, first = divmod(cta * config.groups(layout) + thread // layout.lanes, items)
        return Item(layout, token, tokens, first * heads, count, heads, thread % layout.lanes)

    def head(self, i: int):
        """Index of the item's i-th head."""
        return self.first + i

    def live(self, i: int):
        """Whether the lane holds numbers of the i-th head."""
        found = Boolean(self.token < self.tokens) & Boolean(self.head(i) < self.count)
        return found & Boolean(self.lane < self.layout.used_lanes)

    def load(self, source) -> list:
        """The lane's words of each head."""
        return [
            load_row(source[self.token, self.head(i), None], self.layout, self.lane, self.live(i))
            for i in range(self.heads)
        ]


def project(config: InsertConfig, rows: list, item: Item, weight, norm, cos_sin, positions, eps) -> list:
    """Normalise the item's rows if there is a norm, rotate them if there are positions."""
    layout = item.layout
    if norm is not None:
        weights = load_weights(weight, layout, item.lane)
        rows = [normalize(row, weights, layout, config.dtype, eps) for row in rows]
    if config.rotated:
        position = positions[cutlass.min(item.token, item.tokens - 1)]
        angles = load_angles(cos_sin, position, config.rotated, config.interleaved, layout, item.lane)
        rows = [angles.rotate(row, config.dtype) for row in rows]
    return rows


def host_and_arguments(config: InsertConfig) -> tuple:
    """The host function and its arguments without the stream."""
    assert config.fmt.row_bytes(config.key_layout.numbers) % WORD_BYTES == 0
    return (Insert(config), *fakes(Operands, config), *fakes(InsertNumbers, config))


INSERT = Kernel("kv_cache.insert", host_and_arguments)  # by InsertConfig
