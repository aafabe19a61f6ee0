"""Attention on this machine's GPU against its peers: prints tables, writes a PNG.

    python scripts/bench_attention.py [--only prefill|heads|decode|paged|varlen|shared|mla|trees|blocks|block-gradients|
                                       ranges|host|backward|gradient-heads ...] [--markdown] [--png FILE]

Times are medians (gpu_bench). Peers run on the same tensors in the same process: flash-attn-4 where installed, torch's
SDPA on cuDNN for prefill and heads (other head sizes, soft caps), torch's SDPA for decode and for K and V in one
tensor, FlashMLA for mla, if the package sgl-flash-mla is there. A ratio is the peer's time over ours: above 1 we are
faster. varlen: packed requests, and others of different lengths, in CUDA graphs. trees: drafts of a tree, against
as many causal queries. blocks, block-gradients, ranges: lists of blocks and images' ranges, against FlexAttention
and flash-attn-4's lists with mask_mod. host: CPU time of a call from Python. backward: all gradients from o, lse
and dO, FLOPs counted as 2.5 forward passes; peers flash-attn-4's backward and torch's SDPA on cuDNN, with a bias
torch's efficient kernel (the bias's gradient among the results). gradient-heads: gradients of other head sizes,
against flash-attn-4 and SDPA.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from shared import (
    bench_shapes,
    block_rows,
    driver,
    gpu_bench,
    sweep_calls,
    sweep_draws,
    sweep_report,
    sweep_shapes,
)
from shared.attention_peers import FLASH, flash_attention, sdpa, sdpa_shared
from shared.attention_rows import BF16, WRONG, agree, columns, random, without_failing
from shared.gradient_rows import backward, gradient_heads
from shared.mla_peers import FLASH_MLA, dense_decode
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha import attention, tree_words
from warpspec.fmha.heads import LATENT
from warpspec.latent import mla_decode

FLASH_MLA_APART = (
    "FlashMLA, D 576 and 512, measured apart (H200, 2026-11-21): 128 heads B128 L1024 479, L4096 583 TFLOP/s; "
    "B1 L8192 30 us"
)
ROUNDED_PRODUCTS = 5e-2  # relative difference from FlashMLA's products of e4m3 queries and weights


def prefill() -> list[list]:
    rows = []
    flash = flash_attention()
    for batch, heads, length, d, causal, window in bench_shapes.PREFILL:
        q, k, v = (random(batch, length, heads, d) for _ in range(3))
        sink = torch.randn(heads, device="cuda") if window else None
        # The dtype it takes; converted before it is timed.
        peers_sink = sink if sink is None else sink.to(BF16)
        sides = (window - 1, 0) if window else None
        out = torch.empty_like(q)
        calls = {"warpspec": lambda q=q, k=k, v=v, causal=causal, sides=sides, sink=sink, out=out: attention(
            q, k, v, causal=causal, window=sides, sink=sink, out=out
        )}  # fmt: skip
        if not window:
            calls["cuDNN"] = lambda q=q, k=k, v=v, causal=causal: sdpa(
                q, k, v, backend=SDPBackend.CUDNN_ATTENTION, is_causal=causal
            )
            calls["warpspec"]()
            agree(f"prefill D {d}", out, calls["cuDNN"]())
        if flash is not None:
            calls["flash-attn-4"] = lambda q=q, k=k, v=v, causal=causal, sides=sides, sink=peers_sink: flash.dense(
                q, k, v, causal=causal, window_size=sides or (None, None), learnable_sink=sink
            )  # fmt: skip
        times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        pairs = length * window if window else length * length // (2 if causal else 1)
        flops = 4 * batch * heads * pairs * d
        kind = f"{'causal' if causal else 'full'}{f' window {window} sink' if window else ''}"
        name = f"B{batch} H{heads} S{length} D{d} {kind}"
        rows.append([name, *columns(times, flops * 1e-6, ("flash-attn-4", "cuDNN"))])
    return rows


def heads() -> list[list]:
    """Other head sizes and soft caps, causal. FLOPs are those of the true sizes; the last queries of one head are
    compared with the reference."""
    rows, flash = [], flash_attention()
    for batch, heads, length, d, d_v, cap in bench_shapes.HEADS:
        q, k = (random(batch, length, heads, d) for _ in range(2))
        v = random(batch, length, heads, d_v)
        scale = d**-0.5 if cap is None else 2 * cap * d**-0.5 / 3  # logits of up to three times the cap
        out = torch.full_like(q[..., :d_v], torch.nan).contiguous()
        calls = {"warpspec": lambda q=q, k=k, v=v, out=out, scale=scale, cap=cap: attention(
            q, k, v, causal=True, scale=scale, softcap=cap, out=out
        )}  # fmt: skip
        sizes = d if d == d_v else f"{d}/{d_v}"
        name = f"B{batch} H{heads} S{length} D{sizes}{'' if cap is None else f' cap {cap:g}'}"
        try:
            calls["warpspec"]()
        except (UnsupportedProblem, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            continue
        one = [t[:1, :, :1] for t in (q[:, -256:], k, v)]
        expected = attention(*one, causal=True, scale=scale, softcap=cap, backend="reference")
        agree(name, out[:1, -256:, :1], expected)
        if cap is None:
            calls["cuDNN"] = lambda q=q, k=k, v=v: sdpa(
                q, k, v, backend=SDPBackend.CUDNN_ATTENTION, is_causal=True
            )
        if flash is not None:
            calls["flash-attn-4"] = lambda q=q, k=k, v=v, scale=scale, cap=cap: flash.dense(
                q, k, v, causal=True, softmax_scale=scale, **({} if cap is None else {"softcap": cap})
            )
        times = gpu_bench.gpu_times(without_failing(calls), [()], **gpu_bench.SHORT_ROUNDS)
        flops = batch * heads * length * length * (d + d_v)
        rows.append([name, *columns(times, flops * 1e-6, ("flash-attn-4", "cuDNN"))])
    return rows


def decode_inputs(batch: int, keys: int, d: int):
    return random(batch, 1, 64, d), random(batch, keys, 8, d), random(batch, keys, 8, d)


def decode() -> list[list]:
    rows = []
    for batch, keys, d in bench_shapes.DECODE:
        q, k, v = decode_inputs(batch, keys, d)
        out = torch.empty_like(q)

        def ours(q=q, k=k, v=v, out=out):
            return attention(q, k, v, out=out)

        def torchs(q=q, k=k, v=v):
            return sdpa(q, k, v)

        ours()
        agree(f"decode B{batch} D{d}", out, torchs())
        times = {
            name: gpu_bench.graph_time(call, [()], calls=8)
            for name, call in (("warpspec", ours), ("SDPA", torchs))
        }
        bytes_read = 2 * k.numel() * k.element_size()
        rows.append([f"B{batch} L{keys} 64/8 heads D{d}", *columns(times, bytes_read * 1e-6, ("SDPA",))])
    return rows


def paged_inputs():
    """(name, q, k, v, causal): decoding, and prefill."""
    for batch, keys, d in bench_shapes.DECODE:
        if batch > 1:
            yield f"B{batch} L{keys} 64/8 heads D{d}", *decode_inputs(batch, keys, d), False
    for batch, length, d in bench_shapes.PAGED_PREFILL:
        q, k, v = (random(batch, length, heads, d) for heads in (32, 8, 8))
        yield f"B{batch} S{length} 32/8 heads D{d} causal", q, k, v, True


def paged() -> list[list]:
    """Through a page table in random order against dense keys."""
    rows = []
    for name, q, k, v, causal in paged_inputs():
        batch, keys = k.shape[:2]
        out = torch.empty_like(q)
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)

        def dense(q=q, k=k, v=v, causal=causal, out=out):
            return attention(q, k, v, causal=causal, out=out)

        calls, expected = {"dense": dense}, dense().clone()
        for size in bench_shapes.PAGES:
            pages = batch * keys // size
            order = torch.randperm(pages, device="cuda")
            stored = []
            for tensor in (k, v):
                stored.append(torch.empty(pages, size, *tensor.shape[2:], device="cuda", dtype=BF16))
                stored[-1][order] = tensor.view(pages, size, *tensor.shape[2:])
            options = {"kv_lengths": lengths, "page_table": order.view(batch, -1).int(), "causal": causal}

            def call(q=q, stored=stored, options=options, out=out):
                return attention(q, *stored, **options, out=out)

            out.fill_(torch.nan)
            call()
            agree(f"pages of {size}", out, expected)
            calls[size] = call
        if causal:
            times = gpu_bench.gpu_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        else:
            times = {key: gpu_bench.graph_time(call, [()], calls=8) for key, call in calls.items()}
        rows.append([name, times["dense"], *(times[size] / times["dense"] for size in bench_shapes.PAGES)])
    return rows


def varlen() -> list[list]:
    """Requests of different lengths, from the fixed table of bench_sweep.py."""
    rows, speeds = [], gpu_bench.measured_speeds()
    for shape in sweep_draws.cliffs():
        if not isinstance(shape, sweep_shapes.AttentionShape) or shape.form == "plain":
            continue
        sets = sweep_calls.input_sets(shape)
        calls = {sweep_calls.OURS: sweep_calls.ours(shape), **sweep_calls.peers(shape)}
        expected = calls[sweep_calls.OURS](*sets[0])
        for name, call in calls.items():
            agree(f"{name}, {shape.name}", expected, call(*sets[0]))
        times = gpu_bench.graph_times(calls, sets, **gpu_bench.SHORT_ROUNDS)
        result = sweep_report.result_of(shape, speeds) | {"times": times}
        cells = columns(times, shape.flops * 1e-6, (FLASH,))
        share = sweep_report.text(sweep_report.share(result), ".0%")
        rows.append([f"{shape.kind} {shape.name}", *cells, share])
    return rows


def shared() -> list[list]:
    """K and V one tensor, against SDPA that sees the heads as queries: nothing here is causal."""
    rows = []
    for batch, heads, queries, keys in bench_shapes.SHARED:
        dim = bench_shapes.SHARED_DIM
        q, kv = random(batch, queries, heads, dim), random(batch, keys, 1, dim)
        out = torch.full_like(q, torch.nan)

        def ours(q=q, kv=kv, out=out):
            return attention(q, kv, out=out)

        def torchs(q=q, kv=kv):
            return sdpa_shared(q, kv)

        ours()
        few = (q[:1, :, :2], kv[:1])
        agree(f"shared B{batch} L{keys}", out[:1, :, :2], attention(*few, backend="reference"))
        times = {}
        for name, call in (("warpspec", ours), ("SDPA", torchs)):
            try:
                times[name] = gpu_bench.graph_time(call, [()], calls=4, replays=10)
            except RuntimeError as error:  # a peer that has no kernel for D 512, or no memory
                if name == "warpspec":
                    raise
                print(f"SDPA: {str(error).splitlines()[0]}")
        flops = 4 * batch * heads * queries * keys * dim
        name = f"B{batch} L{keys} {heads}/1 heads Sq{queries}"
        rows.append([name, *columns(times, flops * 1e-6, ("SDPA",))])
    return rows


def trees(copy: float) -> list[list]:
    """Trees of drafts over pages in random order, against causal queries of the same call. copy: TB/s."""
    rows, page = [], 64
    for batch, drafts, keys, d, window in bench_shapes.TREES:
        q = random(batch, drafts, 64, d)
        k, v = (random(batch * keys // page, page, 8, d) for _ in "kv")
        order = torch.randperm(len(k), device="cuda", dtype=torch.int32).view(batch, -1)
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        mask = torch.eye(drafts, dtype=torch.bool)
        for i in range(1, drafts):  # a tree of two branches a draft
            mask[i] |= mask[(i - 1) // 2]
        words = tree_words(mask.cuda()).repeat(batch, 1)
        options = dict(
            page_table=order,
            kv_lengths=lengths,
            causal=True,
            window=window and (window - 1, 0),
            out=torch.empty_like(q),
        )
        calls = {
            "warpspec": lambda q=q, k=k, v=v, words=words, options=options: attention(
                q, k, v, tree=words, **options
            ),
            "causal": lambda q=q, k=k, v=v, options=options: attention(q, k, v, **options),
        }
        times = gpu_bench.graph_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        seen = batch * (keys if window is None else min(keys, window + drafts))
        speed = 2 * seen * 8 * d * k.element_size() / times["warpspec"] * 1e-6
        name = (
            f"B{batch} L{keys} {drafts} drafts 64/8 heads D{d}{'' if window is None else f' window {window}'}"
        )
        rows.append(
            [
                name,
                times["warpspec"],
                times["causal"],
                times["warpspec"] / times["causal"],
                speed,
                speed / copy,
            ]
        )
    return rows


def mla(copy: float) -> list[list]:
    """MLA's decode over pages in random order, in turn with FlashMLA; SDPA on the same rows in order, all of a
    request's where lengths differ. copy: TB/s."""
    rows, page, (dim, values) = [], bench_shapes.MLA_PAGE, LATENT
    for batch, heads, queries, keys, ragged, kind in bench_shapes.MLA:
        q, kv = random(batch, queries, heads, dim), random(batch * keys // page, page, dim)
        order = torch.randperm(len(kv), device="cuda", dtype=torch.int32).view(batch, -1)
        lengths = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        if ragged:
            lengths = torch.randint(1, keys + 1, (batch,), device="cuda", dtype=torch.int32)
        stored = kv.to(torch.float8_e4m3fn) if kind == "e4m3" else kv
        scale, out = dim**-0.5, torch.full_like(q[..., :values], torch.nan).contiguous()
        # Without kv_scale a call makes one, and its graph would hold that launch.
        options = {"scale": scale, "kv_scale": torch.ones(1, device="cuda") if kind == "e4m3" else None}

        def ours(q=q, stored=stored, order=order, lengths=lengths, options=options, out=out):
            return mla_decode(q, stored, order, lengths, out=out, **options)

        ours()
        few = (q[-1:, :, -2:].contiguous(), stored, order[-1:], lengths[-1:])
        agree(f"mla B{batch} L{keys}", out[-1:, :, -2:], mla_decode(*few, **options, backend="reference"))
        calls = {"warpspec": ours}
        name = f"B{batch} L{'1..' if ragged else ''}{keys} {heads} heads Sq{queries} {kind}"
        peer = dense_decode(q, stored, order, lengths, scale)
        if peer is not None:
            agree(f"{FLASH_MLA}, {name}", peer(), out, WRONG if kind == "bf16" else ROUNDED_PRODUCTS)
            calls[FLASH_MLA] = peer
        times = gpu_bench.graph_times(calls, [()], **gpu_bench.SHORT_ROUNDS)
        if queries == 1 and kind == "bf16":
            dense = kv.view(batch, keys, 1, dim)
            try:
                call = functools.partial(sdpa_shared, q, dense, values, scale=scale)
                times["SDPA"] = gpu_bench.graph_time(call, [()], calls=2, replays=5)
            except RuntimeError as error:  # no kernel for these sizes, or no memory
                print(f"SDPA: {str(error).splitlines()[0]}")
        seen = int(lengths.sum())
        cells = columns(times, 2 * heads * queries * seen * (dim + values) * 1e-6, (FLASH_MLA, "SDPA"))
        speed = seen * dim * stored.element_size() / times["warpspec"] * 1e-6  # TB/s
        rows.append([name, *cells, speed, speed / copy])
    return rows


def host() -> list[list]:
    """Microseconds of a call from Python, the GPU not waited for: with so little to do that it is never behind."""
    q, k, v = random(4, 1, 64, 128), random(4, 256, 8, 128), random(4, 256, 8, 128)
    prompt = random(1, 64, 4, 128)
    out = torch.empty_like(prompt)
    heads_first = [t.transpose(1, 2) for t in (prompt, prompt, prompt)]
    pages = [t.view(16, 64, 8, 128) for t in (k, v)]
    table = torch.arange(16, device="cuda", dtype=torch.int32).view(4, 4)
    lengths = torch.full((4,), 256, device="cuda", dtype=torch.int32)
    calls = {
        "dense": lambda: attention(q, k, v, num_splits=1),
        "dense, split keys": lambda: attention(q, k, v, num_splits=2),
        "causal, out=": lambda: attention(prompt, prompt, prompt, causal=True, out=out),
        "paged": lambda: attention(q, *pages, kv_lengths=lengths, page_table=table, num_splits=1),
        "torch SDPA, causal": lambda: scaled_dot_product_attention(*heads_first, is_causal=True),
    }
    return [[name, gpu_bench.host_time(call, [()])] for name, call in calls.items()]


def plot(prefills: list[list], decodes: list[list], copy: float, path: str) -> None:
    """Bars of the prefill rates, and of decode's bandwidth against that of copying."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4), width_ratios=(1.2, 1))
    panels = (
        (left, prefills, "TFLOP/s", (("warpspec", 2), ("flash-attn-4", 3), ("cuDNN", 5))),
        (right, decodes, "TB/s", (("warpspec", 2), ("torch SDPA", 3))),
    )
    for axes, rows, unit, columns_ in panels:
        for i, (label, column) in enumerate(columns_):
            heights = [row[column] or 0 for row in rows]
            axes.barh([y + 0.27 * i for y in range(len(rows))], heights, height=0.25, label=label)
        axes.set_yticks([y + 0.2 for y in range(len(rows))], [row[0] for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(unit)
    right.axvline(copy, color="black", linestyle=":", label="copy")
    for axes in (left, right):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small", frameon=False)
    figure.suptitle(gpu_bench.header(("torch", "flash-attn-4")), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


copy_rate = functools.cache(gpu_bench.copy_bandwidth)  # TB/s, measured once a run


class Table(NamedTuple):
    """A part of the benchmark: its columns, what measures its rows, and what is printed before the table."""

    columns: list[str]
    rows: Callable[[argparse.Namespace], list[list]]
    before: Callable[[], str] = str


OF_FLASH_AND_CUDNN = ["us", "TFLOP/s", "flash-attn-4", "ratio", "cuDNN", "ratio"]
OF_FLASH_AND_FLEX = [FLASH, "ratio", "FlexAttention", "ratio"]
TABLES = {
    "prefill": Table(["prefill", *OF_FLASH_AND_CUDNN], lambda _: prefill()),
    "heads": Table(["heads", *OF_FLASH_AND_CUDNN], lambda _: heads()),
    "decode": Table(
        ["decode", "us", "TB/s", "SDPA", "ratio"],
        lambda _: decode(),
        lambda: f"copy {copy_rate():.2f} TB/s\n",
    ),
    "paged": Table(
        ["paged", "dense us", *(f"pages of {size}: times dense" for size in bench_shapes.PAGES)],
        lambda _: paged(),
    ),
    "varlen": Table(
        ["varlen", "us", "TFLOP/s", "flash-attn-4", "ratio", "share of the bytes' time"], lambda _: varlen()
    ),
    "shared": Table(
        ["D 512, K and V one tensor", "us", "TFLOP/s", "SDPA", "ratio"],
        lambda _: shared(),
        lambda: f"{FLASH_MLA_APART}\n",
    ),
    "mla": Table(
        [
            *("MLA, 576 and 512", "us", "TFLOP/s", FLASH_MLA, "ratio", "SDPA", "ratio", "TB/s"),
            "share of a copy's speed",
        ],
        lambda _: mla(copy_rate()),
    ),
    "trees": Table(
        ["trees", "us", "causal us", "times causal", "TB/s", "share of a copy's speed"],
        lambda _: trees(copy_rate()),
    ),
    "blocks": Table(
        ["blocks", "visited", "us", "TFLOP/s", *OF_FLASH_AND_FLEX, "times dense's share"],
        lambda _: block_rows.blocks(False),
    ),
    "block-gradients": Table(
        ["block-gradients", "visited", "us", "TFLOP/s", *OF_FLASH_AND_FLEX, "times dense's share"],
        lambda _: block_rows.blocks(True),
    ),
    "ranges": Table(
        ["ranges", "us", "TFLOP/s", *OF_FLASH_AND_FLEX, "times causal", "times lists"],
        lambda _: block_rows.ranges(),
    ),
    "host": Table(["CPU time of a call", "us"], lambda _: host()),
    "backward": Table(["backward", *OF_FLASH_AND_CUDNN, "torch efficient", "ratio"], lambda _: backward()),
    "gradient-heads": Table(
        ["gradients, causal", "us", "TFLOP/s", FLASH, "ratio", "SDPA", "ratio"],
        lambda options: gradient_heads(options.shapes, options.seconds, once=options.once),
    ),
}


def main() -> None:
    parser = driver.parser(__doc__, only=TABLES, markdown=True)
    parser.add_argument("--png", help="write the rates of prefill and decode as a picture")
    parser.add_argument(
        "--shapes", nargs="+", type=int, default=[], help="gradient-heads: indices of its shapes"
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="gradient-heads: begin no shape after this many"
    )
    parser.add_argument(
        "--once", action="store_true", help="gradient-heads: compile and compare, but do not time"
    )
    options = parser.parse_args()
    if options.png and not {"prefill", "decode"} <= set(options.only):
        parser.error("--png needs prefill and decode")
    driver.begin("flash-attn-4")
    rows = {}
    for name, table in TABLES.items():
        if name in options.only:
            measured = table.rows(options)
            rows[name] = driver.show(options, table.columns, measured, table.before())
    if options.png:
        plot(rows["prefill"], rows["decode"], copy_rate(), options.png)


if __name__ == "__main__":
    main()
