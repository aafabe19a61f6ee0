"""Insert in the simulator: the reference's bits in every format and layout, and nothing written elsewhere."""

import pytest
import torch
from helpers.insert_cases import HARD_SCALES, Case, assert_same, make_cache
from helpers.suites import long

from warpspec.cache import insert, ops
from warpspec.cache.config import InsertConfig
from warpspec.cache.device.insert import INSERT
from warpspec.common.compile import resources
from warpspec.common.launch import simulating

CELLS = Case("e4m3", "cells", 128, 128, queries=5, rotated=64, scale="head", index=torch.int32)
HARD = Case("e4m3", "slots", heads=len(HARD_SCALES), scale="hard")
SWIZZLED = Case("nvfp4", "pages", 128, 64, swizzled=True, scale="tensor", rotated=128)
# Partners 24 numbers apart: a lane of keys holds half of a block, of values a whole one.
PARTLY = Case(
    "nvfp4", "cells", 80, 128, heads=3, queries=5, rotated=48, swizzled=True, scale="head", norm=True
)
CASES = [
    ("sm_90a", CELLS),
    ("sm_90a", HARD),
    ("sm_90a", Case("nvfp4", "cells", 64, 128, heads=8, scale="hard")),
    long(
        "sm_90a",
        Case(
            "nvfp4", "slots", 256, 256, heads=5, queries=9, rotated=64, interleaved=True, dtype=torch.float16
        ),
    ),
    ("sm_90a", Case("bfloat16", "cells", 512, 80, queries=3, rotated=512, norm=True)),
    ("sm_100a", Case("float16", "pages", 80, 256, rotated=32, dtype=torch.float16, table=torch.float16)),
    ("sm_100a", Case("e5m2", "slots", heads=len(HARD_SCALES), scale="hard", dtype=torch.float16)),
    ("sm_100a", SWIZZLED),
    long("sm_90a", Case("e4m3", "pages", 256, 256, queries=2, rotated=64, interleaved=True, norm=True)),
    long("sm_90a", PARTLY),
    long("sm_90a", Case("e5m2", "cells", 96, 96, heads=1, queries=7, rotated=96, interleaved=True)),
    long("sm_100a", CELLS),
    long("sm_100a", HARD),
    long("sm_100a", Case("nvfp4", "slots", 512, 512, heads=1, queries=1, rotated=512, scale="tensor")),
]


@pytest.fixture
def unchecked(monkeypatch):
    """Values of slots and positions are not checked, as on a GPU."""
    monkeypatch.setattr(ops, "check_values", lambda operands: None)


@pytest.mark.parametrize("arch, case", CASES)
def test_stores_the_bits_of_the_reference(arch, case, unchecked):
    caches, queries = {}, {}
    for backend in ("sim", "reference"):
        cache = caches[backend] = make_cache(case.layout, case.name, case.heads, case.dim, case.v_dim)
        arguments = case.arguments() | cache.arguments
        if case.queries:
            arguments["out"] = arguments["q"]
        with simulating(arch, seed=1):
            queries[backend] = insert(**arguments, backend=backend)
        assert queries[backend] is arguments.get("q")
    assert_same(caches["sim"], caches["reference"], queries["sim"], queries["reference"], case)


def test_numbers_that_are_only_stored_keep_their_bits():
    """Without a norm and a rotation, 16 bits are copied, those of NaN included; queries need not be there."""
    case = Case("bfloat16", "cells")
    cache, arguments = make_cache(case.layout, case.name, 2, 64, 64), case.arguments()
    with simulating("sm_90a"):
        insert(**{**arguments, "slots": torch.arange(8)}, **cache.arguments, backend="sim")
    stored = cache.arguments["k_cache"][0].view(torch.int16), cache.arguments["v_cache"][0].view(torch.int16)
    assert torch.equal(stored[0], arguments["k"].view(torch.int16))
    assert torch.equal(stored[1], arguments["v"].view(torch.int16))
    cache.arguments["k_cache"].zero_()
    with simulating("sm_90a"):  # no token has a slot
        insert(**{**arguments, "slots": torch.arange(0)}, **cache.arguments, backend="sim")
    assert not cache.arguments["k_cache"].any()


@pytest.mark.parametrize("name, registers", [("e4m3", 64), long("nvfp4", 72)])
def test_no_spills(name, registers):
    """A Llama layer's kernel: no register spills, and enough CTAs fit an SM to keep memory busy."""
    arch, config = (
        "sm_90a",
        InsertConfig("bfloat16", name, 128, 128, 4, 4, 128, k_scale="tensor", v_scale="tensor"),
    )
    for one in resources(INSERT.compiled(config, arch)).values():
        assert one.local_bytes == 0 and one.registers <= registers


def test_order_is_clean(check_order):
    """Rotation in place is right whatever order the threads run in: no access depends on another thread's."""
    case = CELLS
    cache = make_cache(case.layout, case.name, case.heads, case.dim, case.v_dim)
    arguments = case.arguments() | cache.arguments | {"positions": torch.arange(8)}
    with simulating("sm_90a", seed=2):
        insert(**arguments, out=arguments["q"], backend="sim")


def test_numbers_beside_the_borders_of_codes():
    """NVFP4 of scales such that quotients by them lie at the middles between codes, or up to 4 ulp beside: bits of IEEE
    divisions."""
    generator = torch.Generator().manual_seed(3)
    tokens, heads, dim = 6, 32, 64

    def drawn(least, end, *shape):
        return torch.randint(least, end, shape, generator=generator)

    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    scale = (1 + torch.rand(heads, generator=generator)).bfloat16().float() / middles[drawn(0, 7, heads)]
    scale = (scale.view(torch.int32) + drawn(-4, 5, heads).int()).view(torch.float32)
    scale *= drawn(-20, 20, heads).float().exp2()
    divisor = scale[:, None, None] * torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0, 448.0])[:, None, None, None]
    k = middles[drawn(0, 7, tokens, heads, dim // 16, 16)] * divisor
    k = (k.bfloat16().view(torch.int16) + drawn(-1, 2, *k.shape).short()).view(torch.bfloat16)
    k[..., 0] = (6 * divisor)[..., 0].bfloat16()  # the block's scale divides it by scale
    k = (k * (2 * drawn(0, 2, *k.shape) - 1)).flatten(-2)
    k[0, 0, 3], k[1, 1, 4:] = -0.0, 0.0
    v, stored = torch.cat([k, k.flip(0)], dim=-1), {}
    for backend in ("sim", "reference"):
        cache = make_cache("cells", "nvfp4", heads, dim, 2 * dim)
        with simulating("sm_90a"):
            insert(
                k, v, slots=torch.arange(tokens), k_scale=scale, v_scale=scale,
                backend=backend, **cache.arguments,
            )  # fmt: skip
        stored[backend] = cache.memory[0]
    assert torch.equal(stored["sim"], stored["reference"])
