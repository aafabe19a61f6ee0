"""P and dS in a thread's registers, one key per row and one query per column; the bias and its gradient.

Each architecture says in a ``Block`` which elements a thread has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.backward.device.blocks import listed, seen_of_block
from warpspec.fmha.block_mask import WORD_BITS
from warpspec.fmha.device.bias import TYPES
from warpspec.fmha.device.logits import LogitNumbers, map_score, slope
from warpspec.fmha.device.mask import bit_value

PAIR = 2  # neighbouring queries


@dataclass(frozen=True)
class Block:
    """A thread's part of a block of S^T.

    head: query head. first_query: the request's query that is the thread's column 0. statistics (2, STATISTIC, PAIR):
    those of the queries from there on, in shared memory. numbers: those of the map between S and P. columns: the first
    column of each of the thread's pairs. keys: the request's key in each of the thread's rows. bounds: for each key,
    [first, end) of the queries that see it. element(column, r): the register with the first of a pair in row r; the
    second is the next register. writes_bias: only this CTA has the dS to write to dbias. started: delta is already
    subtracted from dP. bias_words: the bias in shared memory (``add_bias_words``). stores_bias: the caller stores
    dbias. lse: registers that ``read_lse`` filled; None: ``weigh`` reads shared memory itself.
    """

    config: object
    operands: object
    tile: object
    numbers: LogitNumbers
    head: Int32
    first_query: Int32
    statistics: cute.Tensor | None
    columns: tuple
    keys: tuple
    bounds: tuple
    element: Callable
    writes_bias: Boolean | bool = True
    started: bool = False
    bias_words: Callable | None = None
    stores_bias: bool = False
    lse: cute.Tensor | None = None

    @property
    def elements(self) -> list[tuple[int, int, int]]:
        """(register, row, column) of each element."""
        return self.elements_of(self.columns)

    def elements_of(self, columns: Sequence[int]) -> list[tuple[int, int, int]]:
        """The elements of some of the ``columns``."""
        return [
            (self.element(column, r) + j, r, column + j)
            for column in columns
            for r in range(len(self.keys))
            for j in range(PAIR)
        ]

    @property
    def pairs(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """(column, [(register, which of the pair)]) of each pair of columns."""
        rows, both = range(len(self.keys)), range(PAIR)
        return [(c, [(self.element(c, r) + j, j) for r in rows for j in both]) for c in self.columns]

    def statistic(self, number: int, column: int) -> cute.Tensor:
        """(PAIR): lse' (0) or -delta (1) of a pair of queries."""
        pair = cute.make_rmem_tensor(PAIR, Float32)
        cute.autovec_copy(self.statistics[None, number, column // PAIR], pair)
        return pair

    def read_lse(self) -> None:
        """Read lse' of the thread's columns into its registers, if it has them."""
        for number, column in enumerate(self.columns if self.lse is not None else ()):
            pair = self.statistic(0, column)
            for j in range(PAIR):
                self.lse[number * PAIR + j] = pair[j]

    def lse_of(self, column: int):
        """(PAIR): lse' of a pair of queries."""
        if self.lse is None:
            return self.statistic(0, column)
        first = self.columns.index(column) * PAIR
        return [self.lse[first + j] for j in range(PAIR)]


@cute.jit
def weigh(block, scores: cute.Tensor, masked):
    """Turn S^T into P^T = 2 ** (logit - lse') in place; 0 where a query does not see a key.

    masked: some query may not see some key.
    """
    for column, registers in block.pairs:
        lse = None if block.config.subtracts else block.lse_of(column)
        for i, j in registers:
            logit = map_score(block.config.logits, scores[i], block.numbers, i)
            scores[i] = logit if cutlass.const_expr(lse is None) else logit - lse[j]
    if cutlass.const_expr(block.bias_words is not None):
        add_bias_words(block, scores)
    elif cutlass.const_expr(block.config.logits.bias is not None):
        add_bias(block, scores, block.columns)
    if masked:
        hide(block, scores)
    for i, _, _ in block.elements:
        scores[i] = cute.math.exp2(scores[i], fastmath=True)


def hide(block, scores: cute.Tensor) -> None:
    """Set the exponents of hidden (query, key) pairs to -inf."""
    mask, bounds, patterns = block.config.mask, block.bounds, None
    if mask.has_blocks:
        whole, patterns = listed(block)
        bounds = [seen_of_block(whole, *own) for own in bounds]
    limits = [(first - block.first_query, end - block.first_query) for first, end in bounds]
    for i, r, column in block.elements:
        if patterns is None or mask.band:  # patterns end with the keys
            seen = Boolean(limits[r][0] <= column)
            if mask.has_left:
                seen = seen & Boolean(limits[r][1] > column)
        if patterns is not None:
            bit = patterns[r][column // WORD_BITS] & Int32(bit_value(column % WORD_BITS))
            seen = seen & Boolean(bit != 0) if mask.band else Boolean(bit != 0)
        scores[i] = Float32(cutlass.select_(seen, scores[i], -Float32.inf))


@cute.jit
def derive(block, weights: cute.Tensor, ds: cute.Tensor, masked):
    """Turn dP^T into dS^T = P^T (dP^T - delta) in place; store dbias, or add to it."""
    for column, registers in block.pairs:
        less = None if block.started else block.statistic(1, column)
        for i, j in registers:
            if cutlass.const_expr(block.started):
                ds[i] = weights[i] * ds[i]
            else:
                ds[i] = weights[i] * (ds[i] + less[j])
    if masked | Boolean(block.config.logits.bias is not None):
        for i, _, _ in block.elements:  # dP of a hidden pair may be NaN
            ds[i] = Float32(cutlass.select_(Boolean(weights[i] == Float32(0.0)), Float32(0.0), ds[i]))
    if cutlass.const_expr(block.config.wanted.bias is not None and not block.stores_bias):
        write_bias(block, ds)
    if cutlass.const_expr(block.config.logits.curved):
        follow_map(block, lambda: with_weights(block, weights), ds)


def with_weights(block, weights: cute.Tensor) -> Iterator[tuple]:
    """(column, its registers, P of these) of each pair of columns."""
    for column, registers in block.pairs:
        yield column, registers, [weights[i] for i, _ in registers]


@cute.jit
def follow_map(block, weights: cutlass.Constexpr, ds: cute.Tensor, factor: cutlass.Constexpr = 1.0):
    """Turn dS, the gradients of logits, into those of scaled scores, in place, where the map between them is curved.
    weights(): as ``with_weights``, P times ``factor``."""
    numbers, bias = block.numbers, block.config.logits.bias
    biases = cute.make_rmem_tensor(cute.size(ds), Float32)
    biases.fill(0.0)
    if cutlass.const_expr(block.bias_words is not None):
        add_bias_words(block, biases)
    for column, registers, held in weights():
        # The compiler reads nothing before this, into registers that there are not.
        first = column == block.columns[0]
        if cutlass.const_expr((block.lse is None and first) or bias is not None):
            cute.arch.sync_warp()
        lse = block.statistic(0, column)  # again: threads cannot hold it until now
        if cutlass.const_expr(bias is not None and block.bias_words is None):
            add_bias(block, biases, (column,))
        for weight, (i, j) in zip(held, registers, strict=True):
            offset = lse[j] - biases[i] - Float32(math.log2(factor))
            slopes = slope(weight, offset, numbers)
            hidden = Boolean(weight == Float32(0.0))
            ds[i] = Float32(cutlass.select_(hidden, Float32(0.0), ds[i] * slopes))


def bias_rows(block, tensor: cute.Tensor) -> cute.Tensor:
    """(QUERY, KEY) of a bias, or of its gradient."""
    config = block.config
    batch = block.tile.request if config.logits.bias.batches else 0
    return tensor[batch, block.head if config.logits.bias.heads else 0, None, None]


@cute.jit
def add_bias(block, scores: cute.Tensor, columns: cutlass.Constexpr):
    """Add log2(e) times the bias to the exponents. The mask or the statistics hide pairs outside of the bias. columns:
    the pairs of columns that are added to."""
    bias = bias_rows(block, block.operands.bias)
    queries, keys = bias.shape
    for i, r, column in block.elements_of(columns):
        query = cutlass.min(block.first_query + column, queries - 1)
        value = bias[query, cutlass.min(block.keys[r], keys - 1)].to(Float32)
        total = scores[i] + value * LOG2_E
        scores[i] = Float32(cutlass.select_(Boolean(value == -Float32.inf), -Float32.inf, total))


@cute.jit
def add_bias_words(block, scores: cute.Tensor):
    """``add_bias`` for a bf16 bias in shared memory: ``bias_words(i)`` returns 4 words, the bias of scores 8 i to 8 i +
    7."""
    for i in cutlass.range_constexpr(cute.size(scores) // 8):
        for j, word in enumerate(block.bias_words(i)):
            for half, bits in enumerate((word << 16, word & -65536)):
                value, at = float_of(bits), 8 * i + 2 * j + half
                total = scores[at] + value * LOG2_E
                scores[at] = Float32(cutlass.select_(Boolean(value == -Float32.inf), -Float32.inf, total))


def float_of(bits: Int32) -> Float32:
    """The fp32 number of these bits."""
    held = cute.make_rmem_tensor(1, Int32)
    held[0] = bits
    return cute.recast_tensor(held, Float32)[0]


@cute.jit
def write_bias(block, ds: cute.Tensor):
    """Write dS of the pairs that exist to dbias."""
    target = bias_rows(block, block.operands.dbias)
    queries, keys = target.shape
    for pair in block.columns:
        if cutlass.const_expr(block.config.logits.curved):
            cute.arch.sync_warp()
        for i, r, column in block.elements_of((pair,)):
            query, key = block.first_query + column, block.keys[r]
            if (query < queries) & (key < keys) & block.writes_bias:
                store_bias(block.config.wanted.bias, target, query, key, ds[i])


def store_bias(kind: str, target: cute.Tensor, query, key, value) -> None:
    if kind == "sum":
        pointer = target.iterator + target.layout((query, key))
        cute.arch.red(pointer, value, op="add", dtype="f32", sem="relaxed", scope="gpu")
    else:
        target[query, key] = value.to(TYPES[kind])
