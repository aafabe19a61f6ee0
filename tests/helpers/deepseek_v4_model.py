"""A small DeepSeek-V4 model that is shaped like the published ones where attention is concerned."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from helpers.model_pairs import VOCABULARY

SLIDING = "sliding_attention"
SELECTED = "compressed_sparse_attention"
HEAVY = "heavily_compressed_attention"
KINDS = (SELECTED, HEAVY, SLIDING)
KEY_SCALE = 2.0  # of keys and values; the standard deviation of attention's logits


def make_model(heads: int = 64, kinds: tuple[str, ...] = KINDS, **changes) -> DeepseekV4ForCausalLM:
    """A layer of each kind, FP32 with bf16-exact weights. All experts are used: routing cannot flip."""
    settings = dict(
        hidden_size=128,
        num_hidden_layers=len(kinds),
        layer_types=list(kinds),
        mlp_layer_types=["moe"] * len(kinds),
        num_attention_heads=heads,
        head_dim=512,
        q_lora_rank=64,
        o_groups=heads // 8,
        o_lora_rank=16,
        sliding_window=128,
        index_n_heads=4,
        index_head_dim=128,
        index_topk=512,
        moe_intermediate_size=64,
        n_routed_experts=2,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**(settings | changes))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(0.0, 5.0, generator=generator)
            elif name.endswith("kv_norm.weight"):
                parameter.fill_(KEY_SCALE)
            elif name.endswith(("hc.fn", "hc_head.hc_fn")) or ("norm" not in name and "hc" not in name):
                parameter.normal_(0.0, weight_scale(name, parameter), generator=generator)
        for layer in model.model.layers:
            if layer.self_attn.layer_type == HEAVY:  # one or two keys: large ones
                layer.self_attn.compressor.kv_norm.weight.fill_(2 * KEY_SCALE)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def weight_scale(name: str, parameter: torch.Tensor) -> float:
    """Standard deviation that gives activations of order one, the embedding's part the largest."""
    if "embed_tokens" in name:
        return 1.0
    return (0.3 if "o_b_proj" in name else 1.0) * parameter.shape[-1] ** -0.5
