"""`warpspec.fmha` as an attention backend of SGLang, 0.5.23 and later.

If both are installed, SGLang loads this as a plug-in by itself:

    python -m sglang.launch_server --model-path MODEL --attention-backend warpspec --page-size 64

It supports decoder layers with head sizes 64, 128, 256 and 512 in bfloat16 or float16, with grouped heads, sinks and
sliding windows, including separate pools for layers with windows.
"""

from __future__ import annotations

NAME = "warpspec"


# SGLang lists, for these models, the backends that support sinks and windows; ours supports both.
LISTED_MODELS = ("GptOssForCausalLM",)
LISTED_BACKEND = "triton"
ADJUSTMENTS = "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments"
NVFP4_CHECKS = (
    "sglang.srt.arg_groups.kv_cache_hook.handle_nvfp4_prefill_kv_dequant_dtype",
    "sglang.srt.arg_groups.kv_cache_hook.handle_kv4_compatibility",
)


def register() -> None:
    """Entry point of SGLang's plug-ins: registers the backend's name. The rest is imported with the first model."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:  # otherwise it is registered already
        add_attention_backend_choices([NAME])
        HookRegistry.register(ADJUSTMENTS, _pass_lists, HookType.AROUND)
        for check in NVFP4_CHECKS:
            HookRegistry.register(check, _pass_nvfp4, HookType.AROUND)
        _register_nvfp4()
    register_attention_backend(NAME)(_make_backend)


def _register_nvfp4() -> None:
    """Tell SGLang that our backend reads NVFP4 caches as they lie, for prompts and for decoding."""
    import torch
    from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as methods

    own = tuple(
        methods.KVCacheAttentionAccess(
            phase,
            methods.KVCacheAttentionAccessKind.NATIVE_FP4,
            methods.KVCacheBackendMatcher(exact=frozenset({NAME})),
            storage_dtype=getattr(torch, "float4_e2m1fn_x2", None),
            attention_kv_dtype=getattr(torch, "float4_e2m1fn_x2", None),
            scale_recipe="nvfp4",
        )
        for phase in methods.KVCacheAttentionPhase
    )
    methods.KV_CACHE_ATTENTION_ACCESS_REGISTRY["nvfp4"] += own


def _pass_nvfp4(check, server_args):
    """One of SGLang's checks of NVFP4 caches, which know its own backends; left out where ours reads it."""
    named = (
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
    )
    if server_args.kv_cache_dtype == "nvfp4" and named[0] == NAME and set(named[1:]) <= {None, NAME}:
        return None
    return check(server_args)


def _make_backend(runner):
    from warpspec.engines.sglang.attention import WarpspecBackend

    return WarpspecBackend(runner)


def _pass_lists(adjust, server_args):
    """SGLang's adjustments for a model, during which our name passes for one that is in SGLang's list."""
    from sglang.srt.arg_groups import model_hook

    named = model_hook.attention_backends_of

    def backends(view):
        architecture = model_hook.model_config_of(server_args).hf_config.architectures[0]
        if architecture not in LISTED_MODELS:
            return named(view)
        return tuple(LISTED_BACKEND if name == NAME else name for name in named(view))

    model_hook.attention_backends_of = backends
    try:
        return adjust(server_args)
    finally:
        model_hook.attention_backends_of = named
