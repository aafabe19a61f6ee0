"""nano-vllm imports our functions; the module `flash_attn` of others stays what it is. (To run, it needs a GPU.)"""

import sys
from types import ModuleType

import pytest

import warpspec.engines.nano_vllm as engine
from warpspec.fmha import flash_attn

LAYER = "from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache\n"


@pytest.fixture
def nano_vllm(tmp_path, monkeypatch):
    """A package with nano-vllm's module of attention, which imports flash-attn's functions by name."""
    folder = tmp_path / "nanovllm/layers"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").touch()
    (folder / "attention.py").write_text(LAYER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
        del sys.modules[name]


@pytest.mark.parametrize("installed", [False, True])
def test_functions_are_ours(nano_vllm, monkeypatch, installed):
    other = ModuleType("flash_attn")
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    if installed:
        monkeypatch.setitem(sys.modules, "flash_attn", other)
    engine.register()
    engine.register()
    layer = sys.modules["nanovllm.layers.attention"]
    assert layer.flash_attn_varlen_func is flash_attn.flash_attn_varlen_func
    assert layer.flash_attn_with_kvcache is flash_attn.flash_attn_with_kvcache
    assert sys.modules.get("flash_attn") is (other if installed else None)


def test_without_nano_vllm(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    with pytest.raises(ModuleNotFoundError, match="nanovllm"):
        engine.register()
    assert "flash_attn" not in sys.modules
