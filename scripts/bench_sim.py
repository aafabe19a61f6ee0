"""Rates of the simulator on this machine: warp-instructions a second by kind of code, TMA, MMA, whole kernels.

    python scripts/bench_sim.py [--json]

Everything runs on one core, and seconds are processor time, so that other work on the machine matters little. A row's
rate excludes compilation and translation, which another column shows (both are kept on disk afterwards).
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["WARPSPEC_SIM_PROCESSES"] = "1"

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from warpspec import sim
from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.runtime import execute

TARGET_RATE = 200_000  # warp-instructions a second on one core that every row must reach
HEADER = """
.version 9.4
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 data)
{{
  .reg .pred %p<8>; .reg .b32 %r<64>; .reg .b32 %f<128>; .reg .b64 %rd<8>;
  .shared .align 128 .b8 sm[4096];
  ld.param.u64 %rd1, [data]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;
  mov.b32 %r2, sm; shl.b32 %r3, %r1, 2; add.s32 %r2, %r2, %r3;
  mov.b32 %r10, 0; ld.global.b32 %f0, [%rd1];
LOOP:
{body}
  add.s32 %r10, %r10, 1; setp.lt.s32 %p1, %r10, {iterations}; @%p1 bra LOOP;
  st.global.b32 [%rd1], %f0;
  ret;
}}
"""
FMA = "fma.rn.f32 %f0, %f0, %f0, %f0;\n" * 64
SOFTMAX = "fma.rn.f32 %f0, %f0, %f0, %f0; ex2.approx.ftz.f32 %f0, %f0; add.f32 %f1, %f1, %f0;\n" * 32
KINDS = {
    "float, straight-line": (FMA, 2000),
    "exp2 and float": (SOFTMAX + "mov.b32 %f0, %f1;", 500),
    "integer, short loop": ("mad.lo.s32 %r5, %r5, %r1, %r10; xor.b32 %r5, %r5, %r1; mov.b32 %f0, %r5;", 20000),
    "shared and global memory": (
        "st.shared.b32 [%r2], %f0; ld.shared.b32 %f1, [%r2]; st.global.b32 [%rd1], %f1; ld.global.b32 %f0, [%rd1];",
        5000,
    ),
    "shuffles": ("shfl.sync.bfly.b32 %f0, %f0, 1, 31, -1; shfl.sync.bfly.b32 %f0, %f0, 2, 31, -1;", 5000),
    "divergent branches": ("and.b32 %r6, %r1, 3; setp.eq.s32 %p2, %r6, 0; @%p2 bra SKIP;\n"
                           "add.s32 %r5, %r5, 1; xor.b32 %r5, %r5, %r1; mov.b32 %f0, %r5;\nSKIP:", 5000),
    "barriers (Python handlers)": ("bar.sync 0;\n", 5000),
}  # fmt: skip


def run(body: str, iterations: int) -> sim.LaunchReport:
    gmem = GlobalMemory()
    data = gmem.allocate(4096, "data", data=np.linspace(0, 1, 1024, dtype=np.float32).tobytes())
    text = HEADER.format(body=body, iterations=iterations)
    params = struct.pack("<Q", data.address)
    return execute(text, "kernel", grid=(1, 1, 1), block=(128, 1, 1), params=params, gmem=gmem)


def micro(body: str, iterations: int) -> dict[str, float]:
    """Rate of one loop; the first, short run translates it."""
    start = time.process_time()
    run(body, iterations)
    middle = time.process_time()
    report = run(body, iterations)
    seconds = time.process_time() - middle
    return {
        "warp_instructions": report.warp_instructions,
        "seconds": seconds,
        "rate": report.warp_instructions / seconds,
        "translate_seconds": max(middle - start - seconds, 0.0),
    }


def on_one_core(call) -> dict[str, float]:
    """Rate of a whole kernel. The first call also compiles and translates it; the second is measured."""
    start = time.process_time()
    call()
    middle = time.process_time()
    call()
    seconds = time.process_time() - middle
    launches = sim.last_report().launches
    count = sum(launch.warp_instructions for launch in launches)
    return {
        "warp_instructions": count,
        "seconds": seconds,
        "rate": count / seconds,
        "translate_seconds": max(middle - start - seconds, 0.0),
        "mma_gflops": sum(launch.mma_flops for launch in launches) / seconds / 1e9,
        "tma_mb": sum(launch.tma_bytes_loaded for launch in launches) / seconds / 1e6,
    }


def attention(heads: int, length: int) -> dict[str, float]:
    """The sm100 attention kernel, D = 64, causal, 8 query heads a KV head."""
    from warpspec.fmha import attention as fmha

    torch.manual_seed(0)
    q = torch.randn(1, length, heads, 64).bfloat16()
    k, v = (torch.randn(1, length, max(heads // 8, 1), 64).bfloat16() for _ in range(2))
    return on_one_core(lambda: fmha(q, k, v, causal=True, num_splits=1, backend="sim"))


def grouped_gemm(tokens: int) -> dict[str, float]:
    """The sm100 NVFP4 grouped GEMM with SwiGLU and NVFP4 out: 4 experts of width 256 on tokens of width 512."""
    from warpspec.moe import NVFP4Experts, grouped_swiglu

    torch.manual_seed(0)
    matrices = (torch.randn(4, *size) / 16 for size in ((256, 512), (256, 512), (512, 256)))
    experts = NVFP4Experts.quantize(*matrices)
    rows = torch.randn(tokens, 512).bfloat16()

    offsets = torch.arange(1, 5, dtype=torch.int32) * (tokens // 4)

    def run() -> None:
        options = dict(out_format="nvfp4", out_scale=torch.ones(4), backend="sim")
        grouped_swiglu(rows, experts.w13, offsets, **options)

    return on_one_core(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    # So that translation is measured, not read from the user's cache.
    with tempfile.TemporaryDirectory() as cache:
        os.environ[CACHE_VARIABLE] = cache
        rows = {name: micro(*kind) for name, kind in KINDS.items()}
        rows[f"attention D 64, {options.heads} heads x {options.length}, causal"] = attention(
            options.heads, options.length
        )
        rows["NVFP4 grouped GEMM, SwiGLU, 512 tokens"] = grouped_gemm(512)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        table = Table(title="simulator rates")
        for head in (
            "code",
            "warp-instr",
            "seconds",
            "warp-instr/s",
            "translation s",
            "MMA GFLOP/s",
            "TMA MB/s",
        ):
            table.add_column(head, justify="left" if head == "code" else "right")
        for name, row in rows.items():
            extra = [f"{row[key]:.1f}" if key in row else "" for key in ("mma_gflops", "tma_mb")]
            table.add_row(
                name,
                f"{row['warp_instructions']:,}",
                f"{row['seconds']:.3f}",
                f"{row['rate']:,.0f}",
                f"{row['translate_seconds']:.2f}",
                *extra,
            )
        Console(width=130).print(table)
    slow = [name for name, row in rows.items() if row["rate"] < TARGET_RATE]
    if slow:
        print(f"below {TARGET_RATE:,} warp-instructions a second: {', '.join(slow)}")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
