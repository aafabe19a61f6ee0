"""The tiles in which a streamed row is read, and the shared memory of the CTAs that read it. Device side."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint64

from warpspec.common.hardware import FP32_BYTES, VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.topk.config import CHUNKS, SAMPLES, TopkConfig
from warpspec.softmax.vectors import PLAIN, RowSpan, load_vector


@dataclass(frozen=True)
class TopkStorage:
    """Shared memory of a CTA: R rows, W warps a row, C CTAs a cluster, K capacity for k.

    ``bound`` exists if candidates are picked while rows stream; ``chunks``, and in a cluster ``cluster_samples``, if
    they are fetched again.
    """

    candidates: cute.Tensor  # (CANDIDATE, W * R) candidates of a warp
    ranked: cute.Tensor  # (K, R) candidates of the row, in order
    chunks: cute.Tensor | None  # (CHUNKS * WARP_THREADS, W * R) maxima of what the lanes read
    samples: cute.Tensor  # (SAMPLES) keys of lanes' maxima, SAMPLES / W from every warp
    bound: cute.Tensor | None  # (1) key: a lower bound of the row's top k
    # (SAMPLES) SAMPLES / C from every CTA of the cluster, which writes them
    cluster_samples: cute.Tensor | None
    counts: cute.Tensor  # (W) candidates
    maxima: cute.Tensor  # (W) maximum of a warp's elements
    sums: cute.Tensor  # (W) their sum of exp(x - maximum)
    # In the leader, written by every CTA of the cluster:
    lists: cute.Tensor | None  # (LIST, C) a CTA's candidates
    list_counts: cute.Tensor | None  # (C)
    list_maxima: cute.Tensor | None  # (C)
    list_sums: cute.Tensor | None  # (C)


def allocate(config: TopkConfig) -> TopkStorage:
    allocator = cutlass.memory.SmemAllocator()

    def tensor(dtype, *shape, where=True):
        if not where:
            return None
        size = VECTOR_BYTES if dtype is Uint64 else FP32_BYTES
        return allocator.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=size)

    cluster, again, warps = config.cluster > 1, config.again, config.warps * config.rows
    return TopkStorage(
        candidates=tensor(Uint64, config.list_size, warps),
        ranked=tensor(Uint64, config.k_capacity, config.rows),
        lists=tensor(Uint64, config.cluster_list_size, config.cluster, where=cluster),
        chunks=tensor(Int32, CHUNKS * WARP_THREADS, warps, where=again),
        samples=tensor(Int32, SAMPLES),
        bound=tensor(Int32, 1, where=not again),
        cluster_samples=tensor(Int32, SAMPLES, where=again and cluster),
        counts=tensor(Int32, config.warps),
        maxima=tensor(Float32, config.warps),
        sums=tensor(Float32, config.warps),
        list_counts=tensor(Int32, config.cluster, where=cluster),
        list_maxima=tensor(Float32, config.cluster, where=cluster),
        list_sums=tensor(Float32, config.cluster, where=cluster),
    )


@cute.jit
def load_tile(config: cutlass.Constexpr, row: RowSpan, warp, lane, turn: Int32, words: cute.Tensor):
    """Load the lane's vectors of the row's ``turn``-th tile to words (WORDS, UNROLL), -inf past the row's end.

    warp: number among the row's warps, over the cluster.
    """
    span = config.lane_stride
    first = turn * config.tile_vectors + warp * WARP_THREADS + lane
    last = (turn + 1) * config.tile_vectors - span + (warp + 1) * WARP_THREADS  # end of this warp's vectors
    address = row.first + Int64(first) * VECTOR_BYTES
    if last <= row.vectors:
        for u in cutlass.range_constexpr(config.unroll):
            load_vector(words[None, u], address, u * span * VECTOR_BYTES, True, config.dtype, PLAIN)
    else:
        for u in cutlass.range_constexpr(config.unroll):
            present = Boolean(first + u * span < row.vectors)
            load_vector(words[None, u], address, u * span * VECTOR_BYTES, present, config.dtype, PLAIN)
