"""The Python examples of README.md and sim/README.md that need a GPU."""

import pytest
from readme import examples

pytestmark = pytest.mark.gpu
ON_GPU = [example for example in examples() if example.needs_gpu]


@pytest.mark.parametrize("example", ON_GPU, ids=lambda example: example.id)
def test_example_runs(example, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example.run(tmp_path)
