"""Running launches: programs by PTX text, independent clusters on several processes, progress, reports."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import numpy as np

from warpspec.common.cubin import KernelResources
from warpspec.sim import cfg, codegen, families, ptx
from warpspec.sim.clocks.record import Recorder, active, chosen_clusters
from warpspec.sim.clocks.trace import LaunchTrace
from warpspec.sim.codegen.program import Program
from warpspec.sim.device import device_of
from warpspec.sim.errors import HostError
from warpspec.sim.grid import Launch
from warpspec.sim.instruction import Kernel, Param, PtxModule
from warpspec.sim.limits import check_launch, cluster_of
from warpspec.sim.memory import SHARED_BASE_OFFSET, GlobalMemory
from warpspec.sim.names import Field, StorageNames
from warpspec.sim.order import of_text
from warpspec.sim.order.findings import Finding, OrderError
from warpspec.sim.order.launches import Overlap
from warpspec.sim.order.stores import active as stores_active
from warpspec.sim.processes import Run, run_shares, shares_of
from warpspec.sim.reductions import SeenReductions
from warpspec.sim.registry import import_all
from warpspec.sim.report import LaunchReport, LaunchStats, count_instructions
from warpspec.sim.starving import starved
from warpspec.sim.turns import in_turns

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
def _program(text: _Text, kernel: str, logging: bool, keeps_back: bool) -> Program:
    module = _parse(text)
    return Program(module, _kernel(module, kernel), logging, keeps_back)


def load_program(text: str, kernel: str, logging: bool = False, keeps_back: bool = False) -> Program:
    """The translated program of one kernel of a PTX module (cached). logging: for a run that checks memory order.
    keeps_back: reductions into global memory are kept back (`reductions.py`)."""
    return _program(_Text(text), kernel, logging, keeps_back)


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


@lru_cache(maxsize=64)
def _sharing(text: _Text, kernel: str) -> tuple[bool, bool]:
    """Whether clusters of a kernel cannot see each other through global memory, and whether they reduce into it."""
    visible, reductions = cfg.sharing(_kernel(_parse(text), kernel))
    return not visible, bool(reductions)


_seeing: set[tuple[_Text, str]] = set()  # kernels that use what they reduce into: (text, name)


def _division(key: tuple[_Text, str], clusters: int) -> tuple[int, bool]:
    """The shares a launch's clusters are divided into, and whether reductions into global memory wait for the end of
    all shares."""
    apart, reduces = _sharing(*key)
    at_once = stores_active() is not None or active() is not None or key in _seeing  # reductions take place
    shares = shares_of(clusters) if apart and not (reduces and at_once) else 1
    return shares, reduces and shares > 1


@in_turns
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
    overlap: Overlap | None = None,
) -> LaunchReport:
    """Run one launch of a kernel to its end. `params`: the parameter buffer, laid out as the PTX declares it. Launches
    of several threads run one after another.

    check: "order" raises OrderError if the memory model does not order accesses to one place; the error has the report
    if the launch ran to its end. storage: fields of dynamic shared memory, (name, bytes, offset), which messages name.
    overlap: what else of its stream may run beside it.
    """
    start = time.monotonic()
    key = _Text(text), kernel
    cluster = cluster_of(_kernel(_parse(key[0]), kernel), cluster)
    clusters = int(np.prod([-(-g // c) for g, c in zip(grid, cluster, strict=True)]))
    shares, keeps_back = _division(key, clusters)
    logging = check == "order" or stores_active() is not None
    program = load_program(text, kernel, logging, keeps_back)
    translated = time.monotonic()
    device = device_of(program.module.target)
    shared_bytes = program.tables.static_shared_end - SHARED_BASE_OFFSET + dynamic_smem
    sizes = {"grid": grid, "block": block, "cluster": cluster}
    check_launch(program.kernel, device, **sizes, shared_bytes=shared_bytes, resources=resources)
    registers = resources.registers if resources else None
    recorder = None
    if active() is not None:
        recorder = _recorder_of(program, text, tuple(sizes.values()), clusters, shared_bytes, registers, gmem)
        shares, clusters = 1, len(recorder.clusters)

    fields = StorageNames(storage, program.tables.dynamic_shared)
    with _constants(program, params, gmem) as (parameters, variables), _collector_paused():
        launch = Launch(
            **sizes, dynamic_smem=dynamic_smem, params=parameters, device=device, symbol_addresses=variables,
            registers=registers, names=fields, starved=starved(seed), keeps_back=keeps_back, recorder=recorder,
        )  # fmt: skip
        run = Run(program, gmem, seed, overlap or Overlap(), check)
        program, stats = _run(run, launch, shares, clusters, translated - start, key, logging)
        errors = _judge(stats, of_text(program), check)
    if recorder is not None:
        recorder.trace.tmem_columns = stats.peak_tmem_columns
        recorder.restore()
    report = _report_of(
        program, stats, resources, **sizes, kernel=kernel, dynamic_smem=dynamic_smem,
        seconds=time.monotonic() - start, findings=errors, storage=tuple(storage),
        trace=None if recorder is None else recorder.trace,
    )  # fmt: skip
    if errors:
        raise OrderError(errors, program.name, report)
    return report


@contextmanager
def _constants(program: Program, params: bytes, gmem: GlobalMemory) -> Iterator[tuple[int, np.ndarray]]:
    """Device memory with a kernel's parameters and variables, for one launch: the parameters' address, the variables'
    addresses."""
    buffer = gmem.allocate(max(len(params), 1), "kernel parameters", writable=False, data=bytes(params))
    tables = [
        gmem.allocate(
            max(v.size, 1), f"variable {v.name}", writable=v.space == "global", data=v.init or bytes(v.size)
        )
        for v in program.tables.table
    ]
    try:
        yield buffer.address, np.array([table.address for table in tables] or [0], np.uint64)
    finally:
        for allocation in (buffer, *tables):
            gmem.free(allocation.address)


def _run(
    run: Run,
    launch: Launch,
    shares: int,
    clusters: int,
    seconds: float,
    key: tuple[_Text, str],
    logging: bool,
) -> tuple[Program, LaunchStats]:
    """Run a launch's clusters in so many shares, or again in one if its kernel turns out to use what it reduces into
    global memory. Returns the program that ran to its end, too.

    seconds: that translating took. key: the kernel's text and name. logging: as for ``load_program``."""
    before = run.gmem.snapshot() if launch.keeps_back else []
    try:
        launches = [replace(launch, share=(share, shares)) for share in range(shares)]
        return run.program, run_shares(run, launches, clusters, seconds)
    except SeenReductions:
        _seeing.add(key)
        run.gmem.restore(before)
        again = replace(run, program=load_program(key[0].value, key[1], logging))
        return again.program, run_shares(again, [replace(launch, keeps_back=False)], clusters, seconds)


def _recorder_of(
    program: Program,
    text: str,
    shape: tuple,
    clusters: int,
    shared_bytes: int,
    registers: int | None,
    gmem: GlobalMemory,
) -> Recorder:
    """The recorder of a launch of this many clusters: of all, or of the sample that the active recording asks for.

    shape: of grid, block and cluster. gmem: holds the launch's tensors and nothing else.
    """
    tensors = sum(allocation.nbytes for allocation in gmem.allocations)
    trace = LaunchTrace(program, program.name, *shape, shared_bytes, registers, tensors, False)
    trace.ptx = text
    chosen = chosen_clusters(clusters, active().sample)
    trace.sampled = len(chosen) < clusters
    return Recorder(trace, chosen, gmem, whole=not trace.sampled)


def _judge(stats: LaunchStats, static: dict, check: str | None) -> list[Finding]:
    """The findings that are errors. Others become warnings: with check="order" those that hardware tolerates, without
    it those in ``static``, which the program's text shows."""
    if check == "order":
        stats.findings |= static
    errors = [finding for finding in stats.findings.values() if not finding.tolerated]
    for finding in (stats.findings | static).values():
        place = f"{finding.kind} at PTX line {finding.lines[-1]}"
        if finding.tolerated and check == "order":
            stats.warn(f"{place}, which hardware tolerates\n{finding}")
        elif not finding.tolerated and check != "order":
            stats.warn(f"{place}\n{finding}")
    return errors


def _report_of(
    program: Program, stats: LaunchStats, resources: KernelResources | None, **launch: object
) -> LaunchReport:
    """The report of a launch. launch: the fields that the program, the statistics and the resources do not know."""
    by_warp, by_opcode = count_instructions(program, stats)
    return LaunchReport(
        function=program.name,
        instructions=by_warp,
        opcodes=by_opcode,
        registers=resources.registers if resources else None,
        local_bytes=resources.local_bytes if resources else None,
        static_smem=resources.static_smem if resources else 0,
        tmem_columns=stats.peak_tmem_columns,
        tma_bytes_loaded=stats.tma_bytes_loaded,
        tma_bytes_stored=stats.tma_bytes_stored,
        tma_bytes_prefetched=stats.tma_bytes_prefetched,
        mma_flops=stats.mma_flops,
        barrier_waits=stats.barrier_waits,
        warnings=list(stats.warnings.values()),
        noted=stats.events,
        **launch,
    )


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
