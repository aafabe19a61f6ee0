"""Attention and experts of Hugging Face transformers, 5.17 and later, computed by `warpspec.fmha` and `warpspec.moe`.

    import warpspec.engines.transformers as engine
    engine.register()
    options = dict(attn_implementation="warpspec", experts_implementation="warpspec")  # either or both
    model = AutoModelForCausalLM.from_pretrained(..., **options)
    model.generate(...)  # dynamic and static caches
    model.generate(..., past_key_values=engine.QuantizedCache("e4m3"))  # keys and values in FP8, or "nvfp4"

    engine.prepare_continuous_batching(model)
    model.generate_batch(...)  # paged cache, requests of any lengths in one launch

attention.py, experts.py and continuous_batching.py say which layers and calls are supported and which are refused.
"""

from __future__ import annotations

from functools import partial

from transformers import AttentionInterface, AttentionMaskInterface

from warpspec.engines.transformers import experts
from warpspec.engines.transformers.attention import (
    additive_mask,
    attention_forward,
    key_ranges,
    key_set_sizes,
    mask_maker,
)
from warpspec.engines.transformers.continuous_batching import (
    paged_attention_forward,
    prepare_continuous_batching,
)
from warpspec.engines.transformers.experts import attach as attach_experts
from warpspec.engines.transformers.quantized_cache import QuantizedCache

__all__ = [
    "QuantizedCache",
    "additive_mask",
    "attach_experts",
    "attention_forward",
    "key_ranges",
    "key_set_sizes",
    "mask_maker",
    "paged_attention_forward",
    "prepare_continuous_batching",
    "register",
]


def register(name: str = "warpspec", backend: str = "auto", compressed: str = "bias") -> None:
    """Make `attn_implementation=name` compute attention with `warpspec.fmha.attention(backend=backend)`, and
    `experts_implementation=name` experts with `warpspec.moe.moe_ffn(backend=backend)`.

    compressed: "bias" or "key_sets", how layers with compressed keys are computed (see attention.py). Raises ValueError
    for any other value.
    """
    mask = mask_maker(compressed)  # raises before anything is registered

    def forward(module, query, key, value, attention_mask, **kwargs):
        return attention_forward(module, query, key, value, attention_mask, backend=backend, **kwargs)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    # The name that transformers 5.17's continuous batching gives a model loaded with `name`.
    AttentionInterface.register(f"paged|{name}", partial(paged_attention_forward, backend=backend))
    experts.register(name, backend)
