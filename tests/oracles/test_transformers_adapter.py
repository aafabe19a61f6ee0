"""The adapter refuses what `attention` cannot express; nothing is dropped silently."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import GptOssConfig, Qwen3Config, Qwen3ForCausalLM, masking_utils

from warpspec.common.errors import UnsupportedProblem
from warpspec.engines.transformers import attention_forward, key_ranges, key_set_sizes, register
from warpspec.engines.transformers.attention import additive_mask

LAYER = SimpleNamespace(is_causal=True)


def operands(batch=1, seq=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, 2, seq, 64, generator=generator).bfloat16() for _ in range(3)]


def forward(mask=None, layer=LAYER, **arguments):
    return attention_forward(layer, *operands(), mask, backend="reference", **arguments)[0]


@pytest.mark.parametrize(
    "argument",
    [
        {"dropout": 0.1},
        {"output_attentions": True},
        {"position_bias": torch.zeros(1, 2, 8, 8)},
        {"sinks": torch.zeros(1, 2, 8, 1)},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_arguments_without_an_equivalent_are_refused(argument):
    with pytest.raises(UnsupportedProblem, match=next(iter(argument))):
        forward(**argument)


def test_boolean_mask_tensors_are_refused():
    with pytest.raises(UnsupportedProblem, match="attention_mask"):
        forward(torch.zeros(1, 1, 8, 8, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_additive_masks_replace_causality_and_window(dtype):
    """As in eager attention: what a floating-point mask says is all there is."""
    query, key, value = operands()
    mask = torch.zeros(1, 1, 8, 8, dtype=dtype).masked_fill(torch.eye(8).bool(), torch.finfo(dtype).min)
    got = forward(mask, sliding_window=2)
    weights = (query.float() @ key.float().transpose(2, 3) / 8 + mask.float()).softmax(dim=-1)
    expected = (weights @ value.float()).transpose(1, 2)
    assert (got.float() - expected).norm() <= 4e-3 * expected.norm()


@pytest.mark.parametrize("shape", [(1, 1, 8, 9), (1, 1, 1, 8), (1, 3, 8, 8), (8, 8)])
def test_additive_masks_of_other_shapes_are_refused(shape):
    with pytest.raises(UnsupportedProblem, match="attention_mask"):
        forward(torch.zeros(shape))


@pytest.mark.parametrize("mask", [None, key_ranges(1, 8, 12, q_offset=3)], ids=["none", "ranges"])
def test_layers_with_compressed_keys_need_their_own_mask(mask):
    """Without one, nothing says which of the keys are compressed ones."""
    layer = SimpleNamespace(is_causal=True, compressor=SimpleNamespace(compress_rate=4))
    with pytest.raises(UnsupportedProblem, match="compressed keys"):
        forward(mask, layer=layer)


def test_key_sets_refuse_padding_and_wrong_counts():
    with pytest.raises(UnsupportedProblem, match="padding"):
        key_set_sizes(1, 8, 8, attention_mask=torch.tensor([[0] * 2 + [1] * 6]).bool())
    query, key, value = operands()
    layer = SimpleNamespace(is_causal=True, compressor=SimpleNamespace(compress_rate=4))
    sizes = key_set_sizes(1, 8, 5, q_offset=-3)  # 5 positions so far: one compressed key, not three
    with pytest.raises(UnsupportedProblem, match="compressed keys"):
        attention_forward(layer, query, key, value, sizes, sliding_window=4, backend="reference")


def test_ways_through_compressed_keys_have_names():
    with pytest.raises(ValueError, match="key-sets"):
        register("warpspec_adapter_test", compressed="key-sets")


def test_ranges_in_a_layer_that_is_not_causal_are_refused():
    mask = key_ranges(1, 8, 8, attention_mask=torch.tensor([[1] * 6 + [0] * 2]).bool())
    with pytest.raises(UnsupportedProblem, match="is_causal"):
        forward(mask, layer=SimpleNamespace(is_causal=False))


NUMBERS, POSITIONS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
MASKS = {
    "bidirectional": masking_utils.bidirectional_mask_function,
    "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
    "blocks and a custom one": masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(torch.zeros(1, 8, dtype=torch.long)),
        lambda batch, head, q, k: k == 0,
    ),
    "packed": masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(NUMBERS)
    ),
    "custom": lambda batch, head, q, k: k <= q,
}
# transformers 5.17 has the first way only.
if hasattr(masking_utils, "packed_sequence_compatibility_function"):
    MASKS["packed, positions start over"] = masking_utils.packed_sequence_compatibility_function(
        masking_utils.causal_mask_function, POSITIONS, NUMBERS
    )


MASKS["padding between tokens"] = masking_utils.causal_mask_function


@pytest.mark.parametrize("kind", MASKS)
def test_other_mask_functions_become_lists_of_blocks(kind):
    padding = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]]).bool() if "padding" in kind else None
    given = dict(mask_function=MASKS[kind], attention_mask=padding)
    mask, additive = key_ranges(1, 8, 8, **given), additive_mask(1, 8, 8, **given)
    assert isinstance(mask, BlockMask)
    layer = SimpleNamespace(is_causal=kind != "bidirectional")
    torch.testing.assert_close(forward(mask, layer=layer), forward(additive, layer=layer), rtol=0, atol=0)


def test_one_sequence_is_not_packed():
    """transformers adds packing to any mask where torch.compile traces."""
    whole = masking_utils.packed_sequence_mask_function(torch.zeros(1, 8))
    assert (
        key_ranges(1, 8, 8, mask_function=masking_utils.and_masks(masking_utils.causal_mask_function, whole))
        is None
    )
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        for positions, found in ((torch.arange(8), None), (torch.zeros(8, dtype=torch.long), BlockMask)):
            mask = masking_utils.packed_sequence_compatibility_function(
                masking_utils.causal_mask_function, positions[None], torch.zeros(1, 8)
            )
            assert isinstance(key_ranges(1, 8, 8, mask_function=mask), found or type(None))


def test_a_layer_with_an_indexer_takes_no_blocks():
    mask = key_ranges(1, 8, 8, mask_function=MASKS["bidirectional"])
    with pytest.raises(UnsupportedProblem, match=r"attention_mask: .* takes no BlockMask"):
        forward(mask, indices=torch.zeros(1, 8, 2, dtype=torch.int32))


def test_packed_sequences_are_found_through_the_models_mask_maker():
    """position_ids that start over mean packed sequences to the mask maker that models call."""
    register("warpspec_adapter_test", backend="reference")
    config = GptOssConfig(num_hidden_layers=2)
    config._attn_implementation = "warpspec_adapter_test"
    arguments = dict(
        config=config, inputs_embeds=torch.zeros(1, 6, 4), attention_mask=None, past_key_values=None
    )
    positions = torch.arange(6)[None]
    assert masking_utils.create_causal_mask(**arguments, position_ids=positions) is None
    assert isinstance(masking_utils.create_causal_mask(**arguments, position_ids=positions % 3), BlockMask)


def test_packed_documents_of_a_model():
    """Logits, and gradients of the embedding, of two packed documents are those of each alone."""
    register("warpspec_adapter_test", backend="reference")
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    config = Qwen3Config(vocab_size=50, num_hidden_layers=2, **sizes)
    config._attn_implementation = "warpspec_adapter_test"
    model = Qwen3ForCausalLM(config).bfloat16()
    ids, ends = torch.randint(50, (1, 150)), (0, 90, 150)
    positions = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]
    results = []
    for parts in ([slice(0, 150)], [slice(a, b) for a, b in itertools.pairwise(ends)]):
        model.zero_grad()
        calls = [
            model(ids[:, part], position_ids=positions[:, part], use_cache=False).logits for part in parts
        ]
        logits = torch.cat(calls, dim=1)
        logits.float().square().sum().backward()
        results.append((logits.float(), model.get_input_embeddings().weight.grad.float()))
    for got, expected in zip(*results, strict=True):
        assert (got - expected).norm() <= 1e-2 * expected.norm()


def test_no_mask_where_the_defaults_say_it_all():
    """Prefill, and decode against a full cache, need no tensors."""
    assert key_ranges(2, 8, 8) is None
    assert key_ranges(2, 1, 9, q_offset=8, attention_mask=torch.ones(2, 9).bool()) is None
    sliding = masking_utils.sliding_window_causal_mask_function(4)
    assert key_ranges(2, 1, 4, q_offset=20, kv_offset=17, mask_function=sliding) is None


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        ([[1, 1, 1, 1], [1, 1, 0, 0]], [[4, 4], [4, 2]]),
        ([[1, 1, 1, 1], [0, 0, 1, 1]], [[4, 4, 0], [2, 2, 2]]),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], [[4, 4], [4, 0]]),
    ],
    ids=["right", "left", "empty"],
)
def test_padding_becomes_ranges(padding, expected):
    """(q_end, kv_length[, first]) of each row, which say the same of the last query alone."""
    mask = key_ranges(2, 4, 4, attention_mask=torch.tensor(padding).bool())
    assert mask[:, 0, 0].tolist() == expected
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 4, 64, generator=generator).bfloat16() for _ in range(3))
    whole, _ = attention_forward(torch.nn.Module(), q, k, v, mask, backend="reference")
    last, _ = attention_forward(
        torch.nn.Module(), q[:, :, -1:], k, v, mask[:, :, -1:, :], backend="reference"
    )
    assert torch.equal(last, whole[:, -1:])
