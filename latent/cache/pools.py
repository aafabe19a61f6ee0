"""Paged pools of rows, as engines allocate them, and the slots that number their rows.

A slot is page * page_size + row, int32. Slots below 0 and beyond the pool belong to no row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common.checks import (
    ANY,
    INTEGER_DTYPES,
    check_device,
    check_int,
    check_strided,
    check_tensor,
    shape_of,
)
from warpspec.common.outputs import has_memory
from warpspec.latent.cache.formats import (
    INDEX_FORMATS,
    LATENT_FORMATS,
    PAGE_ALIGNMENT,
    RowFormat,
    format_named,
)
from warpspec.latent.cache.quantize import dequantize_rows, quantize_rows

MOST_PADDING = 2**20  # the largest ``multiple`` of ``Pool.empty``, in bytes
SLOT_LIMIT = 2**31  # slots are int32
ROW_DTYPES = (torch.bfloat16, torch.float32)  # what a pool quantises
NO_SLOT = NO_PAGE = -1


@dataclass(frozen=True, eq=False)
class Pool:
    """Pages of rows of one format, in memory that someone else may own.

    data: uint8 [pages, bytes]. The bytes of a page are contiguous and at least ``format.page_bytes(page_size)``. The
    first page's address and the distance between pages are multiples of 16 bytes. page_size: rows of a page. format:
    its name. Raises TypeError or ValueError naming the argument.
    """

    data: torch.Tensor
    page_size: int
    format: str

    formats = {}  # noqa: RUF012  (of the class: which formats its rows may have)

    def __post_init__(self):
        fmt = format_named(self.formats, self.format)
        check_page_size(self.page_size)
        data = self.data
        check_strided("data", data)
        if data.dtype != torch.uint8 or data.dim() > 2:
            reinterpreted = "" if data.dtype == torch.uint8 else ".view(torch.uint8)"
            raise (ValueError if data.dtype == torch.uint8 else TypeError)(
                f"data: must be the pages' bytes, torch.uint8 [pages, bytes], got {data.dtype} of shape "
                f"{shape_of(data)}; of a cache [pages, ...], pass data{reinterpreted}.view(len(data), -1)"
            )
        needed = fmt.page_bytes(self.page_size)
        if data.dim() != 2 or data.shape[1] < needed:
            raise ValueError(
                f"data: must be [pages, bytes] with at least {needed} bytes for pages of {self.page_size} rows of "
                f"{self.format!r}, got shape {shape_of(data)}"
            )
        if data.stride(1) != 1:
            raise ValueError(f"data: a page's bytes must be contiguous, got strides {list(data.stride())}")
        apart = data.stride(0)
        if len(data) > 1 and (apart < needed or apart % PAGE_ALIGNMENT):
            raise ValueError(
                f"data: pages must be a multiple of {PAGE_ALIGNMENT} bytes apart, and at least {needed}, got {apart}"
            )
        if len(data) * self.page_size >= SLOT_LIMIT:
            raise ValueError(
                f"data: at most {SLOT_LIMIT - 1} rows have a slot, got {len(data)} pages of {self.page_size}"
            )
        if has_memory(data) and data.data_ptr() % PAGE_ALIGNMENT:
            raise ValueError(f"data: the first page must be aligned to {PAGE_ALIGNMENT} bytes")

    @classmethod
    def empty(cls, pages: int, page_size: int, format: str, *, device="cpu", multiple: int = PAGE_ALIGNMENT):
        """A pool of zeros.

        pages, page_size: ints. multiple: the distance between pages is a multiple of this many bytes (FlashMLA on
        sm100: 576). Raises TypeError or ValueError naming the argument.
        """
        fmt = format_named(cls.formats, format)
        check_page_size(page_size)
        check_int("multiple", multiple, 1, MOST_PADDING)
        if multiple % PAGE_ALIGNMENT:
            raise ValueError(f"multiple: must be a positive multiple of {PAGE_ALIGNMENT}, got {multiple}")
        check_int("pages", pages, 0, (SLOT_LIMIT - 1) // page_size)
        device = check_device("device", device)
        stride = fmt.page_stride(page_size, multiple)
        data = torch.zeros(pages, stride, dtype=torch.uint8, device=device)
        return cls(data, page_size, format)

    @property
    def row_format(self) -> RowFormat:
        return self.formats[self.format]

    @property
    def capacity(self) -> int:
        """Rows of the pool: slots are 0 to capacity - 1."""
        return len(self.data) * self.page_size

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def words(self) -> torch.Tensor:
        """uint32 [pages, words]: the pages' bytes as kernels take them."""
        needed = self.row_format.page_bytes(self.page_size)
        return self.data[:, :needed].view(torch.uint32)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """fp32 [..., dim]: the rows at ``slots`` [...], int32 or int64; zeros where a slot belongs to no row."""
        check_tensor("slots", slots, INTEGER_DTYPES, None, self.device)
        seen = (slots >= 0) & (slots < self.capacity)
        flat = torch.where(seen, slots, 0).reshape(-1).long()
        fmt = self.row_format
        if self.capacity == 0:
            return torch.zeros(*slots.shape, fmt.dim, dtype=torch.float32, device=self.device)
        page, data_at, scale_at = self._bytes_of(flat)
        rows = dequantize_rows(self.data[page, data_at], self.data[page, scale_at], fmt)
        return torch.where(seen.reshape(-1, 1), rows, 0.0).reshape(*slots.shape, fmt.dim)

    def write(self, slots: torch.Tensor, rows: torch.Tensor, powers: bool = True) -> None:
        """Store rows [T, dim], bf16 or fp32, at ``slots`` [T], int32 or int64, skipping slots of no row. If a slot is
        given twice, one row stays. powers: scales are powers of two; False, in "v3.2-fp8" and "fp8": what vLLM's are
        (``quantize``)."""
        check_tensor("slots", slots, INTEGER_DTYPES, (ANY,), self.device)
        check_tensor("rows", rows, ROW_DTYPES, (len(slots), self.row_format.dim), self.device)
        seen = (slots >= 0) & (slots < self.capacity)
        page, data_at, scale_at = self._bytes_of(slots[seen].long())
        data, scales = quantize_rows(rows[seen], self.row_format, powers)
        self.data[page, data_at] = data
        self.data[page, scale_at] = scales

    def _bytes_of(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Byte indices of rows: (page [T, 1], values and tail [T, data_bytes], scales [T, scale_bytes])."""
        fmt = self.row_format
        page, row = slots // self.page_size, slots % self.page_size
        within = torch.arange(fmt.data_bytes, device=slots.device)
        within = within + (within >= fmt.value_bytes) * (fmt.tail_offset - fmt.value_bytes)
        data_at = row[:, None] * fmt.row_stride + within
        scales = torch.arange(fmt.scale_bytes, device=slots.device)
        scale_at = fmt.scale_base(self.page_size) + row[:, None] * fmt.scale_stride + scales
        return page[:, None], data_at, scale_at


class LatentPool(Pool):
    """A pool of rows that are keys and values: ``format`` "v4-fp8", "bf16" (512 numbers) or "v3.2-fp8" (576)."""

    formats = LATENT_FORMATS


class IndexPool(Pool):
    """A pool of index keys of 128 numbers: ``format`` "mxfp4", "fp8" or "bf16". See ``Pool``."""

    formats = INDEX_FORMATS


def check_page_size(page_size) -> None:
    """Raise TypeError or ValueError for a page_size that no pool can have."""
    check_int("page_size", page_size, 1, SLOT_LIMIT - 1)


def table_slots(page_table: torch.Tensor, rows: torch.Tensor, page_size: int) -> torch.Tensor:
    """int32 slots of requests' rows, looked up in the page table.

    page_table: int32 or int64 [R, pages]. rows: int32 or int64 [R, ...], each the number of a row counted from the
    request's first. Rows below 0 or past the request's pages get NO_SLOT, and so do rows of pages below 0 or beyond all
    slots. Raises TypeError or ValueError naming the argument.
    """
    check_tensor("page_table", page_table, INTEGER_DTYPES, (ANY, ANY))
    check_tensor("rows", rows, INTEGER_DTYPES, None, page_table.device)
    if rows.dim() == 0 or len(rows) != len(page_table):
        raise ValueError(
            f"rows: shape must be [{len(page_table)}, ...] as page_table's, got {shape_of(rows)}"
        )
    check_page_size(page_size)
    requests, pages = page_table.shape
    if pages == 0 or rows.numel() == 0:
        return torch.full(rows.shape, NO_SLOT, dtype=torch.int32, device=rows.device)
    flat = rows.reshape(requests, -1).long()
    inside = (flat >= 0) & (flat < pages * page_size)
    safe = torch.where(inside, flat, 0)
    page = page_table.long().gather(1, safe // page_size)
    known = (page >= 0) & (page < (SLOT_LIMIT - 1) // page_size)
    slots = torch.where(inside & known, page * page_size + safe % page_size, NO_SLOT)
    return slots.to(torch.int32).reshape(rows.shape)


def pages_of(page_table: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
    """[T, pages]: rows ``requests`` [T] of a page table [R, pages]; all NO_PAGE for a request out of range."""
    known = (requests >= 0) & (requests < len(page_table))
    if len(page_table) == 0:
        return torch.full((len(requests), page_table.shape[1]), NO_PAGE, device=page_table.device)
    return torch.where(known[:, None], page_table[torch.where(known, requests, 0).long()], NO_PAGE)
