"""Split KV, second launch: configuration, checks and launch of the kernel that combines the partial results."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch

from warpspec.common.hardware import FP32_BYTES, TMA_ALIGNMENT, WARP_THREADS
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.operands import FLOAT16, FLOAT32, INT32, Operand, fakes
from warpspec.fmha.checks import DTYPES
from warpspec.fmha.features import dtype_name
from warpspec.fmha.heads import CLASSES

THREADS = 256
VECTOR = 4  # fp32 columns of a thread: one 16-byte load per split
MEANS_VECTORS = (VECTOR, 8)  # fp16 columns of a thread, of which eight are one such load
SEGMENT = WARP_THREADS * VECTOR  # most columns of D for one group of threads with so many each
BATCH = 4  # splits a thread loads at a time: enough loads in flight, few repeated if there are few splits
# Microseconds by which ``expected`` compares configurations: of a round of loads; of a CTA, of a round in it and of its
# sum where many groups add up, each times the CTAs of an SM; more where threads have eight columns. Fitted to 318
# numbers of rows and splits at D 512 on an H200 (docs/notebook/latent.md).
SMS = 132
ROUND, CTA, CTA_ROUND, CTA_SUM, WIDE = 0.3, 0.32, 0.127, 0.38, 0.075
MANY_WAYS = 8
MOST_ROUNDS = 4  # that were timed; more only where all groups of a CTA take them


@dataclass(frozen=True)
class CombineConfig:
    """Compile-time shape of one combine kernel (``device.combine``).

    A group of ``lanes`` threads has a segment of one row, ``vector`` columns to a thread. ``ways`` groups share
    the row's splits (way w takes w, w + ways, ...) and add up through shared memory. head_dim: columns of a partial
    result; o_dim: columns of o if fewer, else 0. dtype: dtype of o. normalize: o is divided and the sink applied;
    otherwise o, row_max and row_sum are an un-normalised state. packed: queries past the last request are left alone.
    sink_dtype: dtype of the sink, if there is one. mean_groups: number of groups of columns with a power of two each,
    if o of a split is in fp16 (``Output.means``); else 0.
    """

    head_dim: int
    dtype: str = "bfloat16"
    o_dim: int = 0
    ways: int = 1
    normalize: bool = True
    has_sink: bool = False
    has_lse: bool = False
    packed: bool = False
    sink_dtype: str = FLOAT32
    vector: int = VECTOR
    mean_groups: int = 0

    def __post_init__(self):
        assert not self.mean_groups or self.segment <= self.head_dim // self.mean_groups
        assert self.head_dim in CLASSES and self.columns % self.vector == 0
        assert self.ways in (1, 2, 4, 8, 16) and self.ways <= self.groups
        assert self.normalize or not (self.has_sink or self.has_lse)

    @classmethod
    def of(
        cls, head_dim: int, num_splits: int, *, rows: int = 1, vectors: tuple[int, ...] = (VECTOR,), **options
    ) -> CombineConfig:
        """Choose the fastest configuration for so many splits of so many rows. vectors: columns that a thread may have;
        options: the other fields."""
        found = []
        for vector in vectors:
            config, ways = cls(head_dim, vector=vector, **options), 1
            found.append(config)
            # One split more than a batch is a second round of loads, or for another group's first round.
            while ways * BATCH < num_splits and ways < config.groups:
                ways *= 2
                found.append(replace(config, ways=ways))
        timed = [config for config in found if config.rounds(num_splits) <= MOST_ROUNDS]
        return min(timed or found, key=lambda config: config.expected(num_splits, rows))

    def rounds(self, splits: int) -> int:
        """Rounds of loads of a thread."""
        return -(-splits // (self.ways * BATCH))

    def expected(self, splits: int, rows: int) -> float:
        """Microseconds of combining so many splits of so many rows, with which other configurations are compared."""
        rounds, ctas = self.rounds(splits), -(-rows * self.segments // self.row_segments)
        each = CTA + CTA_ROUND * rounds + (CTA_SUM if self.ways >= MANY_WAYS else 0.0)
        return ROUND * rounds + max(ctas / SMS, 1.0) * each + (WIDE if self.vector > VECTOR else 0.0)

    @property
    def columns(self) -> int:
        """Columns of o."""
        return self.o_dim or self.head_dim

    @property
    def segment(self) -> int:
        """Columns of D of a segment, which one group has."""
        return min(self.head_dim, WARP_THREADS * self.vector)

    @property
    def segments(self) -> int:
        """Segments of a row."""
        return self.head_dim // self.segment

    @property
    def lanes(self) -> int:
        """Threads of a group, part of one warp."""
        return self.segment // self.vector

    @property
    def groups(self) -> int:
        """Groups of a CTA."""
        return THREADS // self.lanes

    @property
    def row_segments(self) -> int:
        """(row, segment) pairs of a CTA."""
        return self.groups // self.ways

    @property
    def smem_bytes(self) -> int:
        """Shared memory: partial sums of o and of the row sum, where groups share a row."""
        return THREADS * (self.vector + 1) * FP32_BYTES if self.ways > 1 else 0


class Results(NamedTuple):
    """Results of rows, and the sink that contributes to them. sink: [Hq]. o: [B, Sq, Hq, D], D contiguous. lse,
    row_max, row_sum: [B, Hq, Sq] fp32. Results that a configuration lacks are None. All but the sink are written."""

    sink: Annotated[Any, Operand(lambda c: c.sink_dtype, 1, when="has_sink")]
    o: Annotated[Any, Operand(lambda c: c.dtype, 4, lambda c: c.columns, TMA_ALIGNMENT)]
    lse: Annotated[Any, Operand(FLOAT32, 3, when="has_lse")]
    row_max: Annotated[Any, Operand(FLOAT32, 3, when=lambda c: not c.normalize)]
    row_sum: Annotated[Any, Operand(FLOAT32, 3, when=lambda c: not c.normalize)]


class CombineOperands(NamedTuple):
    """Tensors of the combine kernel. partial_o: [S, B, Sq, Hq, D] fp32, partial_max, partial_sum: [S, B, Hq, Sq] fp32.
    cu_seqlens_q: [requests + 1] int32, or None. If there are ``mean_groups``, partial_o is in fp16, and partial_sum has
    S more rows for each group behind its own: what the split's columns in it have to be multiplied by."""

    partial_o: Annotated[
        Any,
        Operand(lambda c: FLOAT16 if c.mean_groups else FLOAT32, 5, lambda c: c.head_dim, TMA_ALIGNMENT),
    ]
    partial_max: Annotated[Any, Operand(FLOAT32, 4)]
    partial_sum: Annotated[Any, Operand(FLOAT32, 4)]
    results: Results
    cu_seqlens_q: Annotated[Any, Operand(INT32, 1, when="packed")]


def combine_arguments(config: CombineConfig) -> tuple:
    """The host function of a configuration and its arguments except the stream."""
    from warpspec.fmha.device.combine import Combine

    return (Combine(config), *fakes(CombineOperands, config))


COMBINE = Kernel("fmha.combine", combine_arguments)


def combine_splits(
    partial_o: torch.Tensor,
    partial_max: torch.Tensor,
    partial_sum: torch.Tensor,
    o: torch.Tensor,
    *,
    sink: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    row_max: torch.Tensor | None = None,
    row_sum: torch.Tensor | None = None,
    target: Target | None = None,
):
    """Combine the splits into the given tensors: one launch on the tensors' device and its current stream.

    partial_o [S, B, Sq, Hq, D], partial_max, partial_sum [S, B, Hq, Sq]: fp32, what every split left. o:
    [B, Sq, Hq, D] bf16, fp16 or fp32, written; with row_max and row_sum [B, Hq, Sq] fp32 an un-normalised
    state, else divided by the row sums (and exp(sink - row maximum), sink [Hq] fp32), and lse [B, Hq, Sq]
    fp32 written where given. Rows of partial_o and o are contiguous and aligned to 16 bytes.

    target: None: the target of the tensors' device. In the simulator the ``SimReport`` is returned, otherwise None.
    ValueError names a tensor that does not fit.
    """
    tensors = (partial_o, partial_max, partial_sum, sink, o, lse, row_max, row_sum)
    _check(*tensors)
    if o.numel() == 0:
        return None
    config = CombineConfig.of(
        o.shape[-1],
        partial_o.shape[0],
        rows=math.prod(o.shape[:-1]),
        dtype=dtype_name(o.dtype),
        normalize=row_max is None,
        has_sink=sink is not None,
        has_lse=lse is not None,
    )
    return COMBINE.run(config, target or target_of(o.device), *tensors, None)


def _check(partial_o, partial_max, partial_sum, sink, o, lse, row_max, row_sum) -> None:
    """Raise ValueError naming the first tensor that does not fit ``partial_o`` and ``o``."""
    splits, batch, seq_q, heads, head_dim = partial_o.shape
    if splits == 0:
        raise ValueError("partial_o: needs at least one split, got none")
    rows = (batch, heads, seq_q)
    fp32 = (torch.float32,)
    for name, tensor, shape, dtypes in (
        ("partial_o", partial_o, (splits, batch, seq_q, heads, head_dim), fp32),
        ("partial_max", partial_max, (splits, *rows), fp32),
        ("partial_sum", partial_sum, (splits, *rows), fp32),
        ("sink", sink, (heads,), fp32),
        ("o", o, (batch, seq_q, heads, head_dim), (*DTYPES, torch.float32)),
        ("lse", lse, rows, fp32),
        ("row_max", row_max, rows, fp32),
        ("row_sum", row_sum, rows, fp32),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype not in dtypes or tensor.device != o.device:
            raise ValueError(
                f"{name}: must be {list(shape)}, one of {dtypes}, on {o.device}, "
                f"got {list(tensor.shape)}, {tensor.dtype}, on {tensor.device}"
            )
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name}: last dimension must be contiguous, got strides {tensor.stride()}")
        steps = [tensor.data_ptr(), *(step * tensor.element_size() for step in tensor.stride()[:-1])]
        if tensor.dim() > 3 and name in ("partial_o", "o") and any(step % TMA_ALIGNMENT for step in steps):
            raise ValueError(f"{name}: rows must be aligned to {TMA_ALIGNMENT} bytes, got {tensor.stride()}")
    if (row_max is None) != (row_sum is None):
        raise ValueError("row_max: must be given together with row_sum")
    if row_max is not None and (sink is not None or lse is not None):
        raise ValueError("row_max: an un-normalised state has no sink and no lse")
