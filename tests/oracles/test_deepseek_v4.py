"""transformers' DeepSeek-V4 model with its attention replaced by ours: same logits, prefill and decode.

The model is small but shaped like the published ones where attention is concerned: head size 512, 16, 64 or 128
query heads on one head of shared keys and values, sinks, a window of 128, layers with compressed keys (one to
4 positions, selected by an indexer; one to 128). Each test goes both ways through those layers: the mask as
bias, and two key sets merged. Weights are seeded and large enough that attention is far from uniform and that
sinks and compressed keys take a good part of it.
"""

import functools

import pytest
import torch
from helpers.deepseek_v4_model import HEAVY, KINDS, SELECTED, SLIDING, make_model
from helpers.model_pairs import (
    ATTENTION_TOLERANCE,
    EAGER_FACTOR,
    SENSITIVITY,
    padded,
    register_in_fp32_model,
    relative_error,
    tokens,
    with_attention,
)
from helpers.suites import long
from transformers import DeepseekV4ForCausalLM

import warpspec.engines.transformers
from warpspec.common.errors import UnsupportedProblem

WAYS = ["bias", "key_sets"]
HEADS = 16  # of the reference's runs, whose time grows with them; kernels and the long suite have the models' 64, 128
# (way, kind of layer, head size) that the kernel runs in the simulator, in tests of a size it finishes in seconds.
SIMULATED = [("key_sets", SLIDING, 64), *((way, kind, 512) for way in WAYS for kind in KINDS)]
ONE_LAYER = [("reference", way, kind, 512) for way in WAYS for kind in KINDS]
ONE_LAYER += [("sim", *case) for case in SIMULATED]


def attention_name(backend: str, way: str) -> str:
    """Registers our attention for models in FP32; returns the name."""
    name = f"warpspec_{backend}_{way}_in_fp32"
    register_in_fp32_model(name, backend, way)
    return name


def heads_of(backend: str) -> int:
    return 64 if backend == "sim" else HEADS


shared_model = functools.cache(make_model)  # for those that change nothing in it


def pair(model: DeepseekV4ForCausalLM, backend: str = "reference", way: str = "bias"):
    """(the model with our attention in bf16, the model with eager attention), FP32 otherwise."""
    return with_attention(model, attention_name(backend, way)), with_attention(model, "eager")


def logits_in_steps(model, ids: torch.Tensor, *ends: int) -> torch.Tensor:
    """Logits of ids given to the model's cache piece by piece, each up to the next of `ends`."""
    cache, results = None, []
    with torch.no_grad():
        for start, end in zip((0, *ends), (*ends, ids.shape[1]), strict=False):
            output = model(ids[:, start:end], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            results.append(output.logits)
    return torch.cat(results, dim=1)


@functools.cache
def exact_logits(heads: int, batch: int, length: int, *ends: int) -> torch.Tensor:
    """Logits of the model with eager attention, the prompt in steps."""
    return logits_in_steps(with_attention(shared_model(heads), "eager"), tokens(batch, length), *ends)


def our_logits(heads: int, batch: int, length: int, *ends: int, way: str) -> torch.Tensor:
    """Logits with our attention."""
    model = with_attention(shared_model(heads), attention_name("reference", way))
    return logits_in_steps(model, tokens(batch, length), *ends)


every_way = pytest.mark.parametrize("way", WAYS)


ONE_LAYER_NAMES = ("backend", "way", "kind", "head_dim")
# By default the kernel runs in the tests of fmha: on shared keys, with a bias, and by head size.
one_layer = pytest.mark.parametrize(
    ONE_LAYER_NAMES, [long(*case) if case[0] == "sim" else case for case in ONE_LAYER]
)


@pytest.mark.parametrize(("heads", "length", "way"), [
    (HEADS, 300, "bias"),
    *(long(*case) for case in ((128, 140, "key_sets"), (64, 300, "key_sets"), (128, 140, "bias"))),
])  # fmt: skip
def test_prefill(heads, length, way):
    """300 positions: two heavily compressed keys, 75 of the other kind."""
    ours = our_logits(heads, 1, length, way=way)
    assert relative_error(ours, exact_logits(heads, 1, length)) <= ATTENTION_TOLERANCE


@one_layer
def test_prefill_of_one_layer(backend, way, kind, head_dim, length=5):
    """One compressed key for 4 positions, none for 128."""
    model, ids = shared_model(heads_of(backend), (kind,), head_dim=head_dim), tokens(1, length)
    ours, exact = (logits_in_steps(one, ids) for one in pair(model, backend, way))
    assert relative_error(ours, exact) <= ATTENTION_TOLERANCE


@one_layer
def test_prefill_of_one_layer_past_the_window(backend, way, kind, head_dim):
    """Just past the window and the first key that is compressed from 128."""
    test_prefill_of_one_layer(backend, way, kind, head_dim, length=131)


@one_layer
def test_decode_of_one_layer(backend, way, kind, head_dim):
    """The window fills and the first key compressed from 128 appears. The prompt is the reference's."""
    model, ids = shared_model(heads_of(backend), (kind,), head_dim=head_dim), tokens(1, 130)
    ours, exact = pair(model, "reference", way)
    caches, steps = [], []
    with torch.no_grad():
        for one in (ours, exact):
            caches.append(one(ids[:, :127], use_cache=True).past_key_values)
        ours.set_attn_implementation(attention_name(backend, way))
        for one, cache in zip((ours, exact), caches, strict=True):
            logits = [one(ids[:, i : i + 1], past_key_values=cache).logits for i in range(127, 130)]
            steps.append(torch.cat(logits, dim=1))
    assert relative_error(*steps) <= ATTENTION_TOLERANCE


@pytest.mark.parametrize(("heads", "batch", "start", "end", "way"), [
    (HEADS, 1, 253, 257, "bias"), long(64, 2, 124, 130, "key_sets"), long(128, 1, 253, 257, "bias"),
    long(64, 2, 124, 130, "bias"), long(128, 1, 253, 257, "key_sets"),
])  # fmt: skip
def test_decode_with_cache(heads, batch, start, end, way):
    """Single tokens against the cache; within the steps the window fills and compressed keys appear."""
    case = (heads, batch, end, *range(start, end))
    ours, exact = our_logits(*case, way=way)[:, start:], exact_logits(*case)[:, start:]
    assert relative_error(ours, exact) <= ATTENTION_TOLERANCE


@every_way
def test_steps_of_several_tokens(way):
    """As in multi-token prediction and chunked prefill: queries whose compressed keys differ, on a cache."""
    case = (HEADS, 1, 300, 100, 126, 131, 253, 258)
    assert relative_error(our_logits(*case, way=way), exact_logits(*case)) <= ATTENTION_TOLERANCE


@pytest.mark.parametrize("ends", [
    pytest.param((), id="prefill"), pytest.param((296, 297, 298, 299), id="decode", marks=pytest.mark.long),
])  # fmt: skip
def test_selection_by_the_indexer(ends):
    """More compressed keys than the indexer lets a query see: its choice is in the mask.

    The layer comes first, so that the choice is made from the same hidden states in both models.
    """
    model, ids = shared_model(HEADS, index_topk=16), tokens(1, 300)
    ours, exact = (logits_in_steps(one, ids, *ends) for one in pair(model))
    assert relative_error(ours, exact) <= ATTENTION_TOLERANCE
    assert relative_error(exact_logits(HEADS, 1, 300, *ends), exact) >= SENSITIVITY * ATTENTION_TOLERANCE


def test_selection_is_refused_as_key_sets():
    model = with_attention(shared_model(HEADS, index_topk=16), attention_name("reference", "key_sets"))
    with pytest.raises(UnsupportedProblem, match="indexer"):
        model(tokens(1, 100))


@pytest.mark.parametrize("side", ["left", long("right")])
def test_padded_batch(side):
    ids, mask = padded(side, (150, 97))
    with torch.no_grad():
        ours, exact = (
            model(ids, attention_mask=mask).logits[mask.bool()] for model in pair(shared_model(HEADS))
        )
    assert relative_error(ours, exact) <= ATTENTION_TOLERANCE


def test_padding_is_refused_as_key_sets():
    ids, mask = padded("left", (150, 97))
    model = with_attention(shared_model(HEADS), attention_name("reference", "key_sets"))
    with pytest.raises(UnsupportedProblem, match="padding"):
        model(ids, attention_mask=mask)


@every_way
def test_generate(way):
    """generate() makes masks and caches its own way; it picks the tokens it picks with eager attention."""
    options = dict(max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True)
    ours, exact = (model.generate(tokens(1, 126), **options) for model in pair(shared_model(HEADS), way=way))
    assert torch.equal(ours.sequences, exact.sequences)
    assert relative_error(torch.stack(ours.logits), torch.stack(exact.logits)) <= ATTENTION_TOLERANCE


@pytest.mark.long
@every_way
def test_bf16_model(way):
    """As a user has it: the whole model in bf16, our attention registered by its public name; past the window."""
    name = f"warpspec_reference_{way}"
    warpspec.engines.transformers.register(name, backend="reference", compressed=way)
    model, ids = shared_model(HEADS), tokens(1, 140)
    with torch.no_grad():
        ours, eager, exact = (
            with_attention(model, implementation, dtype)(ids).logits
            for implementation, dtype in (
                (name, torch.bfloat16),
                ("eager", torch.bfloat16),
                ("eager", torch.float32),
            )
        )
    assert relative_error(ours, exact) <= EAGER_FACTOR * relative_error(eager, exact)


@pytest.mark.parametrize("without", ["sinks", long("window"), SELECTED, HEAVY])
def test_logits_depend_on_what_is_compared(without):
    """Agreement says something of sinks, window and compressed keys: without them logits are far off."""
    changed = make_model(sliding_window=1024) if without == "window" else make_model()
    for attention in (layer.self_attn for layer in changed.model.layers):
        if without == "sinks":
            attention.sinks.data.fill_(torch.finfo(torch.float32).min)
        if without == attention.layer_type:
            for part in attention.compressor.modules():
                if hasattr(part, "compress_rate"):
                    part.compress_rate = 512  # this many positions make the first compressed key
    with torch.no_grad():
        logits_of_changed = changed(tokens(1, 300), use_cache=False).logits
    difference = relative_error(logits_of_changed, exact_logits(HEADS, 1, 300))
    assert difference >= SENSITIVITY * ATTENTION_TOLERANCE
