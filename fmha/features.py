"""The features of an attention call, as records that its problem and the configurations of its kernels share.

``AttentionProblem`` has such records besides the call's sizes, and so have ``AttentionKernel`` and ``BackwardKernel``,
which add tiles and memory. A kernel's code asks ``config.mask.causal``, a plan ``problem.mask.causal``. A new switch is
a field of one record, a line of that record's ``of``, and its use. ``heads.HeadSizes`` and ``logits.BiasLayout`` are
such records, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from warpspec.common.kv_formats import FORMATS as CACHE_FORMATS
from warpspec.common.operands import UINT8
from warpspec.fmha.block_mask import WORD_BITS
from warpspec.fmha.quantized import FORMATS

if TYPE_CHECKING:
    from warpspec.fmha.operands import Operands, Options


@dataclass(frozen=True)
class Mask:
    """The mask: which sides of the band of keys that a row sees are bounded, and which keys are visible besides.

    causal: keys after the query are hidden. has_left, has_right: the window bounds that side. key_stride: positions
    that a key stands for. has_tree, has_ranges: an operand gives further visible keys, those of drafts (``tree``) or of
    an image. sparse: any key of a tile may be missing; the source of the keys knows which. block_size: (queries, keys)
    of the blocks that operands list (``block_mask``); None: no lists. has_patterns: patterns of bits hide keys of
    partial blocks. has_order: an operand says in which order blocks of queries begin.
    """

    causal: bool = False
    has_left: bool = False
    has_right: bool = False
    key_stride: int = 1
    has_tree: bool = False
    has_ranges: bool = False
    sparse: bool = False
    block_size: tuple[int, int] | None = None
    has_patterns: bool = False
    has_order: bool = False

    def __post_init__(self):
        assert not (self.has_tree or self.has_ranges) or (self.causal and self.key_stride == 1)

    @classmethod
    def of(cls, operands: Operands, options: Options) -> Mask:
        """The mask of a call whose arguments are checked."""
        left, right = options.window or (None, None)
        return cls(
            causal=options.causal,
            has_left=left is not None,
            has_right=right is not None,
            key_stride=options.key_stride if options.causal else 1,
            has_tree=operands.tree is not None,
            has_ranges=operands.ranges is not None,
            block_size=None if operands.kv_visits is None else (options.block_queries, options.block_keys),
            has_patterns=operands.patterns is not None,
            has_order=operands.kv_order is not None and operands.cu_seqlens_q is None,
        )

    @property
    def band(self) -> bool:
        """Whether a row's keys are bounded on a side where another row's are not."""
        return self.causal or self.has_left or self.has_right

    @property
    def has_blocks(self) -> bool:
        """Whether operands list the blocks of keys that rows see."""
        return self.block_size is not None

    @property
    def uneven(self) -> bool:
        """Whether a row may see less of a tile than another row of its M tile."""
        return self.band or self.has_blocks

    def pattern_words(self, side: int) -> int:
        """Words of a query's pattern of bits (side 1: a bit for each key of a block), or of a key's (0)."""
        return -(-self.block_size[side] // WORD_BITS) if self.has_patterns else 0

    def bounds(self, window) -> dict:
        """Arguments of ``mask.key_range``. window: (left, right), not read where unbounded."""
        return {
            "causal": self.causal,
            "left": window[0] if self.has_left else None,
            "right": window[1] if self.has_right else None,
            "key_stride": self.key_stride,
        }


@dataclass(frozen=True)
class RequestLayout:
    """The layout of the requests' queries and keys, and the operands that describe it.

    packed_q, packed_k: queries, keys of all requests are packed one after another. many_queries: with packed queries,
    some request has more queries than a kernel's tile, as far as the host knows. page_size: keys of a page of K and V,
    0 if they are not paged.
    """

    has_kv_lengths: bool = False
    has_q_start: bool = False
    packed_q: bool = False
    packed_k: bool = False
    many_queries: bool = False
    page_size: int = 0

    def __post_init__(self):
        assert not self.page_size or self.has_kv_lengths, "pages past the KV length hold anything"
        assert not self.packed_k or (self.packed_q and not self.page_size and not self.has_kv_lengths)

    @classmethod
    def of(cls, operands: Operands) -> RequestLayout:
        """The layout of a call whose arguments are checked."""
        return cls(
            has_kv_lengths=operands.kv_lengths is not None,
            has_q_start=operands.q_start is not None,
            packed_q=operands.cu_seqlens_q is not None,
            packed_k=operands.cu_seqlens_k is not None,
            page_size=0 if operands.page_table is None else operands.k.shape[1],
        )

    @property
    def ends_in_tile(self) -> bool:
        """Whether a KV tile may hold keys that no row sees: past the KV length, or another request's."""
        return self.has_kv_lengths or self.packed_k


@dataclass(frozen=True)
class Format:
    """Formats of numbers in memory.

    dtype: of Q, "bfloat16" or "float16". kv_format: FP8 or NVFP4 format of K and V; None: they have dtype. has_k_scale,
    has_v_scale: codes are multiplied by scales. swizzled: NVFP4's block scales are swizzled. shared_kv: V is K, or the
    first part of its rows.
    """

    dtype: str = "bfloat16"
    kv_format: str | None = None
    has_k_scale: bool = False
    has_v_scale: bool = False
    swizzled: bool = False
    shared_kv: bool = False

    @classmethod
    def of(cls, operands: Operands, options: Options) -> Format:
        """The formats of a call whose arguments are checked."""
        return cls(
            dtype=dtype_name(operands.q.dtype),
            kv_format=FORMATS.get(operands.k.dtype),
            has_k_scale=operands.k_scale is not None,
            has_v_scale=operands.v_scale is not None,
            swizzled=options.swizzled,
            shared_kv=operands.v is None,
        )

    @property
    def kv_dtype(self) -> str:
        """dtype of K and V in memory; bytes for FP8 and NVFP4."""
        return UINT8 if self.kv_format else self.dtype

    def kv_row(self, size: int) -> int:
        """Elements of kv_dtype in a row of K or V with this many numbers."""
        return CACHE_FORMATS[self.kv_format].row_bytes(size) if self.kv_format else size

    @property
    def kv_bits(self) -> int:
        """Bits of a number of K and V in memory."""
        return CACHE_FORMATS[self.kv_format or self.dtype].bits

    @property
    def kv_block(self) -> int:
        """Numbers of K and V that share a block scale; 0 without."""
        return CACHE_FORMATS[self.kv_format].block if self.kv_format else 0

    @property
    def rings(self) -> tuple[str, ...]:
        """Names of the rings of KV tiles in shared memory."""
        return ("k",) if self.shared_kv else ("k", "v")

    @property
    def v_ring(self) -> str:
        """Name of the ring that V comes through."""
        return self.rings[-1]


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
