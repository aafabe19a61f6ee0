"""Running a checked attention problem: plan, compile, launch; on a GPU or in the simulator, for every architecture.

``prepare`` does everything that does not depend on the tensors, and caches it; ``Prepared.run`` launches one kernel, or
two if the keys are split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from warpspec.common.allocation import Block, allocate, block
from warpspec.common.architecture import Family
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import Kernel, Target
from warpspec.common.simulator import joined, simulator
from warpspec.common.workspace import EMPTY, new_workspace, prepare_reserve, workspace
from warpspec.fmha.combine import COMBINE, MEANS_VECTORS, VECTOR, CombineConfig
from warpspec.fmha.config import AttentionKernel, Schedule
from warpspec.fmha.cuts import LineSizes, reading
from warpspec.fmha.expand import EXPAND, Expanded, expand_config, expanded, other_operands, passes, wide_rows
from warpspec.fmha.features import dtype_name
from warpspec.fmha.heads import class_of
from warpspec.fmha.join import JOIN, JoinConfig
from warpspec.fmha.line import JOIN_WORDS, PAIR_WORDS, STATES
from warpspec.fmha.operands import PLACES, STATISTICS
from warpspec.fmha.plan import Plan, launch_numbers, make_plan
from warpspec.fmha.plan.expanding import expands
from warpspec.fmha.plan.kept import keep_fastest, kept_plan, plans_to_time
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.schedule import SORTED_REQUESTS

QUEUE, LINE = Schedule.QUEUE, Schedule.LINE  # compared in every call; an Enum's attributes take 70 ns
# Packages with ``AttentionConfig``, ``ATTENTION``, its ``Kernel``, and ``CHOICES``, what plans choose among.
ATTENTION = Family("attention", sm90="warpspec.fmha.sm90", sm100="warpspec.fmha.sm100")


def plan(problem: AttentionProblem, target: Target) -> Plan:
    """Plan a problem for a target: the plan that was timed fastest, or the one with the least expected time.
    UnsupportedProblem names what the kernel does not support. ValueError: its schedule was made for other calls."""
    if problem.cut_for is not None:
        found = expected_plan(replace(problem, cut_for=None), target)
        return found._replace(config=reading(found, line_sizes(problem), problem.cut_for))
    choices = ATTENTION.of(target.architecture).CHOICES
    return kept_plan(choices, problem, target) or make_plan(choices, problem, target)


@lru_cache(maxsize=4096)
def expected_plan(problem: AttentionProblem, target: Target) -> Plan:
    """The plan with the least expected time, for calls with a schedule: the schedule, which is made before them, cannot
    know which of them have been timed."""
    return make_plan(ATTENTION.of(target.architecture).CHOICES, problem, target)


def line_sizes(problem: AttentionProblem) -> LineSizes:
    """The sizes by which a problem is cut, if its requests are rows of a batch."""
    extent = problem.seq_k // (problem.requests.page_size or 1)
    return LineSizes(problem.batch, problem.seq_q, problem.heads_q, problem.heads_kv, extent)


def expands_on(problem: AttentionProblem, target: Target) -> bool:
    """Whether a target dequantises the problem's keys and values first (``expand``)."""
    return expands(ATTENTION.of(target.architecture).CHOICES, problem, target)


def check_supported(problem: AttentionProblem, target: Target) -> None:
    """Raise UnsupportedProblem, naming the constraint, for a problem that the target's kernel does not run."""
    ATTENTION.of(target.architecture).AttentionConfig.of(problem, target)


def placed(operands: Sequence, **changes) -> list:
    """The fields of a record, or of a list of its fields, with changes; in a third of the time of ``_replace``."""
    found = list(operands)
    for name, value in changes.items():
        found[getattr(PLACES, name)] = value
    return found


class Prepared(NamedTuple):
    """A problem ready to run on a target.

    attention, combine: functions of the kernels' arguments. combine is the second launch, which combines splits or
    joins pieces, or None. numbers: those of the attention kernel. schedule: the plan's. workspace: what a launch
    allocates for states of pieces or splits, ``piece_blocks`` or ``partial_blocks``; None where it depends on the
    number of packed queries, or there is none. counters: number of words that CTAs share and leave as they found them
    (``common.workspace``).
    """

    target: Target
    plan: Plan
    schedule: Schedule
    numbers: tuple
    attention: Callable
    combine: Callable | None
    workspace: tuple[Block, ...] | None
    counters: int

    def run(self, operands: Sequence):
        """Launch on the tensors' device and its current stream; no synchronisation. Writes o and, if given, lse,
        row_max and row_sum. Returns the simulator's ``SimReport``, natively None.

        operands: of the problem that was prepared, as ``AttentionProblem`` promises them; v is given, packed q, k, v
        and o have no batch dimension. A record, or a list of its fields: to make a record of them takes 0.3 us.
        """
        device = self.target.device
        if device is not None and device == torch._C._cuda_getDevice():  # a context would take 0.5 us more
            if self.combine is None and not self.counters:
                return self.attention(*operands, *self.numbers)
            return self.launch(operands)
        with self.target.current():
            return self.launch(operands)

    def launch(self, operands: Sequence):
        """``run`` on the current device."""
        if self.combine is None:
            return self.attend(operands)
        o, sink, starts = operands[PLACES.o], operands[PLACES.sink], operands[PLACES.cu_seqlens_q]
        results = (sink, o, *operands[STATISTICS])
        if starts is not None:
            results = (sink, *[None if each is None else each[None] for each in results[1:]])
        blocks = self.workspace or partial_blocks(
            results[1].shape, self.plan.splits, **means_of(self.plan.config)
        )
        allocated, arguments = allocate(blocks, o.device), list(operands)
        if self.schedule is LINE:
            arguments[PLACES.pieces], arguments[PLACES.joins] = allocated
            first = self.attention(*arguments, *self.numbers)
            return joined(first, self.combine(*allocated, *results))
        arguments[PLACES.o], arguments[PLACES.row_max], arguments[PLACES.row_sum] = allocated
        arguments[PLACES.sink] = arguments[PLACES.lse] = None
        return joined(self.attend(arguments), self.combine(*allocated, *results, starts))

    def attend(self, operands: Sequence):
        """Launch the attention kernel, with counters if its CTAs share some, and with room for the states of pieces if
        they add these up themselves."""
        if not self.counters:
            return self.attention(*operands, *self.numbers)
        pieces = None
        if self.schedule is LINE:
            (pieces,) = allocate(self.workspace, operands[PLACES.o].device)
        if self.target.native:
            counters = workspace(self.counters, self.target.device)
            return self.attention(*placed(operands, counters=counters, pieces=pieces), *self.numbers)
        counters = new_workspace(self.counters, operands[PLACES.o].device)
        report = self.attention(*placed(operands, counters=counters, pieces=pieces), *self.numbers)
        whole = not simulator().times()  # CTAs of a sample do not take all of the numbers
        assert not whole or (counters == EMPTY).all(), "the counters were not left as they were found"
        return report


@lru_cache(maxsize=4096)
def prepare(problem: AttentionProblem, target: Target, found: Plan | None = None) -> Prepared | Expanded:
    """Plan and compile; results are cached. found: a plan to use instead of the chosen one.

    Raises UnsupportedProblem naming what the kernel does not do.
    """
    if found is None and expands_on(problem, target):
        return prepare_expanded(problem, target)
    found = found or plan(problem, target)
    if found.config.queues_partitions and problem.batch > SORTED_REQUESTS:
        name, most = target.architecture.backend, SORTED_REQUESTS
        raise UnsupportedProblem(
            f"{name} attention: plan: partitions are of at most {most} requests, got {problem.batch}"
        )
    attention = ATTENTION.of(target.architecture).ATTENTION.launcher(found.config, target)
    if found.config.scheduler.counts and target.native:
        prepare_reserve(target.device)
    second = second_kernel(problem, found.config, found.splits)
    combine = None if second is None else second[0].launcher(second[1], target)
    schedule, numbers = found.config.scheduler.schedule, launch_numbers(problem, found)
    blocks = piece_blocks(found) if schedule is LINE else None
    counters = 1 if schedule is QUEUE else PAIR_WORDS * found.ctas if found.config.scheduler.adds_up else 0
    if found.splits > 1 and not problem.requests.packed_q:
        blocks = partial_blocks(problem.o_shape, found.splits, **means_of(found.config))
    return Prepared(target, found, schedule, numbers, attention, combine, blocks, counters)


def prepare_expanded(problem: AttentionProblem, target: Target) -> Expanded:
    """``prepare`` for a problem whose keys and values are dequantised first."""
    config, each = expand_config(problem), expanded(problem)
    return Expanded(
        EXPAND.launcher(config, target),
        other_operands(config),
        problem.window_left if config.window else None,
        prepare(each, target),
        passes(problem),
        (*wide_rows(problem), each.heads_kv, problem.head_dim),
        problem.dtype,
        problem.requests.packed_k,
    )


def prepare_new(problem: AttentionProblem, target: Target) -> Prepared | Expanded | Timed:
    """``prepare`` for a call that was not seen before: its plans may have to be timed (``fmha.tuning``)."""
    found = prepare(problem, target)
    fixed = isinstance(found, Expanded) or problem.cut_for is not None
    plans = 0 if fixed else plans_to_time(problem, target)
    return Timed(problem, target, plans) if plans else found


class Timed:
    """A problem whose ``plans`` best plans are timed at its first run, which keeps the fastest for this and all later
    runs."""

    def __init__(self, problem: AttentionProblem, target: Target, plans: int):
        self.problem, self.target, self.plans, self.prepared = problem, target, plans, None

    def run(self, operands: Sequence):
        """Launch like ``Prepared.run``."""
        if self.prepared is None:
            choices = ATTENTION.of(self.target.architecture).CHOICES
            keep_fastest(choices, self.problem, self.target, self.plans, self._launching(operands))
            prepare.cache_clear()
            self.prepared = prepare(self.problem, self.target)
        return self.prepared.run(operands)

    def _launching(self, operands: Sequence) -> Callable[[Plan], Callable]:
        def launching(found: Plan) -> Callable:
            return partial(prepare.__wrapped__(self.problem, self.target, found).run, operands)

        return launching


def second_kernel(problem: AttentionProblem, config, splits: int) -> tuple[Kernel, Hashable] | None:
    """The kernel, with its configuration, that combines splits or joins pieces after an attention kernel of ``config``;
    None if there are neither."""
    if splits > 1:
        return COMBINE, combine_config(problem, splits, config.mean_groups)
    return (JOIN, join_config(problem, config)) if config.scheduler.leaves_joins else None


def combine_config(problem: AttentionProblem, splits: int, mean_groups: int = 0) -> CombineConfig:
    """The combine kernel of a problem whose keys are split this many times. mean_groups: as in ``CombineConfig``."""
    sizes = problem.heads
    return CombineConfig.of(
        sizes.v_state,
        splits,
        rows=math.prod(problem.o_shape[:-1]),
        vectors=MEANS_VECTORS if mean_groups else (VECTOR,),
        dtype=dtype_name(problem.o_dtype),
        has_sink=problem.has_sink,
        sink_dtype=problem.sink_dtype,
        has_lse=problem.return_lse,
        normalize=problem.normalize,
        packed=problem.requests.packed_q,
        o_dim=0 if sizes.v == sizes.v_state else sizes.v,
        mean_groups=mean_groups,
    )


def join_config(problem: AttentionProblem, config: AttentionKernel) -> JoinConfig:
    """The kernel that joins the pieces that a kernel of ``config`` leaves."""
    sizes = problem.heads
    return JoinConfig(
        sizes.v_state,
        config.rows,
        dtype=dtype_name(problem.o_dtype),
        normalize=problem.normalize,
        has_sink=problem.has_sink,
        sink_dtype=problem.sink_dtype,
        has_lse=problem.return_lse,
        o_dim=0 if sizes.v == sizes.v_state else sizes.v,
    )


def compiled(problem: AttentionProblem, target: Target) -> tuple:
    """A problem's kernels, compiled by ``cute.compile``, in the order of their launches. Needs no GPU."""
    if expands_on(problem, target):
        expand = EXPAND.compiled(expand_config(problem), target.arch, native=target.native)
        return (expand, *compiled(expanded(problem), target))
    found = plan(problem, target)
    first = ATTENTION.of(target.architecture).ATTENTION, found.config
    launched = first, second_kernel(problem, found.config, found.splits)
    return tuple(one[0].compiled(one[1], target.arch, native=target.native) for one in launched if one)


def piece_blocks(plan: Plan) -> tuple[Block, ...]:
    """Workspace of work that is cut by length: states of pieces, two a CTA, and join records (``device.line``); no
    records if CTAs add them up."""
    row = (plan.config.rows.count, plan.config.heads.piece_columns)
    if plan.config.scheduler.adds_up:
        return (block((STATES * plan.ctas, *row), torch.float32),)
    return block((STATES * plan.ctas, *row), torch.float32), block((plan.ctas, JOIN_WORDS), torch.int32)


@lru_cache(maxsize=4096)
def partial_blocks(
    shape: tuple[int, ...], splits: int, dtype: torch.dtype = torch.float32, groups: int = 0
) -> tuple[Block, Block, Block]:
    """Workspace of split keys: o [S, B, Sq, Hq, v_state], row_max and row_sum [S, B, Hq, Sq] fp32. shape, dtype:
    o's. groups: of columns of means that have powers of two, which stand behind row_sum."""
    batch, seq_q, heads, size = shape
    maxima, sums = (block((n * splits, batch, heads, seq_q), torch.float32) for n in (1, 1 + groups))
    return block((splits, batch, seq_q, heads, class_of(size)), dtype), maxima, sums


def means_of(config: AttentionKernel) -> dict:
    """The options of ``partial_blocks`` for what splits of a kernel leave."""
    return {"dtype": torch.float16, "groups": config.mean_groups} if config.output.means else {}
