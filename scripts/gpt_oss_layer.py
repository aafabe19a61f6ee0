"""The attention layer of the published gpt-oss models: shapes, weights, inputs, by transformers' own code.

Everything up to the attention itself (RMSNorm, projections, rotary embedding, KV cache) runs in transformers'
modules; an attention function registered for the purpose takes what they hand over.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, GptOssConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask, eager_mask
from transformers.models.gpt_oss import modeling_gpt_oss

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
SINK_RANGE = (-2.0, 8.0)  # seeded sinks: from one with no weight to one that outweighs the keys
CAPTURE = "capture"  # name of the attention function that takes the operands


@dataclass(frozen=True)
class AttentionInputs:
    """Operands of one layer's attention as transformers hands them over, bf16.

    query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D], sinks [Hq]; window counts the row's own position;
    mask [B, 1, Sq, Sk] is transformers' own, additive. Queries are the last Sq of Sk positions.
    """

    kind: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor
    scaling: float
    window: int | None
    mask: torch.Tensor
    output_projection: torch.nn.Linear


def config_of(model: str) -> GptOssConfig:
    """transformers' configuration of a published model, from the tables above."""
    config = GptOssConfig(**ATTENTION, **MODELS[model])
    config._attn_implementation = CAPTURE
    return config


def attention_inputs(
    model: str, kind: str, *, batch: int, seq: int, decode: bool, seed: int, checkpoint: Path | None
) -> AttentionInputs:
    """Runs the layer up to its attention.

    seq: tokens per sequence; with decode they are in the KV cache and the one token after them is the query.
    """
    config, index = config_of(model), LAYERS[kind]
    generator = torch.Generator().manual_seed(seed)
    norm = modeling_gpt_oss.GptOssRMSNorm(config.hidden_size, config.rms_norm_eps)
    layer = modeling_gpt_oss.GptOssAttention(config, index)
    if checkpoint is None:
        _seed_weights(layer, config, generator)
    else:
        _load_weights(layer, norm, index, checkpoint)
    layer, norm = layer.to(torch.bfloat16).eval(), norm.to(torch.bfloat16)
    rotary = modeling_gpt_oss.GptOssRotaryEmbedding(config)
    hidden = torch.randn(batch, seq + decode, config.hidden_size, generator=generator).to(torch.bfloat16)

    captured = {}

    def capture(module, query, key, value, attention_mask, **arguments):
        captured.update(query=query, key=key, value=value, mask=attention_mask, **arguments)
        return torch.zeros_like(query.transpose(1, 2)), None

    AttentionInterface.register(CAPTURE, capture)
    AttentionMaskInterface.register(CAPTURE, eager_mask)
    create_mask = create_causal_mask if kind == "full_attention" else create_sliding_window_causal_mask
    cache = DynamicCache(config=config)
    with torch.no_grad():
        for step in hidden.split([seq, 1] if decode else [seq], dim=1):
            past = cache.get_seq_length(index)
            positions = torch.arange(past, past + step.shape[1])[None]
            mask = create_mask(
                config=config, inputs_embeds=step, attention_mask=None, past_key_values=cache, layer_idx=index
            )
            layer(norm(step), rotary(step, positions), mask, past_key_values=cache)
    return AttentionInputs(
        kind=kind,
        query=captured["query"],
        key=captured["key"],
        value=captured["value"],
        sinks=captured["s_aux"].detach(),
        scaling=captured["scaling"],
        window=captured["sliding_window"],
        mask=captured["mask"],
        output_projection=layer.o_proj,
    )


def eager(inputs: AttentionInputs, dtype: torch.dtype) -> torch.Tensor:
    """transformers' eager attention with operands cast to `dtype`: [B, Sq, Hq, D].

    One batch row and KV head at a time: its scores, [1, group, Sq, Sk], are all it has to keep.
    """
    group = inputs.query.shape[1] // inputs.key.shape[1]
    rows = []
    for b in range(inputs.query.shape[0]):
        heads = []
        for h in range(inputs.key.shape[1]):
            of_group = slice(h * group, (h + 1) * group)
            module = SimpleNamespace(
                num_key_value_groups=group, sinks=inputs.sinks[of_group].to(dtype), training=False
            )
            operands = (
                tensor[b : b + 1, part].to(dtype)
                for tensor, part in (
                    (inputs.query, of_group),
                    (inputs.key, slice(h, h + 1)),
                    (inputs.value, slice(h, h + 1)),
                )
            )
            o, _ = modeling_gpt_oss.eager_attention_forward(
                module, *operands, inputs.mask[b : b + 1].to(dtype), scaling=inputs.scaling
            )
            heads.append(o)
        rows.append(torch.cat(heads, dim=2))
    return torch.cat(rows)


def _seed_weights(layer, config: GptOssConfig, generator: torch.Generator) -> None:
    """Weights and biases as the model initialises weights; sinks over SINK_RANGE."""
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name == "sinks":
                parameter.uniform_(*SINK_RANGE, generator=generator)
            else:
                parameter.normal_(0.0, config.initializer_range, generator=generator)


def _load_weights(layer, norm, index: int, checkpoint: Path) -> None:
    """Fills the layer from a .safetensors file, or a folder with one or with a sharded checkpoint's index."""
    prefix = f"model.layers.{index}."
    for module, scope in ((layer, prefix + "self_attn."), (norm, prefix + "input_layernorm.")):
        state = {name: _tensor(checkpoint, scope + name) for name in module.state_dict()}
        module.load_state_dict(state)


def _tensor(checkpoint: Path, name: str) -> torch.Tensor:
    """One tensor of a checkpoint by its name."""
    file = checkpoint
    if checkpoint.is_dir():
        table = checkpoint / "model.safetensors.index.json"
        shard = "model.safetensors"
        if table.exists():
            weight_map = json.loads(table.read_text())["weight_map"]
            if name not in weight_map:
                raise KeyError(f"{table} lists no tensor {name}")
            shard = weight_map[name]
        file = checkpoint / shard
    if not file.exists():
        raise FileNotFoundError(f"no checkpoint at {file}")
    with safe_open(file, framework="pt") as tensors:
        if name not in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
            raise KeyError(f"{file} holds no tensor {name}")
        return tensors.get_tensor(name)
