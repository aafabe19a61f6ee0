"""Keep a NaN or Inf in V from the rows that do not see its key.

PV multiplies every key of a tile with every row: a key hidden from a row has P = 0 there, but 0 times NaN or Inf is
NaN. Two cases:

- No row of the M tile sees the key. ``clear`` zeroes its V row in shared memory before PV.
- Some rows see the key and others do not (causal, window, bias), and the former must get its NaN. So the epilogue looks
  at the finished O: a row whose O is not finite although its row sum is (``tainted``) was reached by a non-finite V
  value, and ``recompute`` sums it again from global memory over exactly the keys it sees. Finite data never comes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32

from warpspec.common.device import tma
from warpspec.common.hardware import VECTOR_BYTES, WARPGROUP_THREADS, WORD_BYTES
from warpspec.fmha.device.bias import row_of
from warpspec.fmha.device.logits import add_bias, map_score, unit
from warpspec.fmha.device.pages import address_of
from warpspec.fmha.device.scales import kv_row

CHAINS = 4  # independent sums: an addition takes four clocks, and a warp may be alone on its scheduler


class RowColumns(NamedTuple):
    """A thread's columns of its row of O, as vectors of neighbouring columns.

    registers: for each vector, which of the thread's values it is. numbers: for each vector, its number among its
    columns of the row, counted in vectors. own: a function from a row (D) to the columns in which the numbers count.
    """

    registers: Sequence[Sequence[int]]
    numbers: Sequence
    own: Callable


@cute.jit
def clear(config: cutlass.Constexpr, span, first_key, thread, tile: cute.Pointer):
    """Zero the V rows of a KV tile that no row of the M tile sees.

    first_key: the tile's first key. thread: 0..127; neighbouring threads zero neighbouring vectors, without bank
    conflicts. tile: Uint8 pointer to the stage. A proxy fence has to follow, for the tensor cores to see the zeros, and
    a barrier before another thread issues PV.
    """
    vectors = tma.ROW_BYTES // VECTOR_BYTES  # of a key in a block of D
    keys = WARPGROUP_THREADS // vectors  # at a time
    zeros = cute.make_rmem_tensor(VECTOR_BYTES // WORD_BYTES, Int32)
    zeros.fill(0)
    for begin in cutlass.range_constexpr(0, config.tile_n, keys):
        place = begin + thread // vectors
        unseen = (first_key + place < span.first) | (first_key + place >= span.end)
        if unseen & (place < config.tile_n):
            for block in cutlass.range_constexpr(config.heads.v_blocks):
                start = (block * config.tile_n + place) * tma.ROW_BYTES + thread % vectors * VECTOR_BYTES
                words = cute.make_tensor(
                    cute.recast_ptr((tile + start).align(VECTOR_BYTES), dtype=Int32),
                    cute.make_layout(VECTOR_BYTES // WORD_BYTES),
                )  # (WORD)
                cute.autovec_copy(zeros, words)


def tainted(values: cute.Tensor, columns: RowColumns, row_sum) -> Boolean:
    """Whether one of a thread's values (n) fp32 of a row is NaN or Inf although the row has a finite, positive sum."""
    probes = [Float32(0.0)] * CHAINS
    for number, i in enumerate(i for registers in columns.registers for i in registers):
        # 0, or NaN once a value is not finite
        probes[number % CHAINS] = probes[number % CHAINS] + values[i] * Float32(0.0)
    probe = sum(probes[1:], start=probes[0])
    finite_sum = Boolean(row_sum > Float32(0.0)) & Boolean(row_sum < Float32.inf)
    return Boolean(probe != probe) & finite_sum


@dataclass(frozen=True)
class RowSum:
    """A row of O as a sum: over the keys that the row sees, of 2**(unit * score - reference) times the key's V.

    row: says which keys it sees. place: where it is in q and o. reference: fp32. numbers: those of the map between S
    and P.
    """

    config: object
    row: object
    place: object
    operands: object
    reference: Float32
    numbers: object

    def range(self) -> tuple:
        """(first, end, drafts): [first, end) counts the keys, or what the list of blocks names, one key after the
        other. drafts: the row's in a tree, or None."""
        row, end, drafts = self.row, self.row.end, None
        if row.drafts is not None:
            drafts = row.drafts.of_span()
            end = drafts.end_after(end)
        if row.blocks is not None:
            return Int32(0), row.blocks.span.count * self.config.tile_n, drafts
        return Int32(row.first), end, drafts

    def key_at(self, number, drafts) -> tuple:
        """(key, its index in k and v, whether the row sees it) of a number in ``range``."""
        row, key, listed = self.row, number, None
        if row.blocks is not None:
            key, listed = row.blocks.key_at(number, self.config.tile_n, row.first, row.end)
        where, seen = address_of(self.config, self.operands, self.place.request, key)
        if listed is not None:
            seen = seen & listed
        if drafts is not None:
            seen = seen & (Boolean(key < row.end) | drafts.sees(key))
        return key, where, seen

    def weight_of(self, q: cute.Tensor, key, where, seen) -> tuple:
        """(2**(unit * score - reference), whether the row sees the key, after its bias) for the row's q (D)."""
        config, numbers = self.config, self.numbers
        score = dot(config, q, of_kv(config, self.operands, "k", where, self.place.kv_head))
        if config.requests.page_size > 0:
            score = Float32(cutlass.select_(seen, score, Float32(0.0)))
        if config.logits.negate:
            score = -score
        if config.logits.bias is not None:
            added = row_of(config, self.operands.bias, self.place)[Int32(key)].to(Float32)
            score = add_bias(map_score(config.logits, score, numbers), added)
            seen = seen & Boolean(score != -Float32.inf)
        elif config.logits.in_powers:
            score = map_score(config.logits, score, numbers)
        logit = score * unit(config.logits, numbers)
        weight = cute.math.exp2(logit - self.reference, fastmath=True)
        if config.lags_if_light:
            weight = weight.to(BFloat16).to(Float32)
        return weight, seen


@cute.jit
def recompute(row_sum, values: cute.Tensor, columns: cutlass.Constexpr):
    """Set a thread's values (n) fp32 of a row to what ``row_sum`` says, summed in fp32. columns: ``RowColumns``."""
    config, place = row_sum.config, row_sum.place
    q = row_sum.operands.q[place.batch, place.query, place.head, None]  # (D)
    vectors = list(zip(columns.registers, columns.numbers, strict=True))
    for registers, _ in vectors:
        for i in registers:
            values[i] = Float32(0.0)
    keys = row_sum.range()
    size = -(-len(vectors) // config.recompute_passes)
    for start in cutlass.range_constexpr(0, len(vectors), size):
        add_keys(row_sum, values, q, keys, vectors[start : start + size], columns.own)


@cute.jit
def add_keys(
    row_sum,
    values: cute.Tensor,
    q: cute.Tensor,
    keys: cutlass.Constexpr,
    vectors: cutlass.Constexpr,
    own: cutlass.Constexpr,
):
    """``recompute`` for some of the values, which start at 0. keys: ``RowSum.range``'s. vectors: (registers, number) of
    each. own: ``RowColumns``'s."""
    config, (first, end, drafts) = row_sum.config, keys
    for number in cutlass.range(first, end, unroll=1):
        key, where, seen = row_sum.key_at(number, drafts)
        weight, seen = row_sum.weight_of(q, key, where, seen)
        v = of_kv(config, row_sum.operands, "v", where, row_sum.place.kv_head)
        if cutlass.const_expr(config.format.kv_format is None):
            v = own(v)
        if seen:
            accumulate(config, values, weight, v, vectors)


def accumulate(config, values: cute.Tensor, weight, v, vectors) -> None:
    """Add weight times a row of V to the thread's values. vectors: (registers, number) of each."""
    for registers, number in vectors:
        elements = load_kv(config, v, len(registers), number)
        for at, i in enumerate(registers):
            values[i] = values[i] + weight * elements[at].to(Float32)


def load_vector(row: cute.Tensor, size: int, number) -> cute.Tensor:
    """Registers (size) with vector ``number`` of a row in global memory."""
    registers = cute.make_rmem_tensor(size, row.element_type)
    cute.autovec_copy(cute.local_tile(row, (size,), (number,)), registers)
    return registers


def of_kv(config, operands, ring: str, where, kv_head):
    """A row of K or V ("k" or "v") in global memory, from which ``load_kv`` loads."""
    if config.format.kv_format:
        return kv_row(config, operands, ring, where, kv_head)
    return (operands.v if ring == "v" else operands.k)[(*where, kv_head, None)]


def load_kv(config, row, size: int, number) -> cute.Tensor:
    """``load_vector`` for a row of K or V."""
    return row.vector(size, number) if config.format.kv_format else load_vector(row, size, number)


@cute.jit
def dot(config: cutlass.Constexpr, q: cute.Tensor, k: cutlass.Constexpr) -> Float32:
    """q.k for two rows (D) in global memory, as many elements at a time as the configuration has registers for."""
    total = Float32(0.0)
    size = math.gcd(config.recompute_elements, config.heads.qk)
    for number in cutlass.range(config.heads.qk // size, unroll=1):
        a, b = load_vector(q, size, number), load_kv(config, k, size, number)
        for i in cutlass.range_constexpr(size):
            total = total + a[i].to(Float32) * b[i].to(Float32)
    return total
