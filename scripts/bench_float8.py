"""Times of attention with FP8 and NVFP4 keys and values on a GPU, in CUDA graphs, against bf16 in the same run.

    python scripts/bench_float8.py [--markdown] [--only NAME ...] [--json FILE]

One line a shape and format: microseconds with bf16, and with e4m3 or NVFP4 keys and values, TB/s of these K and V with
their scales, how many times as fast as bf16, torch's SDPA in bf16 where it takes the shape, and the worst head's error:
of the first batch row against FP32 on dequantised values where there is one query, else (and of packed calls) of all
rows against our bf16 kernel on these values. Inputs rotate through more memory than L2 holds.
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
from warpspec.fmha import attention, attention_varlen, launch, ops
from warpspec.fmha.quantized import BLOCK_SCALES, dequantized


@dataclass(frozen=True)
class Case:
    """lengths: "random": of each request 1 to keys. page: keys of a page; 0: not paged. packed: a call of
    ``attention_varlen``, whose keys are packed, too, unless they are paged."""

    batch: int
    queries: int
    keys: int
    heads: tuple[int, int]
    dim: int = 128
    causal: bool = False
    lengths: str = "full"
    page: int = 0
    packed: bool = False


CASES = {
    "B32 L8192": Case(32, 1, 8192, (64, 8)),
    "B128 L1024": Case(128, 1, 1024, (64, 8)),
    "B1 L65536": Case(1, 1, 65536, (64, 8)),
    "B32 random pages": Case(32, 1, 8192, (32, 8), lengths="random", page=16),
    "B32 L8192 D64": Case(32, 1, 8192, (64, 8), 64),
    "B32 L4096 D256": Case(32, 1, 4096, (16, 8), 256),
    "B160 L1279 random": Case(160, 1, 1279, (32, 8), lengths="random", page=64),
    "B32 L8192 packed": Case(32, 1, 8192, (64, 8), packed=True),
    "prefill": Case(2, 8192, 8192, (32, 32), causal=True),
    "prefill pages": Case(4, 4096, 4096, (32, 8), causal=True, page=64, packed=True),
    "chunk pages": Case(4, 512, 8192, (32, 8), causal=True, page=64, packed=True),
    "chunk packed": Case(4, 512, 8192, (32, 8), causal=True, packed=True),
}


FORMATS = ("bf16", "fp8", "nvfp4")


def inputs(case: Case):
    """What makes a set of arguments of a seed, of each of FORMATS; and bytes of K and V that are read in each."""
    (heads, kv_heads), dim = case.heads, case.dim
    generator = torch.Generator().manual_seed(7)
    lengths = torch.full((case.batch,), case.keys)
    if case.lengths == "random":
        lengths = torch.randint(1, case.keys + 1, (case.batch,), generator=generator)
    numbers = 2 * int(lengths.sum()) * kv_heads * dim
    read = {"bf16": 2 * numbers, "fp8": numbers, "nvfp4": numbers * 9 // 16}
    shape = (case.batch, case.keys, kv_heads, dim)
    options = {"causal": case.causal}
    if case.packed:
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
        options |= {
            "cu_seqlens_q": starts * case.queries,
            "max_seqlen_q": case.queries,
            "max_seqlen_k": case.keys,
        }
        if not case.page:
            options["cu_seqlens_k"] = starts * case.keys
            shape = (case.batch * case.keys, kv_heads, dim)
    if case.page:
        pages = -(-case.keys // case.page)
        shape = (case.batch * pages, case.page, kv_heads, dim)
        table = torch.randperm(case.batch * pages, generator=generator).view(case.batch, pages)
        options |= {"page_table": table.int().cuda(), "kv_lengths": lengths.int().cuda()}

    def make(seed: int) -> tuple[dict]:
        torch.manual_seed(seed)
        q = torch.randn(case.batch, case.queries, heads, dim, device="cuda", dtype=torch.bfloat16)
        q = q.flatten(0, 1) if case.packed else q
        return ({name: ((q, *kv(shape)), options | more) for name, (kv, more) in makers(shape).items()},)

    return make, read


def makers(shape: tuple) -> dict:
    """Return, for each format, a function that makes K and V, and the options of its calls."""

    def wide(shape):
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def float8(shape):
        return [(50 * t).clamp(-448, 448).to(torch.float8_e4m3fn) for t in wide(shape)]

    def codes(shape):
        row = (*shape[:-1], shape[-1] // 2)
        return [torch.randint(256, row, device="cuda", dtype=torch.uint8) for _ in range(2)]

    def blocks(shape):
        scales = 0.5 + torch.rand(*shape[:-1], shape[-1] // 16, device="cuda")
        return scales.to(torch.float8_e4m3fn)

    scales = {f"{name}_scale": torch.tensor([0.02], device="cuda") for name in "kv"}
    found = {"bf16": (wide, {}), "fp8": (float8, scales)}
    of_blocks = {f"{name}_scale": torch.tensor([0.3], device="cuda") for name in "kv"}
    of_blocks |= {f"{name}_block_scales": blocks(shape) for name in "kv"}
    return found | {"nvfp4": (codes, of_blocks)}


def ours(name: str):
    """A candidate: our attention over a format."""

    def call(sets: dict) -> None:
        run(*sets[name])

    return call


def run(arguments: tuple, options: dict, **more) -> torch.Tensor:
    """Our attention of q, k and v."""
    call = attention_varlen if "cu_seqlens_q" in options else attention
    return call(*arguments, **options, **more)


def sdpa(sets: dict) -> None:
    (q, k, v), options = sets["bf16"]
    torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=options["causal"], enable_gqa=True
    )


def error(sets: dict, name: str) -> float:
    """Largest relative error of a head, as the module says."""
    (q, k, v), options = sets[name]
    got = run((q, k, v), options)
    blocks = [options.get(each) for each in BLOCK_SCALES]
    if q.dim() == 3 or q.shape[1] > 1:
        k, v = (dequantized(t, block).bfloat16() for t, block in zip((k, v), blocks, strict=True))
        factors = [float(options[each]) for each in ("k_scale", "v_scale")]
        scale = factors[0] * q.shape[-1] ** -0.5
        wanted = run((q, k, v), sets["bf16"][1], scale=scale).float() * factors[1]
    else:
        if "page_table" in options:
            options = options | {each: options[each][:1] for each in ("page_table", "kv_lengths")}
        else:
            k, v = k[:1], v[:1]
            firsts = zip(BLOCK_SCALES, blocks, strict=True)
            options = options | {each: block[:1] for each, block in firsts if block is not None}
        got = got[:1]
        wanted = attention(q[:1], k, v, **options, backend="reference").float()
    got, wanted = (t.float().transpose(-3, -2).flatten(-2) for t in (got, wanted))
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
            for name in FORMATS:
                ours(name)(*make(0))
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
        sets = rotation(make, 3 * read["nvfp4"])
        sixteen = {"bf16": ours("bf16")} | ({} if case.page or case.packed else {"sdpa": sdpa})
        float8, nvfp4 = ({each: ours(each)} for each in FORMATS[1:])
        times = graph_times(sixteen | float8, sets)
        times |= {
            "nvfp4": graph_times(float8 | nvfp4, sets)["nvfp4"]
        }  # so far from bf16's are timed less often
        for each in FORMATS[1:]:
            wrong = error(*sets[0], each)
            speed = read[each] / times[each] * 1e-6
            of_bf16 = times["bf16"] / times[each]
            row = (name, each, times["bf16"], times[each], times.get("sdpa"), speed, of_bf16, wrong)
            rows.append(row)
            print(*row, flush=True)
    columns = ("shape", "K, V", "bf16 us", "us", "SDPA us", "TB/s", "of bf16's speed", "error")
    driver.show(options, columns, rows)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"header": header, "columns": columns, "rows": rows}, file)


if __name__ == "__main__":
    main()
