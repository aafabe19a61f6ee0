"""Gemma 3 and Gemma 4 with images in transformers, tiny seeded models: ours against eager attention in fp32."""

import pytest
import torch
from helpers.engine_models import SIZES
from helpers.model_pairs import EAGER_FACTOR, relative_error
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig
from transformers.models.gemma4 import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import create_masks_for_vision_model

from warpspec.engines import transformers as engine

IMAGE, IMAGE_TOKENS = 250, 16  # token that stands for a place of an image; places of an image
WINDOW = 12  # less than an image: local layers cut it


@pytest.fixture(autouse=True)
def _registered():
    engine.register("warpspec_images", backend="reference")


def gemma3():
    torch.manual_seed(3)
    text = Gemma3TextConfig(
        **SIZES, num_hidden_layers=2, head_dim=64, query_pre_attn_scalar=4, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    vision = SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
    )
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=IMAGE_TOKENS,
        image_token_index=IMAGE,
        boi_token_index=251,
        eoi_token_index=252,
    )
    return Gemma3ForConditionalGeneration(config).eval()


def prompt(rows: int = 2, length: int = 60) -> torch.Tensor:
    """Two images in each row, at different places."""
    ids = torch.randint(3, 200, (rows, length), generator=torch.Generator().manual_seed(0))
    for row in range(rows):
        for begin in (4 + row, 30 + 3 * row):
            ids[row, begin : begin + IMAGE_TOKENS] = IMAGE
    return ids


@pytest.mark.parametrize("padding", [0, 7])
def test_gemma3(padding):
    """Logits of a prompt with images, the first row padded on the left, and of tokens after it from a cache. Images
    seen causally would move the logits by far more than the error."""
    model, ids = gemma3(), prompt()
    pixels = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    ids = torch.where(mask.bool(), ids, 0)
    if padding:  # the first image begins after the padding
        ids[0, : padding + 20], ids[0, padding : padding + IMAGE_TOKENS] = 5 * mask[0, : padding + 20], IMAGE
    more = torch.randint(3, 200, (2, 5), generator=torch.Generator().manual_seed(2))

    def logits(implementation, types=None):
        model.set_attn_implementation({"text_config": implementation, "vision_config": "eager"})
        with torch.no_grad():
            first = model(
                input_ids=ids, pixel_values=pixels.to(model.dtype), attention_mask=mask, use_cache=True,
                token_type_ids=(ids == IMAGE).long() if types is None else types,
            )  # fmt: skip
            behind = torch.cat([mask, torch.ones_like(more)], dim=1)
            rest = model(input_ids=more, attention_mask=behind, past_key_values=first.past_key_values)
        return torch.cat([first.logits, rest.logits], dim=1)[
            torch.cat([mask, more.ne(-1)], dim=1).bool()
        ].float()

    expected = logits("eager")
    causal = logits("eager", types=torch.zeros_like(ids))
    model.bfloat16()
    own, got = logits("eager"), logits("warpspec_images")
    error, bar = relative_error(got, expected), relative_error(own, expected)
    assert error <= EAGER_FACTOR * bar
    assert relative_error(causal, expected) > 5 * bar


def test_masks_of_gemma4():
    """Local layers see images cut by the window, global ones see them causally."""
    config = Gemma4TextConfig(
        **SIZES, num_hidden_layers=2, head_dim=64, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    ids = prompt()
    images = torch.where(ids == IMAGE, (torch.arange(60) > 25).long(), -1)
    # (the fourth argument is past_key_values, from transformers 5.24 on cache)
    arguments = (torch.zeros(*ids.shape, 4), None, None)
    others = dict(position_ids=None, block_sequence_ids=images)

    def masks(implementation):
        config._attn_implementation = implementation
        return create_masks_for_vision_model(config, *arguments, **others)

    expected, got = masks("eager"), masks("warpspec_images")
    assert got["full_attention"] is None
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 2, 60, 64, generator=generator).bfloat16() for _ in range(3))
    layer = torch.nn.Module()
    call = dict(backend="reference", scaling=1.0)
    o, _ = engine.attention_forward(layer, q, k, v, got["sliding_attention"], sliding_window=WINDOW, **call)
    whole, _ = engine.attention_forward(layer, q, k, v, expected["sliding_attention"].float(), **call)
    assert relative_error(o, whole) <= 4e-3
