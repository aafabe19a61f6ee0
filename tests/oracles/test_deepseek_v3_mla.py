"""``mla_decode`` against transformers' DeepSeek V3 layer in fp32, which expands keys and values for every head."""

import pytest
import torch
from helpers.page_layouts import paged
from helpers.suites import long

from warpspec.latent import mla_decode

pytest.importorskip("transformers")

NOPE, VALUE, HEADS, HIDDEN = 32, 24, 4, 64
TOKENS, DRAFTS = 150, 3


def layer_and_rotation():
    """A layer with random weights, and its rotary embedding, whose YaRN factor belongs to the scale, too."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    config = DeepseekV3Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=48, kv_lora_rank=512,
        qk_rope_head_dim=64, qk_nope_head_dim=NOPE, v_head_dim=VALUE, max_position_embeddings=4096,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 1024},
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = modeling.DeepseekV3Attention(config, 0).eval()
    for weight in layer.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=2 * weight.shape[1] ** -0.5)
    return modeling, layer, modeling.DeepseekV3RotaryEmbedding(config)


def absorbed(modeling, layer, hidden, rotation):
    """(q [B, S, H, 576], rows [B, S, 576]) of all tokens in fp32, with W_UK absorbed into q."""
    batch, tokens, _ = hidden.shape
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden))).view(batch, tokens, HEADS, NOPE + 64)
    latent, rotated = layer.kv_a_proj_with_mqa(hidden).split((512, 64), dim=-1)
    turned = modeling.apply_rotary_pos_emb_interleave(
        q[..., NOPE:].transpose(1, 2), rotated[:, None], *rotation
    )
    up = layer.kv_b_proj.weight.view(HEADS, NOPE + VALUE, 512)[:, :NOPE]
    q = torch.cat((torch.einsum("bshn,hnl->bshl", q[..., :NOPE], up), turned[0].transpose(1, 2)), dim=-1)
    return q, torch.cat((layer.kv_a_layernorm(latent), turned[1][:, 0]), dim=-1)


@pytest.mark.parametrize("backend", ["reference", long("sim")])
@torch.no_grad()
def test_against_the_expanded_layer(backend):
    """The last queries of two requests, one of them shorter."""
    modeling, layer, rotary = layer_and_rotation()
    hidden, lengths = torch.randn(2, TOKENS, HIDDEN), (TOKENS, 70)
    rotation = rotary(hidden, torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
    expected, _ = layer(hidden, rotation, mask)
    q, rows = absorbed(modeling, layer, hidden, rotation)
    last = torch.stack([q[b, length - DRAFTS : length] for b, length in enumerate(lengths)])
    (pages,), table = paged((rows[:, :, None].bfloat16(),), lengths, 64)
    o = mla_decode(
        last.bfloat16(), pages[:, :, 0], table, torch.tensor(lengths, dtype=torch.int32), scale=layer.scaling,
        backend=backend,
    )  # fmt: skip
    value = layer.kv_b_proj.weight.view(HEADS, NOPE + VALUE, 512)[:, NOPE:]
    got = layer.o_proj(torch.einsum("bshl,hvl->bshv", o.float(), value).flatten(2))
    for b, length in enumerate(lengths):
        wanted = expected[b, length - DRAFTS : length]
        assert (got[b] - wanted).norm() <= 8e-3 * wanted.norm()
