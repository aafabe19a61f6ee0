"""Work cut by length, second launch: configuration and launch of the kernel that joins the pieces of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from warpspec.common.hardware import FP32_BYTES, TMA_ALIGNMENT
from warpspec.common.launch import Kernel
from warpspec.common.operands import FLOAT32, INT32, Operand, fakes
from warpspec.fmha.combine import SEGMENT, VECTOR, Results
from warpspec.fmha.heads import PIECE_STATISTICS
from warpspec.fmha.line import JOIN_WORDS
from warpspec.fmha.tiles import TileRows

THREADS = 256
TILE_CTAS = 4, 16  # CTAs that share a tile's rows: with one row group, with more
BATCH = 4  # pieces whose states a thread loads at a time; more than these count as many


@dataclass(frozen=True)
class JoinConfig:
    """Compile-time shape of one join kernel (``device.join``).

    rows: rows of an M tile. dtype: o's dtype. The rest is as in
    ``CombineConfig``.
    """

    head_dim: int
    rows: TileRows
    dtype: str = "bfloat16"
    normalize: bool = True
    has_sink: bool = False
    has_lse: bool = False
    o_dim: int = 0
    sink_dtype: str = FLOAT32

    @property
    def columns(self) -> int:
        """Columns of o."""
        return self.o_dim or self.head_dim

    @property
    def lanes(self) -> int:
        """Threads that share a row's columns, VECTOR each, or one SEGMENT of columns after another."""
        return min(self.head_dim, SEGMENT) // VECTOR

    @property
    def segments(self) -> int:
        """Segments of a row, one vector of a thread each."""
        return self.head_dim // VECTOR // self.lanes

    @property
    def groups(self) -> int:
        """Groups of threads of a CTA. Each takes a row, or, with many pieces, a share of the pieces of one row."""
        return THREADS // self.lanes

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the states that groups add up: VECTOR columns, maximum and sum of each thread."""
        return THREADS * (VECTOR + 2) * FP32_BYTES

    @property
    def ctas(self) -> int:
        """CTAs that share the rows of a tile; in decoding, few of these rows are in use."""
        return TILE_CTAS[self.rows.groups > 1]


class JoinOperands(NamedTuple):
    """Tensors of the join kernel. pieces: [2 CTAs, rows, D + 8] fp32; joins: [CTAs, 8] int32."""

    pieces: Annotated[Any, Operand(FLOAT32, 3, lambda c: c.head_dim + PIECE_STATISTICS, TMA_ALIGNMENT)]
    joins: Annotated[Any, Operand(INT32, 2, JOIN_WORDS, TMA_ALIGNMENT)]
    results: Results


def join_arguments(config: JoinConfig) -> tuple:
    """The host function of a configuration and its arguments except the stream."""
    from warpspec.fmha.device.join import Join

    return (Join(config), *fakes(JoinOperands, config))


JOIN = Kernel("fmha.join", join_arguments)
