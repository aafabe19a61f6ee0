"""Storage formats of numbers in caches of keys and values, one record each.

x = code * scale. In "e4m3" and "e5m2" the scale is an fp32 number of a tensor or of a head; in "nvfp4" it is the e4m3
scale of a block of 16 numbers times such a number. The 16-bit formats have no scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.nvfp4 import NVFP4_BLOCK

SIXTEEN_BITS = ("bfloat16", "float16")
SCALE_ROWS = 4  # rows of a page whose swizzled block scales lie together


@dataclass(frozen=True)
class CacheFormat:
    """One format of cached keys and values.

    name: value of the argument ``format``; for 16 bits the dtype's name. bits: bits of a number. dtype: torch's dtype
    of a tensor of codes; bytes (uint8) where a code takes less than a byte. largest: the largest finite magnitude of an
    8-bit code, otherwise 0. block: how many numbers share a block scale, 0 without block scales.
    """

    name: str
    bits: int
    dtype: torch.dtype
    largest: float = 0.0
    block: int = 0

    @property
    def scaled(self) -> bool:
        """Whether numbers are divided by a scale."""
        return self.bits < 16

    def row_bytes(self, dim: int) -> int:
        """Bytes of the codes of ``dim`` numbers."""
        return dim * self.bits // 8


FORMATS = {
    one.name: one
    for one in (
        *(CacheFormat(name, 16, getattr(torch, name)) for name in SIXTEEN_BITS),
        CacheFormat("e4m3", 8, torch.float8_e4m3fn, largest=448.0),
        CacheFormat("e5m2", 8, torch.float8_e5m2, largest=57344.0),
        CacheFormat("nvfp4", 4, torch.uint8, block=NVFP4_BLOCK),
    )
}
QUANTIZED = {name: one for name, one in FORMATS.items() if one.scaled}
EIGHT_BITS = {name: one.dtype for name, one in QUANTIZED.items() if one.bits == 8}  # dtypes by name


def swizzled_place(row, block, blocks: int) -> tuple:
    """The place (row, column) of a block's scale in a page of swizzled scales.

    row: the block's row in the page. block: its number in the row, which has ``blocks`` blocks, a multiple of 4. This
    is how vLLM, FlashInfer and TensorRT-LLM lay out the values' block scales on sm_100: four rows' scales are spread
    over four rows, and each row of the page holds a quarter of the blocks of four rows. Works on ints, tensors and
    numbers of a kernel.
    """
    quarter = blocks // SCALE_ROWS
    return (
        row // SCALE_ROWS * SCALE_ROWS + block // quarter,
        block % quarter * SCALE_ROWS + row % SCALE_ROWS,
    )


def unswizzle_block_scales(blocks: torch.Tensor) -> torch.Tensor:
    """Put swizzled block scales [pages, page_size, H, S], 1 byte each, in linear order (``swizzled_place``)."""
    _, size, _, count = blocks.shape
    rows, columns = torch.arange(size)[:, None], torch.arange(count)[None]
    row, column = swizzled_place(rows, columns, count)
    return blocks.transpose(1, 2)[:, :, row, column].transpose(1, 2)
