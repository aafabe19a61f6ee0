"""transformers' models with keys and values in FP8 and NVFP4, against the same models over rounded keys and values."""

import math

import pytest
import torch
from helpers.engine_models import CONFIGS, Judge, log_probabilities, make_model, prompts, rounding
from helpers.suites import long, long_but

import warpspec.engines.transformers as engine
from warpspec.cache.quantize import quantize_float8
from warpspec.common.errors import UnsupportedProblem
from warpspec.common.launch import simulating

SCALE = torch.tensor(0.75)


def generate(model, lengths, cache, tokens=4, **options):
    """(prompt, generated tokens, None) of prompts padded on the left."""
    inputs, longest = prompts(lengths), max(lengths)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in inputs])
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    settings = dict(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0) | options
    result = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    return [(prompt, row[longest:].tolist(), None) for prompt, row in zip(inputs, result, strict=True)]


def with_ours(kind: str, backend: str = "reference"):
    model = make_model(kind)
    engine.register(f"warpspec_{backend}", backend=backend)
    model.set_attn_implementation(f"warpspec_{backend}")
    return model


def cache_of(name: str, **options):
    return engine.QuantizedCache(
        name, **dict(k_scale=SCALE, v_scale=float(SCALE), backend="reference") | options
    )


KINDS = long_but(
    [("e4m3", "llama"), ("e4m3", "gpt_oss"), ("nvfp4", "gemma3")],
    [(name, kind) for name in ("e4m3", "nvfp4") for kind in CONFIGS],
)


@pytest.mark.parametrize("name, kind", KINDS)
def test_generate(kind, name):
    """Greedy tokens of prompts of two lengths, decoded past windows."""
    judge = Judge(make_model(kind), cached=rounding(name, SCALE))
    judge.check(generate(with_ours(kind), (40, 9), cache_of(name)))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "nvfp4"])
def test_logits_are_those_of_rounded_keys(name):
    """A prompt, then single tokens, then some at once: as near to the model in FP32 over rounded keys and values as the
    model in bf16 over them is, and nearer than the model in FP32 over keys and values that are not rounded."""
    ids = torch.tensor(prompts((300,)))
    model = with_ours("llama")
    cache, said = cache_of(name), []
    with torch.no_grad():
        for part in ids.split([270, 1, 1, 28], dim=1):
            said.append(model(part, past_key_values=cache).logits.float())
    said = torch.cat(said, dim=1)
    assert cache.get_seq_length() == 300
    judge, prompt = Judge(make_model("llama"), cached=rounding(name, SCALE)), ids[0].tolist()
    whole = prompt[:1], [*prompt[1:], 0]
    wanted = log_probabilities(judge.exact, *whole, rounding(name, SCALE))

    def error(found):
        return (found - wanted).square().mean().sqrt()

    ours = error(said[0].log_softmax(-1))
    assert ours < 1.3 * error(log_probabilities(judge.rounded, *whole, rounding(name, SCALE)))
    assert ours < 0.85 * error(log_probabilities(judge.exact, *whole))


@pytest.mark.parametrize("name", [long("e4m3"), "nvfp4"])
def test_beams_and_crops(name):
    """Beam search takes rows in another order; a cropped cache goes on as one that never had the tokens."""
    model = with_ours("llama")
    together = generate(model, (20, 20), cache_of(name), tokens=5, num_beams=3)
    assert together == [beams_of(model, row, name) for row in range(2)]
    ids, cache = torch.tensor(prompts((30,))), cache_of(name)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        wanted = model(ids[:, 20:], past_key_values=cache).logits
        cache.crop(-10)
        assert torch.equal(model(ids[:, 20:], past_key_values=cache).logits, wanted)
        with pytest.raises(ValueError, match=r"^tokens_to_remove: "):  # once meant tokens to keep
            cache.crop(20)
        cache.reset()
        model(ids[:, :20], past_key_values=cache)
        assert torch.equal(model(ids[:, 20:], past_key_values=cache).logits, wanted)


@pytest.mark.parametrize("name", ["e4m3", "nvfp4"])
def test_a_batch_of_another_size(name):
    """Only an empty cache takes it; what is stored is then as in a new one."""
    (large, small), cache, new = (
        (torch.randn(n, 2, 5, 64).bfloat16() for n in (3, 2)),
        cache_of(name),
        cache_of(name),
    )
    cache.update(large, large, 0)
    with pytest.raises(ValueError, match=r"^key_states: batch must be .*, 3, got 2"):
        cache.update(small, small, 0)
    cache.reset()
    for found, wanted in zip(cache.update(small, small, 0), new.update(small, small, 0), strict=True):
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)) and found.shape[0] == 2


def beams_of(model, row: int, name: str):
    """Beam search of one of two prompts by itself."""
    prompt = prompts((20, 20))[row]
    result = model.generate(
        torch.tensor([prompt]), past_key_values=cache_of(name), max_new_tokens=5, num_beams=3,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return prompt, result[0, 20:].tolist(), None


def test_scales_of_layers_and_heads():
    """A scale of each layer, of each head in one: what is stored is codes of keys over that scale."""
    model = with_ours("llama")
    by_head = torch.tensor([0.5, 2.0])
    cache = cache_of("e4m3", k_scale=[by_head, 0.25], v_scale=None)
    with torch.no_grad():
        model(torch.tensor(prompts((12,))), past_key_values=cache)
        plain = model(torch.tensor(prompts((12,)))).past_key_values
    for layer, scale in enumerate((by_head[:, None, None], torch.tensor(0.25))):
        stored = cache.layers[layer].stored("k")
        keys = plain.layers[layer].keys
        if layer == 0:  # the second sees the first one's rounding
            assert torch.equal(stored, quantize_float8(keys, scale, "e4m3"))
        error = (stored.view(torch.float8_e4m3fn).float() * scale - keys).norm() / keys.norm()
        assert error < 0.3  # of another scale at least 0.5


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", ["e4m3", "nvfp4"])
def test_simulated_kernels(name, arch):
    """Insert and attention of compiled kernels."""
    judge = Judge(make_model("llama"), cached=rounding(name, SCALE))
    with simulating(arch):
        judge.check(generate(with_ours("llama", "sim"), (24, 9), cache_of(name, backend="sim"), tokens=2))


WRONG = [
    (ValueError, "format", {"format": "fp8"}),
    (ValueError, "k_scale", {"k_scale": 0.0}),
    (ValueError, "v_scale", {"v_scale": [1.0, math.nan]}),
    (TypeError, "v_scale", {"v_scale": "1"}),
    (TypeError, "k_scale", {"k_scale": torch.ones(2, dtype=torch.bfloat16)}),
]


@pytest.mark.parametrize("error, name, options", WRONG)
def test_names_the_argument(error, name, options):
    with pytest.raises(error, match=rf"^{name}: "):
        engine.QuantizedCache(**options)


def test_too_few_scales():
    with torch.no_grad(), pytest.raises(ValueError, match=r"^k_scale: .*each layer, got 1"):
        with_ours("llama")(torch.tensor([[5]]), past_key_values=cache_of("e4m3", k_scale=[0.5]))


def test_other_attention_is_refused():
    """A model whose attention is not ours would read codes as if they were keys."""
    model = make_model("llama")  # eager
    with torch.no_grad(), pytest.raises((UnsupportedProblem, RuntimeError, NotImplementedError)):
        model(torch.tensor(prompts((5,))), past_key_values=cache_of("e4m3"))
