"""Predicts the NVFP4 grouped GEMMs of a MoE layer on a B200 by tiles, and what the plan's choice of tiles would lose.

    python scripts/predict_moe.py OUT.json [--only TEXT] [--seconds N]

Rows pick their experts at random; operands are zeros, since no clock depends on them. Two clusters of each kernel run
in the simulator, with its tiles instead of the plan's (``warpspec.moe.sm100.plan``, a count of bytes and products).
Nothing was timed. OUT.json: a row for each model, number of tokens and GEMM, as ``clock_errors.py --experts`` takes
it; rows that are there stay.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from warpspec import sim
from warpspec.common.hardware import GPUS
from warpspec.common.launch import Target, simulating
from warpspec.common.nvfp4 import ATOM_BYTES, ATOM_ROWS
from warpspec.moe.operands import PreparedWeights, QuantizedRows, pitch_of, scale_atoms
from warpspec.moe.sm100 import grouped_gemm
from warpspec.moe.sm100.config import PAIR, SINGLE, SWAPPED, Shape
from warpspec.moe.sm100.plan import choose_shape, estimate
from warpspec.sim.clocks.answer import clocks_of
from warpspec.sim.clocks.chips import chip, table_digest
from warpspec.sim.clocks.record import captured

CHIP = "b200"
SAMPLE = 2
SHAPES = (*SWAPPED.values(), SINGLE, PAIR)
TOKENS = (1, 64, 512, 4096)


@dataclass(frozen=True)
class Layer:
    """A model's experts. k: choices of a token."""

    name: str
    experts: int
    k: int
    hidden: int
    width: int

    def gemms(self) -> tuple[tuple[int, int], ...]:
        """(features, K) of both GEMMs."""
        return ((2 * self.width, self.hidden), (self.hidden, self.width))


LAYERS = (Layer("gpt-oss-20b", 32, 4, 2880, 2880), Layer("DeepSeek-V4 Flash", 256, 6, 4096, 2048))


def offsets_of(layer: Layer, tokens: int) -> torch.Tensor:
    """int32 [experts]: running ends of the rows, whose tokens pick their experts at random."""
    generator = torch.Generator().manual_seed(tokens)
    picks = torch.rand(tokens, layer.experts, generator=generator).topk(layer.k).indices
    return torch.bincount(picks.flatten(), minlength=layer.experts).cumsum(0).to(torch.int32)


def traces_of(layer: Layer, tokens: int, features: int, k: int, shape: Shape, target: Target) -> list:
    """The recorded launch of a GEMM with these tiles, bf16 out."""
    rows = QuantizedRows(
        torch.zeros(tokens * layer.k, pitch_of(k), dtype=torch.uint8),
        QuantizedRows.empty(tokens * layer.k, k, layer.experts, "cpu", row_scale=False).scales.zero_(),
        None,
        k,
    )
    weights = PreparedWeights(
        torch.zeros(layer.experts, features, pitch_of(k), dtype=torch.uint8),
        torch.zeros(layer.experts, -(-features // ATOM_ROWS), scale_atoms(k), ATOM_BYTES, dtype=torch.uint8),
        torch.ones(layer.experts, 1),
        features,
        k,
    )
    out = torch.empty(tokens * layer.k, features, dtype=torch.bfloat16)
    with simulating(target), sim.recording(SAMPLE), captured() as traces:
        grouped_gemm(rows, weights, offsets_of(layer, tokens), out, shape=shape, target=target)
    return traces


def predict(layer: Layer, tokens: int, features: int, k: int, target: Target) -> dict:
    """A row: by tiles, clocks predicted, their interval, and the plan's count; what the plan chooses."""
    rows, found = tokens * layer.k, {}
    for shape in SHAPES:
        one = clocks_of(traces_of(layer, tokens, features, k, shape, target), CHIP).launches[0]
        counted = estimate(shape, rows, layer.experts, features, k, target.sm_count).clocks
        found[str(shape)] = [round(value) for value in (one.clocks, one.low, one.high, counted)]
    chosen = str(choose_shape(rows, layer.experts, features, k, target.sm_count))
    return {"rows_an_expert": rows / layer.experts, "chosen": chosen, "shapes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--seconds", type=float, default=1e6, help="begin no row after this many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began, target = time.monotonic(), Target.of_model(GPUS["sm_100a"])
    result = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    result["constants"] = table_digest(chip(CHIP))
    for layer in LAYERS:
        for tokens in TOKENS:
            for number, (features, k) in enumerate(layer.gemms(), 1):
                name = f"{layer.name}, {tokens} tokens, GEMM {number}"
                late = time.monotonic() - began > options.seconds
                if late or options.only not in name or name in result["rows"]:
                    continue
                result["rows"][name] = predict(layer, tokens, features, k, target)
                print(f"{name}: {result['rows'][name]} {time.monotonic() - began:.0f} s", flush=True)
                options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
