"""The order in which CTAs take packed query tiles from a queue, as the device finds it, against a sorted list."""

import itertools
import random
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32
from cutlass.cute.runtime import make_fake_stream

from warpspec import sim
from warpspec.common.compile import compile_cached, fake_rows
from warpspec.common.hardware import WARP_THREADS
from warpspec.fmha.device.longest import nth_longest, order_of
from warpspec.fmha.features import RequestLayout
from warpspec.fmha.operands import Operands
from warpspec.fmha.schedule import SORTED_REQUESTS

QUERIES = 8  # of a query tile
CONFIG = SimpleNamespace(
    rows=SimpleNamespace(queries=QUERIES), requests=RequestLayout(packed_q=True, packed_k=True)
)


class Ranks:
    """Writes (request, query tile) of every rank into out [RANK, 2]; in its last row (whether tiles are sorted, their
    number)."""

    @cute.jit
    def __call__(self, q, k, cu_seqlens_q, cu_seqlens_k, out, stream: CUstream):
        self.kernel(q, k, cu_seqlens_q, cu_seqlens_k, out).launch(
            grid=(1, 1, 1), block=(WARP_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, q, k, cu_seqlens_q, cu_seqlens_k, out):
        operands = Operands(q, k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        words = cute.make_tensor(
            cute.arch.alloc_smem(Int32, SORTED_REQUESTS), cute.make_layout(SORTED_REQUESTS)
        )
        order = order_of(CONFIG, operands, words)
        last = out.shape[0] - 1
        if order.sorts:
            for rank in cutlass.range(cutlass.min(order.tiles, last), unroll=1):
                found = nth_longest(order, rank)
                out[rank, 0], out[rank, 1] = found
        out[last, 0], out[last, 1] = Int32(order.sorts), order.tiles


def ranks(queries, keys):
    """(whether tiles are sorted, [(request, query tile)]) as the device says."""

    def build():
        rows, integers = fake_rows(cutlass.BFloat16, 4), fake_rows(Int32, 1)
        return Ranks(), rows, rows, integers, integers, fake_rows(Int32, 2, 2), make_fake_stream()

    starts = [
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys)
    ]
    q, k = (torch.empty(1, max(sum(lengths), 1), 1, 8, dtype=torch.bfloat16) for lengths in (queries, keys))
    tiles = sum(-(-n // QUERIES) for n in queries)
    out = torch.full((tiles + 1, 2), -1, dtype=torch.int32)
    sim.run(compile_cached("ranks of query tiles", build, arch="sm_90a"), q, k, *starts, out, None)
    assert out[-1].tolist() in ([1, tiles], [0, out[-1, 1]])
    return bool(out[-1, 0]), [tuple(row) for row in out[:-1].tolist()]


def longest_first(queries, keys):
    """Query tiles by the keys up to their last query in tiles' queries, the longest first, then by request."""
    found = []
    for request, (count, length) in enumerate(zip(queries, keys, strict=True)):
        tiles = -(-count // QUERIES)
        top = max(-(-length // QUERIES), tiles)
        found += [(top - (tiles - 1 - tile), request, tile) for tile in range(tiles)]
    return [(request, tile) for _, request, tile in sorted(found, key=lambda one: (-one[0], one[1]))]


@pytest.mark.parametrize("requests", [1, 2, 31, 33, SORTED_REQUESTS])
def test_the_longest_tile_comes_first(requests):
    draw = random.Random(requests)
    for most in (1, 90):
        queries = [draw.choice((0, 1, QUERIES, draw.randint(1, most))) for _ in range(requests)]
        keys = [draw.choice((0, n, n + draw.randint(0, 500), n // 2)) for n in queries]
        if not sum(queries):
            queries[-1] = 1
        assert ranks(queries, keys) == (True, longest_first(queries, keys))


@pytest.mark.parametrize(
    ("queries", "keys"), [([1] * (SORTED_REQUESTS + 1), [9] * (SORTED_REQUESTS + 1)), ([3], [1 << 20])]
)
def test_too_many_or_too_long_requests_are_not_sorted(queries, keys):
    assert ranks(queries, keys)[0] is False
