"""Gemma 3 and Gemma 4 with images in vLLM with our attention: `make test-engines`."""

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.image_models import (  # noqa: E402
    PLACEHOLDERS,
    PLACES,
    check_images,
    random_images,
    save,
)
from helpers.vllm_engine import GREEDY, results_of  # noqa: E402

from warpspec.engines.vllm.attention import BatchBuilder  # noqa: E402


@pytest.fixture
def seen(monkeypatch):
    """How many tokens of images each batch has."""
    found, build = [], BatchBuilder.build

    def counted(self, *arguments, **named):
        batch = build(self, *arguments, **named)
        found.append(int((batch.mm_prefix_query_range_tensor[:, 1] >= 0).sum()))
        return batch

    monkeypatch.setattr(BatchBuilder, "build", counted)
    return found


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_images(kind, tmp_path, start_vllm, seen, monkeypatch):
    """Two images in a prompt, one in another, none in a third, which are computed and decode together: what vLLM says
    of each token, of those of images too. Gemma 4's images see themselves in the local layer alone, whose window cuts
    them."""
    model, pictures, image = save(kind, tmp_path, monkeypatch), random_images(kind, 3), PLACEHOLDERS[kind]
    prompts = [
        ([5, 6, 7, image, 9, 10, 11, image, 12], pictures[:2]),
        ([20, image, 21], pictures[2:]),
        ([7] * 20, []),
    ]
    options = dict(limit_mm_per_prompt={"image": 2}, max_num_batched_tokens=256)
    llm = start_vllm(tmp_path, skip_tokenizer_init=False, **options)
    inputs = [
        {"prompt_token_ids": ids} | ({"multi_modal_data": {"image": images}} if images else {})
        for ids, images in prompts
    ]
    sampling = vllm.SamplingParams(max_tokens=6, prompt_logprobs=0, **GREEDY)
    outputs = llm.generate(inputs, sampling, use_tqdm=False)
    assert max(seen) == 3 * PLACES[kind]
    requests = []
    for (_, images), output in zip(prompts, outputs, strict=True):
        ids = list(output.prompt_token_ids)
        _, tokens, said = results_of(ids, output)
        of_prompt = [
            each[token].logprob for each, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        requests.append((ids, tokens, of_prompt + said, ids[1:] + tokens, images))
    check_images(kind, model, requests)
