"""Cases of gathered attention: pools full of traps, queries, and how far a result may be off."""

from dataclasses import dataclass, field

import torch

from warpspec.latent.cache import LatentPool, rope_table
from warpspec.latent.gathered import KeySet

O_TOLERANCE, LSE_TOLERANCE = 4e-3, 1e-3
POSITIONS = 4096


@dataclass
class Case:
    """Arguments of ``gathered_attention`` but ``backend``."""

    q: torch.Tensor
    key_sets: list[KeySet]
    options: dict = field(default_factory=dict)

    def to(self, device) -> "Case":
        def moved(value):
            if isinstance(value, tuple):
                return tuple(moved(v) for v in value)
            return value.to(device) if isinstance(value, torch.Tensor) else value

        sets = []
        for each in self.key_sets:
            pool = LatentPool(each.pool.data.to(device), each.pool.page_size, each.pool.format)
            sets.append(KeySet(pool, each.slots.to(device), moved(each.lengths)))
        return Case(self.q.to(device), sets, {name: moved(value) for name, value in self.options.items()})


def pool_of_rows(rows: int, page_size: int, format: str, generator, *, spread: float = 1.0) -> LatentPool:
    """A pool whose first ``rows`` slots have random rows; every other byte of it is 0xFF, NaN in all types."""
    pages = -(-rows // page_size) + 1
    pool = LatentPool.empty(pages, page_size, format, multiple=48)
    pool.data.fill_(0xFF)
    numbers = spread * torch.randn(rows, pool.row_format.dim, generator=generator)
    pool.write(torch.arange(rows), numbers.bfloat16())
    return pool


def random_case(
    tokens: int, heads: int, slots: tuple[int, ...], *, format="v4-fp8", seed=0, sink=True, rotate=True, lse=True,
    lengths=True, **options,
) -> Case:  # fmt: skip
    """Slots anywhere in the pools' rows, a tenth of them missing, the last row of the pool and slots past it among
    those that do not count; one query sees nothing."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for number, k in enumerate(slots):
        rows = 3 * k + 50
        pool = pool_of_rows(rows, (33, 64, 16)[number], format, generator)
        chosen = torch.randint(0, rows, (tokens, k), generator=generator).to(torch.int32)
        missing = torch.rand(tokens, k, generator=generator) < 0.1
        nowhere = torch.tensor([-1, -7, pool.capacity, 2**31 - 1], dtype=torch.int32)
        chosen[missing] = nowhere[torch.randint(0, 4, (int(missing.sum()),), generator=generator)]
        count = None
        if lengths:
            count = torch.randint(0, k + 1, (tokens,), generator=generator).to(torch.int32)
            count[0] = k
            if tokens > 2:
                count[2] = 0
            past = torch.arange(k) >= count[:, None]
            chosen[past] = pool.capacity - 1  # a row of NaN
        elif tokens > 2:
            chosen[2] = -1
        sets.append(KeySet(pool, chosen, count))
    q = torch.randn(tokens, heads, sets[0].pool.row_format.dim, generator=generator).bfloat16()
    if sink:
        options["sink"] = torch.randn(heads, generator=generator)
    if rotate:
        positions = torch.randint(0, POSITIONS, (tokens,), generator=generator).to(torch.int32)
        options["rotate_back"] = (rope_table(1e4 ** (-torch.arange(32) / 32), POSITIONS), positions)
    if lse:
        options["return_lse"] = True
    return Case(q, sets, options)


def judge(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest relative error of a head (and NaN where NaN is wanted)."""
    got, wanted = got.float().cpu(), wanted.float().cpu()
    assert torch.equal(got.isnan(), wanted.isnan())
    got, wanted = got.nan_to_num(0.0), wanted.nan_to_num(0.0)
    norm = wanted.norm(dim=(0, 2)).clamp(min=1e-30)
    return float(((got - wanted).norm(dim=(0, 2)) / norm).max())


def judge_lse(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = LSE_TOLERANCE) -> None:
    got, wanted = got.cpu(), wanted.cpu()
    seen = wanted.isfinite()
    assert torch.equal(seen, got.isfinite())
    assert torch.equal(got[~seen].nan_to_num(1.0), wanted[~seen].nan_to_num(1.0))
    assert ((got - wanted)[seen].abs() < tolerance + 1e-6 * wanted[seen].abs()).all()  # fp32 itself at 1e4
