"""A tiny Gemma 3 with images as its authors publish it: weights, a tokeniser and a processor that engines can load."""

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.auto import image_processing_auto

from helpers import family_models
from helpers.family_models import IMAGE, IMAGE_TOKENS

BEGIN, END = IMAGE + 1, IMAGE + 2  # tokens around an image's places
SIDE = 32  # pixels
WINDOW = 24  # keys; vLLM lets images see all of themselves where the window is longer


def save_gemma3(folder, monkeypatch):
    """Save the seeded model; returns it, in bf16. Images are processed by PIL, not torchvision, from now on."""
    monkeypatch.setattr(image_processing_auto, "_resolve_backend", lambda *_: "pil")
    monkeypatch.setattr(family_models, "WINDOW", WINDOW)
    torch.manual_seed(3)
    model = family_models.gemma3().bfloat16().eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    published = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in tensors}
    save_file(
        {published[name]: tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    processor().save_pretrained(folder)
    return model


def processor() -> Gemma3Processor:
    """Makes of token BEGIN an image's tokens, with blank lines around them."""
    lines = {"\n": 254, "\n\n": 255, "\n\n\n": 253, "\n\n\n\n": 2}
    words = {f"<{i}>": i for i in range(256) if i not in lines.values()} | lines
    tokeniser = Tokenizer(models.WordLevel(words, unk_token="<3>"))
    tokeniser.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>|\n+"), "isolated")
    special = {"image_token": f"<{IMAGE}>", "boi_token": f"<{BEGIN}>", "eoi_token": f"<{END}>"}
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokeniser, bos_token="<1>", pad_token="<0>", unk_token="<3>", extra_special_tokens=special
        ),
        image_seq_length=IMAGE_TOKENS,
    )  # fmt: skip


def random_images(count: int) -> list[Image.Image]:
    """Images of noise, each another."""
    noise = numpy.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), dtype=numpy.uint8)
    return [Image.fromarray(each) for each in noise]


def pixels_of(images: list[Image.Image]) -> torch.Tensor:
    """What the model takes of images."""
    return processor().image_processor(images, return_tensors="pt")["pixel_values"]
