"""Configuration of an insert kernel. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.hardware import BF16_BYTES, VECTOR_BYTES, WARP_THREADS
from warpspec.common.kv_formats import FORMATS, CacheFormat

MAX_DIM = 512
WARPS = 4  # warps of a CTA
MOST_HEADS, MOST_NUMBERS = 4, 32  # rows, and numbers of them, whose loads a thread has under way


def numbers_per_lane(dim: int) -> int:
    """Numbers of a row that a lane holds: one 16-byte access, or as many as 32 lanes need to hold the row."""
    one = VECTOR_BYTES // BF16_BYTES
    return one if dim <= one * WARP_THREADS else 2 * one


def heads_per_item(heads: int) -> int:
    """Heads of a token that a group of lanes takes together: the largest power of two that is not above ``heads``,
    at most MOST_HEADS."""
    return min(MOST_HEADS, 1 << (max(heads, 1).bit_length() - 1))


@dataclass(frozen=True)
class RowLayout:
    """Distribution of a row of ``dim`` 16-bit numbers over a group of lanes: each lane holds ``numbers`` neighbours.

    The number of lanes is a power of two; lanes beyond the row hold nothing. block: numbers that a lane shall hold at
    least.
    """

    dim: int
    block: int = 0

    def __post_init__(self):
        assert 0 < self.dim <= MAX_DIM and self.dim % self.numbers == 0

    @property
    def numbers(self) -> int:
        return max(numbers_per_lane(self.dim), self.block)

    @property
    def words(self) -> int:
        """32-bit words of a lane's numbers."""
        return self.numbers * BF16_BYTES // 4

    @property
    def used_lanes(self) -> int:
        """Lanes that hold numbers."""
        return self.dim // self.numbers

    @property
    def lanes(self) -> int:
        return 1 << (self.used_lanes - 1).bit_length()


@dataclass(frozen=True)
class InsertConfig:
    """Configuration of the insert kernel.

    A CTA takes rows of queries, of keys or of values. A group of lanes takes an item: some heads of one token. A lane
    holds a whole block of numbers that share a scale, unless the rotation's partners then were in one lane.

    dtype: dtype of queries, keys and values. format: the cache's format (``kv_formats.FORMATS``). k_dim, v_dim: numbers
    of a head of keys and of values. q_heads, kv_heads: most heads of an item (``heads_per_item``); q_heads is 0 without
    queries. rotated: R, how many numbers of a head are rotated; 0: none. interleaved: rotate neighbours as pairs,
    otherwise numbers that are R/2 apart (``reference.rotate``). table, positions, slots: dtypes of these tensors.
    q_weight, k_weight: dtypes of the norms' weights; None: no norm. k_scale, v_scale: "tensor" or "head", what a scale
    is shared by; None: the scale is 1. swizzled: block scales of values are swizzled.
    """

    dtype: str
    format: str
    k_dim: int
    v_dim: int
    q_heads: int
    kv_heads: int
    rotated: int = 0
    interleaved: bool = False
    table: str = "float32"
    positions: str = "int64"
    slots: str = "int64"
    q_weight: str | None = None
    k_weight: str | None = None
    k_scale: str | None = None
    v_scale: str | None = None
    swizzled: bool = False

    def __post_init__(self):
        assert self.rotated <= self.k_dim
        assert self.rotated % self.rotation_step(self.key_layout) == 0

    @property
    def fmt(self) -> CacheFormat:
        return FORMATS[self.format]

    @property
    def query_layout(self) -> RowLayout:
        return RowLayout(self.k_dim)

    @property
    def key_layout(self) -> RowLayout:
        blocks = RowLayout(self.k_dim, self.fmt.block)
        return self.query_layout if self.rotated % self.rotation_step(blocks) else blocks

    @property
    def value_layout(self) -> RowLayout:
        return RowLayout(self.v_dim, self.fmt.block)

    def item_heads(self, layout: RowLayout, most: int) -> int:
        """Heads of an item."""
        return min(most, MOST_NUMBERS // layout.numbers)

    def rotation_step(self, layout: RowLayout) -> int:
        """Divisor of ``rotated`` with which a lane's partners are all in one other lane, or in itself."""
        return layout.numbers * (1 if self.interleaved else 2)

    @property
    def threads(self) -> int:
        return WARPS * WARP_THREADS

    def groups(self, layout: RowLayout) -> int:
        """Items that a CTA takes at a time."""
        return self.threads // layout.lanes
