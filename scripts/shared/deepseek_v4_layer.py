"""The attention layers of the published DeepSeek-V4 models, by transformers' code.

Offers what attention_layer.py asks of a family. A layer's keys are those of the sliding window, which are its
values too, and after them compressed ones: none (sliding), one to 4 positions, of which an indexer selects
some for each query (csa), or one to 128 positions (hca).
"""

from __future__ import annotations

import torch
from transformers import DeepseekV4Config
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from .attention_layer import AttentionLayer, KeySet, in_fp32

KINDS = {  # and what transformers calls them
    "sliding": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
# What both published config.json files say of attention.
ATTENTION = dict(
    num_key_value_heads=1,
    head_dim=512,
    sliding_window=128,
    o_lora_rank=1024,
    index_n_heads=64,
    index_head_dim=128,
    max_position_embeddings=1048576,
    initializer_range=0.02,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_parameters=dict(
        rope_type="yarn",
        factor=16.0,
        beta_fast=32.0,
        beta_slow=1.0,
        original_max_position_embeddings=65536,
    ),
)
# What differs between the two.
MODELS = {
    "deepseek-v4-flash": dict(
        hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, index_topk=512
    ),
    "deepseek-v4-pro": dict(
        hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, o_groups=16, index_topk=1024
    ),
}
# The first layer of each kind. After two sliding (Flash) or two hca layers (Pro), csa and hca take turns.
# Pro's sliding layer is the one for multi-token prediction, after its 61.
LAYERS = {
    "deepseek-v4-flash": {"sliding": 0, "csa": 2, "hca": 3},
    "deepseek-v4-pro": {"sliding": 61, "csa": 2, "hca": 0},
}


def layers(model: str) -> dict[str, int]:
    return LAYERS[model]


def attention_layer(model: str, kind: str) -> AttentionLayer:
    index = layers(model)[kind]
    # Layers in front of this one are never run: their kind does not matter.
    config = DeepseekV4Config(
        **ATTENTION,
        **MODELS[model],
        num_hidden_layers=index + 1,
        layer_types=[KINDS[kind]] * (index + 1),
    )
    attention = modeling_deepseek_v4.DeepseekV4Attention(config, index)
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config)

    def embeddings(hidden, positions):
        return {name: rotary(hidden, positions, layer_type=name) for name in ("main", "compress")}

    def project(o, positions):
        """o rotated back by the query's position, then projected twice, at first by groups of heads."""
        cos, sin = embeddings(o, positions)[attention.rope_layer_type]
        o = modeling_deepseek_v4.apply_rotary_pos_emb(o, cos, -sin, unsqueeze_dim=2)
        weight = attention.o_a_proj.weight.float().view(config.o_groups, config.o_lora_rank, -1)
        grouped = o.reshape(*o.shape[:2], config.o_groups, -1)
        return in_fp32(attention.o_b_proj, torch.einsum("bsgi,goi->bsgo", grouped, weight).flatten(2))

    def key_sets(keys, queries, first_position):
        in_window = min(first_position, config.sliding_window - 1) + queries
        of_window = KeySet(0, in_window, window=config.sliding_window)
        if keys == in_window:
            return (of_window,)
        selected = kind == "csa" and keys - in_window > config.index_topk
        return of_window, KeySet(
            in_window, keys, key_stride=attention.compressor.compress_rate, masked=selected
        )

    return AttentionLayer(
        kind=kind,
        index=index,
        config=config,
        norm=modeling_deepseek_v4.DeepseekV4RMSNorm(config.hidden_size, config.rms_norm_eps),
        attention=attention,
        rotary=embeddings,
        make_mask=create_sliding_window_causal_mask,
        eager=modeling_deepseek_v4.eager_attention_forward,
        project=project,
        key_sets=key_sets,
    )
