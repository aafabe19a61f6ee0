"""scripts/validate_layer.py --layer moe as a user runs it, at the models' real shapes with one or two experts."""

import json
import sys

import pytest
import torch
import validate_layer
from safetensors.torch import save_file
from shared import moe_layer


def validated(*arguments, backend="reference"):
    """The result of the command line."""
    command = ["--layer", "moe", "--backend", backend, *map(str, arguments)]
    options = validate_layer.parser().parse_args(command)
    (result,) = validate_layer.run(options, validate_layer.Console(quiet=True))
    assert result.passed, result.checks()
    return result


def test_json(monkeypatch, capsys):
    arguments = ["--layer", "moe", "--backend", "reference", "--model", "gpt-oss-120b", "--experts", "1"]
    arguments += ["--seq", "3", "--batch", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["validate_layer.py", *arguments])
    assert validate_layer.main() == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["passed"] is True and result["layer"] == "moe"
    (layer,) = result["layers"]
    assert layer["tokens"] == 6 and layer["rows_by_expert"] == [6]
    assert all(0 < error < 3e-3 for error in layer["gemm_2_error_by_expert"])
    assert "experts of gpt-oss-120b" in printed.err  # the readable form goes elsewhere


@pytest.mark.long
def test_shared_expert_and_decode():
    result = validated("--model", "deepseek-v4-flash", "--experts", 1, "--decode", "--batch", 2, "--seq", 99)
    assert (result.tokens, result.shared, result.rows) == (2, 1, [2, 2])
    assert (result.hidden, result.width) == (4096, 2048)


def test_a_wrong_kernel_fails(monkeypatch):
    """Every number that is compared can fail: a kernel that doubles its results is found out by each."""
    run_layer = moe_layer.run_layer

    def doubled(inputs, backend):
        stages, seconds, reports = run_layer(inputs, backend)
        for tensor in (stages.rows, stages.out, stages.a.row_scale):
            tensor.mul_(2)
        stages.h.scales.copy_(stages.h.scales.roll(1, -1))
        return stages, seconds, reports

    monkeypatch.setattr(moe_layer, "run_layer", doubled)
    options = validate_layer.parser().parse_args(
        ["--layer", "moe", "--backend", "reference", "--experts", "1", "--seq", "2"]
    )
    (result,) = validate_layer.run(options, validate_layer.Console(quiet=True))
    verdicts = {what: measured <= allowed for what, measured, allowed in result.checks()}
    assert verdicts.pop("tokens routed otherwise than by transformers")
    assert not any(verdicts.values()) and not result.passed


@pytest.mark.long
def test_in_the_simulator():
    result = validated("--experts", 1, "--seq", 2, backend="sim")
    assert [launch.local_bytes for launch in result.reports[0].launches] == [0] * 5
    assert max(result.first_errors) < 1e-4


def mxfp4(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(117, 121, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    return data, scale


def test_gpt_oss_checkpoint(tmp_path):
    hidden = width = 2880
    both, both_scale = mxfp4(2, 2 * width, hidden, seed=0)
    down, down_scale = mxfp4(2, hidden, width, seed=1)
    state = {
        "experts.gate_up_proj_blocks": both.unflatten(2, (-1, 16)),
        "experts.gate_up_proj_scales": both_scale,
        "experts.gate_up_proj_bias": torch.randn(2, 2 * width).bfloat16(),
        "experts.down_proj_blocks": down.unflatten(2, (-1, 16)),
        "experts.down_proj_scales": down_scale,
        "experts.down_proj_bias": torch.randn(2, hidden).bfloat16(),
        "router.weight": torch.randn(2, hidden).bfloat16() / 50,
        "router.bias": torch.tensor([40.0, 0.0]).bfloat16(),  # everyone's first choice
    }
    save_file({f"model.layers.0.mlp.{name}": t for name, t in state.items()}, tmp_path / "model.safetensors")
    result = validated("--experts", 1, "--seq", 3, "--checkpoint", tmp_path)
    assert result.rows == [3]


def test_deepseek_checkpoint(tmp_path):
    """The publisher's names: experts in MXFP4, the shared one in FP8 by blocks, a selection bias."""
    hidden, width, state = 4096, 2048, {}
    for name, shape in (("w1", (width, hidden)), ("w3", (width, hidden)), ("w2", (hidden, width))):
        data, scale = mxfp4(*shape, seed=len(state))
        state[f"experts.0.{name}.weight"] = data.view(torch.int8)
        state[f"experts.0.{name}.scale"] = scale.view(torch.float8_e8m0fnu)
        blocks = tuple(size // 128 for size in shape)
        state[f"shared_experts.{name}.weight"] = torch.randn(shape).to(torch.float8_e4m3fn)
        ones = torch.full(blocks, 121, dtype=torch.uint8)
        state[f"shared_experts.{name}.scale"] = ones.view(torch.float8_e8m0fnu)
    state["gate.weight"], state["gate.bias"] = torch.randn(1, hidden).bfloat16() / 50, torch.zeros(1)
    save_file({f"layers.3.ffn.{name}": t for name, t in state.items()}, tmp_path / "model.safetensors")
    decode = ("--decode", "--batch", 2, "--seq", 99)
    result = validated("--model", "deepseek-v4-flash", "--experts", 1, *decode, "--checkpoint", tmp_path)
    assert (result.tokens, result.shared, result.rows) == (2, 1, [2, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-3-8b"], "has no experts"),
        (["--checkpoint", "none"], "no checkpoint at"),
        (["--plot", "a.png"], "--plot"),
    ],
)
def test_what_cannot_be_run(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["validate_layer.py", "--layer", "moe", *arguments])
    try:
        status = validate_layer.main()
    except SystemExit as exit:
        status = exit.code
    printed = capsys.readouterr()
    assert status == 2 and message in printed.out + printed.err
