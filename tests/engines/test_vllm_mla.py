"""vLLM's multi-head latent attention computed by ours, on a tiny DeepSeek V3: `make test-engines`."""

from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.engine_models import (  # noqa: E402
    Judge,
    check_as_own,
    error_of,
    prompts,
    rename_kimi_k2,
    rounding,
)
from helpers.suites import long  # noqa: E402
from helpers.vllm_engine import LENGTHS, generate, note_launches, offer_latent_attention  # noqa: E402
from vllm.model_executor.layers.attention import MLAAttention  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions  # noqa: E402
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import warpspec.engines.vllm as engine  # noqa: E402
from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.common.launch import simulating  # noqa: E402
from warpspec.engines import queries, step  # noqa: E402
from warpspec.engines.vllm import mla, sparse_mla, warmup  # noqa: E402
from warpspec.latent import mla_decode  # noqa: E402
from warpspec.latent.cache import LatentPool, store_rows  # noqa: E402

KIND = "deepseek_v3"


@pytest.fixture
def in_parts(monkeypatch):
    """Our backend, in blocks of 64 and with prompts in parts: the own one has blocks of 16 and whole prompts."""
    offer_latent_attention(monkeypatch, engine.MLA_NAME)
    monkeypatch.setattr(mla.BatchBuilder, "reorder_batch_threshold", 4)  # longer prompts are no decoding


@pytest.fixture
def calls(monkeypatch):
    """What was called: "decode" with the queries of a request; the functions of prompts."""
    seen = []

    def counted(name, forward, number):
        def call(*arguments, **named):
            seen.append((name, number(*arguments, **named)))
            return forward(*arguments, **named)

        return call

    monkeypatch.setattr(mla, "mla_decode", counted("decode", mla.mla_decode, lambda q, *_, **__: q.shape[1]))
    prefill = mla.WarpspecPrefill
    for name in ("run_prefill_new_tokens", "run_prefill_context_chunk"):
        forward = counted(name, getattr(prefill, name), lambda *_, **__: 0)
        monkeypatch.setattr(prefill, name, forward)
    return seen


# (vLLM 0.32's CPU kernel of RoPE rotates the strided queries of latent attention wrongly.)
OPTIONS = {"block_size": 64, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def test_prompts_in_parts_beside_decode_and_prefix_hits(checkpoints, start_vllm, in_parts, calls):
    """The second time, prompts' blocks are found in the cache; contexts come in chunks that vLLM merges."""
    model, folder = checkpoints(KIND)
    judge, llm = Judge(model), start_vllm(folder, **OPTIONS)
    for _ in range(2):
        judge.check(generate(llm, prompts((*LENGTHS, 150), common=70)))
    assert {name for name, _ in calls} == {"decode", "run_prefill_new_tokens", "run_prefill_context_chunk"}
    assert {1, 2, 3, 4} >= {number for name, number in calls if name == "decode"} >= {1}


@pytest.mark.parametrize("name", [KIND, "kimi_k2"])
def test_same_tokens_as_the_own_attention(name, checkpoints, start_vllm, calls, request, tmp_path):
    """vLLM's reference of latent attention for CPUs, in blocks of 16 and with whole prompts."""
    model, folder = checkpoints(KIND)
    if name == "kimi_k2":
        rename_kimi_k2(folder, tmp_path)
        folder = tmp_path
    own = generate(start_vllm(folder, own=True, **OPTIONS | {"block_size": 16}), prompts(LENGTHS))
    assert not calls
    request.getfixturevalue("in_parts")
    ours = generate(start_vllm(folder, **OPTIONS), prompts(LENGTHS))
    assert {name for name, _ in calls} >= {"decode", "run_prefill_new_tokens"}
    check_as_own(model, own, ours)


def test_contexts_in_several_chunks(checkpoints, start_vllm, in_parts, calls, monkeypatch):
    """vLLM has room for the context rows of one block at a time."""
    monkeypatch.setattr(
        mla.BatchBuilder, "determine_chunked_prefill_workspace_size", staticmethod(lambda _: 64)
    )
    model, folder = checkpoints(KIND)
    results = generate(start_vllm(folder, **OPTIONS), prompts((200, 40, 140)))
    Judge(model).check(results)
    assert sum(name == "run_prefill_context_chunk" for name, _ in calls) > 2 * 6


SHORT = (20, 5, 1, 30)  # vLLM gathers no FP8 context on a CPU: prompts of one part
FLOAT8 = OPTIONS | {"kv_cache_dtype": "fp8", "enable_prefix_caching": False}


def test_float8_cache(checkpoints, start_vllm, in_parts, calls):
    """Codes of a scale of 1; queries in 16 bits."""
    model, folder = checkpoints(KIND)
    Judge(model, rounding("e4m3")).check(generate(start_vllm(folder, **FLOAT8), prompts(SHORT)))
    assert any(name == "decode" for name, _ in calls)


def test_queries_in_codes(checkpoints, start_vllm, in_parts, monkeypatch):
    """vLLM rounds absorbed queries, with a scale of the layer; for logits that is as if the keys were rounded twice."""
    model, folder = checkpoints(KIND)
    errors, seen = {}, []
    decode = mla.mla_decode
    monkeypatch.setattr(
        mla,
        "mla_decode",
        lambda q, *of, **named: seen.append((q.dtype, named["q_scale"])) or decode(q, *of, **named),
    )

    def set_scales(model) -> None:
        for layer in model.modules():
            if isinstance(layer, MLAAttention):
                layer._q_scale.fill_(0.25)

    for chosen in ("16-bit", "e4m3"):
        monkeypatch.setenv(queries.VARIABLE, chosen)
        llm = start_vllm(folder, **FLOAT8)
        llm.apply_model(set_scales)
        seen.clear()
        errors[chosen] = error_of(model, generate(llm, prompts(SHORT), tokens=12))
        wanted = (queries.CODES, 0.25) if chosen == "e4m3" else (torch.bfloat16, None)
        assert {(dtype, scale and scale.item()) for dtype, scale in seen} == {wanted}
    assert errors["e4m3"] <= 1.6 * errors["16-bit"], errors


GUESS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def test_speculative_decoding(checkpoints, start_vllm, in_parts, calls):
    """Drafts from the prompt: several queries of each request in one decoding call."""
    model, folder = checkpoints(KIND)
    llm = start_vllm(folder, speculative_config=GUESS, **OPTIONS)
    results = generate(llm, [ids * 4 for ids in prompts((9, 5))], tokens=24)
    Judge(model).check([(ids, tokens, None) for ids, tokens, _ in results])
    assert any(name == "decode" and number > 1 for name, number in calls)


@pytest.mark.parametrize("least", [16, 17])
def test_queries_in_codes_by_rows(least, checkpoints, start_vllm, in_parts, monkeypatch):
    """4 heads of 1 + 3 queries. (vLLM gathers no FP8 context on a CPU, which requests with fewer drafts need.)"""
    monkeypatch.setattr(queries, "least_rows", lambda *_: least)
    llm = start_vllm(checkpoints(KIND)[1], speculative_config=GUESS, **FLOAT8)
    found = []

    def look(model) -> None:
        layers = (layer for layer in model.modules() if isinstance(layer, MLAAttention))
        found.extend(layer.impl.supports_quant_query_input for layer in layers)

    llm.apply_model(look)
    assert found == [least == 16] * 2


@pytest.mark.parametrize("arch", ["sm_100a", long("sm_90a")])
def test_simulated_kernel(arch, checkpoints, start_vllm, in_parts, monkeypatch):
    launched = note_launches(monkeypatch, mla, "mla_decode", "attention_varlen")
    model, folder = checkpoints(KIND)
    with simulating(arch):
        Judge(model).check(generate(start_vllm(folder, backend="sim", **OPTIONS), prompts((70, 7)), tokens=2))
    assert launched and all(launched)


@pytest.mark.parametrize("chosen", queries.CHOICES)
def test_kernels_before_the_first_request(chosen, checkpoints, start_vllm, in_parts, monkeypatch):
    """vLLM's warm-up calls decoding once for each kind of batch, and prompts with and without a context."""
    _, folder = checkpoints(KIND)
    monkeypatch.setenv(queries.VARIABLE, chosen)
    monkeypatch.setattr(warmup, "provider", warmup.Provider())
    start_vllm(folder, **FLOAT8)
    units = warmup.provider.get_cutedsl_warmup_compile_units()
    assert len({unit.key for unit in units}) == len(units) == 4
    called = []
    for name in ("mla_decode", "attention_varlen"):
        function = getattr(warmup, name)

        def noted(q, *rest, f=function, **named):
            f(q, *rest, **named)
            called.append((q.dtype, tuple(q.shape[-2:]), named.get("causal"), named.get("return_lse")))

        monkeypatch.setattr(warmup, name, noted)
    for unit in units:
        unit.compile()
    dtype = queries.CODES if chosen == "e4m3" else torch.bfloat16
    prompt = [(torch.bfloat16, (4, 192), *of) for of in ((True, False), (True, True), (False, True))]
    assert called == 2 * [(dtype, (4, 576), None, None)] + 2 * prompt


def test_empty_requests_and_lse():
    """Rows that pad a CUDA graph have no keys; lse is of each token and head, natural."""
    cache = torch.randn(3, 64, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = torch.randn(4, 8, 576).bfloat16()
    batch = SimpleNamespace(
        num_decodes=2,
        decode=SimpleNamespace(
            block_table=torch.tensor([[2, 0], [7, 7]], dtype=torch.int32),
            seq_lens=torch.tensor([70, 0], dtype=torch.int32),
        ),
    )
    layer = SimpleNamespace(
        scale=0.05, kv_cache_dtype="auto", need_to_return_lse_for_decode=True, _k_scale=torch.tensor(1.0)
    )
    o, lse = mla.WarpspecMLA.forward_mqa(layer, (q[..., :512], q[..., 512:]), cache, batch, layer)
    rows = torch.cat([cache[2], cache[0]])[:70].float()
    scores = q[:2].float() @ rows.T * 0.05
    scores[0, :, 69] = -torch.inf
    assert o.shape == (4, 8, 512) and not o[2:].any() and (lse[2:] == -torch.inf).all()
    torch.testing.assert_close(lse[:2], scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    wanted = scores.softmax(-1) @ rows[:, :512]
    assert (o[:2].float() - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("heads", [8, 128])
def test_selected_rows(heads, monkeypatch):
    """Rows of 656 bytes that an indexer selected, of two requests; too few of some queries. (vLLM's CPU has no such
    models, so that a layer and a batch stand for it.)"""
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    generator = torch.Generator().manual_seed(1)
    pool = LatentPool.empty(6, 64, "v3.2-fp8")
    rows = torch.randn(6 * 64, 576, generator=generator).bfloat16()
    store_rows(rows, pool, torch.arange(6 * 64, dtype=torch.int32), backend="reference")
    exact = pool.read(torch.arange(6 * 64, dtype=torch.int32)).float()
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    request, lengths = torch.tensor([0, 1, 1], dtype=torch.int32), (150, 64, 65)
    selected = torch.full((5, 128), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        count = min(length, 100)
        selected[row, :count] = torch.randperm(length, generator=generator)[:count].int()
    layer = SimpleNamespace(scale=0.05, need_to_return_lse_for_decode=True, topk_indices_buffer=selected)
    batch = SimpleNamespace(req_id_per_token=request, block_table=table)
    q = torch.randn(3, heads, 576, generator=generator).bfloat16()
    cache = pool.data[:, : 64 * 656].unflatten(1, (64, 656))
    o, lse = sparse_mla.WarpspecSparseMLA.forward_mqa(
        layer, (q[..., :512], q[..., 512:]), cache, batch, layer
    )
    for row in range(3):
        place = selected[row][selected[row] >= 0].long()
        keys_of = exact[table[request[row]].long()[place // 64] * 64 + place % 64]
        scores = q[row].float() @ keys_of.T * 0.05
        torch.testing.assert_close(lse[row], scores.logsumexp(-1), rtol=2e-3, atol=2e-3)
        wanted = scores.softmax(-1) @ keys_of[:, :512]
        assert (o[row].float() - wanted).norm() <= 6e-3 * wanted.norm()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("kv_cache_dtype", "fp8_e5m2", "--kv-cache-dtype.*fp8_e4m3, got fp8_e5m2"),
        ("sliding_window", 128, "sliding_window: 128.*--attention-backend"),
        ("kv_lora_rank", 256, "kv_lora_rank: 256"),
    ],
)
def test_layers_that_are_refused(option, value, message):
    options = dict(
        num_heads=4, head_size=576, scale=0.1, num_kv_heads=1, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type="decoder", kv_sharing_target_layer_name=None,
        kv_lora_rank=512,
    )  # fmt: skip
    with pytest.raises(UnsupportedProblem, match=message):
        mla.WarpspecMLA(**options | {option: value})
    if option != "kv_cache_dtype":
        with pytest.raises(UnsupportedProblem, match=message):
            sparse_mla.WarpspecSparseMLA(**options | {option: value})
    with pytest.raises(UnsupportedProblem, match=r"--kv-cache-dtype: must be one of fp8_ds_mla, got"):
        sparse_mla.WarpspecSparseMLA(**options)


def test_backends_are_found_by_name():
    engine.register()
    assert AttentionBackendEnum["WARPSPEC_MLA"].get_class() is mla.WarpspecMLABackend
    assert AttentionBackendEnum["WARPSPEC_MLA_SPARSE"].get_class().is_sparse()
    assert MLAPrefillBackendEnum["WARPSPEC"].get_class() is mla.WarpspecPrefill
    sizes = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert mla.WarpspecPrefill.supports_mla_dimensions(MLADimensions(**sizes))
    assert not mla.WarpspecPrefill.supports_mla_dimensions(MLADimensions(**sizes | {"v_head_dim": 260}))


def test_layers_share_a_schedule(monkeypatch):
    """A step's first layer makes it, from the step's lengths; so does a layer with other heads, and the next step."""
    made = []
    make = step.mla_schedule
    monkeypatch.setattr(step, "mla_schedule", lambda *of, **sizes: made.append(sizes) or make(*of, **sizes))
    cache = torch.randn(3, 64, 576, generator=torch.Generator().manual_seed(0)).bfloat16()

    def batch():
        table, lengths = (torch.tensor(of, dtype=torch.int32) for of in ([[2, 0], [1, 0]], [70, 5]))
        return SimpleNamespace(num_decodes=2, decode=SimpleNamespace(block_table=table, seq_lens=lengths))

    layer = SimpleNamespace(
        scale=0.05, kv_cache_dtype="auto", need_to_return_lse_for_decode=False, _k_scale=None
    )
    first, second = batch(), batch()
    for one, heads in ((first, 8), (first, 8), (first, 4), (second, 8)):
        q = torch.randn(4, heads, 576).bfloat16()
        o, _ = mla.WarpspecMLA.forward_mqa(layer, q, cache, one, layer)
        wanted = mla_decode(
            q.unflatten(0, (2, 2)), cache, one.decode.block_table, one.decode.seq_lens, scale=0.05
        )
        assert torch.equal(o, wanted.flatten(0, 1))
    assert [sizes["heads"] for sizes in made] == [8, 4, 8]
    assert all(sizes["queries"] == 2 and sizes["max_pages"] == 2 for sizes in made)
