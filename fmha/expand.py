"""Dequantise keys and values once if many query rows read them: configuration and launch. Host side.

If many query rows read a KV head's keys, each tile of rows would convert every KV tile again. Instead, where plans
expect that to be faster (``plan.expanding``), a first kernel gathers keys and values from their pages into dense 16-bit
tensors, and a kernel for 16-bit keys attends to these. The numbers are exactly the same, because bf16 and fp16
represent a code times its block's scale. k_scale and v_scale are applied as usual.
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

MOST_BYTES = 1 << 30  # most bytes of K and V in 16 bits
VECTOR = 16  # numbers that a thread converts: a block of NVFP4
BYTES = 2  # bytes of a number


@dataclass(frozen=True)
class ExpandConfig:
    """Compile-time shape of one kernel (``device.expand``)."""

    format: Format
    heads: HeadSizes
    requests: RequestLayout

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.heads.qk // VECTOR


class ExpandOperands(NamedTuple):
    """Tensors of the kernel, as in ``Operands``. It writes wide_k, wide_v [B, Sk, Hkv, D] in q's dtype, except rows
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
    """The host function of a configuration and its arguments except the stream."""
    from warpspec.fmha.device.expand import Expand

    return (Expand(config), *fakes(ExpandOperands, config))


EXPAND = Kernel("fmha.expand", expand_arguments)


def may_expand(problem: AttentionProblem) -> bool:
    """Whether keys and values are in codes that can be dequantised first, in the memory that may be taken for that."""
    if problem.format.kv_format is None or problem.format.shared_kv:
        return False
    batch, keys = wide_rows(problem)
    return 2 * batch * keys * problem.heads_kv * problem.head_dim * BYTES <= MOST_BYTES


def expanding_bytes(problem: AttentionProblem, keys: float) -> float:
    """Bytes that dequantising this many keys and values of all heads reads and writes."""
    each = BYTES + problem.format.kv_bits / 8
    return 2 * keys * problem.heads_kv * problem.head_dim * each


def wide_rows(problem: AttentionProblem) -> tuple[int, int]:
    """(B, Sk): batch rows, and keys of each, for which there is room in 16 bits. Packed keys are one batch row, of at
    most Sk keys."""
    keys = problem.seq_k if problem.most_k is None else problem.most_k
    return (1 if problem.requests.packed_k else problem.batch, keys)


def expanded(problem: AttentionProblem) -> AttentionProblem:
    """Return the problem that attention has after its keys and values are dequantised."""
    return replace(
        problem,
        format=replace(problem.format, kv_format=None, swizzled=False),
        requests=replace(problem.requests, page_size=0),
        most_k=None,
    )


def expand_config(problem: AttentionProblem) -> ExpandConfig:
    """The kernel that dequantises a problem's keys and values. Packed ones are one batch row."""
    requests = RequestLayout() if problem.requests.packed_k else problem.requests
    return ExpandConfig(problem.format, problem.heads, requests)


class Expanded(NamedTuple):
    """A problem ready to run in two steps. expand: function of ``ExpandOperands``. attention: ``launch.Prepared`` of
    ``expanded(problem)``. shape, dtype: of K and V between. packed: they have as many rows as the operands'."""

    expand: Callable
    attention: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool

    def run(self, operands: Operands):
        """Like ``launch.Prepared.run``."""
        codes, shape = (operands.k, operands.v), self.shape
        if self.packed:
            shape = (1, len(operands.k), *shape[2:])
            codes = tuple(each[None] for each in codes)
        wide = [empty(shape, self.dtype, operands.q.device) for _ in codes]
        others = (getattr(operands, name) for name in ExpandOperands._fields[len(codes) : -len(wide)])
        with self.attention.target.current():
            first = self.expand(*codes, *others, *wide)
        if self.packed:
            wide = [each[0] for each in wide]
        nothing = dict.fromkeys(("page_table", "k_block_scales", "v_block_scales"))
        return joined(first, self.attention.run(operands._replace(k=wide[0], v=wide[1], **nothing)))
