"""transformers' DeepSeek-V4 on our pools, on a GPU: all kernels of the serving path against their references."""

import pytest
import torch
from helpers.compile_ahead import compile_ahead
from helpers.deepseek_v4_model import KINDS, make_model
from helpers.model_pairs import relative_error, tokens

from warpspec.engines.transformers.latent import DeepseekV4Cache, attach

pytestmark = pytest.mark.gpu

SIZES = {"prefill": [150], "chunked": [3, 60, 1, 70, 4, 12], "tokens": [130, *[1] * 20]}


@pytest.fixture(scope="module")
def model():
    made = make_model(heads=8, kinds=KINDS, index_topk=512, index_n_heads=8, o_lora_rank=128).cuda()
    made.set_attn_implementation("eager")
    return made


@torch.no_grad()
def logits(model, ids, way: str, **options) -> torch.Tensor:
    cache = DeepseekV4Cache(
        model.config, batch=len(ids), max_tokens=256, max_draft=3, device="cuda", **options
    )
    parts, at = [], 0
    for size in SIZES[way]:
        parts.append(model(ids[:, at : at + size], past_key_values=cache).logits)
        at += size
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("projection", ["bf16", "fp8"])
def test_kernels_are_their_references(model, monkeypatch, projection):
    """Prefill, chunked, token by token: eager's logits within what FP8 and FP4 cost, the references' closer.

    Rounded to FP8, outputs that differ by d of themselves (2.3e-3) differ by sqrt(0.8 * d * 0.09): the share of codes
    that come out one step of about 0.09 apart, times the step.
    """
    ids = tokens(2, 150).cuda()
    with torch.no_grad():
        eager = model(ids, use_cache=True).logits
    attach(model, projection)
    compile_ahead(lambda: [logits(model, ids, way) for way in SIZES], monkeypatch)
    for way in SIZES:
        got = logits(model, ids, way)
        wanted = logits(model, ids, way, backend="reference")
        assert relative_error(got, wanted) < {"bf16": 6e-3, "fp8": 1.6e-2}[projection], way
        assert relative_error(got, eager) < {"bf16": 0.03, "fp8": 0.04}[projection], way
