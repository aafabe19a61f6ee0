"""Microbenchmarks of a Hopper GPU: what the timing model's table of constants is made of.

    python scripts/microbench/run.py OUT.json [--only PREFIX...] [--repeats 3]
    python scripts/microbench/run.py --list | --ptx FOLDER           # without a GPU

Each kernel is PTX text of a few lines (`arithmetic.py`, `shared_memory.py`, `synchronise.py`, `wgmma.py`, `memory.py`,
`launches.py`, `instructions.py`, `fetching.py`, `overlap.py`, `attention.py`), timed by %clock64
inside. OUT.json: the GPU and, for
each kernel, what it measures, every figure the median over the repeats (the first run only warms up).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import arithmetic
import attention
import fetching
import instructions
import launches
import memory
import numpy as np
import overlap
import shared_memory
import synchronise
import wgmma
from case import FIELDS, HEADER, Case
from driver import CLOCK_RATE, L2_BYTES, MEMORY_CLOCK, SM_COUNT, Gpu, TensorMap

SOURCES = (
    arithmetic,
    shared_memory,
    synchronise,
    wgmma,
    memory,
    launches,
    instructions,
    fetching,
    overlap,
    attention,
)
FLUSH_BYTES = 256 << 20
EMPTY = HEADER + ".visible .entry empty() { ret; }\n"
EMPTY_LAUNCHES = 400


def all_cases() -> list[Case]:
    """Every microbenchmark, in order. ValueError if two have one name."""
    cases = [case for source in SOURCES for case in source.cases()]
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"two cases of one name: {[n for n in names if names.count(n) > 1]}")
    return cases


def module_text(cases: list[Case]) -> str:
    return HEADER + "\n".join(case.text for case in cases)


def assemble(text: str) -> bytes:
    """A cubin made by the toolkit's ptxas, or the text itself (the driver compiles it) where there is no toolkit."""
    try:
        command = ["ptxas", "-arch=sm_90a", "-O3", "/dev/stdin", "-o", "/dev/stdout"]
        return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout
    except FileNotFoundError:
        return text.encode()


class Bench:
    """A GPU with the buffers that the kernels use."""

    def __init__(self, repeats: int):
        self.gpu, self.repeats = Gpu(), repeats
        self.sms = self.gpu.attribute(SM_COUNT)
        self.out = self.gpu.allocate(1 << 20)
        self.data = self.gpu.allocate(memory.STREAM + (64 << 20))
        self.scratch = self.gpu.allocate(FLUSH_BYTES)
        self.evictor = None

    def flush(self, code: bool) -> None:
        """Fill L2 with other data, which reading does not; with `code`, the SMs' caches with other code before."""
        gpu = self.gpu
        if code:
            if self.evictor is None:
                module = gpu.load(assemble(HEADER + instructions.evictor()))
                self.evictor = gpu.function(module, instructions.EVICTOR, 0)
            params = [self.out, self.data, ctypes.c_uint64(0), ctypes.c_uint32(1), TensorMap()]
            gpu.launch(self.evictor, self.sms, 32, 0, params)
        gpu.check(gpu.cuda.cuMemsetD8_v2(self.scratch, 0, ctypes.c_size_t(FLUSH_BYTES)))

    def about(self) -> dict[str, object]:
        gpu = self.gpu
        return {
            "gpu": gpu.name(),
            "sms": self.sms,
            "max_sm_mhz": gpu.attribute(CLOCK_RATE) / 1000,
            "max_memory_mhz": gpu.attribute(MEMORY_CLOCK) / 1000,
            "l2_bytes": gpu.attribute(L2_BYTES),
        }

    def measure(self, case: Case, code: bytes) -> dict[str, float]:
        gpu = self.gpu
        module = gpu.load(code)
        function = gpu.function(module, case.name, case.shared)
        grid = case.grid or self.sms * case.count
        tensor_map = TensorMap()
        if case.map_rows:
            tensor_map = gpu.rows_map(self.data, memory.STREAM // 128, case.map_rows)
        params = [self.out, self.data, ctypes.c_uint64(case.size), ctypes.c_uint32(case.count), tensor_map]
        found: list[dict[str, float]] = []
        for repeat in range(self.repeats + 1):
            source = str(case.about.get("source", ""))
            if source.endswith("dram") or source == "cold" or case.about.get("of") == "global_dram":
                self.flush(source == "cold")
            gpu.launch(function, grid, case.block, case.shared, params)
            gpu.wait()
            if repeat:
                times = gpu.get(self.out, (grid, case.block // 32, FIELDS))
                found.append(case.figures(times))
        gpu.unload(module)
        return {key: float(np.median([one[key] for one in found])) for key in found[0]}

    def empty_launch(self) -> float:
        """Microseconds from one empty kernel to the next in a stream."""
        gpu = self.gpu
        module = gpu.load(assemble(EMPTY))
        function = gpu.function(module, "empty", 0)
        for _ in range(2):
            start = gpu.event()
            for _ in range(EMPTY_LAUNCHES):
                gpu.launch(function, self.sms, 128, 0, [ctypes.c_uint64(0)])
            end = gpu.event()
            took = gpu.microseconds(start, end) / EMPTY_LAUNCHES
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose names begin so")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--list", action="store_true", help="names of the cases, no GPU needed")
    parser.add_argument("--ptx", type=Path, help="write each case's PTX into this folder, no GPU needed")
    options = parser.parse_args()
    cases = [case for case in all_cases() if case.name.startswith(tuple(options.only))]
    if options.list:
        print("\n".join(case.name for case in cases))
        return
    if options.ptx is not None:
        options.ptx.mkdir(parents=True, exist_ok=True)
        for case in cases:
            (options.ptx / f"{case.name}.ptx").write_text(module_text([case]))
        return
    if options.out is None:
        parser.error("OUT.json is missing")
    began = time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(lambda case: _try(assemble, module_text([case])), cases))
    print(f"{len(cases)} kernels assembled in {time.monotonic() - began:.1f} s", flush=True)
    began = time.monotonic()
    bench = Bench(options.repeats)
    result: dict[str, object] = {"about": bench.about(), "empty_launch_us": bench.empty_launch()}
    rows: list[dict[str, object]] = []
    for case, code in zip(cases, codes, strict=True):
        figures = code if isinstance(code, str) else _try(bench.measure, case, code)
        rows.append({"name": case.name, "about": case.about, "figures": figures})
        if isinstance(figures, str):
            print(f"{case.name}: {figures}", flush=True)
    result["cases"] = rows
    options.out.write_text(json.dumps(result))
    print(
        f"{time.monotonic() - began:.1f} s on {result['about']}, empty launch {result['empty_launch_us']:.2f} us"
    )
    for row in rows:
        if isinstance(row["figures"], dict):
            print(row["name"], *(f"{key}={value:.5g}" for key, value in row["figures"].items()))


def _try(function, *args):
    """The function's result, or the text of its error."""
    try:
        return function(*args)
    except subprocess.CalledProcessError as error:
        return f"ptxas: {error.stderr.decode()[:300]}"
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    main()
