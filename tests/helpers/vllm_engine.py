"""vLLM's engine on a CPU with our attention: for tests of several files. Importing this sets vLLM's environment."""

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import gc
from contextlib import contextmanager

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: make test-engines")

import warpspec.engines.vllm as engine  # noqa: E402
from warpspec import sim  # noqa: E402

# Longer and shorter than the windows, one token, several blocks; two begin alike for longer than a block.
LENGTHS = (70, 5, 1, 40)
GREEDY = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": 0}


def look_through_llvmlite(monkeypatch) -> None:
    """vLLM 0.32 reads vars() of all that modules hold, which is no dictionary for llvmlite's library. The simulator
    loads that, as does speculation from prompts."""
    import llvmlite.binding.ffi as ffi

    get = type(ffi.lib).__getattr__

    def plain(self, name):
        if name == "__dict__":
            raise AttributeError(name)
        return get(self, name)

    monkeypatch.setattr(type(ffi.lib), "__getattr__", plain)


def offer_latent_attention(monkeypatch, name: str) -> None:
    """Let vLLM serve latent attention on a CPU by our backend of this name, in blocks of 64 and with prompts in parts.

    Otherwise it does so only if the CPU has AMX, not over FP8 (0.33), and never with an indexer. With this it thinks
    that the CPU has AMX, but keeps the products that it has for any CPU.
    """
    import torch
    from vllm.model_executor.layers import utils
    from vllm.platforms.cpu import CpuPlatform

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)
    monkeypatch.setattr(CpuPlatform, "get_attn_backend_cls", lambda *_, **__: engine.PATHS[name])


@contextmanager
def starter(monkeypatch):
    """A function that starts an engine on a folder, with our attention unless own is set."""
    look_through_llvmlite(monkeypatch)
    engines = []

    def start(folder, own=False, backend="reference", **options):
        monkeypatch.setenv("WARPSPEC_BACKEND", backend)
        engine.restore_cpu_attention() if own else engine.replace_cpu_attention()
        defaults = {
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "num_gpu_blocks_override": 64,
            "max_model_len": 256,
            "dtype": "bfloat16",
            "block_size": 32,
            "max_num_batched_tokens": 64,  # the longest prompts come in parts, beside requests that decode
            "max_num_seqs": 8,
            "disable_log_stats": True,
        }
        engines.append(vllm.LLM(str(folder), **defaults | options))
        return engines[-1]

    yield start
    engines.clear()
    gc.collect()
    engine.restore_cpu_attention()


def generate(llm, inputs, tokens=6):
    """[(prompt, generated tokens, their log-probabilities)]"""
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in inputs],
        vllm.SamplingParams(max_tokens=tokens, **GREEDY),
        use_tqdm=False,
    )
    return [results_of(ids, output) for ids, output in zip(inputs, outputs, strict=True)]


def results_of(ids, output):
    (completion,) = output.outputs
    tokens = list(completion.token_ids)
    said = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
    return ids, tokens, said


def note_launches(monkeypatch, module, *names: str) -> list[bool]:
    """Whether each call of a module's functions launched kernels in the simulator."""
    launched = []

    def noted(function):
        def call(*arguments, **named):
            before = sim.last_report()
            result = function(*arguments, **named)
            launched.append(sim.last_report() is not before)
            return result

        return call

    for name in names:
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    return launched
