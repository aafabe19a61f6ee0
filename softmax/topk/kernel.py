"""Softmax + top-k of rows in one launch, on sm_90a and sm_100a: the host side, and the dispatch by kind of row.

Short rows are held in registers (``held``), the shortest are sorted (``sorted``). Longer ones are streamed by a warp,
the warps of a CTA or the CTAs of a cluster (``TopkConfig``); their candidates are picked meanwhile (``stream_rows``) or
fetched again afterwards (``again_rows``).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint64

from warpspec.common.hardware import FP32_BYTES, VECTOR_BYTES, WARP_THREADS
from warpspec.softmax.topk.again_rows import again_rows
from warpspec.softmax.topk.config import TopkConfig
from warpspec.softmax.topk.held import Group, hold, write_ranked
from warpspec.softmax.topk.sorted import row_sorted
from warpspec.softmax.topk.states import joint_state
from warpspec.softmax.topk.stream_rows import stream_rows
from warpspec.softmax.vectors import row_span


@dataclass(frozen=True)
class HeldShared:
    """Shared memory of a CTA that holds rows: R rows with W warps each (R or W is 1)."""

    candidates: cute.Tensor  # (CANDIDATE, W * R) candidates of a warp, or of the lanes that have a row
    counts: cute.Tensor  # (W * R) number of candidates
    maxima: cute.Tensor  # (W * R)
    sums: cute.Tensor  # (W * R)
    divisors: cute.Tensor  # (W * R)


def allocate_held(config: TopkConfig) -> HeldShared:
    allocator = cutlass.memory.SmemAllocator()
    groups = config.warps * config.rows
    candidates = cute.make_layout((config.list_size, groups))

    def numbers(dtype):
        return allocator.allocate_tensor(dtype, cute.make_layout(groups), byte_alignment=FP32_BYTES)

    return HeldShared(
        candidates=allocator.allocate_tensor(Uint64, candidates, byte_alignment=VECTOR_BYTES),
        counts=numbers(Int32),
        maxima=numbers(Float32),
        sums=numbers(Float32),
        divisors=numbers(Float32),
    )


class SoftmaxTopk:
    def __init__(self, config: TopkConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        probs: cute.Tensor,
        indices: cute.Tensor,
        stream: CUstream,
    ):
        """Host side. logits: (ROW, COLUMN), columns contiguous. probs, indices: (ROW, K), fp32 and int32."""
        config = self.config
        self.kernel(logits, probs, indices).launch(
            grid=(cute.ceil_div(logits.shape[0], config.rows) * config.cluster, 1, 1),
            block=(config.threads, 1, 1),
            cluster=(config.cluster, 1, 1) if cutlass.const_expr(config.cluster > 1) else None,
            smem=config.smem_bytes,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=config.smem_carveout_percent,
            stream=stream,
            use_pdl=config.dependent,
        )

    @cute.kernel
    def kernel(self, logits: cute.Tensor, probs: cute.Tensor, indices: cute.Tensor):
        config = self.config
        k = Int32(probs.shape[1])
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = thread % WARP_THREADS
        if cutlass.const_expr(config.dependent):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(config.held):
            # Lanes past the last row take part in shuffles: they read the last row and write nothing.
            row = block * config.rows + thread // (config.lanes * config.warps)
            place = row_span(logits, cutlass.min(row, logits.shape[0] - 1), config.dtype, config.edges)
            if cutlass.const_expr(config.sorts):
                row_sorted(config, place, thread % config.lanes, row, probs, indices)
            else:
                shared = allocate_held(config)
                first, number = lane // config.lanes * config.lanes, thread % (config.lanes * config.warps)
                candidates = shared.candidates[None, thread // config.lanes]
                group = Group(place, first, lane - first, number, k, candidates)
                row_held(config, group, shared, warp, probs, indices, row)
        elif cutlass.const_expr(config.again):
            again_rows(config, logits, probs, indices)
        else:
            stream_rows(config, logits, probs, indices)


@cute.jit
def row_held(config: cutlass.Constexpr, group: Group, shared: HeldShared, warp, probs, indices, row):
    maximum, sum_, count = hold(config, group)
    cute.arch.griddepcontrol_launch_dependents()
    others = [(group.candidates, count)]
    if cutlass.const_expr(config.warps > 1):
        if group.lane == 0:
            shared.counts[warp] = count
            shared.maxima[warp] = maximum
            shared.sums[warp] = sum_
        cute.arch.sync_threads()
        others = [(shared.candidates[None, w], shared.counts[w]) for w in range(config.warps)]
        maximum, sum_ = joint_state(shared.maxima, shared.sums, config.warps, config.accurate)
    write_ranked(config, group, count, others, maximum, sum_, shared.divisors, probs, indices, row)
