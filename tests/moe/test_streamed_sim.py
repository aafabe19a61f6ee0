"""The layer on the compiled sm_90a kernels, in the simulator, against the FP32 reference of w4a16."""

from dataclasses import replace

import pytest
import torch
from helpers.moe_cases import GEMM_TOLERANCE, exact_case, make_experts, randn, relative_error
from helpers.suites import long

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.common.launch import SIMULATED
from warpspec.common.nvfp4 import from_mxfp4
from warpspec.moe import NVFP4Experts, grouped_swiglu, moe_ffn, route, sm90, streamed
from warpspec.moe.permute import head_rows
from warpspec.moe.problem import LayerProblem
from warpspec.moe.sm90 import plan
from warpspec.moe.sm90.config import Shape, StreamConfig
from warpspec.moe.sm90.layer import Layer

STAGES = ("SortChoices", "StreamedGemm", "StreamedGemm", "Unpermute")
# Tails everywhere: K of 208 (4 chunks, padded) and 56 (1), N of 112 and 208.
EXPERTS, HIDDEN, WIDTH = (5, 208, 56)


@pytest.fixture(scope="module")
def layer():
    return make_experts(EXPERTS + 1, HIDDEN, WIDTH, biases=True, shared=1)[0].for_backend("sm90")


def case(tokens, k, seed=0):
    return randn(tokens, HIDDEN, seed=seed + 7).bfloat16(), *route(
        2 * randn(tokens, EXPERTS, seed=seed + 50), k
    )


def run(layer, x, ids, weights, backend="sim", activation="swiglu_oai", limit=1.0):
    return moe_ffn(x, layer, ids, weights, activation=activation, limit=limit, backend=backend)


def check(layer, *arguments, **options):
    got = run(layer, *arguments, **options)
    expected = run(layer, *arguments, backend="reference", **options).float()
    assert torch.equal(got.isnan(), expected.isnan())
    clean = ~expected.isnan().any(1)
    assert relative_error(got[clean], expected[clean]) < 1.3 * GEMM_TOLERANCE  # both are rounded
    return got


@pytest.mark.usefixtures("check_order")
def test_the_layer(layer):
    """None, twice the same, out of range; an expert of several tiles, one without rows; a shared expert; tokens of
    strange sizes."""
    x, ids, weights = case(12, 3)
    x[6:8] = (x[6:8].float() * torch.tensor([[1e34], [1e-30]])).bfloat16()
    ids[0], ids[1, 1:], ids[2, 2], ids[3, 0] = -1, ids[1, 0], -1, EXPERTS
    ids[:, 1] = torch.where(ids[:, 1] == 4, 0, ids[:, 1])
    ids[3:, 0] = 2
    check(layer, x, ids, weights)
    launches = sim.last_report().launches
    assert len(launches) == len(STAGES)
    for launch, stage in zip(launches, STAGES, strict=True):
        assert stage in launch.kernel and launch.local_bytes == 0


def test_no_token_depends_on_others(layer):
    x, ids, weights = case(12, 3)
    together = run(layer, x, ids, weights)
    alone = run(layer, x[11:], ids[11:], weights[11:])
    assert torch.equal(alone[0], together[11])
    x[4, 17], x[5, 3] = torch.nan, torch.inf
    got = run(layer, x, ids, weights)
    other = torch.arange(12) // 2 != 2
    assert got[4:6].isnan().all() and torch.equal(got[other], together[other])
    none = torch.full_like(ids[:0], -1)
    assert run(layer, x[:0], none, weights[:0]).shape == (0, HIDDEN)


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "k", "launches"), [(3, 3, 3), (1, 1, 3), (5, 3, 4)])
@pytest.mark.usefixtures("check_order")
def test_unsorted_and_chosen(layer, tokens, k, launches):
    """A choice of none, an expert twice: the same bits. launches: of the way that is chosen."""
    x, ids, weights = case(tokens, k)
    ids[0, k - 1] = -1
    ids[-1, 0] = ids[-1, k // 2]
    prepared = layer.w13, layer.w2, layer.intermediate_scale
    problem = LayerProblem.check(
        x, ids, weights, *prepared, shared=1, activation="swiglu_oai", limit=1.0, values=False
    )
    outs, counts = [], []
    for unsorted in (False, True, None):
        stages = Layer(problem, *prepared[:2], SIMULATED["sm_90a"], unsorted=unsorted)
        outs.append(torch.full_like(x, torch.nan))
        stages.run(x, ids, weights, *prepared[:2], outs[-1])
        counts.append(len(stages.reports))
        assert all(launch.local_bytes == 0 for report in stages.reports for launch in report.launches)
    assert counts == [4, 3, launches] and outs[0].any()
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_grouped_swiglu(layer):
    offsets = torch.tensor([3, 3, 20, 21, 30, 30], dtype=torch.int32)
    a = randn(33, HIDDEN).bfloat16()
    got, expected = (
        grouped_swiglu(a, layer.w13, offsets, limit=2.0, backend=b) for b in ("sim", "reference")
    )
    assert relative_error(got[:30], expected[:30].float()) < GEMM_TOLERANCE


def mxfp4(rows, k, seed):
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (3, rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(118, 126, (3, rows, k // 32), dtype=torch.uint8, generator=generator)
    return from_mxfp4(data, scale)


@pytest.mark.parametrize(
    ("shape", "counts", "classes"),
    [
        (Shape(1, 8, 3, 2, splits=2), (5, 8), (2,)),
        long(replace(plan.SHAPES[48], stages=2), (48, 17, 9), (1, 2, 3)),
        long(replace(plan.SHAPES[144], stages=2), (140, 33, 20), (1, 1, 1, 1, 1, 1, 2, 3, 3)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("check_order")
def test_tiles_of_several_consumers(shape, counts, classes):
    """MXFP4 weights of three row tiles, of which a CTA's tile may lack some; consumers that share K; two row groups of
    one consumer, with load warps that hand on registers; entries of all classes."""
    w = (
        NVFP4Experts.quantize(mxfp4(448, 160, 0), mxfp4(448, 160, 1), mxfp4(160, 448, 2))
        .for_backend("sm90")
        .w2
    )
    assert w.block == 32 and w.row_tiles == 3 and streamed.chunks_of(w.k) == 7
    config = StreamConfig(shape=shape, block=32, early=True)
    assert len(config.widths) == len(classes)
    rows = sum(counts)
    h = randn(rows, w.k).bfloat16()
    heads = head_rows(config.widths)
    work = torch.full((heads + len(counts) + 1, 4), -1, dtype=torch.int32)
    work[:heads].view(-1)[: len(classes)] = torch.tensor(classes)
    experts = (0, 2, 1)
    for i, count in enumerate(counts):
        work[heads + i, :3] = torch.tensor([experts[i], sum(counts[:i]), count])
    out = torch.full((rows, w.n), torch.nan, dtype=torch.bfloat16)
    sm90.grouped_gemm(
        config, streamed.reorder(h), None, w, work, out, ctas=3, target=SIMULATED["sm_90a"], seed=1
    )
    matrices = w.dequantize()
    parts = zip(h.float().split(counts), experts, strict=False)
    expected = torch.cat([part @ matrices[expert].T for part, expert in parts])
    assert relative_error(out, expected) < GEMM_TOLERANCE


def test_w4a4_has_the_bits_of_sm_100a():
    """Where sums are exact in any order; NaN in a token."""
    layer, arguments = exact_case()
    options = dict(activation="swiglu_oai", limit=3.0, precision="w4a4", backend="sim")
    expected, got = (
        moe_ffn(arguments[0], e, *arguments[1:], **options) for e in (layer, layer.for_backend("sm90"))
    )
    assert got[4].isnan().all() and got.isnan().sum() == got.shape[1]
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.long
@pytest.mark.parametrize("shape", [plan.FEW, plan.FEWEST, *plan.SHAPES.values()], ids=str)
def test_no_spills(shape):
    gate = dict(has_limit=True, has_bias=True, choices=4)
    for config in (
        StreamConfig(shape, 32, "swiglu_oai", **gate),
        StreamConfig(shape, has_bias=True, early=True),
    ):
        for kernel in resources(sm90.stream_kernel.compiled(config, "sm_90a")).values():
            assert kernel.local_bytes == 0
