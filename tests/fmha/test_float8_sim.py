"""FP8 keys and values in both kernels, in the simulator, against FP32 on dequantised values."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from helpers.float8_cases import (
    FACTORS,
    NVFP4,
    Case,
    check,
    converting_in,
    many_rows,
    shapes_for_many_rows,
)
from helpers.suites import long

from warpspec import sim
from warpspec.common import kernel_cache
from warpspec.common.launch import simulating
from warpspec.fmha import attention, attention_varlen
from warpspec.fmha.device import block_scales
from warpspec.fmha.sm90 import load, shapes

FP16, E5M2 = torch.float16, torch.float8_e5m2
PAGED = Case(1, 150, (16, 2), batch=2, page=16, lengths=(150, 33), scale="request")
WIDE = Case(70, 140, (2, 1), 256, causal=True)
ONE_TENSOR = Case(3, 200, (8, 2), 128, dtype=FP16, causal=True, shared=True)
SPILLED = {WIDE: 8, ONE_TENSOR: 24}  # bytes a thread that ptxas spills on sm_90a, at most; elsewhere none
CASES = [
    PAGED,
    Case(70, 140, (2, 1), 64, dtype=FP16, float8=E5M2, window=(90, 0), sink=True, nan=True),
    long(Case(1, 300, (16, 2), 64, batch=2, float8=E5M2, lengths=(300, 17), splits=2, scale="tensor")),
    long(Case(1, 200, (8, 1), 256, dtype=FP16, scale=None)),
    long(Case(130, 260, (2, 1), 128, causal=True, nan=True)),
    long(WIDE),
    long(ONE_TENSOR),
    long(Case(2, 200, (8, 2), 128, normalize=False, page=64, lengths=(190,))),
    long(Case(1, 1, (4, 1), 128)),
    long(Case(4, 300, (4, 1), 64, causal=True, nan=True)),
    long(Case(3, 200, (32, 2), 128, batch=2, page=16, lengths=(200, 33))),
]


# The kernel for sm_100a has one way for all numbers of rows; ``test_nvfp4_sim`` runs it by default.
BLACKWELL = [
    long(Case(70, 140, (2, 1), 64, dtype=FP16, float8=E5M2, window=(90, 0), sink=True, nan=True)),
    long(PAGED),
    long(Case(130, 260, (2, 1), 128, causal=True, nan=True)),
    long(Case(70, 140, (2, 1), 256, causal=True, sink=True)),
    long(Case(1, 300, (16, 2), 64, batch=2, float8=E5M2, lengths=(300, 17), splits=2, scale="tensor")),
    long(Case(3, 200, (8, 2), 128, dtype=FP16, causal=True, shared=True)),
    long(Case(2, 200, (8, 2), 256, normalize=False, page=64, lengths=(190,))),
    long(Case(1, 1, (4, 1), 128, scale=None)),
]


def run(arguments, arch="sm_90a", spilled=0, **target):
    with simulating(arch, seed=1, **target):
        results = attention(**arguments, return_lse=arguments["normalize"], backend="sim")
    assert all(launch.local_bytes <= spilled for launch in sim.last_report().launches)
    return results


@pytest.mark.parametrize("queries", [1, pytest.param(3, marks=pytest.mark.long)])
def test_queries_of_any_size(queries):
    """A row of bf16 queries is brought into fp16's range by a factor of its own: rows of 0, of 2^-100, of 2^20, with
    one number far above the others, with NaN, with Inf."""
    arguments = Case(queries, 40, (8, 1), 64, scale="tensor").arguments()  # as test_extreme_scales_and_codes
    q = arguments["q"]
    for head, factor in enumerate((0.0, 2.0**-100, 2.0**-20, 2.0**20)):
        q[:, :, head] *= factor
    q[:, :, 5, 3], q[:, :, 6, 3], q[:, :, 7, 3] = 2.0**12, math.nan, math.inf
    o, _ = run(arguments)
    wanted = attention(**arguments, backend="reference")
    assert torch.equal(o.isnan(), wanted.isnan()) and bool(wanted[:, :, 6:].isnan().all())
    error = (o - wanted)[:, :, :6].float().norm(dim=-1) / wanted[:, :, :6].float().norm(dim=-1)
    assert error.max() < 4e-3


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, long(NVFP4)])
def test_extreme_scales_and_codes(format):
    """A k_scale of 0 makes all weights equal, a v_scale of 0 makes o zero; codes are the largest and the smallest."""
    arguments = Case(1, 40, (8, 1), 64, float8=format, scale="tensor").arguments()
    bounds = torch.tensor([0x7E, 0xFE, 0x01, 0x00] if format != NVFP4 else [0x7F, 0xF7, 0x10, 0x00]).byte()
    for name in "kv":
        chosen = torch.randint(4, arguments[name].shape, generator=torch.Generator().manual_seed(3))
        arguments[name] = bounds[chosen].view(format)
    for k_scale, v_scale in ((0.0, 0.5), (2.0**-14, 0.0), (2.0**-14, 2.0**-60), (2.0**-60, 2.0**60)):
        check_scales(arguments, k_scale, v_scale)


@pytest.mark.parametrize(
    "queries, arch", [(1, "sm_90a"), long(70, "sm_90a"), long(1, "sm_100a"), long(70, "sm_100a")]
)
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, long(NVFP4)])
def test_scales_that_make_up_for_each_other(format, queries, arch):
    """A factor of the queries, the scale of logits and k_scale are bounded by their product alone; where it is too
    small for a number, all weights are equal, and hidden keys stay hidden."""
    arguments = Case(queries, 40, (8, 1), 64, float8=format, scale="tensor").arguments()
    q = arguments["q"]
    for factor, scale, k_scale in FACTORS:
        check_scales(arguments | {"q": q * factor, "scale": scale}, k_scale, 0.5, arch)


def check_scales(arguments, k_scale, v_scale, arch="sm_90a"):
    """Compare o and lse of a call under other scales with the definition's."""
    arguments = arguments | {"k_scale": torch.tensor(k_scale), "v_scale": torch.tensor(v_scale)}
    (o, lse), (wanted, wanted_lse) = (
        run(arguments, arch),
        attention(**arguments, return_lse=True, backend="reference"),
    )
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-6, atol=1e-3)
    assert o.isfinite().all() and (o.float() - wanted.float()).norm() <= 4e-3 * wanted.float().norm()
    assert bool(wanted.any()) == (v_scale != 0)


def test_more_queries_than_expected():
    """max_seqlen_q is a hint, which tiles for few rows have to survive."""
    arguments = Case(3, 30, (4, 1), 64, causal=True).arguments()
    named = {name: arguments[name] for name in ("k_scale", "v_scale", "causal")}
    starts = {"cu_seqlens_q": torch.tensor([0, 3]).int(), "cu_seqlens_k": torch.tensor([0, 30]).int()}
    with simulating("sm_90a"):
        got = attention_varlen(
            *(arguments[name][0] for name in "qkv"), max_seqlen_q=1, **starts, **named, backend="sim"
        )
    wanted = attention(**arguments, backend="reference")[0]
    assert (got - wanted).float().norm() < 4e-3 * wanted.float().norm()


@pytest.mark.parametrize("case", CASES)
def test_against_reference(case):
    check(case, lambda arguments: run(arguments, spilled=SPILLED.get(case, 0)))


@pytest.mark.long
@pytest.mark.parametrize("dim, format, shape", shapes_for_many_rows())
def test_every_shape_for_many_rows(dim, format, shape):
    """Also the shapes that plans do not choose for so small a problem. One SM has more KV tiles than stages."""
    spilled = 48 if shape.consumers == 3 else 16  # bytes, outside the loop over KV tiles
    with converting_in(shape):
        check(many_rows(dim, format), lambda arguments: run(arguments, spilled=spilled, sm_count=1))


@pytest.mark.long
def test_scales_copied_past_a_tile_are_seen(tmp_path, monkeypatch):
    """A mutant: lanes copy the block scales of 64 keys into a stage of 48. Both the checker and the values show it."""
    source = Path(block_scales.__file__).read_text()
    limit = "elif key < config.tile_n:"
    assert source.count(limit) == 1
    (tmp_path / "mutant.py").write_text(source.replace(limit, "elif key < 64:"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(load, "load_scales", importlib.import_module("mutant").load_scales)
    monkeypatch.setattr(kernel_cache, "SOURCES", "a mutant")
    arguments = many_rows(128, NVFP4).arguments()
    wanted = attention(**arguments, backend="reference")
    with converting_in(shapes.FLOAT8_THREE[128]):
        o, _ = run(arguments, spilled=64, sm_count=1)
        assert not (o - wanted).float().norm() < 0.1 * wanted.float().norm()
        monkeypatch.setenv("WARPSPEC_SIM_CHECK", "order")
        with pytest.raises(sim.OrderError, match=r"accesses that nothing orders: shared memory.*\(scales "):
            run(arguments, spilled=64, sm_count=1)


@pytest.mark.parametrize("case", BLACKWELL)
def test_against_reference_on_blackwell(case):
    check(case, lambda arguments: run(arguments, "sm_100a"))


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", [PAGED, Case(130, 260, (2, 1), 128, causal=True)])
def test_order_is_clean(case, arch, check_order):
    check(case, lambda arguments: run(arguments, arch))


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_packed_queries(arch):
    """The rows of packed requests are those of a call for each."""
    arguments = PAGED.arguments()
    q, counts = torch.randn(7, 16, 128, generator=torch.Generator().manual_seed(5)).bfloat16(), (5, 2)
    shared = {name: arguments[name] for name in ("page_table", "kv_lengths", "k_scale", "v_scale")}
    with simulating(arch):
        got = attention_varlen(
            q, arguments["k"], arguments["v"], cu_seqlens_q=torch.tensor([0, 5, 7], dtype=torch.int32),
            max_seqlen_q=5, causal=True, backend="sim", **shared,
        )  # fmt: skip
    for b, rows in enumerate(q.split(counts)):
        own = {name: tensor[b : b + 1] for name, tensor in shared.items()}
        wanted = attention(
            rows[None], arguments["k"], arguments["v"], causal=True, backend="reference", **own
        )[0]
        piece = got[sum(counts[:b]) :][: counts[b]].float()
        assert (piece - wanted.float()).norm() < 4e-3 * wanted.float().norm()


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("format", [torch.float8_e4m3fn, NVFP4])
def test_maps_and_masks(format, arch):
    """Soft caps, a negative scale, a bias, a tree of drafts and an image's range over codes."""
    arguments = Case(6, 80, (4, 2), 64, float8=format, causal=True).arguments()
    drafts = torch.tensor([[1, 3, 5, 9, 17, 33]])  # the first, and five that follow it
    image = torch.full((1, 6, 2), -1, dtype=torch.int32)
    image[0, :3] = torch.tensor([74, 77])
    bias = torch.randn(1, 4, 6, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    for option in ({"softcap": 5.0}, {"scale": -0.1}, {"tree": drafts}, {"ranges": image}, {"bias": bias}):
        call = arguments | option
        wanted = attention(**call, backend="reference").float()
        with simulating(arch):
            got = attention(**call, backend="sim").float()
        assert (got - wanted).norm() < 4e-3 * wanted.norm(), option.keys()
