"""Gemma 3 with images in vLLM with our attention: `make test-engines`."""

from copy import deepcopy

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.engine_models import Judge, log_probabilities  # noqa: E402
from helpers.image_models import BEGIN, IMAGE, IMAGE_TOKENS, pixels_of, random_images, save_gemma3  # noqa: E402
from helpers.vllm_engine import GREEDY, results_of  # noqa: E402

from warpspec.engines.vllm.attention import BatchBuilder  # noqa: E402


@pytest.fixture
def seen(monkeypatch):
    """How many tokens of images each batch has."""
    found, build = [], BatchBuilder.build

    def counted(self, *arguments, **named):
        batch = build(self, *arguments, **named)
        found.append(int((batch.ranges[:, 1] >= 0).sum()))
        return batch

    monkeypatch.setattr(BatchBuilder, "build", counted)
    return found


def test_images(tmp_path, start_vllm, seen, monkeypatch):
    """Two images in a prompt, one in another, none in a third, which are computed and decode together: what vLLM says
    of each token, of those of images too. Were images seen causally, it would say something else."""
    model, pictures = save_gemma3(tmp_path, monkeypatch), random_images(3)
    prompts = [
        ([5, 6, 7, BEGIN, 9, 10, 11, BEGIN, 12], pictures[:2]),
        ([20, BEGIN, 21], pictures[2:]),
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
    assert max(seen) == 3 * IMAGE_TOKENS
    exact = deepcopy(model).float()
    differences = {"ours": [], "own": [], "causal": []}
    for (_, images), output in zip(prompts, outputs, strict=True):
        ids = list(output.prompt_token_ids)
        _, tokens, said = results_of(ids, output)
        of_prompt = [
            each[token].logprob for each, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        ]
        said, text = torch.tensor(of_prompt + said), (ids[:1], ids[1:] + tokens)
        others = {}
        if images:
            others = {"token_type_ids": lambda t: (t == IMAGE).long(), "pixel_values": pixels_of(images)}
        wanted = of_tokens(exact, *text, **others)
        differences["ours"].append(said - wanted)
        differences["own"].append(of_tokens(model, *text, **others) - wanted)
        if images:
            others["token_type_ids"] = torch.zeros_like
            differences["causal"].append(of_tokens(exact, *text, **others) - wanted)
    errors = {name: torch.cat(each).square().mean().sqrt() for name, each in differences.items()}
    assert errors["ours"] <= Judge.FACTOR * errors["own"] < errors["causal"] / 2, errors


def of_tokens(model, prompt, generated, **others) -> torch.Tensor:
    """The log-probabilities of tokens behind a prompt."""
    found = log_probabilities(model, prompt, generated, **others)
    return found.gather(1, torch.tensor(generated)[:, None])[:, 0]
