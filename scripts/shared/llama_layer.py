"""The attention layer of Llama 3 8B, by transformers' code.

Offers what attention_layer.py asks of a family.
"""

from __future__ import annotations

from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

from .attention_layer import AttentionLayer, KeySet, in_fp32

# What the published config.json says of attention.
MODELS = {
    "llama-3-8b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        initializer_range=0.02,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=500000.0),
    )
}
LAYERS = {"full_attention": 0}


def layers(model: str) -> dict[str, int]:
    return LAYERS


def attention_layer(model: str, kind: str) -> AttentionLayer:
    config = LlamaConfig(**MODELS[model])
    attention = modeling_llama.LlamaAttention(config, LAYERS[kind])
    return AttentionLayer(
        kind=kind,
        index=LAYERS[kind],
        config=config,
        norm=modeling_llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps),
        attention=attention,
        rotary=modeling_llama.LlamaRotaryEmbedding(config),
        make_mask=create_causal_mask,
        eager=modeling_llama.eager_attention_forward,
        project=lambda o, positions: in_fp32(attention.o_proj, o.flatten(2)),
        key_sets=lambda keys, queries, first_position: (KeySet(0, keys),),
    )
