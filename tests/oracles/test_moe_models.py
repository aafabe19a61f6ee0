"""Whole gpt-oss and DeepSeek-V4 models with our experts, through transformers' experts interface: same logits.

Theirs run eager code on the dequantised weights. One layer: their activations are quantised where ours are, and only
our rounding to bf16 is left. Two layers: a difference of that size tips other values of the second layer over the edge
between two e2m1 numbers, so ours must be as near to unquantised activations as theirs are, quantised alike.
"""

from contextlib import ExitStack
from copy import deepcopy

import pytest
import torch
from helpers.model_pairs import EAGER_FACTOR, SENSITIVITY, VOCABULARY, tokens
from helpers.moe_cases import GEMM_TOLERANCE, relative_error
from helpers.moe_oracle import dequantize_experts, quantised_activations
from helpers.suites import long
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, GptOssConfig, GptOssForCausalLM

import warpspec.engines.transformers as engine
from warpspec.engines.transformers import experts as adapter


def gpt_oss(layers, experts, top):
    config = GptOssConfig(
        hidden_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=72,
        num_local_experts=experts,
        num_experts_per_tok=top,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    return seeded(GptOssForCausalLM(config))


def deepseek(layers, experts, top):
    config = DeepseekV4Config(
        hidden_size=128,
        num_hidden_layers=layers,
        layer_types=["sliding_attention"] * layers,
        mlp_layer_types=["moe"] * layers,
        num_attention_heads=8,
        head_dim=64,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=128,
        moe_intermediate_size=64,
        n_routed_experts=experts,
        num_experts_per_tok=top,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    return seeded(DeepseekV4ForCausalLM(config))


def seeded(model):
    """FP32 with bf16-exact weights of order one over the square root of their rows: experts weigh in the logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and ("hc" not in name or name.endswith(("hc.fn", "hc_fn"))):
                gain = 0.3 if "bias" in name or "embed" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0.0, gain, generator=generator)
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def experts_of(model) -> list[torch.nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def logits(model, ids, implementation, quantised=()):
    """quantised: (module, its NVFP4 experts) pairs whose activations are quantised."""
    model.set_experts_implementation(implementation)
    with ExitStack() as stack, torch.no_grad():
        for module, experts in quantised:
            stack.enter_context(quantised_activations(module, experts))
        return model(ids).logits


def compared(model, ids, backend):
    """Logits of ours, of theirs with quantised activations, and of theirs without."""
    name = f"warpspec_moe_{backend}"
    engine.register(name, backend)
    ours = logits(model, ids, name)
    theirs = deepcopy(model)
    pairs = []
    for own, other in zip(experts_of(model), experts_of(theirs), strict=True):
        made = adapter.attached(own).experts
        dequantize_experts(other, made)
        pairs.append((other, made))
    assert pairs
    return ours, logits(theirs, ids, "eager", pairs), logits(theirs, ids, "eager")


@pytest.mark.parametrize(("family", "backend"), [
    (gpt_oss, "reference"), (deepseek, "reference"), (deepseek, "sim"), long(gpt_oss, "sim"),
])  # fmt: skip
def test_one_layer(family, backend):
    model = family(layers=1, experts=6, top=2)
    ids = tokens(2, 12)
    ours, theirs, _ = compared(model, ids, backend)
    assert relative_error(ours, theirs) <= GEMM_TOLERANCE
    for module in experts_of(model):
        with torch.no_grad():
            module.down_proj.zero_()
    without = logits(model, ids, "eager")
    assert relative_error(without, theirs) >= SENSITIVITY * GEMM_TOLERANCE


@pytest.mark.parametrize("family", [gpt_oss, deepseek])
def test_two_layers(family):
    """All experts are used: routing cannot flip."""
    model = family(layers=2, experts=3, top=3)
    ours, theirs, exact = compared(model, tokens(2, 40), "reference")
    noise = relative_error(theirs, exact)
    assert relative_error(ours, exact) <= EAGER_FACTOR * noise
    assert relative_error(ours, theirs) <= noise / 2


def test_in_bf16_and_with_a_cache():
    """As a user runs it: the whole model in bf16, prefill and a step of decoding."""
    model = gpt_oss(layers=2, experts=4, top=2).bfloat16()
    adapter.register("warpspec_moe_reference", "reference")
    model.set_experts_implementation("warpspec_moe_reference")
    ids = tokens(2, 9)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :8], use_cache=True)
        last = model(ids[:, 8:], past_key_values=first.past_key_values).logits
    assert whole.dtype == torch.bfloat16
    assert relative_error(last[:, 0], whole[:, 8].float()) < 0.05
