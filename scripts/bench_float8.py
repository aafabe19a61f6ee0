"""Times of attention with FP8 keys and values on a GPU, in CUDA graphs, against bf16 in the same run.

    python scripts/bench_float8.py [--markdown] [--only NAME ...] [--json FILE]

One line a shape: microseconds with bf16 and with e4m3 keys and values, TB/s of K and V in FP8, how many times as fast
as bf16, torch's SDPA in bf16 where it takes the shape, and the worst head's error: of the first batch row against FP32
on dequantised values where there is one query, else of all rows against our bf16 kernel on these values. Inputs rotate
through more memory than L2 holds.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from unittest import mock

import torch
from shared import driver
from shared.gpu_bench import graph_times, rotation

from warpspec.aot.workers import compile_all
from warpspec.common.launch import Kernel
from warpspec.fmha import attention, launch, ops


@dataclass(frozen=True)
class Case:
    """lengths: "random": of each request 1 to keys. page: keys of a page; 0: not paged."""

    batch: int
    queries: int
    keys: int
    heads: tuple[int, int]
    dim: int = 128
    causal: bool = False
    lengths: str = "full"
    page: int = 0


CASES = {
    "B32 L8192": Case(32, 1, 8192, (64, 8)),
    "B128 L1024": Case(128, 1, 1024, (64, 8)),
    "B1 L65536": Case(1, 1, 65536, (64, 8)),
    "B32 random pages": Case(32, 1, 8192, (32, 8), lengths="random", page=16),
    "B32 L8192 D64": Case(32, 1, 8192, (64, 8), 64),
    "B32 L4096 D256": Case(32, 1, 4096, (16, 8), 256),
    "prefill": Case(2, 8192, 8192, (32, 32), causal=True),
}


def inputs(case: Case):
    """(what makes a set of (bf16 arguments, FP8 arguments) of a seed, bytes of K and V in FP8 that are read)."""
    (heads, kv_heads), dim = case.heads, case.dim
    generator = torch.Generator().manual_seed(7)
    lengths = torch.full((case.batch,), case.keys)
    if case.lengths == "random":
        lengths = torch.randint(1, case.keys + 1, (case.batch,), generator=generator)
    read = 2 * int(lengths.sum()) * kv_heads * dim
    shape = (case.batch, case.keys, kv_heads, dim)
    options = {"causal": case.causal}
    if case.page:
        pages = -(-case.keys // case.page)
        shape = (case.batch * pages, case.page, kv_heads, dim)
        table = torch.randperm(case.batch * pages, generator=generator).view(case.batch, pages)
        options |= {"page_table": table.int().cuda(), "kv_lengths": lengths.int().cuda()}
    scales = {"k_scale": torch.tensor([0.02], device="cuda"), "v_scale": torch.tensor([0.03], device="cuda")}

    def make(seed: int) -> tuple:
        torch.manual_seed(seed)
        q = torch.randn(case.batch, case.queries, heads, dim, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        codes = [(t / s).to(torch.float8_e4m3fn) for t, s in zip((k, v), scales.values(), strict=True)]
        return ((q, k, v), options), ((q, *codes), options | scales)

    return make, read


def bf16(wide, _narrow) -> None:
    attention(*wide[0], **wide[1])


def fp8(_wide, narrow) -> None:
    attention(*narrow[0], **narrow[1])


def sdpa(wide, _narrow) -> None:
    (q, k, v), options = wide
    torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=options["causal"], enable_gqa=True
    )


def error(wide, narrow) -> float:
    """Largest relative error of a head, as the module says."""
    (q, k, v), options = narrow
    got = attention(q, k, v, **options)
    if q.shape[1] > 1:
        factors = [float(options[name]) for name in ("k_scale", "v_scale")]
        scale = factors[0] * q.shape[-1] ** -0.5
        wanted = attention(q, k.bfloat16(), v.bfloat16(), scale=scale, **wide[1]).float() * factors[1]
    else:
        if "page_table" in options:
            options = options | {name: options[name][:1] for name in ("page_table", "kv_lengths")}
        else:
            k, v = k[:1], v[:1]
        got = got[:1]
        wanted = attention(q[:1], k, v, **options, backend="reference").float()
    got, wanted = (t.float().transpose(1, 2).flatten(2) for t in (got, wanted))
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def compile_kernels(chosen: list[Case]) -> None:
    """Compile the kernels of all cases, many at a time."""
    wanted = {}

    def launcher(self, config, target, *, seed=0):
        wanted[self, config] = target.arch
        return lambda *arguments: None

    with mock.patch.object(Kernel, "launcher", launcher):
        for case in chosen:
            make, _ = inputs(case)
            wide, narrow = make(0)
            bf16(wide, narrow)
            fp8(wide, narrow)
    launch.prepare.cache_clear()  # calls are planned anew
    ops._checked.clear()
    (arch,) = set(wanted.values())
    compile_all(list(wanted), arch, os.cpu_count())


def main() -> None:
    parser = driver.parser(__doc__, only=CASES, markdown=True)
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    header = driver.begin()
    compile_kernels([CASES[name] for name in options.only])
    rows = []
    for name in options.only:
        case = CASES[name]
        make, read = inputs(case)
        sets = rotation(make, 3 * read)
        candidates = {"bf16": bf16, "fp8": fp8} | ({} if case.page else {"sdpa": sdpa})
        wrong = error(*sets[0])
        times = graph_times(candidates, sets)
        speed = read / times["fp8"] * 1e-6
        rows.append(
            (name, times["bf16"], times["fp8"], times.get("sdpa"), speed, times["bf16"] / times["fp8"], wrong)
        )
        print(*rows[-1], flush=True)
    columns = ("shape", "bf16 us", "FP8 us", "SDPA us", "TB/s", "of bf16's speed", "error")
    driver.show(options, columns, rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"header": header, "columns": columns, "rows": rows}, file)


if __name__ == "__main__":
    main()
