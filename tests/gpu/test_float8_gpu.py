"""Attention over FP8 keys and values on a Hopper GPU: masks, states, row counts, page sizes; sizes drawn at random."""

import math
import random
from dataclasses import replace

import pytest
import torch
from helpers.float8_cases import (
    FACTORS,
    NVFP4,
    Case,
    check,
    check_extreme,
    converting_in,
    extremes,
    many_rows,
    on_gpu,
    shapes_for_many_rows,
)

from warpspec.fmha import attention

FP16, E5M2 = torch.float16, torch.float8_e5m2
pytestmark = pytest.mark.gpu
CASES = [
    Case(1, 3000, (16, 2), batch=3, lengths=(3000, 17, 0), scale="request"),
    Case(1, 3000, (8, 1), batch=3, page=16, lengths=(2999, 33, 1), scale="request", sink=True),
    Case(1, 5000, (8, 1), 64, float8=E5M2, batch=2, lengths=(5000, 300), splits=3, scale="tensor"),
    Case(1, 2000, (8, 8), 256, float8=E5M2, dtype=FP16, scale=None, nan=False),
    Case(1, 2000, (4, 2), 256, page=64, lengths=(1990,), window=(700, 0), normalize=False),
    Case(2, 2000, (8, 2), 128, normalize=False, page=64, lengths=(1990,)),
    Case(4, 1000, (4, 1), 64, causal=True, nan=True),
    Case(3, 1100, (8, 2), 128, dtype=FP16, causal=True, shared=True, window=(500, 3)),
    Case(16, 1100, (8, 8), 128, causal=True, sink=True),
    Case(5, 1100, (24, 8), 128, float8=E5M2, causal=True, page=128, batch=2, lengths=(1000, 3)),
    Case(3, 900, (32, 2), 128, batch=2, page=16, lengths=(900, 33)),
    Case(150, 700, (16, 2), batch=2, page=16, lengths=(700, 33), scale="request", causal=True),
    Case(700, 700, (4, 2), 64, dtype=FP16, float8=E5M2, window=(90, 0), sink=True, nan=True),
    Case(700, 1300, (4, 2), 128, dtype=FP16, causal=True, nan=True),
    Case(700, 1300, (4, 2), 128, float8=E5M2, causal=True, normalize=False),
    Case(300, 900, (4, 2), 256, dtype=FP16, causal=True, page=32, lengths=(900,)),
    Case(300, 900, (2, 2), 256, window=(64, 64), sink=True),
    Case(1030, 1300, (4, 2), 128, batch=2, page=48, lengths=(1290, 7), causal=True, scale="request"),
    Case(2100, 1300, (2, 2), 64, dtype=FP16, float8=E5M2, window=(90, 5), nan=True),
]


def drawn(seed: int) -> Case:
    """A case of a seed: few queries over requests of any length."""
    draw = random.Random(seed)
    kv_heads, group, dim = draw.choice((1, 2, 8)), draw.choice((1, 3, 4, 8, 12)), draw.choice((64, 128, 256))
    queries, keys = draw.choice((1, 1, 1, 2, 7)), draw.randint(1, 4000)
    batch = draw.randint(1, 6)
    lengths = tuple(draw.randint(0, keys) for _ in range(batch))
    return Case(
        queries, keys, (group * kv_heads, kv_heads), dim, batch=batch, lengths=lengths,
        float8=draw.choice((torch.float8_e4m3fn, E5M2)), dtype=draw.choice((torch.bfloat16, FP16)),
        page=draw.choice((0, 16, 48, 64, 256)), causal=draw.random() < 0.5, sink=draw.random() < 0.3,
        scale=draw.choice(("tensor", "head", "request", None)), splits=draw.choice((None, None, 1, 3)),
        window=draw.choice((None, None, (draw.randint(0, 3000), 0))),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_reference(case):
    check(case, on_gpu)


@pytest.mark.parametrize("dim, format, shape", shapes_for_many_rows())
def test_every_shape_for_many_rows(dim, format, shape):
    """Also the shapes that plans do not choose for so small a problem, in as many KV tiles as make races likely."""
    with converting_in(shape):
        check(replace(many_rows(dim, format), keys=2600, lengths=(2600, 1003)), on_gpu)


@pytest.mark.parametrize("seed", range(24))
def test_drawn(seed):
    check(drawn(seed), on_gpu)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, E5M2, NVFP4])
def test_extreme_scales_and_codes(format, queries):
    for arguments in extremes(format, queries):
        got = on_gpu(arguments)
        check_extreme(*got, *attention(**arguments, return_lse=True, backend="reference"))


@pytest.mark.parametrize("queries", [1, 12, 200])
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, NVFP4])
def test_scales_that_make_up_for_each_other(format, queries):
    """As in the simulator, at the ends of fp32's range, where the hardware may round subnormal numbers to 0."""
    arguments = Case(queries, 400, (8, 1), 64, float8=format, scale="tensor").arguments()
    for factor, scale, k_scale in FACTORS:
        scales = {"scale": scale, "k_scale": torch.tensor(k_scale)}
        call = arguments | scales | {"q": arguments["q"] * factor}
        check_extreme(*on_gpu(call), *attention(**call, return_lse=True, backend="reference"))


@pytest.mark.parametrize("queries", [1, 12, 200])
def test_queries_of_any_size(queries):
    """On the GPU as in the simulator: rows of 0, of 2^-100, of 2^20, with one large number, with NaN, with Inf."""
    arguments = Case(queries, 400, (8, 1), 128, scale=None).arguments()
    q = arguments["q"]
    for head, factor in enumerate((0.0, 2.0**-100, 2.0**-20, 2.0**20)):
        q[:, :, head] *= factor
    q[:, :, 5, 3], q[:, :, 6, 3], q[:, :, 7, 3] = 2.0**12, math.nan, math.inf
    o, _ = on_gpu(arguments)
    wanted = attention(**arguments, backend="reference")
    assert torch.equal(o.isnan(), wanted.isnan()) and bool(wanted[:, :, 6:].isnan().all())
    error = (o - wanted)[:, :, :6].float().norm(dim=-1) / wanted[:, :, :6].float().norm(dim=-1)
    assert error.max() < 4e-3


def test_scales_of_requests_without_keys():
    """NaN there reaches nobody."""
    arguments = Case(1, 300, (8, 1), batch=2, lengths=(300, 0), scale="request").arguments()
    wanted, _ = on_gpu(arguments)
    for name in ("k_scale", "v_scale"):
        arguments[name][1] = math.nan
    got, _ = on_gpu(arguments)
    assert torch.equal(got, wanted) and not bool(got[1].any())


@pytest.mark.parametrize("queries, dim", [(1, 128), (2, 64), (6, 128), (6, 256), (150, 64), (600, 128)])
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, NVFP4])
def test_bias(format, queries, dim):
    """A bias over codes: warps without one would be taken for the first shapes."""
    arguments = Case(queries, 1100, (8, 2), dim, float8=format, batch=2, causal=True).arguments()
    generator = torch.Generator().manual_seed(1)
    arguments["bias"] = torch.randn(2, 8, queries, 1100, generator=generator).bfloat16()
    assert_near(arguments)


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, NVFP4])
def test_maps_and_masks(format):
    """Soft caps, a negative scale, a tree of drafts and an image's range over codes."""
    arguments = Case(6, 800, (8, 2), 128, float8=format, causal=True).arguments()
    drafts = torch.tensor([[1, 3, 5, 9, 17, 33]])  # the first, and five that follow it
    image = torch.full((1, 6, 2), -1, dtype=torch.int32)
    image[0, :3] = torch.tensor([794, 797])
    for option in ({"softcap": 5.0}, {"scale": -0.1}, {"tree": drafts}, {"ranges": image}):
        assert_near(arguments | option)


def assert_near(arguments: dict) -> None:
    wanted = attention(**arguments, backend="reference").float()
    got = on_gpu(arguments)[0].float()
    assert (got - wanted).norm() < 4e-3 * wanted.norm()
