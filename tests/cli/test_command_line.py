"""``python -m warpspec``, as users call it."""

import argparse
import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from warpspec import fmha, sim
from warpspec.aot.models import MODELS
from warpspec.cli import bench, cases, simulate, validate
from warpspec.cli.case import Case
from warpspec.cli.main import COMMANDS, main
from warpspec.cli.options import SMALL as DEFAULTS

SHAPE = ("--queries", "16", "--keys", "32", "--heads", "1")
SMALL = ("simulate", "attention", *SHAPE)


def call(*arguments):
    return subprocess.run([sys.executable, "-m", "warpspec", *arguments], capture_output=True, text=True)


def test_simulate(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv(sim.CHECK_VARIABLE, "")  # put back afterwards
    timeline = tmp_path / "trace.json"
    shape = ("--rows", "2", "--columns", "64", "--arch", "sm_90a")
    assert simulate.main(["softmax", *shape, "--check", "order", "--timeline", str(timeline)]) == 0
    out = capsys.readouterr().out
    assert "against FP32, tolerance" in out and ": ok" in out
    assert json.loads(timeline.read_text())


def test_reader_that_leaves(monkeypatch):
    """``python -m warpspec compile --list | head -0`` ends as SIGPIPE would end it, without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(["compile", "--list"]) == 141


@pytest.mark.long
@pytest.mark.parametrize("arch", simulate.ARCHITECTURES)
def test_simulate_attention(arch, tmp_path):
    timeline = tmp_path / "trace.json"
    done = call(*SMALL, "--arch", arch, "--check", "order", "--timeline", str(timeline))
    assert done.returncode == 0, done.stderr
    assert "tolerance 4.0e-03: ok" in done.stdout
    assert float(done.stdout.split("error ")[1].split()[0]) < 4e-3
    assert json.loads(timeline.read_text())


@pytest.mark.long
@pytest.mark.parametrize("arch", simulate.ARCHITECTURES)
@pytest.mark.parametrize(
    "operator, options",
    [
        ("mla", ()),
        ("mla", ("--kv-dtype", "e4m3")),
        ("gathered", ()),
        ("gathered", ("--row-format", "v3.2-fp8")),
        ("attention", ("--kv-dtype", "e5m2", "--queries", "1")),
    ],
)
def test_caches_of_engines(arch, operator, options, capsys):
    """Operators over paged, gathered and FP8 keys: results, then the time of their kernels."""
    shape = ("--batch", "2", "--queries", "1", "--keys", "70", "--heads", "8", "--arch", arch)
    assert simulate.main([operator, *shape, *options]) == 0
    assert ": ok" in capsys.readouterr().out
    chip = {"sm_90a": "h200", "sm_100a": "b200"}[arch]
    assert simulate.main([operator, *shape, *options, "--clocks", chip, "--sample", "1"]) == 0
    assert "predicted, not measured" in capsys.readouterr().out


def test_a_wrong_result_is_a_failure(monkeypatch, capsys):
    """simulate and validate compare with the definition, so results that are 1% off end with status 1."""
    right = cases.OPERATORS["softmax"]

    def one_percent_off(options, device):
        case = right(options, device)
        return Case(case.title, lambda _: [case.expected()[0] * 1.01], case.expected, None, case.tolerance)

    monkeypatch.setitem(cases.OPERATORS, "softmax", one_percent_off)
    monkeypatch.setattr("warpspec.sim.last_report", lambda: "report")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert simulate.main(["softmax"]) == 1
    assert validate.main(["softmax"]) == 1
    assert capsys.readouterr().out.count("FAILED") == 2


def test_validate_reports_what_was_compared(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert validate.main(["softmax", "--columns", "64", "--rows", "2", "--dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "softmax 2 x 64 fp32" in out and "allowed" in out and "1 of 1 passed" in out


def test_a_failing_case_does_not_hide_the_others(monkeypatch, capsys):
    def fails(backend):
        raise RuntimeError("no such wait")

    case = Case("broken", fails, lambda: [], None, 0.0)
    assert not validate.compare(lambda: case, "sim", torch.bfloat16)
    assert "FAILED  broken: RuntimeError: no such wait" in capsys.readouterr().out


@pytest.mark.parametrize("queries, keys", [(8, 8), (1, 9), (5, 9)])
@pytest.mark.parametrize("window", [None, 3])
def test_torch_computes_the_same(queries, keys, window):
    """What times and errors are compared with sees the same keys as the definition."""
    sizes = DEFAULTS | {"queries": queries, "keys": keys, "window": window}
    options = argparse.Namespace(**sizes, causal=True, dtype="bf16", seed=0, kv_dtype=None)
    case = cases.attention_case(options, "cpu")
    assert case.error(case.torchs(), case.expected()) < case.tolerance
    pairs = int(cases.seen_keys(options, "cpu").sum())
    assert case.flops == 4 * options.heads * options.head_dim * pairs


@pytest.mark.parametrize("name", MODELS)
def test_a_models_cases_have_what_its_layers_have(name, monkeypatch):
    """The reference computes them all, with the windows, caps, sinks, images and head sizes of the model."""
    model, calls, attention = MODELS[name], [], fmha.attention

    def recorded(q, k, v, **options):
        calls.append((q, k, v, options))
        return attention(q, k, v, **options)

    monkeypatch.setattr(fmha, "attention", recorded)
    sizes = DEFAULTS | {"queries": 9, "keys": 60}
    options = argparse.Namespace(**sizes, dtype="bf16", seed=0, kv_dtype=None, row_format="v4-fp8")
    made = [make() for make in validate.problems_of(model, options, "cpu")]
    for case in made:
        assert case.error(case.run("reference"), case.expected()) < case.tolerance
    if model.shared_kv and model.v_dim:  # latent rows
        (case,) = made
        assert case.title.startswith("gathered" if model.selected else "MLA") and not calls
        return
    assert len(made) == 2 * len(model.layers) and len(calls) == 2 * len(made)
    for number, (q, k, v, options) in enumerate(calls):
        layer = model.layers[number // 4]
        assert (q.shape[2:], k.shape[2]) == ((model.heads_q, model.head_dim), model.heads_kv)
        assert (v is None) == model.shared_kv and (v is None or v.shape[3] == (model.v_dim or model.head_dim))
        assert all((options.get(key) or None) == layer.get(key) for key in ("window", "softcap"))
        assert (options["ranges"] is not None) == model.images
    images = [options["ranges"] for *_, options in calls if model.images]
    assert not images or any((ranges >= 0).any() for ranges in images)
    assert any(options.get("sink") is not None for *_, options in calls) == model.sink


def test_errors():
    case = Case("", None, None, None, 1.0, by_head=True)
    right = torch.ones(2, 3, 4)
    off = right.clone()
    off[:, 1] += 0.1
    assert case.error([off], [right]) == pytest.approx(0.1)
    assert not case.error([off.fill_(torch.nan)], [right]) <= 1e9
    assert case.error([torch.tensor([1])], [torch.tensor([2])]) == float("inf")
    assert case.allowed(0.01, torch.bfloat16) == pytest.approx(0.0125)  # less than the tolerance of 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*SMALL, "--head-dim", "65"), "65"),
        (("simulate", "attention", "--dtype", "fp32"), "--dtype"),
        (("validate", "softmax", "--model", "gpt-oss-20b"), "--model"),
        (("bench", "topk", "--seed", "-1"), "--seed"),
        (("simulate", "attention", "--causal", "--queries", "9", "--keys", "5"), "--queries"),
        (("simulate", "mla", "--kv-dtype", "e5m2"), "mla takes e4m3"),
        (("simulate", "gradients", "--kv-dtype", "e4m3"), "gradients takes none"),
        (("simulate", "gathered", "--dtype", "fp16"), "gathered take bf16"),
        (("simulate", "softmax", "--causal"), "--causal: has no effect here; softmax takes --columns"),
        (("validate", "mla", "--kv-heads", "7"), "--kv-heads 7"),
        (("compile", "--model", "llama-3-8b", "--ranks", "0"), "--ranks: must be an integer from 1"),
        (("compile", "--model", "llama-3-8b", "--cache", "/proc/x"), "--cache: kernels cannot be kept in"),
        (("validate", "--model", "gpt-oss-20b", "--window", "9"), "--window 9"),
        (("validate", "--dtype", "fp16"), "fp16: experts and gathered take bf16"),
        ((*SMALL, "--sample", "2"), "--clocks"),
        (("simulate", "softmax", "--rows", "2000000000", "--columns", "1000000000"), "memory"),
        ((*SMALL, "--batch", "one"), "an integer from 1 to 2147483647, got one"),
    ],
)
def test_what_cannot_be_computed_is_refused(arguments, message, capsys):
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_bench_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["softmax"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"python -m warpspec {command} " in capsys.readouterr().out


def test_compile_has_the_options_of_aot(capsys):
    assert main(["compile", "--list"]) == 0
    assert "gpt-oss-120b" in capsys.readouterr().out
