"""Gemma 3 and Gemma 4 with images in SGLang with our attention: `make test-engines`."""

from types import SimpleNamespace

import pytest

sglang = pytest.importorskip("sglang", reason="needs SGLang: make test-engines")

from helpers.engine_models import VOCABULARY, prompts  # noqa: E402
from helpers.family_models import IMAGE  # noqa: E402
from helpers.image_models import (  # noqa: E402
    PLACEHOLDERS,
    PROCESSORS,
    check_images,
    random_images,
    save,
)
from helpers.sglang_batches import interpret_triton  # noqa: E402

from warpspec.common.errors import UnsupportedProblem  # noqa: E402
from warpspec.engines.sglang import images  # noqa: E402
from warpspec.engines.sglang.images import Images  # noqa: E402

OPTIONS = dict(skip_tokenizer_init=False, enable_multimodal=True, mem_fraction_static=0.5)
SAY_ALL = dict(
    sampling_params={"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
    return_logprob=True,
    logprob_start_len=0,
)


def said(output) -> list[float]:
    """The log-probabilities of a prompt's tokens but the first, and of those generated."""
    about = output["meta_info"]
    return [value for value, *_ in about["input_token_logprobs"][1:] + about["output_token_logprobs"]]


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_images(kind, tmp_path, start_sglang, monkeypatch):
    """Two images in a prompt, one in another, none in a third, which are computed and decode together: what SGLang says
    after each token. (At the places of images it says of the vocabulary's last token.)"""
    interpret_triton(monkeypatch)
    model, pictures, processor = save(kind, tmp_path, monkeypatch), random_images(kind, 3), PROCESSORS[kind]()
    image = processor.tokenizer.convert_ids_to_tokens(PLACEHOLDERS[kind])
    texts = [
        (f"<5><6><7>{image}<9><10><11>{image}<12>", pictures[:2]),
        (f"<20>{image}<21>", pictures[2:]),
        ("<7>" * 20, []),
    ]
    files = [tmp_path / f"{i}.png" for i in range(len(pictures))]
    for picture, file in zip(pictures, files, strict=True):
        picture.save(file)
    engine = start_sglang(tmp_path, chunked_prefill_size=-1, **OPTIONS)
    outputs = engine.generate(
        prompt=[text for text, _ in texts],
        image_data=[[str(file) for file in of_prompt] for of_prompt in (files[:2], files[2:], [])],
        **SAY_ALL,
    )
    requests = []
    for (text, pictures), output in zip(texts, outputs, strict=True):
        ids = processor(text=text, images=pictures or None, return_tensors="pt")["input_ids"][0].tolist()
        tokens = output["output_ids"]
        asked = [VOCABULARY - 1 if token == IMAGE else token for token in ids[1:]] + tokens
        requests.append((ids, tokens, said(output), asked, pictures))
    check_images(kind, model, requests)


def test_text_in_parts_of_a_model_with_images(tmp_path, start_sglang, monkeypatch):
    """Without images, Gemma 4's prompts may come in parts. They have none of the tokens that stand for images, videos
    and audio: transformers takes these for padding, SGLang for words."""
    interpret_triton(monkeypatch)
    model = save("gemma4", tmp_path, monkeypatch)
    engine = start_sglang(tmp_path, enable_multimodal=False)
    inputs = [[min(token, IMAGE - 1) for token in ids] for ids in prompts((70, 5, 1, 40, 90))]
    outputs = engine.generate(input_ids=inputs, **SAY_ALL)
    requests = []
    for ids, output in zip(inputs, outputs, strict=True):
        tokens = output["output_ids"]
        requests.append((ids, tokens, said(output), ids[1:] + tokens, []))
    check_images("gemma4", model, requests)


def step_with_images(prefixes, queries, offsets):
    """A step of requests whose images are at offsets, first and last token, in each request."""
    item = SimpleNamespace(is_image=lambda: True, offsets=offsets)
    inputs = [SimpleNamespace(mm_items=[item]), None]
    return SimpleNamespace(extend_seq_lens_cpu=queries, extend_prefix_lens_cpu=prefixes, mm_inputs=inputs)


def test_ranges_of_images_in_part_in_the_cache():
    """A prefix hit ends in the first image and after none of the second; an image after the chunk has no row yet."""
    step = step_with_images([4, 0], [6, 2], [(2, 5), (7, 8), (10, 12)])
    wanted = [[2, 5], [2, 5], [-1, -1], [7, 8], [7, 8], [-1, -1], [-1, -1], [-1, -1]]
    assert images.ranges_of(step, Images.EVERY_LAYER).tolist() == wanted
    wanted[:2], wanted[3:5] = [[4, 5], [5, 5]], [[7, 8], [8, 8]]
    assert images.ranges_of(step, Images.WINDOWS).tolist() == wanted


def test_an_image_in_two_chunks_is_refused():
    with pytest.raises(UnsupportedProblem, match=r"chunked-prefill-size.*image at tokens 2 to 5"):
        images.ranges_of(step_with_images([0, 0], [4, 2], [(2, 5)]), Images.WINDOWS)

    class Gemma3ForConditionalGeneration:
        pass

    runner = SimpleNamespace(
        model=Gemma3ForConditionalGeneration(),
        model_config=SimpleNamespace(is_multimodal=True),
        server_args=SimpleNamespace(chunked_prefill_size=8192),
    )
    with pytest.raises(UnsupportedProblem, match=r"must be -1 .* got 8192"):
        images.offer(runner)
    runner.model_config.is_multimodal = False
    images.offer(runner)


@pytest.mark.parametrize(("seen", "kind"), [("vision", Images.WINDOWS), (None, Images.NOWHERE)])
def test_smaller_gemma4s_see_images_causally(seen, kind):
    class Gemma4ForConditionalGeneration:
        config = SimpleNamespace(text_config=SimpleNamespace(use_bidirectional_attention=seen))

    assert images.kind_of(Gemma4ForConditionalGeneration()) is kind
