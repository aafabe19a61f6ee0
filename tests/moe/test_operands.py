"""Sorting by expert and the operands of the grouped GEMMs: layouts against plain loops."""

import pytest
import torch

from warpspec.common import nvfp4
from warpspec.moe.operands import (
    PreparedWeights,
    QuantizedRows,
    deinterleave,
    first_atoms,
    prepare_w2,
    prepare_w13,
    row_atoms_bound,
)
from warpspec.moe.permute import counts, sort_tokens


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(1, 1, 1), (7, 3, 4), (50, 8, 256), (0, 2, 3), (5, 0, 3)]
)
def test_sort(tokens, k, experts):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, experts, (tokens, k), generator=generator, dtype=torch.int32)
    if ids.numel() > 4:
        ids[1, 1], ids[2, 0] = experts, -7  # nobody's, like -1
    s = sort_tokens(ids, experts)
    rows = [(e, t * k + j) for e in range(experts) for t in range(tokens) for j in range(k) if ids[t, j] == e]
    assert s.source.dtype == s.position.dtype == s.offsets.dtype == torch.int32
    assert s.source[: len(rows)].tolist() == [source for _, source in rows]
    assert sorted(s.source.tolist()) == list(range(tokens * k))
    assert s.offsets.tolist() == [sum(owner <= e for owner, _ in rows) for e in range(experts)]
    assert s.position.shape == (tokens, k) and s.choices == k
    of_source = {source: row for row, (_, source) in enumerate(rows)}
    assert s.position.flatten().tolist() == [of_source.get(i, -1) for i in range(tokens * k)]


@pytest.mark.parametrize("rows_of", [[3], [0, 0], [1, 0, 130, 128, 0], [129] * 3, [0, 256, 1]])
def test_rows(rows_of):
    """Data compact, each expert's scales at a new atom; dequantises to what `quantize` says of each row."""
    offsets = torch.tensor(rows_of).cumsum(0).int()
    rows = randn(int(offsets[-1]), 80).bfloat16()
    assert counts(offsets).tolist() == rows_of
    expected_first = [sum(-(-n // 128) for n in rows_of[:e]) for e in range(len(rows_of))]
    assert first_atoms(offsets).tolist() == expected_first
    assert sum(-(-n // 128) for n in rows_of) <= row_atoms_bound(len(rows), len(rows_of))

    q = QuantizedRows.from_rows(rows, offsets)
    assert (q.k, q.data.shape, q.scales.shape[1:]) == (80, (len(rows), 48), (2, 512))
    t = nvfp4.quantize(rows, global_dims=1)
    assert torch.equal(q.row_scale, t.global_scale) and torch.equal(q.data[:, :40], t.data)
    assert torch.equal(q.dequantize(offsets), nvfp4.dequantize(t))
    for e, (end, atom) in enumerate(zip(offsets.tolist(), expected_first, strict=True)):
        for r in range(rows_of[e]):
            for c in (0, 4):
                byte = r % 32 * 16 + r // 32 % 4 * 4 + c % 4
                source = t.scale.view(torch.uint8)[end - rows_of[e] + r, c]
                assert q.scales[atom + r // 128, c // 4, byte] == source


def test_rows_with_fixed_scales():
    offsets, scale = torch.tensor([2, 2, 5], dtype=torch.int32), torch.tensor([0.5, torch.nan, 0.01])
    rows = randn(6, 40)  # the last one is nobody's; the last block is half padding
    q = QuantizedRows.from_rows(rows, offsets, out_scale=scale)
    assert q.row_scale is None and q.k == 48 and q.rows == 6
    padded = torch.nn.functional.pad(rows[:5], (0, 8))
    t = nvfp4.quantize(padded, torch.tensor([0.5, 0.5, 0.01, 0.01, 0.01]))
    unit = nvfp4.NVFP4Tensor(t.data, t.scale, torch.ones(()))
    assert torch.equal(q.dequantize(offsets), nvfp4.dequantize(unit))


@pytest.mark.parametrize(("width", "k"), [(8, 16), (24, 80), (136, 144)])
def test_w13(width, k):
    gate, up = randn(3, width, k), randn(3, width, k, seed=1) * 7
    bias = randn(3, width), randn(3, width, seed=1)
    w = prepare_w13(gate.bfloat16(), up.bfloat16(), gate_bias=bias[0], up_bias=bias[1])
    assert (w.n, w.k, w.width, w.experts, w.gated) == (2 * width, k, width, 3, True)
    assert w.data.shape == (3, 2 * width, -(-k // 32) * 16) and w.data.is_contiguous()
    assert not w.data[..., k // 2 :].any() and w.global_scale.shape == (3, 2)
    assert w.scales.shape == (3, -(-2 * width // 128), -(-k // 64), 512)
    parts = [nvfp4.quantize(m.bfloat16(), global_dims=1) for m in (gate, up)]
    expected = [nvfp4.dequantize(part) for part in parts]
    dense = w.dequantize()
    for row in range(2 * width):
        part, source = row // 8 % 2, row // 16 * 8 + row % 8
        assert torch.equal(dense[:, row], expected[part][:, source])
        assert torch.equal(w.bias[:, row], bias[part][:, source])
    assert all(torch.equal(a, b) for a, b in zip(deinterleave(dense), expected, strict=True))
    same = prepare_w13(*parts, gate_bias=bias[0], up_bias=bias[1])
    for name in ("data", "scales", "global_scale", "bias"):
        assert torch.equal(getattr(same, name), getattr(w, name))


def test_w2_of_half_a_block():
    down = randn(2, 48, 40)
    scale = torch.tensor([0.25, 2.0])
    w = prepare_w2(down, input_scale=scale, bias=randn(2, 48).bfloat16())
    assert (w.n, w.k, w.width, w.gated) == (48, 48, 48, False) and w.bias.dtype == torch.float32
    expected = nvfp4.dequantize(nvfp4.quantize(torch.nn.functional.pad(down, (0, 8)), global_dims=1))
    assert torch.equal(w.dequantize(), expected * scale[:, None, None])  # powers of two
    assert not w.dequantize()[..., 40:].any()


@pytest.mark.parametrize(
    ("error", "match", "change"),
    [
        (TypeError, "^gate: dtype must be", dict(gate=torch.zeros(2, 8, 16, dtype=torch.int32))),
        (ValueError, "^gate: must be", dict(gate=torch.zeros(8, 16))),
        (ValueError, "^gate: I must", dict(gate=torch.zeros(2, 12, 16), up=torch.zeros(2, 12, 16))),
        (ValueError, "^up: shape", dict(up=torch.zeros(2, 16, 16))),
        (ValueError, "^up: shape", dict(up=torch.zeros(2, 8, 15))),  # before H is padded to 16
        (ValueError, "^gate_bias", dict(gate_bias=torch.zeros(2, 8))),
        (ValueError, "^up_bias", dict(gate_bias=torch.zeros(2, 8), up_bias=torch.zeros(2, 16))),
        (TypeError, "^gate_bias", dict(gate_bias=torch.zeros(2, 8).int(), up_bias=torch.zeros(2, 8))),
        (ValueError, "^gate: global_scale", dict(gate=nvfp4.quantize(torch.zeros(2, 8, 16), global_dims=2))),
    ],
)
def test_bad_weights(error, match, change):
    arguments = {"gate": torch.zeros(2, 8, 16), "up": torch.zeros(2, 8, 16), **change}
    with pytest.raises(error, match=match):
        prepare_w13(**arguments)


def test_bad_input_scale():
    with pytest.raises(ValueError, match=r"^input_scale"):
        prepare_w2(torch.zeros(2, 8, 16), input_scale=torch.ones(3))
    assert isinstance(prepare_w2(torch.zeros(2, 8, 16)), PreparedWeights)
