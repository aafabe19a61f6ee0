"""Caches of latent keys (DeepSeek-V4): row formats, paged pools, states of requests, insert and compress."""

from __future__ import annotations

import torch

from warpspec.common.checks import refuse_gradients
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
from warpspec.latent.cache.problem import check_compress, check_insert, check_store
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

    q: bf16 [T, H, 512], the projection of each head, or None. kv: bf16 [T, 512], the projection of the keys. cos_sin:
    fp32 [N, 64], 32 cosines and then 32 sines for each position (``rope_table``); they rotate neighbouring pairs of the
    last 64 numbers. positions: int32 [T]. weight: fp32 or bf16 [512], the weight of the keys' norm; the queries' norm
    has none. slots: int32 [T], where to store each key in ``pool``. A slot below 0 or beyond the pool stores nothing.
    If a slot is given twice, a GPU may store a mixture of the two rows; the CPU raises ValueError. eps: added to the
    mean square in both norms. out: receives the rotated queries and has the shape of q. It is q itself, or memory that
    no other argument uses. The pool's memory must not overlap any other argument's either.

    A row x becomes x / sqrt(mean(x**2) + eps) (times weight) in fp32 and is rounded to bf16; it is then rotated in fp32
    and rounded to bf16 again. Keys are quantised after that (``quantize``). Returns the queries, bf16 [T, H, 512], or
    None without q. For a position beyond the table a GPU makes the rotated numbers NaN; the CPU raises ValueError.

    Raises TypeError or ValueError naming the argument, and UnsupportedProblem for a pool format that kernels do not
    write ("v3.2-fp8") or a backend that does not run on the device. Forward only.
    """
    refuse_gradients(q=q, kv=kv, weight=weight, cos_sin=cos_sin, out=out)
    check_insert(q, kv, cos_sin, positions, weight, eps, pool, slots, out)
    if q is not None and out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    ops.insert(ops.InsertCall(q, kv, cos_sin, positions, weight, slots, out, pool, float(eps), backend))
    return out


def store_rows(
    rows: torch.Tensor, pool: LatentPool | IndexPool, slots: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Quantise rows and store them in a pool.

    rows: bf16 [T, dim], with the pool's dim. slots: as in ``insert_window``. The stored bits are those of
    ``quantize.quantize_rows``: scales are powers of two, also in "v3.2-fp8", whose rows vLLM and SGLang store with amax
    / 448. Readers take either; ``pool.write(slots, rows, powers=False)`` stores rows as vLLM does. Raises what
    ``insert_window`` raises.
    """
    refuse_gradients(rows=rows)
    check_store(rows, pool, slots)
    ops.insert(ops.InsertCall(None, rows, None, None, None, slots, None, pool, 0.0, backend))


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
    """Pool new tokens to entries, store complete entries, and keep unfinished ones for later calls. One launch.

    content_gate: fp32 [T, 2, c dim], the projections C and Z of the requests' new tokens, request after request; c is 2
    for CSA and 1 for HCA. ape: [stride, c dim], added to Z by position. weight: [dim], the norm's weight; ape and
    weight are each fp32 or bf16. cos_sin: as in ``insert_window``. tail: the ``Tail`` of a ``StateCache``; it names the
    kind of entries and holds the unfinished ones. requests: int32 [R], the requests that the tokens belong to, no two
    alike. starts: int32 [R], the position of each request's first new token (``StateCache.lengths``). cu_seqlens: int32
    [R + 1], the offsets of the requests' tokens, ending with T. slots: int32 [T]; the token that completes an entry
    (position + 1 is a multiple of the stride) gives the slot of that entry, and the slots of other tokens are not read.
    A slot below 0 or beyond the pool stores nothing, and one given twice may end up with a mixture. hadamard: apply the
    Hadamard transform to index keys.

    Each channel of an entry is sum(softmax(Z + ape) C). For HCA the sum runs over the tokens of one stride. For CSA it
    runs over two windows: the window before contributes its first half of channels, the entry's own window its second
    half. The entry is rounded to bf16, normalised, rounded to bf16, rotated by the position of its window's first
    token, rounded to bf16, (Hadamard transformed, rounded to bf16,) and quantised. The bits do not depend on how tokens
    are divided into calls.

    A start of 0 begins the request anew. Any other start continues it and takes back all tokens from that position on.
    Let F be the furthest position that the request's calls have reached since it began anew: a start may be anything
    from F - max_draft to the end of the request's last call. Any pattern of calls may therefore take back some of the
    last max_draft tokens; a call of more than max_draft tokens cannot be repeated. A request without new tokens is left
    as it is, whatever its start.

    Raises TypeError or ValueError naming the argument, and UnsupportedProblem as ``insert_window`` does. Forward only.
    The values in small tensors are checked on the CPU only. There, ValueError is raised for a request out of range or
    given twice, for any other start, for cu_seqlens that do not rise from 0 to T, for an entry's slot given twice, and
    for an entry whose first token has a position beyond the table. On a GPU the host does not wait for these values:

    - any other start makes NaN of the entries that need lost tokens; the request then has the tokens from that start on
    - an entry beyond the table has NaN in its rotated numbers, or in all of its numbers with ``hadamard``
    - requests that are out of range are skipped, and cu_seqlens are clamped to the tokens that exist
    """
    refuse_gradients(content_gate=content_gate, ape=ape, weight=weight, cos_sin=cos_sin)
    check_compress(
        content_gate, ape, weight, cos_sin, tail=tail, requests=requests, starts=starts, cu_seqlens=cu_seqlens,
        pool=pool, slots=slots, eps=eps, hadamard=hadamard,
    )  # fmt: skip
    inputs = (content_gate, ape, weight, cos_sin, requests, starts, cu_seqlens, slots)
    ops.compress(ops.CompressCall(*inputs, tail, pool, float(eps), hadamard, backend))
