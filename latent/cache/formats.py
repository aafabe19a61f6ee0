"""Storage formats of the rows of paged pools, one record each. Plain Python, no tensors.

A row has ``dim`` numbers. The first ``values`` of them are quantised, ``block`` numbers to a scale; the others, the
tail, are bf16. In some formats (``apart``) a page of P rows holds the data of all rows first and their scales after
it; in the others each row has its scales inside, between values and tail.

"v4-fp8" and the index formats have the layouts that FlashMLA's and DeepGEMM's kernels read, "v3.2-fp8" FlashMLA's.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpspec.common.checks import check_choice
from warpspec.common.hardware import BF16_BYTES

VALUE_BITS = {"e4m3": 8, "e2m1": 4, "bf16": 16}
SCALE_BYTES = {"ue8m0": 1, "fp32": 4}
PAGE_ALIGNMENT = 16  # alignment in bytes of the first page and of the distance between pages


@dataclass(frozen=True)
class RowFormat:
    """Layout of the rows of one format.

    name: what the argument ``format`` calls it. kind: "latent" (keys that are values too) or "index". dim: numbers of a
    row. values: how many of them, from the first, are stored as type ``value``. block: values that share a scale; 0: no
    scales. scale: the scales' type; None: no scales. padding: zero bytes after a row's scales. apart: whether the
    scales lie after all rows of the page. min_amax: lower bound of a block's amax when its scale is chosen.
    """

    name: str
    kind: str
    dim: int
    values: int
    value: str
    block: int = 0
    scale: str | None = None
    padding: int = 0
    apart: bool = False
    min_amax: float = 0.0

    def __post_init__(self):
        assert self.kind in ("latent", "index") and 0 < self.values <= self.dim
        assert (self.scale is None) == (self.block == 0)
        assert self.block == 0 or self.values % self.block == 0
        assert self.row_bytes % 4 == 0 and self.data_bytes % 4 == 0, "kernels address words"

    @property
    def value_bytes(self) -> int:
        """Bytes of a row's quantised values."""
        return self.values * VALUE_BITS[self.value] // 8

    @property
    def tail(self) -> int:
        """Numbers in bf16 after the quantised ones."""
        return self.dim - self.values

    @property
    def blocks(self) -> int:
        """Scales of a row."""
        return self.values // self.block if self.block else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a row's scales, with their padding."""
        return self.blocks * SCALE_BYTES[self.scale] + self.padding if self.scale else 0

    @property
    def data_bytes(self) -> int:
        """Bytes of a row's values and tail."""
        return self.value_bytes + self.tail * BF16_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: data and scales, whether or not they lie together."""
        return self.data_bytes + self.scale_bytes

    @property
    def row_stride(self) -> int:
        """Bytes from a row's first value to the next row's."""
        return self.data_bytes if self.apart else self.row_bytes

    @property
    def tail_offset(self) -> int:
        """Bytes from a row's first value to its tail."""
        return self.value_bytes + (0 if self.apart else self.scale_bytes)

    @property
    def scale_stride(self) -> int:
        """Bytes from a row's first scale to the next row's."""
        return self.scale_bytes if self.apart else self.row_bytes

    def scale_base(self, page_size: int) -> int:
        """Bytes from the start of a page to its first row's first scale."""
        return page_size * self.data_bytes if self.apart else self.value_bytes

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` rows, without padding between pages."""
        return page_size * self.row_bytes

    def page_stride(self, page_size: int, multiple: int = PAGE_ALIGNMENT) -> int:
        """Bytes from page to page: the least multiple of ``multiple`` that holds a page.

        FlashMLA on sm100 wants a multiple of 576 for "v4-fp8".
        """
        return -(-self.page_bytes(page_size) // multiple) * multiple


LATENT_AMAX = 1e-4
MXFP4_AMAX = 6 * 2.0**-126
LATENT_FORMATS = {
    f.name: f
    for f in (
        RowFormat(
            "v4-fp8", "latent", 512, 448, "e4m3", 64, "ue8m0", padding=1, apart=True, min_amax=LATENT_AMAX
        ),
        RowFormat("bf16", "latent", 512, 512, "bf16"),
        RowFormat("v3.2-fp8", "latent", 576, 512, "e4m3", 128, "fp32", min_amax=LATENT_AMAX),
    )
}
INDEX_FORMATS = {
    f.name: f
    for f in (
        RowFormat("mxfp4", "index", 128, 128, "e2m1", 32, "ue8m0", apart=True, min_amax=MXFP4_AMAX),
        RowFormat("fp8", "index", 128, 128, "e4m3", 128, "fp32", apart=True, min_amax=LATENT_AMAX),
        RowFormat("bf16", "index", 128, 128, "bf16"),
    )
}


def format_named(formats: dict[str, RowFormat], name, argument: str = "format") -> RowFormat:
    """The record of ``formats`` with this name. Raises TypeError or ValueError naming the argument."""
    check_choice(argument, name, formats)
    return formats[name]
