"""Measures on a GPU the kernels that docs/clock_errors.md has errors of: SM clocks and time of each, by ncu.

    python scripts/measure_clocks.py OUT.json [--only TEXT] [--workers 14]      # on the GPU
    python scripts/measure_clocks.py --compile [--only TEXT] [--workers 14]     # there, beside others
    python scripts/measure_clocks.py --list

Each call of ``shared/clock_cases.py`` runs warm (compiled, called twice), then once under ncu, which flushes the L2
before each kernel and leaves clocks as they are. Workers compile everything ahead. OUT.json: the GPU, versions, and for
each case its kernels in order with clocks, nanoseconds and what else ncu said.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from shared.clock_cases import cases
from shared.driver import need_gpu

METRICS = {
    "clocks": "sm__cycles_elapsed.max",
    "ns": "gpu__time_duration.sum",
    "active": "sm__cycles_active.avg",
    "dram_read": "dram__bytes_read.sum",
    "dram_written": "dram__bytes_write.sum",
    "l2_read": "lts__t_sectors_op_read.sum",
    "l2_written": "lts__t_sectors_op_write.sum",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "instructions": "sm__inst_executed.sum",
    "grid": "launch__grid_size",
    "registers": "launch__registers_per_thread",
}
SCALES = {
    "byte": 1,
    "Kbyte": 1e3,
    "Mbyte": 1e6,
    "Gbyte": 1e9,
    "ns": 1,
    "us": 1e3,
    "ms": 1e6,
    "nsecond": 1,
    "usecond": 1e3,
}
MARKER = "spin_kernel"  # of torch.cuda._sleep: begins a case


def chosen(only: str) -> list:
    """Cases whose name or family has one of the texts, which | separates; in the order of the texts."""
    found = [case for text in only.split("|") for case in cases() if text in case.name or text in case.family]
    return list(dict.fromkeys(found))


def warm(part: int, parts: int, only: str) -> None:
    """Compile the cases of one worker by calling them."""
    import torch

    for case in chosen(only)[part::parts]:
        try:
            case.make("cuda")()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"warm {case.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def child(only: str, seconds: float) -> None:
    """Under ncu: every case once, after a marker."""
    import torch

    began = time.monotonic()
    for case in chosen(only):
        if time.monotonic() - began > seconds:
            print(f"SKIPPED {case.name}: no time left", flush=True)
            continue
        try:
            call = case.make("cuda")
            for _ in range(2):
                call()
            torch.cuda.synchronize()
        except Exception as error:
            print(f"SKIPPED {case.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda._sleep(100)
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        print(f"CASE {case.name}", flush=True)
        del call
        torch.cuda.empty_cache()


def parse(text: str, names: list[str]) -> list[dict]:
    """Rows of ncu's CSV, by case."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    by_kernel: dict[str, dict] = {}
    for row in rows:
        found = by_kernel.setdefault(row["ID"], {"kernel": row["Kernel Name"]})
        for name, metric in METRICS.items():
            if row["Metric Name"] == metric:
                scale = SCALES.get(row["Metric Unit"], 1)
                found[name] = float(row["Metric Value"].replace(",", "")) * scale
    result: list[dict] = []
    for kernel in by_kernel.values():
        if MARKER in kernel["kernel"]:
            name = names[len(result)] if len(result) < len(names) else "?"
            result.append({"name": name, "kernels": []})
        elif result:
            result[-1]["kernels"].append(kernel)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="cases whose name or family has one of TEXT|TEXT...")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=70, help="for the run under ncu")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--compile", action="store_true", help="only call everything, to fill kernel caches")
    parser.add_argument("--compiled", action="store_true", help="kernel caches are full: measure at once")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        for case in cases():
            print(f"{case.family}: {case.name}")
        return
    if options.warm is not None:
        warm(options.warm, options.workers, options.only)
        return
    if options.child:
        child(options.only, options.seconds)
        return
    if options.out is None and not options.compile:
        parser.error("OUT.json is missing")
    need_gpu("--list needs none")
    if shutil.which("ncu") is None and not options.compile:
        parser.error("ncu is not on the PATH; the CUDA toolkit has it")
    script = [sys.executable, __file__, "--only", options.only, "--workers", str(options.workers)]
    began = time.monotonic()
    if not options.compiled:
        workers = [subprocess.Popen([*script, "--warm", str(i)]) for i in range(options.workers)]
        for worker in workers:
            worker.wait()
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    if options.compile:
        return
    began = time.monotonic()
    ncu = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv"]
    ncu += ["--metrics", ",".join(METRICS.values())]
    limit = ["--seconds", str(options.seconds)]
    done = subprocess.run([*ncu, *script, "--child", *limit], capture_output=True, text=True, check=False)
    output = done.stdout
    (options.out.parent / "ncu.txt").write_text(output + done.stderr)
    names = [line[len("CASE ") :] for line in output.splitlines() if line.startswith("CASE ")]
    for line in output.splitlines():
        if line.startswith(("SKIPPED", "==ERROR==")):
            print(line)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    found = parse(output, names)
    options.out.write_text(json.dumps({"gpu": gpu, "cases": found}, indent=None))
    print(f"{len(found)} cases in {time.monotonic() - began:.0f} s on {gpu}")
    for case in found:
        text = "; ".join(
            f"{k['kernel'][:40]} {k.get('clocks', 0):.0f} clocks {k.get('ns', 0) / 1000:.2f} us"
            for k in case["kernels"]
        )
        print(f"{case['name']}: {text}")


if __name__ == "__main__":
    main()
