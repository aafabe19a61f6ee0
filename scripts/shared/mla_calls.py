"""Calls of ``mla_draws`` on a GPU: their tensors, the ways in which ours may run them, the peer, and what is compiled.

A way is a plan of ours: "whole" queries, keys "split" in a number of parts, or the work of all cut by length, a
"line". ``ways`` lists those that plans choose among; the chosen one is called as an engine calls it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

from warpspec.common.launch import Kernel, Target
from warpspec.fmha import launch as attention_launch
from warpspec.fmha.cuts import kernels_with_cuts
from warpspec.fmha.plan import candidates, expectation, plan_of
from warpspec.fmha.plan.candidates import Candidate
from warpspec.fmha.plan.cost import Way
from warpspec.fmha.problem import AttentionProblem
from warpspec.latent import mla_decode, mla_schedule
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.gathered import launch as gathered_launch
from warpspec.latent.gathered.problem import GatheredProblem
from warpspec.latent.mla import float8

from . import gpu_bench, mla_peers
from .mla_draws import BF16, E4M3, MOST_PAGES, PAGE, V32, MlaCall
from .plan_calls import planned_call
from .sweep_regret import problem_of
from .sweep_shapes import MLA, AttentionShape

DEVICE = "cuda"  # tests without a GPU change it
ROW, VALUES = 576, 512
SCALE = ROW**-0.5
# 344 MB of rows, from which queries select.
V32_FORMAT, V32_SCALE, V32_PAGES = ("v3.2-fp8", VALUES**-0.5, 1 << 13)
TOPK_STEP = 64  # FlashMLA's lists have a multiple of so many slots
WAYS = ("whole", "split", "line")
NAMES = {Way.PERSISTENT: "whole", Way.SPLIT: "split", Way.LINE: "line"}
# Relative differences that rounding does not explain, from the reference's results and from the peer's.
OFF = {BF16: 4e-3, E4M3: 4e-3, V32: 6e-3}
OFF_PEER = {
    BF16: 5e-3,
    E4M3: 5e-2,
    V32: 1e-2,
}  # whose products take queries and weights in e4m3 over rows of e4m3
CHECKED_HEADS = 2  # of the longest request, which are compared with the reference


# Ways.


class OneWay(NamedTuple):
    """A way that may run a call. name: one of WAYS, with the number of splits and, of bf16 rows, the heads of a tile.
    plan: ours. expected: microseconds by the model, None where it has none."""

    name: str
    plan: object
    expected: float | None

    @property
    def kind(self) -> str:
        """One of WAYS."""
        return self.name.split()[0].rstrip("0123456789")


def ways(call: MlaCall, target: Target, wanted: Sequence[str]) -> dict[str, OneWay]:
    """The chosen way first, then the others, by their names. wanted: of WAYS, the best of each by the model; "all":
    all."""
    found = attention_ways(call, target) if call.rows == BF16 else gathered_ways(call, target)
    first, kinds = found[0], {found[0].kind}
    taken = {first.name: first}
    for way in found[1:]:
        if "all" in wanted or (way.kind in wanted and way.kind not in kinds):
            taken.setdefault(way.name, way)
        kinds.add(way.kind)
    return taken


def shape_of(call: MlaCall) -> AttentionShape:
    """The call as one of ``attention``."""
    queries = (call.queries,) * call.batch
    return AttentionShape(
        *(MLA, "", call.heads, 1, ROW, "paged", queries, call.keys, PAGE),
        causal=call.queries > 1, shared_kv=True, v_dim=VALUES,
    )  # fmt: skip


def attention_ways(call: MlaCall, target: Target) -> list[OneWay]:
    """Ways over bf16 rows; the best by the model, which is chosen, first."""
    choices = attention_launch.ATTENTION.of(target.architecture).CHOICES
    problem, found = attention_problem(call), []
    time = expectation(choices, problem, target)
    for one in candidates(choices, problem, target):
        found.append(OneWay(way_name(one), plan_of(choices, problem, target, one), time(one)))
    return sorted(found, key=lambda way: way.expected)


def way_name(one: Candidate) -> str:
    """``OneWay.name`` over bf16 rows."""
    splits = one.splits if one.way is Way.SPLIT else ""
    return f"{NAMES[one.way]}{splits} h{one.tiling.pack}"


def attention_problem(call: MlaCall) -> AttentionProblem:
    return problem_of(shape_of(call), DEVICE)


def gathered_problem(call: MlaCall) -> GatheredProblem:
    if call.rows == E4M3:
        most = -(-max(call.keys) // PAGE) * PAGE
        return float8.problem_of(
            call.batch,
            call.queries,
            call.heads,
            most,
            SCALE,
            normalize=True,
            return_lse=False,
            num_splits=None,
            has_q_scale=call.q_codes,
        )
    tokens = call.batch * call.queries
    return GatheredProblem(
        tokens, call.heads, V32_FORMAT, (list_width(call),), (has_lengths(call),), V32_SCALE
    )


def list_width(call: MlaCall) -> int:
    return -(-max(call.lists) // TOPK_STEP) * TOPK_STEP


def has_lengths(call: MlaCall) -> bool:
    """Whether queries' lists over rows of V3.2 need lengths."""
    return min(call.lists) < list_width(call)


def gathered_ways(call: MlaCall, target: Target) -> list[OneWay]:
    """Ways over rows of codes, the chosen one first."""
    problem, make = gathered_problem(call), gathered_launch.make_plan.__wrapped__

    def planned(line: bool, splits: int | None):
        with mock.patch.object(gathered_launch, "takes_line", lambda *_: line):
            return make(replace(problem, num_splits=splits), target)

    plans = [make(problem, target), planned(False, 1), equal := planned(False, None), planned(True, None)]
    counts = {max(2, round(equal.splits * part)) for part in (0.5, 0.7, 1.5, 2)}
    plans += [planned(False, splits) for splits in sorted(counts)]
    found = {}
    for plan in plans:
        name = (
            "line" if plan.config.scheduler.adds_up else f"split{plan.splits}" if plan.splits > 1 else "whole"
        )
        found.setdefault(name, OneWay(name, plan, None))
    return list(found.values())


def kernels(
    call: MlaCall, target: Target, found: Iterable[OneWay], schedule: bool = False
) -> list[tuple[Kernel, Hashable]]:
    """The kernels, each with its configuration, of ways, the chosen one first. schedule: also of the call with one."""
    wanted = {}
    for number, way in enumerate(found):
        plan = way.plan
        first = attention_launch.ATTENTION.of(target.architecture).ATTENTION
        first = first if call.rows == BF16 else plan.kernel(target)
        wanted[first, plan.config] = None
        if schedule and number == 0 and call.rows != V32:
            wanted |= dict.fromkeys(kernels_with_cuts(first, plan.config))
        if call.rows == BF16:
            second = attention_launch.second_kernel(attention_problem(call), plan.config, plan.splits)
        else:
            second = None if plan.combine is None else (plan.combine_kernel, plan.combine)
        if second is not None:
            wanted[second] = None
    return list(wanted)


# Tensors.


@functools.lru_cache(maxsize=1)
def cache_of(rows: str) -> torch.Tensor | LatentPool:
    """Rows of random numbers, from which all calls take their pages."""
    if rows == V32:
        pool, part = LatentPool.empty(V32_PAGES, PAGE, V32_FORMAT, device=DEVICE), min(V32_PAGES, 1 << 10)
        slots = torch.arange(part * PAGE, dtype=torch.int32, device=DEVICE)
        pool.write(slots, torch.randn(len(slots), ROW, device=DEVICE, dtype=torch.bfloat16))
        for first in range(part, V32_PAGES, part):
            pool.data[first : first + part] = pool.data[:part]
        return pool
    dtype = torch.bfloat16 if rows == BF16 else torch.float8_e4m3fn
    found = torch.empty(MOST_PAGES, PAGE, ROW, dtype=dtype, device=DEVICE)
    part = min(MOST_PAGES, 1 << 12)
    for first in range(0, MOST_PAGES, part):
        numbers = torch.randn(part, PAGE, ROW, device=DEVICE, dtype=torch.bfloat16)
        found[first : first + part] = numbers.to(dtype)
    return found


def input_sets(call: MlaCall) -> list[tuple]:
    """Arguments of calls, of one SimpleNamespace each, which together exceed the L2: q, ``codes`` (q in e4m3), where
    the rows are, and their cache. All sets have the same lengths, by which the peer made its schedule."""
    make = listed if call.rows == V32 else paged
    order = torch.randperm(MOST_PAGES, device=DEVICE, dtype=torch.int32)
    most = MOST_PAGES // call.pages
    return gpu_bench.rotation(lambda number: (make(call, order, number % most),), call.bytes)


def queries_of(call: MlaCall) -> torch.Tensor:
    shape = (call.batch, call.queries, call.heads, ROW)
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def paged(call: MlaCall, order: torch.Tensor, number: int) -> SimpleNamespace:
    """Requests whose pages begin at a place of ``order`` that follows from ``number``."""
    counts = torch.tensor([-(-keys // PAGE) for keys in call.keys], device=DEVICE, dtype=torch.int32)
    places = torch.arange(int(counts.max()), device=DEVICE, dtype=torch.int32)
    starts = (counts.cumsum(0) - counts)[:, None] + number * call.pages
    table = torch.where(
        places < counts[:, None], order[(starts + places).clamp(max=MOST_PAGES - 1).long()], 0
    )
    lengths = torch.tensor(call.keys, device=DEVICE, dtype=torch.int32)
    q = queries_of(call)
    codes = q.to(torch.float8_e4m3fn) if call.rows == E4M3 else None
    return SimpleNamespace(q=q, codes=codes, kv=cache_of(call.rows), table=table.int(), lengths=lengths)


def listed(call: MlaCall, order: torch.Tensor, number: int) -> SimpleNamespace:
    """Queries with random rows each; slots behind a list's end are no row's."""
    del order, number
    pool, lists = cache_of(V32), torch.tensor(call.lists, device=DEVICE, dtype=torch.int32)
    slots = torch.randint(0, pool.capacity, (len(lists), list_width(call)), dtype=torch.int32, device=DEVICE)
    slots.masked_fill_(torch.arange(slots.shape[1], device=DEVICE) >= lists[:, None], -1)
    key_set = KeySet(pool, slots, lists if has_lengths(call) else None)
    return SimpleNamespace(q=queries_of(call).flatten(0, 1), key_set=key_set)


# Functions of an input set.


def ours(call: MlaCall, **options) -> Callable:
    """Our function, as an engine calls it."""
    if call.rows == V32:
        return lambda x: gathered_attention(x.q, [x.key_set], scale=V32_SCALE, **options)
    if call.rows == E4M3:
        options["kv_scale"] = one = torch.ones(1, device=DEVICE)
        if call.q_codes:
            options["q_scale"] = one
            return lambda x: mla_decode(x.codes, x.kv, x.table, x.lengths, scale=SCALE, **options)
    return lambda x: mla_decode(x.q, x.kv, x.table, x.lengths, scale=SCALE, **options)


def scheduled(call: MlaCall, x: SimpleNamespace) -> Callable | None:
    """``ours`` with a schedule, which is made here; None for calls that are not cut by length. x: one of the sets, all
    of which have the same lengths."""
    if call.rows == V32:
        return None
    sizes = {"heads": call.heads, "queries": call.queries, "max_pages": x.table.shape[1]}
    q_dtype = x.kv.dtype if call.q_codes else None
    schedule = mla_schedule(x.lengths, **sizes, dtype=x.kv.dtype, q_dtype=q_dtype)
    return None if schedule.cuts is None else ours(call, schedule=schedule)


def in_one_way(call: MlaCall, target: Target, way: OneWay) -> Callable:
    """Our function by a way's plan."""
    if call.rows == BF16:
        planned = planned_call(attention_problem(call), target, way.plan)

        def attend(x: SimpleNamespace) -> torch.Tensor:
            options = {"page_table": x.table, "kv_lengths": x.lengths}
            return planned(SimpleNamespace(q=x.q, k=x.kv[:, :, None], v=None, options=options))

        return attend
    chosen = ours(call)

    def gather(x: SimpleNamespace) -> torch.Tensor:
        with mock.patch.object(gathered_launch, "make_plan", lambda *_: way.plan):
            return chosen(x)

    return gather


def peer(call: MlaCall, x: SimpleNamespace) -> Callable | None:
    """FlashMLA's function, which makes its schedule once; None where the package is missing or has no such kernel. x:
    one of the sets, all of which have the same lengths."""
    if call.rows == V32:
        found = mla_peers.rows_decode(call.heads, V32_FORMAT)
        return found and (lambda x: found(x.q, [x.key_set], None, None))
    codes = (x.lengths, call.queries * call.heads) if call.rows == E4M3 else None
    found = mla_peers.paged_decode(SCALE, call.queries > 1, codes)
    if found is None:
        return None
    if call.rows == E4M3:
        return lambda x: found(x.codes, x.kv[:, :, None], x.table, x.lengths)
    return lambda x: found(x.q, x.kv[:, :, None], x.table, x.lengths)


def reference_error(call: MlaCall, x: SimpleNamespace, o: torch.Tensor) -> float:
    """Relative difference of o from the reference in the longest request's last heads; of one query over lists."""
    longest = max(range(call.batch), key=call.keys.__getitem__)
    if call.rows == V32:
        longest = (longest + 1) * call.queries - 1
    one = slice(longest, longest + 1)
    few = SimpleNamespace(**vars(x))
    few.q = x.q[one, ..., -CHECKED_HEADS:, :].contiguous()
    if call.q_codes:
        few.codes = x.codes[one, ..., -CHECKED_HEADS:, :].contiguous()
    if call.rows == V32:
        key_set = x.key_set
        few.key_set = KeySet(
            key_set.pool, key_set.slots[one], None if key_set.lengths is None else key_set.lengths[one]
        )
    else:
        few.table, few.lengths = x.table[one], x.lengths[one]
    exact = ours(call, backend="reference")(few)
    return difference(o[one, ..., -CHECKED_HEADS:, :], exact)


def difference(theirs: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative; infinite where one has no number."""
    exact = exact.float()
    found = float((theirs.float() - exact).norm() / exact.norm())
    return found if math.isfinite(found) else math.inf
