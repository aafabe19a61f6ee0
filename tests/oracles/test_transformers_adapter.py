"""The adapter refuses what `attention` cannot express; nothing is dropped silently."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GptOssConfig, masking_utils

from warpspec.common.errors import UnsupportedProblem
from warpspec.fmha.transformers import attention_forward, key_ranges, register

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
        {"softcap": 30.0},
        {"output_attentions": True},
        {"position_bias": torch.zeros(1, 2, 8, 8)},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_arguments_without_an_equivalent_are_refused(argument):
    with pytest.raises(UnsupportedProblem, match=next(iter(argument))):
        forward(**argument)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_mask_tensors_are_refused(dtype):
    with pytest.raises(UnsupportedProblem, match="attention_mask"):
        forward(torch.zeros(1, 1, 8, 8, dtype=dtype))


def test_ranges_in_a_layer_that_is_not_causal_are_refused():
    mask = key_ranges(1, 8, 8, attention_mask=torch.tensor([[1] * 6 + [0] * 2]).bool())
    with pytest.raises(UnsupportedProblem, match="is_causal"):
        forward(mask, layer=SimpleNamespace(is_causal=False))


MASKS = {
    "bidirectional": masking_utils.bidirectional_mask_function,
    "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
    "block": masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(torch.zeros(1, 8, dtype=torch.long)),
    ),
    "packed": masking_utils.packed_sequence_compatibility_function(
        masking_utils.causal_mask_function, torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8)
    ),
    "custom": lambda batch, head, q, k: k <= q,
}


@pytest.mark.parametrize("kind", MASKS)
def test_other_mask_functions_are_refused(kind):
    with pytest.raises(UnsupportedProblem, match="mask"):
        key_ranges(1, 8, 8, mask_function=MASKS[kind])


def test_padding_between_tokens_is_refused():
    with pytest.raises(UnsupportedProblem, match="between"):
        key_ranges(1, 8, 8, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]]).bool())


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
    with pytest.raises(UnsupportedProblem, match="packed"):
        masking_utils.create_causal_mask(**arguments, position_ids=positions % 3)


def test_no_mask_where_the_defaults_say_it_all():
    """Prefill, and decode against a full cache, need no tensors."""
    assert key_ranges(2, 8, 8) is None
    assert key_ranges(2, 1, 9, q_offset=8, attention_mask=torch.ones(2, 9).bool()) is None
    sliding = masking_utils.sliding_window_causal_mask_function(4)
    assert key_ranges(2, 1, 4, q_offset=20, kv_offset=17, mask_function=sliding) is None


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        ([[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 4], [0, 2]]),
        ([[1, 1, 1, 1], [0, 0, 1, 1]], [[0, 4, 0], [-2, 2, 2]]),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], [[0, 4], [0, 0]]),
    ],
    ids=["right", "left", "empty"],
)
def test_padding_becomes_ranges(padding, expected):
    """(q_start, kv_length[, first]) of each row."""
    mask = key_ranges(2, 4, 4, attention_mask=torch.tensor(padding).bool())
    assert mask[:, 0, 0].tolist() == expected
