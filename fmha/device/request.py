"""Where a request's queries and keys are, whatever the layout of the batch."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32

from warpspec.fmha.device.packed import extent_of
from warpspec.fmha.features import RequestLayout
from warpspec.fmha.values import POSITION_LIMIT


class Request(NamedTuple):
    """The place of a request's queries and keys; without packed queries, a request is a batch row.

    first_row, first_key: where its queries and keys begin in q and k. seq_q: number of its queries. start: position of
    query 0. length: KV length.
    """

    first_row: Int32 | int
    seq_q: Int32
    first_key: Int32 | int
    length: Int32
    start: Int32


def request_at(requests: RequestLayout, operands, request) -> Request:
    """Find where a request's queries and keys are."""
    seq_q, length = operands.q.shape[1], operands.k.shape[1]
    if cutlass.const_expr(requests.page_size > 0):
        length = operands.page_table.shape[1] * requests.page_size
    first_row, first_key = 0, 0
    if cutlass.const_expr(requests.packed_q):
        first_row, seq_q = extent_of(operands.cu_seqlens_q, request, seq_q)
    if cutlass.const_expr(requests.packed_k):
        first_key, length = extent_of(operands.cu_seqlens_k, request, length)
    if operands.kv_lengths is not None:
        length = cutlass.max(cutlass.min(operands.kv_lengths[request], length), 0)
    start = first_position(operands, request, length, seq_q)
    return Request(first_row, seq_q, first_key, length, start)


def first_position(operands, request, length, seq_q) -> Int32:
    """Position of a request's query 0. length: its KV length."""
    # The last query stands at the last position; a key may stand for several positions.
    start = length - seq_q
    if operands.q_start is not None:  # unchecked: positions add up within int32 whatever it holds
        start = cutlass.max(cutlass.min(operands.q_start[request], POSITION_LIMIT), -POSITION_LIMIT)
    return start
