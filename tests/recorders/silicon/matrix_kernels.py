"""Kernels of matrix instructions of one warp: ldmatrix, stmatrix, mma.sync."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from silicon import inputs
from silicon.assembly import ptx
from silicon.case import Case, unwritten
from silicon.memory_kernels import shared_bytes

WARP = 32

# ---- ldmatrix, stmatrix --------------------------------------------------------------------------------

MATRIX_BYTES = 8 * 16
COUNTS = (1, 2, 4)


def _registers(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


@cute.kernel
def _matrices(source: cute.Tensor, loaded: cute.Tensor, stored: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    size = 4 * MATRIX_BYTES
    smem = shared_bytes(2 * size)
    base = smem.iterator.toint()
    for i in cutlass.range_constexpr(size // WARP):
        smem[i * WARP + lane] = source[i * WARP + lane]
    cute.arch.sync_warp()
    row = base + ((lane * 5 + 2) % WARP) * 16  # rows of the matrices lie in no order
    for n in cutlass.range_constexpr(2 * len(COUNTS)):
        count, trans = COUNTS[n // 2], ".trans" if n % 2 else ""
        load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {_registers(count)}, [${count}];"
        values = ptx(load, row, results=count)
        for i in cutlass.range_constexpr(count):
            loaded[n, i, lane] = values[i]
        for i in cutlass.range_constexpr(size // WARP):
            smem[size + i * WARP + lane] = cutlass.Uint8(0)
        cute.arch.sync_warp()
        store = f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [$0], {_registers(count, 1)};"
        ptx(store, row + size, *values, results=0)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(size // WARP):
            stored[n, i * WARP + lane] = smem[size + i * WARP + lane]
        cute.arch.sync_warp()


@cute.jit
def matrices(source: cute.Tensor, loaded: cute.Tensor, stored: cute.Tensor):
    _matrices(source, loaded, stored).launch(grid=(1, 1, 1), block=(WARP, 1, 1))


# ---- mma.sync ------------------------------------------------------------------------------------------

# (shape, D, A, B, C types, words of A, of B, of C)
MMAS = (
    ("m16n8k16", "f32.bf16.bf16.f32", 4, 2, 4),
    ("m16n8k16", "f32.f16.f16.f32", 4, 2, 4),
    ("m16n8k8", "f32.bf16.bf16.f32", 2, 1, 4),
    ("m16n8k8", "f32.f16.f16.f32", 2, 1, 4),
    ("m16n8k16", "f16.f16.f16.f16", 4, 2, 2),
    ("m16n8k8", "f16.f16.f16.f16", 2, 1, 2),
)


def _mma(shape: str, types: str, a: int, b: int, c: int) -> str:
    def registers(first: int, count: int) -> str:
        return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"

    operands = (registers(0, c), registers(c, a), registers(c + a, b), registers(c + a + b, c))
    return f"mma.sync.aligned.{shape}.row.col.{types} {', '.join(operands)};"


@cute.kernel
def _mma_sync(half: cute.Tensor, brain: cute.Tensor, single: cute.Tensor, out: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    for n in cutlass.range_constexpr(len(MMAS)):
        shape, types, a, b, c = MMAS[n]
        source = brain if cutlass.const_expr("bf16" in types) else half
        start = single if cutlass.const_expr(types.endswith("f32")) else half
        words = [source[i, lane] for i in range(a)]
        words += [source[4 + i, lane] for i in range(b)]
        words += [start[6 + i, lane] for i in range(c)]
        result = ptx(_mma(shape, types, a, b, c), *words, results=c)
        for i in cutlass.range_constexpr(c):
            out[n, i, lane] = result[i]


@cute.jit
def mma_sync(half: cute.Tensor, brain: cute.Tensor, single: cute.Tensor, out: cute.Tensor):
    _mma_sync(half, brain, single, out).launch(grid=(1, 1, 1), block=(WARP, 1, 1))


MMA_ROWS = 10


def _mma_operands(values: np.ndarray) -> list[torch.Tensor]:
    """values float32 [MMA_ROWS, WARP, 2] as pairs of f16, of bf16, and (the first of each) as f32 words."""
    pairs = torch.from_numpy(values)
    half, brain = (
        pairs.to(t).contiguous().view(torch.int32)[..., 0] for t in (torch.float16, torch.bfloat16)
    )
    return [half, brain, pairs[..., 0].contiguous().view(torch.int32)]


def _mma_integers() -> list[torch.Tensor]:
    """Small integers: every sum is exact in any order and any width."""
    return _mma_operands(
        (inputs.below(60, MMA_ROWS * WARP * 2, 17) - 8).reshape(MMA_ROWS, WARP, 2).astype(np.float32)
    )


def _mma_reals() -> list[torch.Tensor]:
    return _mma_operands(inputs.normals(61, MMA_ROWS * WARP * 2).reshape(MMA_ROWS, WARP, 2))


MMA_TOLERANCE = {
    "f32": 2.0**-18,
    "f16": 2.0**-9,
}  # of sums of 16 products near 1: order and width are not defined


def _near(simulated, recorded, arrays):
    """The ISA leaves the order and precision of the accumulation open (9.7.14.5): a few ulp of the sum."""
    problems = []
    for n, (_, types, *_, words) in enumerate(MMAS):
        name = types.rpartition(".")[2]
        kind = np.float32 if name == "f32" else np.float16
        got, want = (x[0][n, :words].view(kind).astype(np.float64) for x in (simulated, recorded))
        worst = np.abs(got - want).max()
        if not worst <= MMA_TOLERANCE[name] * max(1.0, np.abs(want).max()):
            problems.append(f"{MMAS[n][:2]}: off by {worst:.3g}")
    return problems


# ---- cases


def _bytes(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(inputs.words(seed, int(np.prod(shape))).astype(np.uint8).reshape(shape))


CASES = (
    Case(
        "matrices",
        matrices,
        lambda: [_bytes(39, 4 * MATRIX_BYTES)],
        lambda: [
            unwritten(torch.int32, 2 * len(COUNTS), 4, WARP),
            unwritten(torch.uint8, 2 * len(COUNTS), 4 * MATRIX_BYTES),
        ],
    ),
    Case(
        "mma_integers", mma_sync, _mma_integers, lambda: [torch.zeros(len(MMAS), 4, WARP, dtype=torch.int32)]
    ),
    Case(
        "mma_reals",
        mma_sync,
        _mma_reals,
        lambda: [torch.zeros(len(MMAS), 4, WARP, dtype=torch.int32)],
        _near,
    ),
)
