"""Fixtures of engines' tests."""

import pytest


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function: (model, folder with its files) of a kind."""
    from helpers.engine_models import make_model

    known = {}

    def of(kind):
        if kind not in known:
            known[kind] = make_model(kind), tmp_path_factory.mktemp(kind)
            known[kind][0].save_pretrained(known[kind][1])
        return known[kind]

    return of


@pytest.fixture
def start_vllm(monkeypatch):
    """A function that starts vLLM on a folder (``helpers.vllm_engine.starter``)."""
    from helpers.vllm_engine import starter

    with starter(monkeypatch) as start:
        yield start


@pytest.fixture
def start_sglang(monkeypatch):
    """A function that starts SGLang on a folder, with our attention unless another is named."""
    import sglang

    engines = []

    def start(folder, attention="warpspec", backend="reference", **options):
        monkeypatch.setenv("WARPSPEC_BACKEND", backend)
        defaults = {
            "device": "cpu",
            "page_size": 32,
            "disable_cuda_graph": True,
            "skip_tokenizer_init": True,
            "max_total_tokens": 2048,
            "chunked_prefill_size": 64,
            "max_running_requests": 8,
            "context_length": 256,
            "dtype": "bfloat16",
            "log_level": "error",
            "random_seed": 0,
        }
        named = {"model_path": str(folder), "attention_backend": attention}
        engines.append(sglang.Engine(**defaults | named | options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()
