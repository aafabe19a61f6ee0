"""compute-sanitizer on the native kernels: small calls, one process each, several at a time.

    python scripts/sanitize.py [--tool racecheck ...] [--seconds N] [--jobs N] [CASE ...]

Needs an NVIDIA GPU and compute-sanitizer. Every case is first run without the tool, which compiles its kernels into
the cache folder, then under each tool with a limit of time. Only warpspec's kernels are instrumented
(``--kernel-name``): torch's would take most of the time. Sizes are a few tiles, because racecheck keeps the history of
every word of shared memory and slows a kernel down by some thousand times. Prints, as they end, a line a case and
tool: what the tool found, or that it did not end. With ``--every-lane`` kernels arrive at mbarriers in the one way that
racecheck follows (``shared/lane_arrivals.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from unittest import mock

import torch
from shared.driver import need_gpu
from shared.lane_arrivals import every_lane_arrives, traced

from warpspec.common.disk_cache import CACHE_VARIABLE

TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")
SANITIZER = "compute-sanitizer"
OUR_KERNELS = ("--kernel-name", "kernel_substring=warpspec")  # CuTe DSL puts a kernel's module into its name
SECONDS, JOBS = 60, 8
# On a CPU the cases run in the simulator, without the tool.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DONE = "case ran"  # printed by a case's process when its results are there
SUMMARY = re.compile(r"^=+ ((?:RACECHECK|ERROR) SUMMARY: .*)$", re.MULTILINE)
FINDING = re.compile(
    r"^=+ ((?:Error|Warning|Invalid|Uninitialized|Barrier)[^\n]*(?:\n=+ +and (?:Read|Write)[^\n]*)*)",
    re.MULTILINE,
)
LEADER = re.compile(r"\n=+ +")
NAME = re.compile(r"kernel_cutlass_kernel_warpspec(\w{,30})\w*")  # the tool prints a kernel's whole signature
UNUSUAL = re.compile(r"\W+")  # in a file's name
MOST_FINDINGS = 20
CONTROL = Path(__file__).parent / "shared" / "racecheck_control.cu"
WAYS = {
    "one lane arrives": "correct",
    "every lane arrives": "correct",
    "no wait": "a race",
}  # Way, in its order


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    """A seeded bf16 tensor, drawn on the CPU: the tool then has no kernel of torch's random numbers to load."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def integers(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def attention_call(
    queries: int,
    keys: int,
    heads: int,
    heads_kv: int,
    dim: int,
    *,
    shared: bool = False,
    sink: bool = False,
    **options,
) -> Callable[[], None]:
    """A call of ``attention`` on one request; K and V are one tensor if shared, every head has a sink if sink."""

    def run() -> None:
        from warpspec.fmha import attention

        q, k = rows(1, queries, heads, dim), rows(1, keys, heads_kv, dim, seed=1)
        v = k if shared else rows(1, keys, heads_kv, dim, seed=2)
        attention(q, k, v, sink=torch.ones(heads, device=DEVICE) if sink else None, **options)

    return run


def packed() -> None:
    from warpspec.fmha import attention_varlen

    keys = {"k": rows(24, 16, 2, 128, seed=1), "v": rows(24, 16, 2, 128, seed=2)}
    table = integers([list(range(12)), list(range(12, 24))])
    attention_varlen(
        rows(140, 8, 128),
        **keys,
        cu_seqlens_q=integers([0, 1, 140]),
        max_seqlen_q=139,
        page_table=table,
        kv_lengths=integers([150, 180]),
        causal=True,
    )


def gradients(dim: int, v_dim: int | None = None, *, apart: bool = False) -> Callable[[], None]:
    """apart: dQ by query tiles, dK and dV by key tiles, however few rows there are."""

    def run() -> None:
        from warpspec.fmha import attention
        from warpspec.fmha.backward import apart as choice

        size = v_dim or dim
        q, k, v = rows(1, 150, 4, dim), rows(1, 200, 2, dim, seed=1), rows(1, 200, 2, size, seed=2)
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
        with mock.patch.object(choice, "gains", lambda *_: apart):
            torch.autograd.grad(attention(*leaves, causal=True), leaves, rows(1, 150, 4, size, seed=3))

    return run


def mla(q_codes: bool) -> Callable[[], None]:
    """Unequal requests of two queries over pages of bf16 rows, or of e4m3 ones with Q in e4m3, too."""

    def run() -> None:
        from warpspec.latent import mla_decode

        table, lengths = integers([[3, 1, 4], [0, 2, 5], [6, 7, 8]]), integers([190, 0, 70])
        q, pages, options = rows(3, 2, 16, 576), rows(9, 64, 576, seed=1), {"scale": 0.06}
        if q_codes:
            q, pages = (tensor.to(torch.float8_e4m3fn) for tensor in (q, pages))
            options |= {name: torch.ones((), device=DEVICE) for name in ("q_scale", "kv_scale")}
        mla_decode(q, pages, table, lengths, **options)

    return run


def softmax_rows(count: int, length: int) -> Callable[[], None]:
    def run() -> None:
        from warpspec.softmax import softmax

        softmax(rows(count, length))

    return run


def topk_rows() -> None:
    from warpspec.softmax import softmax_topk

    softmax_topk(rows(2, 5000), 8)


def experts() -> None:
    from warpspec.moe import NVFP4Experts, moe_ffn

    weights = [
        rows(3, *size, seed=i).float() / 16 for i, size in enumerate(((128, 256), (128, 256), (256, 128)))
    ]
    layer = NVFP4Experts.quantize(*weights).for_backend("sm90")
    ids = integers([[0, 1], [2, -1], [1, 0], [1, 2]])
    moe_ffn(rows(4, 256, seed=5), layer, ids, torch.rand(4, 2, device=DEVICE))


def gathered(row_format: str, heads: int) -> Callable[[], None]:
    """Three queries over chosen rows of a pool."""

    def run() -> None:
        from warpspec.latent import KeySet, LatentPool, gathered_attention

        pool = LatentPool.empty(8, 64, row_format, device=DEVICE)
        dim = pool.row_format.dim
        pool.write(torch.arange(512, device=DEVICE), rows(512, dim, seed=1))
        slots = torch.randint(0, 512, (3, 130), generator=torch.Generator().manual_seed(0)).int().to(DEVICE)
        gathered_attention(rows(3, heads, dim), [KeySet(pool, slots)])

    return run


def wide(way: str, queries: tuple[int, ...], splits: int = 1) -> Callable[[], None]:
    """Packed requests at D 512, K and V two tensors. way: name of the ``Way`` to hand out work. splits: parts of the
    keys, for a way that has parts."""

    def run() -> None:
        import shared.mutant_cases  # noqa: F401  puts the tests' helpers on the path
        from helpers.simulate import choosing
        from helpers.varlen_cases import Packed

        from warpspec.fmha import attention_varlen
        from warpspec.fmha.plan.cost import Way

        keys = (260, 0, 90)
        batch = Packed("", seq_q=queries, seq_k=keys, heads_q=4, heads_kv=2, head_dim=512, page_size=16)
        ways = []
        with choosing(Way[way], lambda found: not ways.append(found.way), splits=splits):
            attention_varlen(**batch.arguments(DEVICE))
        if set(ways) != {Way[way]}:
            raise RuntimeError(f"its plans hand work out in other ways: {ways}")

    return run


CASES: dict[str, Callable[[], None]] = {
    "attention D128 causal": attention_call(150, 300, 4, 2, 128, causal=True),
    "attention D64 window, sink": attention_call(150, 300, 4, 2, 64, window=(60, 0), causal=True, sink=True),
    "attention D256": attention_call(70, 150, 2, 1, 256),
    "attention D512, a tile a CTA": wide("SINGLE", (70, 0, 5)),
    "attention D512, in rounds": wide("PERSISTENT", (70, 0, 5)),
    "attention D512, splits": wide("SPLIT", (3, 0, 5), 3),
    "attention D512, partitions": wide("PARTITIONS", (2, 0, 1), 3),
    "attention D512, K and V one": attention_call(3, 100, 32, 1, 512, shared=True),
    "attention, split keys": attention_call(1, 700, 8, 2, 128, num_splits=3),
    "attention, packed, pages": packed,
    "gradients D64": gradients(64),
    "gradients D128": gradients(128),
    "gradients D192/128": gradients(192, 128),
    "gradients D256": gradients(256),
    "gradients apart D64": gradients(64, apart=True),
    "gradients apart D128": gradients(128, apart=True),
    "gradients apart D192/128": gradients(192, 128, apart=True),
    "softmax, short rows": softmax_rows(4, 1000),
    "softmax, long rows": softmax_rows(2, 70000),
    "softmax and top-k": topk_rows,
    "experts": experts,
    "gathered attention": gathered("v4-fp8", 64),
    "gathered attention, V3.2": gathered("v3.2-fp8", 128),
    "MLA": mla(False),
    "MLA, Q in e4m3": mla(True),
}


def run_case(name: str, every_lane: bool) -> None:
    """Run a case in this process."""
    with every_lane_arrives() if every_lane else contextlib.nullcontext():
        CASES[name]()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if every_lane and not traced:
        raise RuntimeError("none of its kernels has such an arrival: run it without --every-lane")
    print(DONE)


def sanitized(
    tool: str, command: list[str], environment: dict, options: argparse.Namespace
) -> tuple[bool, float, str]:
    """Run a command under a tool: whether it ended, after how many seconds, and all that was printed."""
    words = ["--tool", tool, *options.option]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [SANITIZER, *words, *command], stdout=output, stderr=output, env=environment, text=True
        )
        try:
            process.wait(options.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        took = time.monotonic() - began
        output.seek(0)
        text = output.read()
    return DONE in text, took, text


def control(options: argparse.Namespace) -> None:
    """What the tool says of small kernels of CUDA C++ whose answer is known."""
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/control"
        subprocess.run(["nvcc", "-arch=sm_90a", "-lineinfo", "-o", binary, str(CONTROL)], check=True)
        for i, (way, truth) in enumerate(WAYS.items()):
            _, _, text = sanitized(options.tool[0], [binary, str(i)], dict(os.environ), options)
            said = SUMMARY.findall(text)
            print(f"control, {way} ({truth}): {said[-1] if said else text.strip()[-160:]}", flush=True)


def compile_case(name: str, options: argparse.Namespace) -> str:
    """Run a case without the tool. Returns what went wrong, if anything did."""
    plain = subprocess.run(
        command_of(name, options), capture_output=True, text=True, env=environment_of(options)
    )
    if DONE in plain.stdout:
        return ""
    return f"failed without the tool: {(plain.stderr.strip().splitlines() or ['no output'])[-1]}"


def command_of(name: str, options: argparse.Namespace) -> list[str]:
    return [sys.executable, __file__, "--case", name, *(["--every-lane"] if options.every_lane else [])]


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """With ``--every-lane`` nothing that is compiled may be kept."""
    return dict(os.environ) | ({CACHE_VARIABLE: ""} if options.every_lane else {})


def check(name: str, tool: str, compiled: Future[str], options: argparse.Namespace) -> str:
    """What a tool says of a case, in a line or a few. compiled: as ``compile_case`` returns it."""
    if wrong := compiled.result():
        return wrong
    command = [*OUR_KERNELS, *command_of(name, options)]
    ended, took, text = sanitized(tool, command, environment_of(options), options)
    if options.log is not None:
        (options.log / f"{UNUSUAL.sub('_', name)}.{tool}.txt").write_text(text)
    found = [NAME.sub(r"\1", LEADER.sub(" ", each)) for each in dict.fromkeys(FINDING.findall(text))]
    last = SUMMARY.findall(text)
    said = last[-1] if last else f"no summary; last line: {(text.strip().splitlines() or [''])[-1][:160]}"
    verdict = "ended" if ended else "DID NOT END"
    return "\n    ".join([f"{verdict} after {took:.0f} s: {said}", *found[:MOST_FINDINGS]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="CASE", help="part of a case's name")
    parser.add_argument("--tool", choices=TOOLS, action="append", help="repeat it for more (racecheck)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="limit of a case (default %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=JOBS, help="cases at a time (default %(default)s)")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="keep all that the tool says")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="WORD",
        help="a word more for the tool; repeat it for more",
    )
    parser.add_argument("--every-lane", action="store_true", help="kernels whose lanes arrive one by one")
    parser.add_argument(
        "--control", action="store_true", help="small kernels of CUDA C++ with a known answer"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tool = options.tool or TOOLS[:1]
    if options.case:
        run_case(options.case, options.every_lane)
        return
    for part in options.names:
        if not any(part in name for name in CASES):
            parser.error(f"no case has {part!r} in its name; there are: {'; '.join(CASES)}")
    need_gpu("on a CPU, python -m warpspec.sim run --check order finds races in any script")
    for tool in (SANITIZER, *(["nvcc"] if options.control else [])):
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not on the PATH; the CUDA toolkit has it")
    if options.control:
        control(options)
        return
    names = [name for name in CASES if not options.names or any(part in name for part in options.names)]
    with ThreadPoolExecutor(options.jobs) as pool:
        compiled = {
            name: pool.submit(compile_case, name, options) for name in names
        }  # before any that waits for it
        found = {
            pool.submit(check, name, tool, compiled[name], options): f"{name}, {tool}"
            for tool in options.tool
            for name in names
        }
        for future in as_completed(found):
            print(f"{found[future]}: {future.result()}", flush=True)


if __name__ == "__main__":
    main()
