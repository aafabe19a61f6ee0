"""The attention layers of the published gpt-oss models, by transformers' code.

Offers what attention_layer.py asks of a family.
"""

from __future__ import annotations

from transformers import GptOssConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gpt_oss import modeling_gpt_oss

from .attention_layer import AttentionLayer, KeySet, in_fp32

# What both published config.json files say of attention.
ATTENTION = dict(
    hidden_size=2880,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    attention_bias=True,
    sliding_window=128,  # even layers; odd layers see everything before them
    max_position_embeddings=131072,
    initializer_range=0.02,
    rms_norm_eps=1e-5,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=150000.0,
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=4096,
    ),
)
# What differs between the two; not the attention layer.
MODELS = {
    "gpt-oss-20b": dict(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": dict(num_hidden_layers=36, num_local_experts=128),
}
LAYERS = {"sliding_attention": 0, "full_attention": 1}  # the first layer of each kind


def layers(model: str) -> dict[str, int]:
    return LAYERS


def attention_layer(model: str, kind: str) -> AttentionLayer:
    config = GptOssConfig(**ATTENTION, **MODELS[model])
    attention = modeling_gpt_oss.GptOssAttention(config, LAYERS[kind])
    sliding = kind == "sliding_attention"
    window = config.sliding_window if sliding else None
    return AttentionLayer(
        kind=kind,
        index=LAYERS[kind],
        config=config,
        norm=modeling_gpt_oss.GptOssRMSNorm(config.hidden_size, config.rms_norm_eps),
        attention=attention,
        rotary=modeling_gpt_oss.GptOssRotaryEmbedding(config),
        make_mask=create_sliding_window_causal_mask if sliding else create_causal_mask,
        eager=modeling_gpt_oss.eager_attention_forward,
        project=lambda o, positions: in_fp32(attention.o_proj, o.flatten(2)),
        key_sets=lambda keys, queries, first_position: (KeySet(0, keys, window=window),),
    )
