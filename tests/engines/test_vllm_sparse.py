"""vLLM's attention to rows that an indexer selects, on a tiny DeepSeek V3.2 and GLM-5: `make test-engines`.

vLLM's indexer has kernels for GPUs alone, and it offers no such attention on a CPU. A selection by position stands
for the indexer, here and in the model that judges, and torch stands for two other kernels. Batches, caches and layers
are vLLM's.
"""

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.engine_models import Judge, prompts  # noqa: E402
from helpers.selected_rows import select_by_position, stored  # noqa: E402
from helpers.vllm_engine import generate, note_launches, offer_latent_attention  # noqa: E402
from vllm import _custom_ops  # noqa: E402
from vllm.model_executor.models import deepseek_v2  # noqa: E402
from vllm.v1.attention.ops import metadata  # noqa: E402

from warpspec.common.launch import simulating  # noqa: E402
from warpspec.engines.vllm import SPARSE_MLA_NAME, sparse_mla, warmup  # noqa: E402

KINDS = ["deepseek_v32", "glm_moe_dsa"]
OPTIONS = {
    "block_size": 64,
    "kv_cache_dtype": "fp8_ds_mla",
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},  # (wrong on CPUs in 0.32)
}


@pytest.fixture
def calls(monkeypatch):
    """Lets vLLM have such models on a CPU. Returns how many queries each call of ours had."""
    offer_latent_attention(monkeypatch, SPARSE_MLA_NAME)
    select_by_position(monkeypatch)
    from sglang_on_cpu import quantise, select

    def chosen(self, hidden_states, qr, positions, rotary_emb):
        self.topk_indices_buffer[: len(positions)] = select(positions, self.topk_tokens)
        return self.topk_indices_buffer

    def store(latent, rotated, cache, slots, **_):
        rows = torch.cat([quantise(latent), rotated.contiguous().view(torch.uint8)], dim=-1)
        cache.view(torch.uint8).flatten(0, 1)[slots[slots >= 0].long()] = rows[slots >= 0]

    def requests_of(starts, out, mapped, tokens):
        out[:tokens] = 0
        out[:mapped] = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
        return out[:tokens]

    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", store)
    monkeypatch.setattr(metadata, "compute_token_to_req_indices", requests_of)
    monkeypatch.setattr(deepseek_v2.Indexer, "forward", chosen)
    monkeypatch.setattr(deepseek_v2.DeepseekV32IndexerCache, "get_kv_cache_spec", lambda *_: None)
    seen, attend = [], sparse_mla.gathered_attention
    monkeypatch.setattr(
        sparse_mla,
        "gathered_attention",
        lambda q, *of, **named: seen.append(len(q)) or attend(q, *of, **named),
    )
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_selected_rows(kind, checkpoints, start_vllm, calls):
    """Prompts below and above the number of selected keys, alone, in parts beside decoding, and after a prefix."""
    model, folder = checkpoints(kind)
    llm = start_vllm(folder, attention_config={"sparse_mla_force_mqa": True}, **OPTIONS)
    judge = Judge(model, stored)
    for lengths, common in (((40, 5), 0), ((70, 1, 150, 30), 20), ((200, 170), 66), ((200, 170), 66)):
        judge.check(generate(llm, prompts(lengths, common)))
    assert {1, 64} <= set(calls)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_simulated_kernel(kind, checkpoints, start_vllm, calls, monkeypatch):
    launched = note_launches(monkeypatch, sparse_mla, "gathered_attention")
    model, folder = checkpoints(kind)
    with simulating("sm_90a", sm_count=2):
        llm = start_vllm(folder, backend="sim", attention_config={"sparse_mla_force_mqa": True}, **OPTIONS)
        Judge(model, stored).check(generate(llm, prompts((60, 7)), tokens=2))
    assert launched and all(launched)


@pytest.mark.parametrize("kind", KINDS)
def test_short_prompts(kind, checkpoints, start_vllm, calls):
    """All keys of a prompt, as they are before they are stored."""
    model, folder = checkpoints(kind)
    llm = start_vllm(folder, **OPTIONS)
    Judge(model).check(generate(llm, prompts((48, 5, 1)), tokens=1))
    assert not calls


def test_kernels_before_the_first_request(checkpoints, start_vllm, calls, monkeypatch):
    """vLLM's warm-up: one token and a full batch, then prompts of one request and of many."""
    _, folder = checkpoints(KINDS[0])
    monkeypatch.setattr(warmup, "provider", warmup.Provider())
    start_vllm(folder, **OPTIONS)
    called = []
    for name in ("gathered_attention", "attention_varlen"):
        function = getattr(warmup, name)
        monkeypatch.setattr(
            warmup, name, lambda q, *of, f=function, **named: called.append(q.shape) or f(q, *of, **named)
        )
    for unit in warmup.provider.get_cutedsl_warmup_compile_units():
        unit.compile()
    prompt = [(64, 4, 576), *3 * [(64, 4, 192)]]
    assert called == [(1, 4, 576), (8, 4, 576), *prompt, *prompt]
