"""Attention with FP8 keys and values: its arguments, with garbage where no row may look, and what it is worth."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpspec.fmha import attention

O_TOLERANCE, LSE_TOLERANCE = 4e-3, 1e-3  # worst head's relative error; lse's largest difference
CODES_OF_NAN = {torch.float8_e4m3fn: 0xFF, torch.float8_e5m2: 0x7E}
CODE_OF_INF = 0x7C  # of e5m2


@dataclass(frozen=True)
class Case:
    """scale: shape of k_scale and v_scale, "tensor", "head", "request", or None. page: keys of a page, 0 without pages.
    nan: a visible key of V has NaN (or Inf), which other rows do not see."""

    queries: int
    keys: int
    heads: tuple[int, int] = (8, 1)
    dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16
    float8: torch.dtype = torch.float8_e4m3fn
    scale: str | None = "head"
    page: int = 0
    lengths: tuple[int, ...] | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    sink: bool = False
    shared: bool = False
    splits: int | None = None
    normalize: bool = True
    nan: bool = False

    def arguments(self, seed: int = 0) -> dict:
        """Arguments of ``attention``. Codes of keys past a row's length, and of unused pages, are NaN."""
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads = self.heads
        bad = torch.tensor(CODES_OF_NAN[self.float8], dtype=torch.uint8)

        def codes():
            found = 3 * torch.randn(self.batch, self.keys, kv_heads, self.dim, generator=generator)
            found[..., :4] *= 2.0**-9  # subnormal codes among them
            return found.to(self.float8).view(torch.uint8)

        def scale():
            shape = {"tensor": (), "head": (kv_heads,), "request": (self.batch, kv_heads)}[self.scale]
            return 0.1 + torch.rand(shape, generator=generator)

        k, v = codes(), codes()
        if self.nan:
            v[0, -1, 0, 5] = bad
            v[0, -1, 0, 9] = CODE_OF_INF if self.float8 == torch.float8_e5m2 else bad
        lengths = self.lengths or (self.keys,) * self.batch
        for row, length in enumerate(lengths):
            k[row, length:], v[row, length:] = bad, bad
        found = {
            "q": torch.randn(self.batch, self.queries, heads, self.dim, generator=generator).to(self.dtype),
            "causal": self.causal,
            "window": self.window,
            "num_splits": self.splits,
            "normalize": self.normalize,
        }
        if self.lengths:
            found["kv_lengths"] = torch.tensor(lengths, dtype=torch.int32)
        if self.page:
            slots = -(-self.keys // self.page)
            place = torch.randperm(self.batch * slots + 1, generator=generator)[1:].view(self.batch, slots)
            found["page_table"] = place.int()
            k, v = (pages(t, self.page, place, bad) for t in (k, v))
        found |= {"k": k.view(self.float8), "v": None if self.shared else v.view(self.float8)}
        if self.sink:
            found["sink"] = torch.randn(heads, generator=generator)
        if self.scale:
            found |= {"k_scale": scale(), "v_scale": scale()}
        return found


def pages(codes: torch.Tensor, size: int, place: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
    """[pages, size, H, D] with the codes [B, L, H, D] at the pages ``place`` [B, slots], and NaN in the others."""
    batch, keys, heads, dim = codes.shape
    slots = place.shape[1]
    padded = bad.expand(batch, slots * size, heads, dim).clone()
    padded[:, :keys] = codes
    found = bad.expand(int(place.max()) + 2, size, heads, dim).clone()
    found[place.flatten()] = padded.view(batch * slots, size, heads, dim)
    return found


def check(case: Case, run) -> None:
    """Compare ``run(arguments)``, the results of ``attention``, with the reference in FP32 on dequantised values."""
    arguments = case.arguments()
    got = run(arguments)
    wanted = attention(**arguments, return_lse=case.normalize, backend="reference")
    if case.normalize:
        (o, lse), (wanted_o, wanted_lse) = got, wanted
        assert (lse - wanted_lse).abs().max() < LSE_TOLERANCE
    else:
        o, wanted_o = got.o, wanted.o
        torch.testing.assert_close(got.row_max, wanted.row_max, rtol=1e-4, atol=LSE_TOLERANCE)
        torch.testing.assert_close(got.row_sum, wanted.row_sum, rtol=LSE_TOLERANCE, atol=0)
    o, wanted_o = (t.float().transpose(1, 2) for t in (o, wanted_o))  # [B, Hq, Sq, D]
    assert torch.equal(o.isnan(), wanted_o.isnan()) and bool(wanted_o.isnan().any()) == case.nan
    if case.nan:
        beyond = wanted_o.isinf()
        assert torch.equal(o[beyond], wanted_o[beyond])
        o, wanted_o = (torch.where(wanted_o.isfinite(), t, 0.0) for t in (o, wanted_o))
    error = (o - wanted_o).flatten(2).norm(dim=-1) / wanted_o.flatten(2).norm(dim=-1)
    assert error.max() < O_TOLERANCE
