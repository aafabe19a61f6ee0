"""The part of `make demo` that runs on a Hopper GPU: the attention layers of gpt-oss through the sm_90a kernels."""

import demo
import pytest

pytestmark = pytest.mark.gpu


def test_the_layers_run_natively():
    options = demo.validate_layer.parser().parse_args(["--seq", str(demo.SEQ)])
    results = demo.run_natively(options, demo.Console())
    assert [result.kind for result in results] == ["sliding_attention", "full_attention"] * demo.has_hopper()
    assert all(result.passed and not result.reports for result in results)
