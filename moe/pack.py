"""Pack what a rank sends (``parallel``): for every choice the token's row and its expert's number, ordered by rank.

One kernel for sm_90a and sm_100a.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Boolean, Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import VECTOR_BYTES
from warpspec.common.launch import Kernel, Target
from warpspec.common.operands import BFLOAT16, INT32, Number, Operand, fakes
from warpspec.moe.permute import DROPPED, UNSENT, SortedTokens

THREADS = 128
VECTOR = VECTOR_BYTES // (BFloat16.width // 8)  # bf16 numbers of one access
WORDS = VECTOR_BYTES // (Int32.width // 8)  # words of one vector


@dataclass(frozen=True)
class PackConfig:
    """Configuration of the kernel.

    choices: choices of a token. each: experts of a rank. sized: every rank has a fixed number of slots, the same for
    all ranks.
    """

    choices: int
    each: int
    sized: bool


ROWS = Operand(BFLOAT16, 2, alignment=VECTOR_BYTES)


class PackOperands(NamedTuple):
    """Arguments of ``pack``'s kernel.

    x: [T, H]. ids, position, place: [T, choices]. source: [T * choices]. offsets: [ranks]. sent: [slots, H + 8] bf16;
    sent_words: the same memory as words. capacity: slots of a rank.
    """

    x: Annotated[Any, ROWS]
    ids: Annotated[Any, Operand(INT32, 2)]
    source: Annotated[Any, Operand(INT32, 1)]
    offsets: Annotated[Any, Operand(INT32, 1)]
    sent: Annotated[Any, ROWS]
    sent_words: Annotated[Any, Operand(INT32, 2, alignment=VECTOR_BYTES)]
    position: Annotated[Any, Operand(INT32, 2, when="sized")]
    place: Annotated[Any, Operand(INT32, 2, when="sized")]
    capacity: Annotated[Any, Number(INT32)]


class Pack:
    """``Pack(config)(...)`` is the host function of ``pack``."""

    def __init__(self, config: PackConfig):
        self.config = config

    @host_function(PackOperands)
    def __call__(self, operands: PackOperands, stream: CUstream):
        """Launch the kernel."""
        blocks = operands.sent.shape[0]
        if cutlass.const_expr(self.config.sized):
            blocks += cute.ceil_div(cute.size(operands.ids), THREADS)
        self.kernel(operands).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, operands):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        slots = operands.sent.shape[0]
        if block < slots:
            fill_slot(self.config, operands, thread, block)
        elif cutlass.const_expr(self.config.sized):
            choice = (block - slots) * THREADS + thread
            if choice < cute.size(operands.ids):
                find_place(self.config, operands, choice)


@cute.jit
def fill_slot(config: cutlass.Constexpr, operands, thread, slot: Int32):
    """One CTA writes a slot's row and expert; a slot without a row gets only the expert ``DROPPED``."""
    x, offsets, sent, sent_words = operands.x, operands.offsets, operands.sent, operands.sent_words
    row, end = slot, Int32(offsets[offsets.shape[0] - 1])
    if cutlass.const_expr(config.sized):
        rank = slot // operands.capacity
        row = start_of(offsets, rank) + slot % operands.capacity
        end = Int32(offsets[rank])
    expert = Int32(DROPPED)
    if row < end:
        choice = Int32(operands.source[row])
        token = choice // config.choices
        expert = Int32(operands.ids[token, choice % config.choices]) % config.each
        for column in cutlass.range(thread, x.shape[1] // VECTOR, THREADS, unroll=4):
            values = cute.make_rmem_tensor(VECTOR, BFloat16)
            cute.autovec_copy(cute.local_tile(x[token, None], (VECTOR,), (column,)), values)
            cute.autovec_copy(values, cute.local_tile(sent[slot, None], (VECTOR,), (column,)))
    if thread == 0:
        sent_words[slot, sent_words.shape[1] - WORDS] = expert


@cute.jit
def find_place(config: cutlass.Constexpr, operands, choice):
    """The choice's slot; ``DROPPED`` if it has no expert, ``UNSENT`` if the rank's slots are all taken."""
    token, which = choice // config.choices, choice % config.choices
    capacity = operands.capacity
    row, found = Int32(operands.position[token, which]), Int32(DROPPED)
    if row >= 0:
        rank = Int32(operands.ids[token, which]) // config.each
        index = row - start_of(operands.offsets, rank)
        found = Int32(cutlass.select_(Boolean(index < capacity), rank * capacity + index, Int32(UNSENT)))
    operands.place[token, which] = found


@cute.jit
def start_of(offsets, rank: Int32) -> Int32:
    """The first row that goes to a rank."""
    start = Int32(0)
    if rank > 0:
        start = Int32(offsets[rank - 1])
    return start


def _host_and_arguments(config: PackConfig) -> tuple:
    """The host function and its arguments without the stream."""
    return (Pack(config), *fakes(PackOperands, config))


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
