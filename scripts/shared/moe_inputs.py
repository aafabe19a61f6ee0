"""The mixture-of-experts layers of published models: sizes, seeded or real weights, what the routers say.

Published config.json files say the sizes; routers are transformers' modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DeepseekV4Config, GptOssConfig
from transformers.models.deepseek_v4 import modeling_deepseek_v4
from transformers.models.gpt_oss import modeling_gpt_oss

from warpspec.common import nvfp4
from warpspec.moe import NVFP4Experts, intermediate_scale_of, route
from warpspec.moe.checkpoint import Checkpoint, load_experts

INITIALIZER_RANGE = 0.02  # of seeded weights, as the published configurations say
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """Sizes of a published model's layer. top: experts a token takes; layer: one with a learned router."""

    hidden: int
    width: int
    experts: int
    top: int
    activation: str
    limit: float
    layer: int
    prefixes: tuple[str, ...]  # of the layer's tensors in a checkpoint: transformers' name, the publisher's
    router: str
    routing: dict
    biases: bool = False
    shared: str | None = None


def gpt_oss(experts: int) -> Model:
    return Model(
        hidden=2880,
        width=2880,
        experts=experts,
        top=4,
        activation="swiglu_oai",
        limit=7.0,
        layer=0,
        prefixes=("model.layers.{}.mlp",),
        router="router",
        routing={},
        biases=True,
    )


def deepseek_v4(hidden: int, width: int, experts: int) -> Model:
    return Model(
        hidden=hidden,
        width=width,
        experts=experts,
        top=6,
        activation="swiglu",
        limit=10.0,
        layer=3,  # the first three look their experts up by token
        prefixes=("model.layers.{}.mlp", "layers.{}.ffn"),
        router="gate",
        routing=dict(scoring="sqrtsoftplus", scale=1.5),
        shared="shared_experts",
    )


MODELS = {
    "gpt-oss-20b": gpt_oss(32),
    "gpt-oss-120b": gpt_oss(128),
    "deepseek-v4-flash": deepseek_v4(4096, 2048, 256),
    "deepseek-v4-pro": deepseek_v4(7168, 3072, 384),
}


@dataclass(frozen=True)
class LayerInputs:
    """x [T, H] bf16, the experts (a shared one the last), and what transformers' router and ours say of the tokens."""

    model: Model
    x: torch.Tensor
    experts: NVFP4Experts
    ids: torch.Tensor
    weights: torch.Tensor
    router_differences: int  # tokens whose experts differ between the two routers


def layer_inputs(
    model: Model, *, tokens: int, experts: int, seed: int, checkpoint: Path | None
) -> LayerInputs:
    """The first `experts` of the layer; seeded weights where there is no checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    experts, top = min(experts, model.experts), min(model.top, experts, model.experts)
    x = torch.randn(tokens, model.hidden, generator=generator).to(DTYPE)
    router = router_of(model, experts, top)
    if checkpoint is None:
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.normal_(0.0, INITIALIZER_RANGE, generator=generator)
        loaded = seeded_experts(model, experts, generator)
    else:
        loaded = read_layer(model, experts, router, Checkpoint(checkpoint))
    with torch.no_grad():
        logits, theirs, their_ids = router(x.float())
    ids, weights = route(logits, top, bias=getattr(router, "e_score_correction_bias", None), **model.routing)
    same = torch.equal(ids.sort(1).values.long(), their_ids.sort(1).values)
    differences = 0 if same else int((ids.sort(1).values.long() != their_ids.sort(1).values).any(1).sum())
    if same:
        torch.testing.assert_close(weights.sort(1).values, theirs.sort(1).values, rtol=1e-5, atol=1e-6)
    return LayerInputs(model, x, loaded, ids, weights, differences)


def router_of(model: Model, experts: int, top: int) -> torch.nn.Module:
    """transformers' router over the experts that take part."""
    if model.router == "router":
        config = GptOssConfig(hidden_size=model.hidden, num_local_experts=experts, num_experts_per_tok=top)
        return modeling_gpt_oss.GptOssTopKRouter(config)
    config = DeepseekV4Config(
        hidden_size=model.hidden,
        n_routed_experts=experts,
        num_experts_per_tok=top,
        routed_scaling_factor=model.routing["scale"],
        scoring_func=model.routing["scoring"],
    )
    return modeling_deepseek_v4.DeepseekV4TopKRouter(config)


def seeded_experts(model: Model, experts: int, generator) -> NVFP4Experts:
    """Experts whose weights are drawn as the model initialises them, in bf16 before they are quantised, one by one."""
    count, shared = experts + int(model.shared is not None), int(model.shared is not None)

    def matrices(rows, columns):
        parts = []
        for _ in range(count):
            matrix = torch.empty(rows, columns, dtype=DTYPE)
            parts.append(nvfp4.quantize(matrix.normal_(0.0, INITIALIZER_RANGE, generator=generator)))
        return nvfp4.NVFP4Tensor(
            torch.stack([part.data for part in parts]),
            torch.stack([part.scale.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
            torch.stack([part.global_scale for part in parts]),
        )

    def bias(size):
        return torch.empty(count, size).normal_(0.0, INITIALIZER_RANGE, generator=generator)

    biases = {}
    if model.biases:
        biases = dict(gate_bias=bias(model.width), up_bias=bias(model.width), down_bias=bias(model.hidden))
    gate, up = matrices(model.width, model.hidden), matrices(model.width, model.hidden)
    scale = intermediate_scale_of(model.activation, model.limit)
    down = matrices(model.hidden, model.width)
    return NVFP4Experts.quantize(gate, up, down, **biases, intermediate_scale=scale, shared=shared)


def read_layer(model: Model, experts: int, router: torch.nn.Module, checkpoint: Checkpoint) -> NVFP4Experts:
    """The layer's experts from a checkpoint; the router's weights go to `router`."""
    prefixes = [prefix.format(model.layer) for prefix in model.prefixes]
    prefix = next((p for p in prefixes if f"{p}.{model.router}.weight" in checkpoint), None)
    if prefix is None:
        raise KeyError(
            f"the checkpoint holds none of {', '.join(f'{p}.{model.router}.weight' for p in prefixes)}"
        )
    names = {"weight": "weight", "bias": "bias", "e_score_correction_bias": "e_score_correction_bias"}
    if f"{prefix}.{model.router}.e_score_correction_bias" not in checkpoint:
        names["e_score_correction_bias"] = "bias"  # the publisher's name for it
    with torch.no_grad():
        for name, tensor in (*router.named_parameters(), *router.named_buffers()):
            tensor.copy_(checkpoint[f"{prefix}.{model.router}.{names[name]}"][:experts])
    shared = None if model.shared is None else f"{prefix}.{model.shared}"
    return load_experts(checkpoint, f"{prefix}.experts", experts=experts, shared=shared)
