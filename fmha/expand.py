"""Dequantise keys and values once if many query rows read them: configuration and launch. Host side.

If many query rows read a KV head's keys, each tile of rows would convert every KV tile again. Instead, where plans
expect that to be faster (``plan.expanding``), a first kernel gathers keys and values from their pages into dense 16-bit
tensors, and a kernel for 16-bit keys attends to these. The numbers are exactly the same, because bf16 and fp16
represent a code times its block's scale. k_scale and v_scale are applied as usual.

Keys in front of all windows of a request are left out. If K and V in 16 bits would take more than MOST_BYTES, that is
done in passes, each of which has its share of the heads and takes the same memory again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch

from warpspec.common.allocation import empty
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.common.launch import Kernel
from warpspec.common.operands import INT32, Number, Operand, fakes, flat_fields, is_there
from warpspec.common.simulator import joined
from warpspec.fmha.features import Format, RequestLayout
from warpspec.fmha.heads import HeadSizes
from warpspec.fmha.operands import Operands, block_scales
from warpspec.fmha.problem import AttentionProblem

MOST_BYTES = 1 << 30  # most bytes of K and V in 16 bits
VECTOR = 8  # numbers that a thread converts at a time: 16 bytes of results
BYTES = 2  # bytes of a number


@dataclass(frozen=True)
class ExpandConfig:
    """Compile-time shape of one kernel (``device.expand``). window: whether keys in front of a request's windows are
    left out."""

    format: Format
    heads: HeadSizes
    requests: RequestLayout
    window: bool = False

    @property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.heads.qk // VECTOR


class ExpandOperands(NamedTuple):
    """Tensors of the kernel, as in ``Operands``. It writes wide_k, wide_v [B, Sk, Hkv, D] in q's dtype, except rows
    past a batch row's KV length and in front of its windows."""

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
    q_start: Annotated[Any, Operand(INT32, 1, when=lambda c: c.window and c.requests.has_q_start)]
    cu_seqlens_q: Annotated[Any, Operand(INT32, 1, when=lambda c: c.window and c.requests.packed_q)]
    wide_k: Annotated[Any, Operand(lambda c: c.format.dtype, 4, lambda c: c.heads.qk, TMA_ALIGNMENT)]
    wide_v: Annotated[Any, Operand(lambda c: c.format.dtype, 4, lambda c: c.heads.qk, TMA_ALIGNMENT)]


class ExpandNumbers(NamedTuple):
    """Numbers of the kernel. total_q: queries of a batch row, or all packed queries. window_left: of the mask."""

    total_q: Annotated[Any, Number(INT32, "window")]
    window_left: Annotated[Any, Number(INT32, "window")]


def expand_arguments(config: ExpandConfig) -> tuple:
    """The host function of a configuration and its arguments except the stream."""
    from warpspec.fmha.device.expand import Expand

    return (Expand(config), *fakes(ExpandOperands, config), *fakes(ExpandNumbers, config))


EXPAND = Kernel("fmha.expand", expand_arguments)


def may_expand(problem: AttentionProblem) -> bool:
    """Whether keys and values are in codes that can be dequantised first, in the memory that may be taken for that."""
    if problem.format.kv_format is None or problem.format.shared_kv:
        return False
    return passes(problem) is not None


def passes(problem: AttentionProblem) -> int | None:
    """The number of passes, each with as many heads, in which K and V are dequantised: the least whose memory is within
    MOST_BYTES. None: there is none."""
    batch, keys = wide_rows(problem)
    head_bytes, heads = 2 * batch * keys * problem.head_dim * BYTES, problem.heads_kv
    # A bias and lists of blocks may have heads of their own.
    most = 1 if problem.bias is not None or problem.mask.has_blocks else heads
    found = (n for n in range(1, most + 1) if heads % n == 0 and heads // n * head_bytes <= MOST_BYTES)
    return next(found, None)


def leaves_out(problem: AttentionProblem) -> bool:
    """Whether keys in front of a request's windows are left out: where the kernel knows whose keys it reads."""
    mask = problem.mask
    others = mask.has_tree or mask.has_ranges or mask.has_blocks
    return mask.has_left and not others and not problem.requests.packed_k


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
    """Return the problem that attention has after its keys and values are dequantised, in each pass."""
    count = passes(problem)
    return replace(
        problem,
        heads_q=problem.heads_q // count,
        heads_kv=problem.heads_kv // count,
        format=replace(problem.format, kv_format=None, swizzled=False),
        requests=replace(problem.requests, page_size=0),
        most_k=None,
    )


def expand_config(problem: AttentionProblem) -> ExpandConfig:
    """The kernel that dequantises a problem's keys and values. Packed ones are one batch row."""
    requests = RequestLayout() if problem.requests.packed_k else problem.requests
    return ExpandConfig(problem.format, problem.heads, requests, leaves_out(problem))


class Expanded(NamedTuple):
    """A problem ready to run in two steps, ``passes`` times.

    expand: function of ``ExpandOperands`` and ``ExpandNumbers``. others: names of its operands between the codes and
    what it writes, None for absent ones. window_left: of the mask if keys in front of windows are left out, else None.
    attention: ``launch.Prepared`` of ``expanded(problem)``. shape, dtype: of K and V between. packed: they have as many
    rows as the operands'.
    """

    expand: Callable
    others: tuple[str | None, ...]
    window_left: int | None
    attention: Any
    passes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    packed: bool

    def run(self, operands: Operands):
        """Like ``launch.Prepared.run``."""
        shape = (1, len(operands.k), *self.shape[2:]) if self.packed else self.shape
        wide = [empty(shape, self.dtype, operands.q.device) for _ in range(2)]
        if self.passes == 1:
            return self.run_pass(operands, wide)
        shares = (heads_of(operands, number, self.passes) for number in range(self.passes))
        return joined(*[self.run_pass(share, wide) for share in shares])

    def run_pass(self, operands: Operands, wide: list):
        """``run`` for some heads. wide: memory for their K and V."""
        codes, own = (operands.k, operands.v), wide
        if self.packed:
            codes, own = [each[None] for each in codes], [each[0] for each in wide]
        others = [None if name is None else getattr(operands, name) for name in self.others]
        numbers = (None, None) if self.window_left is None else (operands.q.shape[-3], self.window_left)
        with self.attention.target.current():
            first = self.expand(*codes, *others, *wide, *numbers)
        nothing = dict.fromkeys(("page_table", "k_block_scales", "v_block_scales"))
        return joined(first, self.attention.run(operands._replace(k=own[0], v=own[1], **nothing)))


def other_operands(config: ExpandConfig) -> tuple[str | None, ...]:
    """``Expanded.others`` of a kernel."""
    kinds = flat_fields(ExpandOperands).items()
    return tuple(name if is_there(kind.when, config) else None for name, kind in kinds)[2:-2]


# By how many dimensions a field's heads are before its end.
HEADS = {"sink": 1} | dict.fromkeys(("q", "k", "v", "o", "k_block_scales", "v_block_scales"), 2)
HEADS |= dict.fromkeys(("lse", "row_max", "row_sum", "k_scale", "v_scale"), 2)


def heads_of(operands: Operands, number: int, count: int) -> Operands:
    """The operands of the ``number``-th of ``count`` equal shares of the heads."""
    found = {}
    for name, place in HEADS.items():
        tensor = getattr(operands, name)
        if tensor is not None:
            size = tensor.shape[-place] // count
            found[name] = tensor.narrow(-place, number * size, size)
    return operands._replace(**found)
