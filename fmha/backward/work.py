"""Work of key tiles on the host: how many there are, the steps of each, and the bytes that a row's read and add to.

A row is a KV head of a batch row, or of all packed requests together (``schedule``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from warpspec.common.hardware import FP32_BYTES
from warpspec.common.launch import Target
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.heads import BLOCK
from warpspec.fmha.mask import position_range
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.tiles import ELEMENT_BYTES

EVEN = 0.85  # mean over maximum of key tiles' steps, from which they count as equal
# Most key tiles of a short row; the same at D 64 under a causal mask or a window; CTAs an SM from which there are many.
SHORT_TILES, SHORT_MASKED_TILES, SHORT_CTAS = 8, 16, 6


def has_short_rows(config: BackwardKernel, forward: AttentionProblem, target: Target) -> bool:
    """Whether there are many rows of one head that have few key tiles."""
    masked = config.heads.qk == BLOCK and config.mask.band
    tiles, rows = -(-forward.seq_k // config.tile_n), forward.heads_kv * forward.batch
    few = tiles <= (SHORT_MASKED_TILES if masked else SHORT_TILES)
    return forward.group == 1 and few and tiles * rows >= SHORT_CTAS * target.sm_count


def even(steps: Sequence[int]) -> bool:
    """Whether key tiles count as equal."""
    return sum(steps) >= EVEN * len(steps) * max(steps, default=0)


def row_bytes(problem: BackwardProblem) -> int:
    """Bytes that the key tiles of a row read and add to: Q, dO, dQ's sums."""
    forward = problem.forward
    queries = forward.least_q if forward.requests.packed_q else forward.seq_q
    return forward.group * queries * forward.head_dim * (2 * ELEMENT_BYTES + FP32_BYTES)


def key_bytes(problem: BackwardProblem) -> int:
    """Bytes of a row's K, V, dK and dV."""
    forward = problem.forward
    keys = forward.least_q if forward.requests.packed_k else forward.seq_k
    return 4 * keys * forward.head_dim * ELEMENT_BYTES


def query_tile_count(config: BackwardKernel, operands: Operands) -> int:
    """Number of query tiles of all batch rows or requests (``device.tile.KeyTile.index_of``)."""
    if config.packed:
        return len(operands.q) // config.tile_m + len(operands.cu_seqlens_q) - 1
    batch, rows = operands.q.shape[:2]
    return batch * -(-rows // config.tile_m)


def key_tile_count(config: BackwardKernel, operands: Operands) -> int:
    """Number of key tiles of a KV head, over all batch rows or requests."""
    if config.packed:
        return len(operands.k) // config.tile_n + len(operands.cu_seqlens_k) - 1
    batch, keys = operands.k.shape[:2]
    return batch * -(-keys // config.tile_n)


@lru_cache(maxsize=64)
def tile_spans(problem: BackwardProblem, config: BackwardKernel) -> tuple[tuple[int, int], ...]:
    """(steps of queries after those that see it, its steps) of each key tile of a row; with packed requests, of one as
    long as any may be."""
    forward = problem.forward
    bounds = {
        "causal": forward.mask.causal,
        "left": forward.window_left,
        "right": forward.window_right,
        "key_stride": forward.mask.key_stride,
    }
    found, start = [], forward.seq_k - forward.seq_q  # as if no row's length or position were given
    tiles = -(-forward.seq_q // config.tile_m)
    for first_key in range(0, max(forward.seq_k, 1), config.tile_n):
        last_key = min(first_key + config.tile_n, forward.seq_k) - 1
        first, _ = position_range(first_key, **bounds, maximum=max)
        _, end = position_range(last_key, **bounds, maximum=max)
        low = 0 if first is None else max(first - start, 0)
        high = forward.seq_q if end is None else min(end - start, forward.seq_q)
        after, count = 0, 0
        if high > low:
            after = tiles - -(-high // config.tile_m)
            count = tiles - after - low // config.tile_m
        found.append((after * forward.group, count * forward.group))
    return tuple(found)


def tile_steps(problem: BackwardProblem, config: BackwardKernel) -> tuple[int, ...]:
    """Steps of each key tile of a row, as in ``tile_spans``."""
    return tuple(steps for _, steps in tile_spans(problem, config))
