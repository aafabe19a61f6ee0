"""Tensors on the GPU for tests that run there."""

import torch

from warpspec.fmha import BlockMask


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the GPU with its strides."""
    sizes = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    copy = torch.empty_strided(sizes, tensor.stride(), dtype=tensor.dtype, device="cuda")
    copy.copy_(tensor.as_strided(sizes, tensor.stride()))
    return copy.as_strided(tensor.shape, tensor.stride())


def moved(values: dict) -> dict:
    """Tensors and lists of blocks to the GPU, the rest as it is."""
    found = {name: on_gpu(v) if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    return {name: v.to("cuda") if isinstance(v, BlockMask) else v for name, v in found.items()}


def random(*shape) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
