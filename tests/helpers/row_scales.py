"""Scales of "v3.2-fp8" rows in a pool: read, written, drawn at random."""

import torch

from helpers.gathered_cases import Case
from warpspec.latent.cache import LatentPool

SCALES = slice(512, 528)  # bytes of a row
ROW_BYTES = 656


def scales_of(pool: LatentPool) -> torch.Tensor:
    """fp32 [pages, page_size, 4], a copy of the scales of a pool's rows."""
    rows = pool.data[:, : pool.page_size * ROW_BYTES].unflatten(1, (pool.page_size, ROW_BYTES))
    return rows[..., SCALES].contiguous().view(torch.float32)


def put_scales(pool: LatentPool, scales: torch.Tensor) -> None:
    rows = pool.data[:, : pool.page_size * ROW_BYTES].unflatten(1, (pool.page_size, ROW_BYTES))
    rows[..., SCALES] = scales.view(torch.uint8)


def random_scales(case: Case, seed: int = 0) -> None:
    """Scales as an engine's amax / 448, which are no powers of two; some rows' are 0, tiny or large."""
    generator = torch.Generator().manual_seed(seed)
    for each in case.key_sets:
        scales = scales_of(each.pool)
        scales *= torch.exp2(torch.rand(scales.shape, generator=generator) - 0.5)
        kind = torch.randint(0, 40, scales.shape[:2], generator=generator)
        scales[kind == 0] = 0.0
        scales[kind == 1] = torch.finfo(torch.float32).tiny
        put_scales(each.pool, scales)
