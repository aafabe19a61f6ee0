"""Models of transformers, tiny and seeded, with our attention: logits and gradients against eager attention in fp32."""

import pytest
import torch
import transformers
from helpers.family_models import MODELS, check_logits_and_gradients, inputs_of, seeded
from helpers.model_pairs import EAGER_FACTOR, relative_error

from warpspec.common.errors import UnsupportedProblem
from warpspec.engines import transformers as engine

NAME = "warpspec_models"


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients(kind):
    """A prompt, with images where the model has them, and tokens after it from a cache."""
    engine.register(NAME, backend="reference")
    check_logits_and_gradients(kind, NAME)


def test_a_tower_of_images():
    """Full attention at head size 72, as SigLIP's so400m has it: hidden states and gradients."""
    engine.register(NAME, backend="reference")
    torch.manual_seed(1)
    sizes = dict(hidden_size=144, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**sizes, image_size=56, patch_size=8)
    )
    pixels, seed = torch.randn(2, 3, 56, 56), torch.randn(2, 49, 144)
    found = []
    for dtype, name in ((torch.float32, "eager"), (torch.bfloat16, "eager"), (torch.bfloat16, NAME)):
        model.to(dtype).set_attn_implementation(name)
        model.zero_grad()
        out = model(pixel_values=pixels.to(dtype)).last_hidden_state
        out.backward(seed.to(dtype))
        gradients = [p.grad.float().flatten() for n, p in model.named_parameters() if "self_attn" in n]
        found.append((out.detach().float(), torch.cat(gradients)))
    for exact, own, ours in zip(*found, strict=True):
        assert 0 < relative_error(ours, exact) <= EAGER_FACTOR * relative_error(own, exact)


def test_a_layer_with_an_indexer_needs_its_mask():
    """Without one it would be dense, and wrong."""
    layer, q = torch.nn.Module(), torch.zeros(1, 2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedProblem, match=r"attention_mask: a layer with an indexer.*got None"):
        engine.attention_forward(layer, q, q, q, None, indices=torch.zeros(1, 4, 2, dtype=torch.int32))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiled(kind, packed):
    """Where torch.compile traces, masks say less: windows, whole rows, and packed sequences, which are kept apart."""
    engine.register(NAME, backend="reference")
    torch._dynamo.reset()
    model = seeded(kind).bfloat16().eval()
    model.set_attn_implementation(
        NAME if kind == "gemma2" else {"text_config": NAME, "vision_config": "eager"}
    )
    inputs = {"input_ids": inputs_of("gemma2")["input_ids"]}
    if packed:
        inputs["position_ids"] = torch.cat([torch.arange(25), torch.arange(35)]).expand(2, -1)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for cached in (False, True):
            wanted = model(**inputs, use_cache=cached).logits
            assert relative_error(compiled(**inputs, use_cache=cached).logits, wanted.float()) < 1e-3
        if not packed:  # with a cache no mask ends the graph
            torch._dynamo.reset()
            whole = torch.compile(model, backend="eager", fullgraph=True)
            assert relative_error(whole(**inputs, use_cache=True).logits, wanted.float()) < 1e-3
    if packed:  # the second sequence does not depend on the first
        alone = model(input_ids=inputs["input_ids"][:, 25:], use_cache=False).logits
        apart = compiled(**inputs, use_cache=False).logits[:, 25:]
        assert relative_error(apart, alone.float()) < 2e-2
