"""transformers' gpt-oss model with its attention replaced by ours: same logits, prefill, decode and padding.

The model is small but shaped like the published ones where attention is concerned: head size 64, eight query
heads to a KV head, sinks, YaRN, and a window of 128 on every other layer. Weights are seeded and large enough
that attention is far from uniform and that sinks take a good part of it.
"""

import pytest
import torch
from helpers.model_pairs import (
    ATTENTION_TOLERANCE,
    EAGER_FACTOR,
    SENSITIVITY,
    VOCABULARY,
    padded,
    register_in_fp32_model,
    relative_error,
    tokens,
    with_attention,
)
from helpers.suites import long
from transformers import GptOssConfig, GptOssForCausalLM, StaticCache

import warpspec.engines.transformers

BACKENDS = ["reference", long("sim")]  # test_demo simulates a layer by default


def make_model(**changes) -> GptOssForCausalLM:
    """Two layers (sliding, full), FP32 with bf16-exact weights. All experts are used: routing cannot flip."""
    settings = dict(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=128,
        intermediate_size=64,
        num_local_experts=2,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    model = GptOssForCausalLM(GptOssConfig(**(settings | changes))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.uniform_(0.0, 5.0, generator=generator)
            elif "norm" not in name:
                parameter.normal_(0.0, weight_scale(name, parameter), generator=generator)
            parameter.copy_(parameter.bfloat16())
    return model


def weight_scale(name: str, parameter: torch.Tensor) -> float:
    """Standard deviation that gives activations of order one, and logits of attention of a few units."""
    if "embed_tokens" in name:
        return 0.2
    gain = 0.3 if "experts" in name else 0.8 if "q_proj" in name or "k_proj" in name else 1.0
    return gain * parameter.shape[-1] ** -0.5


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@pytest.fixture
def pair(backend) -> tuple[GptOssForCausalLM, GptOssForCausalLM]:
    """(the model with our attention in bf16, the model with eager attention), FP32 otherwise."""
    register_in_fp32_model(f"warpspec_{backend}_in_fp32", backend)
    model = make_model()
    return with_attention(model, f"warpspec_{backend}_in_fp32"), with_attention(model, "eager")


def test_prefill(pair):
    ids = tokens(1, 200)
    with torch.no_grad():
        ours, exact = (model(ids).logits for model in pair)
    assert relative_error(ours, exact) <= ATTENTION_TOLERANCE


def test_bf16_model(backend):
    """As a user has it: the whole model in bf16, our attention registered by its public name."""
    warpspec.engines.transformers.register(f"warpspec_{backend}", backend=backend)
    model, ids = make_model(), tokens(1, 200)
    with torch.no_grad():
        ours, eager, exact = (
            with_attention(model, name, dtype)(ids).logits
            for name, dtype in (
                (f"warpspec_{backend}", torch.bfloat16),
                ("eager", torch.bfloat16),
                ("eager", torch.float32),
            )
        )
    assert relative_error(ours, exact) <= EAGER_FACTOR * relative_error(eager, exact)


def test_decode_with_cache(pair):
    """A prompt longer than the window, then single tokens: the sliding layer's cache is cut to the window."""
    ids = tokens(2, 150)
    results = []
    with torch.no_grad():
        for model in pair:
            cache = model(ids[:, :147], use_cache=True).past_key_values
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(147, 150)]
            results.append(torch.cat(steps, dim=1))
    assert relative_error(*results) <= ATTENTION_TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(pair, side):
    ids, mask = padded(side, (150, 97))
    with torch.no_grad():
        ours, exact = (model(ids, attention_mask=mask).logits[mask.bool()] for model in pair)
    assert relative_error(ours, exact) <= ATTENTION_TOLERANCE


def test_generate_from_left_padded_prompts(pair):
    """generate() makes masks and caches its own way; it picks the tokens it picks with eager attention."""
    ids, mask = padded("left", (140, 100))
    options = dict(max_new_tokens=3, do_sample=False, output_logits=True, return_dict_in_generate=True)
    ours, exact = (model.generate(ids, attention_mask=mask, **options) for model in pair)
    assert torch.equal(ours.sequences, exact.sequences)
    assert relative_error(torch.stack(ours.logits), torch.stack(exact.logits)) <= ATTENTION_TOLERANCE


def test_static_cache(pair):
    """A cache allocated in advance hands over keys that do not exist yet."""
    ids = tokens(1, 141)
    results = []
    with torch.no_grad():
        for model in pair:
            cache = StaticCache(config=model.config, max_cache_len=256)
            model(ids[:, :140], past_key_values=cache)
            results.append(model(ids[:, 140:], past_key_values=cache).logits)
    assert relative_error(*results) <= ATTENTION_TOLERANCE


@pytest.mark.parametrize("without", ["sinks", "window"])
def test_logits_depend_on_what_is_compared(without):
    """Agreement says something of sinks and window: without them the logits are far outside the tolerance."""
    model, ids = make_model(), tokens(1, 200)
    changed = make_model(sliding_window=1024) if without == "window" else make_model()
    if without == "sinks":
        for layer in changed.model.layers:
            layer.self_attn.sinks.data.fill_(torch.finfo(torch.float32).min)
    with torch.no_grad():
        difference = relative_error(changed(ids).logits, model(ids).logits)
    assert difference >= SENSITIVITY * ATTENTION_TOLERANCE
