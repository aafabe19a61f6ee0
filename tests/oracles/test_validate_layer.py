"""scripts/validate_layer.py as a user runs it: exit status, JSON, picture, checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SCRIPT = SCRIPTS / "validate_layer.py"
PNG_SIGNATURE = b"\x89PNG"


@pytest.fixture
def scripts(monkeypatch):
    """The script as a module, as `python scripts/validate_layer.py` would find its neighbours."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import validate_layer

    return validate_layer


def test_json_and_plot(tmp_path):
    picture = tmp_path / "new folder" / "error.png"
    command = [sys.executable, SCRIPT, "--backend", "reference", "--model", "gpt-oss-120b"]
    command += ["--seq", "140", "--batch", "2", "--json", "--plot", picture]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"] is True
    assert [layer["kind"] for layer in result["layers"]] == ["sliding_attention", "full_attention"]
    for layer in result["layers"]:
        assert layer["query_shape"] == [2, 64, 140, 64]
        assert len(layer["error_by_head"]) == 64
        assert 0 < max(layer["error_by_head"]) < 4e-3
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    assert "sliding_attention" in done.stderr  # the readable form goes elsewhere


def test_decode_reads_the_cache(scripts):
    """One query; the sliding layer's cache holds its window, the full layer's everything."""
    options = scripts.parser().parse_args(["--backend", "reference", "--seq", "200", "--decode"])
    sliding, full = scripts.run(options, scripts.Console(quiet=True))
    assert (sliding.query_shape[2], sliding.keys) == (1, 128)
    assert (full.query_shape[2], full.keys) == (1, 201)
    assert sliding.passed and full.passed


def main(scripts, monkeypatch, *arguments) -> int:
    """Exit status of the command line."""
    monkeypatch.setattr(sys, "argv", ["validate_layer.py", "--backend", "reference", *map(str, arguments)])
    return scripts.main()


@pytest.mark.parametrize("damage", ["one head", "lse", "nan"])
def test_wrong_results_fail(scripts, monkeypatch, damage):
    run_kernel = scripts.run_kernel

    def damaged(inputs, backend):
        o, lse, seconds, report = run_kernel(inputs, backend)
        if damage == "one head":
            o[:, :, 17] *= 1.01
        elif damage == "lse":
            lse[0, 3, 5] += 2e-3
        else:
            o[0, 0, 21, 0] = float("nan")
        return o, lse, seconds, report

    monkeypatch.setattr(scripts, "run_kernel", damaged)
    assert main(scripts, monkeypatch, "--seq", "64") == 1


@pytest.mark.parametrize("layout", ["file", "folder", "sharded"])
def test_checkpoint_is_what_runs(scripts, tmp_path, layout):
    """Weights that were saved and loaded give the operands they gave before."""
    import gpt_oss_layer

    tensors, seeded = {}, gpt_oss_layer._seed_weights

    def keep(layer, config, generator):
        seeded(layer, config, generator)
        scope = f"model.layers.{layer.layer_idx}."
        tensors.update({f"{scope}self_attn.{name}": value for name, value in layer.state_dict().items()})
        tensors[f"{scope}input_layernorm.weight"] = torch.ones(config.hidden_size)

    options = dict(batch=1, seq=16, decode=False, seed=3)
    gpt_oss_layer._seed_weights = keep
    try:
        for kind in gpt_oss_layer.LAYERS:
            gpt_oss_layer.attention_inputs("gpt-oss-20b", kind, **options, checkpoint=None)
    finally:
        gpt_oss_layer._seed_weights = seeded

    checkpoint = write_checkpoint(tmp_path, tensors, layout)
    for kind in gpt_oss_layer.LAYERS:
        loaded = gpt_oss_layer.attention_inputs("gpt-oss-20b", kind, **options, checkpoint=checkpoint)
        projection = tensors[f"model.layers.{gpt_oss_layer.LAYERS[kind]}.self_attn.o_proj.weight"]
        assert torch.equal(loaded.output_projection.weight, projection.bfloat16())
        assert torch.equal(
            loaded.sinks, tensors[f"model.layers.{gpt_oss_layer.LAYERS[kind]}.self_attn.sinks"].bfloat16()
        )


def write_checkpoint(folder: Path, tensors: dict, layout: str) -> Path:
    """A .safetensors file, a folder with one, or one with a shard for each layer and an index."""
    if layout == "file":
        save_file(tensors, folder / "layers.safetensors")
        return folder / "layers.safetensors"
    if layout == "folder":
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{name.split('.')[2]}.safetensors" for name in tensors}
    for shard in set(weight_map.values()):
        save_file(
            {name: value for name, value in tensors.items() if weight_map[name] == shard}, folder / shard
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_missing_checkpoint_and_tensor_are_named(scripts, monkeypatch, capsys, tmp_path):
    assert main(scripts, monkeypatch, "--checkpoint", tmp_path / "nowhere.safetensors") == 2
    assert "nowhere.safetensors" in capsys.readouterr().out
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert main(scripts, monkeypatch, "--checkpoint", tmp_path) == 2
    assert "model.layers.0.self_attn" in capsys.readouterr().out
