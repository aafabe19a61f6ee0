"""Models of transformers, tiny and seeded, with our attention: logits and gradients against eager attention in fp32."""

import pytest
import torch
from helpers.family_models import MODELS, check_logits_and_gradients

from warpspec.common.errors import UnsupportedProblem
from warpspec.engines import transformers as engine

NAME = "warpspec_models"


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients(kind):
    """A prompt, with images where the model has them, and tokens behind it from a cache."""
    engine.register(NAME, backend="reference")
    check_logits_and_gradients(kind, NAME)


def test_a_layer_with_an_indexer_needs_its_mask():
    """Without one it would be dense, and wrong."""
    layer, q = torch.nn.Module(), torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match=r"attention_mask: a layer with an indexer.*got None"):
        engine.attention_forward(layer, q, q, q, None, indices=torch.zeros(1, 4, 2, dtype=torch.int32))
