"""Fixtures of engines' tests."""

import pytest


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function: (model, folder with its files) of a kind."""
    from helpers.engine_models import make_model, save_model

    known = {}

    def of(kind):
        if kind not in known:
            known[kind] = make_model(kind), tmp_path_factory.mktemp(kind)
            save_model(*known[kind])
        return known[kind]

    return of


@pytest.fixture
def start_vllm(monkeypatch):
    """A function that starts vLLM on a folder (``helpers.vllm_engine.starter``)."""
    from helpers.vllm_engine import starter

    with starter(monkeypatch) as start:
        yield start


@pytest.fixture
def start_sglang(monkeypatch, tmp_path):
    """A function that starts SGLang on a folder, with our attention unless another is named. In the end, each engine's
    layers must have been computed by the attention that was named, and by no other, with an architecture by its
    simulated kernels."""
    import sglang
    from helpers.sglang_batches import calls_of, note_calls

    engines = []

    def start(folder, attention="warpspec", arch="", **options):
        monkeypatch.setenv("WARPSPEC_BACKEND", "sim" if arch else "reference")
        noted = note_calls(monkeypatch, tmp_path / f"calls-{len(engines)}")
        from sglang_calls import ARCH

        monkeypatch.setenv(ARCH, arch)
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
        engines.append((sglang.Engine(**defaults | named | options), attention, arch, noted))
        return engines[-1][0]

    yield start
    for engine, *_ in engines:
        engine.shutdown()
    for _, attention, arch, noted in engines:
        calls = calls_of(noted)
        assert {name.partition(":")[2] for name in calls} == {arch}, calls
        ours = {name: name.startswith("warpspec.") for name in calls}
        assert calls and set(ours.values()) == {attention == "warpspec"}, (attention, calls)
