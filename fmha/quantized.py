"""Keys and values in FP8: their formats, the checks of their scales, and what they are worth. Host side.

k = code * k_scale and v = code * v_scale, with a scale of the tensor, of a KV head, or of a KV head of a request.
Kernels turn codes to 16 bits, which is exact, and compute with those: k_scale becomes part of the softmax scale, and
O is multiplied with v_scale. Both are read on the device.
"""

from __future__ import annotations

import torch

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
SCALES = ("k_scale", "v_scale")


def check_scales(operands, batch: int, heads_kv: int, device) -> None:
    """Check k_scale and v_scale: fp32 of shape [], [1], [Hkv] or [B, Hkv], where k and v are."""
    for name in SCALES:
        scale = getattr(operands, name)
        if scale is None:
            continue
        if operands.k.dtype not in FORMATS:
            raise ValueError(f"{name}: only FP8 keys and values have scales, k is {operands.k.dtype}")
        if scale.dtype != torch.float32:
            raise TypeError(f"{name}: dtype must be torch.float32, got {scale.dtype}")
        if scale.device != device:
            raise ValueError(
                f"{name}: device must be q's, {device}, where the kernel reads it, got {scale.device}"
            )
        if tuple(scale.shape) not in ((), (1,), (heads_kv,), (batch, heads_kv)):
            raise ValueError(
                f"{name}: shape must be [], [1], [Hkv={heads_kv}] or [B={batch}, Hkv={heads_kv}], "
                f"got {list(scale.shape)}"
            )


def spread(scale: torch.Tensor | None, batch: int, heads_kv: int) -> torch.Tensor | None:
    """A scale as kernels read it, [B, Hkv, 1]; a view."""
    return None if scale is None else scale.detach().expand(batch, heads_kv).unsqueeze(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 keys or values as kernels take them; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FORMATS else tensor


def dequantized(codes: torch.Tensor, scale: torch.Tensor | None, batch: int, head: int) -> torch.Tensor:
    """fp32: the keys or values of one KV head of a request. scale: from ``spread``."""
    values = codes.float()
    return values if scale is None else values * scale[batch, head]
