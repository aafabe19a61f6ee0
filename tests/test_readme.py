"""The Python examples of README.md and sim/README.md run as they stand; those that need a GPU run in tests/gpu."""

import pytest
from readme import examples, examples_of

ON_CPU = [example for example in examples() if not example.needs_gpu]


@pytest.mark.parametrize("example", ON_CPU, ids=lambda example: example.id)
def test_example_runs(example, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example.run(tmp_path)


def test_examples_are_found(tmp_path):
    text = "```python gpu\nx = 1\n```\n\n```python\n\n1 / 0\n```\n```\nno code\n```\n"
    on_gpu, raising = examples_of("a.md", text)
    assert (on_gpu.line, on_gpu.needs_gpu, on_gpu.run(tmp_path)["x"]) == (2, True, 1)
    assert (raising.line, raising.needs_gpu) == (6, False)
    with pytest.raises(ZeroDivisionError):
        raising.run(tmp_path)
    with pytest.raises(ValueError, match=r"a\.md:2.*gpus"):
        examples_of("a.md", "```python gpus\n```\n")
    assert len(ON_CPU) >= 4
