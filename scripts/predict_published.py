"""Predicts kernels on a B200 that others have timed, without a GPU: flash-attn-4's, FlashInfer's FMHA and GEMMs.

    python scripts/predict_published.py FOLDER [--only TEXT] [--sample 2] [--workers 1]       record into FOLDER
        [--flashinfer CHECKOUT]                                                               its kernels, too
    python scripts/predict_published.py FOLDER --predict OUT.json                             time the traces there

Each row of ``ROWS`` is a figure that Dao-AILab/flash-attention published, in TFLOP/s, at which SM clock if that was
said: D 256 in commit e122e67c, pairs at D 128 in 34625094, forward and backward passes at D 128 in pull request 2280,
latent decoding in 2468; FlashInfer in pull requests 3952 (FMHA) and 3948 (GEMMs of NVFP4), in microseconds. The
installed flash-attn-4 and the checkout's flashinfer/cute_dsl/attention/fmha and flashinfer/gemm/kernels run in the
simulator, a few clusters of each kernel, with the row's value of a constant where it names one; a GEMM runs with the
tile that the checkout's heuristic chooses (517cca9c is the rows' commit). OUT.json has the rows as ``clock_errors.py
--publish`` takes them. They are predictions: nothing was timed here.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
import types
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from warpspec import sim
from warpspec.sim.clocks.answer import clocks_of
from warpspec.sim.clocks.chips import chip
from warpspec.sim.clocks.record import captured
from warpspec.sim.clocks.store import load, save

LOCKED = 1.965  # GHz, where the clock was locked
UNKNOWN = 1.9  # GHz, where it was not said: the published rate has 15% of doubt
DOUBT = 0.15
SAMPLE = 2
FMHA_HEADS, FMHA_HEADS_KV = 32, 8
FP4_ROWS = (  # number, M, N, K, microseconds
    *((22, 1, 1280, 8192, 7.02), (38, 1, 4608, 7168, 6.67), (48, 1, 5120, 1024, 3.65)),
    *((50, 64, 5120, 1024, 4.32), (70, 64, 5120, 5120, 6.58), (12, 1024, 896, 1024, 4.68)),
    *((100, 256, 7168, 4608, 7.79), (142, 256, 9216, 7168, 9.47), (152, 384, 4096, 4096, 7.17)),
    *((160, 2048, 4096, 4096, 16.61), (154, 8192, 4096, 4096, 55.94), (130, 1, 8192, 14336, 10.44)),
    (134, 1, 8192, 28672, 24.75),
)
FMHA_FOLDER = "flashinfer/cute_dsl/attention"  # of a checkout; its package fmha needs nothing else of it
GEMM_FOLDER = "flashinfer/gemm"  # the same of its package kernels
NVFP4_BLOCK = 16


@dataclass(frozen=True)
class Row:
    """A published figure.

    number: by which ``clock_errors.py --publish`` knows the row again. tflops: what was published. what:
    "forward", "backward", "latent" or "fmha", of sizes batch, heads, length, head size, causal; "fp4", of M, N,
    K. ghz: the SM clock; None: it was not said. tuned: constants of flash-attn-4 that are set.
    """

    number: int
    case: str
    variant: str
    tflops: float
    what: str
    sizes: tuple
    ghz: float | None = None
    tuned: dict = field(default_factory=dict)

    @property
    def flop(self) -> float:
        """Operations as the authors count them: half of the scores where causal, five products for two in a backward
        pass."""
        if self.what == "fp4":
            return 2.0 * math.prod(self.sizes)
        batch, heads, length, dim, causal = self.sizes
        if self.what == "latent":
            return 2.0 * batch * heads * length * (576 + 512)
        forward = 4.0 * batch * heads * length**2 * dim / (2 if causal else 1)
        return forward * (2.5 if self.what == "backward" else 1)

    @property
    def name(self) -> str:
        return f"{self.number} {self.case} {self.variant}"


def _rows() -> list[Row]:
    rows = []
    for at, length, slow, fast in (
        (261, 4096, 1237, 1530),
        (263, 8192, 1279, 1572),
        (265, 16384, 1304, 1594),
        (267, 32768, 1182, 1521),
    ):
        sizes = (32768 // length, 16, length, 128, False)
        case = f"forward D128 S{length}"
        for number, frequency, rate in ((at, 10, slow), (at + 1, 16, fast)):
            tuned = {"ex2_emu_freq": frequency}
            rows.append(Row(number, case, f"exp2 on FMA {frequency}", rate, "forward", sizes, tuned=tuned))
    pairs = {
        (1024, False): (225, 585, 234, 728),
        (2048, False): (226, 1258, 235, 1265),
        (4096, False): (227, 1438, 236, 1488),
        (8192, False): (228, 1525, 237, 1608),
        (1024, True): (243, 347, 252, 343),
        (2048, True): (244, 702, 253, 709),
        (4096, True): (245, 1175, 254, 1190),
        (8192, True): (246, 1356, 255, 1384),
    }
    for (length, causal), (first, base, second, emulated) in pairs.items():
        sizes = (32768 // length, 8, length, 256, causal)
        case = f"forward D256 S{length} {'causal' if causal else 'full'}"
        for number, variant, rate, frequency in (
            (first, "MUFU", base, 0),
            (second, "exp2 on FMA 14", emulated, 14),
        ):
            tuned = {"ex2_emu_freq": frequency}
            rows.append(Row(number, case, variant, rate, "forward", sizes, LOCKED, tuned))
    for first, causal, rates in (
        (271, False, (1534.8, 1247.5, 1359.8)),
        (276, True, (1418.1, 1117.9, 1208.6)),
    ):
        sizes = (4, 16, 8192, 128, causal)
        case = f"D128 S8192 {'causal' if causal else 'full'}"
        rows.append(Row(first, f"forward {case}", "", rates[0], "forward", sizes))
        for number, variant, rate in ((first + 1, "1 CTA", rates[1]), (first + 2, "2 CTAs", rates[2])):
            tuned = {"two_ctas": variant == "2 CTAs"}
            rows.append(Row(number, f"backward {case}", variant, rate, "backward", sizes, tuned=tuned))
    for number, batch, length, full, causal in (
        (431, 64, 512, 330.9, 511.7),
        (434, 16, 1024, 249.9, 318.9),
        (437, 1, 4096, 201.8, 159.3),
        (442, 4, 4096, 824.4, 557.9),
        (447, 1, 16384, 2845.0, 1568.4),
        (454, 1, 32768, 12151.0, 6353.5),
    ):
        for at, variant, us in ((number, "full", full), (number + 1, "causal", causal)):
            sizes = (batch, FMHA_HEADS, length, 128, variant == "causal")
            row = Row(at, f"FlashInfer FMHA B{batch} S{length}", variant, 0.0, "fmha", sizes)
            rows.append(replace(row, tflops=round(row.flop / us / 1e6, 1)))
    for number, m, n, k, us in FP4_ROWS:
        row = Row(number, f"FlashInfer NVFP4 GEMM M{m} N{n} K{k}", "its heuristic", 0.0, "fp4", (m, n, k))
        rows.append(replace(row, tflops=round(row.flop / us / 1e6, 1)))
    for number, length, rate in ((359, 2048, 800), (363, 4096, 1013), (367, 8192, 1178), (371, 16384, 1240)):
        sizes = (128, 128, length, 576, False)
        rows.append(Row(number, f"latent decode S{length}", "", rate, "latent", sizes))
    return rows


ROWS = _rows()


@contextmanager
def tuned(values: dict):
    """A context in which flash-attn-4 has these constants."""
    from flash_attn.cute import config, flash_fwd_sm100, utils

    tables = (config.SM100_TUNING, flash_fwd_sm100._TUNING_CONFIG)
    before = utils._fa_disable_2cta_enabled, [dict(table) for table in tables]
    if "two_ctas" in values:
        utils._fa_disable_2cta_enabled = not values["two_ctas"]
    frequency = values.get("ex2_emu_freq")
    for table in tables:
        for key, entry in table.items():
            if frequency is not None and "ex2_emu_freq" in entry:
                table[key] = {**entry, "ex2_emu_freq": frequency}
    try:
        yield
    finally:
        utils._fa_disable_2cta_enabled, contents = before
        for table, entries in zip(tables, contents, strict=True):
            table.update(entries)


def call(row: Row):
    """The prepared call of a row."""
    import torch

    if row.what == "fp4":
        return fp4_call(*row.sizes)
    batch, heads, length, dim, causal = row.sizes
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int):
        return torch.randn(shape, generator=generator, dtype=torch.bfloat16).cuda()

    if row.what == "fmha":
        return fmha_call(row, randn)
    from flash_attn.cute import flash_attn_func

    if row.what == "latent":
        q, qv = randn(batch, 1, heads, 64), randn(batch, 1, heads, 512)
        k, v = randn(batch, length, 1, 64), randn(batch, length, 1, 512)
        return lambda: flash_attn_func(q, k, v, qv=qv)
    q, k, v = (randn(batch, length, heads, dim) for _ in "qkv")
    if row.what == "forward":
        return lambda: flash_attn_func(q, k, v, causal=causal)
    q, k, v = (one.requires_grad_() for one in (q, k, v))
    o = flash_attn_func(q, k, v, causal=causal)
    o = o[0] if isinstance(o, tuple) else o
    do = randn(*o.shape)
    return lambda: torch.autograd.grad(o, (q, k, v), do)


def fmha_call(row: Row, randn):
    """FlashInfer's call of packed requests, as its wrapper makes it. randn: of a shape."""
    import torch
    from cutlass import Int32
    from fmha.compile import compile_cute_dsl_fmha_kernel

    batch, heads, length, dim, causal = row.sizes
    tokens, heads_kv = batch * length, FMHA_HEADS_KV
    q = randn(1, tokens, heads_kv, heads // heads_kv, dim)
    k, v = (randn(1, tokens, heads_kv, 1, dim) for _ in "kv")
    o, starts = torch.empty_like(q), (torch.arange(batch + 1, dtype=torch.int32) * length).cuda()
    no_features = (False, False, False, False)  # lse, sinks, skipped softmax, PDL
    compiled = compile_cute_dsl_fmha_kernel(
        q.dtype, v.dtype, o.dtype, heads, heads_kv, dim, dim, causal, *no_features, q.device
    )
    sizes = (batch, length, tokens, length, heads, heads_kv, dim, dim)
    scales = (math.log2(math.e) / math.sqrt(dim), 1 / math.sqrt(dim), 1.0)
    window = (None, Int32(0) if causal else None)
    return lambda: compiled(
        q, k, v, o, sizes, starts, starts, None, None, *scales, None, *window, None, None, False
    )


def fp4_call(m: int, n: int, k: int):
    """FlashInfer's GEMM of NVFP4 by CuTe DSL, out [m, n] bf16, with the tile that its heuristic takes on a B200."""
    import cutlass
    import torch
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_ptr

    utils = types.ModuleType("flashinfer.utils")  # all that the heuristic takes of the package
    utils.next_positive_power_of_2 = lambda x: 1 << (x - 1).bit_length()
    sys.modules |= {"flashinfer": types.ModuleType("flashinfer"), "flashinfer.utils": utils}
    from kernels.dense_blockscaled_gemm_sm100 import Sm100BlockScaledPersistentDenseGemmKernel
    from kernels.utils import _select_sm100_mm_fp4_cute_dsl_tactic

    sms = chip("b200").sms
    tactic = _select_sm100_mm_fp4_cute_dsl_tactic(m, n, k, sms, NVFP4_BLOCK)
    tile, cluster, swapped, prefetch, *_ = tactic
    print(
        f"M{m} N{n} K{k}: tile {tile}, cluster {cluster}, swapped {swapped}, prefetch {prefetch}", flush=True
    )
    rows, columns = (n, m) if swapped else (m, n)
    sizes = [-(-rows // 128), -(-columns // 128), -(-(k // NVFP4_BLOCK) // 4)]
    symbols = [cute.sym_int() for _ in range(3)]
    a_type, b_type = (
        make_fake_compact_tensor(cutlass.Uint8, (s, symbols[2]), stride_order=(1, 0), assumed_align=32)
        for s in symbols[:2]
    )
    order = (0, 1) if swapped else (1, 0)
    c_type = make_fake_compact_tensor(
        cutlass.BFloat16, tuple(symbols[:2]), stride_order=order, assumed_align=16
    )
    scales = [make_ptr(cutlass.Float8E4M3FN, 16, cute.AddressSpace.gmem, 16) for _ in "ab"]
    factor = make_fake_compact_tensor(cutlass.Float32, (1,), assumed_align=4)
    kernel = Sm100BlockScaledPersistentDenseGemmKernel(NVFP4_BLOCK, tile, cluster, prefetch, False)
    stream, clusters = make_fake_stream(use_tvm_ffi_env_stream=True), sms // math.prod(cluster)
    compiled = cute.compile(
        kernel.wrapper, a_type, b_type, c_type, *sizes, 1, *scales, factor, clusters, stream, swapped,
        options="--opt-level 2 --enable-tvm-ffi",
    )  # fmt: skip
    a, b = (torch.zeros(count, k // 2, dtype=torch.uint8).cuda() for count in (rows, columns))
    out = torch.empty(rows * columns, dtype=torch.bfloat16).cuda()
    out = out.as_strided((rows, columns), (1, rows) if swapped else (columns, 1))
    sfa, sfb = (torch.zeros(count * sizes[2] * 512, dtype=torch.uint8).cuda() for count in sizes[:2])
    alpha = torch.ones(1).cuda()
    return lambda: compiled(a, b, out, *sizes, sfa.data_ptr(), sfb.data_ptr(), alpha)


def path_of(row: Row, folder: Path) -> Path:
    return folder / f"{row.name}.xz"


def record(row: Row, folder: Path, sample: int) -> None:
    began = time.monotonic()
    with tuned(row.tuned) if row.tuned else nullcontext(), sim.intercept("sm_100a"), sim.recording(sample):
        function = call(row)
        with captured() as traces:
            function()
    save(traces, path_of(row, folder))
    kernels = [(trace.kernel, trace.grid, len(trace.ctas)) for trace in traces]
    print(f"{row.name}: {kernels} {time.monotonic() - began:.0f} s", flush=True)


def predict(row: Row, folder: Path) -> dict:
    """The row with its prediction, which is of all kernels of the call together.

    GEMMs of NVFP4 are timed with their tensors in L2 (one of 66 MB took less than HBM needs for them) and without the
    launch that ncu counts; the interval reaches to the time with it.
    """
    of = chip("b200").at(row.ghz or UNKNOWN)
    hot = row.what == "fp4"
    found = clocks_of(load(path_of(row, folder)), of, cold=not hot).launches
    clocks, low, high = (sum(getattr(one, name) for one in found) for name in ("clocks", "low", "high"))
    if hot:
        clocks, low = (one - len(found) * of.clocks("launch") for one in (clocks, low))
    doubt = 0.0 if row.ghz else DOUBT
    print(
        f"{row.name}: {row.tflops} published, {row.flop / clocks * of.ghz / 1000:.0f} predicted", flush=True
    )
    return {
        "number": row.number,
        "gpu": "B200",
        "case": row.case,
        "variant": row.variant,
        "tflops": row.tflops,
        "ghz": of.ghz,
        "known_clock": row.ghz is not None,
        "flop": row.flop,
        "clocks": round(clocks),
        "low": round(low * (1 - doubt)),
        "high": round(high * (1 + doubt)),
        "binds": max(found, key=lambda one: one.clocks).binding.split(" ")[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="of traces")
    parser.add_argument("--only", default="", help="rows whose name has one of TEXT|TEXT...")
    parser.add_argument("--sample", type=int, default=SAMPLE, help="clusters of each kernel")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--predict", type=Path, metavar="OUT.json")
    parser.add_argument("--flashinfer", type=Path, metavar="CHECKOUT")
    options = parser.parse_args()
    if options.flashinfer:
        sys.path[:0] = [str(options.flashinfer / folder) for folder in (FMHA_FOLDER, GEMM_FOLDER)]
    rows = [row for row in ROWS if any(text in row.name for text in options.only.split("|"))]
    if options.predict:
        answers = [predict(row, options.folder) for row in rows if path_of(row, options.folder).exists()]
        options.predict.write_text(json.dumps(answers, indent=1))
        return
    missing = [row for row in rows if not path_of(row, options.folder).exists()]
    if options.flashinfer is None:
        missing = [row for row in missing if row.what not in ("fmha", "fp4")]
    if options.workers == 1:
        for row in missing:
            record(row, options.folder, options.sample)
        return
    script = [sys.executable, __file__, str(options.folder), "--sample", str(options.sample)]
    script += ["--flashinfer", str(options.flashinfer)] if options.flashinfer else []
    waiting, running = list(missing), []
    while waiting or running:
        running = [one for one in running if one.poll() is None]
        while waiting and len(running) < options.workers:
            running.append(subprocess.Popen([*script, "--only", waiting.pop(0).name]))
        time.sleep(0.2)


if __name__ == "__main__":
    main()
