"""Compiles a model's attention kernels ahead: ``python -m warpspec compile --arch sm_90a --model gpt-oss-120b``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from warpspec.aot.models import BLOCKS, CALLS, KV_CACHES, MODELS, NEAR, PAGE_SIZES, TREES, needed, rank_of
from warpspec.aot.workers import compile_all, shown
from warpspec.common.command_line import positive
from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import GPUS
from warpspec.common.kernel_cache import CACHE
from warpspec.common.launch import SIMULATED

EXAMPLES = """\
A call whose kernel is in the cache folder starts at once; others compile at their first call, for seconds each.
Exit status 1: a kernel failed to compile.

examples:
  python -m warpspec compile --list                                    the models
  python -m warpspec compile --arch sm_90a --model gpt-oss-120b --jobs 8    some 500 kernels, 10 seconds of a core each
  python -m warpspec compile --model llama-3-8b --kv-cache nvfp4       with the kernels that store keys and values
  python -m warpspec compile --model deepseek-v3-decode --ranks 8 --calls paged --page-sizes 64
  python -m warpspec compile --model deepseek-v3.2-decode --ranks 8 --kv-cache e4m3
  python -m warpspec compile --model qwen3-8b --calls packed-paged --page-sizes 16 --cache /models/kernels"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m warpspec compile",
        usage="%(prog)s --model NAME [options]",
        description="Compile the attention kernels of a model and keep them in the cache folder. Needs no GPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        choices=sorted(MODELS),
        metavar="NAME",
        help="may be repeated; --list has the names",
    )
    parser.add_argument("--arch", default="sm_90a", choices=sorted(GPUS), help="target (default %(default)s)")
    parser.add_argument(
        "--sm-count", type=positive, help="SMs of the GPU, where not as many as an H200's or B200's"
    )
    parser.add_argument(
        "--calls",
        nargs="+",
        default=CALLS,
        choices=(*CALLS, BLOCKS, TREES),
        help="how requests are told apart: rows of a batch; lengths and positions; pages; packed (default: all but "
        f"{BLOCKS}, rows of a batch with lists of blocks, and {TREES}, drafts over pages)",
    )
    parser.add_argument(
        "--page-sizes",
        nargs="+",
        type=positive,
        default=PAGE_SIZES,
        help="keys of a page (default %(default)s)",
    )
    parser.add_argument(
        "--kv-cache",
        default="16-bit",
        choices=KV_CACHES,
        help="what the KV cache holds (default %(default)s)",
    )
    parser.add_argument("--ranks", type=positive, default=1, help="ranks of tensor parallelism (default 1)")
    parser.add_argument("--cache", metavar="DIR", help=f"folder to keep them in (default: {CACHE_VARIABLE})")
    parser.add_argument(
        "--jobs", type=positive, default=os.cpu_count(), help="processes (default: one a CPU)"
    )
    parser.add_argument(
        "--list", action="store_true", help="only list the models, or with --model the kernels, one a line"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.model:
        for name, model in MODELS.items():
            sizes = f"D {model.head_dim}" + (f", V {model.v_dim}" if model.v_dim else "")
            print(f"{name:26}{model.heads_q} query heads, {model.heads_kv} KV, {sizes}")
        return 0 if options.list else parser().error("--model: name one, or several, of these")
    if options.cache is not None:
        os.environ[CACHE_VARIABLE] = os.path.abspath(options.cache)
    if not options.list:
        if CACHE.folder is None:
            parser().error(f"--cache: needed, {CACHE_VARIABLE} is empty")
        try:
            CACHE.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser().error(f"--cache: kernels cannot be kept in {CACHE.folder}: {error}")
    target = replace(SIMULATED[options.arch], device=0)  # compile as for a GPU
    if options.sm_count:
        target = replace(target, sm_count=options.sm_count)
    try:
        wanted = dict.fromkeys(
            item
            for name in options.model
            for item in needed(
                rank_of(MODELS[name], options.ranks),
                options.calls,
                options.page_sizes,
                options.kv_cache,
                target,
                NEAR,
            )
        )
    except (ValueError, UnsupportedProblem) as problem:
        parser().error(str(problem))
    if options.list:
        for kernel, config in wanted:
            print(kernel.name, shown(config))
        return 0
    print(f"{len(wanted)} kernels for {options.arch} into {CACHE.folder}")
    failed = compile_all(list(wanted), options.arch, options.jobs)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
