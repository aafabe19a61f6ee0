"""Sections of rows: how many rows' key tiles run together, so that what they read and add to stays in L2.

A row is a KV head, or a slice of its query heads, of a batch row or of all packed requests together (``schedule``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from warpspec.common.launch import Target
from warpspec.fmha.backward.features import BackwardKernel
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.work import key_bytes, row_bytes

ROUNDS = 0.6  # CTAs of a section for each SM, about, at least
L2_SHARE = 0.8  # fraction of the L2 for what a section reads and adds to
# The same of packed requests with a query head a KV head, without K, V, dK and dV, and up to which D of the tile.
HEADS_L2_SHARE, HEADS_L2_DIM = 1.25, 192
EVEN_SECTIONS = 1.5  # factor by which the number of sections may change so that all are equal


def section_of(
    problem: BackwardProblem, config: BackwardKernel, target: Target, ctas: int, slices: int = 1
) -> int:
    """Rows of a section, if a row has this many CTAs."""
    if config.heads_inside and not config.deterministic:
        return 1  # chosen because of L2
    rows = problem.forward.heads_kv * slices * (1 if config.requests.packed_k else problem.forward.batch)
    least = math.ceil(ROUNDS * target.sm_count / max(ctas, 1))
    fit = int(L2_SHARE * target.l2_bytes // (row_bytes(problem) / slices + key_bytes(problem)))
    one_head = problem.forward.group == 1 and problem.forward.window_left is None
    small = one_head and config.heads.qk <= HEADS_L2_DIM
    if small and config.requests.packed_k and not config.deterministic:
        read = row_bytes(problem) * config.heads.qk / problem.forward.head_dim  # without padding
        fit = int(HEADS_L2_SHARE * target.l2_bytes // read)
    sections = -(-rows // fit) if fit > least else max(1, round(rows / least))
    near = range(math.ceil(sections / EVEN_SECTIONS), min(int(sections * EVEN_SECTIONS), rows) + 1)
    sections = min(
        (n for n in near if rows % n == 0), key=lambda n: abs(math.log(n / sections)), default=sections
    )
    return -(-rows // sections)


def ctas_of(problem: BackwardProblem, config: BackwardKernel, steps: Sequence[int], pieces: int) -> int:
    """Number of CTAs of a row; for packed requests, the number before the device cuts tiles."""
    forward = problem.forward
    if config.requests.packed_k:
        keys = 1.5 * forward.least_q  # more than there are: larger sections lost
        tiles = round(min(keys / config.tile_n + forward.batch / 2, forward.batch * len(steps)))
        return max(tiles, 1)
    return sum(piece_counts(config, steps, pieces))


def piece_counts(config: BackwardKernel, steps: Sequence[int], pieces: int) -> list[int]:
    """Pieces of each key tile if the longest, the first, has this many."""
    if not config.alike or not steps:
        return [pieces] * len(steps)
    most = max(-(-steps[0] // pieces), 1)
    return [max(-(-count // most), 1) for count in steps]


def read_together(
    problem: BackwardProblem, config: BackwardKernel, steps: Sequence[int], target: Target
) -> int:
    """Bytes that the key tiles which run together read and add to, if they are of whole rows. steps: of each tile."""
    rows = problem.forward.heads_kv * (1 if config.requests.packed_k else problem.forward.batch)
    tiles = ctas_of(problem, config, steps, 1)
    return min(-(-target.sm_count // max(tiles, 1)), rows) * row_bytes(problem)
