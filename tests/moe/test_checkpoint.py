"""Experts from files: every form, written by the library that makes it where there is one for the CPU."""

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from helpers.moe_cases import randn
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from warpspec.common import nvfp4
from warpspec.moe import NVFP4Experts
from warpspec.moe.operands import deinterleave

LAYER = "model.layers.3.mlp.experts"
MODELOPT = Path(__file__).parent / "data" / "modelopt.safetensors"
NAMES = ("gate_proj", "up_proj", "down_proj")
HIDDEN, WIDTH = 64, 32


def matrices(layer: NVFP4Experts) -> list[torch.Tensor]:
    """gate, up, down, fp32 [E, ...]; down without the intermediate scale."""
    gate, up = deinterleave(layer.w13.dequantize())
    down = layer.w2.dequantize() / layer.intermediate_scale[:, None, None]
    return [gate[..., : layer.hidden], up[..., : layer.hidden], down[..., : layer.width]]


def check(layer, expected):
    """expected: {(expert, name): matrix}. Rounding of a product of three numbers apart, the same."""
    for name, matrix in zip(NAMES, matrices(layer), strict=True):
        for e in range(layer.w13.experts):
            torch.testing.assert_close(matrix[e], expected[e, name].float(), rtol=3e-7, atol=0)


class Expert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in zip(NAMES, ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN)), strict=True):
            setattr(self, name, torch.nn.Linear(*shape, bias=False))


def compressed_model(preset: str) -> torch.nn.Module:
    """Experts quantised, but not yet compressed, by compressed-tensors."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.experts = torch.nn.ModuleList([Expert() for _ in range(3)])
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}), show_progress=False)
    for number, linear in enumerate(m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        weight, args = linear.weight.data, linear.quantization_scheme.weights
        global_scale = None
        if hasattr(linear, "weight_global_scale"):
            global_scale = generate_gparam(weight.amin(), weight.amax())
            linear.weight_global_scale.data = global_scale
        blocks = weight.unflatten(-1, (-1, args.group_size))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale)
        linear.weight_scale.data = scale
        if hasattr(linear, "input_global_scale"):
            linear.input_global_scale.data = torch.tensor([10.0 + number])
    return model


@pytest.mark.parametrize(
    ("preset", "form"),
    [
        ("NVFP4", "nvfp4-pack-quantized"),
        ("NVFP4A16", "nvfp4-pack-quantized"),
        ("MXFP4A16", "mxfp4-pack-quantized"),
    ],
)
def test_compressed_tensors(tmp_path, preset, form):
    model = compressed_model(preset)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    state = {f"model.layers.3.mlp.{name}": tensor for name, tensor in model.state_dict().items()}
    assert f"{LAYER}.0.gate_proj.weight_packed" in state
    save_file(state, tmp_path / "model.safetensors")
    layer = NVFP4Experts.from_checkpoint(tmp_path, LAYER)

    decompress, expected = BaseCompressor.get_value_from_registry(form).decompress, {}
    for e, expert in enumerate(model.experts):
        for name in NAMES:
            linear = getattr(expert, name)
            parts = {k: v.float() if v.dtype == torch.float32 else v for k, v in linear.state_dict().items()}
            expected[e, name] = decompress(parts, linear.quantization_scheme)["weight"]
    # compressed-tensors' decompression ends in bf16; what it rounds is our result.
    for name, matrix in zip(NAMES, matrices(layer), strict=True):
        for e in range(3):
            theirs = expected[e, name]
            torch.testing.assert_close(matrix[e], theirs.float(), rtol=2**-8, atol=0)
            assert theirs.abs().sum() > 0
    if preset == "NVFP4":
        wanted = torch.tensor([1 / (10.0 + 3 * e + 2) for e in range(3)])  # of each down_proj
        torch.testing.assert_close(layer.intermediate_scale, wanted)
    else:
        assert (layer.intermediate_scale == 2.0**-4).all()


def test_our_quantiser_gives_what_compressed_tensors_gives():
    """Its global scale is the inverse of ours, rounded: a scale or a value next to a tie may fall to the other side."""
    model = compressed_model("NVFP4A16")
    weights = [
        linear.weight.data.clone() for linear in model.modules() if isinstance(linear, torch.nn.Linear)
    ]
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    theirs = [m.state_dict() for m in model.modules() if hasattr(m, "weight_packed")]
    assert len(theirs) == len(weights) == 9
    scales, codes = [], []
    for weight, state in zip(weights, theirs, strict=True):
        ours = nvfp4.quantize(weight)
        torch.testing.assert_close(ours.global_scale, 1 / state["weight_global_scale"][0])
        scales.append(ours.scale.view(torch.uint8) == state["weight_scale"].view(torch.uint8))
        codes.append(nvfp4.unpack(ours.data) == nvfp4.unpack(state["weight_packed"]))
    for same in (scales, codes):
        assert torch.cat([part.flatten() for part in same]).float().mean() > 0.998


def test_modelopt():
    """A file that nvidia-modelopt wrote (record_modelopt.py), with the numbers it dequantises to."""
    layer = NVFP4Experts.from_checkpoint(MODELOPT, "model.layers.0.mlp.experts")
    with safe_open(MODELOPT, "pt") as file:
        assert file.metadata()["written_by"].startswith("nvidia-modelopt")
        names = [(e, name) for e in range(2) for name in NAMES]
        prefix = "model.layers.0.mlp.experts"
        check(layer, {(e, n): file.get_tensor(f"expected.{prefix}.{e}.{n}.weight") for e, n in names})
        scales = [file.get_tensor(f"{prefix}.{e}.down_proj.input_scale") for e in range(2)]
    assert torch.equal(layer.intermediate_scale, torch.stack(scales))


def mxfp4(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(112, 122, (*shape[:-1], shape[-1] // 32), generator=generator, dtype=torch.uint8)
    return data, scale


def mxfp4_values(data, scale):
    return nvfp4.e2m1_values(nvfp4.unpack(data)) * torch.exp2(scale.float() - 127).repeat_interleave(32, -1)


@pytest.mark.parametrize("count", [None, 2])
def test_gpt_oss(tmp_path, count):
    """Against transformers' own reading of the blocks."""
    both, both_scale = mxfp4(3, 2 * WIDTH, HIDDEN, seed=0)
    down, down_scale = mxfp4(3, HIDDEN, WIDTH, seed=1)
    biases = randn(3, 2 * WIDTH).bfloat16(), randn(3, HIDDEN, seed=1).bfloat16()
    state = {"gate_up_proj_blocks": both.unflatten(2, (-1, 16)), "gate_up_proj_scales": both_scale}
    state |= {"down_proj_blocks": down.unflatten(2, (-1, 16)), "down_proj_scales": down_scale}
    state |= {"gate_up_proj_bias": biases[0], "down_proj_bias": biases[1]}
    save_file(
        {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in state.items()}, tmp_path / "a.safetensors"
    )
    layer = NVFP4Experts.from_checkpoint(tmp_path / "a.safetensors", LAYER, experts=count)
    used = count or 3
    assert layer.experts == used

    def read(name):  # [E, K, N]
        blocks, scales = state[f"{name}_blocks"], state[f"{name}_scales"]
        return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[:used].transpose(1, 2)

    gate, up, got_down = matrices(layer)
    assert torch.equal(gate, read("gate_up_proj")[:, 0::2]) and torch.equal(up, read("gate_up_proj")[:, 1::2])
    assert torch.equal(got_down, read("down_proj"))
    gate_bias, up_bias = deinterleave(layer.w13.bias)
    assert torch.equal(gate_bias, biases[0][:used, 0::2].float()) and torch.equal(
        up_bias, biases[0][:used, 1::2].float()
    )
    assert torch.equal(layer.w2.bias, biases[1][:used].float())


def test_deepseek(tmp_path):
    """Names and dtypes of DeepSeek's own files, in two shards: MXFP4 experts, a shared one in FP8 by blocks."""
    layer, shared, state, expected = "layers.3.ffn.experts", "layers.3.ffn.shared_experts", {}, {}
    for e in range(2):
        for name, other, shape in (
            ("w1", "gate_proj", (WIDTH, HIDDEN)),
            ("w3", "up_proj", (WIDTH, HIDDEN)),
            ("w2", "down_proj", (HIDDEN, WIDTH)),
        ):
            data, scale = mxfp4(*shape, seed=len(state))
            state[f"{layer}.{e}.{name}.weight"] = data.view(torch.int8)
            state[f"{layer}.{e}.{name}.scale"] = scale.view(torch.float8_e8m0fnu)
            expected[e, other] = mxfp4_values(data, scale)
            if e == 0:
                fp8 = randn(*shape, seed=len(state)).to(torch.float8_e4m3fn)
                state[f"{shared}.{name}.weight"] = fp8
                state[f"{shared}.{name}.scale"] = torch.full((1, 1), 120, dtype=torch.uint8).view(
                    torch.float8_e8m0fnu
                )
                requantised = nvfp4.quantize(fp8.float() * 2.0**-7)
                expected[2, other] = nvfp4.dequantize(requantised)
    halves = list(state)[::2], list(state)[1::2]
    for number, names in enumerate(halves):
        save_file({name: state[name] for name in names}, tmp_path / f"{number}.safetensors")
    weight_map = {name: f"{number}.safetensors" for number, names in enumerate(halves) for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = NVFP4Experts.from_checkpoint(tmp_path, layer, shared=shared)
    assert loaded.shared == 1 and loaded.experts == 2
    check(loaded, expected)
    assert NVFP4Experts.from_checkpoint(tmp_path, layer, experts=1).experts == 1


def plain(tmp_path, **changes):
    state = {}
    for e in range(2):
        for name, shape in zip(NAMES, ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)), strict=True):
            state[f"{LAYER}.{e}.{name}.weight"] = randn(*shape, seed=len(state)).bfloat16()
            state[f"{LAYER}.{e}.{name}.bias"] = randn(shape[0], seed=len(state)).bfloat16()
    for name, tensor in changes.items():
        state[f"{LAYER}.{name}"] = tensor
    save_file(
        {name: tensor for name, tensor in state.items() if tensor is not None}, tmp_path / "model.safetensors"
    )
    return state


def test_not_quantised(tmp_path):
    state = plain(tmp_path)
    layer = NVFP4Experts.from_checkpoint(str(tmp_path), LAYER, intermediate_scale=0.25)
    check(
        layer,
        {
            (e, name): nvfp4.dequantize(nvfp4.quantize(state[f"{LAYER}.{e}.{name}.weight"]))
            for e in range(2)
            for name in NAMES
        },
    )
    assert (layer.intermediate_scale == 0.25).all()
    wanted = torch.stack([state[f"{LAYER}.{e}.down_proj.bias"] for e in range(2)]).float()
    assert torch.equal(layer.w2.bias, wanted)


@pytest.mark.parametrize(
    ("error", "match", "path", "layer", "options"),
    [
        (FileNotFoundError, "no checkpoint at", "none", LAYER, {}),
        (KeyError, "no experts under", ".", "model.layers.9.mlp.experts", {}),
        (KeyError, "none of gate_proj, w1", ".", LAYER, dict(shared="gone")),
        (ValueError, r"^experts: must be within 1\.\.2", ".", LAYER, dict(experts=3)),
        (ValueError, r"^experts: must be within 1\.\.2", ".", LAYER, dict(experts=0)),
    ],
)
def test_what_is_not_there(tmp_path, error, match, path, layer, options):
    plain(tmp_path)
    with pytest.raises(error, match=match):
        NVFP4Experts.from_checkpoint(tmp_path / path, layer, **options)


def test_incomplete_expert(tmp_path):
    plain(tmp_path, **{"1.up_proj.weight": None})
    with pytest.raises(KeyError, match=r"1\.up_proj\.weight"):
        NVFP4Experts.from_checkpoint(tmp_path, LAYER)
    plain(tmp_path, **{"1.up_proj.weight": torch.zeros(WIDTH, HIDDEN // 2, dtype=torch.uint8)})
    with pytest.raises(KeyError, match=r"no scale of .*1\.up_proj\.weight"):
        NVFP4Experts.from_checkpoint(tmp_path, LAYER)
