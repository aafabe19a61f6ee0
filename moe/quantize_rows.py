"""Activation quantiser: quantises every token's row to NVFP4 once and writes it to the row of each of its choices.

One CTA a token. The row stays in registers between the two passes (amax, then values), and the copies differ only in
their destination, so a token is read once however many experts take it. Scales are written in the swizzled layout, in
which each expert's rows begin a new atom. The bits are those of `QuantizedRows.from_rows`. sm_100a and later only:
earlier architectures cannot convert to e2m1.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Uint32

from warpspec.common.compile import fake_rows
from warpspec.common.device import nvfp4 as nvfp4_device
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.common.launch import Kernel, Target, target_of
from warpspec.common.nvfp4 import ATOM_BYTES, ATOM_COLUMNS, ATOM_LANES, ATOM_ROWS, NVFP4_BLOCK
from warpspec.moe.operands import QuantizedRows, scale_atoms

MAX_WARPS = 8
BLOCKS_PER_THREAD = 2  # most blocks of a thread, while a CTA may have more warps; a block takes 8 registers
TARGET_ALIGNMENT = 16  # bytes: targets of two choices
VALUE_WORDS = NVFP4_BLOCK // 2  # words of a block in bf16
DATA_WORDS = NVFP4_BLOCK // 8  # words of a block in NVFP4
VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES  # words of one load
# Words of an atom's line, which holds the scales of rows r, r + 32, r + 64, r + 96.
LINE_WORDS = ATOM_BYTES // ATOM_LANES // WORD_BYTES
MAGNITUDES = 0x7FFF7FFF  # mask of the magnitudes of two bf16
HIGH_HALF = 0xFFFF0000
HALF_BITS = 16


@dataclass(frozen=True)
class QuantizeConfig:
    """k: values of a row, a multiple of 16. choices: the most experts a token takes."""

    k: int
    choices: int

    @property
    def blocks(self) -> int:
        """Blocks of 16 values in a row, including those that pad the last scale atom."""
        return scale_atoms(self.k) * ATOM_COLUMNS

    @property
    def warps(self) -> int:
        """Warps of a CTA: a power of two, enough that a thread has at most BLOCKS_PER_THREAD."""
        needed = -(-self.blocks // (BLOCKS_PER_THREAD * WARP_THREADS))
        return min(MAX_WARPS, 1 << (needed - 1).bit_length())

    @property
    def threads(self) -> int:
        return self.warps * WARP_THREADS

    @property
    def passes(self) -> int:
        """The most blocks that a thread has."""
        return -(-self.blocks // self.threads)


class QuantizeRows:
    """``QuantizeRows(config)(...)`` is the host function of ``quantize_rows``."""

    def __init__(self, config: QuantizeConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        position: cute.Tensor,
        offsets: cute.Tensor,
        data: cute.Tensor,
        scales: cute.Tensor,
        row_scale: cute.Tensor,
        stream: CUstream,
    ):
        """Launch the kernel.

        x: [T, K/2] words of two bf16. position: [T, k]. offsets: [E]. data: [R, pitch/4], scales:
        [atoms, ceil(K/64), 128] words. row_scale: [R] fp32.
        """
        self.kernel(x, position, offsets, data, scales, row_scale).launch(
            grid=(x.shape[0], 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x, position, offsets, data, scales, row_scale):
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        largest = smem.allocate_tensor(Uint32, cute.make_layout(config.warps), byte_alignment=WORD_BYTES)
        # Padded to whole vectors, because the compiler reads it in vectors.
        targets = smem.allocate_tensor(
            Int32, cute.make_layout((2, config.choices + config.choices % 2)), byte_alignment=TARGET_ALIGNMENT
        )  # (row, row among the scales) by CHOICE

        words = load_row(config, x[token, None], thread)  # (VALUE_WORDS, PASS)
        amaxes = [block_magnitude(words[None, i]) for i in range(config.passes)]
        find_targets(config, position[token, None], offsets, targets, thread)
        row_amax = amaxes[0]
        for amax in amaxes[1:]:
            row_amax = cutlass.max(row_amax, amax)
        row_amax = largest_of_cta(config, row_amax, largest, thread)  # and a barrier: targets are there
        global_scale = nvfp4_device.global_scale_of(row_amax.bitcast(Float32))

        rows = [targets[0, choice] for choice in range(config.choices)]
        scale_rows = [targets[1, choice] for choice in range(config.choices)]
        for i in cutlass.range_constexpr(config.passes):
            block = i * config.threads + thread
            values = unpack_bf16(words[None, i])
            scale, low, high = nvfp4_device.quantize_block(
                values, amaxes[i].bitcast(Float32), global_scale, bounded=True
            )
            scale = Uint32(cutlass.select_(Boolean(block < config.k // NVFP4_BLOCK), scale, Uint32(0)))
            quad = gather_quad(scale, thread)
            for choice in cutlass.range_constexpr(config.choices):
                if rows[choice] >= 0:
                    store_block(
                        config, data, scales, rows[choice], scale_rows[choice], block, low, high, quad
                    )
        for choice in cutlass.range_constexpr(config.choices):
            if (thread == choice % config.threads) & (rows[choice] >= 0):
                row_scale[rows[choice]] = global_scale


@cute.jit
def load_row(config: cutlass.Constexpr, row: cute.Tensor, thread) -> cute.Tensor:
    """This thread's blocks of row (K/2 words), (VALUE_WORDS, PASS); blocks past the row are 0."""
    words = cute.make_rmem_tensor((VALUE_WORDS, config.passes), Uint32)
    words.fill(0)
    for i in cutlass.range_constexpr(config.passes):
        block = i * config.threads + thread
        if block < config.k // NVFP4_BLOCK:
            for part in cutlass.range_constexpr(VALUE_WORDS // VECTOR_WORDS):
                vector = block * (VALUE_WORDS // VECTOR_WORDS) + part
                source = cute.local_tile(row, (VECTOR_WORDS,), (vector,))
                target = cute.local_tile(words[None, i], (VECTOR_WORDS,), (part,))
                cute.autovec_copy(source, target)
    return words


def block_magnitude(words: cute.Tensor) -> Uint32:
    """amax of words (VALUE_WORDS) of two bf16, as fp32 bits; they order like the numbers, NaN last."""
    largest = words[0] & Uint32(MAGNITUDES)
    for i in range(1, VALUE_WORDS):
        largest = cute.arch.inline_ptx(
            "max.u16x2 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint32],
            read_only_args=[largest, words[i] & Uint32(MAGNITUDES)],
        )
    return cutlass.max(largest << HALF_BITS, largest & Uint32(HIGH_HALF))


def unpack_bf16(words: cute.Tensor) -> cute.Tensor:
    """(16) fp32 of words (VALUE_WORDS) of two bf16."""
    values = cute.make_rmem_tensor(NVFP4_BLOCK, Float32)
    for i in range(VALUE_WORDS):
        values[2 * i] = (words[i] << HALF_BITS).bitcast(Float32)
        values[2 * i + 1] = (words[i] & Uint32(HIGH_HALF)).bitcast(Float32)
    return values


@cute.jit
def largest_of_cta(config: cutlass.Constexpr, value: Uint32, largest: cute.Tensor, thread) -> Uint32:
    """The largest of all threads' values, returned to all. largest: (WARP) in shared memory. Synchronizes the CTA."""
    value = Uint32(cute.arch.warp_redux_sync(value, "max"))
    if thread % WARP_THREADS == 0:
        largest[thread // WARP_THREADS] = value
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(config.warps):
        value = cutlass.max(value, largest[warp])
    return value


@cute.jit
def find_targets(config: cutlass.Constexpr, position, offsets, targets: cute.Tensor, thread):
    """Fill targets (2, CHOICE): the row of each choice (-1: none), and its row in the scales of all atoms.

    A warp a choice. The second row is larger by the padding of the last atoms of all earlier experts.
    """
    lane, warp = thread % WARP_THREADS, thread // WARP_THREADS
    for first in cutlass.range_constexpr(0, config.choices, config.warps):
        choice = first + warp
        if choice < config.choices:
            row = Int32(position[choice])
            padding = Int32(0)
            for expert in cutlass.range(lane, offsets.shape[0], WARP_THREADS):
                end = Int32(offsets[expert])
                begin = Int32(0)
                if expert > 0:
                    begin = Int32(offsets[expert - 1])
                if end <= row:
                    padding += (begin - end) & (ATOM_ROWS - 1)
            padding = Int32(cute.arch.warp_redux_sync(padding, "add"))
            if lane == 0:
                targets[0, choice] = row
                targets[1, choice] = row + padding


def gather_quad(scale: Uint32, thread) -> Uint32:
    """The scales of four adjacent threads, the lowest thread's in the low byte, returned to all four."""
    word = scale << (thread % ATOM_COLUMNS * 8).to(Uint32)
    for distance in (1, 2):
        word = word | Uint32(cute.arch.shuffle_sync_bfly(word, distance))
    return word


@cute.jit
def store_block(config: cutlass.Constexpr, data, scales, row, scale_row, block, low, high, quad):
    """Store a block: every thread its codes, every fourth thread the scales of four blocks."""
    if block < config.k // NVFP4_BLOCK:
        codes = cute.make_rmem_tensor(DATA_WORDS, Uint32)
        codes[0], codes[1] = low, high
        cute.autovec_copy(codes, cute.local_tile(data[row, None], (DATA_WORDS,), (block,)))
    if (block % ATOM_COLUMNS == 0) & (block < config.blocks):
        line = scale_row % ATOM_LANES * LINE_WORDS + scale_row // ATOM_LANES % LINE_WORDS
        scales[scale_row // ATOM_ROWS, block // ATOM_COLUMNS, line] = quad


def _host_and_arguments(config: QuantizeConfig) -> tuple:
    """The host function and its arguments without the stream."""

    def packed(rank):
        return fake_rows(Uint32, rank, alignment=VECTOR_BYTES)

    return (
        QuantizeRows(config),
        packed(2),
        fake_rows(Int32, 2),
        fake_rows(Int32, 1),
        packed(2),
        fake_rows(Uint32, 3),
        fake_rows(Float32, 1),
    )


quantize_kernel = Kernel("moe.quantize_rows", _host_and_arguments)  # by QuantizeConfig


def quantize_rows(
    x: torch.Tensor,
    position: torch.Tensor,
    offsets: torch.Tensor,
    out: QuantizedRows,
    *,
    target: Target | None = None,
):
    """Quantise tokens x into the rows of out, in one launch on the tensors' device and its current stream.

    x: [T, K] bf16, rows contiguous and aligned to 16 bytes, K a multiple of 16. position: int32 [T, k] contiguous, the
    row of each choice or -1; no two alike. offsets: int32 [E] contiguous, running ends of the experts' rows, which
    never fall and are at most R. out: from `QuantizedRows.empty`, with row scales. target: simulate this architecture
    instead of the tensors' own. Returns the simulator's SimReport for CPU tensors, otherwise None. Raises
    UnsupportedProblem for an architecture that cannot convert to e2m1.
    """
    target = target or target_of(x.device)
    if not target.architecture.e2m1:
        raise UnsupportedProblem(
            f"quantize_rows: {target.arch} has no conversion to e2m1, which NVFP4 needs; sm_100a and later have one"
        )
    if position.numel() == 0:
        return None
    return quantize_kernel.run(
        QuantizeConfig(x.shape[1], position.shape[1]),
        target,
        x.detach().view(torch.uint32),
        position,
        offsets,
        out.data.view(torch.uint32),
        out.scales.view(torch.uint32),
        out.row_scale,
    )
