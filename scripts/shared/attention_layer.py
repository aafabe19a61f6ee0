"""A published model's attention layer up to its attention: weights, inputs, and what transformers hands over.

Everything before the attention itself (norm, projections, rotary embedding, KV cache, compression of keys)
runs in transformers' modules; an attention function registered for the purpose takes what they hand over. A
model family is a module that offers

    MODELS: dict[str, ...]                              published models by name
    layers(model) -> dict[str, int]                     kinds of attention layer, each with one's index
    attention_layer(model, kind) -> AttentionLayer      transformers' modules for it
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig

from warpspec.engines.transformers import additive_mask

SINK_RANGE = (-2.0, 8.0)  # seeded sinks: from one with no weight to one that outweighs the keys
CAPTURE = "capture"  # name of the attention function that takes the operands
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class KeySet:
    """Keys [start, end) of a layer, and which of them a query sees, as arguments of `attention` say it."""

    start: int
    end: int
    causal: bool = True
    window: int | None = None  # counts the query's own position
    key_stride: int = 1
    masked: bool = False  # the mask's columns of these keys are given as bias

    def __str__(self) -> str:
        kind = "" if self.key_stride == 1 else f" compressed 1 to {self.key_stride}"
        window = f" in a window of {self.window}" if self.window else ""
        return f"{self.end - self.start}{kind}{window}{' under a bias' if self.masked else ''}"


@dataclass(frozen=True)
class AttentionInputs:
    """Operands of one layer's attention as transformers hands them over, bf16.

    query [B, Hq, Sq, D], key and value [B, Hkv, Sk, D], value None where it is key; sinks [Hq] or None; mask
    [B, 1, Sq, Sk] is transformers' own, additive. The first query stands at position first_position; key_sets
    say the same as the mask.
    """

    kind: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor | None
    sinks: torch.Tensor | None
    scaling: float
    mask: torch.Tensor
    first_position: int
    key_sets: tuple[KeySet, ...]
    layer: AttentionLayer
    positions: torch.Tensor  # [1, Sq]

    def with_bias(self) -> AttentionInputs:
        """This layer with all keys as one set whose bias is the mask."""
        return replace(self, key_sets=(KeySet(0, self.key.shape[2], causal=False, masked=True),))

    def output(self, o: torch.Tensor) -> torch.Tensor:
        """The layer's output in FP32 for an attention result o [B, Sq, Hq, D], FP32."""
        with torch.no_grad():
            return self.layer.project(o, self.positions)


@dataclass(frozen=True)
class AttentionLayer:
    """transformers' modules of one layer, with weights yet to be filled.

    rotary(hidden, positions): the layer's position_embeddings; make_mask: transformers' mask maker; eager:
    its eager attention; project(o, positions): what the layer does to o [B, Sq, Hq, D] in FP32;
    key_sets(keys, queries, first_position): the layer's keys as `KeySet`s.
    """

    kind: str
    index: int
    config: PreTrainedConfig
    norm: torch.nn.Module
    attention: torch.nn.Module
    rotary: Callable
    make_mask: Callable
    eager: Callable
    project: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    key_sets: Callable[[int, int, int], tuple[KeySet, ...]]


def attention_inputs(
    layer: AttentionLayer, *, batch: int, seq: int, decode: bool, seed: int, checkpoint: Path | None
) -> AttentionInputs:
    """Runs the layer up to its attention.

    seq: tokens per sequence; with decode they are in the KV cache and the one token after them is the query.
    """
    config = layer.config
    generator = torch.Generator().manual_seed(seed)
    if checkpoint is None:
        seed_weights(layer, generator)
    else:
        load_weights(layer, checkpoint)
    attention, norm = layer.attention.eval(), layer.norm
    # Not buffers: rotary frequencies stay FP32.
    for parameter in (*attention.parameters(), *norm.parameters()):
        parameter.data = parameter.data.to(DTYPE)
    hidden = torch.randn(batch, seq + decode, config.hidden_size, generator=generator).to(DTYPE)

    captured = {}

    def capture(module, query, key, value, attention_mask, **arguments):
        captured.update(query=query, key=key, value=None if value is key else value, mask=attention_mask)
        captured.update(arguments)
        return torch.zeros_like(query.transpose(1, 2)), None

    AttentionInterface.register(CAPTURE, capture)
    AttentionMaskInterface.register(CAPTURE, additive_mask)
    config._attn_implementation = CAPTURE
    cache = DynamicCache(config=config)
    with torch.no_grad():
        for step in hidden.split([seq, 1] if decode else [seq], dim=1):
            past = cache.get_seq_length(layer.index)
            positions = torch.arange(past, past + step.shape[1])[None]
            mask = layer.make_mask(
                config=config,
                inputs_embeds=step,
                attention_mask=None,
                past_key_values=cache,
                layer_idx=layer.index,
            )
            attention(
                norm(step),
                position_embeddings=layer.rotary(step, positions),
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
            )
    sinks = captured.get("s_aux")
    return AttentionInputs(
        kind=layer.kind,
        query=captured["query"],
        key=captured["key"],
        value=captured["value"],
        sinks=None if sinks is None else sinks.detach(),
        scaling=captured["scaling"],
        mask=captured["mask"],
        first_position=past,
        key_sets=layer.key_sets(captured["key"].shape[2], step.shape[1], past),
        layer=layer,
        positions=positions,
    )


def eager(inputs: AttentionInputs, dtype: torch.dtype) -> torch.Tensor:
    """transformers' eager attention with operands cast to `dtype`: [B, Sq, Hq, D].

    One batch row and KV head at a time: its scores, [1, group, Sq, Sk], are all it has to keep.
    """
    group = inputs.query.shape[1] // inputs.key.shape[1]
    value = inputs.key if inputs.value is None else inputs.value
    rows = []
    for b in range(inputs.query.shape[0]):
        heads = []
        for h in range(inputs.key.shape[1]):
            of_group = slice(h * group, (h + 1) * group)
            module = SimpleNamespace(num_key_value_groups=group, training=False)
            if inputs.sinks is not None:
                module.sinks = inputs.sinks[of_group].to(dtype)
            operands = (
                tensor[b : b + 1, part].to(dtype)
                for tensor, part in (
                    (inputs.query, of_group),
                    (inputs.key, slice(h, h + 1)),
                    (value, slice(h, h + 1)),
                )
            )
            o, _ = inputs.layer.eager(
                module, *operands, inputs.mask[b : b + 1].to(dtype), scaling=inputs.scaling
            )
            heads.append(o)
        rows.append(torch.cat(heads, dim=2))
    return torch.cat(rows)


def in_fp32(linear: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """What a linear module makes of x in FP32."""
    bias = None if linear.bias is None else linear.bias.float()
    return torch.nn.functional.linear(x, linear.weight.float(), bias)


def seed_weights(layer: AttentionLayer, generator: torch.Generator) -> None:
    """Weights and biases as the model initialises weights; norms stay at one; sinks over SINK_RANGE."""
    with torch.no_grad():
        for name, parameter in layer.attention.named_parameters():
            if name == "sinks":
                parameter.uniform_(*SINK_RANGE, generator=generator)
            elif "norm" not in name:
                parameter.normal_(0.0, layer.config.initializer_range, generator=generator)


def load_weights(layer: AttentionLayer, checkpoint: Path) -> None:
    """Fills the layer from a .safetensors file, or a folder with one or with a sharded checkpoint's index."""
    prefix = f"model.layers.{layer.index}."
    for module, scope in (
        (layer.attention, prefix + "self_attn."),
        (layer.norm, prefix + "input_layernorm."),
    ):
        state = {name: checkpoint_tensor(checkpoint, scope + name) for name in module.state_dict()}
        module.load_state_dict(state)


def checkpoint_tensor(checkpoint: Path, name: str) -> torch.Tensor:
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
