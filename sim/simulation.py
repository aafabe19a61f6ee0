"""`sim.run`: runs a function compiled by `cute.compile`, executing each launch of its host code."""

from __future__ import annotations

import os
import time

from warpspec.sim.errors import HostError
from warpspec.sim.host import HostModule
from warpspec.sim.order.findings import OrderError
from warpspec.sim.report import SimReport
from warpspec.sim.runs import run_with_options, stream_of_run
from warpspec.sim.runtime import execute, parameters_of


def run(
    compiled: object,
    *args: object,
    seed: int = 0,
    seeds: int | None = None,
    check: str | None = None,
    timeline: str | os.PathLike | None = None,
    **kwargs: object,
) -> SimReport:
    """Run a compiled host function; every kernel it launches executes functionally on this CPU.

    compiled: what `cute.compile` returned for sm_100a or sm_90a, with the options --keep-ptx --keep-cubin, with
    --enable-tvm-ffi or without.
    args, kwargs: the host function's arguments in order or by name: CPU torch tensors (written in place), ints, floats,
    bools, None, a stream or None where it takes one. A pointer argument, and an address kept in an int64 or uint64
    tensor of at most 65,536 elements (grouped kernels' pointer arrays), stands for the live CPU tensor or NumPy
    array whose storage holds it: that storage is staged too.
    seed: draws the interleaving of warps and the completion times of asynchronous work; the same seed gives the
    same run bit for bit. All but multiples of 8 starve (sim/starving.py).
    seeds: runs this many schedules, of seed, seed + 1 and so on, each on the tensors as they were; the tensors then
    hold the last one's results. Raises what the first bad one raises, with a note that names the seed, and
    ScheduleDependence if a tensor argument comes out different.
    check: "order" raises OrderError if the memory model does not order two accesses to one place (up to three times
    slower); None: the value of the environment variable WARPSPEC_SIM_CHECK, or no check. timeline: where to write a
    trace for Perfetto of the (last) run.

    Returns a SimReport, of the last run; prints progress to stderr when a run is expected to take more than 5 seconds.
    Raises a SimError: HostError (arguments do not fit), UnsupportedInstruction, Deadlock, MemoryFault, TmemFault,
    BarrierFault, BadDescriptor, OrderError, ScheduleDependence; tensors then hold what the run had written until it
    stopped. ValueError for options that are out of range.
    """
    module = HostModule.of(compiled)
    return run_with_options(
        lambda seed, check: _run_once(module, args, kwargs, seed, check),
        lambda: module.names(args, kwargs),
        seed=seed,
        seeds=seeds,
        check=check,
        timeline=timeline,
    )


def _run_once(module: HostModule, args: tuple, kwargs: dict, seed: int, check: str | None) -> SimReport:
    start = time.monotonic()
    report = SimReport(seed=seed)

    stream = stream_of_run()

    errors: list[OrderError] = []

    def on_launch(launch) -> None:
        overlap = stream.next(bool(launch.attributes.get("programmatic_stream_serialization")))
        try:
            done = execute(
                module.ptx,
                launch.kernel_name,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                dynamic_smem=launch.smem_bytes,
                params=_as_declared(module.ptx, launch),
                gmem=launch.memory,
                seed=seed,
                resources=launch.resources,
                check=check,
                storage=module.host.storage.get(launch.kernel_name, ()),
                overlap=overlap,
            )
        except OrderError as error:
            if error.launch is None:
                raise
            errors.append(error)  # the launch ran to its end: those after it run, too
            done = error.launch
        report.launches.append(done)

    module.call(args, on_launch, kwargs=kwargs)
    report.seconds = time.monotonic() - start
    if errors:
        kernels = ", ".join(dict.fromkeys(error.kernel for error in errors))
        raise OrderError([finding for error in errors for finding in error.findings], kernels, report)
    return report


def _as_declared(text: str, launch) -> bytes:
    """A launch's parameters moved from the cubin's layout to the one the PTX declares.

    They differ where a parameter is aligned to more than the start of the constant bank's parameters is, as tensor
    maps on sm_90a are.
    """
    declared = parameters_of(text, launch.kernel_name)
    if [p.size for p in declared] != [size for _, size in launch.param_layout]:
        raise HostError(f"the PTX and the cubin of {launch.kernel_name} declare different parameters")
    buffer = bytearray(max((p.offset + p.size for p in declared), default=0))
    for parameter, (offset, size) in zip(declared, launch.param_layout, strict=True):
        buffer[parameter.offset : parameter.offset + size] = launch.params[offset : offset + size]
    return bytes(buffer)
