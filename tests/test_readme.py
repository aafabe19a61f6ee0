"""README.md's Python examples run as they stand. Those that need a GPU run in tests/gpu."""

import pytest
from readme import examples
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

TINY = dict(
    vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64, num_local_experts=2, num_experts_per_tok=1,
)  # fmt: skip
ON_CPU = [example for example in examples() if not example.needs_gpu]


@pytest.fixture
def checkpoint_for_dots(monkeypatch, tmp_path):
    """``AutoModelForCausalLM.from_pretrained(...)`` loads a tiny gpt-oss."""
    from_pretrained = AutoModelForCausalLM.from_pretrained

    def load(name, *arguments, **options):
        if name is not Ellipsis:
            return from_pretrained(name, *arguments, **options)
        GptOssForCausalLM(GptOssConfig(**TINY)).save_pretrained(tmp_path / "tiny")
        return from_pretrained(tmp_path / "tiny", *arguments, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


@pytest.mark.parametrize("example", ON_CPU, ids=lambda example: example.id)
def test_example_runs(example, checkpoint_for_dots, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example.run(tmp_path)


def test_the_readme_has_examples():
    assert len(ON_CPU) >= 4
