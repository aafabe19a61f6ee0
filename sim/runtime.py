"""Running launches: programs by PTX text, independent clusters on several processes, progress, reports."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from warpspec.common.cubin import KernelResources
from warpspec.sim import codegen, families, ptx
from warpspec.sim.clocks.record import Recorder, active, chosen_clusters
from warpspec.sim.clocks.trace import LaunchTrace
from warpspec.sim.codegen.program import Program
from warpspec.sim.device import device_of
from warpspec.sim.errors import HostError, SimError
from warpspec.sim.grid import Launch
from warpspec.sim.instruction import Kernel, Param, PtxModule, Sym
from warpspec.sim.limits import check_launch, cluster_of
from warpspec.sim.machine import Machine
from warpspec.sim.memory import SHARED_BASE_OFFSET, GlobalMemory
from warpspec.sim.names import Field, StorageNames
from warpspec.sim.order import of_text
from warpspec.sim.order.checker import OrderChecker
from warpspec.sim.order.findings import OrderError
from warpspec.sim.order.launches import Overlap, with_itself
from warpspec.sim.order.shares import conflicts
from warpspec.sim.order.stores import StoreRecorder
from warpspec.sim.order.stores import active as stores_active
from warpspec.sim.registry import find, import_all
from warpspec.sim.report import LaunchReport, LaunchStats, count_instructions
from warpspec.sim.starving import starved

SHARES = 2  # parts an independent grid is cut into; fixed, so that a seed means the same run on every machine
SHARE_MIN_CLUSTERS = 4  # smaller grids run in one part
PROGRESS_AFTER = 5.0  # seconds of expected run time from which progress is shown

import_all(codegen)
import_all(families)


class _Text:
    """A string that hashes by a digest computed once."""

    def __init__(self, value: str):
        self.value = value
        self.digest = hashlib.sha256(value.encode()).hexdigest()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other) -> bool:
        return self.digest == other.digest


@lru_cache(maxsize=64)
def _parse(text: _Text) -> PtxModule:
    return ptx.parse(text.value)


@lru_cache(maxsize=64)
def _program(text: _Text, kernel: str, logging: bool) -> Program:
    module = _parse(text)
    return Program(module, _kernel(module, kernel), logging)


def load_program(text: str, kernel: str, logging: bool = False) -> Program:
    """The translated program of one kernel of a PTX module (cached). logging: for a run that checks memory order."""
    return _program(_Text(text), kernel, logging)


def kernels_of(text: str) -> list[str]:
    """The names of a PTX module's kernels. Raises PtxSyntaxError."""
    return list(_parse(_Text(text)).kernels)


def parameters_of(text: str, kernel: str) -> list[Param]:
    """The parameters of one kernel of a PTX module, as the text declares them. HostError if there is no such kernel."""
    return _kernel(_parse(_Text(text)), kernel).params


def _kernel(module: PtxModule, kernel: str) -> Kernel:
    if kernel not in module.kernels:
        raise HostError(f"no kernel {kernel} in the PTX; it has {', '.join(module.kernels)}")
    return module.kernels[kernel]


def independent(kernel: Kernel) -> bool:
    """Whether clusters cannot see each other through global memory: no atomics, no ordered or volatile accesses."""
    rows = ((find(ins.opcode), ins) for ins in kernel.instrs)
    return not any(row is not None and row.may_share_memory(ins) for row, ins in rows)


@lru_cache(maxsize=64)
def _independent(program: Program) -> bool:
    return independent(program.kernel)


@lru_cache(maxsize=64)
def _prints(program: Program) -> bool:
    return any(Sym("vprintf") in ins.operands for ins in program.kernel.instrs)


class Progress:
    """A line on stderr once the run is expected to take longer than PROGRESS_AFTER seconds.

    translation: seconds that the kernel's translation took, which count.
    """

    def __init__(self, name: str, total: int, translation: float = 0.0):
        self.name, self.total, self.translation = name[:40], total, translation
        self.start = self.last = time.monotonic()
        self.shown = False

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        elapsed = now - self.start
        if elapsed < 1 or now - self.last < (0.2 if sys.stderr.isatty() else 10):
            return
        expected = elapsed * self.total / max(done, 1) + self.translation
        elapsed += self.translation
        if not self.shown and expected < PROGRESS_AFTER:
            return
        self.last, self.shown = now, True
        ending = "" if sys.stderr.isatty() else "\n"
        start = "\r" if sys.stderr.isatty() else ""
        text = f"{start}sim {self.name}: {done}/{self.total} clusters, {elapsed:.0f} s of about {expected:.0f} s "
        if self.translation >= 1:
            text += f"({self.translation:.0f} s translation) "
        print(text, end=ending, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.shown and sys.stderr.isatty():
            print(file=sys.stderr)


def execute(
    text: str,
    kernel: str,
    *,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int] | None = None,
    dynamic_smem: int = 0,
    params: bytes = b"",
    gmem: GlobalMemory,
    seed: int = 0,
    resources: KernelResources | None = None,
    check: str | None = None,
    storage: Sequence[Field] = (),
    fuse: bool = True,
    overlap: Overlap | None = None,
) -> LaunchReport:
    """Run one launch of a kernel to its end. `params`: the parameter buffer, laid out as the PTX declares it.

    check: "order" raises OrderError where the memory model does not order accesses to one place; the error has the
    report if the launch ran to its end. storage: fields of
    dynamic shared memory, (name, bytes, offset), which messages name. fuse: MMAs may be summed together as they happen
    to be pending; not: last bits do not depend on the seed. overlap: what else of its stream may run beside it.
    """
    start = time.monotonic()
    program = load_program(text, kernel, check == "order" or stores_active() is not None)
    translated = time.monotonic()
    device = device_of(program.module.target)
    cluster = cluster_of(program.kernel, cluster)
    check_launch(
        program.kernel,
        device,
        grid=grid,
        block=block,
        cluster=cluster,
        shared_bytes=program.tables.static_shared_end - SHARED_BASE_OFFSET + dynamic_smem,
        resources=resources,
    )
    buffer = gmem.allocate(max(len(params), 1), "kernel parameters", writable=False, data=bytes(params))
    tables = [
        gmem.allocate(
            max(v.size, 1), f"variable {v.name}", writable=v.space == "global", data=v.init or bytes(v.size)
        )
        for v in program.tables.table
    ]
    addresses = np.array([t.address for t in tables] or [0], np.uint64)
    clusters = int(np.prod([-(-g // c) for g, c in zip(grid, cluster, strict=True)]))
    shares = SHARES if clusters >= SHARE_MIN_CLUSTERS and _independent(program) else 1

    registers = resources.registers if resources else None
    recorder = None
    if active() is not None:
        static = program.tables.static_shared_end - SHARED_BASE_OFFSET
        tensors = sum(a.nbytes for a in gmem.allocations if a is not buffer and a not in tables)
        trace = LaunchTrace(
            program, program.name, grid, block, cluster, static + dynamic_smem, registers, tensors, False
        )
        trace.ptx = text
        recorder = Recorder(trace, chosen_clusters(clusters, active().sample))
        trace.sampled = len(recorder.clusters) < clusters
        shares, clusters = 1, len(recorder.clusters)

    def launch(share: int) -> Launch:
        return Launch(
            grid,
            block,
            cluster,
            dynamic_smem,
            buffer.address,
            device,
            addresses,
            registers,
            StorageNames(storage, program.tables.dynamic_shared),
            (share, shares),
            starved(seed),
            fuse,
            recorder,
        )

    try:
        with _collector_paused():
            stats = _run_shares(
                program,
                [launch(s) for s in range(shares)],
                gmem,
                seed,
                clusters,
                translated - start,
                overlap,
                check,
            )
        static = of_text(program)
        if check == "order":
            stats.findings |= static
        errors = [finding for finding in stats.findings.values() if not finding.tolerated]
        for finding in (stats.findings | static).values():
            if finding.tolerated and check == "order":
                stats.warn(
                    f"{finding.kind} at PTX line {finding.lines[-1]}, which hardware tolerates\n{finding}"
                )
            elif not finding.tolerated and check != "order":
                stats.warn(f"{finding.kind} at PTX line {finding.lines[-1]}\n{finding}")
    finally:
        gmem.free(buffer.address)
        for table in tables:
            gmem.free(table.address)
    if recorder is not None:
        recorder.trace.tmem_columns = stats.peak_tmem_columns
    by_warp, by_opcode = count_instructions(program, stats)
    report = LaunchReport(
        kernel=kernel,
        grid=grid,
        cluster=cluster,
        block=block,
        registers=registers,
        local_bytes=resources.local_bytes if resources else None,
        static_smem=resources.static_smem if resources else 0,
        dynamic_smem=dynamic_smem,
        tmem_columns=stats.peak_tmem_columns,
        instructions=by_warp,
        opcodes=by_opcode,
        tma_bytes_loaded=stats.tma_bytes_loaded,
        tma_bytes_stored=stats.tma_bytes_stored,
        tma_bytes_prefetched=stats.tma_bytes_prefetched,
        mma_flops=stats.mma_flops,
        barrier_waits=stats.barrier_waits,
        seconds=time.monotonic() - start,
        warnings=list(stats.warnings.values()),
        events=stats.events,
        function=program.name,
        findings=errors,
        storage=tuple(storage),
        trace=None if recorder is None else recorder.trace,
    )
    if errors:
        raise OrderError(errors, program.name, report)
    return report


@contextmanager
def _collector_paused():
    """Without the garbage collector meanwhile, if it is on: a run makes many objects, and none of them in a cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _order(program: Program, gmem: GlobalMemory, overlap: Overlap, check: str | None) -> OrderChecker | None:
    """Who is told of the accesses of a run, if anyone."""
    if stores_active() is not None:
        return StoreRecorder(program, gmem, overlap, stores_active(), check == "order")
    return OrderChecker(program, gmem, overlap) if check == "order" else None


def _run_share(
    program: Program,
    launch: Launch,
    gmem: GlobalMemory,
    seed: int,
    overlap: Overlap,
    check: str | None,
    progress=None,
) -> LaunchStats:
    stats = LaunchStats()
    order = _order(program, gmem, overlap, check)
    machine = Machine(program, launch, gmem, seed * SHARES + launch.share[0], stats, order)
    machine.on_cluster_done = progress
    try:
        machine.run()
    except SimError as error:
        for text in stats.warnings.values():
            error.add_note(f"warning: {text}")
        errors = [] if order is None else [f for f in order.found.values() if not f.tolerated]
        if not errors or isinstance(error, OrderError):
            raise
        raise OrderError(errors, program.name) from error
    if order is not None:
        stats.findings = order.all_found()
        stats.seen = order.seen
        if check == "order" and (launch.share[1] > 1 or order.seen.triggered):
            stats.touched = [order.summary()]
    return stats


def _may_fork(program: Program) -> bool:
    """Whether shares may run in processes of their own. Not what a kernel prints: it belongs in our sys.stdout."""
    alone = len(os.sched_getaffinity(0)) < 2 or os.environ.get("WARPSPEC_SIM_PROCESSES") == "1"
    return not alone and not _prints(program) and stores_active() is None


def _run_shares(
    program,
    launches: list[Launch],
    gmem,
    seed: int,
    clusters: int,
    translation: float,
    overlap: Overlap | None,
    check: str | None,
) -> LaunchStats:
    """Run the shares of a launch: on forked processes where there are cores for it, else one after the other."""
    overlap = overlap or Overlap()
    progress = Progress(program.name, -(-clusters // len(launches)), translation)
    if stores_active() is not None:
        stores_active().launches += 1
    try:
        if len(launches) == 1 or not _may_fork(program):
            parts = [_run_share(program, launch, gmem, seed, overlap, check, progress) for launch in launches]
        else:
            children = [_Child(program, launch, gmem, seed, overlap, check) for launch in launches[1:]]
            try:
                parts = [_run_share(program, launches[0], gmem, seed, overlap, check, progress)]
                parts += [child.stats() for child in children]
            finally:
                for child in children:
                    child.stop()
    finally:
        progress.close()
    total = parts[0]
    for part in parts[1:]:
        for one, two in zip(total.touched, part.touched, strict=False):
            total.findings |= conflicts(one, two)
        total.merge(part)
    if check == "order":
        touched = [share for part in parts for share in part.touched]
        overlap.seen = total.seen
        if total.seen.triggered:
            overlap.over(program.name, gmem, touched)
            if overlap.dependent and overlap.first:
                total.findings |= with_itself(touched)
    return total


class _Child:
    """A share of a launch that runs in a forked process."""

    def __init__(
        self,
        program: Program,
        launch: Launch,
        gmem: GlobalMemory,
        seed: int,
        overlap: Overlap,
        check: str | None,
    ):
        self._reading, writing = os.pipe()
        self._pid: int | None = os.fork()
        if self._pid:
            os.close(writing)
            return
        try:  # whatever happens, this process does not go on as its parent would
            os.close(self._reading)
            try:
                answer: object = _run_share(program, launch, gmem, seed, overlap, check)
            except SimError as error:
                answer = error
            except BaseException:  # the parent re-raises what the child cannot handle
                answer = RuntimeError(f"in a simulator process:\n{traceback.format_exc()}")
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)

    def stats(self) -> LaunchStats:
        """Wait for the share to end; raises what it raised."""
        with os.fdopen(self._reading, "rb", closefd=False) as pipe:
            data = pipe.read()
        answer = pickle.loads(data) if data else RuntimeError("a simulator process died without an answer")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End the process, done or not (another share failed, or the user interrupts), and release it."""
        if self._pid is not None:
            os.close(self._reading)
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = None
