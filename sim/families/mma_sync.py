"""mma.sync: the warp-level matrix multiply of registers. PTX ISA: "Multiply-and-Accumulate Instruction: mma".

Supported: m16n8k8 and m16n8k16 of f16 and bf16, m16n8k4 and m16n8k8 of tf32, m16n8k16 and m16n8k32 of 8-bit
floats and integers. Products are exact, sums float32 (int32 for integers); an f16 accumulator rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpspec.sim.errors import UnsupportedInstruction
from warpspec.sim.instruction import Instr
from warpspec.sim.machine import Machine
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.tcgen05.operands import decode_elements
from warpspec.sim.warp import Warp

M, N = 16, 8
WIDTH = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}  # bits of a multiplicand
DEPTHS = {16: (8, 16), 32: (4, 8), 8: (16, 32)}  # K by width
ACCUMULATORS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f16", "f32")}
ACCUMULATORS |= {"e5m2": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",)}
THREAD = np.arange(32)
GROUP, IN_GROUP = THREAD // 4, THREAD % 4


@dataclass(frozen=True, slots=True)
class MmaSyncForm:
    """What an mma.sync opcode says: K, the types of A, B and D, and the FLOPs of one instruction."""

    k: int
    a: str
    b: str
    d: str
    saturate: bool
    flops: int


@lru_cache(maxsize=64)
def form(parts: tuple[str, ...]) -> MmaSyncForm:
    """Raises UnsupportedInstruction for shapes and types outside the list above."""
    opcode = ".".join(parts)
    shape = next((p for p in parts if p.startswith("m") and "n" in p and "k" in p), "")
    types = [p for p in parts if p in WIDTH or p in ("f32", "s32")]
    if len(types) != 4 or not shape.startswith("m16n8k") or "row" not in parts or "col" not in parts:
        raise UnsupportedInstruction(f"`{opcode}`")
    d, a, b, c = types
    k = int(shape.removeprefix("m16n8k"))
    sparse_or_scaled = "sp" in parts or "block_scale" in parts or "sp::ordered_metadata" in parts
    mixed = a != b and not ({a, b} <= {"s8", "u8"} or {a, b} <= {"e4m3", "e5m2"})
    if (
        sparse_or_scaled
        or mixed
        or a not in WIDTH
        or k not in DEPTHS[WIDTH[a]]
        or d not in ACCUMULATORS[a]
        or c != d
    ):
        raise UnsupportedInstruction(f"`{opcode}`")
    return MmaSyncForm(k, a, b, d, "satfinite" in parts, 2 * M * N * k)


@handler("mma.sync", family=Family.MMA_SYNC, destinations=1, collective=Collective.WARP)
def mma_sync(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mma.sync computes D = A B + C on fragments, at once."""
    f = form(ins.parts)
    d, a, b, c = ins.operands[:4]
    left = a_matrix(w.read_vec(a), f.a, f.k)
    right = b_matrix(w.read_vec(b), f.b, f.k)
    with np.errstate(all="ignore"):
        total = accumulate(left @ right.T, accumulator(w.read_vec(c), f.d), f)
    w.write_vec(d, accumulator_words(total, f.d), mask)
    m.stats.mma_flops += f.flops


def _fragments(words: np.ndarray, fmt: str, row_halves: int) -> np.ndarray:
    """float32[row half, column half, 32, elements of a word]; registers run through row halves first."""
    values = decode_elements(np.ascontiguousarray(words)[:, :, None], fmt)  # [registers, 32, per word]
    return values.reshape(-1, row_halves, 32, values.shape[-1]).transpose(1, 0, 2, 3)


def a_matrix(words: np.ndarray, fmt: str, k: int) -> np.ndarray:
    """float32[16, k] of A's registers uint32[n, 32]."""
    parts = _fragments(words, fmt, 2)
    per_word = parts.shape[-1]
    # [row half, column half, group, in group, element] -> row = half * 8 + group
    ordered = parts.reshape(2, -1, 8, 4, per_word).transpose(0, 2, 1, 3, 4)
    return ordered.reshape(M, k)


def b_matrix(words: np.ndarray, fmt: str, k: int) -> np.ndarray:
    """float32[8, k]: B's columns, of its registers uint32[n, 32]."""
    parts = _fragments(words, fmt, 1)[0]
    ordered = parts.reshape(-1, 8, 4, parts.shape[-1]).transpose(1, 0, 2, 3)
    return ordered.reshape(N, k)


def accumulator(words: np.ndarray, fmt: str) -> np.ndarray:
    """[16, 8] of C's registers: float32, or int32 for s32."""
    words = np.ascontiguousarray(words)
    if fmt == "f16":  # register i: rows i * 8 + group, two columns a word
        return words.view(np.float16).reshape(2, 8, 8).reshape(M, N).astype(np.float32)
    pairs = words.reshape(2, 2, 8, 4).transpose(0, 2, 3, 1)  # [row half, group, in group, column]
    return np.ascontiguousarray(pairs).view(np.float32 if fmt == "f32" else np.int32).reshape(M, N)


def accumulator_words(values: np.ndarray, fmt: str) -> np.ndarray:
    """Registers uint32[n, 32] of D [16, 8]."""
    if fmt == "f16":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint32).reshape(2, 32)
    pairs = np.ascontiguousarray(values).view(np.uint32).reshape(2, 8, 4, 2).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(pairs).reshape(4, 32)


def accumulate(product: np.ndarray, c: np.ndarray, f: MmaSyncForm) -> np.ndarray:
    """product + c; integers wrap, or saturate with .satfinite."""
    if f.d != "s32":
        return product + c
    total = product.astype(np.int64) + c
    if f.saturate:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    return total.astype(np.uint32).view(np.int32)
