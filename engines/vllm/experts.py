"""Experts in NVFP4: ModelOpt's checkpoints with `warpspec.moe` instead of vLLM's own kernels.

vLLM computes the checkpoint's other quantised layers, as in its own configuration of such checkpoints.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE

from warpspec.common.errors import UnsupportedProblem
from warpspec.common.nvfp4 import NVFP4Tensor
from warpspec.engines.vllm import QUANTIZATION
from warpspec.moe import NVFP4Experts, moe_ffn

ACTIVATIONS = {MoEActivation.SILU: "swiglu"}


class ModelOptExperts(ModelOptNvFp4FusedMoE):
    """The method that vLLM calls for a layer of experts.

    Parameters have ModelOpt's names and shapes, which vLLM loads if the method's class name contains "ModelOpt".
    """

    def __init__(self, quant_config, moe_config) -> None:
        # Bypasses the parent, which looks for one of vLLM's kernels.
        FusedMoEMethodBase.__init__(self, moe_config)
        if quant_config.quant_method != "NVFP4":
            raise UnsupportedProblem(
                f"--quantization {QUANTIZATION}: activations must be NVFP4 too, the checkpoint says "
                f"{quant_config.quant_method}"
            )
        self.quant_config = quant_config
        self.use_global_sf = False

    def process_weights_after_loading(self, layer) -> None:
        if layer.activation not in ACTIVATIONS:
            raise UnsupportedProblem(f"activation: must be SiLU, got {layer.activation}")
        width = layer.w13_weight.shape[1] // 2  # gate, followed by up
        halves = slice(None, width), slice(width, None)
        gate, up = (
            NVFP4Tensor(
                layer.w13_weight[:, rows].contiguous(),
                layer.w13_weight_scale[:, rows].contiguous(),
                layer.w13_weight_scale_2[:, index].float().contiguous(),
            )
            for index, rows in enumerate(halves)
        )
        down = NVFP4Tensor(layer.w2_weight.data, layer.w2_weight_scale.data, layer.w2_weight_scale_2.float())
        scale = layer.w2_input_scale.float()
        experts = NVFP4Experts.quantize(gate, up, down, intermediate_scale=scale)
        layer.warpspec_experts = experts.for_backend()
        # The weights' numbers are in the new layout now.
        for name in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            for matrix in ("w13", "w2"):
                delattr(layer, f"{matrix}_{name}")

    def get_fused_moe_quant_config(self, layer) -> None:
        """None: the layer does not go through vLLM's kernels."""

    @property
    def is_monolithic(self) -> bool:
        return False

    def apply(
        self, layer, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None
    ) -> torch.Tensor:
        """[tokens, hidden]: the weighted sum of the routed experts. The caller adds shared experts."""
        if layer.apply_router_weight_on_input:
            raise UnsupportedProblem("apply_router_weight_on_input: not supported")
        if layer.expert_map is not None:  # ids of other ranks' experts become -1
            topk_ids = layer.expert_map[topk_ids.long()]
        return moe_ffn(x, layer.warpspec_experts, topk_ids.int(), topk_weights.float(), activation="swiglu")


class NVFP4Config(ModelOptNvFp4Config):
    """ModelOpt's configuration, with our experts."""

    FusedMoEMethodCls = ModelOptExperts

    def get_name(self) -> str:
        return QUANTIZATION
