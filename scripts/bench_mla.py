"""MLA's decode on drawn calls, in turn with FlashMLA, on this GPU.

    python scripts/bench_mla.py [--rows bf16|e4m3|v3.2] [--seed N] [--calls N]   calls drawn at random
    python scripts/bench_mla.py --rows e4m3 --q e4m3                             our queries in e4m3, as the peer's are
    python scripts/bench_mla.py --ways whole split line                          the best plan of each way, too
    python scripts/bench_mla.py --ways all                                       every plan that may be chosen
    python scripts/bench_mla.py --schedule                                       calls with a schedule of ours, too
    python scripts/bench_mla.py --shapes named                                   the calls of docs/measurements.md
    python scripts/bench_mla.py --shapes "B64 q2 k154..19416 128/1" ...          calls: requests, queries, keys, heads
    python scripts/bench_mla.py --compile-ahead H200 ...                         compiles what that needs; needs no GPU
    python scripts/bench_mla.py --list                                           the calls; needs no GPU

FlashMLA's kernels for Hopper are those of the package sgl-flash-mla, called with ``use_legacy=True``
(pip install --no-deps sgl-flash-mla==1.0.0); its schedule of a call is made once and not timed, as ours is with
--schedule. Over rows of V3.2 it takes 64 and 128 heads, and no lengths of lists. Without the package ours is timed
alone.

Drawn calls have 1 to 160 requests, 8 to 128 heads, 1 to 4 queries (causal drafts) and up to 32768 keys, equal or drawn
between bounds, in pages of 64 in random order; over rows of V3.2 every query has a list of up to 2048 of them. A ratio
is FlashMLA's time over ours: above 1 we are faster. Times are of calls in CUDA graphs, in turn, on inputs that together
exceed the L2. Every result is compared with the reference (the longest request's last heads) and with FlashMLA's, which
over rows of e4m3 multiplies queries and weights in e4m3.

Processes without a GPU compile the kernels; a call is timed as soon as its kernels are there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from shared import driver, gpu_bench, mla_calls, mla_report
from shared.kept_rows import KeptRows
from shared.mla_draws import E4M3, ROWS, MlaCall, draw_calls, said, to_json
from shared.mla_peers import FLASH_MLA, INSTALL, PACKAGE, flash_mla
from shared.sweep_compile import blind, keep_kernels, one_line, quiet

from warpspec.aot.workers import compile_ahead
from warpspec.common.command_line import positive
from warpspec.common.hardware import MODELS
from warpspec.common.kernel_cache import SOURCES
from warpspec.common.launch import Target, target_of

CALLS, SEED, SECONDS = 110, 20261127, 500.0
CHOSEN, SCHEDULED = "auto", "with a schedule"


def timed(call: MlaCall, found: dict[str, mla_calls.OneWay], target: Target, schedule: bool) -> dict:
    """A result (``mla_report``) of a call. found: its ways, the chosen one first. schedule: whether it is also timed
    with one."""
    sets, chosen = mla_calls.input_sets(call), next(iter(found))
    calls: dict[str, Callable] = {chosen: mla_calls.ours(call)}
    calls |= {name: mla_calls.in_one_way(call, target, way) for name, way in found.items() if name != chosen}
    x = sets[0][0]
    with_schedule = mla_calls.scheduled(call, x) if schedule else None
    if with_schedule is not None:
        calls[SCHEDULED] = with_schedule
    o = calls[chosen](x).clone()
    errors = {mla_report.REFERENCE: mla_calls.reference_error(call, x, o)}
    wrong = [name for name, error in errors.items() if not error < mla_calls.OFF[call.rows]]
    for name in calls:
        if name != chosen:
            errors[name] = mla_calls.difference(calls[name](x), o)
    wrong += [name for name in calls if name != chosen and not errors[name] < mla_calls.OFF[call.rows]]
    peer = mla_calls.peer(call, x)
    if peer is not None:
        errors[mla_report.PEER] = mla_calls.difference(peer(x), o)
        if not errors[mla_report.PEER] < mla_calls.OFF_PEER[call.rows]:
            wrong.append(mla_report.PEER)
        calls[FLASH_MLA] = peer
    times = gpu_bench.graph_times(calls, sets)
    return {
        "call": to_json(call),
        "name": call.name,
        "chosen": chosen,
        "times": {name: times[name] for name in found},
        "scheduled": times.get(SCHEDULED),
        "expected": {name: way.expected for name, way in found.items() if way.expected is not None},
        "peer": times.get(FLASH_MLA),
        "errors": errors,
        "wrong": wrong,
    }


def kernels_of(wanted: dict[MlaCall, dict], target: Target, options) -> dict[MlaCall, list]:
    """The kernels of each call. wanted: its ways."""
    return {
        call: mla_calls.kernels(call, target, ways.values(), options.schedule)
        for call, ways in wanted.items()
    }


def start_compiling(pool: ProcessPoolExecutor, wanted: dict[MlaCall, list], target: Target) -> dict:
    """The futures that each call waits for; what many calls need is compiled first. wanted: the kernels of each."""
    users = Counter(item for kernels in wanted.values() for item in kernels)
    with blind(target):
        futures = {item: pool.submit(compile_ahead, *item, target.arch) for item, _ in users.most_common()}
    return {call: [futures[item] for item in kernels] for call, kernels in wanted.items()}


def run(wanted: dict[MlaCall, dict], target: Target, options, on: str) -> list[dict]:
    """Time calls as their kernels become ready; prints and keeps a line for each. wanted: the ways of each."""
    start, results, kept = time.monotonic(), [], KeptRows(options.write)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.workers, mp_context=context, initializer=quiet)
    try:
        kernels = kernels_of(wanted, target, options)
        waits, left = start_compiling(pool, kernels, target), list(wanted)
        while left and time.monotonic() - start < options.seconds:
            ready = next((call for call in left if all(future.done() for future in waits[call])), None)
            if ready is None:
                time.sleep(0.05)
                continue
            left.remove(ready)
            failed = [future.exception() for future in waits[ready] if future.exception()]
            if failed:
                print(f"{ready.name}: not compiled: {one_line(failed[0])}", flush=True)
                continue
            try:
                result = timed(ready, wanted[ready], target, options.schedule)
            except RuntimeError as error:
                print(f"{ready.name}: failed: {one_line(error)}", flush=True)
                continue
            results.append(result)
            kept.add(result | {"on": on})
            print(mla_report.line(result), flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if left:
        print(f"{len(left)} calls left out after {options.seconds:.0f} s (--seconds)", flush=True)
    return results


def compile_only(wanted: dict[MlaCall, dict], target: Target, options) -> int:
    """Fill the cache on disk; returns how many kernels failed."""
    from warpspec.aot.workers import compile_all

    items = dict.fromkeys(item for items in kernels_of(wanted, target, options).values() for item in items)
    with blind(target):
        return compile_all(list(items), target.arch, options.workers)


def tree() -> str:
    """Which sources are measured: the commit, where git knows it, and the hash of all that defines kernels."""
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True)
    commit = found.stdout.strip() if found.returncode == 0 else root.name
    return f"tree {commit}, sources {SOURCES[:8]}"


def parser() -> argparse.ArgumentParser:
    parser = driver.parser(__doc__, markdown=True)
    parser.add_argument(
        "--rows", choices=ROWS, default="bf16", help="format of the rows (default %(default)s)"
    )
    parser.add_argument(
        "--q",
        choices=("bf16", "e4m3"),
        default="bf16",
        help="our queries over rows of e4m3 (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the calls (default %(default)s)")
    parser.add_argument("--calls", type=positive, default=CALLS, help="how many (default %(default)s)")
    parser.add_argument(
        "--shapes", nargs="+", metavar="CALL", help='these, or "named", instead of drawn ones'
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=(CHOSEN, *mla_calls.WAYS, "all"),
        default=[CHOSEN],
        help="ours: as the plan chooses, always; the best plan of other ways; all plans",
    )
    parser.add_argument(
        "--schedule",
        action="store_true",
        help="also time calls that are cut by length with a schedule (mla_schedule), made before",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="append results to FILE, a line of JSON each"
    )
    parser.add_argument("--list", action="store_true", help="print the calls")
    parser.add_argument(
        "--compile-ahead",
        metavar="GPU",
        choices=[gpu.name for gpu in MODELS],
        help="compile what the calls need and time nothing",
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no call after this many")
    parser.add_argument(
        "--workers", type=positive, default=max(1, (os.cpu_count() or 2) - 2), help="that compile"
    )
    return parser


def main() -> None:
    options = parser().parse_args()
    try:
        calls = (
            list(said(options.shapes, options.seed, options.rows))
            if options.shapes
            else draw_calls(options.calls, options.seed, options.rows)
        )
    except ValueError as error:
        sys.exit(f"--shapes: {error}")
    if options.q == E4M3:
        if options.rows != E4M3:
            sys.exit(f"--q: must be bf16 with --rows {options.rows}")
        calls = [replace(call, q_codes=True) for call in calls]
    if options.list:
        for call in calls:
            print(f"{call.name}  {call.bytes / 1e6:.1f} MB")
        return
    with tempfile.TemporaryDirectory() as temporary:
        keep_kernels(temporary)
        if options.compile_ahead:
            target = Target.of_model(next(gpu for gpu in MODELS if gpu.name == options.compile_ahead))
            wanted = {call: mla_calls.ways(call, target, options.ways) for call in calls}
            sys.exit(compile_only(wanted, target, options) > 0)
        driver.need_gpu("--list and --compile-ahead GPU need none")
        on = f"{driver.begin(PACKAGE)}, {tree()}"
        print(tree(), flush=True)
        if flash_mla() is None:
            print(f"FlashMLA is not there: ours is timed alone ({INSTALL})")
        target = target_of(torch.device("cuda", 0))
        wanted = {call: mla_calls.ways(call, target, options.ways) for call in calls}
        with torch.no_grad():
            results = run(wanted, target, options, on)
    rows = options.rows + (", q in e4m3" if options.q == E4M3 else "")
    about = f"{rows}, {'named calls' if options.shapes else f'seed {options.seed}'}"
    print(f"\n{about}\n{mla_report.summary(results, options.markdown)}\n{on}", flush=True)
    if any(result["wrong"] for result in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
