"""Keys and values in FP8 and NVFP4: checks of their arguments, and dequantisation. Host side.

k = code * k_scale and v = code * v_scale, with a scale per tensor, per KV head, or per request and KV head. In
NVFP4 a code is an e2m1 number times the e4m3 scale of its block of 16. Kernels convert codes to 16 bits, which is
exact, and compute with those: k_scale becomes part of the softmax scale, and O is multiplied by v_scale. The device
reads both.
"""

from __future__ import annotations

import torch

from warpspec.common import nvfp4
from warpspec.common.checks import check_last_contiguous, check_strided, check_tensor, shape_of
from warpspec.common.kv_formats import QUANTIZED, SCALE_ROWS, unswizzle_block_scales
from warpspec.common.outputs import has_memory

FORMATS = {one.dtype: name for name, one in QUANTIZED.items()}
BYTES = QUANTIZED["nvfp4"].dtype  # two e2m1 codes each
BLOCK = QUANTIZED["nvfp4"].block
BLOCK_DTYPES = (torch.uint8, torch.float8_e4m3fn)  # dtypes of block scales
SCALES = ("k_scale", "v_scale")
BLOCK_SCALES = ("k_block_scales", "v_block_scales")


def head_size(tensor: torch.Tensor) -> int:
    """Numbers in a row of keys or values."""
    return tensor.shape[-1] * (2 if tensor.dtype == BYTES else 1)


def check_scales(operands, batch: int, heads_kv: int, device) -> None:
    """Check k_scale and v_scale: fp32 of shape [], [1], [Hkv] or [B, Hkv], where k and v are."""
    for name in SCALES:
        scale = getattr(operands, name)
        if scale is None:
            continue
        if operands.k.dtype not in FORMATS:
            raise ValueError(
                f"{name}: only keys and values in FP8 or NVFP4 have scales, k is {operands.k.dtype}"
            )
        check_strided(name, scale)
        if scale.dtype != torch.float32:
            raise TypeError(f"{name}: dtype must be torch.float32, got {scale.dtype}")
        if scale.device != device:
            raise ValueError(
                f"{name}: device must be q's, {device}, where the kernel reads it, got {scale.device}"
            )
        if tuple(scale.shape) not in ((), (1,), (heads_kv,), (batch, heads_kv)):
            raise ValueError(
                f"{name}: shape must be [], [1], [Hkv={heads_kv}] or [B={batch}, Hkv={heads_kv}], "
                f"got {shape_of(scale)}"
            )


def check_block_scales(operands, swizzled: bool, memory: bool) -> None:
    """Check k_block_scales, v_block_scales and the option ``swizzled`` against k and v, whose shapes are right.

    memory: whether addresses are meaningful.
    """
    for name, codes in zip(BLOCK_SCALES, (operands.k, operands.v), strict=True):
        blocks = getattr(operands, name)
        if operands.k.dtype != BYTES or codes is None:
            if blocks is not None:
                why = "where v is None, V's are K's" if codes is None else f"k is {operands.k.dtype}"
                raise ValueError(
                    f"{name}: only keys and values in NVFP4 (torch.uint8) have block scales, {why}"
                )
            continue
        if blocks is None:
            raise ValueError(
                f"{name}: k of torch.uint8 is NVFP4 and needs block scales, got None (FP8 in bytes: view it as "
                "torch.float8_e4m3fn or torch.float8_e5m2)"
            )
        size = head_size(codes)
        if size % BLOCK:
            raise ValueError(f"{name[0]}: head size must be a multiple of {BLOCK} in NVFP4, got {size}")
        check_tensor(name, blocks, BLOCK_DTYPES, (*codes.shape[:-1], size // BLOCK), operands.q.device)
        check_block_rows(name, blocks, memory)
    if not swizzled:
        return
    if operands.k.dtype != BYTES:
        raise ValueError(f"swizzled: only block scales of NVFP4 can be, k is {operands.k.dtype}")
    if operands.v is None:
        raise ValueError("swizzled: K's block scales are never swizzled, so V's cannot be where v is None")
    if operands.cu_seqlens_k is not None:
        raise ValueError("swizzled: packed keys (cu_seqlens_k) have no pages whose rows could be swizzled")
    rows, count = operands.v.shape[1], head_size(operands.v) // BLOCK
    if rows % SCALE_ROWS or count % SCALE_ROWS:
        raise ValueError(
            f"swizzled: needs a multiple of {SCALE_ROWS} keys in a page or batch row, and as many blocks in a row of "
            f"V, got {rows} keys and {count} blocks"
        )


def check_block_rows(name: str, blocks: torch.Tensor, memory: bool) -> None:
    """Raise ValueError unless rows of block scales are contiguous and aligned to their size, as copies of them are."""
    check_last_contiguous(name, blocks)
    width = block_alignment(blocks.shape[-1])
    wrong = [
        step for step, n in zip(blocks.stride()[:-1], blocks.shape, strict=False) if n > 1 and step % width
    ]
    off = blocks.data_ptr() % width if memory and has_memory(blocks) else 0
    if blocks.numel() and (wrong or off):
        raise ValueError(
            f"{name}: rows must be aligned to {width} bytes, got strides {tuple(blocks.stride())} at an address {off} "
            "bytes off"
        )


def block_alignment(count: int) -> int:
    """Bytes to which a row of this many block scales is aligned: the largest power of two that divides it."""
    return count & -count


def spread(scale: torch.Tensor | None, batch: int, heads_kv: int) -> torch.Tensor | None:
    """A scale as kernels read it, [B, Hkv, 1]; a view."""
    return None if scale is None else scale.detach().expand(batch, heads_kv).unsqueeze(-1)


def as_bytes(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """8-bit numbers as bytes, which kernels take; other tensors, and None, unchanged."""
    if tensor is None or tensor.element_size() > 1:
        return tensor
    return tensor.view(torch.uint8)


def dequantized(codes: torch.Tensor, blocks: torch.Tensor | None) -> torch.Tensor:
    """Keys or values [..., D] in fp32, without their k_scale or v_scale. blocks: linear block scales of NVFP4."""
    if codes.dtype != BYTES:
        return codes.float()
    values = nvfp4.packed_values(codes).unflatten(-1, (-1, BLOCK))
    return (values * blocks.view(torch.float8_e4m3fn).float()[..., None]).flatten(-2)


def linear(blocks: torch.Tensor | None, swizzled: bool) -> torch.Tensor | None:
    """Block scales [pages, page_size, Hkv, S], or [B, Sk, Hkv, S], in the order of keys; bytes."""
    if blocks is None:
        return None
    blocks = blocks.view(torch.uint8)
    return unswizzle_block_scales(blocks) if swizzled else blocks
