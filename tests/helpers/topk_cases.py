"""Rows of logits that are hard on softmax + top-k, and how a result is judged. Shared by simulator and GPU tests."""

from __future__ import annotations

import torch

from warpspec.softmax.topk import reference

INF, NAN = torch.inf, torch.nan


def judge(probs, indices, logits, k, renormalize=False, tolerance=1e-6):
    """Raise AssertionError unless (probs, indices) are right for logits (ROW, COLUMN), by torch in float64."""
    expected, columns = reference.softmax_topk(logits.double(), k, renormalize)
    assert indices.dtype == torch.int32 and probs.dtype == torch.float32
    wrong = (indices != columns).any(-1)
    assert not wrong.any(), (
        f"row {int(wrong.nonzero()[0])}: {indices[wrong][0].tolist()} for {columns[wrong][0].tolist()}"
    )
    assert torch.equal(probs.isnan(), expected.isnan())
    got, want = probs.double().nan_to_num(), expected.nan_to_num()
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-300)
    assert error.max() <= tolerance, f"row {int(error.argmax())}: error {error.max():.2e}"


def random_rows(rows, length, dtype=torch.float32, seed=0, scale=3.0, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    return (scale * torch.randn(rows, length, generator=generator, device=device)).to(dtype)


def adversarial_rows(length: int, k: int, dtype=torch.float32, seed=0) -> dict[str, torch.Tensor]:
    """Rows (COLUMN) by name."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(length, generator=generator)
    place = torch.randperm(length, generator=generator)  # of the special elements
    few, many = place[: max(1, k // 2)], place[: min(length, 2 * k)]
    ramp = torch.linspace(-30, 30, length)
    coarse = torch.randint(0, 3, (length,), generator=generator).float()

    def with_at(where, value, row=noise):
        row = row.clone()
        row[where] = value
        return row

    signed_zeros = torch.where(noise > 0, 0.0, -0.0)
    rows = {
        "equal": torch.full((length,), 1.5),
        "rising": ramp,
        "falling": ramp.flip(0),
        "rising within tiles": ramp.view(-1)[torch.arange(length) ^ 1 if length % 2 == 0 else slice(None)],
        "three values": coarse,
        "zeros of both signs": signed_zeros,
        "ties at the end": with_at(slice(max(0, length - k), None), 9.0),
        "ties at both ends": with_at([0, length - 1], 9.0),
        "one large": with_at(place[:1], 80.0),
        "few NaN": with_at(few, NAN),
        "many NaN": with_at(many, NAN),
        "negative NaN": with_at(few, -NAN),
        "all NaN": torch.full((length,), NAN),
        "+inf": with_at(few, INF),
        "-inf, few others": with_at(few, 1.0, torch.full((length,), -INF)),
        "half -inf": torch.where(noise > 0, noise, -INF),
        "all -inf": torch.full((length,), -INF),
        "NaN in -inf": with_at(place[:1], NAN, torch.full((length,), -INF)),
        "NaN, +inf, -inf": with_at(place[:1], NAN, with_at(few, INF, torch.where(noise > 0, noise, -INF))),
        "lowest": torch.full((length,), torch.finfo(dtype).min),
        "masked with the lowest": torch.where(noise > 1, noise, torch.finfo(dtype).min),
        "huge": torch.where(noise > 0, torch.finfo(dtype).max, -noise),
        "denormal": noise * torch.finfo(dtype).tiny * 2**-3,
        "far apart": with_at(few, 200.0, noise * 50),
    }
    return {name: row.to(dtype) for name, row in rows.items()}
