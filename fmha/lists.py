"""Conversion of flash-attn-4's lists of blocks to the form of kernels (``block_mask.BlockMask``) by three kernels. Host
side.

Such lists come with every call, and as torch operations their conversion is 80 launches, which take longer than most
calls of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import torch

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import WORD_BYTES
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.operands import INT32, Number, Operand, fakes
from warpspec.common.repeated import watched
from warpspec.common.strides import regular_strides

WARPS = 4  # of a CTA; each has a row of lists, or a column
MOST_BLOCKS = 2048  # blocks of keys for whose flags a CTA has shared memory
ORDER_WORDS = 5  # of an entry of kv_order
FIRST, LAST, COUNT, ORDER = range(4)  # columns of q_counts
NEXT, RULE, RANK = range(3)  # columns of q_visits


@dataclass(frozen=True)
class ListsConfig:
    """Compile-time shape of the kernels. has_full: full blocks are listed."""

    has_full: bool

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the flags of a CTA's rows."""
        return WARPS * MOST_BLOCKS * WORD_BYTES


class ListsOperands(NamedTuple):
    """Tensors of the kernels. counts, full_counts [B, H, M], indices, full_indices [B, H, M, any]: the lists. The
    others are written, with L = B * H: kv_visits [L, M, N, 2], kv_counts [L, M, 2], q_visits [L, N, M, 3], q_counts [L,
    N, 4], kv_order [L, M, 5], of ``BlockMask``."""

    counts: Annotated[Any, Operand(INT32, 3)]
    indices: Annotated[Any, Operand(INT32, 4)]
    full_counts: Annotated[Any, Operand(INT32, 3, when="has_full")]
    full_indices: Annotated[Any, Operand(INT32, 4, when="has_full")]
    kv_visits: Annotated[Any, Operand(INT32, 4, 2)]
    kv_counts: Annotated[Any, Operand(INT32, 3, 2)]
    q_visits: Annotated[Any, Operand(INT32, 4, 3)]
    q_counts: Annotated[Any, Operand(INT32, 3, 4)]
    kv_order: Annotated[Any, Operand(INT32, 3, ORDER_WORDS)]


class ListsNumbers(NamedTuple):
    """Numbers of the kernels. cut_q, cut_k: 1 if the last block of queries, of keys, is not whole, otherwise 0."""

    cut_q: Annotated[Any, Number(INT32)]
    cut_k: Annotated[Any, Number(INT32)]


def kernel_of(name: str) -> Kernel:
    """The kernel of a class of ``device.lists``."""

    def arguments(config: ListsConfig) -> tuple:
        from warpspec.fmha.device import lists

        return (
            getattr(lists, name)(config),
            *fakes(ListsOperands, config),
            *fakes(ListsNumbers, config),
        )

    return Kernel(f"fmha.lists.{name.lower()}", arguments)


KERNELS = tuple(map(kernel_of, ("Rows", "Links", "Orders")))


@lru_cache(maxsize=64)
def launchers(config: ListsConfig, target: Target) -> tuple[Callable, ...]:
    """Functions of the operands and numbers that launch the kernels, compiled."""
    return tuple(kernel.launcher(config, target) for kernel in KERNELS)


def target_for(lists: Sequence[torch.Tensor | None], keys: int, block_keys: int) -> Target | None:
    """The GPU that converts lists (``convert``); None if torch operations have to: on other devices, where something
    watches, and for lists without an entry or with too many blocks. keys: Sk. block_keys: keys of a block."""
    given = [t for t in lists if t is not None]
    fits = all(t.numel() for t in given) and 0 < -(-keys // block_keys) <= MOST_BLOCKS
    if not fits or not given[0].is_cuda or watched(*given):
        return None
    try:
        return target_of(given[0].device)
    except UnsupportedProblem:
        return None


def convert(
    lists: Sequence[torch.Tensor | None], lengths: tuple[int, int], size: tuple[int, int], target: Target
) -> tuple[torch.Tensor, ...]:
    """Return kv_visits, kv_counts, q_visits, q_counts and kv_order of ``BlockMask`` for lists that are checked.

    lists: counts, indices, and those of full blocks or None. lengths: (Sq, Sk). size: (queries, keys) of a block.
    """
    rows, blocks = (-(-length // each) for length, each in zip(lengths, size, strict=True))
    batch, heads = (max(t.shape[dim] for t in lists if t is not None) for dim in range(2))
    given = [None if t is None else in_rows(t.expand(batch, heads, *t.shape[2:])) for t in lists]

    def new(*sizes: int) -> torch.Tensor:
        return torch.empty((batch * heads, *sizes), dtype=torch.int32, device=lists[0].device)

    made = new(rows, blocks, 2), new(rows, 2), new(blocks, rows, 3), new(blocks, 4), new(rows, ORDER_WORDS)
    cut = [int(length % each != 0) for length, each in zip(lengths, size, strict=True)]
    with target.current():
        for launch in launchers(ListsConfig(lists[2] is not None), target):
            launch(*given, *made, *cut)
    return tuple(t.unflatten(0, (batch, heads)) for t in made)


def in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, whose rows are without gaps."""
    tensor = regular_strides(tensor)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
