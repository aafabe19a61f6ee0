"""Host time of a call: microseconds from Python, the GPU not waited for; and the first calls of a process.

    python scripts/bench_host.py                       # all tables, with the peers that are installed
    python scripts/bench_host.py --only calls          # of "calls", "operators", "start"
    python scripts/bench_host.py --compile-ahead       # only compiles everything, every case in its process
    python scripts/bench_host.py --profile             # also what each of our functions takes of a call
    python scripts/bench_host.py --dry                 # without a GPU: launches do nothing (shared/no_launches.py)

Shapes are so small that the GPU is done before the host is; a round of calls fits the launch queue, and the GPU is
waited for between rounds, outside the time. It is the wall clock's: autograd runs backward() in a thread of its own.
First deciles of rounds, so that other processes on the host count little. "recorded": gradients are asked for, and not
computed. "gradients": ``torch.autograd.grad``, forward and backward together.

"start": a fresh process with kernels on disk, from tensors at hand to the result on the GPU: first the forward call,
then the first gradient, after one of torch's own (which imports sympy); and whether torch._dynamo was imported. Without
a GPU it computes by backend "reference".
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime
import functools
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from shared import driver, gpu_bench
from shared.attention_peers import FLASH, SDPA, flash_attention
from shared.no_launches import no_launches
from shared.sweep_calls import OURS, attention_inputs, flash_call, ours
from shared.sweep_shapes import FLOAT8, AttentionShape
from torch.nn.functional import scaled_dot_product_attention

from warpspec.fmha import attention
from warpspec.fmha.flash_attn import flash_attn_func, flash_attn_varlen_func
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.moe import moe_ffn
from warpspec.softmax import softmax, softmax_topk

PARTS = ("calls", "operators", "start")
TIMING = {"calls": 20, "rounds": 100}  # of gpu_bench.host_time: a round stays within the launch queue
PEERS = (FLASH, SDPA)
PROFILED, SHOWN = 400, 14  # calls in a profile, and functions of it that are printed
SLOTS, TOKENS, HEADS = 256, 4, 64  # of gathered attention


def shape(form, heads_q, heads_kv, head_dim, queries, keys, **options) -> AttentionShape:
    return AttentionShape("mixed", "host", heads_q, heads_kv, head_dim, form, queries, keys, **options)


FORWARD, RECORDED, GRADIENTS = "forward", "recorded", "gradients"
TRAINING = (FORWARD, RECORDED, GRADIENTS)
CALLS = {  # name: shape, what is timed, microseconds wanted of ours
    "dense": (shape("plain", 8, 8, 128, (128,) * 2, (128,) * 2), TRAINING, {FORWARD: 18, GRADIENTS: 150}),
    "dense, grouped heads": (shape("plain", 32, 8, 64, (128,), (128,)), TRAINING, {FORWARD: 18, GRADIENTS: 150}),
    "packed": (shape("packed", 8, 2, 128, (17, 64, 40, 7), (17, 64, 40, 7)), TRAINING, {FORWARD: 22}),
    "packed, sink": (shape("packed", 16, 2, 64, (17, 64, 40, 7), (17, 64, 40, 7), sink=True), (GRADIENTS,), {}),
    "paged decode": (shape("paged", 32, 8, 128, (1,) * 4, (200, 64, 130, 256), page_size=128), (FORWARD,), {}),
    "split decode": (shape("plain", 32, 8, 128, (1,), (4096,)), (FORWARD,), {FORWARD: 30}),
    "D 512": (shape("plain", 8, 1, 512, (128,), (128,), shared_kv=True), (FORWARD, GRADIENTS), {FORWARD: 18}),
    "FP8 decode": (
        replace(shape("paged", 32, 8, 128, (1,) * 4, (200,) * 4, page_size=64), kind=FLOAT8), (FORWARD,), {}
    ),
}  # fmt: skip


def sdpa(x, causal: bool) -> tuple:
    """Return torch's call, heads first, as ``candidates`` does, whatever kernel torch takes."""
    heads_first = [t.detach().transpose(1, 2).requires_grad_(t.requires_grad) for t in (x.q, x.k, x.v)]
    options = {"is_causal": causal, "enable_gqa": x.q.shape[2] != x.k.shape[2]}
    return heads_first, lambda: scaled_dot_product_attention(*heads_first, **options)


def candidates(one: AttentionShape, device: str, recorded: bool) -> dict[str, tuple]:
    """Name -> (tensors, function of nothing to their attention): ours, and the peers that are installed."""
    x, mine = attention_inputs(one, device), ours(one)
    tensors = (x.q, x.k, x.v, x.options.get("sink"))
    tensors = [t.requires_grad_(recorded) for t in tensors if t is not None]
    found = {OURS: (tensors, lambda: mine(x))}
    flash = flash_attention()
    if device == "cuda" and flash is not None and one.head_dim <= 256 and one.kind != FLOAT8:
        found[FLASH] = (tensors, lambda: flash_call(flash, one, x))
    if device == "cuda" and one.form == "plain" and not one.shared_kv:
        found[SDPA] = sdpa(x, one.causal and one.queries == one.keys)
    return found


def gradients_of(tensors, call: Callable) -> Callable:
    """Forward and backward together."""
    seed = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), tensors, seed)


def profile(call: Callable) -> str:
    """Microseconds of a call by function, its callees not counted. The profiler lengthens Python's own by some 0.1 us
    each, so their sum is more than a call takes."""
    for _ in range(20):
        call()
    profiler = cProfile.Profile()
    for _ in range(PROFILED // TIMING["calls"]):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.enable()
        for _ in range(TIMING["calls"]):
            call()
        profiler.disable()
    found = sorted(pstats.Stats(profiler).stats.items(), key=lambda item: -item[1][2])
    lines = []
    for (file, line, name), (_, count, own, _, _) in found[:SHOWN]:
        place = f"{Path(file).name}:{line} {name}" if line else name
        lines.append(f"    {own / PROFILED * 1e6:6.2f} us in {count / PROFILED:5.1f} x {place}")
    return "\n".join(lines)


def calls(device: str, timing: dict, cases: list[str], profiled: bool = False) -> list[list]:
    """Prints each row as it is measured, too. profiled: and the profile of our call."""
    rows = []
    for name in cases:
        one, kinds, wanted = CALLS[name]
        for kind in kinds:
            times = {}
            for candidate, (tensors, call) in candidates(one, device, kind != FORWARD).items():
                try:
                    timed = gradients_of(tensors, call) if kind == GRADIENTS else call
                    times[candidate] = host_time(timed, **timing)
                    if profiled and candidate == OURS:
                        print(f"{name}, {kind}:\n{profile(timed)}", flush=True)
                except Exception as error:
                    if candidate == OURS:
                        raise
                    print(
                        f"{candidate}, {name}, {kind}: {type(error).__name__}: {str(error).splitlines()[0]}"
                    )
            rows.append(
                [
                    f"{name}, {kind}",
                    times[OURS],
                    *map(times.get, PEERS),
                    None if device == "cpu" else wanted.get(kind),
                ]
            )
            print(
                f"{name}, {kind}: " + ", ".join(f"{key} {us:.1f} us" for key, us in times.items()), flush=True
            )
    return rows


def operators(device: str, timing: dict) -> list[list]:
    """Our other operators; torch's where it has one that does the same."""
    from shared import moe_random

    x = torch.randn(64, 1024, device=device).bfloat16()
    leaf = x.clone().requires_grad_()
    seed = torch.randn_like(x)
    model = moe_random.SMALL_MODELS["small-nv"]
    experts, tokens = moe_random.random_experts(model), moe_random.random_tokens(model, TOKENS, "uniform", 0)
    chosen = (experts, tokens[1].int(), tokens[2].float())
    options = {"activation": model.activation, "limit": model.limit}
    pool = LatentPool.empty(4 * SLOTS // 64, 64, "v4-fp8", device=device)
    sets = [KeySet(pool, torch.randint(0, SLOTS, (TOKENS, SLOTS), dtype=torch.int32, device=device))]
    q = torch.randn(TOKENS, HEADS, 512, device=device).bfloat16()
    packed = [torch.randn(128, 8, 128, device=device).bfloat16().requires_grad_() for _ in "qkv"]
    dense = [t.detach()[None].requires_grad_() for t in packed]
    starts = torch.tensor([0, 17, 81, 121, 128], dtype=torch.int32, device=device)
    flash = functools.partial(flash_attn_func, *dense, causal=True)
    varlen = functools.partial(flash_attn_varlen_func, *packed, starts, starts, 64, 64, causal=True)
    timed = {
        "flash_attn_func, recorded": (flash, None),
        "flash_attn_func, gradients": (gradients_of(dense, flash), None),
        "flash_attn_varlen_func, recorded": (varlen, None),
        "flash_attn_varlen_func, gradients": (gradients_of(packed, varlen), None),
        "softmax": (lambda: softmax(x), lambda: torch.softmax(x, -1)),
        "softmax, recorded": (lambda: softmax(leaf), lambda: torch.softmax(leaf, -1)),
        "softmax, gradients": (
            lambda: torch.autograd.grad(softmax(leaf), leaf, seed),
            lambda: torch.autograd.grad(torch.softmax(leaf, -1), leaf, seed),
        ),
        "softmax_topk": (lambda: softmax_topk(x, 8), None),
        "moe_ffn": (lambda: moe_ffn(tokens[0], *chosen, **options), None),
        "gathered_attention": (lambda: gathered_attention(q, sets), None),
    }  # fmt: skip
    found = []
    for name, (mine, theirs) in timed.items():
        peer = None if theirs is None or device == "cpu" else host_time(theirs, **timing)
        found.append([name, host_time(mine, **timing), peer])
    return found


def host_time(call: Callable, **timing) -> float:
    return gpu_bench.host_time(call, [()], **timing)


def first_calls(device: str) -> None:
    """Print the seconds of this process's first calls, as JSON. Nothing of ours has run in it but imports."""
    backend = "auto" if device == "cuda" else "reference"
    q, k, v = (torch.randn(1, 128, 4, 64, device=device).bfloat16().requires_grad_() for _ in range(3))
    seed = torch.randn_like(q)
    # The device is up, and what torch imports for a gradient.
    torch.autograd.grad((q * q).sum(), q, seed.sum())
    torch.ones(1, device=device).item()
    found = {}

    def take(name, call):
        start = time.perf_counter()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        found[name] = time.perf_counter() - start
        return result

    with torch.no_grad():
        take(FORWARD, lambda: attention(q, k, v, causal=True, backend=backend))
    o = take(RECORDED, lambda: attention(q, k, v, causal=True, backend=backend))
    take(GRADIENTS, lambda: torch.autograd.grad(o, (q, k, v), seed))
    found["torch._dynamo"] = "torch._dynamo" in sys.modules
    print(json.dumps(found))


def start(device: str) -> list[list]:
    """First calls of two processes: the first finds or makes the kernels, the second finds them on disk."""
    command = [sys.executable, Path(__file__), "--first-calls", device]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    imported = "imported" if found.pop("torch._dynamo") else "not imported"
    return [[found[FORWARD], found[RECORDED], found[GRADIENTS], sum(found.values()), imported]]


def compile_ahead(options) -> None:
    """Fill the compilers' caches on disk with what the parts need: every case in a process of its own, all at once."""
    parts = [["calls", "--cases", name] for name in options.cases if "calls" in options.only]
    parts += [[part] for part in PARTS[1:] if part in options.only]
    command = [sys.executable, Path(__file__), "--only"]
    running = [subprocess.Popen([*command, *part], stdout=subprocess.DEVNULL) for part in parts]
    for part, process in zip(parts, running, strict=True):
        if process.wait():
            sys.exit(f"{' '.join(part)} failed")


def main() -> None:
    parser = driver.parser(__doc__, only=PARTS, markdown=True)
    parser.add_argument(
        "--cases", nargs="+", choices=CALLS, default=list(CALLS), help="of calls (default: all)"
    )
    parser.add_argument("--compile-ahead", action="store_true", help="only compile, in many processes")
    parser.add_argument("--profile", action="store_true", help="our calls by function, too")
    parser.add_argument("--dry", action="store_true", help="without a GPU: launches do nothing")
    parser.add_argument("--first-calls", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_calls:
        first_calls(options.first_calls)
        return
    device = "cpu" if options.dry else "cuda"
    show = functools.partial(driver.show, options)
    if options.dry:
        print(f"{datetime.date.today().isoformat()}, no GPU, launches do nothing, torch {torch.__version__}")
    else:
        driver.begin(FLASH)
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # before it is imported
        if options.compile_ahead:
            compile_ahead(options)
            return
    with no_launches() if options.dry else contextlib.nullcontext():
        if "calls" in options.only:
            show(["us a call", OURS, *PEERS, "wanted"], calls(device, TIMING, options.cases, options.profile))
        if "operators" in options.only:
            show(["us a call", OURS, "torch"], operators(device, TIMING))
    if "start" in options.only:
        show(["first calls, s: forward", RECORDED, GRADIENTS, "together", "torch._dynamo"], start(device))


if __name__ == "__main__":
    main()
