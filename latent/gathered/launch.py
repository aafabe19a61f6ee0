"""Run a checked problem: choose how CTAs share the keys, compile, launch; on a GPU or in the simulator."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from warpspec.common.allocation import allocate
from warpspec.common.architecture import Family
from warpspec.common.launch import Kernel, Target
from warpspec.common.simulator import joined, simulator
from warpspec.common.strides import regular_strides
from warpspec.common.workspace import EMPTY, new_workspace, prepare_reserve, workspace
from warpspec.fmha.combine import COMBINE, MEANS_VECTORS, VECTOR, CombineConfig
from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.cuts import LineSizes, reading
from warpspec.fmha.launch import means_of, partial_blocks, piece_blocks
from warpspec.fmha.line import AHEAD_REQUESTS, PAIR_WORDS
from warpspec.fmha.logits import LogitNumbers, LogitOptions
from warpspec.fmha.plan.splits import choose_splits
from warpspec.fmha.sm90.shapes import WARPGROUP_ROWS
from warpspec.latent.gathered import cost
from warpspec.latent.gathered.config import (
    CLUSTER,
    PAGE_ROWS,
    GatheredConfig,
    Sm100GatheredConfig,
)
from warpspec.latent.gathered.problem import MAX_KEY_SETS, VALUE_DIM, GatheredProblem
from warpspec.latent.gathered.raw.config import RawConfig
from warpspec.latent.gathered.transposed.config import TransposedConfig, rows_of


class GatheredKernels(NamedTuple):
    """The gathered-attention kernels of one architecture: the class of their configurations and the kernel class."""

    config: type
    kernel: Kernel


GATHERED = Family(
    "gathered_attention",
    sm90=GatheredKernels(
        GatheredConfig, Kernel("gathered.sm90", "warpspec.latent.gathered.sm90:host_and_arguments")
    ),
    sm100=GatheredKernels(
        Sm100GatheredConfig, Kernel("gathered.sm100", "warpspec.latent.gathered.sm100:host_and_arguments")
    ),
)
SHARED_FORMATS = ("v3.2-fp8", "v4-fp8")  # of rows that CTAs convert together
# On sm_90a, for pages of codes: keys are rows of the products.
TRANSPOSED = Kernel("gathered.transposed", "warpspec.latent.gathered.transposed.kernel:host_and_arguments")
# On sm_90a, for pages of codes and Q in e4m3: products of codes.
RAW = Kernel("gathered.raw", "warpspec.latent.gathered.raw.kernel:host_and_arguments")
# On sm_90a, for pages of codes.
COMBINE_MEANS = Kernel("fmha.gathered.means", "warpspec.latent.gathered.means:combine_arguments")


class GatheredPlan(NamedTuple):
    """The host's decisions for a problem.

    config: configuration of the attention kernel. splits: number of splits of each query's keys. combine:
    configuration of the kernel that combines them; None without splits. ctas: the most CTAs of the launch.
    """

    config: AttentionKernel
    splits: int
    combine: CombineConfig | None
    ctas: int

    def kernel(self, target: Target) -> Kernel:
        """The attention kernel."""
        if isinstance(self.config, RawConfig):
            return RAW
        is_transposed = isinstance(self.config, TransposedConfig)
        return TRANSPOSED if is_transposed else GATHERED.of(target.architecture).kernel

    @property
    def combine_kernel(self) -> Kernel:
        """The kernel that combines splits, whose results are not in FP8."""
        return COMBINE_MEANS if self.config.output.means and not self.config.mean_groups else COMBINE


@lru_cache(maxsize=4096)
def make_plan(problem: GatheredProblem, target: Target) -> GatheredPlan:
    """Choose splits and configurations. Raises UnsupportedProblem, naming the constraint, if no kernel fits, and
    ValueError for a schedule that was made for other calls."""
    if problem.cut_for is not None:
        found = make_plan(replace(problem, cut_for=None), target)
        return found._replace(config=reading(found, line_sizes(problem), problem.cut_for))
    kind = GATHERED.of(target.architecture).config
    make, tile_m, tile_n = kind.of, kind.of().tile_m, kind.of().tile_n
    if problem.has_q_scale and target.architecture.backend == "sm90":
        tile_m = rows_of(problem.heads, problem.queries) or WARPGROUP_ROWS
        make = partial(RawConfig.of, tile_m, exact=not problem.normalize)
    elif transposes(problem, target):
        tile_m = rows_of(problem.heads, problem.queries)
        make = partial(TransposedConfig.of, tile_m, exact=not problem.normalize)
    tiles = sum(-(-k // tile_n) for k in problem.slots)
    pack = choose_pack(problem, tile_m)
    groups, query_tiles = tiles_of(problem, pack, tile_m)
    tasks = problem.tokens // problem.queries * query_tiles * groups
    splits = problem.num_splits
    if splits is None:
        splits = equal_splits(problem, target, tasks, tiles, (tile_m, tile_n))
    splits = max(1, min(splits, tiles))
    line = takes_line(problem, target, groups, tasks, tiles, splits)
    splits = 1 if line else splits
    of_kernel = problem.states if splits > 1 else problem
    cluster = choose_cluster(problem, target, line)
    if not line and splits >= tiles and tasks * splits <= target.sm_count:
        cluster = 1  # for one KV tile each, CTAs wait for each other longer than they spare (docs/notebook/latent.md)
    config = make(
        row_format=problem.format,
        sets=len(problem.slots),
        lengths=problem.lengths,
        has_sink=of_kernel.has_sink,
        has_lse=of_kernel.return_lse,
        normalize=of_kernel.normalize,
        rotate_back=problem.rotate_back,
        splits=splits > 1,
        means=splits > 1 and leaves_means(problem, target),
        float8=of_kernel.float8,
        paged=problem.paged,
        has_kv_scale=problem.has_kv_scale,
        has_q_scale=problem.has_q_scale,
        pack=pack,
        cluster=cluster,
        **line_options(problem) if line else {},
    )
    combine = None
    if splits > 1:
        combine = CombineConfig.of(
            VALUE_DIM,
            splits,
            rows=problem.tokens * problem.heads,
            vectors=MEANS_VECTORS if config.output.means else (VECTOR,),
            dtype="bfloat16" if problem.normalize else "float32",
            normalize=problem.normalize,
            has_sink=problem.has_sink,
            has_lse=problem.return_lse,
            mean_groups=config.mean_groups,
        )
    together = groups if line else cluster  # neighbouring CTAs that are in step
    ctas = target.sm_count // together * together
    return GatheredPlan(config, splits, combine, ctas)


def line_options(problem: GatheredProblem) -> dict:
    """The options of a configuration whose CTAs take chunks of the line."""
    lengths = problem.tokens // problem.queries
    return {"line": True, "ahead": problem.lengths == (True,) and lengths <= AHEAD_REQUESTS}


def line_sizes(problem: GatheredProblem) -> LineSizes:
    """The sizes by which a call over pages is cut."""
    requests = problem.tokens // problem.queries
    return LineSizes(requests, problem.queries, problem.heads, 1, problem.slots[0] // PAGE_ROWS)


def transposes(problem: GatheredProblem, target: Target) -> bool:
    """Whether keys are rows of the products: where requests have few rows, for which 64 would be too many."""
    few = rows_of(problem.heads, problem.queries) > 0
    return target.architecture.backend == "sm90" and problem.paged and few


def leaves_means(problem: GatheredProblem, target: Target) -> bool:
    """Whether splits leave means of their values (``means``). States that a caller gets are sums in fp32, and so are
    those of results in FP8."""
    return target.architecture.backend == "sm90" and problem.normalize and not problem.float8


def choose_pack(problem: GatheredProblem, rows: int) -> int:
    """Heads of a task of this many rows: the number that makes the fewest tasks, and of these the largest. It is a
    power of two, so that few kernels serve all calls."""
    packs = [rows >> i for i in range(rows.bit_length())] if problem.queries > 1 else [rows]
    return min(packs, key=lambda pack: (math.prod(tiles_of(problem, pack, rows)), -pack))


def tiles_of(problem: GatheredProblem, pack: int, rows: int) -> tuple[int, int]:
    """(head groups of ``pack`` heads, query tiles) of a request."""
    return -(-problem.heads // pack), -(-problem.queries // (rows // pack))


def choose_cluster(problem: GatheredProblem, target: Target, line: bool = False) -> int:
    """CTAs that share the work on a query's keys, each for another of its head groups. line: they take chunks of a
    line. Producers lack registers for that and several key sets."""
    groups = -(-problem.heads // WARPGROUP_ROWS)
    converts = target.architecture.backend == "sm90" and problem.format in SHARED_FORMATS
    converts = converts and not (line and len(problem.slots) > 1)
    return CLUSTER if converts and groups % CLUSTER == 0 and target.sm_count >= CLUSTER else 1


def costs_of(problem: GatheredProblem, target: Target) -> cost.Costs | None:
    """The costs of the problem's kernel; None if it was not timed."""
    if target.architecture.backend != "sm90":
        return None
    if problem.has_q_scale and not rows_of(problem.heads, problem.queries):
        return cost.RAW
    if transposes(problem, target):
        return cost.TRANSPOSED
    return (cost.COSTS if choose_cluster(problem, target) == 1 else cost.OF_CLUSTERS).get(problem.format)


def equal_splits(
    problem: GatheredProblem, target: Target, tasks: int, tiles: int, sizes: tuple[int, int]
) -> int:
    """The number of equal splits for tasks of so many KV tiles. sizes: rows and keys of a tile."""
    costs, rows = costs_of(problem, target), problem.tokens * problem.heads
    if costs is not None:
        return cost.best_splits(costs, tasks, tiles, rows, target.sm_count, not any(problem.lengths))
    return choose_splits(
        m_tiles=tasks,
        kv_tiles=tiles,
        rows=rows,
        head_dim=VALUE_DIM,
        tile_m=sizes[0],
        tile_n=sizes[1],
        shared_kv=True,
        sm_count=target.sm_count,
    )


def takes_line(
    problem: GatheredProblem, target: Target, groups: int, tasks: int, tiles: int, splits: int
) -> bool:
    """Whether CTAs share out the KV tiles of all queries, whatever their lengths. groups: of heads. tasks, tiles,
    splits: as in ``cost.equal_time``."""
    costs = costs_of(problem, target)
    if costs is None or problem.num_splits is not None or problem.float8 or groups > target.sm_count:
        return False  # a head group needs a CTA
    work = (tasks, tiles, problem.tokens * problem.heads)
    return cost.shares_out(costs, *work, splits, target.sm_count, not any(problem.lengths))


def run(problem: GatheredProblem, target: Target, tensors: dict):
    """Launch on the tensors' device and its current stream, without synchronisation.

    tensors: q [T, H, D], o (words, if in FP8), scales, sink, lse, row_max, row_sum, cos_sin, positions, kv_scale,
    q_scale and cuts (None where the problem has none) and key_sets, each as (words, slots, lengths, page_size). Returns
    the simulator's report, or None on a GPU.
    """
    plan = make_plan(problem, target)
    q, o = (regular_strides(tensors[name]) for name in "qo")
    scales, sink = tensors["scales"], tensors["sink"]
    scales = None if scales is None else scales[None]
    row_stats = [
        None if t is None else t[None] for t in (tensors["lse"], tensors["row_max"], tensors["row_sum"])
    ]
    angles = (tensors["cos_sin"], tensors["positions"], tensors.get("kv_scale"), tensors.get("q_scale"))
    sets = list(tensors["key_sets"]) + [(None, None, None, 1)] * (MAX_KEY_SETS - len(problem.slots))
    flat = [field for each in sets for field in each]
    logits = LogitNumbers.of(LogitOptions(problem.scale), scaled=problem.has_kv_scale)
    numbers = (*logits, plan.splits, plan.ctas)
    attention = plan.kernel(target).launcher(plan.config, target)
    with target.current():
        if plan.config.scheduler.adds_up:
            (pieces,) = allocate(piece_blocks(plan), q.device)
            operands = (q[None], o[None], None, sink, *row_stats, *angles, tensors.get("cuts"), pieces)
            if target.native:
                prepare_reserve(target.device)
                return attention(*operands, workspace(PAIR_WORDS * plan.ctas, target.device), *flat, *numbers)
            counters = new_workspace(PAIR_WORDS * plan.ctas, q.device)
            report = attention(*operands, counters, *flat, *numbers)
            whole = not simulator().times()  # CTAs of a sample do not do all of the work
            assert not whole or (counters == EMPTY).all(), "the counters were not left as they were found"
            return report
        if plan.combine is None:
            return attention(
                q[None], o[None], scales, sink, *row_stats, *angles, *[None] * 3, *flat, *numbers
            )
        shape = (1, *q.shape[:2], VALUE_DIM)
        partial = allocate(partial_blocks(shape, plan.splits, **means_of(plan.config)), q.device)
        results = (partial[0], None, None, None, *partial[1:])
        first = attention(q[None], *results, *angles, *[None] * 3, *flat, *numbers)
        if problem.float8:
            from warpspec.latent.gathered.float8 import COMBINE_FLOAT8

            combine = COMBINE_FLOAT8.launcher(plan.combine, target)
            second = combine(*partial, sink, o[None], scales, row_stats[0])
        elif plan.combine_kernel is COMBINE_MEANS:
            combine = COMBINE_MEANS.launcher(plan.combine, target)
            second = combine(*partial, tensors["kv_scale"], o[None], row_stats[0])
        else:
            combine = COMBINE.launcher(plan.combine, target)
            second = combine(*partial, sink, o[None], *row_stats, None)
    return joined(first, second)
