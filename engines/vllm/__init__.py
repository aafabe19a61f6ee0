"""`warpspec.fmha` as an attention backend of vLLM, 0.32 and later (the V1 engine).

If both are installed, vLLM loads this as a plug-in by itself:

    vllm serve MODEL --attention-backend WARPSPEC

    vllm serve MODEL --quantization warpspec_nvfp4  # ModelOpt's NVFP4 checkpoints: our mixture of experts

It supports decoder layers with head sizes 64, 128, 256 and 512 in bfloat16 or float16, with grouped heads, sinks and
sliding windows.
"""

from __future__ import annotations

NAME = "WARPSPEC"
QUANTIZATION = "warpspec_nvfp4"
PATH = "warpspec.engines.vllm.attention.WarpspecBackend"


def register() -> None:
    """Entry point of vLLM's plug-ins: registers the backend's name. Nothing else is imported."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if NAME not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(NAME, PATH)
        _register_quantization()


def _register_quantization() -> None:
    """Register `--quantization warpspec_nvfp4`; what it needs is imported with the first checkpoint."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    @register_quantization_config(QUANTIZATION)
    class Checkpoints(QuantizationConfig):
        """What vLLM asks about before it reads a checkpoint."""

        @classmethod
        def get_name(cls) -> str:
            return QUANTIZATION

        @classmethod
        def get_supported_act_dtypes(cls) -> list:
            import torch

            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 100

        @staticmethod
        def get_config_filenames() -> list[str]:
            return ["hf_quant_config.json"]

        @classmethod
        def override_quantization_method(cls, hf_quant_cfg, user_quant, hf_config=None) -> str | None:
            return QUANTIZATION if user_quant == QUANTIZATION else None

        @classmethod
        def from_config(cls, config):
            from warpspec.engines.vllm.experts import NVFP4Config

            return NVFP4Config.from_config(config)

        def get_quant_method(self, layer, prefix):
            raise NotImplementedError  # from_config makes the other class


def replace_cpu_attention() -> None:
    """Replace vLLM's only CPU backend by ours, for tests: vLLM offers no choice on a CPU.

    WARPSPEC_BACKEND names the kernel ("sim" or "reference").
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register()
    register_backend(AttentionBackendEnum.CPU_ATTN, PATH)
