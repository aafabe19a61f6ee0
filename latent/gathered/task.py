"""Tasks of a CTA, each 64 heads of one query or a part of its keys, and how roles find them. Device side.

Every role computes its own task, as the roles of the attention kernels compute their tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from warpspec.common.hardware import TMA_ALIGNMENT, WORD_BYTES
from warpspec.common.operands import BFLOAT16, FLOAT32, INT32, UINT32, Number, Operand, Several
from warpspec.fmha.device.logits import with_factor
from warpspec.fmha.device.tile import Place, Row, RowTile
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.operands import RESULT, STATE
from warpspec.fmha.schedule import SparseTiles
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.latent.gathered.config import MAX_KEY_SETS, PAGE_ROWS, ROPE_DIM


class KeySetConfig(NamedTuple):
    """The part of a configuration that concerns one key set.

    there: whether there is such a set. has_lengths: whether it has lengths.
    """

    there: bool
    has_lengths: bool


def key_set_of(config, number: int) -> KeySetConfig:
    """The ``KeySetConfig`` of the number-th key set."""
    there = number < config.gathers.sets
    return KeySetConfig(there, there and config.gathers.lengths[number])


class KeySetOperands(NamedTuple):
    """One key set among the arguments.

    pool: [pages, words]. slots: int32 [T, K]. lengths: int32 [T] or None. page_size: rows of a page.
    """

    pool: Annotated[Any, Operand(UINT32, 2, None, TMA_ALIGNMENT, "there")]
    slots: Annotated[Any, Operand(INT32, 2, when="there")]
    lengths: Annotated[Any, Operand(INT32, 1, when="has_lengths")]
    page_size: Annotated[Any, Number(INT32)]


class DeviceKeySet(NamedTuple):
    """One key set on the device.

    pool: [pages, words]. slots: int32 [T, K]. lengths: int32 [T] or None. page_size: rows of a page, prepared so that
    division by it is a multiplication. queries: None, or the number of a request's queries, if slots is a page table
    [R, pages] and lengths is [R].
    """

    pool: cute.Tensor
    slots: cute.Tensor
    lengths: cute.Tensor | None
    page_size: cute.FastDivmodDivisorV2
    queries: Int32 | None = None

    def request(self, token):
        """Index of the token's row in slots."""
        return token if self.queries is None else token // self.queries

    def length(self, token) -> Int32:
        """Number of slots of the token, or rows of its request, that the token sees."""
        most = Int32(self.slots.shape[1])
        if self.queries is not None:
            rows = Int32(self.lengths[self.request(token)])
            rows = cutlass.max(cutlass.min(rows, most * PAGE_ROWS), 0)
            return cutlass.max(rows - self.queries + 1 + token % self.queries, 0)
        if self.lengths is None:
            return most
        return cutlass.max(cutlass.min(Int32(self.lengths[token]), most), 0)


@cute.jit
def place_of(fmt: cutlass.Constexpr, key_set: DeviceKeySet, slot) -> tuple:
    """(address of the row, bytes from there to its scales) of a slot; address 0 if there is no such row."""
    address, scale_at = Int64(0), Int32(0)
    page_rows = key_set.page_size.divisor
    here = Boolean(slot >= 0) & Boolean(slot < key_set.pool.shape[0] * page_rows)
    if here:
        page, within = slot // key_set.page_size, slot % key_set.page_size
        address = key_set.pool.iterator.toint() + Int64(page) * Int64(key_set.pool.stride[0] * WORD_BYTES)
        address = address + Int64(within * fmt.row_stride)
        if cutlass.const_expr(fmt.apart):
            scale_at = page_rows * fmt.data_bytes + within * (fmt.scale_stride - fmt.row_stride)
        else:
            scale_at = Int32(fmt.value_bytes)
    return address, scale_at


class Gathered(NamedTuple):
    """Tensors of a launch.

    q: [1, T, H, D]. o: as q, with the splits in front if there are any; in FP8 words of four e4m3, with scales fp32
    [1, T, H, 4], else None. sink: [H]. lse, row_max, row_sum: [1, H, T]. cos_sin: fp32 [N, R] and positions: int32 [T],
    or None. kv_scale: fp32 [1] or None. sets: ``KeySetOperands``, in kernels the ``DeviceKeySet``s that there are.
    """

    q: Annotated[Any, Operand(BFLOAT16, 4, lambda c: c.heads.qk, TMA_ALIGNMENT)]
    o: Annotated[Any, RESULT]
    scales: Annotated[Any, Operand(FLOAT32, 4, when="gathers.float8")]
    sink: Annotated[Any, Operand(FLOAT32, 1, when="output.has_sink")]
    lse: Annotated[Any, Operand(FLOAT32, 3, when="output.has_lse")]
    row_max: Annotated[Any, STATE]
    row_sum: Annotated[Any, STATE]
    cos_sin: Annotated[Any, Operand(FLOAT32, 2, ROPE_DIM, when="gathers.rotate_back")]
    positions: Annotated[Any, Operand(INT32, 1, when="gathers.rotate_back")]
    kv_scale: Annotated[Any, Operand(FLOAT32, 1, when="gathers.has_kv_scale")]
    sets: Annotated[tuple, Several(KeySetOperands, MAX_KEY_SETS, key_set_of)]


class GatheredNumbers(NamedTuple):
    """The numbers among the arguments.

    logits: the numbers of the map from logits to weights. splits: parts that each query's keys are cut into. ctas: the
    most CTAs of a persistent launch.
    """

    logits: LogitNumbers
    splits: Annotated[Any, Number(INT32)]
    ctas: Annotated[Any, Number(INT32)]


def score_numbers(config, operands: Gathered, numbers: LogitNumbers) -> LogitNumbers:
    """The map's numbers for products of Q with keys' codes, if all keys have one scale.

    numbers: the map's numbers for products of Q with the keys themselves.
    """
    if not config.gathers.has_kv_scale:
        return numbers
    return with_factor(config.logits, numbers, numbers.factor * operands.kv_scale[0])


class Units(NamedTuple):
    """The number of tasks of a launch, and the sizes that decompose a task's index, fastest first."""

    total: Int32
    head_groups: Int32
    splits: Int32


@dataclass(frozen=True)
class Task(RowTile):
    """A task: 64 heads of one query, or a part of its keys.

    token, head_group, split: numbers of the task's token, head group and split. heads: heads of q. ends: for each key
    set, the end of its tiles. span: all tiles.
    """

    token: Int32
    head_group: Int32
    split: Int32
    heads: Int32
    ends: tuple
    span: SparseTiles

    def row(self, index, member, row_group=0) -> Row:
        """The record of a row for the threads that share it."""
        return Row(index, member)

    def place(self, index, row_group=0) -> Place:
        """The place that a row's results go to."""
        head = self.head_group * WARPGROUP_ROWS + index
        return Place(0, self.token, Int32(0), head, self.token, Boolean(head < self.heads))


def task_at(config, operands: Gathered, units: Units, index) -> Task:
    """The index-th task of the launch. Head groups of one query are adjacent, because they read the same keys."""
    head_group, rest = index % units.head_groups, index // units.head_groups
    split, token = rest % units.splits, rest // units.splits
    ends, tiles = [], Int32(0)
    for each in operands.sets:
        tiles = tiles + (each.length(token) + config.tile_n - 1) // config.tile_n
        ends.append(tiles)
    first = tiles * split // units.splits
    count = tiles * (split + 1) // units.splits - first
    return Task(token, head_group, split, operands.q.shape[2], tuple(ends), SparseTiles(first, count))
