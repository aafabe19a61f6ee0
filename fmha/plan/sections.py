"""Sections: how many heads the CTAs of a causal launch work on at a time.

``choose_section`` weighs two things: CTAs should have equal work, and the K and V that they read at a time should stay
in L2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from warpspec.common.launch import Target
from warpspec.fmha.config import AttentionKernel, Schedule
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import TileGrid, key_span, place_in_round
from warpspec.fmha.tiles import ELEMENT_BYTES

TILE_OVERHEAD = 1.5  # what the start and end of a query tile cost, in KV tiles (H200, D 128)
MOST_TILES = 1 << 13  # the host computes the balance of at most this many tiles, which represent all
# Sizes of sections that are tried beside all heads in one, this many TOGETHER, until one costs no more than LEVEL.
SECTIONS = np.array([64, 56, 48, 40, 32, 28, 24, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1])
TOGETHER, LEVEL = 5, 1.02

SORTED_TILES = 3  # tiles for each CTA that balance, in a section of sorted tiles

# The cost of K and V of a section that do not fit L2 (H200, D 64 to 256, causal, 16 to 256 heads): bandwidth once CTAs
# request all of it, and before that power, which lowers the clock.
MEMORY_BYTES = 19  # bytes from memory per clock and SM: 4.3 TB/s
MMA_FLOPS = 4096  # FLOPs per clock and SM
EXPONENTIALS = 16  # exponentials per clock and SM
MISS_COST = 0.17  # fraction of the time lost when CTAs ask for as many bytes as memory gives


def choose_section(problem: AttentionProblem, config: AttentionKernel, target: Target, ctas: int) -> int:
    """Heads of a section (``TileGrid.decode``).

    The choice balances the CTAs, and lets K and V come from L2 or be read by many CTAs at a time. With packed queries
    the lengths are not known: a section has as many heads as fit the longest request's K and V into L2, and all
    sections are equal. If tiles of all requests are sorted by length, all requests' K and V must fit, unless the
    section has few tiles for each CTA. With lists of blocks, sections have as few tiles as balance.
    """
    head_tiles, heads_kv = -(-problem.group // config.rows.pack), problem.heads_kv // config.rows.kv_heads
    if config.requests.packed_q:
        heads, room = heads_kv * head_tiles, target.l2_room / key_bytes(problem, config)
        fit = int(room / problem.seq_k) * head_tiles
        if config.scheduler.sorts:
            all_fit = int(room / likely_keys(problem)) * head_tiles
            tiles = problem.batch + problem.least_q // config.rows.queries  # query tiles of a head
            fit = min(fit, max(all_fit, SORTED_TILES * ctas // tiles))
        fit = max(fit, 1)
        return max(section for section in range(1, heads + 1) if heads % section == 0 and section <= fit)
    query_tiles = -(-problem.seq_q // config.rows.queries)
    grid = TileGrid(query_tiles, head_tiles, heads_kv, problem.batch)
    heads_fit = target.l2_room / (key_bytes(problem, config) * problem.seq_k)
    if config.mask.has_blocks:
        section = max(min(int(heads_fit) * head_tiles, -(-SORTED_TILES * ctas // query_tiles)), 1)
        return -(-grid.rows // max(round(grid.rows / section), 1))  # sections are about equal
    if not config.mask.causal:
        return 1  # not read
    if config.output.splits and config.column_groups == 1 and problem.batch * problem.heads_kv > heads_fit:
        return head_tiles  # else the next round of splits reads the keys again
    bounds = {
        "causal": True,
        "left": problem.window_left,
        "right": problem.window_right,
        "key_stride": config.mask.key_stride,
    }
    start = problem.seq_k - problem.seq_q  # as if no row's length or position were given
    first = start + np.arange(0, problem.seq_q, config.rows.queries)
    last = np.minimum(first + config.rows.queries, start + problem.seq_q) - 1
    counts = key_span(first, last, problem.seq_k, config.tile_n, bounds, np.minimum, np.maximum).count
    busiest = last_of_queue if config.scheduler.schedule is Schedule.QUEUE else last_of_rounds
    return balanced_section(
        grid,
        ctas,
        counts,
        lambda section: reading_cost(problem, config, target, ctas, section / head_tiles),
        busiest,
    )


def likely_keys(problem: AttentionProblem) -> int:
    """Keys of all packed requests, as if lengths were even up to the longest; at least one for each query."""
    return max(problem.batch * problem.seq_k // 2, problem.seq_k, problem.least_q)


def key_bytes(problem: AttentionProblem, config: AttentionKernel) -> int:
    """K and V of a key and KV head."""
    return problem.head_dim * ELEMENT_BYTES * len(config.format.rings)


def reading_cost(
    problem: AttentionProblem, config: AttentionKernel, target: Target, ctas: int, heads: float
) -> float:
    """Time of a call whose CTAs work on this many KV heads at a time, as a multiple of its time with all K and V in L2.

    The CTAs of one head keep pace with each other, so they read its K and V from memory once.
    """
    read = key_bytes(problem, config)
    if heads * problem.seq_k * read <= target.l2_room:
        return 1.0
    # Clocks of a key if nothing overlaps.
    clocks = config.tile_m * (4 * problem.head_dim / MMA_FLOPS + 1 / EXPONENTIALS)
    asked = read / MEMORY_BYTES / clocks * min(heads / ctas, 1.0)  # as a fraction of the memory bandwidth
    return 1.0 + MISS_COST * asked


def last_of_rounds(work: np.ndarray, ctas: int) -> np.ndarray:
    """The work of the busiest of ``ctas`` persistent CTAs, which take tiles in rounds. work: (SECTION TILE), of tiles
    in their order, for each size of section."""
    number = np.arange(work.shape[1])
    round_, place = number // ctas, number % ctas
    cta = place_in_round(round_, place, ctas)  # its own inverse
    place = cta + ctas * np.arange(len(work))[:, None]
    of_cta = np.bincount(place.ravel(), work.ravel(), minlength=ctas * len(work))
    return of_cta.reshape(-1, ctas).max(1)


def last_of_queue(work: np.ndarray, ctas: int) -> np.ndarray:
    """The time after which the last of ``ctas`` CTAs ends that take tiles from a queue, at most: a tile begins when the
    tiles before it are done in equal shares, or earlier. work: as in ``last_of_rounds``."""
    return ((np.cumsum(work, 1) - work) / ctas + work).max(1)


def balanced_section(
    grid: TileGrid,
    ctas: int,
    tile_counts: Sequence[int],
    cost: Callable[[int], float],
    busiest: Callable[[np.ndarray, int], np.ndarray] = last_of_rounds,
) -> int:
    """The section (``TileGrid.decode``) with the least time: the work of the busiest CTA, as a multiple of the mean,
    times ``cost`` of the section; the largest among equals.

    tile_counts: KV tiles of each query tile. cost: what a section costs otherwise, 1 for nothing. busiest:
    ``last_of_rounds`` or ``last_of_queue``. Rounds and sections of unlucky sizes give one CTA long tiles every time: at
    16384 causal queries, 16 heads of D 256 and one head to a section the busiest CTA has 53 percent more than the mean,
    and the H200 takes 63 percent longer than with all 16. From a queue, a short last section ends with long tiles, of
    which some CTAs get none: B2 H32 S8192 D96 takes 2.5 percent longer in sections of 20 heads than of 8.
    """
    rows = grid.rows
    if grid.size <= ctas or grid.query_tiles == 1:  # nothing to balance, or sections do not change the order
        return max(rows, 1)
    work = np.asarray(tile_counts) + TILE_OVERHEAD
    queue = busiest is last_of_queue
    number = np.arange(min(grid.size, MOST_TILES)) + (max(grid.size - MOST_TILES, 0) if queue else 0)
    rest = work.mean() * (grid.size - len(number)) / ctas if queue else 0.0  # of tiles that come before these

    def times(sections):
        """The cost of each section: [sections, 1] in, [sections] out."""
        first = number // (sections * grid.query_tiles) * sections
        size = np.minimum(sections, rows - first)
        query_tile = grid.query_tiles - 1 - (number - first * grid.query_tiles) // size
        last = rest + busiest(work[query_tile], ctas)
        return last * [cost(int(section)) for section in sections.ravel()]

    mean = rest + work.mean() * len(number) / ctas
    best, least = rows, times(np.array([[rows]]))[0]
    tried = SECTIONS[rows > SECTIONS]
    for first in range(0, len(tried), TOGETHER):
        if least <= LEVEL * mean:
            break
        found = times(tried[first : first + TOGETHER, None])
        if found.min() < least:
            best, least = int(tried[first + found.argmin()]), found.min()
    return best
