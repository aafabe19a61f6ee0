"""vLLM with our attention on tiny models, compared with its own attention: `make test-engines`."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import gc
from copy import deepcopy

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.engine_models import (  # noqa: E402
    CONFIGS,
    Judge,
    log_probabilities,
    make_model,
    prompts,
    write_nvfp4_experts,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import warpspec.engines.vllm as engine  # noqa: E402
from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines.vllm import warmup  # noqa: E402
from warpspec.engines.vllm.attention import BatchBuilder, WarpspecAttention, WarpspecBackend  # noqa: E402
from warpspec.fmha import attention_varlen  # noqa: E402

# Longer and shorter than the windows, one token, several blocks; two begin alike for longer than a block.
LENGTHS = (70, 5, 1, 40)
GREEDY = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 0}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function: (model, folder with its files) of a kind."""
    known = {}

    def of(kind):
        if kind not in known:
            known[kind] = make_model(kind), tmp_path_factory.mktemp(kind)
            known[kind][0].save_pretrained(known[kind][1])
        return known[kind]

    return of


@pytest.fixture
def look_through_llvmlite(monkeypatch):
    """vLLM 0.32 reads vars() of all that modules hold, which is no dictionary for llvmlite's library. The simulator
    loads that, as does speculation from prompts."""
    import llvmlite.binding.ffi as ffi

    get = type(ffi.lib).__getattr__

    def plain(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return get(self, name)

    monkeypatch.setattr(type(ffi.lib), "__getattr__", plain)


@pytest.fixture
def start(monkeypatch, look_through_llvmlite):
    """A function that starts an engine on a folder, with our attention unless own is set."""
    engines = []

    def start(folder, own=False, backend="reference", **options):
        monkeypatch.setenv("WARPSPEC_BACKEND", backend)
        if own:
            AttentionBackendEnum.CPU_ATTN.clear_override()
        else:
            engine.replace_cpu_attention()
        defaults = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 64,
            "max_model_len": 256,
            "dtype": "bfloat16",
            "block_size": 32,
            "max_num_batched_tokens": 64,  # the longest prompts come in parts, beside requests that decode
            "max_num_seqs": 8,
            "disable_log_stats": True,
        }
        engines.append(vllm.LLM(str(folder), **defaults | options))
        return engines[-1]

    yield start
    engines.clear()
    gc.collect()
    AttentionBackendEnum.CPU_ATTN.clear_override()


def generate(llm, inputs, tokens=6):
    """[(prompt, generated tokens, their log-probabilities)]"""
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in inputs],
        vllm.SamplingParams(max_tokens=tokens, **GREEDY),
        use_tqdm=False,
    )
    return [results_of(ids, output) for ids, output in zip(inputs, outputs, strict=True)]


def results_of(ids, output):
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    said = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    return ids, tokens, said


@pytest.fixture
def calls(monkeypatch):
    """The most queries of a request in each call of our attention."""
    seen = []
    forward = WarpspecAttention.forward

    def counted(self, layer, query, key, value, kv_cache, batch, *rest, **named):
        if batch is not None:
            seen.append(batch.most_queries)
        return forward(self, layer, query, key, value, kv_cache, batch, *rest, **named)

    monkeypatch.setattr(WarpspecAttention, "forward", counted)
    return seen


@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_in_parts_beside_decode_and_prefix_hits(kind, checkpoints, start, calls):
    model, folder = checkpoints(kind)
    judge, llm = Judge(model), start(folder)
    inputs = prompts(LENGTHS, common=36)
    first = generate(llm, inputs)
    judge.check(first)
    assert 1 in calls and any(1 < most < 70 for most in calls)
    calls.clear()
    again = generate(llm, inputs)  # blocks of the longer prompts are in the cache
    judge.check(again)
    assert max(calls) < 40


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_same_tokens_as_the_own_attention(kind, checkpoints, start):
    _, folder = checkpoints(kind)
    inputs = prompts(LENGTHS)
    own = generate(start(folder, own=True), inputs)
    ours = generate(start(folder), inputs)
    same = sum(
        a == b for (_, x, _), (_, y, _) in zip(own, ours, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert same >= 0.75 * 6 * len(inputs)  # a near tie flips a token and those behind it


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [("llama", "fp8", torch.float8_e4m3fn), ("gemma3", "fp8_e5m2", torch.float8_e5m2)],
)
def test_float8_cache(kind, name, dtype, checkpoints, start):
    model, folder = checkpoints(kind)
    llm = start(folder, kv_cache_dtype=name)
    Judge(model, dtype).check(generate(llm, prompts(LENGTHS)))


def test_preemption(checkpoints, start):
    """Six requests grow to 110 tokens, four blocks each; there are 15."""
    model, folder = checkpoints("llama")
    llm = start(folder, num_gpu_blocks_override=16)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *rest, **named: (
        preempted.append(request) or preempt(request, *rest, **named)
    )
    Judge(model).check(generate(llm, prompts((70, 60, 50, 64, 55, 66)), tokens=40))
    assert preempted


def test_cancelled_requests_leave_the_others_alone(checkpoints, start):
    model, folder = checkpoints("qwen3")
    requests = start(folder).llm_engine
    inputs = prompts((70, 30, 20))
    for name, ids in enumerate(inputs):
        parameters = vllm.SamplingParams(max_tokens=12, **GREEDY)
        requests.add_request(str(name), {"prompt_token_ids": ids}, parameters)
    finished, steps = {}, 0
    while requests.has_unfinished_requests():
        for output in requests.step():
            if output.finished:
                finished[int(output.request_id.split("-")[0])] = output
        steps += 1
        if steps == 4:
            requests.abort_request(["1"])
    assert set(finished) >= {0, 2}
    Judge(model).check([results_of(inputs[name], finished[name]) for name in (0, 2)])


def test_speculative_decoding(checkpoints, start, calls):
    """Tokens guessed from the prompt are verified, several queries of a request at once."""
    model, folder = checkpoints("llama")
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = start(folder, speculative_config=guess)
    inputs = [ids * 4 for ids in prompts((9, 5))]
    results = generate(llm, inputs, tokens=24)
    Judge(model).check([(ids, tokens, None) for ids, tokens, _ in results])
    assert any(1 < most <= 4 for most in calls)


def test_experts_in_nvfp4(tmp_path, start):
    """Experts of a ModelOpt checkpoint. Activations are rounded to NVFP4 as well, which is what the error is of."""
    model = write_nvfp4_experts(tmp_path)
    results = generate(start(tmp_path, quantization=engine.QUANTIZATION), prompts(LENGTHS))
    error = error_of(model, results)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.zero_()
    assert error < 0.25 and error_of(model, results) > 4 * error


def error_of(model, results) -> float:
    """Root mean square of what results' log-probabilities differ from the model's in FP32."""
    exact = deepcopy(model).float()
    differences = []
    for ids, tokens, said in results:
        chosen = torch.tensor(tokens)[:, None]
        differences.append(torch.tensor(said) - log_probabilities(exact, ids, tokens).gather(1, chosen)[:, 0])
    return torch.cat(differences).square().mean().sqrt().item()


def test_kernels_before_the_first_request(checkpoints, start, monkeypatch):
    """Each kind of layer and batch is called once by vLLM's warm-up (which it leaves out on a CPU)."""
    _, folder = checkpoints("gpt_oss")
    monkeypatch.setattr(warmup, "provider", warmup.Provider())
    start(folder)
    units = warmup.provider.get_cutedsl_warmup_compile_units()
    assert len({unit.key for unit in units}) == len(units) == 2 * 4  # with a window and without; four batches
    calls = []
    monkeypatch.setattr(
        warmup, "attention_varlen", lambda *a, **named: calls.append(attention_varlen(*a, **named))
    )
    for unit in units:
        unit.compile()
    assert [len(out) for out in calls[:4]] == [1, 8, 64, 64]


def test_plug_in_is_found():
    """By its entry point, where warpspec is installed beside vLLM."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    load_general_plugins()
    assert AttentionBackendEnum["WARPSPEC"].get_class() is WarpspecBackend
    assert BatchBuilder.get_cudagraph_support(None, None).name == "ALWAYS"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("head_size", 96, "head size.*96.*--attention-backend"),
        ("kv_cache_dtype", "fp8", "--kv-cache-dtype.*fp8"),
        ("logits_soft_cap", 30.0, "logits_soft_cap"),
        ("alibi_slopes", [1.0], "alibi_slopes"),
        ("attn_type", "encoder", "attn_type.*decoder"),
    ],
)
def test_layers_that_are_refused(option, value, message):
    options = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2} | {option: value}
    with pytest.raises(UnsupportedProblem, match=message):
        WarpspecAttention(**options)


def test_settings_that_are_refused_are_named():
    """What vLLM prints where it is asked for this backend with other settings."""
    settings = {"head_size": 96, "dtype": torch.float32, "kv_cache_dtype": "fp8", "block_size": 8}
    others = ("use_mla", "has_sink", "use_sparse", "use_mm_prefix", "device_capability")
    said = WarpspecBackend.supports_combination(**settings, **dict.fromkeys(others))
    for part in (
        "head size",
        "--attention-backend",
        "--dtype",
        "--kv-cache-dtype",
        "--block-size",
        "set it to 16",
    ):
        assert part in said
    settings = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None}
    assert WarpspecBackend.supports_combination(**settings, **dict.fromkeys(others)) is None


def test_a_dtype_that_is_refused():
    layer = WarpspecAttention(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2)
    with pytest.raises(UnsupportedProblem, match=r"--dtype.*bfloat16"):
        layer.process_weights_after_loading(torch.float32)


def test_simulated_kernel(checkpoints, start):
    model, folder = checkpoints("gpt_oss")
    Judge(model).check(generate(start(folder, backend="sim"), prompts((40, 7)), tokens=2))
