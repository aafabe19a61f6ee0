"""Input words, the same on every machine and with every library version: edges, then a counter's hash."""

from __future__ import annotations

import numpy as np
import torch

COUNT = 384  # words an operand
CROSSED = 16  # the first this many edges meet each other, the rest meet at random
EDGE_SHARE = 320  # the words after it are random

INTEGER_EDGES = (
    *(0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 2, 31, 32, 33, 0x8000, 0x7FFF, 0xFFFF, 0x10000),
    *(0xFFFFFFFE, 0x80000001, 0x55555555, 64, 63, 255, 256, 128, 127, 0xAAAAAAAA, 0x01020304, 0xFF00FF00),
    *(3, 7, 16, 24, 0x80808080, 0x7F7F7F7F, 1000000007, 0xFFFF8000, 0xC0000000, 0x40000000),
)
# Zeros, ones, infinities, NaNs (quiet, signalling), least and greatest subnormals and normals, ties.
FLOAT_EDGES = (
    *(0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FA00001),
    *(0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F7FFFFF),
    *(0x3F000000, 0xBF000000, 0x3FC00000, 0x40200000, 0xC0200000, 0x33800000, 0x3F800001, 0x34000000),
    *(0x4B000000, 0x4B7FFFFF, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F7FFFFF, 0x4F800000, 0x5EFFFFFF),
    *(0x5F000000, 0xDF000000, 0x477FE000, 0x477FF000, 0x43E00000, 0x43E80000, 0x47600000, 0x7E800001),
    *(0x42FE0000, 0x43000000, 0xC3000000, 0xC3160000, 0x40490FDB, 0x40C90FDB, 0xFFC12345, 0x00400000),
    *(0x38800000, 0x387FE000, 0x33000000, 0x33000001, 0x3C800000, 0x3B000000, 0x3A800000, 0x7E000000),
)
HALF_EDGES = (
    *(0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0x7D01, 0x0001, 0x8001, 0x03FF, 0x0400),
    *(0x7BFF, 0xFBFF, 0x3BFF, 0x3C01, 0x3800, 0x4000, 0x4248, 0x6400, 0x1400, 0xFE01, 0x5BFF, 0xB800),
)
BFLOAT_EDGES = (
    *(0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0x7FA1, 0x0001, 0x8001, 0x007F, 0x0080),
    *(0x7F7F, 0xFF7F, 0x3F7F, 0x3F81, 0x3F00, 0x4000, 0x4049, 0x4300, 0x3C00, 0xFFC1, 0x43E0, 0xBF00),
)
DOUBLE_EDGES = (  # high words
    *(0x00000000, 0x80000000, 0x3FF00000, 0xBFF00000, 0x7FF00000, 0xFFF00000, 0x7FF80000, 0x00100000),
    *(0x000FFFFF, 0x7FEFFFFF, 0xFFEFFFFF, 0x3FE00000, 0x40000000, 0x41DFFFFF, 0x41E00000, 0xC1E00000),
    *(0x43E00000, 0xC3E00000, 0x47EFFFFF, 0x47F00000, 0x38100000, 0x36A00000, 0x369FFFFF, 0x3CA00000),
)


def words(seed: int, count: int) -> np.ndarray:
    """uint32[count]: SplitMix64 of the counter, upper half."""
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(32)).astype(np.uint32)


def below(seed: int, count: int, bound: int) -> np.ndarray:
    """int64[count] in [0, bound)."""
    return words(seed, count).astype(np.int64) % bound


def normals(seed: int, count: int, scale: float = 1.0) -> np.ndarray:
    """float32[count], roughly normal: the sum of four uniforms, exact in float64 before the one rounding."""
    parts = [words(seed + i, count).astype(np.float64) * 2.0**-32 for i in range(4)]
    return ((sum(parts) - 2.0) * (scale * 3.0**0.5)).astype(np.float32)


def tensor(array: np.ndarray) -> torch.Tensor:
    """A torch tensor of the array; unsigned 32-bit words as int32."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array)


def operand_words(edges: tuple[int, ...], random: np.ndarray, seed: int) -> list[np.ndarray]:
    """Three operands of COUNT words: 256 pairs of edges, edges picked at random, then `random` [3, ...]."""
    table = np.array(edges, np.uint32)
    pairs = CROSSED * CROSSED
    first = np.arange(pairs) // CROSSED
    second = np.arange(pairs) % CROSSED
    chosen = [table[first], table[second], table[below(seed, pairs, len(edges))]]
    answer = []
    for i in range(3):
        picked = table[below(seed + 1 + i, EDGE_SHARE - pairs, len(edges))]
        answer.append(np.concatenate([chosen[i], picked, random[i][: COUNT - EDGE_SHARE]]))
    return answer


def integer_operands(seed: int) -> list[np.ndarray]:
    random = words(seed + 10, 3 * COUNT).reshape(3, COUNT)
    random[2, ::2] &= np.uint32(63)  # shift amounts, positions and lengths
    return operand_words(INTEGER_EDGES, random, seed)


def float_operands(seed: int) -> list[np.ndarray]:
    """Words that are f32: edges, any bits, and values whose exponents lie close together."""
    random = words(seed + 10, 3 * COUNT).reshape(3, COUNT)
    near = (random & np.uint32(0x807FFFFF)) | (
        (random >> np.uint32(24)) % np.uint32(24) + np.uint32(115)
    ) << np.uint32(23)
    # Fewer significant bits make exact ties for narrower formats.
    short = near & ~((np.uint32(1) << (random >> np.uint32(3)) % np.uint32(24)) - np.uint32(1))
    kind = np.arange(COUNT) % 4
    random = np.where(kind == 0, random, np.where(kind == 1, short, near)).astype(np.uint32)
    return operand_words(FLOAT_EDGES, random, seed)


def half_operands(edges: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """Words of two halves each: the lower ones meet as in `operand_words`, the upper in another order."""
    random = words(seed + 10, 3 * COUNT).reshape(3, COUNT)
    exponent = np.uint32(0x3F80 if edges is BFLOAT_EDGES else 0x3C00)
    mantissa = np.uint32(0x7F if edges is BFLOAT_EDGES else 0x3FF)
    near = (
        (random & (np.uint32(0x8000) | mantissa))
        + exponent
        - (random >> np.uint32(29)) * (mantissa + np.uint32(1))
    )
    lower = operand_words(edges, np.where(np.arange(COUNT) % 3 == 0, random & np.uint32(0xFFFF), near), seed)
    upper = [np.roll(word, 5 * (i + 1)) for i, word in enumerate(reversed(lower))]
    return [low | high << np.uint32(16) for low, high in zip(lower, upper, strict=True)]


def double_operands(seed: int) -> list[np.ndarray]:
    """a: low words; b, c: high words of f64."""
    random = words(seed + 10, 3 * COUNT).reshape(3, COUNT)
    near = (random & np.uint32(0x800FFFFF)) | (
        (random >> np.uint32(24)) % np.uint32(40) + np.uint32(1003)
    ) << np.uint32(20)
    _, high, other = operand_words(DOUBLE_EDGES, near, seed)
    low = words(seed + 20, COUNT)
    low[: CROSSED * CROSSED : 2] = 0
    return [low, high, other]
