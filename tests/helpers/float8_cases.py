"""Attention with keys and values in FP8 and NVFP4: its arguments, with garbage where no row may look, and what it is
worth."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from warpspec.fmha import AttentionState, attention, launch
from warpspec.fmha.sm90 import shapes

O_TOLERANCE, LSE_TOLERANCE = 4e-3, 1e-3  # worst head's relative error; lse's largest difference
# Bytes that are NaN: codes, and of NVFP4 a block's scale.
CODES_OF_NAN = {torch.float8_e4m3fn: 0xFF, torch.float8_e5m2: 0x7E, torch.uint8: 0x7F}
CODE_OF_INF = 0x7C  # of e5m2
NVFP4 = torch.uint8  # as a dtype of keys
# Codes of the largest numbers; NVFP4: two in a byte.
LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B, NVFP4: 0x77}
SUBNORMAL, LARGE = 1e-40, 2.0**100
# k_scale, v_scale: 0 makes weights equal, or o 0; so does a subnormal k_scale, for codes are below 2**16.
SCALES = [(0.0, 1.0), (1.0, 0.0), (SUBNORMAL, 1.0), (1.0, SUBNORMAL), (2.0**-20, LARGE), (0.5, 2.0**-60)]
# A factor of the queries, the scale of logits and the keys' scale: far from 1, but their product is not, or it is too
# small for a number, and then all weights are equal.
FACTORS = [
    (1.0, 2.0**-112, 2.0**108), (1.0, -(2.0**-112), 2.0**108), (1.0, 2.0**96, 2.0**-100),
    (2.0**-100, 0.1, 2.0**96), (2.0**-100, 0.1, 2.0**-60), (2.0**-100, 0.1, 0.0), (2.0**-100, 0.0, 1.0),
    (1.0, 2.0**-125, 1.0), (1.0, -(2.0**-126), 2.0), (2.0**56, 2.0**-118, 2.0**60), (1.0, 2.0**-127, 2.0**118),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """scale: shape of k_scale and v_scale, "tensor", "head", "request", or None. page: keys of a page, 0 without pages.
    nan: a visible key of V has NaN (or Inf), which other rows do not see. swizzled: V's block scales. by_head: keys of
    a head stand together in memory."""

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
    swizzled: bool = False
    by_head: bool = False

    def arguments(self, seed: int = 0) -> dict:
        """Arguments of ``attention``. Codes of keys past a row's length, and of unused pages, are NaN; of NVFP4 the
        scales of their blocks."""
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads = self.heads
        bad = torch.tensor(CODES_OF_NAN[self.float8], dtype=torch.uint8)
        shape = (self.batch, self.keys, kv_heads)

        def codes():
            found = 3 * torch.randn(*shape, self.dim, generator=generator)
            found[..., :4] *= 2.0**-9  # subnormal codes among them
            return found.to(self.float8).view(torch.uint8)

        def blocks():
            found = 2 * torch.randn(*shape, self.dim // 16, generator=generator).exp2()
            found[..., ::3] *= 2.0**-8  # subnormal scales among them, and 0
            return found.to(torch.float8_e4m3fn).view(torch.uint8)

        def scale():
            shape = {"tensor": (), "head": (kv_heads,), "request": (self.batch, kv_heads)}[self.scale]
            return 0.1 + torch.rand(shape, generator=generator)

        if self.float8 == NVFP4:
            row = (*shape, self.dim // 2)
            cached = {name: torch.randint(256, row, generator=generator, dtype=torch.uint8) for name in "kv"}
            cached |= {f"{name}_block_scales": blocks() for name in "kv"}
            spoilt = ("k_block_scales", "v_block_scales")
        else:
            cached = {name: codes() for name in "kv"}
            spoilt = ("k", "v")
        if self.nan:
            v = cached[spoilt[1]]
            v[0, -1, 0, 3] = bad
            v[0, -1, 0, v.shape[-1] - 2] = CODE_OF_INF if self.float8 == torch.float8_e5m2 else bad
        lengths = self.lengths or (self.keys,) * self.batch
        for row, length in enumerate(lengths):
            for name in spoilt:
                cached[name][row, length:] = bad
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
            cached = {name: pages(t, self.page, place, bad) for name, t in cached.items()}
        if self.swizzled:
            found["swizzled"] = True
            cached["v_block_scales"] = swizzle_block_scales(cached["v_block_scales"])
        if self.by_head:
            cached = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in cached.items()}
        found |= {name: t.view(self.float8) if name in "kv" else t for name, t in cached.items()}
        if self.shared:
            found |= {"v": None} | ({"v_block_scales": None} if self.float8 == NVFP4 else {})
        if self.sink:
            found["sink"] = torch.randn(heads, generator=generator)
        if self.scale:
            found |= {"k_scale": scale(), "v_scale": scale()}
        return found


def swizzle_block_scales(blocks: torch.Tensor) -> torch.Tensor:
    """[pages, page_size, H, S] as sm_100 has V's: scale (t, s) goes to row t/4*4 + s/(S/4), column s%(S/4)*4 + t%4."""
    found, count = torch.empty_like(blocks), blocks.shape[-1]
    for t in range(blocks.shape[1]):
        for s in range(count):
            found[:, t // 4 * 4 + s // (count // 4), :, s % (count // 4) * 4 + t % 4] = blocks[:, t, :, s]
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
        torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=LSE_TOLERANCE)
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
    error, size = ((o - wanted_o).flatten(2).norm(dim=-1), wanted_o.flatten(2).norm(dim=-1))
    assert bool((error <= O_TOLERANCE * size).all()), (error / size).max()


def on_gpu(arguments: dict):
    """The results of ``attention`` on a GPU, on the CPU, as ``check`` takes them."""
    moved = {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    found = [t.cpu() for t in attention(**moved, return_lse=arguments["normalize"])]
    return found if arguments["normalize"] else AttentionState(*found)


def many_rows(dim: int, format: torch.dtype) -> Case:
    """A case that every shape of ``fmha.sm90.shapes`` for many rows over codes can run: rows in three consumers, more
    KV tiles than stages, lengths that no tile divides."""
    return Case(75, 330, (6, 2), dim, batch=2, page=64, lengths=(330, 101), float8=format, causal=True)


def shapes_for_many_rows() -> list[tuple]:
    """(head size, format, shape) of each of these shapes."""
    bits = {torch.float8_e4m3fn: 8, NVFP4: 4}
    return [
        (d, each, one)
        for d in shapes.FLOAT8
        for each, n in bits.items()
        for one in shapes.for_many_rows(d, n)
    ]


@contextlib.contextmanager
def converting_in(shape: shapes.Shape):
    """Many rows over codes take this shape of a kernel with a converter, whatever plans would choose."""
    launch.prepare.cache_clear()
    with (
        mock.patch.object(shapes, "for_many_rows", lambda dim, bits: (shape,)),
        mock.patch.object(launch, "expands_on", lambda problem, target: False),
    ):
        yield
    launch.prepare.cache_clear()


def extremes(format: torch.dtype, queries: int) -> Iterator[dict]:
    """Arguments of ``attention`` with scales and codes at the ends of their ranges."""
    arguments = Case(queries, 36, (2, 1), 64, float8=format, scale="tensor").arguments()
    arguments["q"] = arguments["q"] * 0.02  # logits of some hundred powers of two have one key's weight
    for k_scale, v_scale in SCALES:
        yield arguments | {"k_scale": torch.tensor(k_scale), "v_scale": torch.tensor(v_scale)}
    # Saturated codes, of both signs, with the largest block scale.
    sign = torch.randint(2, arguments["v"].shape, generator=torch.Generator().manual_seed(2)) * 0x80
    codes = (LARGEST[format] | sign).to(torch.uint8)
    full = {"k": codes.view(format), "v": codes.flip(1).view(format), "k_scale": torch.tensor(2.0**-12)}
    if format == NVFP4:
        full |= {f"{name}_block_scales": torch.full_like(arguments["k_block_scales"], 0x7E) for name in "kv"}
    yield arguments | full
    # Codes of 0 alone, and of the least magnitude.
    for code in (0x00, 0x01):
        low = torch.full_like(codes, code).view(format)
        yield arguments | {"k": low, "v": low}


def check_extreme(o, lse, wanted, wanted_lse) -> None:
    """Compare results of ``extremes`` with the reference's."""
    assert o.isfinite().all() and wanted.isfinite().all()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-3)
    # In units of the least subnormal bf16 where the values are as small as that.
    assert (o - wanted).double().norm() <= 4e-3 * wanted.double().norm() + 2.0**-133 * math.sqrt(o.numel())
