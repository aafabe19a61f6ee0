"""`warpspec.fmha` as an attention backend of SGLang, 0.5.23 and later.

If both are installed, SGLang loads this as a plug-in by itself:

    python -m sglang.launch_server --model-path MODEL --attention-backend warpspec --page-size 64

It supports decoder layers in bfloat16 or float16, with grouped heads, sinks, soft caps and sliding windows, including
separate pools for layers with windows (attention.py); images whose tokens see each other (images.py); latent attention
(mla.py), also with an indexer (sparse_mla.py); and drafts that form chains or trees (speculative.py).
"""

from __future__ import annotations

from contextlib import contextmanager

NAME = "warpspec"


# SGLang lists, for these models, the backends that support sinks, windows and images; ours supports them.
LISTED_MODELS = (
    "GptOssForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
)
LISTED_BACKEND = "triton"


def register() -> None:
    """Entry point of SGLang's plug-ins: registers the backend's name. The rest is imported with the first model."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:  # otherwise it is registered already
        add_attention_backend_choices([NAME])
        for function, ours in HOOKS.items():
            HookRegistry.register(function, ours, HookType.AROUND)
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
            storage_dtype=torch.uint8,  # like all entries of SGLang's own
            attention_kv_dtype=getattr(torch, "float4_e2m1fn_x2", None),
            scale_recipe="nvfp4",
        )
        for phase in methods.KVCacheAttentionPhase
    )
    methods.KV_CACHE_ATTENTION_ACCESS_REGISTRY["nvfp4"] += own


def _pass_nvfp4(check, server_args):
    """Run one of SGLang's checks of NVFP4 caches, which know only its own backends, unless ours reads the cache."""
    named = (
        server_args.attention_backend,
        server_args.prefill_attention_backend,
        server_args.decode_attention_backend,
    )
    if server_args.kv_cache_dtype == "nvfp4" and named[0] == NAME and set(named[1:]) <= {None, NAME}:
        return None
    return check(server_args)


def _has_indexer(runner) -> bool:
    """Whether a runner's model selects keys by an indexer."""
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return is_deepseek_dsa(runner.model_config.hf_config)


def _make_backend(runner):
    if _has_indexer(runner):
        from warpspec.engines.sglang import sparse_mla

        sparse_mla.offer()
        return sparse_mla.WarpspecSparseBackend(runner)
    from warpspec.engines.sglang import images
    from warpspec.engines.sglang.attention import WarpspecBackend

    images.offer(runner)
    if runner.use_mla_backend:
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

        from warpspec.engines.sglang import mla

        AttentionBackendRegistry.register(NAME, mla.forward_method)
    return WarpspecBackend(runner)


def _pass_lists(adjust, server_args):
    """Run SGLang's adjustments for a model while our name passes for one of the backends that SGLang lists."""
    from sglang.srt.arg_groups import model_hook

    named = model_hook.attention_backends_of

    def backends(view):
        architecture = model_hook.model_config_of(server_args).hf_config.architectures[0]
        if architecture not in LISTED_MODELS:
            return named(view)
        return tuple(LISTED_BACKEND if name == NAME else name for name in named(view))

    with _replaced(model_hook, "attention_backends_of", backends):
        return adjust(server_args)


def _pass_trees(adjust, server_args):
    """Run SGLang's adjustments for speculative decoding, which list the backends that read a branch's pages, while our
    name passes for a listed one."""
    from sglang.srt.arg_groups import speculative_hook

    resolved = speculative_hook.resolved_view

    class View:
        def __init__(self, view):
            self.view = view

        def __getattr__(self, name):
            value = getattr(self.view, name)
            return LISTED_BACKEND if name == "attention_backend" and value == NAME else value

    with _replaced(speculative_hook, "resolved_view", lambda *arguments: View(resolved(*arguments))):
        return adjust(server_args)


@contextmanager
def _replaced(module, name: str, ours):
    """A context in which ``ours`` replaces a module's function or class."""
    before = getattr(module, name)
    setattr(module, name, ours)
    try:
        yield
    finally:
        setattr(module, name, before)


def _offer_drafting(create, factory, setting, backends, error, **options):
    """Run SGLang's choice of a draft model's backends with ours among them.

    With options, SGLang asks for the backends of all drafting steps; without, for the backend that extends the draft
    model's cache.
    """

    def make():
        from warpspec.engines.sglang.attention import WarpspecBackend
        from warpspec.engines.sglang.speculative import Drafting

        runner = factory.draft_model_runner
        if _has_indexer(runner):
            from warpspec.engines.sglang import sparse_mla

            return NAME, sparse_mla.draft_backend(factory, whole=bool(options))
        if not options:
            return NAME, WarpspecBackend(runner)
        return NAME, Drafting(runner, factory.topk, factory.speculative_num_steps, WarpspecBackend)

    return create(factory, setting, {**backends, NAME: make}, error, **options)


HOOKS = {
    "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments": _pass_lists,
    "sglang.srt.arg_groups.speculative_hook._handle_eagle_family": _pass_trees,
    "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend": _offer_drafting,
    "sglang.srt.arg_groups.kv_cache_hook.handle_nvfp4_prefill_kv_dequant_dtype": _pass_nvfp4,
    "sglang.srt.arg_groups.kv_cache_hook.handle_kv4_compatibility": _pass_nvfp4,
}
