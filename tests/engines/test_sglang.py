"""SGLang with our attention on tiny models, compared with its own attention: `make test-engines`.

SGLang's engine is a process of its own, which finds the plug-in by its entry point.
"""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

sglang = pytest.importorskip("sglang", reason="needs SGLang: make test-engines")

from helpers.engine_models import Judge, prompts  # noqa: E402

from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines.sglang.attention import WarpspecBackend  # noqa: E402

# Longer and shorter than the windows, one token, several pages; two begin alike for longer than a page.
LENGTHS = (70, 5, 1, 40)
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def start(monkeypatch):
    """A function that starts an engine on a folder, with our attention unless another is named."""
    engines = []

    def start(folder, attention="warpspec", backend="reference", **options):
        monkeypatch.setenv("WARPSPEC_BACKEND", backend)
        defaults = {
            "device": "cpu",
            "page_size": 32,
            "disable_cuda_graph": True,
            "skip_tokenizer_init": True,
            "max_total_tokens": 2048,
            "chunked_prefill_size": 64,
            "max_running_requests": 8,
            "context_length": 256,
            "dtype": "bfloat16",
            "log_level": "error",
            "random_seed": 0,
        }
        named = {"model_path": str(folder), "attention_backend": attention}
        engines.append(sglang.Engine(**defaults | named | options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


def generate(engine, inputs, tokens=6):
    """[(prompt, generated tokens, their log-probabilities)], and how many tokens of each prompt were in the cache."""
    outputs = engine.generate(
        input_ids=inputs, sampling_params={"max_new_tokens": tokens, **GREEDY}, return_logprob=True
    )
    results = [
        (ids, output["output_ids"], [said for said, *_ in output["meta_info"]["output_token_logprobs"]])
        for ids, output in zip(inputs, outputs, strict=True)
    ]
    return results, [output["meta_info"]["cached_tokens"] for output in outputs]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss"])
def test_prompts_in_parts_beside_decode_and_prefix_hits(kind, checkpoints, start):
    """gpt-oss: layers with windows have a pool of their own."""
    model, folder = checkpoints(kind)
    judge, engine = Judge(model), start(folder)
    inputs = prompts(LENGTHS, common=36)
    results, _ = generate(engine, inputs)
    judge.check(results)
    results, cached = generate(engine, inputs)
    judge.check(results)
    assert cached[0] == 64


def test_float8_cache(checkpoints, start):
    model, folder = checkpoints("llama")
    results, _ = generate(start(folder, kv_cache_dtype="fp8_e4m3"), prompts(LENGTHS))
    Judge(model, torch.float8_e4m3fn).check(results)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_same_tokens_as_the_own_attention(kind, checkpoints, start):
    """(SGLang's Gemma 3 has its own opinion of which layers have windows, so that Judge is of no use.)"""
    _, folder = checkpoints(kind)
    inputs = prompts(LENGTHS)
    own, _ = generate(start(folder, attention="torch_native"), inputs)
    ours, _ = generate(start(folder), inputs)
    pairs = zip(own, ours, strict=True)
    same = sum(a == b for (_, x, _), (_, y, _) in pairs for a, b in zip(x, y, strict=True))
    assert same >= 0.75 * 6 * len(inputs)  # a near tie flips a token and those behind it


def test_simulated_kernel(checkpoints, start):
    model, folder = checkpoints("llama")
    results, _ = generate(start(folder, backend="sim"), prompts((40, 7)), tokens=2)
    Judge(model).check(results)


def test_too_many_requests_for_the_cache_and_a_cancelled_one(checkpoints, start):
    """Six requests grow to 110 tokens, of which the cache has room for two; one more is cancelled on its way."""
    model, folder = checkpoints("qwen3")
    engine = start(folder, max_total_tokens=320, disable_radix_cache=True)
    inputs = prompts((40, 70, 60, 50, 64, 55, 66))
    threading.Thread(target=cancel, args=(engine, "0")).start()
    outputs = engine.generate(
        input_ids=inputs,
        sampling_params=[{"max_new_tokens": 40 if name else 200, **GREEDY} for name in range(len(inputs))],
        rid=[str(name) for name in range(len(inputs))],
    )
    assert len(outputs[0]["output_ids"]) < 200
    finished = zip(inputs[1:], outputs[1:], strict=True)
    Judge(model).check([(ids, output["output_ids"], None) for ids, output in finished])


def cancel(engine, name: str) -> None:
    """Cancel a request soon after it has come."""
    manager = engine.tokenizer_manager
    while name not in manager.rid_to_state:
        time.sleep(0.01)
    time.sleep(0.3)
    engine.loop.call_soon_threadsafe(manager.abort_request, name)


def runner(**others):
    """What the backend reads of SGLang's runner."""
    values = {"page_size": 64, "kv_cache_dtype": torch.bfloat16, "head_dim": 128} | others
    return SimpleNamespace(
        server_args=SimpleNamespace(page_size=values["page_size"]),
        kv_cache_dtype=values["kv_cache_dtype"],
        model_config=SimpleNamespace(head_dim=values["head_dim"], context_len=256),
        req_to_token_pool=None,
        token_to_kv_pool=None,
    )


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("page_size", 1, r"--page-size.*got 1; set it to 16, 32, 64 or 128"),
        ("kv_cache_dtype", torch.float32, r"--kv-cache-dtype.*fp8_e4m3.*float32; set it to auto"),
        ("head_dim", 96, r"head size.*96.*--attention-backend"),
    ],
)
def test_settings_that_are_refused(setting, value, message):
    with pytest.raises(UnsupportedProblem, match=message):
        WarpspecBackend(runner(**{setting: value}))
    WarpspecBackend(runner())
