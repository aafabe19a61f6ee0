"""What a launch may do while the launch before it ends: fetch into L2 the small operands that describe requests.

Lengths, prefixes and page numbers are a few lines of memory each, which roles read one after another before they can
load anything, the sinks at the end. In a short call each of these reads would wait for memory by itself. The launch
before may still be writing them: a prefetch is no read, and L2 holds whatever is written later, too.
"""

from __future__ import annotations

from cutlass import Int64, cute

from warpspec.common.hardware import WARP_THREADS

LINE_BYTES = 128  # of L2
# Operands with one dimension, without gaps.
SMALL = ("kv_lengths", "q_start", "cu_seqlens_q", "cu_seqlens_k", "sink")
SCALES = ("k_scale", "v_scale")  # one number, or one for each head, or for each request and head


def wait_for_launch(config) -> None:
    """Wait for the end of the launch before, once its results are needed, if nobody has waited at the start."""
    if config.waits_late:
        cute.arch.griddepcontrol_wait()


def wait_unless_found(config) -> None:
    """``wait_for_launch`` for a role that is sent what it reads; where tiles are found by what memory holds, whoever
    finds them has waited."""
    if not config.finds_in_memory:
        wait_for_launch(config)


def prefetch_small(operands) -> None:
    """Prefetch the first lines of each small operand, one by each lane, and the first one of scales. Called by a whole
    warp."""
    for name in SMALL:
        tensor = getattr(operands, name)
        if tensor is not None:
            prefetch_lines(tensor)
    for name in SCALES:
        tensor = getattr(operands, name)
        if tensor is not None:
            prefetch_line(tensor.iterator.toint())


def prefetch_pages(config, operands, request) -> None:
    """Prefetch the first lines of the numbers of a request's pages, one by each lane. Called by a whole warp."""
    if config.requests.page_size:
        prefetch_lines(operands.page_table[request, None])


@cute.jit
def prefetch_table(table: cute.Tensor):
    """Prefetch this CTA's share of a page table's first lines, one by each lane: all CTAs together have half a
    megabyte. For launches whose CTAs learn late of the requests that they read. Called by a whole warp."""
    cta, _, _ = cute.arch.block_idx()
    requests, pages = table.shape
    size = (Int64(requests - 1) * table.stride[0] + pages) * (table.element_type.width // 8)
    offset = Int64(cta * WARP_THREADS + cute.arch.lane_idx()) * LINE_BYTES
    if offset < size:
        prefetch_line(table.iterator.toint() + offset)


@cute.jit
def prefetch_lines(tensor: cute.Tensor):
    """Prefetch the first lines of tensor (n), without gaps."""
    offset = cute.arch.lane_idx() * LINE_BYTES
    if offset < cute.size(tensor) * (tensor.element_type.width // 8):
        prefetch_line(tensor.iterator.toint() + offset)


def prefetch_line(address) -> None:
    """Prefetch the line with an address."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])
