"""transformers with our attention: continuous batching, and generate with dynamic and static caches."""

import pytest
import torch
import transformers
from helpers.engine_models import CONFIGS, SIZES_CONFIGS, Judge, make_model, prompts
from helpers.family_models import counting_calls
from helpers.suites import long
from transformers import ContinuousBatchingConfig, GenerationConfig

import warpspec.engines.transformers as engine
from warpspec.common.errors import UnsupportedProblem

SIZE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"  # before 5.18
PAGE = 32
# Longer and shorter than the windows, one token, several pages; two begin alike for longer than a page.
LENGTHS = (70, 5, 1, 40)
KINDS = [*CONFIGS, *map(long, SIZES_CONFIGS)]


@pytest.fixture
def calls():
    """Some layers are computed by our attention."""
    with counting_calls() as made:
        yield made
    assert made


def settings(**others) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        **{SIZE: PAGE, "num_blocks": 24, "max_batch_tokens": 48, "return_logprobs": True} | others
    )


def generate(model, inputs, tokens=6, **others):
    """[(prompt, generated tokens, their log-probabilities)] by continuous batching; prompts longer than 48 tokens
    come in parts, beside requests that decode."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    outputs = model.generate_batch(inputs, config, continuous_batching_config=settings(**others))
    assert len(outputs) == len(inputs)
    results = list(outputs.values())
    assert all(not result.error and len(result.generated_tokens) == tokens for result in results)
    return [(result.prompt_ids, result.generated_tokens, result.logprobs) for result in results]


@pytest.mark.parametrize("kind", [*CONFIGS, long("phi3")])
def test_continuous_batching(kind, calls):
    model = make_model(kind)
    judge = Judge(model)
    engine.prepare_continuous_batching(model, backend="reference")
    judge.check(generate(model, prompts(LENGTHS, common=36)))


@pytest.mark.long
def test_simulated_kernel(calls):
    """One step of a prompt in parts, one of decode, on the compiled kernel."""
    model = make_model("gpt_oss")
    judge = Judge(model)
    engine.prepare_continuous_batching(model, backend="sim")
    judge.check(generate(model, prompts((50, 7)), tokens=2))


def test_page_tables_of_the_engine(monkeypatch, calls):
    """Steps that only decode: the engine fills page tables, which it does on a GPU alone unless told otherwise."""
    initialization = transformers.generation.continuous_batching.initialization
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    seen = []
    of_one_query = engine.continuous_batching._decode
    monkeypatch.setattr(
        engine.continuous_batching, "_decode", lambda *a: seen.append(a[0].group) or of_one_query(*a)
    )
    model = make_model("llama")
    judge = Judge(model)
    engine.prepare_continuous_batching(model, backend="reference")
    judge.check(generate(model, prompts(LENGTHS), max_blocks_per_request=8))
    assert seen


def test_preemption_and_prefix_hits(calls):
    """A cache too small for all requests at once; the second round finds prompts' pages in the cache."""
    model = make_model("llama")
    judge = Judge(model)
    engine.prepare_continuous_batching(model, backend="reference")
    inputs = prompts((90, 80, 70, 60), common=64)
    config = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings(num_blocks=10)
    ) as manager:
        for round_ in range(2):
            names = [manager.add_request(ids, request_id=f"{round_}.{i}") for i, ids in enumerate(inputs)]
            results = {}
            while len(results) < len(names):
                result = manager.get_result(timeout=60)
                assert result is not None
                if result.is_finished():
                    results[result.request_id] = result
            judge.check(
                [
                    (ids, results[name].generated_tokens, results[name].logprobs)
                    for name, ids in zip(names, inputs, strict=True)
                ]
            )


def test_cancelled_requests_leave_the_others_alone(calls):
    model = make_model("gpt_oss")
    judge = Judge(model)
    engine.prepare_continuous_batching(model, backend="reference")
    inputs = prompts((70, 30, 20))
    config = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings()
    ) as manager:
        names = [manager.add_request(ids, request_id=str(i)) for i, ids in enumerate(inputs)]
        manager.cancel_request(names[1])
        results = {}
        while not {names[0], names[2]} <= set(results):
            result = manager.get_result(timeout=60)
            assert result is not None
            if result.is_finished():
                results[result.request_id] = result
    judge.check([(inputs[i], results[names[i]].generated_tokens, results[names[i]].logprobs) for i in (0, 2)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(kind, cache, calls):
    """Prompts padded on the left, decoded past the window."""
    model = make_model(kind)
    judge = Judge(model)
    engine.register("warpspec_reference", backend="reference")
    model.set_attn_implementation("warpspec_reference")
    inputs = prompts((40, 9))
    ids = torch.tensor([[0] * (40 - len(prompt)) + prompt for prompt in inputs])
    result = model.generate(
        ids,
        attention_mask=(torch.arange(40) >= 40 - torch.tensor([[40], [9]])).long(),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
    )
    judge.check([(prompt, row[40:].tolist(), None) for prompt, row in zip(inputs, result, strict=True)])


def test_what_cannot_be_served_is_refused_with_the_setting():
    model = make_model("llama", torch.float32)
    with pytest.raises(UnsupportedProblem, match=r"dtype \(of from_pretrained\).*bfloat16"):
        engine.prepare_continuous_batching(model)
    model = make_model("llama")
    model.config.head_dim = 100
    with pytest.raises(UnsupportedProblem, match=r"head size.*multiple of 8 up to 256, or 512, got 100"):
        engine.prepare_continuous_batching(model)
    model.config.head_dim = 64
    engine.prepare_continuous_batching(model, backend="reference")
    (failed,) = model.generate_batch([[1, 2]], continuous_batching_config=settings(**{SIZE: 24})).values()
    assert "page_size" in failed.error and "multiple of 16" in failed.error
    with pytest.raises(UnsupportedProblem, match="set_attn_implementation"):
        model(torch.tensor([[1, 2]]))


@pytest.mark.parametrize(
    ("kind", "sizes"), [("gemma4", "64, 512"), ("mimo_v2_flash", "128, 192"), ("deepseek_v3", "128, 192")]
)
def test_caches_of_several_head_sizes_are_refused(kind, sizes):
    """transformers' own continuous batching serves none of these models."""
    with pytest.raises(UnsupportedProblem, match=rf"one head size, this model's are \[{sizes}\]"):
        engine.prepare_continuous_batching(make_model(kind))


@pytest.mark.parametrize("wrong", [lambda window: None, lambda window: window and (window[0] + 1, window[1])])
@pytest.mark.parametrize("says", [True, False])
def test_judge_sees_a_wrong_window(wrong, says, monkeypatch):
    """Were windows ignored, or a key longer, the tests above would fail, by the tokens alone, too."""
    model = make_model("gpt_oss")
    judge = Judge(model)
    engine.prepare_continuous_batching(model, backend="reference")
    window_of = engine.continuous_batching.keys.window_of
    monkeypatch.setattr(
        engine.continuous_batching.keys, "window_of", lambda *of, **named: wrong(window_of(*of, **named))
    )
    results = generate(model, prompts(LENGTHS, common=36), tokens=16)
    with pytest.raises(AssertionError, match="the model's own"):
        judge.check([(ids, tokens, said if says else None) for ids, tokens, said in results])
