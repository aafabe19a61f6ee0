"""Models of further families in vLLM with our attention, compared with its own: `make test-engines`."""

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.engine_models import Judge, prompts  # noqa: E402
from helpers.vllm_engine import LENGTHS, generate, same_tokens  # noqa: E402

from warpspec.engines.vllm.attention import WarpspecAttention  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """The head sizes of q and v in each call of our attention that has a batch."""
    seen, forward = [], WarpspecAttention.forward

    def counted(self, layer, query, key, value, kv_cache, batch, *rest, **named):
        if batch is not None:
            seen.append((self.head_size, self.head_size_v))
        return forward(self, layer, query, key, value, kv_cache, batch, *rest, **named)

    monkeypatch.setattr(WarpspecAttention, "forward", counted)
    return seen


@pytest.mark.parametrize(("kind", "sizes"), [("phi3", {96}), ("gemma4", {64, 512})])
def test_same_tokens_as_the_own_attention(kind, sizes, checkpoints, start_vllm, calls):
    _, folder = checkpoints(kind)
    own = generate(start_vllm(folder, own=True), prompts(LENGTHS))
    assert not calls
    ours = generate(start_vllm(folder), prompts(LENGTHS))
    assert set(calls) == {(size, size) for size in sizes}
    assert same_tokens(own, ours) >= 0.75


def test_values_of_another_head_size(checkpoints, start_vllm, calls):
    """MiMo-V2-Flash. (vLLM's own attention with two head sizes needs a GPU.)"""
    model, folder = checkpoints("mimo_v2_flash")
    llm = start_vllm(folder, attention_config={"backend": "WARPSPEC_DIFFKV"})
    Judge(model).check(generate(llm, prompts(LENGTHS)))
    assert set(calls) == {(192, 128)}
