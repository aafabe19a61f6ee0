"""Kernels compiled ahead are those that a model's calls ask for."""

import random
from dataclasses import replace

import pytest
import torch
from helpers.suites import long

from warpspec.aot import __main__ as aot
from warpspec.aot.models import CALLS, MODELS, NEAR, PAGED, Sizes, kernels, problem, problems
from warpspec.common import compile
from warpspec.common.disk_cache import CACHE_VARIABLE
from warpspec.common.hardware import GPUS
from warpspec.common.launch import SIMULATED
from warpspec.fmha import launch
from warpspec.fmha.combine import COMBINE, CombineConfig
from warpspec.fmha.join import JOIN
from warpspec.fmha.problem import AttentionProblem


def native(arch):
    return replace(SIMULATED[arch], device=0)


def asked_for(found, target):
    """What ``fmha`` compiles for a call."""
    planned = launch.plan(found, target)
    yield launch.ATTENTION.of(target.architecture).ATTENTION, planned.config
    if planned.splits > 1:
        yield COMBINE, launch.combine_config(found, planned.splits)
    if planned.config.scheduler.cuts_tiles:
        yield JOIN, launch.join_config(found, planned.config)


@pytest.mark.parametrize(
    ("name", "arch", "calls"),
    [
        ("gpt-oss-120b", "sm_100a", ["packed-paged"]), ("deepseek-v4-flash", "sm_90a", ["ranges"]),
        ("gemma-2-9b", "sm_90a", ["plain"]), ("llama-3-8b", "sm_90a", ["packed-paged"]),
        *(
            long(name, arch, CALLS)
            for name in ("gpt-oss-120b", "deepseek-v4-flash", "qwen3-32b", "gemma-2-9b", "gemma-3-27b-images",
                         "deepseek-v3")
            for arch in GPUS
        ),
    ],
)  # fmt: skip
def test_calls_of_other_sizes_find_their_kernels(name, arch, calls):
    """Sizes between those that were planned ahead ask for nothing else."""
    model, target, draw = MODELS[name], native(arch), random.Random(5)
    ahead = set(kernels(problems(model, calls, [16]), target, NEAR))
    layers = [*model.layers, *({"key_stride": s, "normalize": False} for s in model.strides)]
    missing = set()
    for _ in range(300):
        seq_q = draw.choice([draw.randint(1, 8), round(2 ** draw.uniform(3, 12))])
        batch = draw.randint(1, min(256, max(32768 // seq_q, 1)))
        size = Sizes(batch, seq_q, seq_q + round(2 ** draw.uniform(0, 16)))
        layer, call = draw.choice(layers), draw.choice(calls)
        found = problem(model, layer, size, call, page_size=16 if call in PAGED else 0)
        missing |= {(size, *item) for item in asked_for(found, target) if item not in ahead}
    assert not missing


def test_a_call_with_tensors_finds_its_kernel():
    """A decoding step of gpt-oss over pages, as an engine makes it."""
    batch, pages = 3, 40
    q = torch.zeros(batch, 1, 64, 64, dtype=torch.bfloat16)
    k = torch.zeros(batch * pages, 16, 8, 64, dtype=torch.bfloat16)
    found = AttentionProblem.of(
        q,
        k,
        k.clone(),
        causal=True,
        window=(127, 0),
        sink=torch.zeros(64, dtype=torch.bfloat16),
        kv_lengths=torch.full((batch,), 600, dtype=torch.int32),
        page_table=torch.arange(batch * pages, dtype=torch.int32).reshape(batch, pages),
    )
    target = native("sm_90a")
    ahead = kernels(problems(MODELS["gpt-oss-20b"], ["paged"], [16]), target)
    assert all(item in ahead for item in asked_for(found, target))


def test_what_is_compiled_ahead_is_not_compiled_again(monkeypatch, tmp_path, capsys):
    config = CombineConfig.of(128, 3)
    monkeypatch.setattr(aot, "kernels", lambda problems, target, margin: [(COMBINE, config)])
    monkeypatch.setenv(CACHE_VARIABLE, "")  # put back afterwards
    assert aot.main(["--model", "llama-3-8b", "--jobs", "1", "--cache", str(tmp_path)]) == 0
    assert "1/1" in capsys.readouterr().out
    monkeypatch.setattr(compile, "_compiled", {})
    monkeypatch.setattr(compile, "compile_host", None)
    assert COMBINE.compiled(config, "sm_90a", native=True).artifacts.PTX


def test_the_command_says_what_it_wants(monkeypatch, capsys):
    assert aot.main(["--list"]) == 0
    assert {"gpt-oss-120b", "qwen3-8b"} <= set(capsys.readouterr().out.split())
    assert aot.main(["--model", "llama-3-8b", "--calls", "paged", "--page-sizes", "32", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all("page_size=32" in line for line in lines if line.startswith("fmha.sm90"))
    monkeypatch.setenv(CACHE_VARIABLE, "")
    with pytest.raises(SystemExit):
        aot.main(["--model", "llama-3-8b"])
    assert "--cache: needed" in capsys.readouterr().err
