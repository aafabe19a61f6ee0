"""Pack what a rank sends (``parallel``): for every choice the token's row and its expert's number, ordered by rank.

One kernel for sm_90a and sm_100a.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Int32

from warpspec.common.compile import fake_rows
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Kernel, Target
from warpspec.moe.permute import DROPPED, UNSENT, SortedTokens

THREADS = 128
VECTOR = VECTOR_BYTES // (BFloat16.width // 8)  # bf16 numbers of one access
WORDS = VECTOR_BYTES // (Int32.width // 8)  # words of one vector


@dataclass(frozen=True)
class PackConfig:
    """choices: of a token. each: experts of a rank. sized: every rank has its own slots, the same number for each."""

    choices: int
    each: int
    sized: bool


class Pack:
    """``Pack(config)(...)`` is the host function of ``pack``."""

    def __init__(self, config: PackConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        ids: cute.Tensor,
        source: cute.Tensor,
        offsets: cute.Tensor,
        sent: cute.Tensor,
        sent_words: cute.Tensor,
        position: cute.Tensor | None,
        place: cute.Tensor | None,
        capacity: Int32,
        stream: CUstream,
    ):
        """Launch the kernel.

        x: [T, H]. ids, position, place: [T, choices]. source: [T * choices]. offsets: [ranks]. sent: [slots, H + 8]
        bf16; sent_words: the same memory as words. capacity: slots of a rank.
        """
        blocks = sent.shape[0]
        if cutlass.const_expr(self.config.sized):
            blocks += cute.ceil_div(cute.size(ids), THREADS)
        self.kernel(x, ids, source, offsets, sent, sent_words, position, place, capacity).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x, ids, source, offsets, sent, sent_words, position, place, capacity):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        slots = sent.shape[0]
        if block < slots:
            fill_slot(self.config, x, ids, source, offsets, sent, sent_words, capacity, thread, block)
        elif cutlass.const_expr(self.config.sized):
            choice = (block - slots) * THREADS + thread
            if choice < cute.size(ids):
                find_place(self.config, ids, offsets, position, place, capacity, choice)


@cute.jit
def fill_slot(
    config: cutlass.Constexpr, x, ids, source, offsets, sent, sent_words, capacity, thread, slot: Int32
):
    """One CTA writes a slot's row and expert; a slot without a row gets only the expert ``DROPPED``."""
    row, end = slot, Int32(offsets[offsets.shape[0] - 1])
    if cutlass.const_expr(config.sized):
        rank = slot // capacity
        row = start_of(offsets, rank) + slot % capacity
        end = Int32(offsets[rank])
    expert = Int32(DROPPED)
    if row < end:
        choice = Int32(source[row])
        token = choice // config.choices
        expert = Int32(ids[token, choice % config.choices]) % config.each
        for column in cutlass.range(thread, x.shape[1] // VECTOR, THREADS, unroll=4):
            values = cute.make_rmem_tensor(VECTOR, BFloat16)
            cute.autovec_copy(cute.local_tile(x[token, None], (VECTOR,), (column,)), values)
            cute.autovec_copy(values, cute.local_tile(sent[slot, None], (VECTOR,), (column,)))
    if thread == 0:
        sent_words[slot, sent_words.shape[1] - WORDS] = expert


@cute.jit
def find_place(config: cutlass.Constexpr, ids, offsets, position, place, capacity, choice):
    """The choice's slot; ``DROPPED`` if it has no expert, ``UNSENT`` if the rank's slots are all taken."""
    token, which = choice // config.choices, choice % config.choices
    row, found = Int32(position[token, which]), Int32(DROPPED)
    if row >= 0:
        rank = Int32(ids[token, which]) // config.each
        index = row - start_of(offsets, rank)
        found = Int32(cutlass.select_(Boolean(index < capacity), rank * capacity + index, Int32(UNSENT)))
    place[token, which] = found


@cute.jit
def start_of(offsets, rank: Int32) -> Int32:
    """The first row that goes to a rank."""
    start = Int32(0)
    if rank > 0:
        start = Int32(offsets[rank - 1])
    return start


def _host_and_arguments(config: PackConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return (
        Pack(config),
        fake_rows(BFloat16, 2, alignment=VECTOR_BYTES),
        fake_rows(Int32, 2),
        fake_rows(Int32, 1),
        fake_rows(Int32, 1),
        fake_rows(BFloat16, 2, alignment=VECTOR_BYTES),
        fake_rows(Int32, 2, alignment=VECTOR_BYTES),
        *(fake_rows(Int32, 2) if config.sized else None for _ in range(2)),
        1,  # capacity
    )


pack_kernel = Kernel("moe.pack", _host_and_arguments)  # by PackConfig


def pack(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    found: SortedTokens,
    each: int,
    sent: torch.Tensor,
    place: torch.Tensor | None,
    capacity: int,
    target: Target,
):
    """``parallel.pack_rows`` in one launch: writes sent and place (None: each row is its own slot).

    x, topk_ids: not empty.
    """
    config = PackConfig(topk_ids.shape[1], each, place is not None)
    position = None if place is None else found.position
    rows = x[0][None] if len(x) == 1 else x  # the stride of a dimension of size 1 need not be aligned
    return pack_kernel.run(
        *(config, target, rows, topk_ids, found.source, found.offsets),
        *(sent, sent.view(torch.int32), position, place, capacity),
    )
