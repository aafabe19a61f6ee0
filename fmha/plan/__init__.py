"""What is decided on the host before a launch, by models of cost: configuration, splits of the keys, order of tiles.

An architecture's ``AttentionConfig.of`` picks the kernel's configuration, with its tile shape, for a problem;
``splits`` decides how many parts the keys are cut into; ``sections`` decides how many heads CTAs work on at a time.
``make_plan`` puts them together. Nothing here looks at a tensor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from warpspec.common.launch import Target
from warpspec.fmha.features import KernelFeatures, Schedule
from warpspec.fmha.logits import LogitNumbers
from warpspec.fmha.plan.sections import choose_section
from warpspec.fmha.plan.splits import COUNTED, choose_splits, visited_tiles
from warpspec.fmha.problem import AttentionProblem

# Work is cut by length from so many KV tiles on: of the longest query tile, and of a CTA.
CUT_TILES, CUT_WORK = 8, 8
# So few keys are not worth a second launch where every CTA has a query tile at most.
WHOLE_KEYS = 1024
# Query tiles of so few KV tiles cannot differ by much. Whole ones are faster where the last round is nearly full or has
# hardly any: what it leaves idle is no more than what pieces and the second launch cost, in KV tiles.
FEW_TILES, FEW_MORE, CUT_COST = 20, 0.06, 4
# The same where memory binds, in several rounds: who is done with a shorter tile takes the next, and bandwidth. In two
# rounds of fewer keys, too, where an SM's second CTA leaves either faster when it is done: the most tiles that a CTA
# does may be so many times the average.
TURNS, TURN_KEYS = 2.5, 2048
UNEVEN, UNEVEN_KEYS = 1.5, 1024
# So many rounds of parts of split keys fill both CTAs of an SM: no third stage for one that is alone.
FULL_ROUNDS = 1.5
# Packed queries that make so many query tiles a CTA, and are at least such a part of all that requests may have, are
# done in whole tiles, which CTAs take from a queue.
WHOLE_TILES, WHOLE_SHARE = 4.5, 0.125


class Plan(NamedTuple):
    """How a problem is computed on a target.

    config: the kernel's. splits: of the keys. ctas: the most that are launched where CTAs are persistent. section:
    heads that they work on at a time (``TileGrid.decode``).
    """

    config: KernelFeatures
    splits: int
    ctas: int
    section: int


def make_plan(config_class: type, problem: AttentionProblem, target: Target) -> Plan:
    """The plan for a problem. config_class: the target architecture's ``AttentionConfig``.

    Raises UnsupportedProblem naming what the kernel does not do.
    """
    config, splits = choose_config(config_class, problem, target)
    ctas = target.sm_count * config.shape.ctas_per_sm
    return Plan(config, splits, ctas, choose_section(problem, config, target, ctas))


def choose_config(
    config_class: type, problem: AttentionProblem, target: Target
) -> tuple[KernelFeatures, int]:
    """The kernel of a problem's plan, and into how many parts the keys are split. As ``make_plan``."""
    config = config_class.of(problem, target)
    if config_class.cuts_line and cut_by_length(problem, config, target):
        return config_class.of(problem, target, schedule=Schedule.LINE), 1
    splits = problem.num_splits or best_splits(config, problem, target)
    if splits > 1:
        full = (
            tile_count(config, problem) * splits >= FULL_ROUNDS * target.sm_count * config.shape.ctas_per_sm
        )
        config = config_class.of(problem, target, splits=True, shape=config.shape if full else None)
    elif config.schedule is Schedule.PERSISTENT and from_queue(problem, config, target):
        config = config_class.of(problem, target, schedule=Schedule.QUEUE)
    return config, splits


def cut_by_length(problem: AttentionProblem, config: KernelFeatures, target: Target) -> bool:
    """Whether work is to follow lengths that only the device knows (``line``): of packed queries, or of few queries
    with KV lengths, where nobody says how to split.

    Not where that gains nothing: where there is little work, where a window or few keys make tiles alike, and where
    packed queries make so many whole tiles that CTAs balance which take them from a queue.
    """
    unknown = problem.packed_q or (problem.has_kv_lengths and problem.seq_q <= config.queries)
    if problem.num_splits is not None or not unknown or problem.has_bias or config.column_parts > 1:
        return False
    ctas, kv_tiles = target.sm_count * config.shape.ctas_per_sm, most_tiles(config, problem)
    heads = problem.heads_kv * -(-problem.group // config.pack)
    if problem.packed_q and full_tiles(problem, config) >= WHOLE_TILES * ctas:  # noqa: SIM102
        if problem.least_q >= WHOLE_SHARE * problem.batch * problem.seq_q:
            return False
    tiles = problem.batch * -(-problem.seq_q // config.queries) * heads
    if config.many_queries:
        at_most = min(tiles, (problem.batch + 2 * problem.least_q // config.queries) * heads)
        if at_most <= ctas and problem.seq_k <= WHOLE_KEYS:
            return False
        least = min(tiles, (problem.batch + problem.least_q // config.queries) * heads)
        if few_idle(least / ctas, kv_tiles):
            return False
    elif in_turn(tiles / ctas, kv_tiles, config):
        return False
    return kv_tiles >= CUT_TILES and tiles * kv_tiles >= CUT_WORK * ctas


def few_idle(rounds: float, kv_tiles: int) -> bool:
    """Whole tiles of so few KV tiles, so many rounds of them, leave little idle."""
    return kv_tiles <= FEW_TILES and (math.ceil(rounds - FEW_MORE) - rounds) * kv_tiles <= CUT_COST


def in_turn(rounds: float, kv_tiles: int, config: KernelFeatures) -> bool:
    """Like ``few_idle``, for tiles of few queries, which wait for memory."""
    keys = kv_tiles * config.tile_n
    if rounds >= TURNS:
        return keys <= TURN_KEYS
    if rounds > 1 and config.shape.ctas_per_sm > 1:
        return keys <= UNEVEN_KEYS and math.ceil(rounds) <= UNEVEN * rounds
    return 1 - 2 * FEW_MORE <= rounds <= 1 and kv_tiles <= FEW_TILES


def from_queue(problem: AttentionProblem, config: KernelFeatures, target: Target) -> bool:
    """Whether CTAs take whole tiles from a queue: packed queries, of which nobody knows which are long, where a CTA has
    so many that what it takes ahead of time weighs little, and is alone on its SM."""
    if not config.many_queries or config.column_parts > 1 or config.shape.ctas_per_sm > 1:
        return False
    return full_tiles(problem, config) >= WHOLE_TILES * target.sm_count


def full_tiles(problem: AttentionProblem, config: KernelFeatures) -> int:
    """Query tiles that packed queries make at least."""
    return problem.least_q // config.queries * problem.heads_kv * -(-problem.group // config.pack)


def most_tiles(config: KernelFeatures, problem: AttentionProblem) -> int:
    """KV tiles that one M tile visits at most, from shapes alone."""
    plain = problem.key_stride == 1  # only then do positions count keys
    return visited_tiles(
        seq_k=problem.seq_k,
        queries=config.queries,
        tile_n=config.tile_n,
        left=problem.window_left if plain else None,
        right=problem.window_right if plain else None,
        causal=problem.causal and plain,
    )


def tile_count(config: KernelFeatures, problem: AttentionProblem) -> int:
    """Query tiles of a rectangle."""
    query_tiles, head_tiles = -(-problem.seq_q // config.queries), -(-problem.group // config.pack)
    return query_tiles * head_tiles * problem.heads_kv * problem.batch


def best_splits(config: KernelFeatures, problem: AttentionProblem, target: Target) -> int:
    """``choose_splits`` for a problem."""
    decodes = config.shape.ctas_per_sm > 1 and problem.seq_q <= config.queries
    return choose_splits(
        m_tiles=tile_count(config, problem),
        kv_tiles=most_tiles(config, problem),
        rows=problem.batch * problem.seq_q * problem.heads_q,
        head_dim=problem.head_dim,
        v_dim=problem.v_dim,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        shared_kv=config.shared_kv,
        sm_count=target.sm_count,
        ctas_per_sm=config.shape.ctas_per_sm,
        persistent=config.schedule is Schedule.PERSISTENT,
        loads=config.decode_loads if decodes else COUNTED,
    )


def launch_numbers(problem: AttentionProblem, plan: Plan) -> tuple:
    """The fields of ``numbers.LaunchNumbers``, one by one; an unbounded window side is not read."""
    window = (problem.window_left or 0, problem.window_right or 0)
    return (*LogitNumbers.of(problem), *window, plan.ctas, plan.section)
