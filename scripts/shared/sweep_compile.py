"""Compiling what a sweep of shapes needs, ours and the peers' kernels, in processes that do not see the GPU."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch

from warpspec.aot.workers import Progress, compile_ahead
from warpspec.common.disk_cache import CACHE_VARIABLE, cache_folder
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import Target

from . import sweep_calls, sweep_gradients, sweep_regret
from .sweep_shapes import BACKWARD, Shape

CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attn-4", "QUACK_CACHE_DIR": "quack"}


def calls_of(shape: Shape):
    """The module with the shape's calls: ``sweep_calls``, or ``sweep_gradients``, whose functions are named alike."""
    return sweep_gradients if shape.kind in BACKWARD else sweep_calls


def keep_kernels(temporary: str) -> None:
    """Keep peers' kernels on disk beside ours; where our caching is off, all of them in a temporary folder. torch
    compiles one kernel at a time here, and starts no processes for that."""
    folder = cache_folder() or Path(temporary)
    os.environ[CACHE_VARIABLE] = str(folder)
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for variable, name in CACHES.items():
        os.environ.setdefault(variable, str(folder / name))


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


@contextlib.contextmanager
def blind(target: Target) -> Iterator[None]:
    """A context in which processes are started that compile for the target and see no GPU."""
    number = target.arch.removeprefix("sm_").removesuffix("a")
    variables = {
        "CUDA_VISIBLE_DEVICES": "",
        "CUTE_DSL_ARCH": target.arch,
        "FLASH_ATTENTION_ARCH": number,
        "FLASH_ATTENTION_NUM_SMS": str(target.sm_count),
        "QUACK_ARCH": number,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # peers look at addresses of fake tensors
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def quiet() -> None:
    """A worker process begins."""
    warnings.simplefilter("ignore")  # of peers'
    torch.set_num_threads(1)


def compile_peers(shapes: Sequence[Shape]) -> None:
    """Compile peers' kernels for shapes that may share one, one after another, so that each is compiled once."""
    for shape in shapes:
        try:
            calls_of(shape).compile_peer(shape)
        except Exception as error:  # timing it will say what is wrong
            print(f"compiling a peer's kernel: {shape.name}: {one_line(error)}", file=sys.stderr)


class Waits(NamedTuple):
    """What a shape waits for: what its chosen plan and its peers need, and what its other plans need."""

    needed: list[Future]
    others: list[Future]

    def done(self) -> bool:
        return all(future.done() for future in (*self.needed, *self.others))


def start_compiling(
    pool: ProcessPoolExecutor, shapes: dict[Shape, int], target: Target
) -> dict[Shape, Waits]:
    """What each shape waits for. What only other plans need is compiled last. shapes: with how many plans besides the
    chosen one are timed."""
    items = {}  # job: shapes that need it, shapes whose other plans need it
    peers = defaultdict(list)
    for shape, plans in shapes.items():
        with contextlib.suppress(UnsupportedProblem):  # timing it will say so
            for item in calls_of(shape).our_kernels(shape, target):
                items.setdefault((compile_ahead, *item, target.arch), Waits([], [])).needed.append(shape)
            for item in sweep_regret.other_kernels(shape, target, plans) if plans else ():
                items.setdefault((compile_ahead, *item, target.arch), Waits([], [])).others.append(shape)
        key = calls_of(shape).peer_kernel(shape)
        if key is not None:
            peers[key].append(shape)
    items |= {(compile_peers, tuple(users)): Waits(users, []) for users in peers.values()}
    place, waits = {shape: i for i, shape in enumerate(shapes)}, {shape: Waits([], []) for shape in shapes}

    def turn(item) -> tuple[bool, int]:
        users = items[item]
        return not users.needed, min(place[shape] for shape in users.needed or users.others)

    with blind(target):
        for item in sorted(items, key=turn):
            future = pool.submit(*item)
            for shape in items[item].needed:
                waits[shape].needed.append(future)
            for shape in items[item].others:
                waits[shape].others.append(future)
    return waits


def compile_only(shapes: dict[Shape, int], target: Target, workers: int, seconds: float) -> dict[Shape, int]:
    """Fill the caches on disk with what ``sweep`` of the same shapes would compile, first shapes first. Prints what
    failed; returns the shapes that are ready, with the number of their other plans, 0 if some of these are missing."""
    start, context = time.monotonic(), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=quiet)
    waits = start_compiling(pool, shapes, target)
    users = defaultdict(list)
    for shape, found in waits.items():
        for future in (*found.needed, *found.others):
            users[future].append(shape)
    progress = Progress(len(users))
    with contextlib.suppress(TimeoutError):
        for future in as_completed(users, max(seconds - (time.monotonic() - start), 0)):
            error = future.exception()
            progress.step(f"FAILED for {users[future][0].name}: {one_line(error)}" if error else "")

    def there(futures: Sequence[Future]) -> bool:
        return all(future.done() and not future.exception() for future in futures)

    ready = {
        shape: plans if there(waits[shape].others) else 0
        for shape, plans in shapes.items()
        if there(waits[shape].needed)
    }
    taken = f"{time.monotonic() - start:.0f} s"
    print(f"{len(ready)} of {len(shapes)} shapes are compiled after {taken}", flush=True)
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:  # compiling cannot be interrupted otherwise
        process.kill()
    return ready
