"""Cases of gathered attention, MLA's decode, latent caches and the indexer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch

from warpspec.common.launch import simulating


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


def _codes(q_codes: bool = False) -> None:
    """Pieces of two tiles a CTA, three of one tile; then as many keys in fewer CTAs. q_codes: Q is e4m3, too."""
    from helpers.latent_calls import codes_of

    from warpspec.latent import mla_decode
    from warpspec.latent.gathered import launch

    lengths = (900, 190, 0, 330, 70, 20, 130) if q_codes else (1500, 190, 0, 650, 330)
    q, pages, *call = _rows(lengths, queries=2, heads=8)
    options = {"scale": 0.06}
    if q_codes:
        q, options["q_scale"] = q.to(torch.float8_e4m3fn), torch.tensor(1.0)
    for sms in (5, 2):
        with (
            mock.patch.object(launch, "make_plan", launch.make_plan.__wrapped__),  # remembers nothing
            mock.patch.object(launch, "takes_line", lambda *_: True),
            simulating("sm_90a", sm_count=sms),
        ):
            mla_decode(q, codes_of(pages), *call, **options, kv_scale=torch.tensor(0.7), backend="sim")


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


def _projection(arch: str) -> Callable[[], None]:
    def run() -> None:
        from helpers.projection_cases import case

        from warpspec.latent.projection import output_projection

        with simulating(arch, sm_count=1):
            output_projection(*case(70, 24, 2, 384, float8=arch == "sm_90a"), backend="sim")

    return run


KERNELS: dict[str, Callable[[], None]] = {
    "gathered": _gathered("sm_90a"),
    "gathered-splits": _gathered("sm_90a", num_splits=2),
    "gathered-sm100": _gathered("sm_100a"),
    "gathered-sm100-splits": _gathered("sm_100a", num_splits=2),
    "mla-codes": _codes,
    "mla-q-codes": partial(_codes, q_codes=True),
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
    "projection-sm90": _projection("sm_90a"),
    "projection-sm100": _projection("sm_100a"),
}
