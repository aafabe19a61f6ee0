"""vLLM with our attention on tiny models, compared with its own attention: `make test-engines`."""

import pickle
import subprocess
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.engine_models import (  # noqa: E402
    CONFIGS,
    Judge,
    check_as_own,
    error_of,
    prompts,
    rounding,
    write_nvfp4_experts,
    write_scaled_llama,
)
from helpers.vllm_engine import GREEDY, LENGTHS, generate, note_launches, results_of  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import warpspec.engines.vllm as engine  # noqa: E402
from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines.vllm import attention, warmup  # noqa: E402
from warpspec.engines.vllm.attention import (  # noqa: E402
    Batch,
    BatchBuilder,
    TwoSizesBackend,
    WarpspecAttention,
    WarpspecBackend,
)
from warpspec.engines.vllm.pages import pages_of, slot_bytes  # noqa: E402
from warpspec.fmha import attention_varlen  # noqa: E402
from warpspec.fmha.quantized import dequantized  # noqa: E402


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


@pytest.mark.parametrize(
    "kind", [kind for kind in CONFIGS if kind != "gemma2"]
)  # whose own error vLLM doubles
def test_prompts_in_parts_beside_decode_and_prefix_hits(kind, checkpoints, start_vllm, calls):
    model, folder = checkpoints(kind)
    judge, llm = Judge(model), start_vllm(folder)
    inputs = prompts(LENGTHS, common=36)
    first = generate(llm, inputs)
    judge.check(first)
    assert 1 in calls and any(1 < most < 70 for most in calls)
    calls.clear()
    again = generate(llm, inputs)  # blocks of the longer prompts are in the cache
    judge.check(again)
    assert max(calls) < 40


@pytest.mark.parametrize(
    ("kind", "cache"),
    [("llama", "auto"), ("gpt_oss", "auto"), ("gemma2", "auto"), ("gemma2", "fp8_e5m2")],
)
def test_same_tokens_as_the_own_attention(kind, cache, checkpoints, start_vllm, calls):
    model, folder = checkpoints(kind)
    inputs = prompts(LENGTHS)
    own = generate(start_vllm(folder, own=True, kv_cache_dtype=cache), inputs)
    assert not calls
    ours = generate(start_vllm(folder, kv_cache_dtype=cache), inputs)
    assert calls
    check_as_own(model, own, ours, None if cache == "auto" else rounding("e5m2"))


def test_no_further_off_than_the_own_attention(checkpoints, start_vllm, calls):
    """Half of the tokens differ over e4m3: those of vLLM's attention are further from the model in FP32."""
    model, folder = checkpoints("llama")
    errors = []
    for own in (True, False):
        llm = start_vllm(folder, own=own, kv_cache_dtype="fp8")
        errors.append(error_of(model, generate(llm, prompts(LENGTHS)), rounding("e4m3")))
        assert bool(calls) is not own
    assert errors[1] <= errors[0], errors


@pytest.mark.parametrize(
    ("kind", "name", "format"),
    [
        ("llama", "fp8", "e4m3"),
        ("gemma3", "fp8_e5m2", "e5m2"),
        ("llama", "nvfp4", "nvfp4"),
        ("gpt_oss", "nvfp4", "nvfp4"),
        ("gemma3", "nvfp4", "nvfp4"),
    ],
)
def test_quantised_cache(kind, name, format, checkpoints, start_vllm):
    model, folder = checkpoints(kind)
    llm = start_vllm(folder, kv_cache_dtype=name)
    Judge(model, rounding(format)).check(generate(llm, prompts(LENGTHS)))


@pytest.mark.parametrize(("name", "format"), [("fp8", "e4m3"), ("nvfp4", "nvfp4")])
def test_layers_that_are_skipped(name, format, checkpoints, start_vllm):
    """The second layer's cache stays in 16 bits."""
    model, folder = checkpoints("llama")
    llm = start_vllm(folder, kv_cache_dtype=name, kv_cache_dtype_skip_layers=["1"])
    Judge(model, {0: rounding(format)}).check(generate(llm, prompts(LENGTHS)))


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_scales_of_a_checkpoint(strategy, tmp_path, start_vllm):
    """Scales that compressed-tensors stored, of a layer or of each of its heads."""
    scales = [torch.tensor([0.05]), torch.tensor([2.0])]
    if strategy == "attn_head":
        scales = [torch.tensor([0.5, 0.03]), torch.tensor([0.1, 1.5])]
    model = write_scaled_llama(tmp_path, strategy, scales)
    roundings = {layer: rounding("e4m3", scale[:, None, None]) for layer, scale in enumerate(scales)}
    Judge(model, roundings).check(generate(start_vllm(tmp_path), prompts(LENGTHS), tokens=16))


@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rope_and_update_at_once(cache, is_neox, monkeypatch):
    """vLLM's hooks, against its own norm and rotation and our update of the cache."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    generator = torch.Generator().manual_seed(1)
    rows, heads, kv_heads, size = 7, 4, 2, 64
    impl = WarpspecAttention(heads, size, 0.125, kv_heads, kv_cache_dtype=cache)
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor([0.25, 2.0]))
    bits = 16 if cache == "auto" else 8
    shape = (3, 2 * kv_heads, 16, slot_bytes(size)) if cache == "nvfp4" else (3, kv_heads, 16, 2 * size)
    dtype = torch.bfloat16 if bits == 16 else torch.uint8
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(3)]
    slots, positions = torch.tensor([17, 3, -1, 40, 18, 19, -1]), torch.tensor([0, 5, 9, 31, 2, 7, 1])
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(size, size, 32, 10000, is_neox, torch.bfloat16)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * size, generator=generator).bfloat16()
    q, k, v = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
    rotated = rope.forward_native(positions, q.clone(), k.clone())
    impl.do_kv_cache_update(
        layer, rotated[1].view(rows, kv_heads, size), v.view(rows, kv_heads, size), caches[0], slots
    )
    own = q.clone().view(rows, heads, size)
    table = rope.cos_sin_cache
    impl.do_rope_and_kv_cache_update(
        layer, own, k.view(rows, kv_heads, size), v.view(rows, kv_heads, size), positions, table, is_neox,
        caches[1], slots,
    )  # fmt: skip
    torch.testing.assert_close(own.flatten(1), rotated[0], rtol=2.0**-7, atol=2.0**-7)
    assert impl.fused_rope_kvcache_supported() and impl.fused_qk_norm_rope_kvcache_supported()

    def values(stored):
        pages = pages_of(stored, size, impl.format)
        blocks = [pages.block_scales.get(f"{n}_block_scales") for n in "kv"]
        return [dequantized(t, b) for t, b in zip(pages[:2], blocks, strict=True)]

    steps = {"auto": 2.0**-7, "fp8": 2.0**-3, "fp8_e5m2": 2.0**-2, "nvfp4": 0.5}
    for got, wanted in zip(values(caches[1]), values(caches[0]), strict=True):
        assert bool(wanted.any())
        near = (got - wanted).abs() <= steps[cache] * wanted.abs() + (0.7 if cache == "nvfp4" else 0.02)
        assert near.all() and (got == wanted).float().mean() > 0.95
    # With weights of 1 and rows of one length, the norm changes nothing but rounding.
    weights = torch.ones(size, dtype=torch.bfloat16)
    scaled = torch.nn.functional.rms_norm(qkv.view(rows, -1, size).float(), (size,)).bfloat16()
    normed = torch.cat([scaled[:, : heads + kv_heads], v.view(rows, kv_heads, size)], dim=1).view(rows, -1)
    again, k_out = torch.zeros(rows, heads * size).bfloat16(), torch.zeros(rows, kv_heads * size).bfloat16()
    impl.do_qk_norm_rope_kvcache_update(
        layer, normed, again, k_out, positions, weights, weights, 0.0, table, is_neox, caches[2], slots
    )
    wanted = rope.forward_native(positions, scaled[:, :heads].reshape(rows, -1).clone(), None)[0]
    torch.testing.assert_close(again, wanted, rtol=2.0**-6, atol=2.0**-6)
    assert torch.equal(values(caches[2])[1], values(caches[1])[1])


def test_preemption(checkpoints, start_vllm):
    """Six requests grow to 110 tokens, four blocks each; there are 15."""
    model, folder = checkpoints("llama")
    llm = start_vllm(folder, num_gpu_blocks_override=16)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *rest, **named: (
        preempted.append(request) or preempt(request, *rest, **named)
    )
    Judge(model).check(generate(llm, prompts((70, 60, 50, 64, 55, 66)), tokens=40))
    assert preempted


def test_cancelled_requests_leave_the_others_alone(checkpoints, start_vllm):
    model, folder = checkpoints("qwen3")
    requests = start_vllm(folder).llm_engine
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


def test_speculative_decoding(checkpoints, start_vllm, calls):
    """Tokens guessed from the prompt are verified, several queries of a request at once."""
    model, folder = checkpoints("llama")
    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    llm = start_vllm(folder, speculative_config=guess)
    inputs = [ids * 4 for ids in prompts((9, 5))]
    results = generate(llm, inputs, tokens=24)
    Judge(model).check([(ids, tokens, None) for ids, tokens, _ in results])
    assert any(1 < most <= 4 for most in calls)


def test_experts_in_nvfp4(tmp_path, start_vllm):
    """Experts of a ModelOpt checkpoint. Activations are rounded to NVFP4 as well, which is what the error is of."""
    model = write_nvfp4_experts(tmp_path)
    results = generate(start_vllm(tmp_path, quantization=engine.QUANTIZATION), prompts(LENGTHS))
    error = error_of(model, results)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.down_proj.zero_()
    assert error < 0.25 and error_of(model, results) > 4 * error


def test_kernels_before_the_first_request(checkpoints, start_vllm, monkeypatch):
    """Each kind of layer and batch is called once by vLLM's warm-up (which it leaves out on a CPU)."""
    _, folder = checkpoints("gpt_oss")
    monkeypatch.setattr(warmup, "provider", warmup.Provider())
    start_vllm(folder)
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
    """vLLM finds it by its entry point, where warpspec is installed beside vLLM."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    load_general_plugins()
    assert AttentionBackendEnum["WARPSPEC"].get_class() is WarpspecBackend
    assert BatchBuilder.get_cudagraph_support(None, None).name == "ALWAYS"


def test_images_of_a_batch():
    """A prompt in parts with two images, one of them cut by the part's end, beside a request that decodes; then a batch
    without images in the same memory."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(is_mm_prefix_lm=True),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )
    builder = BatchBuilder(SimpleNamespace(block_size=32), [], config, torch.device("cpu"))
    starts, lengths = torch.tensor([0, 1, 41], dtype=torch.int32), torch.tensor([70, 60], dtype=torch.int32)
    common = dict(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=2,
        num_actual_tokens=44,  # three of padding
        max_query_len=40,
        max_seq_len=70,
        block_table_tensor=torch.arange(6, dtype=torch.int32).view(2, 3),
        slot_mapping=torch.zeros(41, dtype=torch.int64),
        causal=True,
    )
    images = {0: [(5, 20)], 1: [(10, 29), (50, 80)]}
    batch = builder.build(0, CommonAttentionMetadata(**common, mm_req_doc_ranges=images))
    layer = WarpspecAttention(4, 64, 0.125, 2, sliding_window=30)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(44, 4, 64, generator=generator).bfloat16()
    cache = torch.randn(6, 2, 32, 128, generator=generator).bfloat16()
    got = layer.forward(None, query, None, None, cache, batch, torch.zeros_like(query))
    pages = cache.transpose(1, 2).split(64, dim=-1)
    k, v = (t[3:].flatten(0, 1)[:60].transpose(0, 1).float().repeat_interleave(2, dim=0) for t in pages)
    position, key = torch.arange(20, 60)[:, None], torch.arange(60)
    seen = (key <= position) & (key > position - 30)
    for first, last in images[1]:
        of_image = (position >= first) & (position <= last) & (key > position - 30)
        seen |= of_image & (key >= first) & (key <= last)
    scores = query[1:41].transpose(0, 1).float() @ k.transpose(1, 2) * 0.125
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    assert (got[1:41].transpose(0, 1).float() - expected).norm() <= 4e-3 * expected.norm()
    ranges = batch.mm_prefix_query_range_tensor
    assert ranges[0].tolist() == ranges[43].tolist() == [-1, -1]
    plain = builder.build(0, CommonAttentionMetadata(**common, mm_req_doc_ranges={}))
    assert (plain.mm_prefix_query_range_tensor == -1).all()
    assert plain.mm_prefix_query_range_tensor.data_ptr() == ranges.data_ptr()


def test_values_of_another_head_size(monkeypatch):
    """MiMo-V2-Flash's layers: rows of 192 and 128 numbers, sinks, a window; a request that decodes beside a prompt."""
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    engine.register()
    backend = AttentionBackendEnum["WARPSPEC_DIFFKV"].get_class()
    backend.set_head_size_v(128)
    generator = torch.Generator().manual_seed(2)
    sinks = torch.randn(4, generator=generator).bfloat16()
    layer = backend.get_impl_cls()(4, 192, 0.07, 2, sliding_window=20, sinks=sinks)
    lengths, queries = (40, 33), (1, 9)
    table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    cache = torch.full((6, 2, 16, 192 + 128), torch.nan, dtype=torch.bfloat16)
    stored = []
    for row, length in zip(table.long(), lengths, strict=True):
        k, v = (torch.randn(length, 2, size, generator=generator).bfloat16() for size in (192, 128))
        position = torch.arange(length)
        layer.do_kv_cache_update(None, k, v, cache, row[position // 16] * 16 + position % 16)
        stored.append((k, v))
    q = torch.randn(12, 4, 192, generator=generator).bfloat16()
    batch = Batch(
        tokens=10, most_queries=9, most_keys=40, cu_seqlens_q=torch.tensor([0, 1, 10], dtype=torch.int32),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32), page_table=table,
    )  # fmt: skip
    got = layer.forward(None, q, None, None, cache, batch, torch.zeros(12, 4 * 128, dtype=torch.bfloat16))
    assert not got[10:].any()
    row = 0
    for (k, v), length, count in zip(stored, lengths, queries, strict=True):
        k, v = (t.float().repeat_interleave(2, dim=1).transpose(0, 1) for t in (k, v))
        position, key = torch.arange(length - count, length)[:, None], torch.arange(length)
        scores = q[row : row + count].float().transpose(0, 1) @ k.transpose(1, 2) * 0.07
        scores = scores.masked_fill((key > position) | (key <= position - 20), -torch.inf)
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, count, 1)], dim=2)
        wanted = (scores.softmax(-1)[..., :-1] @ v).transpose(0, 1)
        found = got[row : row + count].view(count, 4, 128).float()
        assert (found - wanted).norm() <= 4e-3 * wanted.norm()
        row += count
    backend.set_head_size_v(64)
    with pytest.raises(UnsupportedProblem, match=r"--kv-cache-dtype: fp8 needs.*128 and 64"):
        backend.get_impl_cls()(4, 128, 0.07, 2, kv_cache_dtype="fp8")
    with pytest.raises(UnsupportedProblem, match=r"head size.*got 132"):
        TwoSizesBackend.set_head_size_v(132)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("head_size", 100, "head size.*100.*--attention-backend"),
        ("kv_cache_dtype", "nvfp4_4over6", "--kv-cache-dtype.*nvfp4, got nvfp4_4over6"),
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
    settings = {"head_size": 100, "dtype": torch.float32, "kv_cache_dtype": "fp8", "block_size": 8}
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


def test_names_reach_a_new_process(tmp_path):
    """vLLM's configuration is unpickled in processes that have not loaded plug-ins yet, and copied."""
    engine.register()
    members = [AttentionBackendEnum[name] for name in engine.PATHS]
    assert deepcopy(members) == members
    (tmp_path / "pickled").write_bytes(pickle.dumps(members))
    code = f"import pickle; print([m.name for m in pickle.load(open({str(tmp_path / 'pickled')!r}, 'rb'))])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert str(list(engine.PATHS)) in said


def test_a_dtype_that_is_refused():
    layer = WarpspecAttention(num_heads=4, head_size=64, scale=0.125, num_kv_heads=2)
    with pytest.raises(UnsupportedProblem, match=r"--dtype.*bfloat16"):
        layer.process_weights_after_loading(torch.float32)


def test_simulated_kernel(checkpoints, start_vllm, monkeypatch):
    launched = note_launches(monkeypatch, attention, "attention_varlen")
    model, folder = checkpoints("gpt_oss")
    Judge(model).check(generate(start_vllm(folder, backend="sim"), prompts((40, 7)), tokens=2))
    assert launched and all(launched)
