"""transformers' experts modules made to compute what ours do: dequantised weights, quantised activations."""

from contextlib import contextmanager

import torch

from helpers.moe_cases import quantized
from warpspec.common import nvfp4
from warpspec.moe import NVFP4Experts
from warpspec.moe.operands import deinterleave


def dequantize_experts(module: torch.nn.Module, experts: NVFP4Experts) -> None:
    """Overwrite the module's weights with the numbers that the NVFP4 experts stand for (shared ones left out)."""
    used = slice(None, experts.experts)
    gate, up = (part[used, :, : experts.hidden] for part in deinterleave(experts.w13.dequantize()))
    scale = experts.intermediate_scale[:, None, None]
    down = (experts.w2.dequantize() / scale)[used, :, : experts.width]  # powers of two: exact
    both = (
        torch.cat([gate, up], dim=1)
        if module.is_concatenated
        else torch.stack([gate, up], dim=2).flatten(1, 2)
    )
    with torch.no_grad():
        module.gate_up_proj.copy_(both.transpose(1, 2) if module.is_transposed else both)
        module.down_proj.copy_(down.transpose(1, 2) if module.is_transposed else down)


@contextmanager
def quantised_activations(module: torch.nn.Module, experts: NVFP4Experts):
    """Inside, the module rounds to NVFP4 what goes into its experts and what `_apply_gate` returns.

    All experts have one intermediate scale here: `_apply_gate` does not know whose rows it is given.
    """
    (scale,) = experts.intermediate_scale.unique().tolist()
    apply_gate = module._apply_gate

    def rounded(gate_up):
        h = apply_gate(gate_up)
        padded = torch.nn.functional.pad(h.float(), (0, -h.shape[-1] % 16))
        return nvfp4.dequantize(nvfp4.quantize(padded, scale))[..., : h.shape[-1]].to(h.dtype)

    def before(_, arguments):
        return (quantized(arguments[0].bfloat16(), 1).to(arguments[0].dtype), *arguments[1:])

    module._apply_gate = rounded
    hook = module.register_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
        del module._apply_gate
