"""Times of ``warpspec.cache.insert`` on a GPU, in CUDA graphs, against a copy of as many bytes.

    python scripts/bench_cache.py [--markdown] [--tokens N ...] [--json FILE]

One line a shape and format: microseconds, TB/s read and written, and the share of the speed of torch's copy in the same
graph run. Queries, keys and values are read once; queries are written in place, keys and values as codes. The copy
reads half as many bytes and writes as many. Inputs rotate through more memory than L2 holds. "kv" inserts without
queries and rotation, as engines' own kernels do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from unittest import mock

import torch
from shared import driver
from shared.gpu_bench import copy_bandwidth, graph_times, rotation

from warpspec.aot.workers import compile_all
from warpspec.cache import FORMATS, insert
from warpspec.common.launch import Kernel

TOKENS = (4096, 256, 16)
HEADS = ((64, 8, 128), (32, 8, 64), (16, 8, 256))  # queries, keys, head size
NAMES = ("bfloat16", "e4m3", "nvfp4")
PAGE = 16
POSITIONS = 65536


def inputs(tokens: int, heads: tuple[int, int, int], name: str, queries: bool) -> tuple[Callable, int]:
    """(what makes a set of arguments of a seed, bytes that a call moves)."""
    q_heads, kv_heads, dim = heads
    fmt = FORMATS[name]
    row = fmt.row_bytes(dim) + (dim // fmt.block if fmt.block else 0)
    moved = tokens * (4 * q_heads * dim * queries + 2 * kv_heads * (2 * dim + row))
    pages = -(-2 * tokens // PAGE)

    def cache(width: int) -> list[torch.Tensor]:
        made = torch.zeros(2, pages, PAGE, kv_heads, width, dtype=torch.uint8, device="cuda")
        return list(made.view(torch.bfloat16) if width == 2 * dim else made)

    table = torch.randn(POSITIONS, dim, device="cuda")
    scale = torch.tensor(0.37, device="cuda")

    def make(seed: int) -> tuple:
        generator = torch.Generator("cuda").manual_seed(seed)
        rows = torch.randn(tokens, q_heads + 2 * kv_heads, dim, device="cuda", generator=generator).bfloat16()
        q, k, v = rows.split((q_heads, kv_heads, kv_heads), dim=1)
        slots = torch.randperm(pages * PAGE, device="cuda", generator=generator)[:tokens]
        positions = torch.randint(POSITIONS, (tokens,), device="cuda", generator=generator)
        options = {"format": None if name == "bfloat16" else name}
        if queries:
            options |= {"q": q, "out": q, "cos_sin": table, "positions": positions}
        if fmt.scaled:
            options |= {"k_scale": scale, "v_scale": scale}
        if fmt.block:
            options |= dict(zip(("k_block_scales", "v_block_scales"), cache(dim // fmt.block), strict=True))
        source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda").random_(generator=generator)
        return (k, v, *cache(fmt.row_bytes(dim)), slots), options, source, torch.empty_like(source)

    return make, moved


def call(operands, options, *_) -> None:
    insert(*operands, **options)


def copy(_operands, _options, source, target) -> None:
    target.copy_(source)


def compile_kernels(cases: list[tuple]) -> None:
    """Compile the kernels of all cases, many at a time."""
    wanted = {}

    def launcher(self, config, target, *, seed=0):
        wanted[self, config] = target.arch
        return lambda *arguments: None

    with mock.patch.object(Kernel, "launcher", launcher):
        for case in {(16, *case[1:]) for case in cases}:
            call(*inputs(*case)[0](0))
    (arch,) = set(wanted.values())
    compile_all(list(wanted), arch, os.cpu_count())


def main() -> None:
    parser = driver.parser(__doc__, markdown=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    header = driver.begin()
    fastest = copy_bandwidth()
    cases = [
        (tokens, heads, name, queries)
        for tokens in options.tokens
        for heads in (HEADS if tokens == TOKENS[0] else HEADS[:1])
        for name in NAMES
        for queries in (True, False)
    ]
    compile_kernels(cases)
    rows = []
    for tokens, heads, name, queries in cases:
        make, moved = inputs(tokens, heads, name, queries)
        times = graph_times({"insert": call, "copy": copy}, rotation(make, moved))
        ours, speed = times["insert"], moved / times["insert"] * 1e-6
        shape, what = "{}/{} D{}".format(*heads), "q, k, v" if queries else "k, v"
        rows.append((tokens, shape, name, what, ours, speed, speed / fastest, times["copy"] / ours))
        print(*rows[-1], flush=True)
    columns = (
        "tokens",
        "heads",
        "format",
        "rows",
        "us",
        "TB/s",
        "of a large copy",
        "of a copy of as many bytes",
    )
    driver.show(options, columns, rows, f"large copy {fastest:.2f} TB/s\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"header": header, "copy": fastest, "columns": columns, "rows": rows}, file)


if __name__ == "__main__":
    main()
