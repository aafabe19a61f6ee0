"""The arguments of the kernels that write pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.operands import FLOAT32, INT32, UINT32, Number, Operand

ROPE_DIM = 64  # numbers of a row of the table of angles
WORDS = Operand(UINT32, 3, None, VECTOR_BYTES)  # words of two bf16
POOL = Operand(UINT32, 2, None, VECTOR_BYTES)  # [pages, words]
TABLE = Operand(FLOAT32, 2, ROPE_DIM, VECTOR_BYTES)  # [N, R]: cosines, then sines


class InsertOperands(NamedTuple):
    """Tensors of an insert.

    q, q_out: [T, H, dim/2] words of two bf16. kv: [T, dim/2] words. weight: [dim]. cos_sin: [N, R] fp32. positions,
    slots: int32 [T]. pool: [pages, words].
    """

    q: Annotated[Any, replace(WORDS, when="queries")]
    q_out: Annotated[Any, replace(WORDS, when="queries")]
    kv: Annotated[Any, replace(WORDS, rank=2)]
    weight: Annotated[
        Any,
        Operand(
            lambda c: c.weight,
            1,
            lambda c: c.fmt.dim,
            VECTOR_BYTES,
            lambda c: c.project and c.weight,
        ),
    ]
    cos_sin: Annotated[Any, replace(TABLE, when="project")]
    positions: Annotated[Any, Operand(INT32, 1, when="project")]
    slots: Annotated[Any, Operand(INT32, 1)]
    pool: Annotated[Any, POOL]


def series(config) -> int:
    """Channels of a token: c dim."""
    return config.series * config.dim


class CompressOperands(NamedTuple):
    """Tensors of a compression.

    new: [T, 2, c dim] fp32, C and Z. ape: [stride, c dim]. weight: [dim]. cos_sin: [N, R] fp32. tail: [requests, ring,
    2, c dim] fp32. online: [requests, 3, dim] fp32 for HCA, else None. progress: int32 [requests, 2]. requests, starts:
    int32 [R]. cu_seqlens: int32 [R + 1]. slots: int32 [T]. pool: [pages, words].
    """

    new: Annotated[Any, Operand(FLOAT32, 3, series, VECTOR_BYTES)]
    ape: Annotated[Any, Operand(lambda c: c.ape, 2, series, VECTOR_BYTES)]
    weight: Annotated[Any, Operand(lambda c: c.weight, 1, lambda c: c.dim, VECTOR_BYTES)]
    cos_sin: Annotated[Any, TABLE]
    tail: Annotated[Any, Operand(FLOAT32, 4, series, VECTOR_BYTES)]
    online: Annotated[Any, Operand(FLOAT32, 3, lambda c: c.dim, VECTOR_BYTES, lambda c: c.tail == "hca")]
    progress: Annotated[Any, Operand(INT32, 2)]
    requests: Annotated[Any, Operand(INT32, 1)]
    starts: Annotated[Any, Operand(INT32, 1)]
    cu_seqlens: Annotated[Any, Operand(INT32, 1)]
    slots: Annotated[Any, Operand(INT32, 1)]
    pool: Annotated[Any, POOL]


class PoolNumbers(NamedTuple):
    """The numbers among the arguments.

    page_size: rows of the pool's pages. eps: added to the mean square in the norms.
    """

    page_size: Annotated[Any, Number(INT32)]
    eps: Annotated[Any, Number(FLOAT32)]
