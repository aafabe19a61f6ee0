"""A tiny Gemma 3 and a tiny Gemma 4 with images as their authors publish them: weights, a tokeniser and a processor
that engines can load; and how what engines say of prompts with images is judged."""

from copy import deepcopy

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma4AudioFeatureExtractor,
    Gemma4ImageProcessorPil,
    Gemma4Processor,
    Gemma4VideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.auto import image_processing_auto

from helpers import family_models
from helpers.engine_models import Judge, log_probabilities
from helpers.family_models import IMAGE, IMAGE_TOKENS

BEGIN, END = IMAGE + 1, IMAGE + 2  # tokens around an image's places
# Height and width in pixels. Gemma 4's fill the patches of an image: SGLang adds patches of padding to the first place.
PIXELS = {"gemma3": (32, 32), "gemma4": (112, 160)}
WINDOW = 24  # keys; vLLM lets Gemma 3's images see all of themselves where the window is longer
PATCH, POOLED = 8, 2  # pixels; patches on the side of one place (Gemma 4)
# Of an image. Gemma 4's processor takes no smaller number: it is greater than the window, which cuts the image.
PLACES = {"gemma3": IMAGE_TOKENS, "gemma4": 70}


def save(kind: str, folder, monkeypatch):
    """Save the seeded model "gemma3" or "gemma4"; returns it, in bf16. Images are processed by PIL, not torchvision,
    from now on."""
    monkeypatch.setattr(image_processing_auto, "_resolve_backend", lambda *_: "pil")
    monkeypatch.setattr(family_models, "WINDOW", WINDOW)
    monkeypatch.setattr(
        family_models, "SMALL", family_models.SMALL | {"tie_word_embeddings": kind == "gemma4"}
    )
    torch.manual_seed(3)
    model = family_models.MODELS[kind]().bfloat16().eval()
    if kind == "gemma4":
        model.config.vision_config.default_output_length = PLACES[kind]
    model.save_pretrained(folder)
    if kind == "gemma3":
        publish_gemma3(folder)
    PROCESSORS[kind]().save_pretrained(folder)
    return model


def publish_gemma3(folder) -> None:
    """Give a checkpoint of transformers the names of the published one."""
    tensors = load_file(folder / "model.safetensors")
    published = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in tensors.items()
        if not name.startswith("vision_tower.head.")  # which the model does not use
    }
    save_file(published, folder / "model.safetensors", metadata={"format": "pt"})


def gemma3_processor() -> Gemma3Processor:
    """Makes of token BEGIN an image's tokens, with blank lines around them."""
    lines = {"\n": 254, "\n\n": 255, "\n\n\n": 253, "\n\n\n\n": 2}
    image = {"<image_soft_token>": IMAGE, "<start_of_image>": BEGIN, "<end_of_image>": END}
    special = dict(zip(("image_token", "boi_token", "eoi_token"), image, strict=True))
    return Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(
            size=dict(zip(("height", "width"), PIXELS["gemma3"], strict=True))
        ),
        tokenizer=tokeniser(lines | image, r"<\w+>|\n+", special),
        image_seq_length=IMAGE_TOKENS,
    )


def gemma4_processor() -> Gemma4Processor:
    """Makes of token IMAGE an image's tokens, between BEGIN and END."""
    image = {"<|image|>": IMAGE, "<|image>": BEGIN, "<image|>": END}
    others = {"<|video|>": 253, "<|audio|>": 254, "<|audio>": 248, "<audio|>": 249}
    names = ("image_token", "boi_token", "eoi_token", "video_token", "audio_token", "boa_token", "eoa_token")
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessorPil(
            patch_size=PATCH, max_soft_tokens=PLACES["gemma4"], pooling_kernel_size=POOLED
        ),
        tokenizer=tokeniser(image | others, r"<\|?\w+\|?>", dict(zip(names, image | others, strict=True))),
        video_processor=Gemma4VideoProcessor(),
    )


PROCESSORS = {"gemma3": gemma3_processor, "gemma4": gemma4_processor}
PLACEHOLDERS = {"gemma3": BEGIN, "gemma4": IMAGE}  # the token of a prompt that becomes an image


def tokeniser(named: dict[str, int], pattern: str, special: dict[str, str]) -> PreTrainedTokenizerFast:
    """Each token is a word that matches a pattern: one of those named, or its number in angle brackets."""
    words = {f"<{i}>": i for i in range(256) if i not in named.values()} | named
    made = Tokenizer(models.WordLevel(words, unk_token="<3>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<1>", pad_token="<0>", unk_token="<3>", extra_special_tokens=special
    )


def random_images(kind: str, count: int) -> list[Image.Image]:
    """Images of noise, each another."""
    noise = numpy.random.default_rng(0).integers(0, 256, (count, *PIXELS[kind], 3), dtype=numpy.uint8)
    return [Image.fromarray(each) for each in noise]


def image_inputs(kind: str, images: list[Image.Image]) -> dict:
    """What the model takes of images besides tokens; functions of the tokens among it (``log_probabilities``)."""
    types = {"gemma3": "token_type_ids", "gemma4": "mm_token_type_ids"}[kind]
    found = PROCESSORS[kind]().image_processor(images, return_tensors="pt")
    tensors = {name: found[name] for name in ("pixel_values", "image_position_ids") if name in found}
    return {types: lambda tokens: (tokens == IMAGE).long()} | tensors


def check_images(kind: str, model, requests) -> None:
    """What an engine says must be as near to the model in FP32 as the model in bf16 is (``Judge``); were images seen
    causally, it would be far off. requests: (tokens of a prompt with those of its images, generated tokens, log-
    probabilities after each token but the last, of which tokens these are, images)."""
    exact = deepcopy(model).float()
    differences = {"ours": [], "own": [], "causal": []}
    for ids, generated, said, asked, images in requests:
        others = image_inputs(kind, images) if images else {}
        causal = {name: torch.zeros_like if callable(value) else value for name, value in others.items()}

        def says(model, asked=asked, text=(ids[:1], ids[1:] + generated), **others):
            return log_probabilities(model, *text, **others).gather(1, torch.tensor(asked)[:, None])[:, 0]

        wanted = says(exact, **others)
        differences["ours"].append(torch.tensor(said) - wanted)
        differences["own"].append(says(model, **others) - wanted)
        differences["causal"].append(says(exact, **causal) - wanted)
    errors = {name: torch.cat(each).square().mean().sqrt() for name, each in differences.items()}
    assert errors["ours"] <= Judge.FACTOR * errors["own"], errors
    assert errors["own"] < errors["causal"] / 4 or not any(images for *_, images in requests), errors
