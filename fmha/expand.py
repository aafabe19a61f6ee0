"""Keys and values that are dequantised once, before many query rows meet them, and their launch. Host side.

Where a KV head's keys meet thousands of query rows, each tile of rows would convert every KV tile again. There they
become dense 16-bit tensors first, out of their pages, and a kernel of 16-bit keys attends to these: exactly the same
numbers, because a code, times its block's scale, is one of bf16 and of fp16. k_scale and v_scale are folded as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch

from warpspec.common.allocation import empty
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.launch import Kernel
from warpspec.common.operands import INT32, Operand, fakes
from warpspec.common.simulator import joined
from warpspec.fmha.features import Format, RequestLayout
from warpspec.fmha.heads import HeadSizes
from warpspec.fmha.operands import Operands, block_scales
from warpspec.fmha.problem import AttentionProblem

MOST_BYTES = 1 << 30  # of K and V in 16 bits
PIECE = 16  # numbers that a thread converts: a block of NVFP4
BYTES = 2  # of a number


@dataclass(frozen=True)
class ExpandConfig:
    """Compile-time shape of one kernel (``device.expand``)."""

    format: Format
    heads: HeadSizes
    requests: RequestLayout

    @property
    def pieces(self) -> int:
        """Of a row."""
        return self.heads.qk // PIECE


class ExpandOperands(NamedTuple):
    """Tensors of the kernel: as in ``Operands``; wide_k, wide_v [B, Sk, Hkv, D] in q's dtype are written, but for rows
    past a batch row's KV length."""

    k: Annotated[
        Any, Operand(lambda c: c.format.kv_dtype, 4, lambda c: c.format.kv_row(c.heads.qk), TMA_ALIGNMENT)
    ]
    v: Annotated[
        Any, Operand(lambda c: c.format.kv_dtype, 4, lambda c: c.format.kv_row(c.heads.qk), TMA_ALIGNMENT)
    ]
    k_block_scales: Annotated[Any, block_scales(lambda c: c.heads.qk)]
    v_block_scales: Annotated[Any, block_scales(lambda c: c.heads.qk)]
    page_table: Annotated[Any, Operand(INT32, 2, when="requests.page_size")]
    kv_lengths: Annotated[Any, Operand(INT32, 1, when="requests.has_kv_lengths")]
    wide_k: Annotated[Any, Operand(lambda c: c.format.dtype, 4, lambda c: c.heads.qk, TMA_ALIGNMENT)]
    wide_v: Annotated[Any, Operand(lambda c: c.format.dtype, 4, lambda c: c.heads.qk, TMA_ALIGNMENT)]


def expand_arguments(config: ExpandConfig) -> tuple:
    """The host function of a configuration and its arguments but the stream."""
    from warpspec.fmha.device.expand import Expand

    return (Expand(config), *fakes(ExpandOperands, config))


EXPAND = Kernel("fmha.expand", expand_arguments)


def expands(problem: AttentionProblem, least_rows: int | None) -> bool:
    """Whether keys and values are dequantised first. least_rows: of a KV head, from which on the target does so; None:
    it never does. Not of packed queries: what their keys take in 16 bits is not known."""
    if problem.kv_format is None or least_rows is None or problem.packed_q or problem.shared_kv:
        return False
    numbers = 2 * problem.batch * problem.seq_k * problem.heads_kv * problem.head_dim
    return problem.group * problem.seq_q >= least_rows and numbers * BYTES <= MOST_BYTES


def expanded(problem: AttentionProblem) -> AttentionProblem:
    """The problem of the dequantised keys and values."""
    return replace(problem, kv_format=None, swizzled=False, page_size=None)


def expand_config(problem: AttentionProblem) -> ExpandConfig:
    """The kernel that dequantises a problem's keys and values."""
    return ExpandConfig(Format.of(problem), problem.heads, RequestLayout.of(problem))


class Expanded(NamedTuple):
    """A problem ready to run in two steps. expand: function of ``ExpandOperands``. attention: ``launch.Prepared`` of
    ``expanded(problem)``. shape, dtype: of K and V between."""

    expand: Callable
    attention: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    def run(self, operands: Operands):
        """As ``launch.Prepared.run``."""
        wide = [empty(self.shape, self.dtype, operands.q.device) for _ in range(2)]
        names = ExpandOperands._fields[: -len(wide)]
        with self.attention.target.current():
            first = self.expand(*(getattr(operands, name) for name in names), *wide)
        nothing = dict.fromkeys(("page_table", "k_block_scales", "v_block_scales"))
        return joined(first, self.attention.run(operands._replace(k=wide[0], v=wide[1], **nothing)))
