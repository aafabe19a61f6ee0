"""Mutants on a Hopper GPU: the same changes to the kernel's PTX, assembled by ptxas, run many times.

``plan`` compiles and lists where the DSL and the simulator are installed; ``score`` needs torch, ptxas and the GPU.
Mutants run in processes of their own, which are ended where they hang or where one has gone wrong. The parent never
touches the GPU.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch

from warpspec.common import kernel_cache, launch

START_SECONDS = 30  # of a fresh process with a new case, ptxas included
SECONDS = 8  # of a mutant's runs
RUNS = 40
AT_ONCE = 16  # processes
PTXAS = "/usr/local/cuda/bin/ptxas"
BEGINS = "begins"  # what a process says when a mutant is assembled
# Without these a role waits for ever, as every processor shows: they come last.
SURE_TO_HANG = ("mbarrier arrive",)


class Case(NamedTuple):
    """A call to mutate. compiled: the kernel, natively, without a GPU. inputs: of a seed, on the GPU. call: tensors of
    its results. family: the name of the `launch.Kernel` that it launches once."""

    family: str
    compiled: Callable[[], object]
    inputs: Callable[[int], object]
    call: Callable[[object], list[torch.Tensor]]


def plan(folder: Path, cases: dict[str, Case]) -> None:
    """Write of every case PTX, object and mutants (class, what is changed, line, the line before and after)."""
    os.environ["WARPSPEC_CACHE_DIR"] = ""  # objects of kept kernels cannot be written again
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases.items():
        compiled = case.compiled()
        code, cubin = kernel_cache._export_native(compiled), compiled.artifacts.CUBIN
        if cubin not in code:
            raise ValueError(f"{name}: the object does not hold the kernel's cubin")
        place = [code.index(cubin), len(cubin)]
        text, rows = changes(compiled.artifacts.PTX)
        (folder / f"{name}.o").write_bytes(code)
        (folder / f"{name}.ptx").write_text(text)
        (folder / f"{name}.json").write_text(json.dumps(dict(place=place, rows=rows)))
        print(f"{name}: {len(rows)} mutants", flush=True)


def changes(text: str) -> tuple[str, list[dict]]:
    """A kernel's PTX without line information, and its mutants."""
    from shared.mutants import sample, site_of
    from warpspec.sim import ptx

    (kernel,) = ptx.parse(text).kernels.values()
    lines = text.split("\n")
    rows = []
    for mutant in sample(kernel.instrs, text):
        ins = kernel.instrs[mutant.index]
        after = _changed(lines[ins.line - 1], ins, mutant)
        change = str(site_of(mutant, ins, lines))
        rows.append(dict(group=mutant.group, change=change, line=ins.line, after=after))
    kept = ["" if re.match(r"\s*\.(loc|file)\b", line) else line for line in lines]  # as many lines
    text = "\n".join(kept)
    return re.sub(r"^\s*\.section[^{]*\{[^}]*\}", lambda m: "\n" * m[0].count("\n"), text, flags=re.M), rows


def _changed(line: str, ins, mutant) -> str:
    """A line of PTX with its instruction changed."""
    from shared.mutants import NOTHING, TRUE

    start = line.index(ins.opcode)
    end = line.index(";", start) + 1
    statement = line[start:end]
    if mutant.opcode == NOTHING:
        head = line[:start]
        guard = re.search(r"@!?\S+\s*$", head)
        return (head[: guard.start()] if guard else head) + line[end:]
    if mutant.opcode == TRUE:
        predicate = statement.split(None, 1)[1].split(",")[0]
        new = f"setp.eq.u32 {predicate}, 0, 0;"
    else:
        new = statement.replace(ins.opcode, mutant.opcode, 1)
        if mutant.operands != ins.operands:
            new = re.sub(r"\d+;$", f"{mutant.operands[0].value};", new)
    return line[:start] + new + line[end:]


def assemble(text: str) -> bytes | str:
    """ptxas's cubin of a PTX text, or what it says where it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.ptx", Path(folder) / "a.cubin"
        # The toolkit may be older than the DSL; what these kernels need is in PTX 9.0.
        source.write_text(re.sub(r"^\.version .*$", ".version 9.0", text, count=1, flags=re.M))
        command = [PTXAS, "-arch=sm_90a", "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        return target.read_bytes() if done.returncode == 0 else (done.stderr or done.stdout)[:300]


class Replaced:
    """Stands for what ``launch.Kernel.compiled`` returns, also where it is remembered: calls the present mutant."""

    def __init__(self, text: str, cubin: bytes):
        self.artifacts = SimpleNamespace(PTX=text, CUBIN=cubin)
        self.function: Callable | None = None

    def __call__(self, *arguments) -> None:
        self.function(*arguments)


class Loaded:
    """A case in a process that has the GPU: its results with the kernel as it was compiled."""

    def __init__(self, folder: Path, name: str, case: Case):
        self.case, self.text = case, (folder / f"{name}.ptx").read_text()
        self.rows = json.loads((folder / f"{name}.json").read_text())
        self.code = (folder / f"{name}.o").read_bytes()
        at, size = self.rows["place"]
        self.replaced = Replaced(self.text, self.code[at : at + size])
        self.inputs = [case.inputs(seed) for seed in range(2)]
        self.use(self.code)
        self.right = [[t.clone() for t in self.call(i)] for i in range(2)]

    def use(self, code: bytes) -> None:
        """Launch this object's kernel from now on."""
        self.replaced.function = kernel_cache.NativeFunction(code, self.replaced.artifacts)

    def call(self, i: int) -> list[torch.Tensor]:
        """The results of the i-th inputs."""
        original = launch.Kernel.compiled

        def compiled(kernel, *arguments, **options):
            mine = kernel.name == self.case.family
            return self.replaced if mine else original(kernel, *arguments, **options)

        with mock.patch.object(launch.Kernel, "compiled", compiled):
            results = self.case.call(self.inputs[i])
            torch.cuda.synchronize()
        return results

    def outcome(self, number: int, runs: Callable[[], None]) -> str:
        """What becomes of a mutant; -1: of the kernel as it is, assembled here. runs: is called when it begins."""
        lines = self.text.split("\n")
        if number >= 0:
            row = self.rows["rows"][number]
            lines[row["line"] - 1] = row["after"]
        new = assemble("\n".join(lines))
        if isinstance(new, str):
            return f"not assembled: {new}"
        at, size = self.rows["place"]
        if len(new) > size:
            return f"not assembled: {len(new) - size} bytes too long"
        runs()
        self.use(self.code[:at] + new.ljust(size, b"\0") + self.code[at + size :])
        for i in range(RUNS):
            results = self.call(i % 2)
            for got, right in zip(results, self.right[i % 2], strict=True):
                if not torch.equal(got.view(torch.uint8), right.view(torch.uint8)):
                    return f"wrong in run {i}"
                got.view(torch.uint8).fill_(0xFF)  # what the next call may be given to write into
        return "right"


def _work(pipe, folder: Path, cases: dict[str, Case]) -> None:
    """A process: runs the mutants it is told until one is not right."""
    torch.set_num_threads(1)
    loaded: dict[str, Loaded] = {}
    while True:
        name, number = pipe.recv()
        try:
            if name not in loaded:
                loaded[name] = Loaded(folder, name, cases[name])
            found = loaded[name].outcome(number, lambda: pipe.send(BEGINS))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"[:200].replace("\n", " ")
        pipe.send(found)
        if found != "right" and not found.startswith("not assembled"):
            os._exit(0)  # what it left may spoil the next


class Worker:
    """A process and what it is at. Forked: the parent has no CUDA context."""

    def __init__(self, folder: Path, cases: dict[str, Case]):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, folder, cases), daemon=True)
        self.process.start()
        theirs.close()
        self.job: tuple[str, int] | None = None
        self.end = 0.0

    def give(self, job: tuple[str, int]) -> None:
        """Start on a mutant."""
        self.job, self.end = job, time.monotonic() + START_SECONDS
        self.pipe.send(job)

    def result(self) -> str | None:
        """What became of it; None: not yet."""
        if self.pipe.poll():
            try:
                said = self.pipe.recv()
            except EOFError:
                return "crashes"
            if said != BEGINS:
                return said
            self.end = time.monotonic() + SECONDS
        if time.monotonic() > self.end:
            self.process.kill()
            return "hangs"
        return None


def score(folder: Path, cases: dict[str, Case], budget: float) -> Iterator[tuple[str, str, str, str]]:
    """(case, class, mutant, outcome) of every mutant of a plan, as they come in.

    outcome: "right", "wrong in run ...", "hangs", "crashes", an error's name, "not assembled", or "not run" where the
    budget, seconds of all, is over.
    """
    rows = {name: json.loads((folder / f"{name}.json").read_text())["rows"] for name in cases}
    jobs = [(name, number) for name in cases for number in range(-1, len(rows[name]))]

    def group(job: tuple[str, int]) -> str:
        return "control" if job[1] < 0 else rows[job[0]][job[1]]["group"]

    jobs.sort(key=lambda job: (group(job) in SURE_TO_HANG, job[1] >= 0))
    end = time.monotonic() + budget
    workers = [Worker(folder, cases) for _ in range(AT_ONCE)]
    while jobs or any(worker.job for worker in workers):
        for i, worker in enumerate(workers):
            if worker.job:
                found = worker.result()
                if found is None:
                    if time.monotonic() < end:
                        continue
                    worker.process.kill()
                    found = "not run"
                name, number = worker.job
                yield name, group(worker.job), "" if number < 0 else rows[name][number]["change"], found
                worker.job = None
                if found != "right" and not found.startswith("not assembled") and jobs:
                    workers[i] = worker = Worker(folder, cases)
            if jobs and not worker.job and time.monotonic() < end:
                worker.give(jobs.pop(0))
        if time.monotonic() >= end:
            for job in jobs:
                yield job[0], group(job), "" if job[1] < 0 else rows[job[0]][job[1]]["change"], "not run"
            jobs = []
        time.sleep(0.005)
    for worker in workers:
        worker.process.kill()
