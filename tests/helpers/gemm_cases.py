"""Cases of the NVFP4 grouped GEMM: operands from a seed, and the judgement against FP32 on the same operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.common import nvfp4
from warpspec.common.hardware import TMA_ALIGNMENT
from warpspec.moe.activations import activate, intermediate_scale_of
from warpspec.moe.operands import (
    PreparedWeights,
    QuantizedRows,
    deinterleave,
    first_atoms,
    prepare_w2,
    prepare_w13,
    row_atoms_bound,
)

TOLERANCE = 3e-3  # relative L2 of an expert, bf16 out
POISON = 0xFF
# Where a value falls between two codes, fp32 sums of another order may take the other one.
CODE_MISMATCHES = 2e-3
QUANTIZED_TOLERANCE = 5e-3


@dataclass(frozen=True)
class GemmCase:
    """counts: rows of each expert; dropped: rows after them. width: outputs of a row (I or N). out: "bf16" or "nvfp4".
    fixed: tokens have fixed global scales, in the weights', instead of one a row."""

    id: str
    counts: tuple[int, ...]
    k: int = 256
    width: int = 64
    epilogue: str = "linear"
    limit: float | None = None
    out: str = "bf16"
    dropped: int = 0
    bias: bool = False
    fixed: bool = False
    magnitude: float = 1.0

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.dropped


@dataclass(frozen=True)
class Inputs:
    a: QuantizedRows
    w: PreparedWeights
    offsets: torch.Tensor
    out_scale: torch.Tensor | None


def inputs_of(case: GemmCase, seed: int = 0) -> Inputs:
    """Random operands; rows past the last expert's and scales of rows that do not exist are NaN."""
    g = torch.Generator().manual_seed(seed)
    experts, used = len(case.counts), sum(case.counts)
    offsets = torch.tensor(case.counts).cumsum(0).int()
    x = torch.randn(used, case.k, generator=g) * case.magnitude
    x *= torch.exp2(torch.randint(-3, 4, (used, 1), generator=g).float())
    fixed = torch.exp2(torch.randint(-9, -6, (experts,), generator=g).float()) if case.fixed else None
    a = poisoned_behind(QuantizedRows.from_rows(x, offsets, out_scale=fixed), offsets, case.rows)

    def matrix(rows):
        return torch.randn(experts, rows, case.k, generator=g) * case.k**-0.5

    def bias():
        return torch.randn(experts, case.width, generator=g) if case.bias else None

    if case.epilogue == "linear":
        w = prepare_w2(matrix(case.width), input_scale=fixed, bias=bias())
    else:
        w = prepare_w13(matrix(case.width), matrix(case.width) * 0.5, gate_bias=bias(), up_bias=bias())
        if fixed is not None:
            w = PreparedWeights(w.data, w.scales, w.global_scale * fixed[:, None], w.n, w.k, w.bias)
    scale = None
    if case.out == "nvfp4":
        scale = torch.full((experts,), intermediate_scale_of(case.epilogue, case.limit))
        scale *= torch.exp2(torch.randint(-1, 2, (experts,), generator=g).float())
    return Inputs(a, w, offsets, scale)


def poisoned_behind(a: QuantizedRows, offsets: torch.Tensor, rows: int) -> QuantizedRows:
    """``a`` with rows after its last one, all NaN, and NaN for the scales of rows that are none."""
    experts, used = len(offsets), int(offsets[-1])
    data = torch.full((rows, a.data.shape[1]), POISON, dtype=torch.uint8)
    data[:used] = a.data
    scales = torch.full((row_atoms_bound(rows, experts), *a.scales.shape[1:]), POISON, dtype=torch.uint8)
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).tolist()
    for first, count in zip(first_atoms(offsets).tolist(), counts, strict=True):
        for atom in range(-(-count // nvfp4.ATOM_ROWS)):
            present = min(count - atom * nvfp4.ATOM_ROWS, nvfp4.ATOM_ROWS)
            row = torch.arange(present)
            line = (row % 32 * 16 + row // 32 * 4)[:, None] + torch.arange(4)
            scales[first + atom][:, line.flatten()] = a.scales[first + atom][:, line.flatten()]
    row_scale = None
    if a.row_scale is not None:
        row_scale = torch.full((rows,), torch.nan)
        row_scale[:used] = a.row_scale
    return QuantizedRows(data, scales, row_scale, a.k)


def poisoned_out(case: GemmCase):
    """Where the result goes, full of NaN."""
    if case.out == "bf16":
        return torch.full((case.rows, case.width), torch.nan, dtype=torch.bfloat16)
    out = QuantizedRows.empty(case.rows, case.width, len(case.counts), "cpu", row_scale=False)
    out.data.fill_(POISON)
    out.scales.fill_(POISON)
    return out


def expected(case: GemmCase, inputs: Inputs) -> torch.Tensor:
    """fp32 [offsets[-1], width]: FP32 matrix product of the dequantised operands, and the epilogue."""
    a, w = inputs.a.dequantize(inputs.offsets), inputs.w.dequantize()
    parts, start = [], 0
    for expert, end in enumerate(inputs.offsets.tolist()):
        y = a[start:end] @ w[expert].T
        if inputs.w.bias is not None:
            y = y + inputs.w.bias[expert]
        if case.epilogue != "linear":
            gate, up = (part[0].T for part in deinterleave(y.T[None]))
            y = activate(gate, up, case.epilogue, case.limit)
        parts.append(y)
        start = end
    return torch.cat(parts)


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).norm() / wanted.norm().clamp(min=1e-300))


def check(case: GemmCase, inputs: Inputs, out) -> float:
    """Assert that a result is right and nothing else was written; returns the worst expert's error."""
    wanted = expected(case, inputs)
    used = len(wanted)
    if case.out == "bf16":
        assert out[used:].isnan().all(), "dropped rows were written"
        errors = [
            relative(got, want)
            for got, want in zip(out[:used].split(case.counts), wanted.split(case.counts), strict=True)
            if len(want)
        ]
        assert max(errors, default=0.0) <= TOLERANCE, errors
        return max(errors, default=0.0)
    return check_quantized(case, inputs, out, wanted)


def check_quantized(case, inputs, out: QuantizedRows, wanted) -> float:
    """Codes and scales against the reference quantiser's on the FP32 result; padding; untouched places."""
    used = len(wanted)
    assert (out.data[used:] == POISON).all(), "dropped rows were written"
    assert case.width > out.k - nvfp4.NVFP4_BLOCK
    columns = out.scales.shape[1] * nvfp4.ATOM_COLUMNS
    reference = QuantizedRows.from_rows(wanted, inputs.offsets, out_scale=inputs.out_scale)
    worst, start = 0.0, 0
    firsts = first_atoms(inputs.offsets).tolist()
    for count, first in zip(case.counts, firsts, strict=True):
        atoms = -(-count // nvfp4.ATOM_ROWS)
        if not atoms:
            continue
        mine, theirs = (
            nvfp4.unswizzle_scales(r.scales[first : first + atoms], atoms * nvfp4.ATOM_ROWS, columns).view(
                torch.uint8
            )
            for r in (out, reference)
        )
        assert (mine[count:] == POISON).all(), "scales of rows that do not exist were written"
        assert (mine[:count, out.k // nvfp4.NVFP4_BLOCK :] == 0).all(), "padding of the scales is not 0"
        codes = [nvfp4.unpack(r.data[start : start + count, : out.k // 2]) for r in (out, reference)]
        wrong = (codes[0] != codes[1]).float().mean() + (mine[:count] != theirs[:count]).float().mean()
        assert wrong <= CODE_MISMATCHES, float(wrong)
        start += count
    got, want = out.dequantize(inputs.offsets), reference.dequantize(inputs.offsets)
    for mine, theirs in zip(got.split(case.counts), want.split(case.counts), strict=True):
        if len(theirs):
            worst = max(worst, relative(mine, theirs))
    assert worst <= QUANTIZED_TOLERANCE, worst
    assert out.data.shape[1] % TMA_ALIGNMENT == 0
    return worst
