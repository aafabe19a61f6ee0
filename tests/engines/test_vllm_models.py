"""Models of further families in vLLM with our attention, compared with its own: `make test-engines`."""

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

from helpers.engine_flags import flags_of  # noqa: E402
from helpers.engine_models import CONFIGS, SIZES_CONFIGS, Judge, check_as_own, prompts  # noqa: E402
from helpers.vllm_engine import LENGTHS, generate, note_launches  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

import warpspec.engines.vllm as engine  # noqa: E402
from warpspec.common.launch import simulating  # noqa: E402
from warpspec.engines.vllm import attention  # noqa: E402
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
    model, folder = checkpoints(kind)
    own = generate(start_vllm(folder, own=True), prompts(LENGTHS))
    assert not calls
    ours = generate(start_vllm(folder), prompts(LENGTHS))
    assert set(calls) == {(size, size) for size in sizes}
    check_as_own(model, own, ours)


def test_values_of_another_head_size(checkpoints, start_vllm, calls):
    """MiMo-V2-Flash. (vLLM's own attention with two head sizes needs a GPU.)"""
    model, folder = checkpoints("mimo_v2_flash")
    llm = start_vllm(folder, attention_config={"backend": "WARPSPEC_DIFFKV"})
    Judge(model).check(generate(llm, prompts(LENGTHS)))
    assert set(calls) == {(192, 128)}


@pytest.mark.long
@pytest.mark.parametrize("kind", CONFIGS | SIZES_CONFIGS)
def test_simulated_kernels(kind, checkpoints, start_vllm, monkeypatch):
    """Kernels of sm_90a, of which each call of our attention launches some, are as exact as the reference."""
    model, folder = checkpoints(kind)
    own = {"attention_config": {"backend": "WARPSPEC_DIFFKV"}} if kind == "mimo_v2_flash" else {}
    reference = generate(start_vllm(folder, **own), prompts((40, 7)), tokens=2)
    launched = note_launches(monkeypatch, attention, "attention_varlen")
    with simulating("sm_90a", sm_count=2):
        results = generate(start_vllm(folder, backend="sim", **own), prompts((40, 7)), tokens=2)
    assert launched and all(launched)
    check_as_own(model, reference, results)


# What docs/engines.md says that each backend supports. On a CPU vLLM does not ask.
OF_HEADS = dict(use_mla=False, has_sink=True, use_sparse=False, use_mm_prefix=True, has_sliding_window=True)
LATENT = dict(use_mla=True, has_sink=False, use_mm_prefix=False, head_size=576)
SUPPORTED = [
    ("WARPSPEC", OF_HEADS | dict(head_size=96, kv_cache_dtype="auto", use_per_head_quant_scales=False)),
    ("WARPSPEC", OF_HEADS | dict(head_size=128, kv_cache_dtype="fp8", use_per_head_quant_scales=True)),
    (
        "WARPSPEC_DIFFKV",
        OF_HEADS | dict(head_size=192, kv_cache_dtype="auto", use_per_head_quant_scales=False),
    ),
    ("WARPSPEC_MLA", LATENT | dict(kv_cache_dtype="fp8", use_sparse=False, use_per_head_quant_scales=False)),
    (
        "WARPSPEC_MLA_SPARSE",
        LATENT | dict(kv_cache_dtype="fp8_ds_mla", use_sparse=True, use_per_head_quant_scales=False),
    ),
]


@pytest.mark.parametrize(("name", "settings"), SUPPORTED)
def test_what_vllm_asks_on_a_gpu(name, settings):
    """Hopper and Blackwell get no reason against it; an A100 and other attention do."""
    engine.register()
    backend = AttentionBackendEnum[name].get_class()
    settings = settings | dict(dtype=torch.bfloat16, block_size=64, attn_type="decoder")

    def reasons(capability=(9, 0), **others):
        return backend.validate_configuration(
            device_capability=DeviceCapability(*capability), **settings | others
        )

    assert reasons() == reasons((10, 0)) == []
    assert reasons((8, 0)) == ["compute capability not supported"]
    assert reasons(use_mla=not settings["use_mla"]) in (["MLA not supported"], ["non-MLA not supported"])
    trimmed = reasons(use_adaptive_verification=True)
    assert len(trimmed) == (name == "WARPSPEC_MLA")


def test_flags_that_users_are_told(checkpoints):
    """vLLM's command takes those of docs/engines.md."""
    engine.register()
    _, folder = checkpoints("phi3")
    named = []
    for flags in flags_of("vllm serve"):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        config = EngineArgs.from_cli_args(
            parser.parse_args(["--model", str(folder), *flags])
        ).create_engine_config()
        named.append(config.attention_config.backend.name)
    assert set(named) == set(engine.PATHS)
