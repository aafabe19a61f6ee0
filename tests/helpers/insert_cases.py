"""Calls of ``warpspec.cache.insert``: engines' layouts of caches, and numbers that are hard to quantise."""

from dataclasses import dataclass

import torch

from warpspec.common.kv_formats import FORMATS

POISON = 0xA5
HARD_SCALES = (0.0, 1e-40, torch.inf, torch.nan, 1.0, 3e38, 2.0**-61, 0.3)


@dataclass
class Cache:
    """``insert``'s k_cache, v_cache and block scales, and the memory that they are views of, which is poisoned."""

    memory: list
    arguments: dict


def make_cache(layout: str, name: str, heads: int, dim: int, v_dim: int, *, pages=3, size=8) -> Cache:
    """A cache of pages of ``size`` rows. layout: "slots" (SGLang: [slots, H, D], K and V apart), "pages" ([pages, size,
    H, D], K and V apart) or "cells" (vLLM: K and V in one tensor, heads before rows)."""
    fmt = FORMATS[name]
    widths = [fmt.row_bytes(dim), fmt.row_bytes(v_dim)]
    blocks = [dim // fmt.block, v_dim // fmt.block] if fmt.block else [0, 0]

    def poisoned(*shape):
        return torch.full(shape, POISON, dtype=torch.uint8)

    if layout == "cells" and fmt.block:
        # A page is K's data, K's block scales, V's data, V's block scales, each [heads, size].
        memory = [poisoned(pages, heads * size * (sum(widths) + sum(blocks)))]
        parts = memory[0].split(
            [heads * size * n for n in (widths[0], blocks[0], widths[1], blocks[1])], dim=1
        )
        views = [part.unflatten(1, (heads, size, -1)).transpose(1, 2) for part in parts]
        data, scales = views[::2], views[1::2]
    elif layout == "cells":
        memory = [poisoned(pages, heads, size, sum(widths))]
        data = list(memory[0].transpose(1, 2).split(widths, dim=-1))
        scales = [None, None]
    else:
        shape = (pages * size,) if layout == "slots" else (pages, size)
        memory = [poisoned(*shape, heads, n) for n in (*widths, *(n for n in blocks if n))]
        data, scales = memory[:2], memory[2:] or [None, None]
    arguments = {"format": name if name in ("e4m3", "e5m2", "nvfp4") else None}
    if arguments["format"] is None:
        data = [part.view(getattr(torch, name)) for part in data]
    arguments |= {"k_cache": data[0], "v_cache": data[1]}
    if fmt.block:
        arguments |= {"k_block_scales": scales[0], "v_block_scales": scales[1]}
    return Cache(memory, arguments)


def random_bits(shape: tuple, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """16-bit numbers of random bits: NaN, Inf, subnormal numbers and all magnitudes among them."""
    bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
    return bits.view(dtype)


SLOTS = (13, -1, 7, 22, 24, 0, -5)  # 24 is beyond the cache
NORM_ERROR = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # an ulp: sums may be added in another order


@dataclass(frozen=True)
class Case:
    """rotated: R; 0: no rotation. queries: heads; 0: none. scale: "tensor", "head", "hard" (a head, hard to divide by)
    or None."""

    name: str
    layout: str
    dim: int = 64
    v_dim: int = 64
    heads: int = 2
    queries: int = 0
    rotated: int = 0
    interleaved: bool = False
    norm: bool = False
    swizzled: bool = False
    scale: str | None = None
    dtype: torch.dtype = torch.bfloat16
    index: torch.dtype = torch.int64
    table: torch.dtype = torch.float32

    @property
    def tokens(self) -> int:
        return len(SLOTS) + 1  # the last has no slot

    def arguments(self, seed: int = 0) -> dict:
        """All arguments but the cache. Values are random bits; so are keys that are not rotated."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return (3 * torch.randn(shape, generator=generator)).to(self.dtype)

        # Keys and queries are views of a projection that has more columns.
        columns = normal(self.tokens, self.queries + self.heads + 1, self.dim)
        q, k = columns[:, : self.queries], columns[:, self.queries : -1]
        if not (self.rotated or self.norm):
            k = random_bits(tuple(k.shape), self.dtype, generator)
        found = {
            "k": k,
            "v": random_bits((self.tokens, self.heads, self.v_dim), self.dtype, generator),
            "slots": torch.tensor(SLOTS, dtype=self.index),
            "interleaved": self.interleaved,
            "swizzled": self.swizzled,
        }
        if self.queries:
            found["q"] = q
        if self.rotated:
            k[2, 0, 3] = torch.nan
            table = torch.randn(40, self.rotated, generator=generator).to(self.table)
            positions = torch.tensor([0, 39, 7, 5, 1, 40, 2, -1], dtype=self.index)  # 40 and -1 are not there
            found |= {"cos_sin": table, "positions": positions}
        if self.norm:
            found["k_weight"] = torch.randn(self.dim, generator=generator)
            if self.queries:
                found["q_weight"] = torch.randn(self.dim, generator=generator).to(self.dtype)
        if self.scale is not None:
            count = 1 if self.scale == "tensor" else self.heads
            for side in ("k_scale", "v_scale"):
                found[side] = 2 * torch.rand(count, generator=generator)
                if self.scale == "hard":
                    found[side] = torch.tensor(HARD_SCALES)
        return found


def assert_close(got, wanted, case):
    """Equal, NaN where NaN is; within an ulp after a norm."""
    tolerance = NORM_ERROR[case.dtype] if case.norm else 0
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=0, equal_nan=True)


def assert_same(got: Cache, wanted: Cache, got_q, wanted_q, case: Case) -> None:
    """Compare all bytes of two caches, and the queries. After a norm, numbers may be an ulp apart and codes one."""
    if case.queries:
        assert_close(got_q, wanted_q, case)
    for one, other in zip(got.memory, wanted.memory, strict=True):
        if case.name in ("bfloat16", "float16"):
            assert_close(one.view(case.dtype), other.view(case.dtype), case)
        elif case.norm:
            assert (one.int() - other.int()).abs().max() <= 1
            assert (one != other).float().mean() < 1e-2
        else:
            assert torch.equal(one, other)
