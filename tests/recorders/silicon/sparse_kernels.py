"""Kernels of products with a sparse A: mma.sp of a warp, wgmma.mma_async.sp of a warpgroup."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from silicon import inputs
from silicon.assembly import ptx
from silicon.case import Case, unwritten
from silicon.memory_kernels import shared_bytes

WARP, WARPGROUP = 32, 128
ORDERED = (0b0100, 0b1000, 0b1001, 0b1100, 0b1101, 0b1110)  # two different positions of four, ascending
OF_TF32 = (0b0100, 0b1110)
# (shape, D, A, B, C types, words of A, of B, sparsity selector)
MMAS = (
    ("m16n8k16", "f32.f16.f16.f32", 2, 2, 0), ("m16n8k16", "f32.f16.f16.f32", 2, 2, 1),
    ("m16n8k16", "f32.f16.f16.f32", 2, 2, 2), ("m16n8k16", "f32.f16.f16.f32", 2, 2, 3),
    ("m16n8k16", "f32.bf16.bf16.f32", 2, 2, 1),
    ("m16n8k32", "f32.f16.f16.f32", 4, 4, 0), ("m16n8k32", "f32.f16.f16.f32", 4, 4, 1),
    ("m16n8k32", "f32.bf16.bf16.f32", 4, 4, 0), ("m16n8k32", "f32.bf16.bf16.f32", 4, 4, 1),
    ("m16n8k8", "f32.tf32.tf32.f32", 2, 2, 0), ("m16n8k8", "f32.tf32.tf32.f32", 2, 2, 1),
    ("m16n8k8", "f32.tf32.tf32.f32", 2, 2, 2), ("m16n8k8", "f32.tf32.tf32.f32", 2, 2, 3),
    ("m16n8k16", "f32.tf32.tf32.f32", 4, 4, 0), ("m16n8k16", "f32.tf32.tf32.f32", 4, 4, 1),
    ("m16n8k32", "s32.s8.s8.s32", 2, 2, 0), ("m16n8k32", "s32.s8.s8.s32", 2, 2, 1),
    ("m16n8k32", "s32.u8.u8.s32", 2, 2, 1), ("m16n8k64", "s32.s8.s8.s32", 4, 4, 0),
    ("m16n8k64", "s32.u8.u8.s32", 4, 4, 0), ("m16n8k64", "f32.e4m3.e4m3.f32", 4, 4, 0),
    ("m16n8k64", "f32.e5m2.e5m2.f32", 4, 4, 0),
)  # fmt: skip
# (shape, types, sparsity selector)
WGMMAS = (
    ("m64n8k32", "f32.f16.f16", 0), ("m64n8k32", "f32.f16.f16", 1), ("m64n8k32", "f32.bf16.bf16", 0),
    ("m64n8k32", "f32.bf16.bf16", 1), ("m64n8k16", "f32.tf32.tf32", 0), ("m64n8k16", "f32.tf32.tf32", 1),
    ("m64n8k64", "s32.s8.s8", 0), ("m64n8k64", "s32.u8.u8", 0), ("m64n8k64", "f32.e4m3.e4m3", 0),
    ("m64n8k64", "f32.e5m2.e5m2", 0),
)  # fmt: skip
A_BYTES, B_BYTES = 64 * 32, 8 * 64  # as stored: 32 bytes of K a row of A, 64 a row of B
CORE = 8 * 16  # bytes of a core matrix


def _registers(count: int, first: int) -> str:
    return "{" + ", ".join(f"${first + i}" for i in range(count)) + "}"


@cute.kernel
def _mma_sp(a: cute.Tensor, b: cute.Tensor, metadata: cute.Tensor, out: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    for n in cutlass.range_constexpr(len(MMAS)):
        shape, types, of_a, of_b, selector = MMAS[n]
        words = (
            [a[n, i, lane] for i in range(of_a)] + [b[n, i, lane] for i in range(of_b)] + [metadata[n, lane]]
        )
        zero = "{%z, %z, %z, %z}"
        operands = (_registers(4, 0), _registers(of_a, 4), _registers(of_b, 4 + of_a), zero)
        text = (
            f"{{ .reg .b32 %z; mov.b32 %z, 0; mma.sp::ordered_metadata.sync.aligned.{shape}.row.col.{types} "
            f"{', '.join(operands)}, ${4 + of_a + of_b}, {selector}; }}"
        )
        result = ptx(text, *words, results=4)
        for i in cutlass.range_constexpr(4):
            out[n, i, lane] = result[i]


@cute.jit
def mma_sp(a: cute.Tensor, b: cute.Tensor, metadata: cute.Tensor, out: cute.Tensor):
    _mma_sp(a, b, metadata, out).launch(grid=(1, 1, 1), block=(WARP, 1, 1))


@cute.kernel
def _wgmma_sp(a: cute.Tensor, b: cute.Tensor, metadata: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    smem = shared_bytes(A_BYTES + B_BYTES)
    base = smem.iterator.toint()
    for n in cutlass.range_constexpr(len(WGMMAS)):
        shape, types, selector = WGMMAS[n]
        for i in cutlass.range_constexpr(A_BYTES // WARPGROUP):
            smem[i * WARPGROUP + thread] = a[n, i * WARPGROUP + thread]
        for i in cutlass.range_constexpr(B_BYTES // WARPGROUP):
            smem[A_BYTES + i * WARPGROUP + thread] = b[n, i * WARPGROUP + thread]
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        # Core matrices of A follow each other along M, then along K; those of B, 8 rows, along K.
        from_a = (base >> 4 & 0x3FFF) | (64 * 16 >> 4) << 16
        from_b = (base + A_BYTES >> 4 & 0x3FFF) | (CORE >> 4) << 16
        kind = "b32" if cutlass.const_expr(types.startswith("s32")) else "f32"
        places = "{%d0, %d1, %d2, %d3}"
        signs = {
            "s32.s8.s8": "",
            "s32.u8.u8": "",
            "f32.f16.f16": ", 1, 1, 0, 0",
            "f32.bf16.bf16": ", 1, 1, 0, 0",
        }.get(types, ", 1, 1")
        text = (
            f"{{ .reg .{kind} %d<4>; .reg .b64 %a, %b; .reg .pred %p; setp.ne.b32 %p, 0, 0; "
            + "".join(f"mov.b32 %d{i}, 0; " for i in range(4))
            + f"mov.b64 %a, {{$4, {CORE >> 4}}}; mov.b64 %b, {{$5, {CORE >> 4}}}; wgmma.fence.sync.aligned; "
            f"wgmma.mma_async.sp.sync.aligned.{shape}.{types} {places}, %a, %b, $6, {selector}, %p{signs}; "
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; "
            + "".join(f"mov.b32 ${i}, %d{i}; " for i in range(4))
            + "}"
        )
        result = ptx(text, from_a, from_b, metadata[n, thread], results=4)
        for i in cutlass.range_constexpr(4):
            out[n, i, thread] = result[i]
        cute.arch.sync_threads()


@cute.jit
def wgmma_sp(a: cute.Tensor, b: cute.Tensor, metadata: cute.Tensor, out: cute.Tensor):
    _wgmma_sp(a, b, metadata, out).launch(grid=(1, 1, 1), block=(WARPGROUP, 1, 1))


# ---- inputs: integers from -4 to 4 (of u8, 0 to 8), so that every sum is exact


def _coded(values: np.ndarray, element: str) -> np.ndarray:
    """Bytes of whole numbers in an element type."""
    tensor = torch.from_numpy(values.astype(np.float32))
    types = {
        "f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "s8": torch.int8, "u8": torch.uint8,
        "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    }  # fmt: skip
    return tensor.to(types[element]).view(torch.uint8).numpy().reshape(-1)


def _numbers(seed: int, element: str, nbytes: int) -> np.ndarray:
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(element, 1)
    least = 0 if element == "u8" else -4
    return _coded(inputs.below(seed, nbytes // size, 9).astype(np.int64) + least, element)


def _marks(seed: int, element: str, words: int) -> np.ndarray:
    choices = np.array(OF_TF32 if element == "tf32" else ORDERED, np.uint32)
    nibbles = choices[inputs.below(seed, words * 8, len(choices)).astype(np.int64)].reshape(words, 8)
    return (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32).view(np.int32)


def _of_warps() -> list[torch.Tensor]:
    kinds = [types.split(".")[1] for _, types, *_ in MMAS]
    a, b = (
        np.stack([_numbers(70 + 100 * which + n, kind, 4 * WARP * 4) for n, kind in enumerate(kinds)])
        for which in range(2)
    )
    metadata = np.stack([_marks(270 + n, kind, WARP) for n, kind in enumerate(kinds)])
    words = [torch.from_numpy(x.view(np.int32).reshape(len(MMAS), 4, WARP)) for x in (a, b)]
    return [*words, torch.from_numpy(metadata)]


def _of_warpgroups() -> list[torch.Tensor]:
    kinds = [types.split(".")[1] for _, types, _ in WGMMAS]
    a = np.stack([_numbers(370 + n, kind, A_BYTES) for n, kind in enumerate(kinds)])
    b = np.stack([_numbers(470 + n, kind, B_BYTES) for n, kind in enumerate(kinds)])
    metadata = np.stack([_marks(570 + n, kind, WARPGROUP) for n, kind in enumerate(kinds)])
    return [torch.from_numpy(x) for x in (a, b, metadata)]


CASES = (
    Case("mma_sparse", mma_sp, _of_warps, lambda: [unwritten(torch.int32, len(MMAS), 4, WARP)]),
    Case(
        "wgmma_sparse", wgmma_sp, _of_warpgroups, lambda: [unwritten(torch.int32, len(WGMMAS), 4, WARPGROUP)]
    ),
)
