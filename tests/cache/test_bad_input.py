"""Bad arguments of ``insert``: the argument is named, and nothing is written."""

import pytest
import torch
from helpers.insert_cases import POISON, make_cache

from warpspec.cache import insert

TOKENS, HEADS, DIM = 4, 2, 64


def arguments(name="e4m3", layout="pages", **changes) -> dict:
    rows = torch.randn(TOKENS, 3 * HEADS, DIM).bfloat16()
    q, k, v = rows.split(HEADS, dim=1)
    found = {"k": k, "v": v, "slots": torch.arange(TOKENS), "q": q, "positions": torch.arange(TOKENS)}
    found |= {"cos_sin": torch.randn(8, DIM), **make_cache(layout, name, HEADS, DIM, DIM).arguments}
    return found | changes


def one(shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


BF16 = torch.bfloat16
NVFP4 = arguments("nvfp4")
WRONG = [
    (TypeError, "k", dict(k=None)),
    (TypeError, "k", dict(k=one((TOKENS, HEADS, DIM)))),
    (ValueError, "k", dict(k=one((TOKENS, HEADS, 520), BF16), v=one((TOKENS, HEADS, 520), BF16))),
    (ValueError, "k", dict(k=one((TOKENS, HEADS, 2 * DIM), BF16)[..., ::2])),
    (ValueError, "k", dict(k=one((TOKENS, HEADS, DIM + 1), BF16)[..., 1:])),
    (ValueError, "v", dict(v=one((TOKENS, HEADS + 1, DIM), BF16))),
    (ValueError, "format", dict(format=None)),
    (ValueError, "format", dict(format="fp8")),
    (ValueError, "format", dict(k_cache=one((9, HEADS, DIM)).to(torch.float8_e5m2))),
    (TypeError, "k_cache", dict(k_cache=one((9, HEADS, DIM), torch.float16), format=None)),
    (ValueError, "k_cache", dict(k_cache=one((9, HEADS, DIM + 1), torch.uint8))),
    (ValueError, "k_cache", dict(k_cache=one((9, HEADS, DIM + 1), torch.uint8)[..., :DIM])),
    (ValueError, "v_cache", dict(v_cache=one((9, HEADS, DIM), torch.uint8))),
    (TypeError, "k_scale", dict(k_scale=0.5)),
    (ValueError, "v_scale", dict(v_scale=one(3))),
    (ValueError, "v_scale", dict(v_scale=one(1, torch.float32).to("meta"))),
    *(
        (ValueError, "k_scale", dict(k_scale=one(HEADS) * value))
        for value in (0.0, -1.0, torch.nan, torch.inf)
    ),
    (ValueError, "v_scale", dict(v_scale=-one(1))),
    (ValueError, "k_block_scales", dict(k_block_scales=one((3, 8, HEADS, 4), torch.uint8))),
    (ValueError, "k_block_scales", NVFP4 | dict(k_block_scales=None)),
    (ValueError, "v_block_scales", NVFP4 | dict(v_block_scales=one((3, 8, HEADS, 8), torch.uint8))),
    (ValueError, "swizzled", dict(swizzled=True)),
    (ValueError, "swizzled", arguments("nvfp4", "slots") | dict(swizzled=True)),
    (ValueError, "k_scale", arguments("bfloat16") | dict(k_scale=one(1))),
    (TypeError, "slots", dict(slots=one(TOKENS))),
    (ValueError, "slots", dict(slots=torch.arange(TOKENS + 1))),
    (ValueError, "slots", dict(slots=torch.tensor([1, 2, 1]))),
    (ValueError, "q", dict(positions=None, cos_sin=None)),
    (ValueError, "out", dict(q=None, out=one((TOKENS, HEADS, DIM), BF16))),
    (ValueError, "positions", dict(q=None, positions=None)),
    (ValueError, "positions", dict(positions=torch.tensor([0, 1, 8, 2]))),
    (ValueError, "cos_sin", dict(cos_sin=one((8, 24)))),
    (ValueError, "cos_sin", dict(cos_sin=one((8, 2 * DIM)))),
    (ValueError, "q_weight", dict(q_weight=one(DIM + 8))),
    (ValueError, "eps", dict(eps=-1.0)),
    (TypeError, "interleaved", dict(interleaved=1)),
]


@pytest.mark.parametrize("error, name, changes", WRONG)
def test_names_the_argument(error, name, changes):
    given = arguments() | changes
    with pytest.raises(error, match=rf"^{name}: "):
        insert(**given, backend="reference")
    untouched = [given[side] for side in ("k_cache", "v_cache") if given[side].dtype == torch.uint8]
    assert all(bool(((t == POISON) | (t == 1)).all()) for t in untouched)


def test_outputs_may_not_overlap():
    given = arguments()
    for changes in (
        dict(v_cache=given["k_cache"]),
        dict(out=given["k"]),
        dict(out=torch.cat((given["q"], given["q"]))[1 : TOKENS + 1], q=torch.empty(0)),
    ):
        pair = given | changes
        if not len(pair["q"]):
            memory = torch.empty(TOKENS + 1, HEADS, DIM, dtype=BF16)
            pair |= dict(q=memory[1:], out=memory[:-1])
        with pytest.raises(ValueError, match="overlap"):
            insert(**pair, backend="reference")


def test_eps_may_be_any_number():
    insert(**arguments(), q_weight=one(DIM), eps=10**30, backend="reference")


@pytest.mark.parametrize("name", ["k", "cos_sin"])
def test_gradients_are_refused(name):
    given = arguments()
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        insert(**given, backend="reference")
