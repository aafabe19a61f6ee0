"""Caches of latent keys (DeepSeek-V4): row formats, paged pools, states of requests, insert and compress."""

from __future__ import annotations

import torch

from warpspec.latent.cache import ops
from warpspec.latent.cache.formats import INDEX_FORMATS, LATENT_FORMATS, RowFormat
from warpspec.latent.cache.models import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V4_PRO,
    MODELS,
    CacheConfig,
    bytes_per_token,
)
from warpspec.latent.cache.pools import NO_SLOT, IndexPool, LatentPool, table_slots
from warpspec.latent.cache.problem import check_compress, check_insert, check_store, refuse_gradients
from warpspec.latent.cache.reference import rope_table
from warpspec.latent.cache.state import StateCache, Tail

__all__ = [
    "DEEPSEEK_V4_FLASH",
    "DEEPSEEK_V4_PRO",
    "INDEX_FORMATS",
    "LATENT_FORMATS",
    "MODELS",
    "NO_SLOT",
    "CacheConfig",
    "IndexPool",
    "LatentPool",
    "RowFormat",
    "StateCache",
    "Tail",
    "bytes_per_token",
    "compress",
    "insert_window",
    "rope_table",
    "store_rows",
    "table_slots",
]


def insert_window(
    q: torch.Tensor | None,
    kv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    weight: torch.Tensor,
    pool: LatentPool,
    slots: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor | None:
    """Normalise and rotate queries and keys of new tokens; store the keys. One launch.

    q: bf16 [T, H, 512], each head's projection, or None. kv: bf16 [T, 512], the keys' projection. cos_sin: fp32
    [N, 64], for each position 32 cosines and 32 sines (``rope_table``), which the last 64 numbers are rotated by, in
    neighbouring pairs. positions: int32 [T]. weight: of the keys' norm, fp32 or bf16 [512]; queries have none. slots:
    int32 [T], where keys are stored in ``pool``; a slot below 0 or beyond it stores nothing, one given twice may end up
    with a mixture, on the CPU ValueError. eps: of the norms. out: where rotated queries go, shaped like q: q itself, or
    memory that no other argument has. The pool's memory is no other argument's either.

    A row x becomes x / sqrt(mean(x**2) + eps) (times weight), in fp32, then bf16; rotated in fp32, then bf16; keys are
    quantised then (``quantize``). Returns the queries, bf16 [T, H, 512], None without q. A position beyond the table
    gives a row whose rotated numbers are NaN; on the CPU ValueError.

    Raises TypeError or ValueError naming the argument, UnsupportedProblem for a pool that kernels do not write
    ("v3.2-fp8") or a backend that does not run on the device. Forward only.
    """
    refuse_gradients(q=q, kv=kv, weight=weight)
    check_insert(q, kv, cos_sin, positions, weight, eps, pool, slots, out)
    if q is not None and out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    ops.insert(q, kv, cos_sin, positions, weight, float(eps), pool, slots, out, backend)
    return out


def store_rows(
    rows: torch.Tensor, pool: LatentPool | IndexPool, slots: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Quantise rows and store them in a pool.

    rows: bf16 [T, dim], dim the pool's. slots: as in ``insert_window``. Bits are those of
    ``quantize.quantize_rows``. Raises as ``insert_window``.
    """
    refuse_gradients(rows=rows)
    check_store(rows, pool, slots)
    ops.insert(None, rows, None, None, None, 0.0, pool, slots, None, backend)


def compress(
    content_gate: torch.Tensor,
    ape: torch.Tensor,
    weight: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    tail: Tail,
    requests: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    pool: LatentPool | IndexPool,
    slots: torch.Tensor,
    eps: float = 1e-6,
    hadamard: bool = False,
    backend: str = "auto",
) -> None:
    """Pool new tokens to entries, store those that are complete, keep the rest for later calls. One launch.

    content_gate: fp32 [T, 2, c dim], the projections C and Z of the requests' new tokens, one after another; c is 2
    for CSA, 1 for HCA. ape: [stride, c dim], added to Z by position. weight: [dim], of the norm; both fp32 or
    bf16. cos_sin: as in ``insert_window``. tail: of a ``StateCache``: which kind of entries, and what is kept.
    requests: int32 [R], whose states these are, no two alike. starts: int32 [R], each one's first new position:
    ``StateCache.lengths``. cu_seqlens: int32 [R + 1], where each one's tokens begin, and the end. slots: int32 [T],
    where the entry is stored that the token completes (position + 1 a multiple of the stride); other tokens' are not
    read, one below 0 or beyond the pool stores nothing, one given twice may end up with a mixture. hadamard: index keys
    go through the Hadamard transform.

    An entry's channel is sum(softmax(Z + ape) C), over the stride's tokens (HCA), or over the first half of channels of
    the window before and the second half of its own (CSA). Then bf16, normalised, bf16, rotated by the position of the
    window's first token, bf16, (Hadamard transform, bf16,) quantised. Bits do not depend on how tokens are divided into
    calls.

    A start of 0 begins anew. Any other goes on from the tokens that the request has: those from the start on are taken
    back, and a start may be anything from F - max_draft to the end of the request's last call, F being the furthest end
    of its calls since it began anew. So any pattern of calls takes back what it likes of the last max_draft tokens; a
    call of more than max_draft tokens cannot be repeated. A request without tokens is left as it is, whatever its
    start.

    Raises TypeError or ValueError naming the argument, UnsupportedProblem as ``insert_window``. Forward only. What
    small tensors hold is looked at on the CPU alone. There ValueError names a request out of range or given twice, any
    other start, cu_seqlens that do not rise from 0 to T, an entry's slot given twice, and an entry whose first token's
    position the table does not have. On a GPU, which the host does not wait for,

    - another start makes NaN of the entries that need lost tokens; the request then has the tokens from that start on
    - an entry beyond the table has NaN for the numbers that are rotated, for all numbers with ``hadamard``
    - requests that are out of range are left out, and cu_seqlens clamped to the tokens there are
    """
    refuse_gradients(content_gate=content_gate, ape=ape, weight=weight)
    check_compress(
        content_gate, ape, weight, cos_sin, tail=tail, requests=requests, starts=starts, cu_seqlens=cu_seqlens,
        pool=pool, slots=slots, eps=eps, hadamard=hadamard,
    )  # fmt: skip
    ops.compress(
        content_gate,
        ape,
        weight,
        cos_sin,
        tail,
        requests,
        starts,
        cu_seqlens,
        pool,
        slots,
        float(eps),
        hadamard,
        backend,
    )
