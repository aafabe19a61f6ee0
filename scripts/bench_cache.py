"""Times of ``warpspec.cache.insert`` on a GPU, in CUDA graphs, against a copy of as many bytes.

    python scripts/bench_cache.py [--markdown] [--tokens N ...] [--json FILE]

One line a shape and format: microseconds, TB/s read and written, and the share of the speed of torch's copy in the same
graph run. Queries, keys and values are read once; queries are written in place, keys and values as codes. The copy
reads half as many bytes and writes as many. Inputs rotate through more memory than L2 holds. "kv" inserts without
queries and rotation, as engines' own kernels do.
"""

from __future__ import annotations

import json

import torch
from shared import driver
from shared.gpu_bench import copy_bandwidth, graph_times, rotation

from warpspec.cache import FORMATS, insert

TOKENS = (4096, 256, 16)
HEADS = ((64, 8, 128), (32, 8, 64), (16, 8, 256))  # queries, keys, head size
NAMES = ("bfloat16", "e4m3", "nvfp4")
PAGE = 16
POSITIONS = 65536


def bench(tokens: int, heads: tuple[int, int, int], name: str, queries: bool) -> tuple[float, float, float]:
    """(microseconds of insert, of the copy, bytes moved)."""
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

    candidates = {
        "insert": lambda operands, options, source, target: insert(*operands, **options),
        "copy": lambda operands, options, source, target: target.copy_(source),
    }
    times = graph_times(candidates, rotation(make, moved))
    return times["insert"], times["copy"], moved


def main() -> None:
    parser = driver.parser(__doc__, markdown=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    header = driver.begin()
    fastest = copy_bandwidth()
    rows = []
    for tokens in options.tokens:
        for heads in HEADS if tokens == TOKENS[0] else HEADS[:1]:
            for name in NAMES:
                for queries in (True, False):
                    ours, copy, moved = bench(tokens, heads, name, queries)
                    what = "q, k, v" if queries else "k, v"
                    speed = moved / ours * 1e-6
                    rows.append(
                        (
                            tokens,
                            "{}/{} D{}".format(*heads),
                            name,
                            what,
                            ours,
                            speed,
                            speed / fastest,
                            copy / ours,
                        )
                    )
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
