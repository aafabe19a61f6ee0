"""Families of models in transformers on a GPU, native kernels: logits, gradients, torch.compile and CUDA graphs."""

import pytest
import torch
from helpers.family_models import MODELS, check_logits_and_gradients, inputs_of, is_known, seeded
from helpers.model_pairs import relative_error

from warpspec.engines import transformers as engine

pytestmark = pytest.mark.gpu
NAME = "warpspec_families"
KINDS = [kind for kind in MODELS if is_known(kind)]


@pytest.fixture(autouse=True)
def _registered():
    engine.register(NAME)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients(kind):
    check_logits_and_gradients(kind, NAME, "cuda")


@pytest.mark.parametrize("kind", sorted({"gemma2", "mimo_v2_flash", "phi3", "deepseek_v3"} & {*KINDS}))
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(kind, mode):
    """torch.compile says what the model says, in CUDA graphs too: three prompts, one after another."""
    torch._dynamo.reset()
    model = seeded(kind).cuda().bfloat16().eval()
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, mode=mode)
    ids = inputs_of(kind)["input_ids"].cuda()
    with torch.no_grad():
        for shift in range(3):
            rolled = ids.roll(shift, dims=1)
            wanted = model(rolled, use_cache=False).logits
            got = compiled(rolled, use_cache=False).logits.clone()
            assert relative_error(got, wanted.float()) < 2e-2
