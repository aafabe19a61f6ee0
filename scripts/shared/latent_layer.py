"""`validate_layer.py --cache`: a DeepSeek-V4 attention layer at its real shapes on latent pools, every operation of the
serving path by the chosen backend, against the FP32 references and against transformers' eager code.

A prompt goes through the layer in two calls, then one more token: so each kind of call reads what another has written.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from rich.console import Console
from transformers import DeepseekV4Config, DynamicCache
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from warpspec.engines.transformers.latent import DeepseekV4Cache, attach

from .deepseek_v4_layer import ATTENTION, KINDS, MODELS
from .devices import device_of

FORMATS = {  # by --cache; index keys stay in FP4: kernels score no others but FP8
    "fp8": {"latent": "v4-fp8", "index": "mxfp4"},
    "bf16": {"latent": "bf16", "index": "mxfp4"},
}
TOKENS = {
    "cpu": 24,
    "cuda": 136,
}  # unless said otherwise: simulated few, natively so many that HCA makes an entry
# Relative errors of the layer's output. Kernels round like the references but for the order of sums; a rounding that
# falls the other way before a row is quantised moves a value by a step of FP8 or FP4.
REFERENCE_TOLERANCE = 1e-2
EAGER_TOLERANCE = {"fp8": 6e-2, "bf16": 2e-2}  # "fp8": of wo_a and its input, too: 4.9e-2


@dataclass(frozen=True)
class CacheResult:
    """kind: of layer. tokens: of the prompt and after it. reference_error, eager_error: relative, of the output."""

    kind: str
    tokens: int
    reference_error: float
    eager_error: float
    eager_tolerance: float

    @property
    def passed(self) -> bool:
        return self.reference_error < REFERENCE_TOLERANCE and self.eager_error < self.eager_tolerance


def make_layer(model: str, kind: str, seed: int, device: str):
    """(configuration, attention module in fp32) with seeded weights that are bf16 numbers."""
    config = DeepseekV4Config(**ATTENTION, **MODELS[model], num_hidden_layers=1, layer_types=[KINDS[kind]])
    config._attn_implementation = "eager"
    module = modeling_deepseek_v4.DeepseekV4Attention(config, 0).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif name == "sinks" or "position_bias" in name:
                parameter.normal_(0.0, 1.0, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            parameter.copy_(parameter.bfloat16())
    return config, module.to(device)


@torch.no_grad()
def layer_output(config, module, hidden, cache) -> torch.Tensor:
    """fp32 [B, tokens, hidden size]: in three calls."""
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config).to(hidden.device)
    tokens, parts = hidden.shape[1], []
    ends = [0, *sorted({max(1, tokens // 3), tokens - 1, tokens} - {0})]
    for first, end in itertools.pairwise(ends):
        x = hidden[:, first:end]
        positions = torch.arange(first, end, device=x.device)[None]
        embeddings = {name: rotary(x, positions, layer_type=name) for name in ("main", "compress")}
        mask = None
        if not isinstance(cache, DeepseekV4Cache):
            mask = create_sliding_window_causal_mask(
                config=config,
                inputs_embeds=x,
                attention_mask=None,
                past_key_values=cache,
                position_ids=positions,
            )
        parts.append(module(x, embeddings, positions, mask, cache)[0])
    return torch.cat(parts, dim=1)


def run(options, console: Console, backend: str, stage) -> list[CacheResult]:
    """Each kind of layer that the model has, or the one asked for."""
    if options.model not in MODELS:
        raise KeyError(f"--cache: {options.model} has no latent cache, only {', '.join(MODELS)} have")
    device = device_of(backend)
    results, tokens = [], options.seq or TOKENS[device]
    for kind in [options.kind] if options.kind else KINDS:
        if kind not in KINDS:
            raise KeyError(f"{options.model} has no layer {kind}, only {', '.join(KINDS)}")
        console.print(f"[bold]{options.model}, {kind}, cache {options.cache}[/]", highlight=False)
        config, module = make_layer(options.model, kind, options.seed, device)
        generator = torch.Generator().manual_seed(options.seed)
        shape = (options.batch, tokens, config.hidden_size)
        hidden = torch.randn(shape, generator=generator).bfloat16().float().to(device)
        with stage("transformers' eager code, its own cache"):
            eager = layer_output(config, module, hidden, DynamicCache(config=config))
        attach(module, options.cache)
        outputs = []
        for name in (backend, "reference"):
            cache = DeepseekV4Cache(
                config,
                batch=options.batch,
                max_tokens=tokens,
                backend=name,
                device=device,
                **FORMATS[options.cache],
            )
            with stage(f"our caches, backend {name}"):
                outputs.append(layer_output(config, module, hidden, cache))
        got, wanted = outputs
        result = CacheResult(
            kind,
            tokens,
            ((got - wanted).norm() / wanted.norm()).item(),
            ((got - eager).norm() / eager.norm()).item(),
            EAGER_TOLERANCE[options.cache],
        )
        results.append(result)
        verdict = "[green]passed[/]" if result.passed else "[red]failed[/]"
        console.print(
            f"  against the references {result.reference_error:.2e} (below {REFERENCE_TOLERANCE}), against eager "
            f"{result.eager_error:.2e} (below {result.eager_tolerance}): {verdict}",
            highlight=False,
        )
    return results
