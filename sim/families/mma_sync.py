"""mma.sync: the warp-level matrix multiply of registers. PTX ISA: "Multiply-and-Accumulate Instruction: mma".

Supported: m16n8k8 and m16n8k16 of f16 and bf16, m16n8k4 and m16n8k8 of tf32, m16n8k16 and m16n8k32 of 8-bit
floats and integers, and with a sparse A of twice these K; of
sm_120a m16n8k32 of .kind::f8f6f4 and .kind::mxf8f6f4, m16n8k64 of .kind::mxf4 and
.kind::mxf4nvf4, with scale factors ("Block Scaling for mma.sync"). Products are exact, sums float32 (int32 for
integers); an f16 accumulator rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from warpspec.sim import formats
from warpspec.sim.errors import BadDescriptor, UnsupportedInstruction
from warpspec.sim.families import sparse
from warpspec.sim.instruction import Instr
from warpspec.sim.machine import Machine
from warpspec.sim.registry import Collective, Family, handler
from warpspec.sim.tcgen05.mma import scaled_matmul
from warpspec.sim.tcgen05.operands import decode_elements
from warpspec.sim.warp import Warp

M, N = 16, 8
WIDTH = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}  # bits of a multiplicand
DEPTHS = {16: (8, 16), 32: (4, 8), 8: (16, 32)}  # K by width
SPARSE_DEPTHS = {16: (16, 32), 32: (8, 16), 8: (32, 64)}
ACCUMULATORS = {"f16": ("f16", "f32"), "bf16": ("f32",), "tf32": ("f32",), "e4m3": ("f16", "f32")}
ACCUMULATORS |= {"e5m2": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",)}
NARROW = {
    "e4m3": 0,
    "e5m2": 0,
    "e2m3": 0,
    "e3m2": 0,
    "e2m1": 2,
}  # at which bit of its byte a narrow float begins
PACKED = ("mxf4", "mxf4nvf4")  # kinds with two e2m1 a byte
# (kind, scale vector size or "") -> (factors a row, their types)
SCALINGS = {
    ("mxf8f6f4", ""): (1, ("ue8m0",)), ("mxf8f6f4", "1X"): (1, ("ue8m0",)),
    ("mxf4", ""): (2, ("ue8m0",)), ("mxf4", "2X"): (2, ("ue8m0",)),
    ("mxf4nvf4", "2X"): (2, ("ue8m0",)), ("mxf4nvf4", "4X"): (4, ("ue4m3", "ue8m0")),
}  # fmt: skip
THREAD = np.arange(32)
GROUP, IN_GROUP = THREAD // 4, THREAD % 4


@dataclass(frozen=True, slots=True)
class MmaSyncForm:
    """The meaning of an mma.sync opcode: K, types of A, B and D, FLOPs of an instruction, and .kind ("" without one).

    scales: number of scale factors of a row of A and of a column of B (0: none); scale_type: their type. sparse: A is
    stored without its zeros.
    """

    k: int
    a: str
    b: str
    d: str
    saturate: bool
    flops: int
    kind: str = ""
    scales: int = 0
    scale_type: str = ""
    sparse: bool = False


@lru_cache(maxsize=64)
def form(parts: tuple[str, ...]) -> MmaSyncForm:
    """Raises UnsupportedInstruction for shapes and types outside the list above."""
    opcode = ".".join(parts)
    shape = next((p for p in parts if p.startswith("m") and "n" in p and "k" in p), "")
    kind = next((p.removeprefix("kind::") for p in parts if p.startswith("kind::")), "")
    types = [p for p in parts if p in WIDTH or p in NARROW or p in ("f32", "s32")]
    if len(types) != 4 or not shape.startswith("m16n8k") or "row" not in parts or "col" not in parts:
        raise UnsupportedInstruction(f"`{opcode}`")
    d, a, b, c = types
    k = int(shape.removeprefix("m16n8k"))
    flops = 2 * M * N * k
    is_sparse = parts[1].startswith("sp")
    if kind and is_sparse:
        raise UnsupportedInstruction(f"`{opcode}` (sparse)")
    if kind:
        return _of_kind(opcode, parts, kind, k, (d, a, b, c), flops)
    mixed = a != b and not ({a, b} <= {"s8", "u8"} or {a, b} <= {"e4m3", "e5m2"})
    if (
        "block_scale" in parts
        or mixed
        or a not in WIDTH
        or k not in (SPARSE_DEPTHS if is_sparse else DEPTHS)[WIDTH[a]]
        or d not in ACCUMULATORS[a]
        or c != d
    ):
        raise UnsupportedInstruction(f"`{opcode}`")
    return MmaSyncForm(k, a, b, d, "satfinite" in parts, flops, sparse=is_sparse)


def _of_kind(
    opcode: str, parts: tuple[str, ...], kind: str, k: int, types: tuple[str, ...], flops: int
) -> MmaSyncForm:
    """The forms with .kind, of sm_120a."""
    d, a, b, c = types
    scaled = "block_scale" in parts
    narrow = ("e2m1",) if kind in PACKED else tuple(NARROW)
    floats = ("f32",) if scaled else ("f16", "f32")
    if a not in narrow or b not in narrow or k != (64 if kind in PACKED else 32) or d != c or d not in floats:
        raise UnsupportedInstruction(f"`{opcode}`")
    if not scaled:
        if kind != "f8f6f4":
            raise UnsupportedInstruction(f"`{opcode}`")
        return MmaSyncForm(k, a, b, d, False, flops, kind)
    size = next((p.removeprefix("scale_vec::") for p in parts if p.startswith("scale_vec::")), "")
    scales, allowed = SCALINGS.get((kind, size), (0, ()))
    if parts[-1] not in allowed:
        raise UnsupportedInstruction(f"`{opcode}`")
    return MmaSyncForm(k, a, b, d, False, flops, kind, scales, parts[-1])


@handler(
    "mma.sync", "mma.sp.sync", "mma.sp::ordered_metadata.sync",
    family=Family.MMA_SYNC, destinations=1, collective=Collective.WARP,
)  # fmt: skip
def mma_sync(m: Machine, w: Warp, ins: Instr, mask: int) -> None:
    """mma.sync computes D = A B + C on fragments, at once; with .block_scale D = (A scale_A) (B scale_B) + C. A of
    mma.sp has metadata and a sparsity selector after C."""
    f = form(ins.parts)
    d, a, b, c = ins.operands[:4]
    if f.sparse:
        left = a_matrix(w.read_vec(a), f.a, f.k // 2)
        metadata, selector = ins.operands[4:6]
        marks = sparse.fours(w.u32(metadata), w.scalar(selector, mask), WIDTH[f.a], f.k)
        left = sparse.dense(left, marks, WIDTH[f.a])
    else:
        left = a_matrix(w.read_vec(a), f.a, f.k, f.kind)
    right = b_matrix(w.read_vec(b), f.b, f.k, f.kind)
    with np.errstate(all="ignore"):
        if f.scales:
            scale_a, ids_a, scale_b, ids_b = ins.operands[4:8]
            of_a = _scales(w, f, scale_a, ids_a, mask, "A")
            of_b = _scales(w, f, scale_b, ids_b, mask, "B")
            product = scaled_matmul(left, of_a, right, of_b)
        else:
            product = left @ right.T
        total = accumulate(product, accumulator(w.read_vec(c), f.d), f)
    w.write_vec(d, accumulator_words(total, f.d), mask)
    m.stats.mma_flops += f.flops


def _scales(w: Warp, f: MmaSyncForm, operand, ids, mask: int, matrix: str) -> np.ndarray:
    """float32[rows, factors a row] of A's 16 rows, or of B's 8 columns.

    ids: {byte-id, thread-id}: which bytes of the register, and which threads of each quad hold them (for A a pair,
    rows 0 to 7 in its first thread and 8 to 15 in the second; for B one thread).
    """
    byte, thread = (w.scalar(item, mask) & 0xFFFF for item in ids.items)
    if byte not in range(0, 4, f.scales) or thread not in range(2 if matrix == "A" else 4):
        raise BadDescriptor(
            f"mma.sync with {f.scales} scale factors a row of {matrix}: byte-id {byte}, thread-id {thread}"
        )
    words = np.ascontiguousarray(w.read_vec(operand)).reshape(8, 4)  # [quad, thread]
    chosen = (
        words[:, 2 * thread : 2 * thread + 2].T.reshape(-1, 1) if matrix == "A" else words[:, thread, None]
    )
    codes = np.ascontiguousarray(chosen).view(np.uint8)[:, byte : byte + f.scales]
    return formats.table(formats.FORMATS[f.scale_type]).take(codes)


def _decoded(words: np.ndarray, fmt: str, kind: str) -> np.ndarray:
    """float32[registers, 32, elements of a word] of a multiplicand's words [registers, 32, 1]."""
    if kind in PACKED:
        return formats.decode(formats.unpack_nibbles(words.view(np.uint8)), formats.E2M1)
    if kind and fmt not in WIDTH:
        codes = words.view(np.uint8) >> NARROW[fmt]
        return formats.decode(codes & ((1 << formats.FORMATS[fmt].bits) - 1), formats.FORMATS[fmt])
    return decode_elements(words, fmt)


def _fragments(words: np.ndarray, fmt: str, row_halves: int, kind: str) -> np.ndarray:
    """float32[row half, column half, 32, elements of a word]; registers run through row halves first."""
    values = _decoded(np.ascontiguousarray(words)[:, :, None], fmt, kind)
    return values.reshape(-1, row_halves, 32, values.shape[-1]).transpose(1, 0, 2, 3)


def a_matrix(words: np.ndarray, fmt: str, k: int, kind: str = "") -> np.ndarray:
    """float32[16, k] of A's registers uint32[n, 32]."""
    parts = _fragments(words, fmt, 2, kind)
    per_word = parts.shape[-1]
    # [row half, column half, group, in group, element] -> row = half * 8 + group
    ordered = parts.reshape(2, -1, 8, 4, per_word).transpose(0, 2, 1, 3, 4)
    return ordered.reshape(M, k)


def b_matrix(words: np.ndarray, fmt: str, k: int, kind: str = "") -> np.ndarray:
    """float32[8, k]: B's columns, of its registers uint32[n, 32]."""
    parts = _fragments(words, fmt, 1, kind)[0]
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
