"""Timing on a GPU, for ``bench`` and for scripts/bench_*.py: the machine's description, and the time of a call.

Times are medians. ``gpu_times`` measures like do_bench, with two CUDA events around each call. The host is kept ahead
of the GPU, so the events enclose the GPU's work and its launch, not Python. Two events with nothing between them
already read a few microseconds, the same for every candidate. ``graph_time`` has no events inside: it captures many
calls in one CUDA graph, replays the graph, and divides the time. Inputs rotate through more memory than the L2 holds,
unless one set of inputs already exceeds the L2.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence

import torch

from warpspec.common.hardware import Speeds

L2_MULTIPLES = 4  # rotated inputs and outputs together hold this many times the L2
MOST_SETS = 256  # most sets of rotated inputs: tiny shapes need no more
CALLS_AHEAD = 200  # calls queued while the GPU sleeps; the launch queue holds about a thousand entries
SLEEP_CLOCKS_PER_CALL = 100_000  # about 50 us of the GPU's clock: longer than any candidate's host cost
LEAST_SLEEP_CLOCKS = 4_000_000  # about 2 ms: longer than the host needs for one training step's calls
MOST_SLEEP_CLOCKS = 20_000_000  # about 10 ms
GRAPH_CALLS = 32  # calls in one captured graph
GRAPH_US, MOST_GRAPH_CALLS, MOST_GRAPH_US = 1000.0, 128, 20_000.0  # sizes of one graph of ``graph_times``
WELL_BEHIND = 2.0  # a candidate this many times as slow as the fastest is well behind
SHORT_ROUNDS = {"rounds": 20, "round_ms": 4.0}  # options of gpu_times
COPY_BYTES = 4 << 30  # size of the copy that measures bandwidth: read once and written once
MATMUL_SIZE = 8192  # rows, columns and reduction of the matrix product that measures FLOP/s

PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels")


def header(packages: Sequence[str] = PACKAGES) -> str:
    """One line: date, GPU, SMs, L2, driver, versions of ``packages`` (those installed)."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = "unknown"
    if shutil.which(query[0]):
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]
    versions = [f"CUDA {torch.version.cuda}"]
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(
        (
            datetime.date.today().isoformat(),
            properties.name,
            f"{properties.multi_processor_count} SMs",
            f"L2 {properties.L2_cache_size >> 20} MiB",
            f"driver {driver}",
            *versions,
        )
    )


def rotation(make: Callable[[int], tuple], set_bytes: int) -> list[tuple]:
    """Sets of arguments, make(0), make(1), ..., enough that together they exceed the L2 several times.

    set_bytes: what a call on one set reads and writes. One set where that alone is enough.
    """
    wanted = L2_MULTIPLES * torch.cuda.get_device_properties(0).L2_cache_size
    return [make(i) for i in range(max(1, min(MOST_SETS, -(-wanted // set_bytes))))]


def gpu_times(
    candidates: dict[str, Callable], inputs: Sequence[tuple], *, rounds: int = 3, round_ms: float = 40.0
) -> dict[str, float]:
    """Median microseconds of one call of each candidate, called as candidate(*inputs[i]) with i going round.

    Candidates take turns, ``rounds`` times and every other time in reverse order, so that a drift of the clocks meets
    all of them; the median of an odd number is one in the first order. A GPU at its power limit runs faster for a while
    after a candidate that draws less, by 5 percent and more: for matrix products take many short rounds
    (``SHORT_ROUNDS``). The first calls, which may compile, are made here and not timed.
    """
    counts, times = {}, {name: [] for name in candidates}
    for name, call in candidates.items():
        for i in range(3):
            call(*inputs[i % len(inputs)])
        rough = statistics.median(_event_times(call, inputs, 5))
        counts[name] = max(1, min(CALLS_AHEAD, round(round_ms * 1e3 / rough)))
    order = list(candidates.items())
    for _ in range(rounds):
        for name, call in order:
            times[name] += _event_times(call, inputs, counts[name])
        order.reverse()
    return {name: statistics.median(of) for name, of in times.items()}


def _event_times(call: Callable, inputs: Sequence[tuple], count: int) -> list[float]:
    """Microseconds between events around each of ``count`` calls, all queued while the GPU sleeps."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    torch.cuda.synchronize()
    torch.cuda._sleep(min(max(SLEEP_CLOCKS_PER_CALL * count, LEAST_SLEEP_CLOCKS), MOST_SLEEP_CLOCKS))
    for i, (start, end) in enumerate(events):
        start.record()
        call(*inputs[i % len(inputs)])
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def graph_time(
    call: Callable, inputs: Sequence[tuple], *, calls: int = GRAPH_CALLS, replays: int = 20
) -> float:
    """Median microseconds a call takes inside a CUDA graph of ``calls`` calls, gaps between kernels included.

    Raises what capturing raises for a call that cannot be captured.
    """
    graph = captured(call, inputs, calls)
    return statistics.median(_event_times(graph.replay, [()], replays)) / calls


def captured(call: Callable, inputs: Sequence[tuple], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of this many calls, call(*inputs[i]) with i going round, that has run once.

    Raises what capturing raises for a call that cannot be captured.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            call(*inputs[i % len(inputs)])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(*inputs[i % len(inputs)])
    graph.replay()
    torch.cuda.synchronize()
    return graph


def graph_times(
    candidates: dict[str, Callable], inputs: Sequence[tuple], *, rounds: int = 10, round_ms: float = 4.0
) -> dict[str, float]:
    """Median microseconds of a call of each candidate inside a CUDA graph of calls on all the inputs, in turn.

    Candidates well behind the fastest are timed by themselves, in fewer rounds. Raises what capturing raises.
    """
    graphs, rough = {}, {}
    for name, call in candidates.items():
        rough[name] = graph_time(call, inputs, calls=4, replays=3)
    for name, call in candidates.items():
        calls = max(len(inputs), min(MOST_GRAPH_CALLS, -(-GRAPH_US // rough[name])))
        calls = int(max(1, min(calls, MOST_GRAPH_US // rough[name])))
        graphs[name] = (captured(call, inputs, calls), calls)
    near = [name for name in graphs if rough[name] < WELL_BEHIND * min(rough.values())]
    behind = [name for name in graphs if name not in near]
    times = {}
    for names, how in ((near, (rounds, round_ms)), (behind, (1, round_ms))):
        if names:
            replays = {name: graphs[name][0].replay for name in names}
            times |= gpu_times(replays, [()], rounds=how[0], round_ms=how[1])
    return {name: times[name] / graphs[name][1] for name in candidates}


def copy_bandwidth() -> float:
    """TB/s of a device-to-device copy through torch: bytes read plus bytes written, over the median time."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    microseconds = gpu_times({"copy": target.copy_}, [(source,)])["copy"]
    return 2 * COPY_BYTES / microseconds * 1e-6


def matmul_rate() -> float:
    """TFLOP/s of a large bf16 matrix product through torch, over the median time."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    call = functools.partial(torch.matmul, out=out)
    return 2 * MATMUL_SIZE**3 / gpu_times({"matmul": call}, [(a, b)], **SHORT_ROUNDS)["matmul"] * 1e-6


def measured_speeds() -> Speeds:
    """Measure the current device's speeds, and give back the memory that this takes."""
    found = Speeds(copy_bandwidth(), matmul_rate())
    torch.cuda.empty_cache()
    return found
