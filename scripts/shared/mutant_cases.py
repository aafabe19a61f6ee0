"""The kernels whose mutants `scripts/mutate.py` scores: each a call at a small size that makes them work.

An input that lets an ordering instruction do its work has several tiles a CTA, rings that are filled again, parts that
nobody sees. A case may call several times: a mutant that one of the calls finds is found.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from warpspec.common.launch import SIMULATED, simulating
from warpspec.fmha import attention

TESTS = Path(__file__).resolve().parent.parent.parent / "tests"
sys.path[:0] = [str(TESTS / name) for name in (".", "fmha", "latent", "latent/indexer", "moe", "softmax")]


@contextlib.contextmanager
def few_sms(arch: str, sms: int | None = 1) -> Iterator[None]:
    """Simulate a GPU of few SMs, so that a CTA has several tiles, each of one row group, as few tiles have on a whole
    GPU."""
    from helpers.simulate import choosing

    with simulating(arch, sm_count=sms), choosing(wanted=lambda one: one.tiling.row_groups == 1):
        yield


def _attention(arch: str, sms: int | None = None, **shape) -> Callable[[], None]:
    """sms: SMs that it is planned for; few of them, and a CTA has several tiles."""

    def run() -> None:
        torch.manual_seed(0)
        batch, sq, sk, heads, dim = (shape[n] for n in ("batch", "sq", "sk", "heads", "dim"))
        q = torch.randn(batch, sq, heads, dim).bfloat16()
        k, v = (torch.randn(batch, sk, 1, dim).bfloat16() for _ in range(2))
        k *= torch.linspace(4, 0.1, sk).bfloat16()[:, None, None]  # maxima rise: O is rescaled
        options = {name: value for name, value in shape.items() if name in ("causal", "window", "num_splits")}
        if "lengths" in shape:
            options["kv_lengths"] = torch.tensor(shape["lengths"], dtype=torch.int32)
        with few_sms(arch, sms):
            attention(q, k, None if shape.get("latent") else v, **options, backend="sim")

    return run


def _latent() -> None:
    """Batch rows of several KV tiles; ones of a single tile, of either consumer, with more after them."""
    for lengths in ((300, 170), (40, 100, 40)):
        shape = CAUSAL | dict(batch=len(lengths), sq=70, sk=300, lengths=lengths)
        _attention("sm_90a", 1, **shape, dim=512, latent=True)()


def _dim512() -> None:
    """First KV tiles with keys that nobody sees, where clearing their values waits for V; then ones without such keys,
    of either consumer."""
    for shape in (CAUSAL, CAUSAL | dict(batch=1, sq=192, sk=224, lengths=(224,))):
        _attention("sm_90a", 1, **shape, dim=512)()


def _quantised(arch: str, name: str) -> Callable[[], None]:
    """Keys in codes, so many that every ring is filled again. name: "e4m3" or "nvfp4"."""

    def run() -> None:
        from helpers.float8_cases import NVFP4, Case

        float8 = NVFP4 if name == "nvfp4" else torch.float8_e4m3fn
        case = Case(20, 480, (1, 1), 64, lengths=(470,), window=(460, None), float8=float8, splits=1)
        with simulating(arch):
            attention(**case.arguments(), backend="sim")

    return run


def _bias(arch: str) -> Callable[[], None]:
    def run() -> None:
        generator = torch.Generator().manual_seed(0)
        q, k, v, bias = (
            torch.randn(*shape, generator=generator).bfloat16()
            for shape in ((1, 140, 2, 64), (1, 520, 1, 64), (1, 520, 1, 64), (1, 2, 140, 520))
        )
        with simulating(arch, sm_count=1):
            attention(q, k, v, bias=bias, num_splits=1, backend="sim")

    return run


def _pages(arch: str) -> Callable[[], None]:
    def run() -> None:
        from test_paged_sim import inputs

        options = dict(seq_q=70, heads_q=2, head_dim=128, causal=True)
        _, arguments = inputs((300, 170), 16, **options)
        with few_sms(arch):
            attention(**arguments, backend="sim")

    return run


def _masked(arch: str, kind: str) -> Callable[[], None]:
    """A tree of drafts, ranges or lists of blocks: several KV tiles with and without a mask, several M tiles a CTA."""

    def run() -> None:
        from helpers import block_cases, judged_calls, range_cases, tree_cases

        if kind == "tree":
            case = tree_cases.Case(
                "", 20, (300, 90), (4, 1), 128, page_size=64, options=(("window", (200, 0)),)
            )
            inputs = tree_cases.inputs_of(case)
        elif kind == "ranges":
            images = ((20, 180), (330, 399))
            case = range_cases.Case(
                "", (200, 200), (400, 250), images, (1, 1), 128, options=(("num_splits", 1),)
            )
            inputs = range_cases.inputs_of(case)
        else:
            options, parts = (("causal", True), ("num_splits", 1)), (0.2, 0.3, 0.5)
            lists = {"lists": (2, 1), "flex": kind == "patterns", "parts": parts}
            case = block_cases.Case("", 200, 900, (1, 1), 128, 2, **lists, options=options)
            inputs, _ = block_cases.inputs_of(case)
        with few_sms(arch):
            judged_calls.run(case, inputs, backend="sim")

    return run


def _gathered(arch: str, **options) -> Callable[[], None]:
    def run() -> None:
        from helpers.gathered_cases import random_case

        from warpspec.latent.gathered import gathered_attention

        case = random_case(6, 8, (130, 70), **{"num_splits": 1, **options})
        case.q.mul_(40)  # maxima rise: O is rescaled
        for token in (1, 3):  # one KV tile, of either consumer, with more after it
            case.key_sets[0].lengths[token], case.key_sets[1].lengths[token] = 10, 0
        with simulating(arch, sm_count=1):
            gathered_attention(case.q, case.key_sets, backend="sim", **case.options)

    return run


def _rows(lengths: tuple, queries: int, heads: int) -> tuple:
    """(q, rows in pages, their table, lengths) of MLA. Keys grow along a request, so that O is rescaled."""
    from helpers.page_layouts import paged

    generator, most = torch.Generator().manual_seed(0), max(lengths)
    q = torch.randn(len(lengths), queries, heads, 576, generator=generator).bfloat16()
    keys = torch.randn(len(lengths), most, 1, 576, generator=generator)
    keys *= torch.linspace(0.1, 3, most)[:, None, None]
    (pages,), table = paged((keys.bfloat16(),), lengths, 64)
    return q, pages[:, :, 0], table, torch.tensor(lengths, dtype=torch.int32)


def _codes() -> None:
    """Pieces of two tiles a CTA, three of one tile; then as many keys in fewer CTAs."""
    from test_latent_sim import codes_of

    from warpspec.latent import mla_decode
    from warpspec.latent.gathered import launch

    q, pages, *call = _rows((1500, 190, 0, 650, 330), queries=2, heads=8)
    for sms in (5, 2):
        with (
            mock.patch.object(launch, "make_plan", launch.make_plan.__wrapped__),  # remembers nothing
            mock.patch.object(launch, "takes_line", lambda *_: True),
            simulating("sm_90a", sm_count=sms),
        ):
            mla_decode(q, codes_of(pages), *call, scale=0.06, kv_scale=torch.tensor(0.7), backend="sim")


def _cut() -> None:
    """Three pieces of a tile, and so many of another that CTAs share out the columns. A CTA's patience lasts for tiles
    that four of them end at about the same time, and not for more. Then short tiles of either consumer, and ones that
    fill all rings again and again."""
    from helpers.simulate import cutting_by_length

    from warpspec.common import kernel_cache
    from warpspec.fmha.sm90 import add_up
    from warpspec.latent import mla_decode

    unequal = (700, 30, 60, 100, 70, 640, 190, 40, 20, 50, 0, 110, 260)
    for lengths, sms in (((1700, 600), 10), ((1000,), 5), (unequal, 2)):
        with (
            mock.patch.object(add_up, "PATIENCE", 1500),
            mock.patch.object(kernel_cache, "SOURCES", "little patience"),
            cutting_by_length(),
            simulating("sm_90a", sm_count=sms),
        ):
            mla_decode(*_rows(lengths, queries=4, heads=16), scale=0.06, backend="sim")


def _quantize_output() -> None:
    from warpspec.latent.projection import quantize_output

    with simulating("sm_90a"):
        quantize_output(torch.randn(3, 7, 512).bfloat16(), backend="sim")


def _insert(arch: str) -> Callable[[], None]:
    """Queries and keys into rows; rows into a pool."""

    def run() -> None:
        from warpspec.latent.cache import IndexPool, LatentPool, insert_window, rope_table, store_rows

        torch.manual_seed(0)
        table = rope_table(1e4 ** (-torch.arange(32) / 32), 512)
        q, kv = torch.randn(5, 3, 512).bfloat16(), torch.randn(5, 512).bfloat16()
        positions, slots = (
            torch.tensor(x, dtype=torch.int32) for x in ((0, 7, 511, 30, 31), (4, -1, 9, 8, 0))
        )
        pool = LatentPool.empty(2, 5, "v4-fp8")
        with simulating(arch):
            weight = torch.rand(512).bfloat16()
            insert_window(q, kv, table, positions, pool=pool, weight=weight, slots=slots, backend="sim")
            for kind, name, dim in ((LatentPool, "v4-fp8", 512), (IndexPool, "mxfp4", 128)):
                store_rows(torch.randn(5, dim).bfloat16(), kind.empty(2, 5, name), slots, backend="sim")

    return run


def _compress(kind: str, arch: str) -> Callable[[], None]:
    def run() -> None:
        from helpers.cache_cases import Compressor, Run, grow

        tokens = 26 if kind == "csa" else 260
        with simulating(arch):
            compressor = Compressor.random(kind, 2, tokens, dim=512)
            for count, way in ((tokens, "chunked"), (6, "tokens")):
                grow(Run.start(compressor, "v4-fp8", 3), count, way, backend="sim")

    return run


def _index_queries() -> None:
    from test_queries_scores import queries

    with simulating("sm_90a"):
        queries(backend="sim")


def _index(arch: str, sms: int, streams: bool = False) -> Callable[[], None]:
    """Scores; streams: and the selection, in one launch."""

    def run() -> None:
        from test_queries_scores import queries

        from warpspec.latent.cache import IndexPool
        from warpspec.latent.indexer import index_scores, select_entries

        asked = queries(heads=8)
        pool = IndexPool.empty(10, 64, "mxfp4")
        pool.write(torch.arange(pool.capacity), torch.randn(pool.capacity, 128).bfloat16())
        table = torch.randperm(10).view(2, 5).to(torch.int32)
        requests, lengths = (torch.tensor(x, dtype=torch.int32) for x in ((0, 1, 1), (311, 320, 200)))
        with simulating(arch, sm_count=sms):
            if streams:
                select_entries(asked, pool, table, requests, lengths, 40, workspace_bytes=0, backend="sim")
            else:
                index_scores(asked, pool, table, requests, lengths, backend="sim")

    return run


def _index_topk(length: int, k: int) -> Callable[[], None]:
    def run() -> None:
        from warpspec.latent.indexer import index_topk

        torch.manual_seed(0)
        with simulating("sm_90a"):
            index_topk(torch.randn(2, length), k, backend="sim")

    return run


def _swap_chain(arch: str) -> Callable[[], None]:
    """A chain of kernels, each of which begins as the one before ends."""

    def run() -> None:
        from helpers.swap_cases import make_plan, run, small

        x, state, weights = small(1, cores=9, d_ff=300)
        target = replace(SIMULATED[arch], sm_count=1)
        run(x, state, weights, dict(events=2, k_ffn=1, residual=False), make_plan(arch, ctas=2), target)

    return run


def _swap() -> None:
    from helpers.swap_cases import make_plan, run, small

    # Two clusters: phases wait for other clusters' counts. One, with more weights: rings are filled again and again.
    for ctas, d_ff in ((4, 8), (2, 300)):
        x, state, weights = small(1, cores=9, d_ff=d_ff)
        plan = make_plan("sm_90a", fused=True, ctas=ctas)
        run(x, state, weights, dict(events=2, k_ffn=1, residual=False), plan, SIMULATED["sm_90a"])


def _moe(shape: str, groups: int = 2, **epilogue) -> Callable[[], None]:
    def run() -> None:
        from helpers.gemm_cases import GemmCase, inputs_of, poisoned_out

        from warpspec.moe.sm100 import config, grouped_gemm

        tiles = {"single": config.SINGLE, "pair": config.PAIR, "swapped": config.SWAPPED[16]}[shape]
        sizes = dict(counts=(5, 0, 130, 1), k=600, width=264, dropped=3)
        case = GemmCase("", **sizes, **epilogue)
        inputs, out = inputs_of(case, 0), poisoned_out(case)
        options = dict(epilogue=case.epilogue, limit=case.limit, out_scale=inputs.out_scale)
        grouped_gemm(inputs.a, inputs.w, inputs.offsets, out, **options, shape=tiles, groups=groups, seed=0)

    return run


def _streamed_moe() -> None:
    from helpers.moe_cases import make_experts, randn

    from warpspec.moe import moe_ffn, route
    from warpspec.moe.sm90 import layer as moe_layer
    from warpspec.moe.sm90.config import Shape
    from warpspec.moe.sort import sort_choices

    layer = make_experts(5, 400, 120, biases=True)[0].for_backend("sm90")
    options = dict(activation="swiglu_oai", limit=1.0, backend="sim")
    tiles = Shape(row_groups=4, tokens=16, stages=4, ctas_per_sm=1, load_warps=4)
    # A tile a CTA; tiles one after another, of which some have no rows for a consumer, and choices of several warps.
    for tokens, sms in ((12, 132), (43, 1)):
        with (
            simulating("sm_90a", sm_count=sms),
            mock.patch.object(moe_layer, "choose_shape", lambda *_: tiles),
        ):
            x = randn(tokens, 400, seed=7).bfloat16()
            moe_ffn(x, layer, *route(randn(tokens, 5, seed=50), 3), **options)
    # The same sort of more choices than a warp counts at a time.
    ids = torch.randint(0, 5, (250, 3), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.randn(250, 400).bfloat16()
    sort_choices(ids, 5, widths=(16,), x=x, target=SIMULATED["sm_90a"])


def _sort() -> None:
    """Several groups of choices a warp; a list of work in two classes, tokens in the kernel's order."""
    from warpspec.moe.sort import sort_choices

    ids = torch.randint(-1, 9, (250, 3), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.randn(250, 72).bfloat16()
    sort_choices(ids, 10, shared=1, widths=(64, 16), x=x, target=SIMULATED["sm_90a"])


def _quantize_rows() -> None:
    from test_quantize_rows import check, random_case

    check(*random_case(9, 528, 3, 4), 4)


def _streamed_shape(shape: tuple, **options) -> Callable[[], None]:
    """Hopper's grouped GEMM of several consumers; few CTAs, so that rings are filled again."""

    def run() -> None:
        from helpers.moe_cases import make_experts, randn

        from warpspec.moe import sm90, streamed
        from warpspec.moe.sm90.config import Shape, StreamConfig

        w = make_experts(3, 160, 448)[0].for_backend("sm90").w2
        config = StreamConfig(shape=Shape(*shape, **options), block=w.block, early=True)
        most = min(config.widths)
        counts = (most, most - 3, 5)
        h = randn(sum(counts), w.k).bfloat16()
        work = torch.full((len(counts) + 2, 4), -1, dtype=torch.int32)
        work[0, : len(config.widths)] = torch.tensor([3] * len(config.widths))
        for i, count in enumerate(counts):
            work[i + 1, :3] = torch.tensor([i, sum(counts[:i]), count])
        out = torch.empty(sum(counts), w.n, dtype=torch.bfloat16)
        target = SIMULATED["sm_90a"]
        sm90.grouped_gemm(config, streamed.reorder(h), None, w, work, out, ctas=2, target=target, seed=1)

    return run


def _gradients(arch: str, dim: int, *inputs: tuple, **options) -> Callable[[], None]:
    """inputs: (queries, keys, causal) of each call. options: further ones of a case."""

    def run() -> None:
        from helpers.gradient_cases import Case
        from helpers.simulate import simulating_gradients

        with simulating_gradients(arch):
            for rows, keys, causal in inputs:
                case = Case("", seq_q=rows, seq_k=keys, head_dim=dim, causal=causal, **options)
                case.gradients(case.tensors(), backend="reference")

    return run


def _projection(arch: str) -> Callable[[], None]:
    def run() -> None:
        from helpers.projection_cases import case

        from warpspec.latent.projection import output_projection

        with simulating(arch, sm_count=1):
            output_projection(*case(70, 24, 2, 384, float8=arch == "sm_90a"), backend="sim")

    return run


def _softmax(name: str, arch: str) -> Callable[[], None]:
    def run() -> None:
        import test_softmax_sim as cases

        *_, vectors = cases.STRATEGIES[name]
        for shorten in (0, (vectors - 100) * 8):  # of short rows, two stand in a ring
            x, _, out = cases.case(name, torch.bfloat16, aligned=True, shorten=shorten)
            cases.run(name, x, out, arch)

    return run


def _softmax_once() -> None:
    import test_softmax_sim as cases

    config = cases.StagedConfig("float32", 64, 2, 2, False, 4, once=True)
    x = torch.randn(6, 4 * (96 * 2 - 8))
    cases.launch.run_sim(
        x, torch.empty_like(x), cases.SoftmaxPlan("staged", config, 0, 0, 0.0), SIMULATED["sm_90a"]
    )


def _topk(arch: str, **fields) -> Callable[[], None]:
    def run() -> None:
        import test_topk_sim as cases

        torch.manual_seed(0)
        length = 1000 if "held" in fields else 3000
        cases.run(cases.config_of(torch.float32, 4, **fields), torch.randn(3, length), 4, arch)

    return run


CAUSAL = dict(batch=2, sq=200, sk=500, heads=1, lengths=(500, 40), causal=True, num_splits=1)
FULL = dict(batch=2, sq=130, sk=700, heads=1, lengths=(700, 40), num_splits=1)
DECODE = dict(batch=2, sq=1, sk=900, heads=8, lengths=(900, 330), num_splits=2)
UNSEEN = ((330, 200, True), (256, 200, True))  # rows that see nothing; only keys that nobody sees
LISTED = (False, (1, 1), (0.1, 0.4, 0.5))  # lists of ``gradient_cases.Case``
KERNELS: dict[str, Callable[[], None]] = {
    "fmha-sm100": _attention("sm_100a", **CAUSAL, window=(250, 0), dim=128),
    "fmha-sm100-d64": _attention("sm_100a", **FULL, dim=64),
    "fmha-sm100-d256": _attention("sm_100a", **CAUSAL, dim=256),
    "fmha-sm100-d512": _attention("sm_100a", **CAUSAL, dim=512),
    "fmha-sm100-latent": _attention("sm_100a", **CAUSAL, dim=512, latent=True),
    "fmha-sm100-decode": _attention("sm_100a", **DECODE, dim=128),
    "fmha-sm100-e4m3": _quantised("sm_100a", "e4m3"),
    "fmha-sm100-nvfp4": _quantised("sm_100a", "nvfp4"),
    "fmha-sm90": _attention("sm_90a", 1, **CAUSAL, window=(250, 0), dim=128),
    "fmha-sm90-d64": _attention("sm_90a", 1, **FULL, dim=64),
    "fmha-sm90-d256": _attention("sm_90a", 1, **CAUSAL, dim=256),
    "fmha-sm90-d512": _dim512,
    "fmha-sm90-latent": _latent,
    "fmha-sm90-decode": _attention("sm_90a", 1, **DECODE, dim=128),
    "fmha-sm100-bias": _bias("sm_100a"),
    "fmha-sm90-bias": _bias("sm_90a"),
    "fmha-sm100-pages": _pages("sm_100a"),
    "fmha-sm90-pages": _pages("sm_90a"),
    **{
        f"fmha-{arch[:2]}{arch[3:-1]}-{kind}": _masked(arch, kind)
        for arch in ("sm_100a", "sm_90a")
        for kind in ("tree", "ranges", "lists", "patterns")
    },
    "gathered": _gathered("sm_90a"),
    "gathered-splits": _gathered("sm_90a", num_splits=2),
    "gathered-sm100": _gathered("sm_100a"),
    "gathered-sm100-splits": _gathered("sm_100a", num_splits=2),
    "mla-codes": _codes,
    "mla-cut": _cut,
    "quantize-output": _quantize_output,
    "cache-insert": _insert("sm_90a"),
    "cache-csa": _compress("csa", "sm_90a"),
    "cache-hca": _compress("hca", "sm_90a"),
    "index-queries": _index_queries,
    "index-scores-sm90": _index("sm_90a", 1),
    "index-scores-sm100": _index("sm_100a", 1),
    "index-stream": _index("sm_90a", 2, streams=True),
    "index-topk": _index_topk(4000, 512),
    "index-topk-splits": _index_topk(70000, 512),
    "swap": _swap,
    "swap-chain-sm90": _swap_chain("sm_90a"),
    "swap-chain-sm100": _swap_chain("sm_100a"),
    "gradients-sm90": _gradients("sm_90a", 128, *UNSEEN),
    "gradients-sm100": _gradients("sm_100a", 128, *UNSEEN),
    "gradients-sm90-whole": _gradients("sm_90a", 128, (256, 256, False)),
    "gradients-sm100-whole": _gradients("sm_100a", 128, (256, 256, False)),
    "gradients-sm90-lists": _gradients("sm_90a", 128, (520, 300, True), blocks=LISTED),
    "gradients-sm100-lists": _gradients("sm_100a", 128, (520, 300, True), blocks=LISTED),
    "projection-sm90": _projection("sm_90a"),
    "projection-sm100": _projection("sm_100a"),
    "moe-sm90": _streamed_moe,
    "moe-single": _moe("single", 1, epilogue="linear"),
    "moe-single-nvfp4": _moe("single", epilogue="swiglu", limit=3.0, out="nvfp4"),
    "moe-pair": _moe("pair", epilogue="swiglu"),
    "moe-swapped": _moe("swapped", epilogue="swiglu"),
    "moe-sm90-splits": _streamed_shape((1, 8, 3, 2), splits=2),
    "moe-sm90-tall": _streamed_shape((4, 64, 2, 1, 4), tall=2, steps=1),
    "moe-sort": _sort,
    "moe-quantize": _quantize_rows,
    "softmax-resident": _softmax("resident", "sm_90a"),
    "softmax-split": _softmax("split", "sm_90a"),
    "softmax-staged": _softmax("staged cluster", "sm_90a"),
    "softmax-two-pass": _softmax("two-pass cluster", "sm_90a"),
    "softmax-cluster": _softmax("cluster", "sm_90a"),
    "softmax-once": _softmax_once,
    "topk-warp": _topk("sm_90a", rows=4, warps=1, unroll=2),
    "topk-again": _topk("sm_90a", again=True, warps=4, cluster=2, unroll=2),
    "topk-held": _topk("sm_90a", held=True, warps=4, unroll=2),
    "topk": _topk("sm_90a", warps=4, unroll=2),
    "topk-cluster": _topk("sm_90a", warps=2, cluster=4, unroll=1),
}
