"""Gemma 2 in transformers, a tiny seeded model: our soft caps against its eager attention in fp32."""

import torch
from helpers.engine_models import VOCABULARY, make_model

from warpspec.engines import transformers as engine


def test_soft_caps_of_gemma2():
    """Logits of the model, prompt and tokens after it from a cache; the cap moves them by far more than the error."""
    engine.register("warpspec_gemma2", backend="reference")
    model = make_model("gemma2", torch.float32)
    tokens = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))

    def logits(implementation, cap=2.0):
        model.set_attn_implementation(implementation)
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = cap
        with torch.no_grad():
            first = model(tokens[:, :30], use_cache=True)
            rest = model(tokens[:, 30:], past_key_values=first.past_key_values)
        return torch.cat([first.logits, rest.logits], dim=1)

    expected, uncapped = logits("eager"), logits("eager", cap=None)
    model.bfloat16()
    got = logits("warpspec_gemma2").float()
    own = logits("eager").float()
    error, bar = (got - expected).norm(), (own - expected).norm()
    assert error <= 1.25 * bar
    assert (uncapped - expected).norm() > 5 * bar
