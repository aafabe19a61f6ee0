"""SGLang with our attention on tiny models, compared with its own attention: `make test-engines`.

SGLang's engine is a process of its own, which finds the plug-in by its entry point.
"""

import threading
import time
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch

sglang = pytest.importorskip("sglang", reason="needs SGLang: make test-engines")

from helpers.engine_flags import flags_of  # noqa: E402
from helpers.engine_models import (  # noqa: E402
    Judge,
    check_as_own,
    error_of,
    log_probabilities,
    prompts,
    rounding,
    write_scaled_llama,
)
from helpers.sglang_batches import interpret_triton  # noqa: E402
from helpers.sglang_engine import GREEDY, generate  # noqa: E402

from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines.sglang.attention import AttentionType, Batch, WarpspecBackend  # noqa: E402
from warpspec.fmha import attention  # noqa: E402

# Longer and shorter than the windows, one token, several pages; two begin alike for longer than a page.
LENGTHS = (70, 5, 1, 40)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_oss"])
def test_prompts_in_parts_beside_decode_and_prefix_hits(kind, checkpoints, start_sglang):
    """gpt-oss: layers with windows have a pool of their own."""
    model, folder = checkpoints(kind)
    judge, engine = Judge(model), start_sglang(folder)
    inputs = prompts(LENGTHS, common=36)
    results, _ = generate(engine, inputs)
    judge.check(results)
    results, outputs = generate(engine, inputs)
    judge.check(results)
    assert outputs[0]["meta_info"]["cached_tokens"] == 64


def test_float8_cache(checkpoints, start_sglang):
    model, folder = checkpoints("llama")
    results, _ = generate(start_sglang(folder, kv_cache_dtype="fp8_e4m3"), prompts(LENGTHS))
    Judge(model, torch.float8_e4m3fn).check(results)


def test_scales_of_a_checkpoint(tmp_path, start_sglang):
    """Scales that compressed-tensors stored, of each layer: SGLang takes no other strategy."""
    scales = [torch.tensor([0.05]), torch.tensor([2.0])]
    model = write_scaled_llama(tmp_path, "tensor", scales)
    results, _ = generate(start_sglang(tmp_path, kv_cache_dtype="fp8_e4m3"), prompts(LENGTHS))
    roundings = {layer: rounding("e4m3", scale) for layer, scale in enumerate(scales)}
    Judge(model, roundings).check(results)


def test_no_further_off_than_the_own_attention(checkpoints, start_sglang):
    """Over SGLang's own FP8 cache: by the log-probabilities of what each generates, against the model in FP32."""
    model, folder = checkpoints("llama")
    errors = []
    for options in ({"attention": "torch_native"}, {}):
        engine = start_sglang(folder, kv_cache_dtype="fp8_e4m3", **options)
        results, _ = generate(engine, prompts(LENGTHS))
        errors.append(error_of(model, results, rounding("e4m3")))
    assert errors[1] <= errors[0], errors


@pytest.mark.parametrize("kind", ["llama", "gemma3", "phi3"])
def test_same_tokens_as_the_own_attention(kind, checkpoints, start_sglang):
    """(SGLang's Gemma 3 has its own opinion of which layers have windows, so that Judge is of no use.)"""
    model, folder = checkpoints(kind)
    inputs = prompts(LENGTHS)
    own, _ = generate(start_sglang(folder, attention="torch_native"), inputs)
    ours, _ = generate(start_sglang(folder), inputs)
    check_as_own(model, own, ours)


@pytest.mark.parametrize("kind", ["gemma2", "mimo_v2_flash"])
def test_what_its_own_attention_has_only_in_triton(kind, checkpoints, start_sglang, monkeypatch):
    """Soft caps; values of another head size, with sinks. (SGLang's Gemma 2 calls a Triton kernel on a CPU, too.)"""
    interpret_triton(monkeypatch)
    model, folder = checkpoints(kind)
    results, _ = generate(start_sglang(folder), prompts(LENGTHS))
    Judge(as_sglang_has_it(model)).check(results)


@pytest.mark.parametrize("kind", ["gemma2", "mimo_v2_flash"])
def test_prompts_in_its_own_triton_attention(kind, checkpoints, start_sglang, monkeypatch):
    """Interpreted, in FP32 (in bf16 it gives NaN), it says of prompts what the model says, with which ours is compared.
    (In decoding its windows have one key less than in prompts.)"""
    interpret_triton(monkeypatch)
    model, folder = checkpoints(kind)
    inputs = prompts((40, 20))
    outputs = start_sglang(folder, "triton", dtype="float32").generate(
        input_ids=inputs,
        sampling_params={"max_new_tokens": 1, **GREEDY},
        return_logprob=True,
        logprob_start_len=0,
    )
    exact = as_sglang_has_it(model).float()
    for ids, output in zip(inputs, outputs, strict=True):
        said = [value for value, *_ in output["meta_info"]["input_token_logprobs"][1:]]
        wanted = log_probabilities(exact, ids[:1], ids[1:]).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert (torch.tensor(said) - wanted).square().mean().sqrt() <= 6e-3


def as_sglang_has_it(model):
    """A copy of a model. SGLang's windows do not count the own key: MiMo's have one key more than transformers' of the
    same configuration."""
    model = deepcopy(model)
    if model.config.model_type == "mimo_v2_flash":
        model.config.sliding_window += 1
    return model


def test_simulated_kernel(checkpoints, start_sglang):
    model, folder = checkpoints("llama")
    results, _ = generate(start_sglang(folder, arch="sm_100a"), prompts((40, 7)), tokens=2)
    Judge(model).check(results)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gemma2", "mimo_v2_flash"])
def test_simulated_kernels(kind, checkpoints, start_sglang, monkeypatch):
    """A part of a prompt, and decoding, that see whole tiles of keys: they have no mask."""
    interpret_triton(monkeypatch)
    model, folder = checkpoints(kind)
    engine = start_sglang(folder, arch="sm_90a", chunked_prefill_size=128)
    results, _ = generate(engine, prompts((140, 7)), tokens=2)
    Judge(as_sglang_has_it(model)).check(results)


def test_too_many_requests_for_the_cache_and_a_cancelled_one(checkpoints, start_sglang):
    """Six requests grow to 110 tokens, of which the cache has room for two; one more is cancelled on its way."""
    model, folder = checkpoints("qwen3")
    engine = start_sglang(folder, max_total_tokens=320, disable_radix_cache=True)
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


def test_nvfp4_cache(checkpoints, start_sglang, monkeypatch):
    """(SGLang makes such pools on a CPU with a plug-in of ours, which stands in for a GPU.)"""
    interpret_triton(monkeypatch)
    model, folder = checkpoints("llama")
    results, _ = generate(start_sglang(folder, kv_cache_dtype="nvfp4"), prompts(LENGTHS))
    Judge(model, rounding("nvfp4")).check(results)


def test_buffers_of_an_nvfp4_cache(monkeypatch):
    """Keys are quantised into a layer's buffers with its scale and read from there; a pool without linear block scales
    is refused."""
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    generator = torch.Generator().manual_seed(1)
    page, kv_heads, dim, layer_id = 16, 2, 64, 1
    shapes = {
        "k_buffer": dim // 2,
        "v_buffer": dim // 2,
        "k_scale_buffer": dim // 16,
        "v_scale_buffer": dim // 16,
    }
    buffers = {
        name: [torch.zeros(5 * page, kv_heads, row, dtype=torch.uint8) for _ in range(2)]
        for name, row in shapes.items()
    }
    scale = torch.tensor([1.0, 0.5])
    pool = SimpleNamespace(
        **buffers, start_layer=0, quant_method=SimpleNamespace(k_scales_gpu=scale, v_scales_gpu=scale)
    )
    backend = WarpspecBackend(runner(page_size=page, head_dim=dim, kv_cache_dtype_str="nvfp4"))
    backend.token_to_kv_pool = pool
    q, k, v = (
        torch.randn(20, heads * dim, generator=generator).bfloat16() for heads in (4, kv_heads, kv_heads)
    )
    backend.forward_metadata = Batch(
        cu_seqlens_q=torch.tensor([0, 20], dtype=torch.int32),
        most_queries=20,
        kv_lengths=torch.tensor([20], dtype=torch.int32),
        most_keys=20,
        page_table=torch.tensor([[3, 1]], dtype=torch.int32),
        window_page_table=None,
        window_slots=None,
    )
    layer = SimpleNamespace(
        is_cross_attention=False, attn_type=AttentionType.DECODER, logit_cap=0.0, qk_head_dim=dim, v_head_dim=dim,
        tp_q_head_num=4, tp_k_head_num=kv_heads, layer_id=layer_id, sliding_window_size=-1, scaling=0.125,
    )  # fmt: skip
    slots = torch.cat([torch.arange(3 * page, 4 * page), torch.arange(page, page + 4)])
    got = backend.forward_extend(q, k, v, layer, SimpleNamespace(out_cache_loc=slots))
    rounded = (rounding("nvfp4", 0.5)(t.view(1, 20, kv_heads, dim)) for t in (k, v))
    wanted = attention(q.view(1, 20, 4, dim), *rounded, causal=True, scale=0.125, backend="reference")
    torch.testing.assert_close(got, wanted.view(20, -1), rtol=2.0**-6, atol=2.0**-6)
    assert not any(bool(stored[0].any()) for stored in buffers.values())  # the other layer's
    pool.k_scale_buffer = None
    with pytest.raises(UnsupportedProblem, match=r"--kv-cache-dtype.*fp8_e4m3"):
        backend.forward_extend(q, k, v, layer, SimpleNamespace(out_cache_loc=slots))


def test_sglang_takes_our_backend_for_nvfp4():
    from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as methods

    import warpspec.engines.sglang as engine

    engine.register()
    method = methods.NVFP4KVCacheMethod(2, "cpu", native_scale_layout=False)
    method.configure_attention_backends("warpspec", "warpspec")
    assert method.needs_linear_scale_buffer() and not method.needs_dequant_workspace()
    checked = []
    named = {
        "attention_backend": "warpspec",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
    }
    for dtype, others, calls in (
        ("nvfp4", {}, 0),
        ("fp8_e4m3", {}, 1),
        ("nvfp4", {"attention_backend": "fa3"}, 2),
    ):
        engine._pass_nvfp4(checked.append, SimpleNamespace(kv_cache_dtype=dtype, **named | others))
        assert len(checked) == calls


def test_flags_that_users_are_told(checkpoints):
    """SGLang's command takes those of docs/engines.md."""
    from sglang.srt.server_args import prepare_server_args

    import warpspec.engines.sglang as engine

    engine.register()
    _, folder = checkpoints("llama")
    all_flags = flags_of("python -m sglang.launch_server")
    assert len(all_flags) >= 5
    for flags in all_flags:
        settings = prepare_server_args(["--model-path", str(folder), "--device", "cpu", *flags])
        assert (settings.attention_backend, settings.page_size) == ("warpspec", 64)


def runner(**others):
    """What the backend reads of SGLang's runner."""
    values = {"page_size": 64, "kv_cache_dtype": torch.bfloat16, "head_dim": 128} | others
    return SimpleNamespace(
        server_args=SimpleNamespace(page_size=values["page_size"]),
        kv_cache_dtype=values["kv_cache_dtype"],
        kv_cache_dtype_str=values.get("kv_cache_dtype_str"),
        is_draft_worker=True,  # (one that verifies nothing)
        model_config=SimpleNamespace(head_dim=values["head_dim"], context_len=256),
        req_to_token_pool=None,
        token_to_kv_pool=None,
    )


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("page_size", 1, r"--page-size.*got 1; set it to 16, 32, 64 or 128"),
        ("page_size", None, r"--page-size.*got 1; set it to 16, 32, 64 or 128"),
        ("kv_cache_dtype", torch.float32, r"--kv-cache-dtype.*fp8_e4m3.*float32; set it to auto"),
        ("head_dim", 100, r"head size.*100.*--attention-backend"),
    ],
)
def test_settings_that_are_refused(setting, value, message):
    with pytest.raises(UnsupportedProblem, match=message):
        WarpspecBackend(runner(**{setting: value}))
    WarpspecBackend(runner())
