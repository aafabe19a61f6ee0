"""`warpspec.fmha` as an attention backend of vLLM, 0.32 and later (the V1 engine).

If both are installed, vLLM loads this as a plug-in by itself:

    vllm serve MODEL --attention-backend WARPSPEC

    vllm serve MODEL --attention-backend WARPSPEC_DIFFKV

    vllm serve MODEL --attention-config '{"backend": "WARPSPEC_MLA", "mla_prefill_backend": "WARPSPEC"}'

    vllm serve MODEL --quantization warpspec_nvfp4  # ModelOpt's NVFP4 checkpoints: our mixture of experts

The first is for decoder layers with grouped heads, sinks and sliding windows. The second is for such layers whose
values have another head size than their keys (MiMo-V2-Flash). The third is for decoding and prompts of multi-head
latent attention; models with an indexer (DeepSeek V3.2) take WARPSPEC_MLA_SPARSE in place of WARPSPEC_MLA. All of them
compute in bfloat16 or float16.
"""

from __future__ import annotations

NAME = "WARPSPEC"
QUANTIZATION = "warpspec_nvfp4"
TWO_SIZES_NAME = "WARPSPEC_DIFFKV"  # vLLM's models ask for a name with this ending
MLA_NAME = "WARPSPEC_MLA"
SPARSE_MLA_NAME = "WARPSPEC_MLA_SPARSE"
PATHS = {
    NAME: "warpspec.engines.vllm.attention.WarpspecBackend",
    TWO_SIZES_NAME: "warpspec.engines.vllm.attention.TwoSizesBackend",
    MLA_NAME: "warpspec.engines.vllm.mla.WarpspecMLABackend",
    SPARSE_MLA_NAME: "warpspec.engines.vllm.sparse_mla.WarpspecSparseBackend",
}
PREFILL_PATH = "warpspec.engines.vllm.mla.WarpspecPrefill"


def register() -> None:
    """Entry point of vLLM's plug-ins: registers the backends' names. Nothing else is imported."""
    decode, prefill = _registries()
    if NAME in decode.__members__:  # registered already
        return
    for name, path in PATHS.items():
        _register_name(decode, name, path)
    _register_name(prefill, NAME, PREFILL_PATH)
    _register_quantization()


def _registries() -> tuple:
    """vLLM's lists of backends: of attention, and of latent attention's prompts."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum, MLAPrefillBackendEnum


def _register_name(registry, name: str, path: str) -> None:
    member = registry.register(name, path)
    number = _registries().index(registry)
    # vLLM sends its configuration to new processes, which unpickle it before they load plug-ins.
    member.__reduce_ex__ = lambda protocol: (registered, (number, name))


def registered(registry: int, name: str):
    """The member of a name in one of vLLM's lists (``_registries``), in a process that may not have loaded plug-ins."""
    register()
    return _registries()[registry][name]


def _register_quantization() -> None:
    """Register `--quantization warpspec_nvfp4`; what it needs is imported with the first checkpoint."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    @register_quantization_config(QUANTIZATION)
    class Checkpoints(QuantizationConfig):
        """The class that vLLM asks before it reads a checkpoint."""

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
    """Replace vLLM's CPU backends by ours, for tests: vLLM offers no choice on a CPU.

    WARPSPEC_BACKEND names the kernel ("sim" or "reference").
    """
    from vllm.v1.attention.backends.mla.prefill.registry import register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import register_backend

    register()
    attention, *latent, prompts = _cpu_backends()
    register_backend(attention, PATHS[NAME])
    for backend in latent:
        register_backend(backend, PATHS[MLA_NAME])
    register_mla_prefill_backend(prompts, PREFILL_PATH)
    _choose_anew()


def restore_cpu_attention() -> None:
    """Undo ``replace_cpu_attention``."""
    for backend in _cpu_backends():
        backend.clear_override()
    _choose_anew()


def _choose_anew() -> None:
    """Let the next engine choose its backends: vLLM remembers a choice by head sizes, dtype and cache format."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.mla.prefill import selector as prompts

    selector._cached_get_attn_backend.cache_clear()
    prompts._auto_select_mla_prefill_backend.cache_clear()


def _cpu_backends() -> tuple:
    """vLLM's backends on a CPU: attention; latent attention without and with AMX; the latter's prompts."""
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backends

    return Backends.CPU_ATTN, Backends.CPU_MLA, Backends.AMX_MLA, MLAPrefillBackendEnum.CPU
