"""Attention and experts of Hugging Face transformers, 5.17 and later, computed by `warpspec.fmha` and `warpspec.moe`.

    import warpspec.engines.transformers as engine
    engine.register()
    options = dict(attn_implementation="warpspec", experts_implementation="warpspec")  # either or both
    model = AutoModelForCausalLM.from_pretrained(..., **options)
    model.generate(...)  # dynamic and static caches

    engine.prepare_continuous_batching(model)
    model.generate_batch(...)  # paged cache, requests of any lengths in one launch

What layers may be like, and what is refused: attention.py, experts.py; continuous batching: continuous_batching.py.
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

__all__ = [
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

    compressed: "bias" or "key_sets", the way through layers with compressed keys (see attention.py).
    """
    mask = mask_maker(compressed)  # raises before anything is registered

    def forward(module, query, key, value, attention_mask, **kwargs):
        return attention_forward(module, query, key, value, attention_mask, backend=backend, **kwargs)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)
    # The name that continuous batching of transformers 5.17 gives a model loaded with `name`.
    AttentionInterface.register(f"paged|{name}", partial(paged_attention_forward, backend=backend))
    experts.register(name, backend)
