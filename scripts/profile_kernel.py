"""Runs one operation under NVIDIA's profilers and says what bounds it.

    python scripts/profile_kernel.py OP SIZE... [--tool ncu|nsys] [--print] [--full] [--dtype D]

    prefill B H S D          attention, causal unless --full
    decode  B HQ HKV L D     attention of one query a row over L keys
    paged   B HQ HKV L D P   the same through a page table, P keys a page
    shared  B H SQ L         attention over one tensor of L keys, D 512
    softmax ROWS LENGTH      e.g. 4 33554432
    topk    ROWS LENGTH K    softmax and top-k

The operation runs once inside the NVTX range "warpspec" and between cudaProfilerStart and cudaProfilerStop, warmed up
before. The command is printed; --print prints it and stops. ncu's answer becomes a table: time, pipes, memory,
occupancy, spills, what warps wait for, and how far the time is from what the chip needs at least. --csv FILE reads an
answer that `ncu --csv --page raw` gave before. Clocks are left as they are: compare percentages, not times.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

RANGE = "warpspec"
# nsys adds its suffix, but makes no folder.
NSYS_REPORT = Path(__file__).resolve().parent.parent / "out" / "profile"
WARM_UP = 3
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MMA_FLOPS = 4096  # bf16 and fp16, dense: a clock and SM of sm_90
WINDOW = ("--profile-from-start", "off", "--clock-control", "none")
INSTALL = {
    "ncu": "Nsight Compute: apt-get install nsight-compute (NVIDIA's CUDA repository), or conda install -c nvidia "
    "nsight-compute; reading counters may need root or NVreg_RestrictProfilingToAdminUsers=0",
    "nsys": "Nsight Systems: apt-get install nsight-systems (NVIDIA's CUDA repository), or conda install -c nvidia "
    "nsight-systems",
}

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle"),
    *("long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction"),
    *("not_selected", "selected", "short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
SELECTED = "selected"  # the share in which a warp issues
STALLS_SHOWN = 4

TIME, CLOCK = "gpu__time_duration.sum", "gpc__cycles_elapsed.avg.per_second"
DRAM_RATE, DRAM_PART = (
    "dram__bytes.sum.per_second",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
)
LOCAL = ("smsp__inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_st.sum")
SM_COUNT = "launch__sm_count"

# (row of the table, metric, unit in the table, what one of it is in ncu's base unit)
METRICS = (
    ("time", TIME, "us", 1e3),
    ("SM clock", CLOCK, "GHz", 1e9),
    ("tensor pipe", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", 1),
    ("exponential pipe (XU)", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed", "%", 1),
    ("FMA pipe", "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", 1),
    ("ALU pipe", "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", 1),
    ("issue slots", "smsp__issue_active.avg.pct_of_peak_sustained_active", "%", 1),
    ("device memory", DRAM_PART, "%", 1),
    ("device memory", DRAM_RATE, "TB/s", 1e12),
    ("L2", "lts__throughput.avg.pct_of_peak_sustained_elapsed", "%", 1),
    ("L2 hits", "lts__t_sector_hit_rate.pct", "%", 1),
    ("L1 and shared memory", "l1tex__throughput.avg.pct_of_peak_sustained_active", "%", 1),
    ("occupancy, possible", "sm__maximum_warps_per_active_cycle_pct", "%", 1),
    ("occupancy, achieved", "sm__warps_active.avg.pct_of_peak_sustained_active", "%", 1),
    ("registers a thread", "launch__registers_per_thread", "", 1),
    ("shared memory a CTA", "launch__shared_mem_per_block_dynamic", "KiB", 1024),
    ("CTAs", "launch__grid_size", "", 1),
)


@dataclass(frozen=True)
class Operation:
    """sizes: names of the sizes on the command line. work: sizes -> (FLOPs of the tensor cores, bytes that must cross
    device memory), full: not causal. prepare: sizes and dtype -> the call to profile."""

    sizes: tuple[str, ...]
    work: Callable[..., tuple[float, float]]
    prepare: Callable[..., Callable]


def prefill_work(batch, heads, length, dim, *, full, element):
    flops = 4 * batch * heads * length * length * dim / (1 if full else 2)
    return flops, 4 * batch * heads * length * dim * element


def decode_work(batch, heads, heads_kv, keys, dim, page=0, *, full, element):
    bytes_moved = 2 * batch * dim * (heads_kv * keys + heads) * element
    return 4 * batch * heads * keys * dim, bytes_moved


def shared_work(batch, heads, queries, keys, *, full, element):
    return 4 * batch * heads * queries * keys * 512, batch * 512 * (keys + 2 * heads * queries) * element


def softmax_work(rows, length, *, full, element):
    return 0.0, 2 * rows * length * element


def topk_work(rows, length, k, *, full, element):
    return 0.0, rows * length * element + rows * k * 8


def random(dtype, *shape):
    import torch

    return torch.randn(shape, device="cuda", dtype=getattr(torch, dtype))


def prepare_prefill(batch, heads, length, dim, *, full, dtype):
    from warpspec.fmha import attention

    q, k, v = (random(dtype, batch, length, heads, dim) for _ in "qkv")
    return lambda: attention(q, k, v, causal=not full)


def prepare_decode(batch, heads, heads_kv, keys, dim, *, full, dtype):
    from warpspec.fmha import attention

    q = random(dtype, batch, 1, heads, dim)
    k, v = (random(dtype, batch, keys, heads_kv, dim) for _ in "kv")
    return lambda: attention(q, k, v)


def prepare_paged(batch, heads, heads_kv, keys, dim, page, *, full, dtype):
    import torch

    from warpspec.fmha import attention

    pages = batch * -(-keys // page)
    q = random(dtype, batch, 1, heads, dim)
    k, v = (random(dtype, pages, page, heads_kv, dim) for _ in "kv")
    options = {
        "kv_lengths": torch.full((batch,), keys, dtype=torch.int32, device="cuda"),
        "page_table": torch.randperm(pages, device="cuda").int().view(batch, -1),
    }
    return lambda: attention(q, k, v, **options)


def prepare_shared(batch, heads, queries, keys, *, full, dtype):
    from warpspec.fmha import attention

    q, k = random(dtype, batch, queries, heads, 512), random(dtype, batch, keys, 1, 512)
    return lambda: attention(q, k)


def prepare_softmax(rows, length, *, full, dtype):
    from warpspec.softmax import softmax

    x = random(dtype, rows, length)
    return lambda: softmax(x)


def prepare_topk(rows, length, k, *, full, dtype):
    from warpspec.softmax import softmax_topk

    x = random(dtype, rows, length)
    return lambda: softmax_topk(x, k)


OPERATIONS = {
    "prefill": Operation(("B", "H", "S", "D"), prefill_work, prepare_prefill),
    "decode": Operation(("B", "HQ", "HKV", "L", "D"), decode_work, prepare_decode),
    "paged": Operation(("B", "HQ", "HKV", "L", "D", "P"), decode_work, prepare_paged),
    "shared": Operation(("B", "H", "SQ", "L"), shared_work, prepare_shared),
    "softmax": Operation(("ROWS", "LENGTH"), softmax_work, prepare_softmax),
    "topk": Operation(("ROWS", "LENGTH", "K"), topk_work, prepare_topk),
}


def run_once(call: Callable) -> None:
    """Warm-up, then one call inside the range and the window."""
    import torch

    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    with torch.cuda.nvtx.range(RANGE):
        call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def command(tool: str, arguments: Iterable[str]) -> list[str]:
    """The command line that profiles ``profile_kernel.py`` with these arguments."""
    child = [sys.executable, str(Path(__file__)), *arguments, "--child"]
    if tool == "nsys":
        window = ("--capture-range", "cudaProfilerApi", "--capture-range-end", "stop")
        report = ("--output", str(NSYS_REPORT), "--force-overwrite", "true")
        return ["nsys", "profile", "--trace", "cuda,nvtx", *window, *report, "--stats", "true", *child]
    names = [metric for _, metric, _, _ in METRICS] + [STALLED.format(name) for name in STALLS]
    metrics = ",".join((*names, *LOCAL, SM_COUNT))
    selection = ("--nvtx", "--nvtx-include", f"{RANGE}/", "--metrics", metrics)
    return ["ncu", *WINDOW, *selection, "--csv", "--page", "raw", "--print-units", "base", *child]


def kernels(text: str) -> list[dict[str, str]]:
    """The kernels of an answer of `ncu --csv --page raw`: name of a column -> its text. ValueError where there is none.

    Lines of ncu itself ("==PROF== ...") may stand around it; below the header stands a line of units.
    """
    rows = [row for row in csv.reader(text.splitlines()) if row]
    header = next((i for i, row in enumerate(rows) if row[0] == "ID"), None)
    if header is None or len(rows) < header + 3:
        raise ValueError("no kernel was profiled")
    names = rows[header]
    return [dict(zip(names, row, strict=True)) for row in rows[header + 2 :] if len(row) == len(names)]


def value(kernel: dict[str, str], metric: str) -> float | None:
    """A metric's number; None where ncu had none."""
    text = kernel.get(metric, "").replace(",", "")
    try:
        return float(text)
    except ValueError:
        return None


def stalls(kernel: dict[str, str]) -> list[tuple[str, float]]:
    """(reason, percent of the time that a warp spends so), largest first; without the part in which it issues."""
    ratios = {name: value(kernel, STALLED.format(name)) or 0.0 for name in STALLS}
    total = sum(ratios.values())
    parts = [(name, 100 * ratio / total) for name, ratio in ratios.items() if total and name != SELECTED]
    return sorted(parts, key=lambda part: -part[1])


def kernel_rows(kernel: dict[str, str]) -> list[tuple[str, str]]:
    """(what, how much) of one kernel."""
    rows = []
    for row, metric, unit, scale in METRICS:
        number = value(kernel, metric)
        rows.append((row, "-" if number is None else f"{number / scale:.4g} {unit}".rstrip()))
    local = [value(kernel, metric) for metric in LOCAL]
    spills = "-" if None in local else f"{sum(local):.0f} local loads and stores"
    rows.append(("spills", "none" if local == [0.0, 0.0] else spills))
    reasons = ", ".join(f"{name} {part:.0f}%" for name, part in stalls(kernel)[:STALLS_SHOWN])
    return [*rows, ("warps wait for", reasons or "-")]


def roofline_rows(found: list[dict[str, str]], flops: float, bytes_moved: float) -> list[tuple[str, str]]:
    """How far all kernels together are from what the chip needs at least, at the clocks that they ran at.

    The tensor cores' peak follows from the clock, the memory's from how much of it the kernel with the most traffic
    says it used.
    """
    times = [value(kernel, TIME) for kernel in found]
    if None in times:
        return []
    seconds = sum(times) * 1e-9
    longest = max(found, key=lambda kernel: value(kernel, TIME))
    clock, sms = value(longest, CLOCK), value(longest, SM_COUNT)
    busiest = max(found, key=lambda kernel: value(kernel, DRAM_RATE) or 0.0)
    rate, part = value(busiest, DRAM_RATE), value(busiest, DRAM_PART)
    floors, rows = {}, [("all kernels", f"{seconds * 1e6:.4g} us")]
    if flops and clock and sms:
        peak = MMA_FLOPS * sms * clock
        floors["tensor cores"] = flops / peak
        rows.append(("work", f"{flops / seconds * 1e-12:.4g} of {peak * 1e-12:.4g} TFLOP/s"))
    if rate and part:
        peak = rate / (part / 100)
        floors["device memory"] = bytes_moved / peak
        rows.append(("must cross memory", f"{bytes_moved / seconds * 1e-12:.4g} of {peak * 1e-12:.4g} TB/s"))
    if floors:
        bound = max(floors, key=floors.get)
        least = floors[bound]
        rows.append(("roofline", f"{least * 1e6:.4g} us ({bound}): {100 * least / seconds:.3g}% reached"))
    return rows


def report(text: str, flops: float, bytes_moved: float) -> str:
    """The table of an answer of ncu."""
    found = kernels(text)
    lines = []
    for kernel in found:
        lines.append(f"{kernel['Kernel Name'][:90]}  grid {kernel['Grid Size']} block {kernel['Block Size']}")
        lines += [f"  {what:<22} {much}" for what, much in kernel_rows(kernel)]
    lines += [f"{what:<24} {much}" for what, much in roofline_rows(found, flops, bytes_moved)]
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", choices=OPERATIONS)
    parser.add_argument("sizes", nargs="+", type=int, metavar="SIZE")
    parser.add_argument("--tool", choices=("ncu", "nsys"), default="ncu")
    parser.add_argument("--print", action="store_true", help="print the command and stop")
    parser.add_argument("--full", action="store_true", help="prefill without the causal mask")
    parser.add_argument("--dtype", choices=ELEMENT_BYTES, default="bfloat16")
    parser.add_argument("--csv", type=Path, help="read ncu's answer from here and run nothing")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write ncu's answer here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = OPERATIONS[options.op].sizes
    if len(options.sizes) != len(names) or min(options.sizes) < 1:
        parser.error(f"{options.op} takes {' '.join(names)}, each at least 1; got {options.sizes}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 1 where the tool failed, 2 where it is missing."""
    options = parse(arguments)
    operation = OPERATIONS[options.op]
    if options.child:
        run_once(operation.prepare(*options.sizes, full=options.full, dtype=options.dtype))
        return 0
    work = operation.work(*options.sizes, full=options.full, element=ELEMENT_BYTES[options.dtype])
    if options.csv:
        print(report(options.csv.read_text(), *work))
        return 0
    of_child = [options.op, *map(str, options.sizes), "--dtype", options.dtype]
    line = command(options.tool, [*of_child, *(["--full"] if options.full else [])])
    print(shlex.join(line), flush=True)
    if options.print:
        return 0
    if shutil.which(options.tool) is None:
        print(f"{options.tool} is not on the PATH. {INSTALL[options.tool]}", file=sys.stderr)
        return 2
    if options.tool == "nsys":
        NSYS_REPORT.parent.mkdir(exist_ok=True)
        return subprocess.run(line).returncode
    answer = subprocess.run(line, capture_output=True, text=True)
    if options.keep:
        options.keep.write_text(answer.stdout)
    try:
        print(report(answer.stdout, *work))
    except ValueError as error:
        print(f"ncu: {error}\n{answer.stdout}{answer.stderr}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
