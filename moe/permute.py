"""Rows sorted by expert: which row of the sorted space is which choice of which token. No host synchronisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DROPPED = -1  # an id that names no expert, or a position that names no row
WORK_COLUMNS = 4  # columns of the list of work: ends of classes, then entries (expert, first row, rows, -)
UNSENT = -2  # a position that names no row because no slot was left (``parallel``)


@dataclass(frozen=True)
class SortedTokens:
    """R = T * k rows, those of expert 0 first; within an expert in the order of tokens and choices.

    source: int32 [R], row r is choice source[r] % k of token source[r] // k. position: int32 [T, k], the row of each
    choice, -1 where it has none. offsets: int32 [E], running ends: rows of expert e are offsets[e - 1] to offsets[e].
    Rows from offsets[-1] on are the dropped choices; no kernel reads or writes them.
    """

    source: torch.Tensor
    position: torch.Tensor
    offsets: torch.Tensor

    @property
    def choices(self) -> int:
        """k: experts a token takes."""
        return self.position.shape[1]


@dataclass(frozen=True)
class Routing:
    """Rows that are the choices in their own order: choice c of token t is row t * (choices + shared) + c.

    A choice's id names one of ``experts``; the last ``shared`` choices are the shared experts, numbered after those.
    """

    experts: int
    choices: int
    shared: int = 0

    @property
    def taken(self) -> int:
        """Choices of a token, including the shared experts."""
        return self.choices + self.shared


def sort_tokens(topk_ids: torch.Tensor, experts: int) -> SortedTokens:
    """Sort the choices topk_ids [T, k] (int32) by expert. Ids outside 0..experts-1, such as -1, are dropped."""
    flat = topk_ids.reshape(-1)
    # Dropped choices sort after all experts. The sort is stable, so the order is always the same.
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    key, source = torch.sort(key, stable=True)
    ends = torch.arange(experts, dtype=key.dtype, device=key.device)
    offsets = torch.searchsorted(key, ends, right=True, out_int32=True)
    rows = torch.arange(len(flat), dtype=torch.int32, device=key.device)
    rows = torch.where(key < experts, rows, DROPPED)
    position = torch.empty_like(rows).scatter_(0, source, rows)
    return SortedTokens(source.int(), position.view(topk_ids.shape), offsets)


def counts(offsets: torch.Tensor) -> torch.Tensor:
    """Rows of each expert, [E], from running ends."""
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def head_rows(widths: tuple[int, ...]) -> int:
    """Rows at the head of the list of work; they hold the ends of the classes, four to a row."""
    return -(-len(widths) // WORK_COLUMNS)
