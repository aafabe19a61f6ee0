"""Plans that can run a problem: every tile shape of a kernel with every way to hand out work that fits the problem.

``candidates`` lists them; ``cost`` says how long each takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from warpspec.common.launch import Target
from warpspec.fmha.config import Schedule, shares_lines
from warpspec.fmha.plan.choices import Choices
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.plan.splits import Loads, choose_splits, visited_tiles
from warpspec.fmha.plan.work import Tiling, listed_spans
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import SORTED_TILES, sorts_tiles
from warpspec.fmha.tree import MOST_DRAFTS

# Rounds of all CTAs that the splits of a candidate fill, where whole tiles fill less than MOST_ROUNDS; for more rounds,
# up to MANY_ROUNDS, numbers of splits, which may leave less of the last one idle.
SPLIT_ROUNDS, MOST_ROUNDS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0), 2
MANY_ROUNDS, FEW_SPLITS = 8, (2, 3, 4, 5)
PARTITION_ROUNDS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)  # of partitions: short requests have fewer
QUEUE_ROUNDS = 2  # rounds of tiles above which a queue balances packed tiles that are not sorted by length
FEW_ROUNDS = 4  # rounds of tiles up to which ways without a queue may be best


class Candidate(NamedTuple):
    """One way to run a problem.

    shape: the tile shape. tiling: the properties of shape and packing that decide the time. way: how CTAs get their
    work. splits: number of splits of the keys.
    """

    shape: object
    tiling: Tiling
    way: Way
    splits: int

    @property
    def schedule(self) -> Schedule:
        return self.way.schedule


def candidates(choices: Choices, problem: AttentionProblem, target: Target) -> Iterator[Candidate]:
    """Every candidate; there is at least one, unless no tile fits a problem's blocks. choices: the target
    architecture's."""
    wanted = problem.num_splits
    for shape, tiling in choices.tilings(problem):
        ways = choices.ways(problem, shape)
        tiles, resident = tile_count(problem, tiling), target.sm_count * tiling.ctas_per_sm
        if wanted is not None:
            if wanted > 1 and Way.SPLIT not in ways:
                continue
            yield Candidate(shape, tiling, Way.SPLIT if wanted > 1 else ways[0], wanted)
            continue
        tuned = measured_splits(choices.decode_loads(problem), problem, tiling, target)
        for way in ways:
            if tuned is not None and way is not (Way.SPLIT if tuned > 1 else ways[0]):
                continue
            if way is Way.PARTITIONS and not partitions_fit(problem, tiling):
                continue
            if way in (Way.SPLIT, Way.PARTITIONS):
                rounds = SPLIT_ROUNDS if way is Way.SPLIT else PARTITION_ROUNDS
                suited = knows_lengths(problem) if way is Way.SPLIT else shares_lines(problem)
                plain = tiling.column_groups == 1 and not problem.format.kv_format
                most = MANY_ROUNDS if plain and suited else MOST_ROUNDS
                counts = (
                    split_counts(tiles, most_tiles(problem, tiling), resident, rounds, most)
                    if tuned is None
                    else (tuned,)
                )
                for splits in counts:
                    yield Candidate(shape, tiling, way, splits)
            elif way is Way.LINE and tiling.column_groups > 1:
                if pairs_fit_line(problem, shape, tiling, target):
                    yield Candidate(shape, tiling, way, 1)
            elif suits(way, ways, problem, tiling, tiles / resident):
                yield Candidate(shape, tiling, way, 1)


def pairs_fit_line(problem: AttentionProblem, shape, tiling: Tiling, target: Target) -> bool:
    """Whether paired consumers' tiles of this shape can be cut by length: either a request has one query tile, or CTAs
    take all of a request's tiles in step, so that the keys come from memory once."""
    tiles = tile_count(problem, tiling) // problem.batch
    return problem.seq_q <= tiling.queries or shape.steps_together(tiles, target.sm_count)


def suits(way: Way, ways: tuple[Way, ...], problem: AttentionProblem, tiling: Tiling, rounds: float) -> bool:
    """Whether a way of handing out work suits a problem with ``rounds`` rounds of whole tiles. One of ``ways`` always
    does.

    The rules were measured (docs/records/2026-11-24-plan-model.md). With many rounds, CTAs that take tiles from a queue
    hide their starts and balance any order. With few rounds, tiles of packed queries or of listed blocks without an
    order go to SMs as these become free, because no order is known to be balanced. If the host knows the lengths,
    handing out the longest tiles first is as good as either; listed blocks with an order come from a queue always. A
    line is worth its second launch only where whole tiles would leave CTAs idle: not if their lengths are known and
    grow with the position, so that short ones come last.
    """
    ordered = sorts_tiles(problem) or problem.mask.has_order
    unordered = problem.requests.packed_q or (problem.mask.has_blocks and not ordered)
    unknown = unordered or (problem.requests.has_kv_lengths and not problem.mask.has_order)
    if Way.QUEUE not in ways:
        return way is ways[0] or (unknown if way is Way.LINE else rounds > 1)
    if way is Way.LINE:
        grows = problem.mask.causal and problem.window_left is None
        return rounds <= (1 if grows and not unknown else FEW_ROUNDS)
    if way is Way.QUEUE:
        return rounds > (1 if ordered else QUEUE_ROUNDS if unordered else FEW_ROUNDS)
    if way is Way.SINGLE:
        return unknown and 1 < rounds <= FEW_ROUNDS
    return rounds <= 1 or not (unordered or problem.mask.has_blocks)


def knows_lengths(problem: AttentionProblem) -> bool:
    """Whether the host knows how many keys each query tile has."""
    return not (problem.requests.packed_q or problem.requests.has_kv_lengths or problem.mask.has_blocks)


def measured_splits(
    loads: Loads | None, problem: AttentionProblem, tiling: Tiling, target: Target
) -> int | None:
    """Number of splits of the keys, from a model that was fitted to decoding over codes (``splits``).

    None unless keys are in codes, queries are few, the host knows the number of keys, and an SM holds several CTAs; and
    None if whole tiles are one round and part of another, or if that model takes tiles whole although some SMs have
    more of them than others.
    """
    tiles, resident = tile_count(problem, tiling), target.sm_count * tiling.ctas_per_sm
    if (
        loads is None
        or not knows_lengths(problem)
        or (tiling.ctas_per_sm == 1 and not loads.alone)
        or tiling.column_groups > 1
        or problem.seq_q > tiling.queries
        or resident < tiles < MOST_ROUNDS * resident
    ):
        return None
    splits = choose_splits(
        m_tiles=tiles,
        kv_tiles=most_tiles(problem, tiling),
        rows=problem.batch * problem.seq_q * problem.heads_q,
        head_dim=problem.heads.v,
        tile_m=tiling.row_groups * tiling.rows,
        tile_n=tiling.tile_n,
        shared_kv=problem.format.shared_kv,
        sm_count=target.sm_count,
        ctas_per_sm=tiling.ctas_per_sm,
        persistent=True,
        loads=loads,
    )
    return None if splits == 1 and target.sm_count < tiles < resident else splits


def partitions_fit(problem: AttentionProblem, tiling: Tiling) -> bool:
    """Whether keys can be cut into partitions: requests have one query tile each, as far as the host knows, and no more
    than ``device.partitions`` can count if they have others."""
    most = 2 * problem.least_q // tiling.queries if problem.requests.packed_q else 0
    return problem.seq_q <= tiling.queries and most < SORTED_TILES


def split_counts(
    tiles: int, kv_tiles: int, resident: int, rounds=SPLIT_ROUNDS, most: int = MOST_ROUNDS
) -> list[int]:
    """Numbers of splits that are worth trying if whole tiles fill less than ``most`` rounds.

    The splits fill about so many rounds, and the longest one is shorter than with one split fewer.
    """
    if tiles >= most * resident or kv_tiles < 2:
        return []
    found = set()
    filling = [max(int(resident * one) // tiles, 2) for one in rounds]
    for wanted in filling if tiles < MOST_ROUNDS * resident else FEW_SPLITS:
        splits = min(wanted, kv_tiles)
        found.add(-(-kv_tiles // -(-kv_tiles // splits)))
    return sorted(found)


def most_tiles(problem: AttentionProblem, tiling: Tiling) -> int:
    """KV tiles that one M tile visits at most, from shapes and from what is known of lists alone."""
    if problem.mask.has_blocks:
        return math.ceil(listed_spans(problem, tiling, problem.seq_k).longest)
    plain = problem.mask.key_stride == 1  # only then do positions count keys
    return visited_tiles(
        seq_k=problem.seq_k,
        queries=MOST_DRAFTS + 1 if problem.mask.has_tree else tiling.queries,
        tile_n=tiling.tile_n,
        left=problem.window_left if plain else None,
        right=problem.right if plain else None,
        causal=problem.mask.causal and plain,
    )


def tile_count(problem: AttentionProblem, tiling: Tiling) -> int:
    """Query tiles of a launch, idle ones of packed queries among them."""
    query_tiles = problem.batch * -(-problem.seq_q // tiling.queries)
    if problem.requests.packed_q:
        query_tiles = min(query_tiles, problem.batch + problem.least_q // tiling.queries)
    return query_tiles * problem.heads_kv * -(-problem.group // tiling.pack)
