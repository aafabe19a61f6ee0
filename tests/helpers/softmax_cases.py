"""Softmax in tests: matrices with room around them, and what must hold of a result."""

from __future__ import annotations

import torch

MARGIN = 48  # elements of NaN before and after a matrix, more than a 16-byte vector holds

TOLERANCE_FP32 = 1e-6  # ||got - exact|| / ||exact||, after DESIGN.md section 7
# Times torch's own error in the same dtype, likewise; what rounding to 16 bits leaves is in there.
OF_TORCH = 1.25


def matrix(
    rows, length, dtype, *, offset=0, gap=0, fill=None, device="cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(storage of NaN, a [rows, length] view into it). offset: elements off a 16-byte boundary; gap: between
    rows. fill: the values; None: NaN."""
    storage = torch.full(
        (2 * MARGIN + offset + rows * (length + gap),), torch.nan, dtype=dtype, device=device
    )
    view = storage.as_strided((rows, length), (length + gap, 1), MARGIN + offset)
    if fill is not None:
        view.copy_(fill)
    return storage, view


def logits(rows, length, *, seed=0, scale=3.0, device="cpu") -> torch.Tensor:
    """fp32 random logits of a few sizes, so that maxima lie anywhere and sums are not alike."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(rows, length, generator=generator, device=device) * scale
    return values + torch.arange(rows, device=device)[:, None] * 7 - 3


def check(out: torch.Tensor, x: torch.Tensor) -> None:
    """out is the softmax of x, and no worse than torch's own of the same dtype allows."""
    exact = torch.softmax(x.double(), -1)
    assert torch.equal(out.isnan(), exact.isnan())
    sound = ~exact.isnan().any(-1)
    got, exact = out.double()[sound], exact[sound]
    if exact.numel() == 0:
        return
    error = (got - exact).norm() / exact.norm()
    own = (torch.softmax(x, -1).double()[sound] - exact).norm() / exact.norm()
    # A tiny error may be one rounding more than torch's: half a unit in the last place of 1.
    assert error <= OF_TORCH * own + torch.finfo(x.dtype).eps / 2, (error, own)
    if x.dtype == torch.float32:
        assert error <= TOLERANCE_FP32, error
        assert (got.sum(-1) - 1).abs().max() <= 1e-5


def untouched(storage: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether everything around ``view`` is NaN as it was."""
    rest = storage.clone()
    rest.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(torch.nan)
    return bool(rest.isnan().all())
