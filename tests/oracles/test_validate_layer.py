"""scripts/validate_layer.py as a user runs it: exit status, JSON, picture, checkpoints."""

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
import validate_layer
from helpers.suites import long
from safetensors.torch import save_file
from shared import attention_layer, deepseek_v4_layer, gpt_oss_layer, latent_layer
from shared.devices import device_of
from transformers import AttentionInterface

from warpspec.latent import cache, gathered, indexer, projection

SCRIPT = Path(validate_layer.__file__)
PNG_SIGNATURE = b"\x89PNG"


def test_json_and_plot(monkeypatch, capsys, tmp_path):
    picture = tmp_path / "new folder" / "error.png"
    sizes = ("--model", "gpt-oss-120b", "--seq", 40, "--batch", 2)
    assert main(monkeypatch, *sizes, "--json", "--plot", picture) == 0
    done = capsys.readouterr()
    result = json.loads(done.out)
    assert result["passed"] is True
    assert [layer["kind"] for layer in result["layers"]] == ["sliding_attention", "full_attention"]
    for layer in result["layers"]:
        assert layer["query_shape"] == [2, 64, 40, 64]
        assert len(layer["error_by_head"]) == 64
        assert 0 < max(layer["error_by_head"]) < 4e-3
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    assert "sliding_attention" in done.err  # the readable form goes elsewhere


def test_decode_reads_the_cache():
    """One query; the sliding layer's cache holds its window, the full layer's everything."""
    sliding, full = validated("--seq", 200, "--decode")
    assert (sliding.query_shape[2], sliding.keys) == (1, 128)
    assert (full.query_shape[2], full.keys) == (1, 201)
    assert sliding.passed and full.passed


def validated(*arguments) -> list:
    """Results of the command line, with the reference as the kernel."""
    options = validate_layer.parser().parse_args(["--backend", "reference", *map(str, arguments)])
    return validate_layer.run(options, validate_layer.Console(quiet=True))


@pytest.mark.parametrize(
    "decode", [pytest.param(False, id="prefill", marks=pytest.mark.long), pytest.param(True, id="decode")]
)
def test_llama(decode):
    (layer,) = validated("--model", "llama-3-8b", "--seq", 40, *["--decode"] * decode)
    assert layer.query_shape == (1, 32, 1 if decode else 40, 128)
    assert (layer.kv_heads, layer.keys) == (8, 40 + decode)
    assert layer.passed


@pytest.mark.parametrize("published", [False, long(True)])
def test_deepseek_decode(request, published):
    """After 131 cached tokens there are window keys and compressed ones."""
    if not published:
        request.getfixturevalue("small_deepseek")
    results = validated("--model", "deepseek-v4-flash", "--seq", 131, "--decode")
    found = {
        layer.kind: [(s.start, s.end, s.window, s.key_stride) for s in layer.key_sets] for layer in results
    }
    window = (0, 128, 128, 1)
    assert found == {
        "sliding": [window],
        "csa": [window, (128, 128 + 33, None, 4)],
        "hca": [window, (128, 128 + 1, None, 128)],
    }
    for layer in results:
        assert layer.query_shape == (1, 64 if published else 8, 1, 512)
        assert layer.references_worst < 1e-5
        assert layer.passed


@pytest.mark.long
def test_deepseek_cache():
    """The serving path at published shapes: bf16 rows are nearer eager's than FP8 rows; each kind of layer."""
    exact, quantised = (
        validated("--model", "deepseek-v4-flash", "--cache", rows, "--seq", 20) for rows in ("bf16", "fp8")
    )
    assert [layer.kind for layer in exact] == ["sliding", "csa", "hca"]
    for a, b in zip(exact, quantised, strict=True):
        assert a.passed and b.passed and 2 * a.eager_error < b.eager_error


def test_devices(monkeypatch):
    """ "auto" is the GPU where there is one, the simulator's tensors are the CPU's."""
    for there, wanted in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)  # noqa: B023
        assert [device_of(name) for name in ("auto", "sm90", "sim", "reference")] == [wanted] * 2 + [
            "cpu"
        ] * 2


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sliding", "csa", "hca"])
def test_serving_path_stays_on_its_device(monkeypatch, kind):
    """On torch's meta device, which computes nothing: a tensor of the CPU among its operands would raise."""
    for module in (indexer.ops, cache.ops, gathered.ops, projection.ops):
        monkeypatch.setattr(module, "watched", lambda *tensors: True)
    config, layer = latent_layer.make_layer("deepseek-v4-flash", kind, 0, "meta")
    for rows in ("fp8", "bf16"):
        latent_layer.attach(layer, rows)
        options = dict(batch=2, max_tokens=300, device="meta", **latent_layer.FORMATS[rows])
        hidden = torch.empty(2, 300, config.hidden_size, device="meta")
        own = latent_layer.DeepseekV4Cache(config, **options)
        assert latent_layer.layer_output(config, layer, hidden, own).shape == hidden.shape


@pytest.mark.long
def test_deepseek_pro():
    (layer,) = validated("--model", "deepseek-v4-pro", "--kind", "csa", "--seq", 12)
    assert layer.query_shape == (1, 128, 12, 512)
    assert layer.passed


@pytest.fixture
def small_deepseek(monkeypatch):
    """The name of a published model at a fraction of its size; its indexer selects 8 compressed keys."""

    small = dict(hidden_size=64, num_attention_heads=8, q_lora_rank=32, o_groups=2, index_topk=8)
    monkeypatch.setitem(deepseek_v4_layer.MODELS, "deepseek-v4-flash", small)
    return "deepseek-v4-flash"


def compressed_case(seq, way, decode):
    """By default a way has more entries than the indexer selects in prefill alone, or in decoding alone."""
    marks = pytest.mark.long if seq == 150 and decode == (way == "key-sets") else ()
    return pytest.param(seq, way, decode, marks=marks, id=f"{seq}-{way}-{'decode' if decode else 'prefill'}")


COMPRESSED = itertools.product([3, 20, 150], ["key-sets", "bias"], [False, True])


@pytest.mark.parametrize(("seq", "way", "decode"), [compressed_case(*case) for case in COMPRESSED])
def test_compressed_keys(small_deepseek, seq, way, decode):
    """None, all of them seen, more than the indexer selects: as a set of their own and under the mask."""
    options = ("--model", small_deepseek, "--batch", 2, "--seq", seq, "--compressed", way)
    results = validated(*options, *["--decode"] * decode)
    assert [layer.kind for layer in results] == ["sliding", "csa", "hca"]
    for layer in results:
        assert layer.references_worst < 1e-5  # the key sets say what transformers' mask says
        assert layer.passed
    _, csa, _ = results
    masked = [keys.masked for keys in csa.key_sets]
    if seq == 150:
        assert masked == ([True] if way == "bias" else [False, True])
    elif seq == 20:
        assert masked == ([True] if way == "bias" else [False, False])
    else:
        assert len(masked) == 1 + (decode and way == "key-sets")


@pytest.mark.parametrize("kind", ["sliding", "csa", "hca"])
def test_deepseek_output_is_the_layers(small_deepseek, kind):
    """What `project` makes of the attention's result is what transformers' layer returns."""

    layer = deepseek_v4_layer.attention_layer(small_deepseek, kind)
    generator = torch.Generator().manual_seed(0)
    attention_layer.seed_weights(layer, generator)
    kept = []

    def keep(module, query, *operands, **arguments):
        kept.append(torch.randn(query.transpose(1, 2).shape, generator=generator))
        return kept[0], None

    AttentionInterface.register(attention_layer.CAPTURE, keep)
    layer.config._attn_implementation = attention_layer.CAPTURE
    hidden, positions = torch.randn(1, 9, 64, generator=generator), torch.arange(9)[None]
    embeddings = layer.rotary(hidden, positions)
    with torch.no_grad():
        output, _ = layer.attention(hidden, embeddings, positions, attention_mask=None)
        assert validate_layer.relative_error(layer.project(kept[0], positions), output) < 1e-5


def main(monkeypatch, *arguments) -> int:
    """Exit status of the command line."""
    monkeypatch.setattr(sys, "argv", ["validate_layer.py", "--backend", "reference", *map(str, arguments)])
    return validate_layer.main()


@pytest.mark.parametrize("damage", ["one head", "lse", "nan"])
def test_wrong_results_fail(monkeypatch, damage):
    run_kernel = validate_layer.run_kernel

    def damaged(inputs, backend):
        o, lse, seconds, reports = run_kernel(inputs, backend)
        if damage == "one head":
            o[:, :, 17] *= 1.01
        elif damage == "lse":
            lse[0, 3, 5] += 2e-3
        else:
            o[0, 0, 21, 0] = float("nan")
        return o, lse, seconds, reports

    monkeypatch.setattr(validate_layer, "run_kernel", damaged)
    assert main(monkeypatch, "--seq", "24") == 1


@pytest.mark.parametrize("layout", ["file", long("folder"), "sharded"])
def test_checkpoint_is_what_runs(tmp_path, layout):
    """Weights that were saved and loaded give the operands they gave before."""

    def layer_of(kind):
        return gpt_oss_layer.attention_layer("gpt-oss-20b", kind)

    options = dict(batch=1, seq=16, decode=False, seed=3)
    tensors, seeded = {}, {}
    for kind, index in gpt_oss_layer.LAYERS.items():
        seeded[kind] = attention_layer.attention_inputs(layer_of(kind), **options, checkpoint=None)
        layer, scope = seeded[kind].layer, f"model.layers.{index}."
        tensors |= {f"{scope}self_attn.{name}": value for name, value in layer.attention.state_dict().items()}
        tensors[f"{scope}input_layernorm.weight"] = layer.norm.weight.detach()

    checkpoint = write_checkpoint(tmp_path, tensors, layout)
    for kind, index in gpt_oss_layer.LAYERS.items():
        loaded = attention_layer.attention_inputs(layer_of(kind), **options, checkpoint=checkpoint)
        assert torch.equal(loaded.sinks, tensors[f"model.layers.{index}.self_attn.sinks"])
        for name, value in loaded.layer.attention.state_dict().items():
            assert torch.equal(value, tensors[f"model.layers.{index}.self_attn.{name}"])


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


def test_missing_checkpoint_and_tensor_are_named(monkeypatch, capsys, tmp_path):
    assert main(monkeypatch, "--checkpoint", tmp_path / "nowhere.safetensors") == 2
    assert "nowhere.safetensors" in capsys.readouterr().out
    save_file({"other": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert main(monkeypatch, "--checkpoint", tmp_path) == 2
    assert "model.layers.0.self_attn" in capsys.readouterr().out


def test_kinds_a_model_lacks_are_named(monkeypatch, capsys):
    assert main(monkeypatch, "--model", "llama-3-8b", "--kind", "csa") == 2
    assert "full_attention" in capsys.readouterr().out
