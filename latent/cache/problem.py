"""Checks of ``insert_window``, ``store_rows`` and ``compress``: each argument once.

They raise TypeError (wrong kind of object or dtype) or ValueError (wrong value) with the argument's name, its value and
what is allowed, before anything is launched or written. The values in small tensors are checked on the CPU only. On a
GPU, kernels read nothing out of bounds whatever those values are; the public docstrings say what they do instead.
"""

from __future__ import annotations

import torch

from warpspec.common.checks import (
    check_bool,
    check_kind,
    check_number,
    check_operand,
    check_range,
)
from warpspec.common.outputs import check_apart, check_elements
from warpspec.latent.cache.models import CONTENT_AND_GATE, POSITION_LIMIT
from warpspec.latent.cache.pools import IndexPool, LatentPool, Pool
from warpspec.latent.cache.state import SETTLED, WRITTEN, Tail

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
ROPE_DIM = 64  # rotated numbers of a row
ROW_LIMIT = 2**31 - 2**10  # kernels count rows in int32, including rows of idle warps


def check_pool(pool, kinds: tuple[type, ...], device=None) -> None:
    """Check that a pool is of one of these kinds and on the device."""
    check_kind("pool", pool, kinds)
    if device is not None and pool.device != device:
        raise ValueError(f"pool: must be on {device}, got {pool.device}")


def check_store(rows, pool: Pool, slots) -> None:
    """Check the arguments of ``store_rows``."""
    check_pool(pool, (LatentPool, IndexPool))
    check_operand("rows", rows, (torch.bfloat16,), (-1, pool.row_format.dim), pool.device, aligned=True)
    check_count("rows", len(rows))
    check_operand("slots", slots, (torch.int32,), (len(rows),), pool.device)
    check_insert_outputs(None, rows, None, None, None, pool.data, slots, None)


def check_insert(q, kv, cos_sin, positions, weight, eps, pool, slots, out) -> None:
    """Check the arguments of ``insert_window``."""
    check_pool(pool, (LatentPool,))
    if pool.row_format.dim != 512:
        raise ValueError(
            f"pool: insert_window stores rows of 512 numbers, {pool.format!r} has {pool.row_format.dim}"
        )
    device, bf16 = pool.device, (torch.bfloat16,)
    dim = pool.row_format.dim
    check_operand("kv", kv, bf16, (-1, dim), device, aligned=True)
    tokens = len(kv)
    rows = tokens
    if q is not None:
        check_operand("q", q, bf16, (tokens, -1, dim), device, aligned=True)
        rows += q.shape[0] * q.shape[1]
    if out is not None:
        if q is None:
            raise ValueError("out: there are no queries (q is None)")
        check_operand("out", out, bf16, tuple(q.shape), device, aligned=True)
    check_count("kv", rows)
    check_projection(cos_sin, weight, dim, device)
    check_operand("positions", positions, (torch.int32,), (tokens,), device)
    check_operand("slots", slots, (torch.int32,), (tokens,), device)
    check_number("eps", eps)
    check_insert_outputs(q, kv, cos_sin, positions, weight, pool.data, slots, out)


def check_insert_outputs(q, kv, cos_sin, positions, weight, data, slots, out) -> None:
    """Check that outputs of ``insert_window`` (``store_rows`` if positions is None) overlap nothing.

    data: the pool's memory.
    """
    rows = {"rows": kv} if positions is None else {"q": q, "kv": kv}
    inputs = {**rows, "cos_sin": cos_sin, "positions": positions, "weight": weight, "slots": slots}
    if out is not None:
        check_elements("out", out)
    check_apart({"pool": data, "out": out}, inputs, in_place=("q",))


def check_insert_values(positions, cos_sin, slots, capacity: int) -> None:
    """Check values in the small tensors of ``insert_window`` and ``store_rows``, on the CPU.

    capacity: rows of the pool.
    """
    if slots.device.type != "cpu":
        return
    if positions is not None:
        check_positions("positions", positions, cos_sin)
    if not torch.compiler.is_compiling():
        check_once(slots, capacity)


def check_positions(name, positions, cos_sin) -> None:
    """Check on the CPU that the table has all positions."""
    check_range(name, positions, 0, len(cos_sin) - 1, "rows of cos_sin")


def check_once(slots, capacity: int) -> None:
    """Check on the CPU that no row of the pool is given twice."""
    found, counts = slots[(slots >= 0) & (slots < capacity)].unique(return_counts=True)
    for slot in found[counts > 1][:1].tolist():
        raise ValueError(f"slots: each may be given once, got {slot} twice")


def check_projection(cos_sin, weight, dim, device) -> None:
    """Check the table of angles and the norm's weight."""
    check_operand("cos_sin", cos_sin, (torch.float32,), (-1, ROPE_DIM), device, aligned=True)
    check_operand("weight", weight, WEIGHT_DTYPES, (dim,), device, aligned=True)


def check_compress(
    content_gate, ape, weight, cos_sin, *, tail, requests, starts, cu_seqlens, pool, slots, eps, hadamard
) -> None:
    """Check the arguments of ``compress``."""
    check_kind("tail", tail, Tail)
    check_pool(pool, (LatentPool, IndexPool))
    if pool.row_format.dim != tail.dim:
        raise ValueError(
            f"pool: rows must have the tail's {tail.dim} numbers, got {pool.row_format.dim} ({pool.format!r})"
        )
    check_bool("hadamard", hadamard)
    if hadamard and not isinstance(pool, IndexPool):
        raise ValueError("hadamard: only index keys go through the Hadamard transform, got a LatentPool")
    device = pool.device
    if tail.rows.device != device:
        raise ValueError(f"tail: must be on the pool's {device}, got {tail.rows.device}")
    width = tail.series * tail.dim
    shape = (-1, CONTENT_AND_GATE, width)
    check_operand("content_gate", content_gate, (torch.float32,), shape, device, aligned=True)
    tokens = len(content_gate)
    check_count("content_gate", tokens)
    check_operand("ape", ape, WEIGHT_DTYPES, (tail.stride, width), device, aligned=True)
    check_projection(cos_sin, weight, tail.dim, device)
    check_operand("requests", requests, (torch.int32,), (-1,), device)
    count = len(requests)
    check_operand("starts", starts, (torch.int32,), (count,), device)
    check_operand("cu_seqlens", cu_seqlens, (torch.int32,), (count + 1,), device)
    check_operand("slots", slots, (torch.int32,), (tokens,), device)
    check_number("eps", eps)
    check_compress_outputs(
        content_gate, ape, weight, cos_sin, tail, requests, starts, cu_seqlens, pool.data, slots
    )


def check_compress_outputs(
    content_gate, ape, weight, cos_sin, tail: Tail, requests, starts, cu_seqlens, data, slots
) -> None:
    """Check that the outputs of ``compress``, the tail and the pool's data, overlap nothing."""
    inputs = {
        "content_gate": content_gate, "ape": ape, "weight": weight, "cos_sin": cos_sin, "requests": requests,
        "starts": starts, "cu_seqlens": cu_seqlens, "slots": slots,
    }  # fmt: skip
    outputs = {
        "pool": data,
        "tail rows": tail.rows,
        "tail online": tail.online,
        "tail progress": tail.progress,
    }
    for name, tensor in outputs.items():
        if tensor is not None:
            check_elements(name, tensor)
    check_apart(outputs, inputs)


def check_compress_values(cos_sin, tail: Tail, requests, starts, cu_seqlens, slots, capacity: int) -> None:
    """Check the values in ``compress``'s small tensors, on the CPU. capacity: rows of the pool."""
    if requests.device.type != "cpu":
        return
    check_range("requests", requests, 0, tail.requests - 1, "the tail's requests")
    if len(requests.unique()) != len(requests):
        raise ValueError(f"requests: each may be given once, got {requests.tolist()}")
    check_range("starts", starts, 0, POSITION_LIMIT, "positions")
    lengths, tokens = cu_seqlens.diff(), len(slots)
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != tokens or bool((lengths < 0).any()):
        raise ValueError(
            f"cu_seqlens: must rise from 0 to the {tokens} tokens of content_gate, got {cu_seqlens.tolist()}"
        )
    check_starts(tail, requests, starts, lengths)
    check_entries(tail, requests, starts, lengths, cos_sin)
    within = torch.arange(tokens) - cu_seqlens[:-1].repeat_interleave(lengths)
    after = starts.repeat_interleave(lengths) + within + 1
    check_once(slots[after % tail.stride == 0], capacity)


def check_entries(tail: Tail, requests, starts, lengths, cos_sin) -> None:
    """Check that the table has the position of the first token of every entry that a request completes."""
    ends = (starts + lengths) // tail.stride * tail.stride
    first = ends - tail.stride
    for i in ((ends > starts) & (first >= len(cos_sin))).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"cos_sin: must have the position of each entry's first token, got {len(cos_sin)} rows and an entry from "
            f"position {int(first[i])} on of request {int(requests[i])}"
        )


def check_starts(tail: Tail, requests, starts, lengths) -> None:
    """Check that each request begins anew or continues between its settled tokens and the end of those written."""
    written, settled = tail.progress[requests.long()][:, [WRITTEN, SETTLED]].unbind(1)
    wrong = (lengths > 0) & (starts > 0) & ((starts < settled) | (starts > written))
    for i in wrong.nonzero()[:1, 0].tolist():
        raise ValueError(
            f"starts: request {int(requests[i])} has written {int(written[i])} tokens, of which the first "
            f"{int(settled[i])} cannot be taken back (max_draft {tail.max_draft}): must be 0 or within "
            f"{int(settled[i])}..{int(written[i])}, got {int(starts[i])}"
        )


def check_count(name, rows) -> None:
    if rows > ROW_LIMIT:
        raise ValueError(f"{name}: at most {ROW_LIMIT} rows at a time, got {rows}")
