"""Experts from safetensors files, in the forms they are published in.

The form is recognised by the names of the tensors under the layer's name. If each expert has its own linear layers
L = layer.<e>.gate_proj, up_proj, down_proj or w1, w3, w2, the tensors of L are

    compressed-tensors NVFP4   L.weight_packed, L.weight_scale (e4m3), L.weight_global_scale (1 / global scale)
    compressed-tensors MXFP4   L.weight_packed, L.weight_scale (ue8m0 as uint8)
    ModelOpt NVFP4             L.weight (uint8), L.weight_scale (e4m3), L.weight_scale_2 (global scale)
    MXFP4                      L.weight (int8 or uint8), L.scale (ue8m0)
    FP8 by blocks of 128x128   L.weight (e4m3), L.scale or L.weight_scale_inv; requantised
    not quantised              L.weight (floating); quantised here

and L.bias if it has one. If all experts are stored together, the tensors are

    gpt-oss MXFP4              layer.gate_up_proj_blocks, _scales, _bias and layer.down_proj_blocks, _scales, _bias;
                               rows of gate and up alternate

The global scale of the activations before down comes from L.input_scale (ModelOpt) or L.input_global_scale
(compressed-tensors, inverse) where they are present.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from warpspec.common.checks import check_int, check_kind
from warpspec.common.nvfp4 import NVFP4Tensor, from_mxfp4, quantize
from warpspec.moe.experts import NVFP4Experts

NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
FP8_BLOCK = 128  # rows and columns that share a scale
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


class Checkpoint:
    """Tensors by name, from a .safetensors file, or from a folder with one or with the index of a sharded
    checkpoint."""

    def __init__(self, path: str | Path):
        check_kind("path", path, (str, Path))
        path = Path(path)
        table = path / INDEX
        if path.is_dir() and table.exists():
            self.files = {
                name: path / shard for name, shard in json.loads(table.read_text())["weight_map"].items()
            }
            return
        file = path / SINGLE_FILE if path.is_dir() else path
        if not file.exists():
            raise FileNotFoundError(f"path: there is no checkpoint at {file}")
        with _open(file) as tensors:
            self.files = dict.fromkeys(tensors.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.files:
            raise KeyError(f"the checkpoint holds no tensor {name}")
        with _open(self.files[name]) as tensors:
            return tensors.get_tensor(name)

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor, or None if there is none."""
        if name not in self:
            return None
        return self[name]

    def count_experts(self, layer: str) -> int:
        """Number of experts that have their own tensors under the layer's name."""
        numbers = {
            name[len(layer) + 1 :].partition(".")[0] for name in self.files if name.startswith(layer + ".")
        }
        return len({number for number in numbers if number.isdigit()})


def _open(file: Path):
    from safetensors import safe_open  # an optional dependency

    return safe_open(file, framework="pt")


def load_experts(
    path: str | Path | Checkpoint,
    layer: str,
    *,
    experts: int | None = None,
    shared: str | None = None,
    intermediate_scale: torch.Tensor | float | None = None,
) -> NVFP4Experts:
    """The experts of one layer, on the CPU.

    Args:
        path: a .safetensors file, or a folder with model.safetensors or with model.safetensors.index.json.
        layer: the experts' name, such as "model.layers.0.mlp.experts". The module's docstring lists the forms.
        experts: load only this many, from the first; None: all.
        shared: name of the shared expert, such as "model.layers.0.mlp.shared_experts"; it becomes the last expert.
        intermediate_scale: as in `NVFP4Experts.quantize`; None: the checkpoint's, if it has one for every expert.

    Raises:
        FileNotFoundError, KeyError: there is no such file or tensor. ValueError: tensors that do not fit. TypeError,
        ValueError: naming an argument.
    """
    check_kind("layer", layer, str)
    if experts is not None:
        check_int("experts", experts)
    if shared is not None:
        check_kind("shared", shared, str)
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    if f"{layer}.gate_up_proj_blocks" in checkpoint:
        if shared is not None:
            raise ValueError(f"shared: gpt-oss layers have no shared expert, got {shared!r}")
        return _load_fused(checkpoint, layer, experts, intermediate_scale)
    present = checkpoint.count_experts(layer)
    if present == 0:
        raise KeyError(f"the checkpoint holds no experts under {layer}")
    if experts is not None and not 1 <= experts <= present:
        raise ValueError(f"experts: must be within 1..{present}, got {experts}")
    prefixes = [f"{layer}.{e}" for e in range(present if experts is None else experts)]
    prefixes += [] if shared is None else [shared]
    gate, up, down = zip(*(_matrices(checkpoint, prefix) for prefix in prefixes), strict=True)
    if intermediate_scale is None:
        intermediate_scale = _input_scales(checkpoint, down)
    biases = {
        name: _stack([checkpoint.get(f"{linear}.bias") for linear in linears])
        for name, linears in (("gate_bias", gate), ("up_bias", up), ("down_bias", down))
    }
    weights = (
        _stack_weights([_linear(checkpoint, linear) for linear in linears]) for linears in (gate, up, down)
    )
    return NVFP4Experts.quantize(
        *weights, **biases, intermediate_scale=intermediate_scale, shared=int(shared is not None)
    )


def _matrices(checkpoint: Checkpoint, expert: str) -> list[str]:
    """Names of an expert's gate, up and down layers."""
    for names in NAMES:
        first = f"{expert}.{names[0]}"
        if f"{first}.weight" in checkpoint or f"{first}.weight_packed" in checkpoint:
            return [f"{expert}.{name}" for name in names]
    raise KeyError(f"the checkpoint holds none of {', '.join(names[0] for names in NAMES)} under {expert}")


def _load_fused(checkpoint: Checkpoint, layer: str, experts: int | None, intermediate_scale) -> NVFP4Experts:
    """Load gpt-oss experts: blocks uint8 [E, N, K/32, 16], scales uint8 [E, N, K/32], bias [E, N]."""

    def matrix(name):
        parts = [checkpoint[f"{layer}.{name}_{part}"] for part in ("blocks", "scales", "bias")]
        if experts is not None and not 1 <= experts <= len(parts[0]):
            raise ValueError(f"experts: must be within 1..{len(parts[0])}, got {experts}")
        blocks, scales, bias = (part[:experts] for part in parts)
        return blocks.flatten(2), scales, bias

    both, both_scales, both_bias = matrix("gate_up_proj")
    gate, up = (from_mxfp4(both[:, i::2].contiguous(), both_scales[:, i::2].contiguous()) for i in (0, 1))
    down, down_scales, down_bias = matrix("down_proj")
    return NVFP4Experts.quantize(
        gate,
        up,
        from_mxfp4(down, down_scales),
        gate_bias=both_bias[:, 0::2],
        up_bias=both_bias[:, 1::2],
        down_bias=down_bias,
        intermediate_scale=intermediate_scale,
    )


def _linear(checkpoint: Checkpoint, name: str) -> NVFP4Tensor | torch.Tensor:
    """One expert's matrix [N, K]: an NVFP4Tensor, or fp32 that is still to be quantised."""
    packed, scale = checkpoint.get(f"{name}.weight_packed"), checkpoint.get(f"{name}.weight_scale")
    if packed is not None:
        if scale is None:
            raise KeyError(f"the checkpoint holds no tensor {name}.weight_scale")
        inverse = checkpoint.get(f"{name}.weight_global_scale")
        if inverse is None:
            return from_mxfp4(packed, _ue8m0(scale))
        return NVFP4Tensor(packed, scale, 1.0 / inverse.float().reshape(()))
    weight = checkpoint[f"{name}.weight"]
    other = checkpoint.get(f"{name}.scale")
    if other is None:
        other = checkpoint.get(f"{name}.weight_scale_inv")
    if weight.dtype in (torch.uint8, torch.int8):
        if scale is not None:
            return NVFP4Tensor(
                weight.view(torch.uint8), scale, checkpoint[f"{name}.weight_scale_2"].float().reshape(())
            )
        if other is None:
            raise KeyError(f"the checkpoint holds no scale of {name}.weight")
        return from_mxfp4(weight.view(torch.uint8), _ue8m0(other))
    if weight.dtype == torch.float8_e4m3fn:
        if other is None:
            raise KeyError(f"the checkpoint holds no scale of {name}.weight")
        spread = other.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        return weight.float() * spread[: weight.shape[0], : weight.shape[1]]
    return weight.float()


def _ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """MXFP4's scales as uint8, whatever dtype they are stored in."""
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"scale: MXFP4's must be uint8 or float8_e8m0fnu, got {scale.dtype}")
    return scale.view(torch.uint8)


def _stack_weights(parts: list[NVFP4Tensor | torch.Tensor]) -> NVFP4Tensor | torch.Tensor:
    """Stack E matrices to [E, N, K]. If only some are quantised (a shared expert often is not), quantise the others."""
    shapes = {tuple(part.shape) for part in parts}
    if len(shapes) > 1:
        raise ValueError(f"experts: matrices must have one shape, got {sorted(shapes)}")
    if not any(isinstance(part, NVFP4Tensor) for part in parts):
        return torch.stack(parts)
    parts = [part if isinstance(part, NVFP4Tensor) else quantize(part) for part in parts]
    return NVFP4Tensor(
        torch.stack([part.data for part in parts]),
        torch.stack([part.scale.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
        torch.stack([part.global_scale for part in parts]),
    )


def _stack(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    if any(part is None for part in parts):
        return None
    return torch.stack(parts).float()


def _input_scales(checkpoint: Checkpoint, linears: tuple[str, ...]) -> torch.Tensor | None:
    """fp32 [E]: input scales that the checkpoint gives for these layers; None unless every layer has one."""
    scales = []
    for linear in linears:
        scale, inverse = (
            checkpoint.get(f"{linear}.{name}") for name in ("input_scale", "input_global_scale")
        )
        if scale is None and inverse is None:
            return None
        scales.append(scale.float().reshape(()) if scale is not None else 1.0 / inverse.float().reshape(()))
    return torch.stack(scales)
