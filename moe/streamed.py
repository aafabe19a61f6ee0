"""Weights as sm_90a's kernel streams them: 4-bit codes in the order of wgmma's fragments, scales of one byte.

The product is D [feature, token] = W [feature, K] X [token, K]^T with the weights in registers. A row tile has 64
features, which are one warpgroup's; a chunk has 64 of K. In a chunk, thread q of a quad has the 16 values 16 q to 16 q
+ 15 of each of its two rows, so that a row's values share one scale. Activations have their columns in the same order
(``column_order``). A step is two chunks,

    scales (512 bytes; 256 where 32 values share one), codes of the first chunk (2048), of the second (2048)

and a row tile is a sequence of steps; the last step lacks its second chunk if K ends before it. A scale is a byte of 5
exponent bits and 3 mantissa bits: (1 + m / 8) 2**(e - SCALE_BIAS), or NaN if e is 31; e4m3's subnormal numbers become
normal ones. A block whose scale is 0 has codes 0. A scale shifted by 4, below the ones of SCALE_ONES, is a bf16 number.
Codes moved to bits 6 to 8 are bf16 numbers, too. Their product is exact, and smaller by a power of two, CODE_POWER.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from warpspec.common import nvfp4
from warpspec.common.checks import check_int, check_kind
from warpspec.common.hardware import (
    QUAD,
    ROW_DISTANCE,
    THREAD_ROWS,
    WARP_ROWS,
    WARPGROUP_ROWS,
    WARPGROUP_THREADS,
)
from warpspec.common.nvfp4 import E4M3_NAN, MXFP4_BLOCK, NVFP4_BLOCK, SIGN
from warpspec.moe.operands import PreparedWeights
from warpspec.moe.weights import INTERLEAVE, ExpertWeights

CHUNK = 64  # along K: four of wgmma's
STEP_CHUNKS = 2
STEP = CHUNK * STEP_CHUNKS
WORD_CODES = 8  # codes of a 32-bit word
VECTOR_WORDS = CHUNK * WARPGROUP_ROWS // WORD_CODES // WARPGROUP_THREADS  # words of a thread in a chunk
CHUNK_BYTES = CHUNK * WARPGROUP_ROWS // 2

# Two words hold a row's 16 codes of a chunk. A pair of codes becomes two bf16: signs at bits 15 and 31, magnitudes at 8
# to 6 and 24 to 22. The kernel rotates a word to the right for that: the first, the second, or a mixture of both. The
# mixture has the first word's bits where MIXED has ones, and the second word's elsewhere; it is shifted to the left. No
# bit is unused, and no pair takes more than two shifts.
FIRST, SECOND, MIXTURE = range(3)
PAIRS = (  # (word, bits to rotate right) for columns 0 and 1, 2 and 3, ...
    (FIRST, 0),
    (FIRST, 6),
    (FIRST, -4),
    (MIXTURE, 4),
    (SECOND, 0),
    (SECOND, 6),
    (SECOND, -4),
    (MIXTURE, -6),
)
MIXED, MIXED_SHIFT = 0x06030603, 2
WORD_BITS, HALF_BITS = 32, 16
MAGNITUDE_BIT, SIGN_BIT = 6, 15  # where a code's magnitude and sign begin in a bf16
MAGNITUDE, SIGN_SHIFT = 7, 3  # mask of a code's magnitude, and position of its sign

SCALE_MANTISSA_BITS = 3
SCALE_BIAS = 18  # makes the largest weight about 1 before the global scale
SCALE_NAN = 0xFF
SCALE_ONES = 0x70007000  # the upper exponent bits of two bf16, which stand above a scale
BF16_BIAS = 127
# log2 of the factor by which a kernel's weights are too small; the global scale corrects it.
CODE_POWER = (BF16_BIAS - 1) - (0b111 * 32 - BF16_BIAS + SCALE_BIAS)


@dataclass(frozen=True)
class StreamedWeights(ExpertWeights):
    """The weights [N, K] of E experts, as sm_90a's kernel reads them.

    data: uint8 [E, row tiles, bytes], laid out as the module describes, padding 0. global_scale: fp32 [E, 2] for gate
    and up, or [E, 1], as in ``PreparedWeights``. bias: fp32 [E, rows] in the kernel's order of rows (``row_order``),
    padding 0, or None. n, k: sizes of the matrix before padding. block: values that share a scale, 16 or 32.
    """

    data: torch.Tensor
    global_scale: torch.Tensor
    n: int
    k: int
    block: int
    bias: torch.Tensor | None = None

    TENSORS: ClassVar[tuple[str, ...]] = ("data", "global_scale", "bias")
    layout: ClassVar[str] = "sm90"  # the backend whose kernels read them

    @property
    def row_tiles(self) -> int:
        return self.data.shape[1]

    def dequantize(self, experts: slice = slice(None)) -> torch.Tensor:
        """fp32 [E, N, K] of some experts: the numbers of ``PreparedWeights``, in its order. Raises TypeError unless
        experts is a slice."""
        check_kind("experts", experts, slice)
        data, scale = self.data[experts], self.row_scales()[experts]
        chunks = chunks_of(self.k)
        codes, scales = split_steps(data, chunks, self.block)
        values = nvfp4.e2m1_values(unpack_codes(codes)).unflatten(-1, (-1, self.block))
        values = values * scale_values(unpack_scales(scales, chunks, self.block))[..., None]
        return self.in_order(values.flatten(-2)[..., : self.k]) * scale[..., None]

    def row_bias(self, e: int) -> torch.Tensor:
        """fp32 [N]: the bias of expert e in the order of ``PreparedWeights``. Raises TypeError or ValueError for
        what is no expert."""
        check_int("e", e, 0, self.experts - 1)
        return self.in_order(self.bias[e : e + 1])[0]

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorder the kernel's rows [E, rows, ...] to [E, N, ...], the order of ``PreparedWeights``."""
        order = row_order(self.n, self.gated, rows.device)[: rows.shape[1]]
        out = rows.new_empty(rows.shape[0], self.n + 1, *rows.shape[2:])
        out[:, order] = rows[:, : len(order)]
        return out[:, : self.n]


def chunks_of(k: int) -> int:
    return -(-k // CHUNK)


def steps_of(k: int) -> int:
    return -(-k // STEP)


def padded_k(k: int) -> int:
    """Elements of an activation row: K rounded up to whole chunks."""
    return chunks_of(k) * CHUNK


def scale_bytes(block: int) -> int:
    """Bytes of the scales of one step of a row tile."""
    return WARPGROUP_ROWS * STEP // block


def tile_bytes(k: int, block: int) -> int:
    """Bytes of a row tile."""
    return steps_of(k) * scale_bytes(block) + chunks_of(k) * CHUNK_BYTES


def column_order(k: int, device=None) -> torch.Tensor:
    """int64 [padded K]: the column of the matrix at each place of an activation row.

    wgmma's fragments give thread q of a quad the places 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of every 16. These hold
    columns 4 s to 4 s + 3 of the thread's 16, where s is the number of the 16 places in the chunk.
    """
    place = torch.arange(padded_k(k), device=device)
    chunk, s, rest = place // CHUNK, place % CHUNK // NVFP4_BLOCK, place % NVFP4_BLOCK
    high, q, low = rest // 8, rest % 8 // 2, rest % 2
    return chunk * CHUNK + q * NVFP4_BLOCK + s * QUAD + high * 2 + low


def row_order(n: int, gated: bool, device=None) -> torch.Tensor:
    """int64 [padded N]: the row of ``PreparedWeights`` at each of the kernel's rows; n where there is none.

    The features of w13 are in the order of the next GEMM's activations: 8 of gate, then the matching 8 of up.
    """
    if not gated:
        rows = torch.arange(-(-n // WARPGROUP_ROWS) * WARPGROUP_ROWS, device=device)
        return rows.clamp(max=n)
    feature = column_order(n // 2, device)
    gate = feature // INTERLEAVE * 2 * INTERLEAVE + feature % INTERLEAVE
    rows = torch.stack([part.unflatten(0, (-1, INTERLEAVE)) for part in (gate, gate + INTERLEAVE)], dim=1)
    return torch.where(rows < n, rows, n).flatten()


def reorder(rows: torch.Tensor) -> torch.Tensor:
    """Rows [R, K] as activations: columns in the kernel's order, zeros past K."""
    k = rows.shape[-1]
    padded = torch.nn.functional.pad(rows, (0, padded_k(k) - k))
    return padded[..., column_order(k, rows.device)].contiguous()


def restore(rows: torch.Tensor, k: int) -> torch.Tensor:
    """The inverse of ``reorder``: [R, K]."""
    out = torch.empty_like(rows)
    out[..., column_order(k, rows.device)] = rows
    return out[..., :k]


def stream(w: PreparedWeights, *, unscale: torch.Tensor | None = None) -> StreamedWeights:
    """Lay the weights out for sm_90a, without loss.

    unscale: fp32 [E], by which the global scale is divided (w2's includes the scale of its input). Blocks of 32 share a
    scale if the scales of all pairs of blocks are equal powers of two, as MXFP4's are. Raises ValueError for negative
    block scales, which NVFP4 does not have.
    """
    columns = w.k // NVFP4_BLOCK
    block = MXFP4_BLOCK
    for e in range(w.experts):
        if not pairs_alike(nvfp4.unswizzle_scales(w.scales[e], w.n, columns)):
            block = NVFP4_BLOCK
            break
    parts, order = [], row_order(w.n, w.gated, w.data.device)
    for e in range(w.experts):  # one at a time: unpacked codes take eight times the memory
        scale = nvfp4.unswizzle_scales(w.scales[e], w.n, columns).view(torch.uint8)
        if bool(((scale > SIGN * 16) & (scale != SIGN * 16 + E4M3_NAN)).any()):
            raise ValueError("block scales: must not be negative")
        codes = nvfp4.unpack(w.data[e, :, : w.k // 2])
        parts.append(pack(with_padding(codes, order), with_padding(scale, order), block))
    scale = w.global_scale if unscale is None else w.global_scale / unscale[:, None]
    bias = None if w.bias is None else with_padding(w.bias.T, order).T.contiguous()
    return StreamedWeights(torch.stack(parts), scale.contiguous(), w.n, w.k, block, bias)


def with_padding(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows [N, ...] in the given order, in which N stands for a row of zeros."""
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[order]


def pairs_alike(scale: torch.Tensor) -> bool:
    """Whether e4m3 scales [N, K/16] can serve blocks of 32: equal in pairs, and powers of two, 0 or NaN."""
    values = scale.float()
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1), mode="replicate")
    first, second = values[:, 0::2], values[:, 1::2]
    mantissa, _ = torch.frexp(first)
    plain = (mantissa == 0.5) | (first == 0) | first.isnan()
    return bool((((first == second) | (first.isnan() & second.isnan())) & plain).all())


def pack(codes: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Pack one expert to uint8 [tile, bytes].

    codes: uint8 [rows, K]; scale (e4m3 as uint8): [rows, K/16]; rows padded.
    """
    k = codes.shape[1]
    chunks = chunks_of(k)
    value = scale.view(torch.float8_e4m3fn).float().repeat_interleave(NVFP4_BLOCK, 1)
    codes = codes.masked_fill((value == 0) | value.isnan(), 0)
    codes = torch.nn.functional.pad(codes, (0, chunks * CHUNK - k))
    columns = chunks * CHUNK // block
    scale = scale_codes(scale)[:, :: block // NVFP4_BLOCK]
    scale = torch.nn.functional.pad(scale, (0, columns - scale.shape[1]))
    words = pack_codes(codes)  # [tile, chunk, bytes]
    scales = pack_scales(scale, block)  # [tile, step, bytes]
    odd = chunks % STEP_CHUNKS
    words = torch.nn.functional.pad(words, (0, 0, 0, odd)).unflatten(1, (-1, STEP_CHUNKS)).flatten(2)
    return torch.cat([scales, words], dim=2).flatten(1)[:, : tile_bytes(k, block)]


def split_steps(data: torch.Tensor, chunks: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split row tiles [E, tile, bytes] into (codes [E, tile, chunk, bytes], scales [E, tile, step, bytes])."""
    odd = chunks % STEP_CHUNKS
    steps = torch.nn.functional.pad(data, (0, odd * CHUNK_BYTES)).unflatten(2, ((chunks + odd) // 2, -1))
    scales, words = steps.split([scale_bytes(block), STEP_CHUNKS * CHUNK_BYTES], dim=3)
    return words.unflatten(3, (STEP_CHUNKS, -1)).flatten(2, 3)[:, :, :chunks], scales


def code_bits() -> list[tuple[int, int, int, int]]:
    """(column of 16, bit of its code, word, bit of the word) for every bit of two words."""
    found = []
    for pair, (source, right) in enumerate(PAIRS):
        for half in range(2):
            for bit in range(SIGN_SHIFT + 1):
                target = (SIGN_BIT if bit == SIGN_SHIFT else MAGNITUDE_BIT + bit) + half * HALF_BITS
                at, word = (target + right) % WORD_BITS, source
                if source == MIXTURE:
                    word = FIRST if MIXED >> at & 1 else SECOND
                    at = at if word == FIRST else (at - MIXED_SHIFT) % WORD_BITS
                found.append((2 * pair + half, bit, word, at))
    return found


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [N, K], both padded, to uint8 [tile, chunk, CHUNK_BYTES]."""
    # [tile, warp, r, g, chunk, q, column]: row 16 warp + 8 r + g, column 16 q + column of a chunk
    view = codes.view(-1, WARPGROUP_ROWS // WARP_ROWS, THREAD_ROWS, ROW_DISTANCE, codes.shape[1])
    view = view.unflatten(4, (-1, QUAD, NVFP4_BLOCK)).int()
    words = view.new_zeros(*view.shape[:-1], 2)
    for column, bit, word, at in code_bits():
        words[..., word] |= (view[..., column] >> bit & 1) << at
    # to [tile, chunk, warp, g, q, r, word]
    words = words.permute(0, 4, 1, 3, 5, 2, 6).contiguous()
    return words.view(torch.uint8).reshape(words.shape[0], words.shape[1], CHUNK_BYTES)


def unpack_codes(data: torch.Tensor) -> torch.Tensor:
    """Inverse of ``pack_codes``: uint8 [E, N, K] of [E, tile, chunk, CHUNK_BYTES]."""
    shape = (WARPGROUP_ROWS // WARP_ROWS, ROW_DISTANCE, QUAD, THREAD_ROWS, 2)
    words = data.contiguous().view(torch.int32).unflatten(-1, shape)  # [E, tile, chunk, warp, g, q, r, word]
    words = words.permute(0, 1, 3, 6, 4, 2, 5, 7)  # [E, tile, warp, r, g, chunk, q, word]
    codes = torch.zeros(*words.shape[:-1], NVFP4_BLOCK, dtype=torch.uint8, device=data.device)
    for column, bit, word, at in code_bits():
        codes[..., column] |= ((words[..., word] >> at & 1) << bit).to(torch.uint8)
    return codes.flatten(5, 7).flatten(1, 4)


def pack_scales(scale: torch.Tensor, block: int) -> torch.Tensor:
    """Pack scale bytes [N, K/block], rows padded, K in whole chunks, to uint8 [tile, step, bytes].

    A word has chunk 0's scales of a thread's two rows, then chunk 1's. If 32 values share a scale, so do two threads.
    """
    width = CHUNK // block
    odd = scale.shape[1] // width % STEP_CHUNKS
    scale = torch.nn.functional.pad(scale, (0, odd * width))
    view = scale.view(-1, WARPGROUP_ROWS // WARP_ROWS, THREAD_ROWS, ROW_DISTANCE, scale.shape[1])
    view = view.unflatten(4, (-1, STEP_CHUNKS, width))  # [tile, warp, r, g, step, chunk, q]
    return view.permute(0, 4, 1, 3, 6, 5, 2).flatten(2)


def unpack_scales(data: torch.Tensor, chunks: int, block: int) -> torch.Tensor:
    """Inverse of ``pack_scales``: [E, N, chunks * CHUNK / block] of [E, tile, step, bytes]."""
    width = CHUNK // block
    shape = (WARPGROUP_ROWS // WARP_ROWS, ROW_DISTANCE, width, STEP_CHUNKS, THREAD_ROWS)
    view = data.unflatten(3, shape)  # [E, tile, step, warp, g, q, chunk, r]
    view = view.permute(0, 1, 3, 7, 4, 2, 6, 5).flatten(5)  # [E, tile, warp, r, g, K/block]
    return view.flatten(1, 4)[..., : chunks * width]


def scale_codes(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes of e4m3 scales (as uint8). A scale of 0 becomes 1, because its codes are 0."""
    every = torch.arange(256, dtype=torch.uint8)
    value = every.view(torch.float8_e4m3fn).float().abs()
    mantissa, exponent = torch.frexp(value)  # value = mantissa 2**exponent, mantissa in [1/2, 1)
    fraction = ((mantissa * 2 - 1) * (1 << SCALE_MANTISSA_BITS)).int()
    code = (exponent - 1 + SCALE_BIAS) << SCALE_MANTISSA_BITS | fraction
    code = torch.where(value == 0, SCALE_BIAS << SCALE_MANTISSA_BITS, code)
    code = torch.where(value.isnan(), SCALE_NAN, code).to(torch.uint8)
    return code.to(scale.device)[scale.int()]


def scale_values(code: torch.Tensor) -> torch.Tensor:
    """fp32 values of scale bytes."""
    every = torch.arange(256)
    fraction = 1 + (every & 7).float() / (1 << SCALE_MANTISSA_BITS)
    value = fraction * torch.exp2((every >> SCALE_MANTISSA_BITS).float() - SCALE_BIAS)
    value[SCALE_NAN] = torch.nan
    return value.to(code.device)[code.int()]
