"""Attention to selected latent rows in SGLang, on a tiny DeepSeek V3.2: `make test-engines`.

SGLang's indexer has kernels for GPUs alone. A selection by position stands for it, here and in the model that judges
(``stubs/sglang_on_cpu.py``); batches, caches, quantised rows and the translation of selected keys are SGLang's. SGLang
loads plug-ins once a process, so run this file in a process of its own, as `make test-engines` does.
"""

import shutil
from types import SimpleNamespace

import pytest
import torch

sglang = pytest.importorskip("sglang", reason="needs SGLang: make test-engines")

from helpers.eagle_head import add_drafting_layer  # noqa: E402
from helpers.engine_models import Judge, prompts  # noqa: E402
from helpers.selected_rows import select_by_position, stored  # noqa: E402
from helpers.sglang_batches import interpret_triton  # noqa: E402
from helpers.sglang_engine import generate  # noqa: E402

from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines.sglang import sparse_mla  # noqa: E402


@pytest.fixture
def start(checkpoints, start_sglang, monkeypatch, tmp_path):
    """A function: (the model that judges, SGLang), prompts of up to this many tokens computed with all keys. drafting:
    SGLang's options for drafts, which a layer of the model's own then makes."""
    interpret_triton(monkeypatch)
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", "0")
    select_by_position(monkeypatch)

    def of(dense: int, kind: str = "deepseek_v32", **drafting):
        monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", str(dense))
        model, folder = checkpoints(kind)
        if drafting:
            folder = shutil.copytree(folder, tmp_path / "drafts")
            add_drafting_layer(model, folder)
        options = dict(page_size=64, kv_cache_dtype="fp8_e4m3", dsa_topk_backend="torch")
        return model, start_sglang(folder, **options, **drafting)

    return of


def check(model, engine, inputs, tokens: int, cached=None, drafts=False):
    results, outputs = generate(engine, inputs, tokens, drafts)
    Judge(model, cached).check(results)
    return outputs


def test_selected_rows(start):
    """Prompts below and above the number of selected keys, alone, in parts after a prefix, and beside decoding; in the
    last round the cache has their beginnings."""
    model, engine = start(dense=0)
    for lengths, common in (((40, 5), 0), ((70, 1, 150, 30), 20), ((200, 170), 66), ((200, 170), 66)):
        check(model, engine, prompts(lengths, common), 12, stored)


def test_glm_5(start):
    """Its second layer takes what the first one's indexer selects; prompts with all keys have heads of 256 numbers."""
    model, engine = start(dense=48, kind="glm_moe_dsa")
    check(model, engine, prompts((70, 1, 150, 30)), 12, stored)
    check(model, engine, prompts((48, 5, 1)), 1)


def test_short_prompts(start):
    """All keys of a prompt, as they are before they are stored, and those of a prefix, which the cache has."""
    model, engine = start(dense=48)
    check(model, engine, prompts((48, 5, 1)), 1)
    check(model, engine, [ids[:44] for ids in prompts((48, 5, 1))], 1)


@pytest.mark.parametrize(
    ("sizes", "codes", "message"),
    [
        ((512, 0), True, "qk_rope_head_dim: must be 512 and 64.*got 512 and 0"),
        ((512, 64), False, "--kv-cache-dtype"),
    ],
)
def test_models_that_are_refused(sizes, codes, message):
    runner = SimpleNamespace(
        model_config=SimpleNamespace(kv_lora_rank=sizes[0], qk_rope_head_dim=sizes[1]),
        token_to_kv_pool=SimpleNamespace(dsa_kv_cache_store_fp8=codes),
        kv_cache_dtype=torch.bfloat16,
    )
    with pytest.raises(UnsupportedProblem, match=message):
        sparse_mla.WarpspecSparseBackend(runner)


def test_drafts(start):
    """A layer of the model's own, with an indexer, too, drafts chains with our attention; the model reads the selected
    rows of four queries at once to verify them. (Its weights are random: hardly a draft is accepted.)"""
    drafting = dict(
        speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_eagle_topk=1,
        speculative_num_draft_tokens=4, speculative_dsa_topk_backend="torch",
    )  # fmt: skip
    model, engine = start(dense=0, **drafting)
    outputs = check(model, engine, prompts((70, 5, 40)), 12, stored, drafts=True)
    assert all(out["meta_info"]["spec_verify_ct"] > 0 for out in outputs)
