"""The whole layer on the compiled sm_100a kernels, in the simulator, against the FP32 reference."""

import pytest
import torch
from helpers.moe_cases import GEMM_TOLERANCE, fp32_layer, make_experts, randn, relative_error
from helpers.suites import long
from hypothesis import given, settings
from hypothesis import strategies as st

from warpspec import sim
from warpspec.common import nvfp4
from warpspec.moe import NVFP4Experts, grouped_swiglu, moe_ffn, route, sm100
from warpspec.moe.operands import QuantizedRows, first_atoms
from warpspec.moe.sm100.config import PAIR, SINGLE

STAGES = ("SortChoices", "QuantizeRows", "GroupedGemm", "GroupedGemm", "Unpermute")
EXPERTS, HIDDEN, WIDTH = 5, 80, 56  # tails everywhere: K of 80 and 64 (56 padded), N of 112 and 80


@pytest.fixture(scope="module")
def plain():
    return make_experts(EXPERTS, HIDDEN, WIDTH)[0]


@pytest.fixture(scope="module")
def with_biases():
    return make_experts(EXPERTS, HIDDEN, WIDTH, biases=True, shared=1)[0]


def case(tokens, k, experts=EXPERTS, seed=0):
    x = randn(tokens, HIDDEN, seed=seed + 7).bfloat16()
    return x, *route(2 * randn(tokens, experts, seed=seed + 50), k)


def check(layer, x, ids, weights, **options):
    """Worst token's relative error within twice the tolerance, all of them within it; nothing is modified."""
    before = [t.clone() for t in (x, ids, weights)]
    got = moe_ffn(x, layer, ids, weights, **options, backend="sim")
    for tensor, copy in zip((x, ids, weights), before, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), copy.nan_to_num(7.0))
    expected = fp32_layer(x, layer, ids, weights, **options)
    assert torch.equal(got.isnan(), expected.isnan())
    clean = ~expected.isnan().any(1)
    size = expected[clean].norm(dim=1)
    worst = (got[clean].float() - expected[clean]).norm(dim=1)
    assert (worst <= 2 * GEMM_TOLERANCE * size + 1e-30).all()
    if size.any():
        assert relative_error(got[clean], expected[clean]) < GEMM_TOLERANCE
    return got


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(
    ("activation", "limit"), [("swiglu", None), ("swiglu", 0.7), long("swiglu_oai", 0.7)]
)
def test_activations(plain, activation, limit):
    check(plain, *case(9, 3), activation=activation, limit=limit)
    report = sim.last_report()
    assert len(report.launches) == len(STAGES)
    for launch, stage in zip(report.launches, STAGES, strict=True):
        assert stage in launch.kernel and launch.local_bytes == 0


def test_biases_and_a_shared_expert(with_biases):
    check(with_biases, *case(9, 2, experts=EXPERTS - 1), activation="swiglu_oai", limit=7.0)


@pytest.mark.parametrize("tokens", [1, 2])
def test_numbers_of_tokens(plain, tokens):
    got = check(plain, *case(tokens, 2, seed=tokens))
    assert got.any()


def test_one_token_of_any_stride(plain):
    x, ids, weights = case(1, 2)
    strange = torch.zeros(2 * HIDDEN, dtype=torch.bfloat16).as_strided((1, HIDDEN), (3, 1)).copy_(x)
    got, expected = (moe_ffn(rows, plain, ids, weights, backend="sim") for rows in (strange, x))
    assert torch.equal(got, expected)


@pytest.mark.long
def test_one_expert_takes_all(plain):
    x, ids, weights = case(150, 1)
    check(plain, x, torch.full_like(ids, 3), weights)


@pytest.mark.long
@pytest.mark.parametrize("shape", [SINGLE, PAIR], ids=str)
def test_large_tiles(monkeypatch, shape):
    """Tokens as rows of the MMA, one CTA or two that share it: what many tokens an expert take."""
    monkeypatch.setattr(sm100, "choose_shape", lambda *sizes: shape)
    layer, _ = make_experts(3, HIDDEN, WIDTH)
    x, ids, weights = case(290, 1, 3)
    ids[:, 0] = torch.where(torch.arange(290) < 270, 2, 0)  # three tiles of rows, none, and a part of one
    check(layer, x, ids, weights, limit=0.7)
    for launch in sim.last_report().launches:
        assert launch.local_bytes == 0
        if "GroupedGemm" in launch.kernel:
            assert launch.cluster == (shape.ctas, 1, 1)


def test_none_and_twice_the_same(plain):
    x, ids, weights = case(11, 3)
    ids[0], ids[1, 1:], ids[2, 2] = -1, ids[1, 0], -1
    got = check(plain, x, ids, weights)
    assert not got[0].any()
    assert not moe_ffn(x, plain, torch.full_like(ids, -1), weights, backend="sim").any()


def test_ids_out_of_range_are_none(plain):
    x, ids, weights = case(6, 2)
    ids[1, 0], ids[2, 1], ids[3, 0] = EXPERTS, 2**31 - 1, -(2**31)
    kept = torch.where((ids < 0) | (ids >= EXPERTS), -1, ids)
    got = moe_ffn(x, plain, ids, weights, backend="sim")
    assert torch.equal(got, moe_ffn(x, plain, kept, weights, backend="sim"))


@pytest.mark.parametrize(("limit", "poison"), [
    (1.0, torch.nan), (None, torch.inf), long(None, torch.nan), long(1.0, torch.inf),
])  # fmt: skip
def test_nan_and_inf_stay_in_their_token(plain, poison, limit):
    """A clamp must not make a number of NaN, nor rows beside it in a tile be touched."""
    x, ids, weights = case(20, 2)
    clean = moe_ffn(x, plain, ids, weights, limit=limit, backend="sim")
    x[4, 17] = poison
    ids[4] = torch.tensor([1, 3])
    other = torch.arange(20) != 4
    got = check(plain, x, ids, weights, limit=limit)
    assert got[4].isnan().all() and torch.equal(got[other], clean[other])


def test_nan_weights_stay_in_their_expert():
    """NaN in one expert's weights reaches no token of another expert, though tiles of both follow each other."""
    layer, (gate, up, down, *_) = make_experts(3, 64, 64)
    up = up.clone()
    up[1, 5, 7] = torch.nan
    broken = NVFP4Experts.quantize(gate, up, down)
    x, ids, weights = randn(12, 64).bfloat16(), torch.arange(12).view(12, 1) % 3, torch.ones(12, 1)
    ids = ids.int()
    got, expected = (moe_ffn(x, e, ids, weights, backend="sim") for e in (broken, layer))
    of_broken = (ids == 1)[:, 0]
    assert got[of_broken].isnan().all() and torch.equal(got[~of_broken], expected[~of_broken])


def test_zero_rows_and_weights(plain):
    x, ids, weights = case(8, 2)
    x[2], weights[3] = 0.0, 0.0
    got = check(plain, x, ids, weights)
    assert not got[2].any() and not got[3].any()
    zero = NVFP4Experts.quantize(*(torch.zeros(2, *shape) for shape in ((32, 64), (32, 64), (64, 32))))
    got = moe_ffn(randn(5, 64).bfloat16(), zero, torch.zeros(5, 1).int(), torch.ones(5, 1), backend="sim")
    assert not got.any()


@pytest.mark.parametrize(
    ("magnitude", "limit"), [(1e-30, None), long(1e-3, None), long(1e4, 10.0), (1e34, 10.0), long(1e34, None)]
)
def test_magnitudes(plain, magnitude, limit):
    """Tokens of a magnitude, one huge beside small ones. What is cut or vanishes between the GEMMs does in the
    reference, too.
    """
    x, ids, weights = case(10, 2)
    x[3] = (x[3].float() * magnitude).bfloat16()
    check(plain, x, ids, weights, limit=limit)


def test_no_token_depends_on_others(plain):
    """A token alone gives the bits that it gives among others."""
    x, ids, weights = case(17, 3)
    together = moe_ffn(x, plain, ids, weights, backend="sim")
    for t in (0, 9, 16):
        alone = moe_ffn(x[t : t + 1], plain, ids[t : t + 1], weights[t : t + 1], backend="sim")
        assert torch.equal(alone[0], together[t])


@pytest.mark.long
@settings(max_examples=40)
@given(st.integers(1, 160), st.integers(1, 8), st.integers(0, 1000))
def test_random_calls(plain, tokens, k, seed):
    generator = torch.Generator().manual_seed(seed)
    x = randn(tokens, HIDDEN, seed=seed).bfloat16()
    ids = torch.randint(-1, EXPERTS, (tokens, k), generator=generator, dtype=torch.int32)
    check(plain, x, ids, torch.randn(tokens, k, generator=generator).abs())


class TestGroupedSwiglu:
    def test_nvfp4_is_quantised_like_the_reference(self, plain):
        """Bytes may differ where fp32 sums round otherwise; values within a step of e2m1, and hardly any of them."""
        offsets = torch.tensor([3, 3, 140, 141, 150], dtype=torch.int32)
        a = randn(153, HIDDEN).bfloat16()
        got, expected = (
            grouped_swiglu(a, plain.w13, offsets, limit=1.0, out_format="nvfp4", backend=backend)
            for backend in ("sim", "reference")
        )
        assert isinstance(got, QuantizedRows) and got.k == expected.k == 64
        same = got.data[:150, : got.k // 2] == expected.data[:150, : got.k // 2]
        assert same.float().mean() > 0.999
        torch.testing.assert_close(got.dequantize(offsets), expected.dequantize(offsets), rtol=0.5, atol=0.02)
        # The padding of the last block: values 0, and no scale of it that could be NaN.
        assert not nvfp4.unpack(got.data[:150, : got.k // 2])[:, WIDTH:].any()
        assert first_atoms(offsets).tolist() == [0, 1, 1, 3, 4]

    def test_bf16(self, plain):
        offsets = torch.tensor([3, 3, 40, 41, 50], dtype=torch.int32)
        a = randn(53, HIDDEN).bfloat16()
        got = grouped_swiglu(a, plain.w13, offsets, backend="sim")
        expected = grouped_swiglu(a, plain.w13, offsets, backend="reference")
        start = 0
        for end in offsets.tolist():
            if end > start:
                assert relative_error(got[start:end], expected[start:end].float()) < 1.5 * GEMM_TOLERANCE
            start = end
