"""Digests of the PTX of many kernels of warpspec: shows whether a change to the source changes the code.

    python scripts/digest_ptx.py --write BEFORE.json              # at the commit to compare with
    python scripts/digest_ptx.py --against BEFORE.json [CASE ...]   # after the change

Compiles the kernels of scripts/mutate.py (every family, small calls) and those of random attention problems, for
sm_90a and sm_100a, and runs none of them. A digest leaves out comments, line information and kernel names, which follow
the source. Needs no GPU. CASE: part of a case's name; without one, all cases (about 10 minutes on two cores).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from shared.mutant_cases import KERNELS

from warpspec import sim
from warpspec.common import compile as compiler
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import SIMULATED
from warpspec.fmha import launch
from warpspec.fmha.problem import AttentionProblem

RANDOM_PROBLEMS = 60  # attention problems, each for both architectures
SEED = 20261124
JOBS = 2
LOCATION = re.compile(r"\s*\.(loc|file)\b")
# Sections of the text that follow the source's places; the code stands before them.
DEBUG_SECTION = re.compile(r"^\.section\s+\.debug.*", re.MULTILINE | re.DOTALL)
KERNEL_NAME = re.compile(r"\bkernel_\w+|\b\w*cutlass_\w+")


class NothingRan:
    """Stands for the simulator's report of a launch that was compiled and not run."""

    def __add__(self, other: NothingRan) -> NothingRan:
        return self


def digest(ptx: str) -> str:
    """SHA-256 of the instructions and declarations of a module."""
    ptx = DEBUG_SECTION.sub("", re.sub(r"//.*", "", ptx))
    lines = [line for line in ptx.splitlines() if line.strip() and not LOCATION.match(line)]
    return hashlib.sha256(KERNEL_NAME.sub("kernel", "\n".join(lines)).encode()).hexdigest()


def random_problem(generator: random.Random) -> AttentionProblem:
    """A problem of ``attention`` with random sizes and options, of tensors without storage."""
    draw = generator.choice
    head_dim, heads_kv, group = draw((64, 128, 256, 512)), draw((1, 2, 8)), draw((1, 4, 5, 8, 16))
    batch, seq_q, seq_k = draw((1, 3, 17, 64)), draw((1, 2, 7, 150, 2048)), draw((130, 1000, 8192))
    shared = head_dim == 512 and draw((True, False))
    meta = {"dtype": draw((torch.bfloat16, torch.float16)), "device": "meta"}
    page_size = draw((None, None, 16, 64, 128))
    if page_size is None:
        keys = (batch, seq_k, heads_kv, head_dim)
        paging = {"kv_lengths": torch.empty(batch, dtype=torch.int32, device="meta")} if draw((0, 1)) else {}
    else:
        keys = (batch * -(-seq_k // page_size), page_size, heads_kv, head_dim)
        table = torch.empty(batch, -(-seq_k // page_size), dtype=torch.int32, device="meta")
        paging = {"page_table": table, "kv_lengths": torch.empty(batch, dtype=torch.int32, device="meta")}
    window = draw((None, None, (127, 0), (1000, None)))
    normalize = draw((True, True, True, False))
    sink = torch.empty(heads_kv * group, device="meta") if normalize and draw((0, 1)) else None
    bias = None
    if page_size is None and draw((0, 0, 0, 1)):
        bias = torch.empty(1, heads_kv * group, seq_q, seq_k, dtype=torch.bfloat16, device="meta")
    return AttentionProblem.of(
        torch.empty(batch, seq_q, heads_kv * group, head_dim, **meta),
        torch.empty(keys, **meta),
        None if shared else torch.empty(keys, **meta),
        causal=draw((True, False)),
        window=window,
        sink=sink,
        bias=bias,
        normalize=normalize,
        return_lse=draw((True, False)),
        memory=False,
        **paging,
    )


def attention_case(problem: AttentionProblem, arch: str) -> Callable[[], None]:
    def compile_problem() -> None:
        launch.compiled(problem, SIMULATED[arch])

    return compile_problem


def cases() -> dict[str, Callable[[], None]]:
    """What each case calls, by name."""
    found = dict(KERNELS)
    generator = random.Random(SEED)
    for number in range(RANDOM_PROBLEMS):
        problem = random_problem(generator)
        for arch in ("sm_90a", "sm_100a"):
            found[f"attention-{number}-{arch}"] = attention_case(problem, arch)
    return found


def digests(name: str) -> tuple[str, list[str]]:
    """(name, a sorted list of its kernels' digests) of a case. What it compiles without running counts."""
    seen = set()
    find = compiler.compile_cached

    def noted(*arguments, **options):
        found = find(*arguments, **options)
        seen.add(digest(found.artifacts.PTX))
        return found

    with (
        mock.patch.object(compiler, "compile_cached", noted),
        mock.patch.object(sim, "run", lambda *_, **__: NothingRan()),
        mock.patch.object(sim, "remember", lambda report: report),
    ):
        try:
            cases()[name]()
        except UnsupportedProblem as refusal:
            seen.add(f"unsupported: {refusal}")
        except Exception as error:  # a case that checks results which nothing has written
            seen.add(f"stopped: {type(error).__name__}")
    return name, sorted(seen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="CASE")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--against", type=Path, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=JOBS, metavar="N", help="processes")
    options = parser.parse_args()
    names = [name for name in cases() if not options.names or any(part in name for part in options.names)]
    before = {} if options.against is None else json.loads(options.against.read_text())
    found = {}
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for name, seen in pool.imap_unordered(digests, names):
            found[name] = seen
            if options.write:  # after each case: a run that is stopped has not been for nothing
                options.write.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            if options.against and seen != before.get(name):
                print(f"  {name}: changed", flush=True)
    if options.against is None:
        return 0
    changed = [name for name in names if found[name] != before.get(name)]
    print(f"{len(names) - len(changed)} of {len(names)} cases have the same PTX")
    for name in changed:
        print(f"  {name}: {len(before.get(name, []))} before, {len(found[name])} now")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
