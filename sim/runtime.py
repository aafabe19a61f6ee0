"""Running launches: programs by PTX text, independent clusters on several processes, progress, reports."""

from __future__ import annotations

import gc
import hashlib
import time
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
from warpspec.sim.errors import HostError
from warpspec.sim.grid import Launch
from warpspec.sim.instruction import Kernel, Param, PtxModule
from warpspec.sim.limits import check_launch, cluster_of
from warpspec.sim.memory import SHARED_BASE_OFFSET, GlobalMemory
from warpspec.sim.names import Field, StorageNames
from warpspec.sim.order import of_text
from warpspec.sim.order.findings import OrderError
from warpspec.sim.order.launches import Overlap
from warpspec.sim.order.stores import active as stores_active
from warpspec.sim.processes import Run, run_shares, shares_of
from warpspec.sim.registry import find, import_all
from warpspec.sim.report import LaunchReport, count_instructions
from warpspec.sim.starving import starved

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

    check: "order" raises OrderError if the memory model does not order accesses to one place; the error has the report
    if the launch ran to its end. storage: fields of dynamic shared memory, (name, bytes, offset), which messages name.
    fuse: MMAs may be summed together as they happen to be pending; not: last bits do not depend on the seed. overlap:
    what else of its stream may run beside it.
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
    shares = shares_of(clusters) if _independent(program) else 1

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
            run = Run(program, gmem, seed, overlap or Overlap(), check)
            stats = run_shares(run, [launch(s) for s in range(shares)], clusters, translated - start)
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
        noted=stats.events,
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
