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
