"""Models in transformers with other head sizes, tiny and seeded: Phi-3 (96), DeepSeek V3 (192 with V of 128)."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Phi3Config

from warpspec.engines import transformers as engine

VOCABULARY = 128
SIZES = dict(
    vocab_size=VOCABULARY, intermediate_size=64, num_hidden_layers=2, pad_token_id=0, initializer_range=0.1
)
CONFIGS = {
    "phi3": lambda: Phi3Config(**SIZES, hidden_size=192, num_attention_heads=2, num_key_value_heads=2),
    "deepseek_v3": lambda: DeepseekV3Config(
        **SIZES, hidden_size=64, num_attention_heads=2, num_key_value_heads=2, first_k_dense_replace=2,
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits(kind):
    """Prompt and the tokens after it, in bf16, at most 1.25 times as far from fp32 as transformers' own attention."""
    engine.register("warpspec_sizes", backend="reference")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="eager").eval()
    tokens = torch.randint(3, VOCABULARY, (2, 24))

    def logits(implementation):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            first = model(tokens[:, :18], use_cache=True)
            return torch.cat(
                [first.logits, model(tokens[:, 18:], past_key_values=first.past_key_values).logits], dim=1
            )

    expected = logits("eager").float()
    model.bfloat16()
    own, ours = logits("eager").float(), logits("warpspec_sizes").float()
    assert (ours - expected).norm() <= 1.25 * (own - expected).norm()
