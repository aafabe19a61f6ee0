"""Rows of one query that few keys decide: O is then as exact as torch's, row by row.

Rounded to 16 bits, the weight of such a key, or of several alike, puts its error into all of O: 2.5 times torch's and
more. At a reference that follows the maximum at every step it is 1; here the maximum rises, in the last tile, by
anything from nothing to more than the reference may lag behind otherwise.
"""

import math

import pytest
import torch

from warpspec.fmha import attention

HEADS, KEYS = 64, 192
HIGHEST = 9.0  # powers of two: the reference follows from 8 in any case
WORST = 1.25  # of torch's error
LITTLE = -20.0


def rows(steps: list[tuple[int, int, float]], dim: int):
    """q [1, 1, HEADS, dim], kv [1, KEYS, 1, dim] bf16. steps: (first key, how many, share): their score is that share
    of the head's height, which rises from head to head to HIGHEST; of all other keys LITTLE. In powers of two, scale 1.

    A score is the product of q and kv at 0, with what its rounding loses in q at 1.
    """
    generator = torch.Generator().manual_seed(dim)
    heights = torch.linspace(0.0, HIGHEST, HEADS) * math.log(2)
    q, kv = torch.zeros(1, 1, HEADS, dim), torch.randn(1, KEYS, 1, dim, generator=generator)
    q[0, 0, :, 0] = heights.bfloat16()
    q[0, 0, :, 1] = (heights - heights.bfloat16()) * 64
    q[0, 0, :, 2] = math.log(2)
    kv[..., :3] = torch.tensor([0.0, 0.0, LITTLE])
    for first, count, share in steps:
        kv[0, first : first + count, 0, :3] = torch.tensor([share, share / 64, 0.0])
    return q.bfloat16(), kv.bfloat16()


every_peak = pytest.mark.parametrize("steps", [
    pytest.param([(150, 1, 0.0), (0, 1, 1.0)], id="one key over one"),
    pytest.param([(130, 7, 0.0), (5, 1, 1.0)], id="one over seven"),
    pytest.param([(128, 64, 0.0), (0, 1, 1.0)], id="one over sixty-four"),
    pytest.param([(130, 20, 0.0), (0, 8, 1.0)], id="eight over twenty"),
    pytest.param([(128, 64, 0.0), (0, 64, 1.0)], id="a tile over a tile"),
    pytest.param([(150, 20, 0.0), (70, 1, 0.5), (1, 1, 1.0)], id="in steps"),
])  # fmt: skip


def check_as_exact_as_torch(steps, dim: int, shared_kv: bool, *, v_dim: int | None = None, **options) -> None:
    """Backend "sim" on rows of these steps. Tiles are taken from the newest key to the oldest. v_dim: of V, the first
    columns of K, if it is narrower. options: further arguments of ``attention``, which leave o as it is; one split, if
    they do not say otherwise."""
    q, kv = rows(steps, dim)
    options.setdefault("num_splits", 1)
    if v_dim is not None:
        options["v_dim"] = v_dim
    o = attention(q, kv, None if shared_kv else kv.clone(), scale=1.0, backend="sim", **options)
    got = (o[0] if options.get("return_lse") else o)[0, 0]
    v = kv[..., :v_dim]
    exact = (q[0, 0].double() @ kv[0, :, 0].double().T).softmax(-1) @ v[0, :, 0].double()
    keys, values = (x.transpose(1, 2).expand(1, HEADS, KEYS, x.shape[-1]) for x in (kv, v))
    torchs = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), keys, values, scale=1.0)[
        0, :, 0
    ]
    error, own = ((t.double() - exact).norm(dim=-1) / exact.norm(dim=-1) for t in (got, torchs))
    worst = (error / own).argmax().item()
    assert (error <= WORST * own).all(), f"head {worst}: {error[worst]:.1e}, torch's {own[worst]:.1e}"
