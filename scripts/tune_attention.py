"""Times tile shapes, sections and splits of the sm_90a attention kernels (fmha/sm90/shapes.py) on this machine's GPU.

    python scripts/tune_attention.py [--only PREFILL 128 ...] [--write FILE] [--list]

For each table and head dimension: every candidate shape that fits the budgets and compiles without spills, timed on
one workload; then the sections of causal tiles and the numbers of splits that scheduler and splits choose among. The
present choice is marked with "*". --only takes names of tables, head dimensions, "sections", "splits". --list compiles
and prints the candidates; that needs no GPU. Rows are compiled in processes of their own, timed one after another.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from shared import driver, gpu_bench

from warpspec.common.compile import resources
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED, target_of
from warpspec.fmha import launch, sm90
from warpspec.fmha.operands import Operands
from warpspec.fmha.problem import AttentionProblem
from warpspec.fmha.sm90 import shapes
from warpspec.fmha.sm90.shapes import Shape

JOBS = 8  # rows at a time
LEGEND = """A candidate "2 x 128 keys, 3 stages, 1 CTA, 240/24": 2 consumer warpgroups of 64 query rows each, tiles of
128 keys, 3 of them in flight, one CTA an SM, 240 registers for a consumer's thread and 24 for the producer's.
Sections: so many heads' causal tiles are done before the next heads'. Splits: parts into which the keys are cut
(`num_splits`). Over budget: more registers or shared memory than an SM has; over the registers: of a consumer's
thread, by count, so that it was not compiled."""
GRAPH_CALLS = 8
TARGET = SIMULATED["sm_90a"]  # what the present choices are made for
# Registers of a thread that are neither S, P nor O: addresses, row statistics, temporaries of the softmax.
OTHER_REGISTERS = 30
WARPGROUP = 128


@dataclass(frozen=True)
class Workload:
    """q, kv: shapes [B, S, H, D] of q and of k and v; shared: v is k. rate: from work and microseconds. options: of
    ``attention``."""

    text: str
    q: tuple[int, int, int, int]
    kv: tuple[int, int, int, int]
    unit: str
    work: float
    shared: bool = False
    window: tuple[int, int] | None = None
    causal: bool = False
    sink: bool = False
    bias: bool = False
    num_splits: int | None = None

    def tensors(self, device: str) -> tuple[tuple, dict]:
        """(q, k, v) and the options. Without storage on "meta"."""

        def random(shape):
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        operands = (random(self.q), random(self.kv), None if self.shared else random(self.kv))
        options = {"causal": self.causal, "window": self.window, "num_splits": self.num_splits}
        if self.sink:
            options["sink"] = torch.zeros(self.q[2], device=device)
        if self.bias:
            options["bias"] = random((1, 1, self.q[1], self.kv[1]))
        return operands, options

    def problem(self) -> AttentionProblem:
        operands, options = self.tensors("meta")
        return AttentionProblem.of(*operands, **options, memory=False)

    def rate(self, microseconds: float) -> float:
        return self.work / microseconds * 1e-6


def prefill(batch, heads, length, dim, window=None, causal=True, bias=False) -> Workload:
    """window: of so many keys, with a sink. bias: one for all heads."""
    pairs = length * window if window else length * length / (2 if causal else 1)
    text = f"B{batch} H{heads} S{length} D{dim} {'causal' if causal else 'not causal'}"
    text += (f", window {window}, sink" if window else "") + (", bias" if bias else "")
    shape = (batch, length, heads, dim)
    band = (window - 1, 0) if window else None
    flops = 4 * batch * heads * pairs * dim
    options = {"causal": causal, "window": band, "sink": bool(window), "bias": bias}
    return Workload(text, shape, shape, "TFLOP/s", flops, **options)


def decode(batch, keys, dim, heads=64, heads_kv=8) -> Workload:
    text = f"B{batch} L{keys} {heads}/{heads_kv} heads D{dim}, one query"
    kv = (batch, keys, heads_kv, dim)
    return Workload(text, (batch, 1, heads, dim), kv, "TB/s", 4 * batch * keys * heads_kv * dim)


def shared(batch, keys, heads=128, queries=1) -> Workload:
    text = f"B{batch} L{keys} {heads}/1 heads D512, K and V one tensor, Sq {queries}"
    flops = 4 * batch * heads * queries * keys * 512
    q = (batch, queries, heads, 512)
    return Workload(text, q, (batch, keys, 1, 512), "TFLOP/s", flops, shared=True)


def some(**fields) -> list[Shape]:
    """Every shape with these fields, each a tuple of values."""
    return [Shape(**dict(zip(fields, values, strict=True))) for values in product(*fields.values())]


def one(tile_n: tuple[int, ...] = (64, 96, 128)) -> list[Shape]:
    """One consumer, two CTAs an SM or one."""
    of_two = {"ctas_per_sm": (2,), "consumer_registers": (208,), "producer_registers": (48,)}
    of_one = {"ctas_per_sm": (1,), "consumer_registers": (240,), "producer_registers": (24,)}
    return [
        *some(consumers=(1,), tile_n=tile_n, kv_stages=(1, 2, 3, 4), **of_two),
        *some(consumers=(1,), tile_n=tile_n[::2], kv_stages=(2, 4), **of_one),
    ]


def several(consumers, tile_n, kv_stages, registers=(240, 24), **fields) -> list[Shape]:
    """Two or three consumers, one CTA an SM."""
    fixed = {"ctas_per_sm": (1,), "consumer_registers": registers[:1], "producer_registers": registers[1:]}
    return some(consumers=(consumers,), tile_n=tile_n, kv_stages=kv_stages, **fixed, **fields)


@dataclass(frozen=True)
class Row:
    """One entry of one table of shapes.py: ``getattr(shapes, table)[dim]``."""

    table: str
    dim: int
    workload: Workload
    candidates: list[Shape]

    @property
    def present(self) -> Shape:
        return getattr(shapes, self.table)[self.dim]


TWO_64 = several(2, (128, 160, 176), (2, 4))
SMALL_64 = [Shape(1, keys, 3 if keys < 96 else 2, 3, 136, 24) for keys in (64, 80, 96)]  # three CTAs an SM
THREE_64 = several(3, (64, 80, 96, 112, 128), (2, 4), (160, 32))
TWO_128 = several(2, (64, 80, 96, 112, 128, 144), (2, 3))
THREE_128 = several(3, (64, 80), (2,), (160, 32))
TWO_256 = several(2, (48, 64, 80), (2,))
HALVES = several(2, (16, 32), (2, 3), column_parts=(2,))
EXCHANGES = several(2, (64,), (2,), column_parts=(2,))

ROWS = [
    Row("PREFILL", 64, prefill(2, 32, 8192, 64), [*TWO_64, *THREE_64]),
    Row("PREFILL", 128, prefill(8, 32, 2048, 128), [*TWO_128, *THREE_128]),
    Row("LONG", 128, prefill(2, 32, 8192, 128), [*TWO_128, *THREE_128]),
    Row("LONG", 128, prefill(8, 32, 2048, 128, causal=False), [*TWO_128, *THREE_128]),
    Row("PREFILL", 256, prefill(2, 16, 8192, 256), TWO_256),
    Row("PREFILL", 256, prefill(8, 16, 2048, 256), TWO_256),
    Row("NARROW", 64, prefill(2, 32, 8192, 64, window=128), [*several(2, (64, 128), (2, 4)), *THREE_64, *SMALL_64]),
    Row("NARROW", 128, prefill(2, 32, 8192, 128, window=128), several(2, (64, 96, 128), (2, 3))),
    Row("NARROW", 256, prefill(2, 16, 8192, 256, window=128), TWO_256),
    Row("BIASED", 64, prefill(1, 32, 4096, 64, causal=False, bias=True), [*TWO_64, *THREE_64]),
    Row("BIASED", 128, prefill(1, 32, 4096, 128, causal=False, bias=True), [*TWO_128, *THREE_128]),
    *(
        Row(table, dim, decode(batch, keys, dim), one())
        for dim in (64, 128)
        for table, batch, keys in (
            ("DECODE", 32, 8192), ("DECODE", 128, 1024), ("SPLIT", 1, 65536), ("SPLIT", 4, 8192),
        )
    ),
    Row("DECODE", 256, decode(32, 4096, 256), one((32, 48, 64, 80))),
    Row("PREFILL", 512, prefill(1, 16, 4096, 512), HALVES),
    Row("SHARED", 512, shared(128, 1152), EXCHANGES),
]  # fmt: skip
SECTIONS = [
    prefill(*sizes)
    for sizes in ((2, 32, 8192, 64), (2, 32, 8192, 128), (2, 16, 8192, 256), (1, 16, 16384, 256), (8, 32, 2048, 128))
]  # fmt: skip
SPLITS = [decode(1, 65536, 128), decode(1, 65536, 64), decode(4, 8192, 128), decode(16, 8192, 64)]
SPLIT_COUNTS = (1, 2, 3, 4, 6, 8, 11, 12, 16, 22, 24, 32, 33, 48, 66)


def spill_free(row: Row, native: bool) -> Iterator[tuple[Shape, str]]:
    """Every candidate and, first of all, the present shape, each with "" or with why it is none."""
    problem = row.workload.problem()
    for shape in dict.fromkeys([row.present, *row.candidates]):
        yield shape, refusal(problem, shape, native, splits=row.table == "SPLIT")


def refusal(problem: AttentionProblem, shape: Shape, native: bool, splits: bool = False) -> str:
    """Why a shape is no candidate, "" where it is one. What certainly does not fit is not compiled."""
    try:
        config = sm90.AttentionConfig.of(problem, TARGET, shape=shape, splits=splits)
    except AssertionError:
        return "over budget"
    except UnsupportedProblem as error:
        return str(error)
    # fp32 S and O, 16-bit P, of 64 rows over a warpgroup's threads
    operands = shape.tile_n // 2 + config.o_columns // 2 + shape.tile_n // 4
    if operands + OTHER_REGISTERS > shape.consumer_registers:
        return "over the registers"
    try:
        with quiet():
            kernel = sm90.ATTENTION.compiled(config, TARGET.arch, native=native)
    except Exception as error:  # the DSL has many; a candidate that it refuses is none
        return f"does not compile: {type(error).__name__}"
    spilled = sum(used.local_bytes for used in resources(kernel).values())
    return f"{spilled} bytes spilled" if spilled else ""


@contextmanager
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


def call_with(workload: Workload, tensors, *, table=None, dim=None, shape=None, section=None) -> Callable:
    """The launches of ``attention``, with a shape in the table, or a section, instead of the present one."""
    inputs, options = tensors
    problem = replace(AttentionProblem.of(*inputs, **options, memory=False), device=inputs[0].device)
    entries = getattr(shapes, table) if table else {}
    present = entries.get(dim)
    if shape:
        entries[dim] = shape
    try:
        prepared = launch.prepare.__wrapped__(problem, target_of(problem.device))
    finally:
        if shape:
            entries[dim] = present
    if section:
        prepared = prepared._replace(numbers=(*prepared.numbers[:-1], section))
    q, k, v = inputs
    others = {name: options.get(name) for name in ("sink", "bias")}
    operands = Operands(q, k, k if v is None else v, torch.empty_like(q), **others)

    def call():
        prepared.run(operands)

    call.prepared = prepared
    return call


Measured = list[tuple[str, float | None, str]]  # (candidate, microseconds, why there are none)


def tune_row(row: Row, lock) -> Measured:
    refused, calls = [], {}
    tensors = row.workload.tensors("cuda")
    for shape, why in spill_free(row, True):
        if why:
            refused.append((describe(shape), None, why))
        else:
            name = describe(shape) + (" *" if shape == row.present else "")
            calls[name] = call_with(row.workload, tensors, table=row.table, dim=row.dim, shape=shape)
    with lock:
        times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
    return [*((name, time, "") for name, time in times.items()), *refused]


def tune_sections(workload: Workload, lock) -> Measured:
    tensors = workload.tensors("cuda")
    chosen = call_with(workload, tensors).prepared.numbers[-1]
    rows = workload.q[0] * workload.q[2]
    sections = sorted({chosen, rows, *(s for s in (1, 2, 3, 4, 6, 8, 11, 16, 22, 33, 44, 64) if s <= rows)})
    calls = {
        f"{section} heads" + (" *" if section == chosen else ""): call_with(
            workload, tensors, section=section
        )
        for section in sections
    }
    with lock:
        times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
    return [(name, time, "") for name, time in times.items()]


def tune_splits(workload: Workload, lock) -> Measured:
    tensors = workload.tensors("cuda")
    chosen = call_with(workload, tensors).prepared.plan.splits
    measured = []
    for splits in sorted({chosen, *SPLIT_COUNTS}):
        operands, options = tensors
        call = call_with(workload, (operands, {**options, "num_splits": splits}))
        with lock:
            time = gpu_bench.graph_time(call, [()], calls=GRAPH_CALLS, replays=10)
        measured.append((f"{splits} splits" + (" *" if splits == chosen else ""), time, ""))
    return measured


def describe(shape: Shape) -> str:
    text = f"{shape.consumers} x {shape.tile_n} keys, {shape.kv_stages} stages, {shape.ctas_per_sm} CTA"
    text += f", {shape.consumer_registers}/{shape.producer_registers}"
    return text + (f", {shape.column_parts} parts" if shape.column_parts > 1 else "")


@dataclass(frozen=True)
class Task:
    """title; measure: (subject, lock) -> Measured."""

    title: str
    subject: Row | Workload
    measure: Callable

    @property
    def workload(self) -> Workload:
        return self.subject.workload if isinstance(self.subject, Row) else self.subject


def tasks(only: list[str]) -> list[Task]:
    found = [Task(f"{row.table} {row.dim}", row, tune_row) for row in ROWS]
    found += [Task(f"sections {w.text}", w, tune_sections) for w in SECTIONS]
    found += [Task(f"splits {w.text}", w, tune_splits) for w in SPLITS]
    tables = {word for word in only if not word.isdigit()}
    dims = {int(word) for word in only if word.isdigit()}
    return [
        task
        for task in found
        if (not tables or task.title.split()[0] in tables) and (not dims or task.workload.q[3] in dims)
    ]


_lock = None  # in a worker: held while something is timed


def initialise(lock) -> None:
    global _lock
    _lock = lock


def work(index_and_only) -> tuple[int, Measured | str]:
    """In a worker: the result of one task, or the traceback."""
    index, only = index_and_only
    task = tasks(only)[index]
    try:
        return index, task.measure(task.subject, _lock)
    except Exception:
        return index, traceback.format_exc()


def section_of(task: Task, measured: Measured | str) -> str:
    """Markdown: what was measured, fastest first."""
    lines = [f"### {task.title}", "", f"{task.workload.text}.", ""]
    if isinstance(measured, str):
        return "\n".join([*lines, "```", measured.rstrip(), "```"])
    timed = sorted((time, name) for name, time, _ in measured if time is not None)
    rows = [[name, round(time, 1), task.workload.rate(time)] for time, name in timed]
    lines.append(gpu_bench.table(["candidate", "us", task.workload.unit], rows, markdown=True))
    refused = [(name, why) for name, time, why in measured if time is None]
    for reason in dict.fromkeys(why for _, why in refused):
        names = "; ".join(name for name, why in refused if why == reason)
        lines += ["", f"{reason[0].upper()}{reason[1:]}: {names}."]
    return "\n".join(lines)


def list_candidates(only: list[str], console: Console) -> int:
    """Compile and print; the exit status is 1 where a present shape is no candidate."""
    wrong = 0
    for task in tasks(only):
        if not isinstance(task.subject, Row):
            continue
        console.print(f"{task.title}: {task.workload.text}")
        for shape, why in spill_free(task.subject, False):
            present = shape == task.subject.present
            wrong += present and bool(why)
            console.print(f"  {describe(shape)}{' *' if present else ''}: {why or 'fits'}")
    return int(bool(wrong))


def main() -> int:
    parser = driver.parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], help="tables, head dimensions, sections, splits: these only"
    )
    parser.add_argument("--list", action="store_true", help="compile the candidates, time none")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="the tables, as a record for docs/records/"
    )
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"rows at a time (default {JOBS})")
    options = parser.parse_args()
    chosen = tasks(options.only)
    if not chosen:
        parser.error(f"--only: nothing is called {options.only}")
    console = Console(soft_wrap=True, highlight=False)
    if options.list:
        return list_candidates(options.only, console)
    driver.need_gpu("--list needs none")
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()
    results = {}
    with (
        Progress(console=Console(stderr=True)) as progress,
        context.Pool(options.jobs, initialise, (lock,)) as pool,
    ):
        bar = progress.add_task("tuning", total=len(chosen))
        arguments = [(index, options.only) for index in range(len(chosen))]
        for index, result in pool.imap_unordered(work, arguments):
            results[index] = result
            progress.update(bar, advance=1, description=chosen[index].title)
    text = "\n\n".join(section_of(task, results[index]) for index, task in enumerate(chosen))
    text = f"{gpu_bench.header()}\n\n{text}\n"
    print(text)
    if options.write:
        about = "What `scripts/tune_attention.py` measured; `*`: the present choice (fmha/sm90/shapes.py)."
        options.write.write_text(f"# Tuning of the sm_90a attention kernels\n\n{about}\n\n{LEGEND}\n\n{text}")
    return int(any(isinstance(result, str) for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
