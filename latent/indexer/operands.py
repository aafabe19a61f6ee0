"""Arguments of the indexer's kernels, as records that travel whole."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.operands import FLOAT32, INT32, UINT32, Number, Operand

WORDS = Operand(UINT32, 2, alignment=VECTOR_BYTES)


class ScoreInputs(NamedTuple):
    """The inputs of a kernel that scores.

    queries: [T, words], each query a page of H rows. weights: fp32 [T, H]. pool: [pages, words]. page_table: int32
    [R, pages]. requests, lengths: int32 [T].
    """

    queries: Annotated[Any, WORDS]
    weights: Annotated[Any, Operand(FLOAT32, 2)]
    pool: Annotated[Any, WORDS]
    page_table: Annotated[Any, Operand(INT32, 2)]
    requests: Annotated[Any, Operand(INT32, 1)]
    lengths: Annotated[Any, Operand(INT32, 1)]

    def of_query(self, token) -> tuple:
        """A query's rows of queries and weights."""
        return self.queries[token, None], self.weights[token, None]


class ScoresOperands(NamedTuple):
    """Arguments of the kernel that scores.

    logits: fp32 [T, N]. splits: CTAs of a query, or of the whole launch if the configuration is balanced.
    """

    inputs: ScoreInputs
    logits: Annotated[Any, Operand(FLOAT32, 2)]
    splits: Annotated[Any, Number(INT32)]


class StreamOperands(NamedTuple):
    """Arguments of the kernel that scores and selects. slots: int32 [T, k]. counts: int32 [T]."""

    inputs: ScoreInputs
    slots: Annotated[Any, Operand(INT32, 2)]
    counts: Annotated[Any, Operand(INT32, 1)]


class SelectOperands(NamedTuple):
    """Arguments of the kernel that selects.

    logits: fp32 [T, N]. lengths: int32 [T]. page_table: int32 [R, pages], requests: int32 [T]. slots: int32 [T, k], or
    with splits [T, splits k]. counts: int32 [T]. values: fp32, shaped like slots, for the logits of splits. indices:
    int32 [T, N], the original indices of mapped logits. page_size: rows of the pages that slots count. splits: CTAs of
    a row.
    """

    logits: Annotated[Any, Operand(FLOAT32, 2)]
    lengths: Annotated[Any, Operand(INT32, 1, when="lengths")]
    page_table: Annotated[Any, Operand(INT32, 2, when="table")]
    requests: Annotated[Any, Operand(INT32, 1, when="table")]
    slots: Annotated[Any, Operand(INT32, 2)]
    counts: Annotated[Any, Operand(INT32, 1, when=lambda config: not config.is_split)]
    values: Annotated[Any, Operand(FLOAT32, 2, when="is_split")]
    indices: Annotated[Any, Operand(INT32, 2, when="mapped")]
    page_size: Annotated[Any, Number(INT32)]
    splits: Annotated[Any, Number(INT32)]
