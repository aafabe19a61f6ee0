"""Writes tests/moe/data/modelopt.safetensors: a tiny model's experts as nvidia-modelopt exports them.

    python tests/recorders/record_modelopt.py        # needs nvidia-modelopt and requests, which the tests do not

Beside each expert's tensors stand, as `expected.<name>`, the numbers that modelopt's own dequantisation gives.
"""

import tempfile
from pathlib import Path

import modelopt
import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

OUT = Path(__file__).parents[1] / "moe/data" / "modelopt.safetensors"
EXPERTS, HIDDEN, WIDTH, VOCABULARY = 2, 64, 32, 64


def quantised_model():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=1,
        architectures=["Qwen3MoeForCausalLM"],
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    tokens = torch.randint(0, VOCABULARY, (4, 32))
    return mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, lambda m: m(tokens))


def main():
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(quantised_model(), export_dir=folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if ".experts." in name}  # noqa: SIM118
    expected = {}
    for name, packed in tensors.items():
        if name.endswith(".weight"):
            shape = (packed.shape[0], packed.shape[1] * 2)
            expected[f"expected.{name}"] = NVFP4QTensor(shape, torch.float32, packed).dequantize(
                dtype=torch.float32,
                scale=tensors[f"{name}_scale"],
                double_scale=tensors[f"{name}_scale_2"],
                block_sizes={-1: 16},
            )
    OUT.parent.mkdir(exist_ok=True)
    save_file(tensors | expected, OUT, metadata={"written_by": f"nvidia-modelopt {modelopt.__version__}"})
    print(OUT, OUT.stat().st_size)


if __name__ == "__main__":
    main()
