"""Kernels of random templates: which of them are compiled, and the processes that compile them."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

from warpspec.common.compile import resources
from warpspec.common.launch import Target
from warpspec.fmha import launch
from warpspec.fmha.config import AttentionKernel
from warpspec.fmha.launch import ATTENTION
from warpspec.fmha.plan import Plan, candidates, plan_of
from warpspec.fmha.problem import AttentionProblem

from . import sweep_compile
from .plan_templates import Template
from .sweep_regret import problem_of

MOST_SPLIT = 8e6  # elements of o of calls whose keys are split


def plans(problem: AttentionProblem, target: Target, taken: set[AttentionKernel] | None) -> list[Plan]:
    """Plans of the problem whose kernels are ``taken``; None: all."""
    choices, found = ATTENTION.of(target.architecture).CHOICES, []
    for candidate in candidates(choices, problem, target):
        if (
            candidate.splits > 1
            and problem.batch * problem.seq_q * problem.heads_q * problem.head_dim > MOST_SPLIT
        ):
            continue
        plan = plan_of(choices, problem, target, candidate)
        if taken is None or plan.config in taken:
            found.append(plan)
    return found


def kernels_of(one: Template, target: Target, draw: random.Random, most: int) -> tuple[set, list]:
    """(Kernels' configurations of a template, the present choices among them; what is to be compiled)."""
    chosen, all_of, seconds = {}, {}, {}
    for shape in one.shapes:
        problem = problem_of(shape)
        present = launch.plan(problem, target)
        chosen[present.config] = None
        for plan in (present, *plans(problem, target, None)):
            all_of.setdefault(plan.config, []).append((problem, plan))
    others = {}
    for config in all_of:
        if config not in chosen:
            others.setdefault((config.shape, config.scheduler, config.output.splits), []).append(config)
    order, taken = list(others), list(chosen)
    draw.shuffle(order)
    for key in order:
        if len(taken) < len(chosen) + most:
            taken += others[key]
    for config in taken:
        for problem, plan in all_of[config]:
            second = launch.second_kernel(problem, plan.config, plan.splits)
            if second is not None:
                seconds[second] = None
    return set(taken), [(ATTENTION.of(target.architecture).ATTENTION, config) for config in taken] + list(
        seconds
    )


def compile_one(kernel, config, arch: str) -> str:
    """Compile and keep; "" or why the kernel is no candidate."""
    try:
        with quiet():
            compiled = kernel.compiled(config, arch, native=True)
        spilled = sum(used.local_bytes for used in resources(compiled).values())
    except Exception as error:
        return sweep_compile.one_line(error)
    return f"{spilled} bytes spilled" if spilled else ""


@contextlib.contextmanager
def quiet():
    """Compilers print to the file descriptors."""
    saved = [os.dup(number) for number in (1, 2)]
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(null, number)
        yield
    finally:
        for number, descriptor in zip((1, 2), saved, strict=True):
            os.dup2(descriptor, number)
        for descriptor in (null, *saved):
            os.close(descriptor)


class Compiled(NamedTuple):
    """A template whose kernels are compiled.

    index: the template's. one: the template. kernels: configurations that may be timed. refused: why others may not, by
    their places among the template's kernels.
    """

    index: int
    one: Template
    kernels: set
    refused: dict[int, str]


def wanted(found: list[Template], target: Target, options) -> Iterator[tuple[int, Template, set, list]]:
    """(A template's index, the template, its kernels, what is to be compiled), the same for the same options."""
    draw = random.Random(f"kernels {options.seed}")
    for index, one in enumerate(found):
        yield index, one, *kernels_of(one, target, draw, options.kernels)


def compiled_now(found: list[Template], target: Target, options) -> Iterator[Compiled]:
    """Compile the templates' kernels in processes; yields each template once its kernels are there, until the time is
    over."""
    until = time.monotonic() + options.seconds
    pool = ProcessPoolExecutor(
        options.workers, mp_context=multiprocessing.get_context("spawn"), initializer=sweep_compile.quiet
    )
    waiting = []
    try:
        with sweep_compile.blind(target):
            for index, one, kernels, items in wanted(found, target, options):
                futures = [pool.submit(compile_one, *item, target.arch) for item in items]
                peer = [pool.submit(sweep_compile.compile_peers, one.shapes[:1])] if one.peers else []
                waiting.append((index, one, kernels, items, futures, peer))
        while waiting and time.monotonic() < until:
            ready = [w for w in waiting if all(future.done() for future in (*w[4], *w[5]))]
            if not ready:
                time.sleep(0.05)
                continue
            index, one, kernels, items, futures, _ = ready[0]
            waiting.remove(ready[0])
            errors = [future.exception() for future in futures]
            whys = [
                future.result() if error is None else sweep_compile.one_line(error)
                for future, error in zip(futures, errors, strict=True)
            ]
            yield compiled_of(index, one, kernels, items, {i: why for i, why in enumerate(whys) if why})
    finally:
        print(f"{len(waiting)} templates are not compiled", flush=True)
        workers = list(pool._processes.values())
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # what they compile is not needed any more
            worker.kill()


def compiled_before(found: list[Template], target: Target, options) -> Iterator[Compiled]:
    """The templates that ``--compile-ahead`` has compiled, with the same options."""
    lines = [json.loads(line) for line in options.compiled.read_text().splitlines()]
    refused = {index: {int(place): why for place, why in whys.items()} for index, whys in lines}
    for index, one, kernels, items in wanted(found, target, options):
        if index in refused:
            yield compiled_of(index, one, kernels, items, refused[index])


def compiled_of(index: int, one: Template, kernels: set, items: list, refused: dict[int, str]) -> Compiled:
    """A template without the kernels that are refused; prints these."""
    for place, why in refused.items():
        config = items[place][1]
        kernels = kernels - {config}
        if isinstance(config, AttentionKernel):
            name = f"{config.shape} D{config.heads.qk} {config.scheduler.schedule.name}"
            print(f"refused {name}: {why}"[:260], flush=True)
    return Compiled(index, one, kernels, refused)
