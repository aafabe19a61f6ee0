"""Kernels compiled ahead are those that a model's calls ask for."""

import random
from dataclasses import replace

import pytest
import torch
from helpers.suites import long, long_but
from torch.nn.attention.flex_attention import create_block_mask

from warpspec.aot import __main__ as aot
from warpspec.aot import models
from warpspec.aot.models import (
    BLOCKS,
    CALLS,
    MODELS,
    NEAR,
    PAGED,
    Sizes,
    inserts,
    kernels,
    needed,
    problem,
    problems,
    rank_of,
)
from warpspec.cache.device.insert import INSERT
from warpspec.cache.operands import Operands as InsertOperands
from warpspec.cache.operands import Options as InsertOptions
from warpspec.cache.problem import config_of
from warpspec.common import compile
from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.common.hardware import GPUS
from warpspec.common.launch import SIMULATED
from warpspec.fmha import BlockMask, launch
from warpspec.fmha.combine import COMBINE, CombineConfig
from warpspec.fmha.cuts import kernels_with_cuts
from warpspec.fmha.expand import EXPAND, expand_config, expanded
from warpspec.fmha.problem import AttentionProblem
from warpspec.latent import mla_decode
from warpspec.latent.cache import LatentPool
from warpspec.latent.gathered import KeySet, gathered_attention
from warpspec.latent.gathered import launch as gathered


def native(arch):
    return replace(SIMULATED[arch], device=0)


def asked_for(found, target):
    """What ``fmha`` compiles for a call."""
    planned = launch.plan(found, target)
    yield launch.ATTENTION.of(target.architecture).ATTENTION, planned.config
    if second := launch.second_kernel(found, planned.config, planned.splits):
        yield second


@pytest.mark.parametrize(
    ("name", "arch", "calls"),
    [
        ("gpt-oss-120b", "sm_100a", ["packed-paged"]), ("gemma-2-9b", "sm_90a", ["plain"]),
        long("deepseek-v4-flash", "sm_90a", ["ranges"]), long("llama-3-8b", "sm_90a", ["packed-paged"]),
        *(
            long(name, arch, CALLS)
            for name in ("gpt-oss-120b", "deepseek-v4-flash", "qwen3-32b", "gemma-2-9b", "gemma-3-27b-images",
                         "deepseek-v3", "gemma-4-31b-global", "gemma-4-31b-local-images", "phi-3-mini", "kimi-k2",
                         "mimo-v2-flash-full", "mimo-v2-flash-window", "glm-5")
            for arch in GPUS
        ),
        *(long(name, arch, [BLOCKS]) for name in ("llama-3-8b", "gpt-oss-20b", "gemma-2-9b") for arch in GPUS),
    ],
)  # fmt: skip
def test_calls_of_other_sizes_find_their_kernels(name, arch, calls):
    """Sizes between those that were planned ahead ask for nothing else."""
    model, target, draw = MODELS[name], native(arch), random.Random(5)
    ahead = set(kernels(problems(model, calls, [16]), target, NEAR))
    layers = [*model.layers, *({"key_stride": s, "normalize": False} for s in model.strides)]
    missing = set()
    for _ in range(300):
        seq_q = draw.choice([draw.randint(1, 8), round(2 ** draw.uniform(3, 12))])
        batch = draw.randint(1, min(256, max(32768 // seq_q, 1)))
        size = Sizes(batch, seq_q, seq_q + round(2 ** draw.uniform(0, 16)))
        layer, call = draw.choice(layers), draw.choice(calls)
        found = problem(model, layer, size, call, page_size=16 if call in PAGED else 0)
        missing |= {(size, *item) for item in asked_for(found, target) if item not in ahead}
    assert not missing


FEW_QUERIES, MANY_QUERIES = range(1, 9), range(256, 1025)
SHORT = 4096  # keys


@pytest.mark.parametrize(
    ("name", "arch", "kv_cache", "short"),
    [
        ("llama-3-8b", "sm_90a", "e4m3", True),
        *(
            long(n, a, c, False)
            for n in ("llama-3-8b", "gemma-3-4b")
            for a in GPUS
            for c in ("e4m3", "nvfp4")
        ),
    ],
)
def test_calls_over_codes_find_their_kernels(name, arch, kv_cache, short, monkeypatch):
    """Sizes in between, with the layer's scales or without. short: a fifth of all sizes."""
    model, target, draw = MODELS[name], native(arch), random.Random(6)
    if short:
        some = [
            size
            for size in models.sizes()
            if (size.seq_q in FEW_QUERIES or size.seq_q in MANY_QUERIES) and size.seq_k <= SHORT
        ]
        monkeypatch.setattr(models, "sizes", lambda: some)
    ahead, missing = set(needed(model, ["packed-paged"], [64], kv_cache, target, NEAR)), set()
    for _ in range(100):
        if short:
            seq_q = draw.choice([draw.choice(FEW_QUERIES), draw.choice(MANY_QUERIES)])
            seq_k = draw.randint(seq_q, SHORT)
        else:
            seq_q = draw.choice([draw.choice(FEW_QUERIES), round(2 ** draw.uniform(3, 12))])
            seq_k = seq_q + round(2 ** draw.uniform(0, 16))
        size = Sizes(draw.randint(1, min(256, max(32768 // seq_q, 1))), seq_q, seq_k)
        found = problem(model, draw.choice(model.layers), size, "packed-paged", page_size=64)
        scaled = draw.random() < 0.5
        found = replace(
            found, format=replace(found.format, kv_format=kv_cache, has_k_scale=scaled, has_v_scale=scaled)
        )
        if launch.expands_on(found, target):
            assert (EXPAND, expand_config(found)) in ahead
            found = expanded(found)
        missing |= {(size, *item) for item in asked_for(found, target) if item not in ahead}
    assert not missing


@pytest.mark.parametrize("kv_cache", ["e4m3", "nvfp4"])
@pytest.mark.parametrize("scale", [None, torch.ones(()), torch.ones(1)])
def test_what_stores_codes_is_compiled_ahead(kv_cache, scale):
    """``insert`` as vLLM and SGLang call it, with an integer for each token's slot."""
    row, dtype = (64, torch.uint8) if kv_cache == "nvfp4" else (128, torch.float8_e4m3fn)
    new, cache = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(2, 64, 8, row, dtype=torch.uint8)
    blocks = torch.zeros(2, 64, 8, 8, dtype=torch.uint8) if kv_cache == "nvfp4" else None
    operands = InsertOperands(
        new, new, cache.view(dtype), cache.view(dtype), torch.zeros(3, dtype=torch.int64), k_scale=scale,
        v_scale=scale, k_block_scales=blocks, v_block_scales=blocks,
    )  # fmt: skip
    config = config_of(operands, InsertOptions(format=kv_cache))
    assert (INSERT, config) in inserts(MODELS["llama-3-8b"], kv_cache)


@pytest.mark.parametrize("arch", long_but(["sm_90a"], GPUS))
@pytest.mark.parametrize("kv_cache", ["16-bit", "e4m3"])
def test_latent_decoding_finds_its_kernels(arch, kv_cache, monkeypatch):
    """A rank's 16 heads; one query, or drafts."""
    target, heads = native(arch), 16
    ahead = needed(rank_of(MODELS["deepseek-v3-decode"], 8), ["paged"], [64], kv_cache, target, NEAR)
    asked = []
    monkeypatch.setattr(gathered, "run", lambda problem, *_: asked.append(problem))
    for batch, queries, pages in ((1, 1, 3), (3, 4, 40), (100, 1, 20)):
        q = torch.zeros(batch, queries, heads, 576, dtype=torch.bfloat16)
        kv = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
        table, lengths = torch.zeros(batch, pages, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
        if kv_cache == "16-bit":
            options = dict(scale=0.1, causal=queries > 1, kv_lengths=lengths, page_table=table, v_dim=512)
            found = AttentionProblem.of(q, kv[:, :, None], **options)
            asked_now = list(asked_for(found, target))
            assert all(item in ahead for item in asked_now)
            scheduled = kernels_with_cuts(*asked_now[0])
        else:
            codes = kv.to(torch.float8_e4m3fn)
            mla_decode(q, codes, table, lengths, scale=0.1, backend="sim")
            asked.append(replace(asked[0], has_q_scale=True))  # queries in e4m3
            while asked:
                plan = gathered.make_plan(asked.pop(), target)
                assert (plan.kernel(target), plan.config) in ahead
                assert plan.combine is None or (plan.combine_kernel, plan.combine) in ahead
                scheduled = kernels_with_cuts(plan.kernel(target), plan.config)
                assert all(item in ahead for item in scheduled)
        assert all(item in ahead for item in scheduled)
        assert scheduled or arch == "sm_100a" or kv_cache == "16-bit" or batch != 100


@pytest.mark.parametrize("arch", GPUS)
def test_attention_to_selected_rows_finds_its_kernels(arch, monkeypatch):
    """A rank's 16 heads of DeepSeek V3.2; a token, a prompt, few tokens."""
    target = native(arch)
    ahead = needed(rank_of(MODELS["deepseek-v3.2-decode"], 8), ["paged"], [64], "e4m3", target, NEAR)
    asked = []
    monkeypatch.setattr(gathered, "run", lambda problem, *_: asked.append(problem))
    pool = LatentPool.empty(4, 64, "v3.2-fp8")
    for tokens in (1, 700, 33):
        q = torch.zeros(tokens, 16, 576, dtype=torch.bfloat16)
        slots = torch.zeros(tokens, 2048, dtype=torch.int32)
        gathered_attention(q, [KeySet(pool, slots)], scale=0.1, backend="sim")
        plan = gathered.make_plan(asked.pop(), target)
        assert (plan.kernel(target), plan.config) in ahead
        assert plan.combine is None or (plan.combine_kernel, plan.combine) in ahead


@pytest.mark.parametrize("arch", long_but(["sm_90a"], GPUS))
@pytest.mark.parametrize(
    ("name", "heads_kv", "sizes"), [("llama-3-8b", 8, (128, 128)), ("kimi-k2-decode", 1, (576, 512))]
)
def test_trees_of_drafts_find_their_kernels(name, heads_kv, sizes, arch, monkeypatch):
    """A verification as SGLang's backend calls it, of ordinary and of latent attention: more requests than planned."""
    monkeypatch.setattr(models, "sizes", lambda: [Sizes(batch, 8, 512) for batch in (1, 4, 16)])
    model, drafts = MODELS[name], 8
    q = torch.zeros(3 * drafts, model.heads_q, sizes[0], dtype=torch.bfloat16)
    k = torch.zeros(24, 64, heads_kv, sizes[0], dtype=torch.bfloat16)
    per_request = torch.full((3,), 500, dtype=torch.int32)
    found = AttentionProblem.of(
        q, k, None if model.shared_kv else k.clone(), v_dim=sizes[1] if model.shared_kv else None, causal=True,
        cu_seqlens_q=torch.arange(4, dtype=torch.int32) * drafts, max_seqlen_q=drafts, max_seqlen_k=512,
        page_table=torch.zeros(3, 8, dtype=torch.int32), kv_lengths=per_request, q_start=per_request - drafts,
        tree=torch.ones(3 * drafts, dtype=torch.int64),
    )  # fmt: skip
    ahead = needed(model, [models.TREES], [64], "16-bit", native(arch), NEAR)
    assert all(item in ahead for item in asked_for(found, native(arch)))


@pytest.mark.parametrize("arch", long_but(["sm_90a"], GPUS))
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_a_long_context_find_their_kernels(causal, arch, monkeypatch):
    """New tokens, and a part of their context, as vLLM's and SGLang's latent attention merges them by lse."""
    monkeypatch.setattr(models, "sizes", lambda: [Sizes(2, 256, 256), Sizes(2, 256, 1024)])
    q, k, v = (torch.zeros(512, 64, size, dtype=torch.bfloat16) for size in (192, 192, 128))
    keys = 256 if causal else 1024
    k, v = (t.repeat(keys // 256, 1, 1) for t in (k, v))
    starts = torch.arange(3, dtype=torch.int32)
    found = AttentionProblem.of(
        q, k, v, causal=causal, cu_seqlens_q=256 * starts, max_seqlen_q=256, cu_seqlens_k=keys * starts,
        max_seqlen_k=keys, return_lse=True,
    )  # fmt: skip
    ahead = needed(MODELS["kimi-k2"], ["packed"], [], "16-bit", native(arch), NEAR)
    assert all(item in ahead for item in asked_for(found, native(arch)))


@pytest.mark.long
def test_lists_of_blocks_find_their_kernels():
    """FlexAttention's BlockMask, as transformers' packed sequences become one."""
    documents = torch.arange(300) // 70
    mask = create_block_mask(
        lambda b, h, i, j: (documents[i] == documents[j]) & (j <= i), 2, None, 300, 300, device="cpu"
    )
    lists = BlockMask.of(mask, 300, 300)
    q, k = (torch.zeros(2, 300, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    found = AttentionProblem.of(q, k, k, **lists.options, **lists.operands)
    target = native("sm_90a")
    assert all(
        item in kernels(problems(MODELS["llama-3-8b"], [BLOCKS], []), target)
        for item in asked_for(found, target)
    )


def test_heads_that_do_not_go_into_ranks(capsys):
    with pytest.raises(SystemExit):
        aot.main(["--model", "llama-3-8b", "--ranks", "3", "--list"])
    assert "do not go into 3 ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main(["--model", "kimi-k2-decode", "--kv-cache", "nvfp4", "--list"])
    assert "latent rows are e4m3 or 16-bit" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main(["--model", "glm-5-decode", "--list"])
    assert "--kv-cache: rows that an indexer selects must be e4m3, got 16-bit" in capsys.readouterr().err


def test_a_call_with_tensors_finds_its_kernel(monkeypatch):
    """A decoding step of gpt-oss over pages, as an engine makes it."""
    monkeypatch.setattr(models, "sizes", lambda: [Sizes(batch, 1, 512) for batch in (2, 4)])
    batch, pages = 3, 40
    q = torch.zeros(batch, 1, 64, 64, dtype=torch.bfloat16)
    k = torch.zeros(batch * pages, 16, 8, 64, dtype=torch.bfloat16)
    found = AttentionProblem.of(
        q,
        k,
        k.clone(),
        causal=True,
        window=(127, 0),
        sink=torch.zeros(64, dtype=torch.bfloat16),
        kv_lengths=torch.full((batch,), 600, dtype=torch.int32),
        page_table=torch.arange(batch * pages, dtype=torch.int32).reshape(batch, pages),
    )
    target = native("sm_90a")
    ahead = kernels(problems(MODELS["gpt-oss-20b"], ["paged"], [16]), target)
    assert all(item in ahead for item in asked_for(found, target))


def test_what_is_compiled_ahead_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    config = CombineConfig.of(128, 3)
    monkeypatch.setattr(aot, "needed", lambda *_: [(COMBINE, config)])
    monkeypatch.setenv(CACHE_VARIABLE, "")  # put back afterwards
    assert aot.main(["--model", "llama-3-8b", "--jobs", "1", "--cache", str(tmp_path)]) == 0
    assert "1/1" in capsys.readouterr().out
    monkeypatch.setattr(compile, "_compiled", {})
    monkeypatch.setattr(compile, "compile_host", None)
    assert COMBINE.compiled(config, "sm_90a", native=True).artifacts.PTX


def test_the_command_says_what_it_wants(monkeypatch, capsys):
    monkeypatch.setattr(models, "sizes", lambda: [Sizes(4, 1, 512), Sizes(1, 4096, 4096)])
    assert aot.main(["--list"]) == 0
    assert {"gpt-oss-120b", "qwen3-8b"} <= set(capsys.readouterr().out.split())
    assert aot.main(["--model", "llama-3-8b", "--calls", "paged", "--page-sizes", "32", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = [line for line in lines if line.startswith("fmha.sm90")]
    assert lines and all("page_size=32" in line and "has_tree" not in line for line in lines)
    monkeypatch.setenv(CACHE_VARIABLE, "")
    with pytest.raises(SystemExit):
        aot.main(["--model", "llama-3-8b"])
    assert "--cache: needed" in capsys.readouterr().err
