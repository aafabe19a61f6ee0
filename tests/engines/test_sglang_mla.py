"""SGLang's multi-head latent attention computed by ours, on a tiny DeepSeek V3: `make test-engines`."""

from types import SimpleNamespace

import pytest
import torch

sglang = pytest.importorskip("sglang", reason="needs SGLang: make test-engines")

from helpers.engine_models import Judge, prompts, rename_kimi_k2, rounding  # noqa: E402
from helpers.sglang_batches import interpret_triton  # noqa: E402
from helpers.sglang_engine import generate  # noqa: E402

from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines import queries, step  # noqa: E402
from warpspec.engines.sglang import mla  # noqa: E402
from warpspec.engines.sglang.attention import Batch  # noqa: E402
from warpspec.latent import mla_decode  # noqa: E402

KIND = "deepseek_v3"


def check(model, engine, lengths=(70, 5, 1, 40), common=0, tokens=8, drafts=False, **judged):
    results, _ = generate(engine, prompts(lengths, common), tokens, drafts)
    Judge(model, **judged).check(results)


@pytest.mark.parametrize(
    "settings",
    [
        {},  # prefixes in latent form
        {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "0"},  # prefixes projected for every head, at once
        {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "0", "SGLANG_MAX_KV_CHUNK_CAPACITY": "32"},  # in chunks
    ],
)
def test_prompts_in_parts_beside_decode_and_prefix_hits(settings, checkpoints, start_sglang, monkeypatch):
    interpret_triton(monkeypatch)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    model, folder = checkpoints(KIND)
    engine = start_sglang(folder, page_size=64)
    for _ in range(2):
        check(model, engine, lengths=(70, 5, 1, 150), common=66)


@pytest.mark.long
def test_simulated_kernels(checkpoints, start_sglang, monkeypatch):
    """Prompts for every head, one behind a prefix in latent form, then decoding."""
    interpret_triton(monkeypatch)
    model, folder = checkpoints(KIND)
    check(model, start_sglang(folder, page_size=64, arch="sm_90a"), lengths=(70, 7), tokens=2)


def test_the_own_attention(checkpoints, start_sglang, monkeypatch):
    """SGLang's Triton attention, interpreted, in FP32, says what the model says, with which ours is compared."""
    interpret_triton(monkeypatch)
    model, folder = checkpoints(KIND)
    check(model, start_sglang(folder, "triton", dtype="float32"), lengths=(40, 20), tokens=3)


def test_kimi_k2(checkpoints, start_sglang, monkeypatch, tmp_path):
    interpret_triton(monkeypatch)
    model, folder = checkpoints(KIND)
    rename_kimi_k2(folder, tmp_path)
    check(model, start_sglang(tmp_path, page_size=64, trust_remote_code=True))


@pytest.mark.parametrize("chosen", ["16-bit", "e4m3"])
def test_float8_cache(chosen, checkpoints, start_sglang, monkeypatch):
    """Rounded queries are, for logits, as if keys were rounded twice."""
    interpret_triton(monkeypatch)
    monkeypatch.setenv(queries.VARIABLE, chosen)
    model, folder = checkpoints(KIND)
    engine = start_sglang(folder, page_size=64, kv_cache_dtype="fp8_e4m3")
    factor = Judge.FACTOR * (2**0.5 if chosen == "e4m3" else 1)
    check(model, engine, cached=rounding("e4m3"), factor=factor)


def test_trees_of_drafts(checkpoints, start_sglang, monkeypatch):
    """Drafts of a Llama, verified by latent attention."""
    interpret_triton(monkeypatch)
    (model, folder), (_, llama) = checkpoints(KIND), checkpoints("llama")
    drafting = dict(
        speculative_algorithm="STANDALONE", speculative_draft_model_path=str(llama), speculative_num_steps=3,
        speculative_eagle_topk=4, speculative_num_draft_tokens=8, max_total_tokens=8192,
    )  # fmt: skip
    check(model, start_sglang(folder, page_size=64, **drafting), lengths=(70, 5, 40), tokens=16, drafts=True)


@pytest.mark.parametrize(
    ("sizes", "dtype", "page", "message"),
    [
        ((256, 64), torch.bfloat16, 64, "kv_lora_rank.*512 and 64, got 256 and 64"),
        ((512, 64), torch.float8_e4m3fn, 32, "--page-size: must be 64"),
        ((512, 64), torch.float8_e5m2, 64, "--kv-cache-dtype.*e5m2; set it to auto"),
    ],
)
def test_models_that_are_refused(sizes, dtype, page, message):
    config = SimpleNamespace(kv_lora_rank=sizes[0], qk_rope_head_dim=sizes[1])
    with pytest.raises(UnsupportedProblem, match=message):
        mla.check_model(config, dtype, page)


@pytest.mark.parametrize(("codes", "rounds"), [(False, False), (True, False), (True, True)])
def test_layers_share_a_schedule(codes, rounds, monkeypatch):
    """Two drafts of each request, 16 rows: both layers decode with the schedule that the first one makes. rounds:
    whether queries are rounded to e4m3, with a scale of 1."""
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")
    made = []
    make = step.mla_schedule
    monkeypatch.setattr(step, "mla_schedule", lambda *of, **sizes: made.append(sizes) or make(*of, **sizes))
    rows = torch.randn(4 * 64, 1, 576, generator=torch.Generator().manual_seed(0))
    rows = rows.to(torch.float8_e4m3fn if codes else torch.bfloat16)
    table, lengths = torch.tensor([[2, 0], [1, 3]]).int(), torch.tensor([70, 5]).int()
    starts = torch.tensor([0, 2, 4]).int()
    batch = Batch(starts, 2, lengths, 128, table, None, None, each=2)
    pool = SimpleNamespace(get_key_buffer=lambda _: rows)
    one = torch.ones(1)
    backend = SimpleNamespace(
        token_to_kv_pool=pool,
        forward_metadata=batch,
        page_size=64,
        rows_rounded=16 if rounds else 17,
        unit=one,
    )
    scale = torch.tensor(0.5) if codes else None
    for number in range(2):
        layer = SimpleNamespace(layer_id=number, tp_q_head_num=8, scaling=0.05, k_scale=scale)
        q = torch.randn(4, 8, 576).bfloat16()
        q[0, 0, 0] = 1000.0
        o = mla.latent(backend, q.flatten(1), None, None, layer, None, False)
        q = q.clamp(-448, 448).to(queries.CODES) if rounds else q
        call = (q.unflatten(0, (2, 2)), rows.view(4, 64, 576), table, lengths)
        wanted = mla_decode(*call, scale=0.05, kv_scale=scale, q_scale=one if rounds else None)
        assert torch.equal(o.view(2, 2, 8, 512), wanted)
    assert len(made) == 1 and made[0]["queries"] == 2 and made[0]["dtype"] == rows.dtype
    assert made[0]["q_dtype"] == (queries.CODES if rounds else None)
