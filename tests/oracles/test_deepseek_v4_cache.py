"""transformers' DeepSeek-V4 on our pools: its own caches' logits and tokens, however the prompt is divided.

The FP32 model with eager attention and its own caches is the oracle. Ours rounds queries, keys and entries to bf16, and
with quantised rows to FP8 and FP4; the rest of the model stays FP32. All operations run as references here.
"""

import pytest
import torch
from helpers.deepseek_v4_model import HEAVY, KINDS, SELECTED, make_model
from helpers.model_pairs import ATTENTION_TOLERANCE, relative_error, tokens
from helpers.suites import long

from warpspec.engines.transformers.latent import DeepseekV4Cache, attach

EXACT = {"latent": "bf16", "index": "bf16"}
QUANTISED = {"latent": "v4-fp8", "index": "mxfp4"}
LENGTH = 150  # the window is full, one HCA entry is there, and 37 CSA entries


@pytest.fixture(scope="module")
def models():
    """(eager, with our caches attached), one set of weights; the indexer selects all entries."""
    return make_pair(512)


def make_pair(top_k: int):
    pair = []
    for _ in range(2):
        model = make_model(heads=8, kinds=KINDS, index_topk=top_k)
        model.set_attn_implementation("eager")
        pair.append(model)
    attach(pair[1])
    return pair


def cache_for(model, **options):
    arguments = {**EXACT, "batch": 2, "max_tokens": 256, "backend": "reference", "max_draft": 3} | options
    return DeepseekV4Cache(model.config, **arguments)


@torch.no_grad()
def run(model, cache, ids, way: str) -> torch.Tensor:
    """Logits of all tokens, in calls of the way's sizes."""
    sizes = {"prefill": [LENGTH], "chunked": [3, 60, 1, 70, 4, 12]}.get(way)
    if way == "tokens":
        sizes = [130] + [1] * (LENGTH - 130)
    parts, at = [], 0
    if way == "speculative":
        generator = torch.Generator().manual_seed(3)
        parts.append(model(ids[:, :120], past_key_values=cache).logits)
        at = 120
        while at < LENGTH:
            count = min(4, LENGTH - at)
            right = int(torch.randint(1, count + 1, (), generator=generator))
            drafts = ids[:, at : at + count].clone()
            drafts[:, right:] = 1 + (drafts[:, right:] + 7) % 500  # wrong ones
            parts.append(model(drafts, past_key_values=cache).logits[:, :right])
            cache.crop(at + right)
            at += right
        return torch.cat(parts, dim=1)
    for size in sizes:
        parts.append(model(ids[:, at : at + size], past_key_values=cache).logits)
        at += size
    return torch.cat(parts, dim=1)


@torch.no_grad()
def eager_logits(model, ids) -> torch.Tensor:
    return model(ids, use_cache=True).logits


@pytest.mark.parametrize("way", [long("prefill"), "chunked", long("tokens"), "speculative"])
def test_logits_are_eagers(models, way):
    eager, ours = models
    ids = tokens(2, LENGTH)
    got = run(ours, cache_for(ours), ids, way)
    assert relative_error(got, eager_logits(eager, ids)) < ATTENTION_TOLERANCE


def test_selection():
    """16 of up to 37 entries. Rounding may change which: of the tokens that select the same, all are as close."""
    eager, ours = make_pair(16)
    ids = tokens(2, LENGTH)
    got, wanted = run(ours, cache_for(ours), ids, "chunked"), eager_logits(eager, ids)
    errors = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.median() < ATTENTION_TOLERANCE and (errors < 2 * ATTENTION_TOLERANCE).float().mean() > 0.9
    everything = eager_logits(make_pair(512)[0], ids)
    # Selecting makes a difference.
    assert relative_error(everything, wanted) > 2 * relative_error(got, wanted)


@pytest.mark.parametrize("way", [long("chunked"), "speculative"])
def test_quantised_rows(models, way):
    """FP8 and FP4: within 3 percent of eager's; the same however the prompt is divided, but for the order of sums."""
    eager, ours = models
    ids = tokens(2, LENGTH)
    prefill = run(ours, cache_for(ours, **QUANTISED), ids, "prefill")
    got = run(ours, cache_for(ours, **QUANTISED), ids, way)
    assert 0.005 < relative_error(prefill, eager_logits(eager, ids)) < 0.03
    assert relative_error(got, prefill) < 1e-3


def test_projection(models):
    """wo_a by the grouped product: in bf16 as close as before, in FP8 with attention's output in FP8 too."""
    eager = models[0]
    ids = tokens(2, 40)
    wanted, errors = eager_logits(eager, ids), {}
    for projection in ("bf16", "fp8"):
        ours = make_model(heads=8, kinds=KINDS, index_topk=512)
        attach(ours, projection)
        with torch.no_grad():
            errors[projection] = relative_error(ours(ids, past_key_values=cache_for(ours)).logits, wanted)
    assert errors["bf16"] < ATTENTION_TOLERANCE < errors["fp8"] < 0.03
    with pytest.raises(ValueError, match="projection: must be one of model, bf16, fp8, got 'FP8'"):
        attach(ours, "FP8")


@pytest.mark.long
@torch.no_grad()
def test_greedy_generation(models):
    """Token by token eager's, up to where eager's two best are closer than rounding: the weights are random."""
    eager, ours = models
    ids, new = tokens(4, 140), 12
    settings = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    wanted = eager.generate(ids, **settings, return_dict_in_generate=True, output_logits=True)
    got = ours.generate(ids, past_key_values=cache_for(ours, batch=4), **settings)
    assert got.shape == (4, 140 + new)
    best = torch.stack(wanted.logits, dim=1).topk(2, dim=-1).values  # [B, new, 2]
    clear = (best[..., 0] - best[..., 1]) > 0.025
    same, compared = got[:, 140:] == wanted.sequences[:, 140:], 0
    for row in range(4):
        until = new if clear[row].all() else int(clear[row].int().argmin())
        assert same[row, :until].all()
        compared += until
    assert compared > 1.5 * new


@pytest.mark.long
def test_kernels_simulated():
    """Every kernel of the path, for sm_100a: prompts divided into calls, one of them speculative; wo_a in FP8. Outputs
    of attention that differ in their last bits may be rounded to neighbouring codes, so the kernels need not be close
    to the references, but as close to eager's logits."""
    shape = dict(heads=8, kinds=KINDS, index_topk=512, index_n_heads=8, o_lora_rank=128)
    eager, model = make_model(**shape), make_model(**shape)
    eager.set_attn_implementation("eager")
    attach(model, "fp8")
    ids, errors = tokens(1, 11), {}
    wanted = eager_logits(eager, ids)
    for backend in ("sim", "reference"):
        cache, parts = cache_for(model, batch=1, **QUANTISED, backend=backend), []
        with torch.no_grad():
            parts.append(model(ids[:, :7], past_key_values=cache).logits)
            model(ids[:, 7:10].flip(1), past_key_values=cache)
            cache.crop(7)
            parts.append(model(ids[:, 7:10], past_key_values=cache).logits)
            parts.append(model(ids[:, 10:], past_key_values=cache).logits)
        errors[backend] = relative_error(torch.cat(parts, dim=1), wanted)
    assert errors["sim"] < 1.1 * errors["reference"] and errors["reference"] < 0.04


def test_bad_use(models):
    eager, ours = models
    ids = tokens(2, 8)
    with pytest.raises(TypeError, match="not attached"), torch.no_grad():
        eager(ids, past_key_values=cache_for(eager))
    with pytest.raises(ValueError, match="made for 3 sequences, got 2"), torch.no_grad():
        ours(ids, past_key_values=cache_for(ours, batch=3))
    with pytest.raises(ValueError, match="room for 6 tokens, got 8"), torch.no_grad():
        ours(ids, past_key_values=cache_for(ours, max_tokens=6))
    cache = cache_for(ours)
    with torch.no_grad():
        ours(ids, past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"of 8 tokens the first 5 cannot be taken back \(max_draft 3\), got 2"
    ):
        cache.crop(2)
    cache.crop(-2)
    with pytest.raises(ValueError, match=r"of 6 tokens the first 5 cannot .* got -2"):  # four in all
        cache.crop(-2)
    assert cache.length == 6 and cache.lengths.tolist() == [6, 6]
    with pytest.raises(ValueError, match="must have DeepseekV4Attention layers"):
        attach(torch.nn.Linear(2, 2))


def test_other_caches_still_work(models):
    """An attached model with transformers' own cache is unchanged."""
    eager, ours = models
    ids = tokens(1, 20)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, eager(ids).logits)
    assert {SELECTED, HEAVY} < set(KINDS)
