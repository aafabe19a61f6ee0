"""K and V cut into pages, with NaN or impossible page numbers in every place that no kernel may read."""

from __future__ import annotations

import torch

FAR = (-1, 2**31 - 1, -(2**31), 10**6)  # page numbers out of range, for slots that hold no key
UNUSED_PAGES = 2
PAGE_SIZES = (16, 32, 64, 128)  # keys; those that engines use, of which tiles are multiples


def paged(
    tensors, lengths, page_size: int, *, spare_slots: int = 2, seed: int = 0, heads_outside: bool = False
):
    """(pages, page_table) that hold the ``tensors``, each [B, Sk, Hkv, D], up to ``lengths``.

    pages: for each tensor [pages, page_size, Hkv, D]. They lie in random order; one is used wherever batch rows
    have the same keys in all tensors. NaN everywhere else: at keys past the lengths and in pages that no row
    uses. page_table: int32 [B, slots]; slots past the lengths, spare_slots of them at least, are out of range.
    heads_outside: the memory of a page has its heads outside its keys.
    """
    tensors = tuple(tensors)
    batch, seq_k = tensors[0].shape[:2]
    slots = -(-seq_k // page_size) + spare_slots
    contents, table = [], torch.empty(batch, slots, dtype=torch.int32)
    for row in range(batch):
        for slot in range(slots):
            start = slot * page_size
            used = min(page_size, lengths[row] - start)
            if used <= 0:
                table[row, slot] = FAR[slot % len(FAR)]
                continue
            page = _nan_page(tensors, page_size)
            page[:, :used] = torch.stack([t[row, start : start + used] for t in tensors])
            same = [i for i, other in enumerate(contents) if page.equal(other)]
            if not same:
                contents.append(page)
            table[row, slot] = same[0] if same else len(contents) - 1
    contents += [_nan_page(tensors, page_size)] * UNUSED_PAGES
    place = torch.randperm(len(contents), generator=torch.Generator().manual_seed(seed))
    pages = torch.stack(contents, dim=1)[:, place.argsort()]  # [tensors, pages, page_size, Hkv, D]
    if heads_outside:
        pages = pages.transpose(2, 3).contiguous().transpose(2, 3)
    inside = (table >= 0) & (table < len(contents))
    table = torch.where(inside, place[table.clamp(0, len(contents) - 1)], table).int()
    return tuple(pages), table


def _nan_page(tensors, page_size):
    return torch.full((len(tensors), page_size, *tensors[0].shape[2:]), torch.nan, dtype=tensors[0].dtype)
