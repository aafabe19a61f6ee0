"""The layer on sm_90a, and what of it runs on any GPU: sorting, routing and un-permuting without a word from the
host."""

import pytest
import torch
from helpers.moe_cases import GEMM_TOLERANCE, exact_case, make_experts, randn, relative_error

from warpspec.common import nvfp4
from warpspec.common.launch import target_of
from warpspec.moe import moe_ffn, ops, route
from warpspec.moe.permute import sort_tokens
from warpspec.moe.problem import LayerProblem
from warpspec.moe.sm90.layer import Layer, list_work
from warpspec.moe.sort import SortShape, sort_choices
from warpspec.moe.streamed import reorder
from warpspec.moe.unpermute import unpermute

pytestmark = pytest.mark.gpu

TOKENS, CHOICES, EXPERTS, WIDTH = 700, 6, 40, 2880


@pytest.fixture
def no_synchronisation():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def case():
    """(logits, rows, weights) on the GPU."""
    rows = randn(TOKENS * CHOICES, WIDTH, seed=2).bfloat16()
    return randn(TOKENS, EXPERTS).cuda(), rows.cuda(), randn(TOKENS, CHOICES, seed=1).cuda()


def test_no_synchronisation(no_synchronisation):
    torch.cuda.set_sync_debug_mode("default")
    logits, rows, weights = case()
    out = torch.full((TOKENS, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
    unpermute(rows, sort_tokens(route(logits, CHOICES)[0], EXPERTS).position, weights, out)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    ids, _ = route(logits, CHOICES, scoring="sigmoid", bias=logits[0])
    tokens = sort_tokens(torch.where(ids == 3, -1, ids), EXPERTS)
    ops.sorted_rows(TOKENS * CHOICES, tokens.offsets)
    unpermute(rows, tokens.position, weights, out)


def test_same_as_on_the_cpu():
    logits, rows, weights = case()
    ids, _ = route(logits, CHOICES)
    ids[::7, 2] = -1
    tokens, expected = sort_tokens(ids, EXPERTS), sort_tokens(ids.cpu(), EXPERTS)
    for name in ("source", "position", "offsets"):
        assert torch.equal(getattr(tokens, name).cpu(), getattr(expected, name))
    rows[int(tokens.offsets[-1]) :] = torch.nan
    out = torch.full((TOKENS, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")
    unpermute(rows, tokens.position, weights, out)
    exact = torch.zeros(TOKENS, WIDTH, dtype=torch.double, device="cuda")
    for j in range(CHOICES):
        taken = tokens.position[:, j] >= 0
        exact[taken] += weights[taken, j, None].double() * rows[tokens.position[taken, j].long()].double()
    assert (out.double() - exact).abs().le(exact.abs() * 2**-8 * 1.01 + 1e-4).all()
    again = torch.full_like(out, torch.nan)
    unpermute(rows, tokens.position, weights, again)
    assert torch.equal(again, out)


def test_under_graph_capture():
    logits, rows, weights = case()
    out = torch.full((TOKENS, WIDTH), torch.nan, dtype=torch.bfloat16, device="cuda")

    def layer():
        unpermute(rows, sort_tokens(route(logits, CHOICES)[0], EXPERTS).position, weights, out)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    logits.copy_(randn(TOKENS, EXPERTS, seed=9))
    layer()
    expected = out.clone()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("shape", [None, SortShape(32, ctas=1)], ids=str)
@pytest.mark.parametrize(("tokens", "experts"), [(5000, 256), (40000, 512)])
def test_sorts_of_many_choices(shape, tokens, experts):
    """The kernel sorts as torch does, twice."""
    ids = (randn(tokens, CHOICES).abs() * experts / 3).int().cuda()  # some of no expert, some of many choices
    x = randn(tokens, 464).bfloat16().cuda()
    expected = sort_tokens(ids, experts)
    for _ in range(2):
        got, work, activations, _ = sort_choices(ids, experts, widths=(128, 64), x=x, shape=shape)
        for name in ("source", "position", "offsets"):
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
        listed = list_work(expected.offsets, (128, 64), ids.numel())
        entries = slice(1, int(work[0, 1]) + 1)
        assert torch.equal(work[0, :2], listed[0, :2]) and torch.equal(work[entries, :3], listed[entries, :3])
        assert torch.equal(activations, reorder(x))


def test_reference_on_the_gpu():
    layer, _ = make_experts(5, 64, 40, biases=True, shared=1)
    x = randn(30, 64).bfloat16()
    ids, weights = route(randn(30, 4), 2)
    expected = moe_ffn(x, layer, ids, weights, backend="reference")
    on_gpu = (tensor.cuda() for tensor in (ids, weights))
    got = moe_ffn(x.cuda(), layer.to("cuda"), *on_gpu, backend="reference")
    torch.testing.assert_close(got.cpu(), expected, rtol=2e-2, atol=2e-2)


hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs sm_90a"
)


@pytest.fixture(scope="module")
def streamed_layer():
    """Experts with biases, one of them shared, laid out for sm_90a from the GPU's own tensors."""
    layer, _ = make_experts(9, 464, 200, biases=True, shared=1)
    return layer.to("cuda").for_backend()


def layer_case(tokens, seed=0):
    x = randn(tokens, 464, seed=seed).bfloat16().cuda()
    ids, weights = route(2 * randn(tokens, 8, seed=seed + 1).cuda(), 3)
    ids[::5, 1] = -1
    return x, ids, weights


@hopper
@pytest.mark.parametrize("tokens", [1, 7, 20, 60, 200, 1500])
def test_layer(streamed_layer, tokens):
    """Against the reference; the same bits again, and for a token alone."""
    x, ids, weights = layer_case(tokens)
    options = dict(activation="swiglu_oai", limit=2.0)
    got = moe_ffn(x, streamed_layer, ids, weights, **options)
    expected = moe_ffn(x, streamed_layer, ids, weights, **options, backend="reference").float()
    assert relative_error(got, expected) < 1.3 * GEMM_TOLERANCE
    worst = (got.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert worst.nan_to_num(0.0).max() < 3 * GEMM_TOLERANCE
    for _ in range(3):
        assert torch.equal(moe_ffn(x, streamed_layer, ids, weights, **options), got)
    last = slice(tokens - 1, tokens)
    assert torch.equal(moe_ffn(x[last], streamed_layer, ids[last], weights[last], **options), got[last])


@hopper
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_sorted_and_unsorted(streamed_layer, tokens):
    """Results have the same bits; also in a graph, after other ids have been put in."""
    w13, w2, middle = streamed_layer.w13, streamed_layer.w2, streamed_layer.intermediate_scale
    x, ids, weights = layer_case(tokens)
    problem = LayerProblem.check(
        x, ids, weights, w13, w2, middle, shared=1, activation="swiglu", limit=None, values=False
    )
    for unsorted in (False, True):
        layer, out = Layer(problem, w13, w2, target_of(x.device), unsorted=unsorted), torch.empty_like(x)
        layer.run(x, ids, weights, w13, w2, out)
        assert torch.equal(out, moe_ffn(x, streamed_layer, ids, weights)), unsorted
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                layer.run(x, ids, weights, w13, w2, out)
        for seed in (3, 4):
            for old, new in zip((x, ids, weights), layer_case(tokens, seed=seed), strict=True):
                old.copy_(new)
            graph.replay()
            assert torch.equal(out, moe_ffn(x, streamed_layer, ids, weights)), unsorted


@hopper
def test_layer_in_a_graph_and_compiled(streamed_layer, no_synchronisation):
    torch.cuda.set_sync_debug_mode("default")
    x, ids, weights = layer_case(20)
    expected = moe_ffn(x, streamed_layer, ids, weights)
    torch.cuda.set_sync_debug_mode("error")
    assert moe_ffn(x, streamed_layer, ids, weights).shape == x.shape
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_ffn(x, streamed_layer, ids, weights)
    new = layer_case(20, seed=5)
    for old, other in zip((x, ids, weights), new, strict=True):
        old.copy_(other)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, moe_ffn(*new[:1], streamed_layer, *new[1:])) and not torch.equal(out, expected)
    compiled = torch.compile(moe_ffn, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*new[:1], streamed_layer, *new[1:]), out)


@hopper
def test_w4a4_has_the_bits_of_sm_100a():
    """Compared with its kernels in the simulator, where sums are exact in any order."""
    layer, arguments = exact_case()
    options = dict(activation="swiglu_oai", limit=3.0, precision="w4a4")
    x, *routing = arguments
    expected = moe_ffn(x, layer, *routing, **options, backend="sim")
    x, *routing = (tensor.cuda() for tensor in arguments)
    got = moe_ffn(x, layer.for_backend("sm90").to("cuda"), *routing, **options).cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("global_dims", [0, 1])
def test_quantiser_has_the_cpus_bits(global_dims):
    """The definition in torch, which on a GPU would divide by a Python number inexactly."""
    x = randn(300, 464).bfloat16()
    got, expected = (nvfp4.quantize(t, global_dims=global_dims) for t in (x.cuda(), x))
    assert torch.equal(got.global_scale.cpu(), expected.global_scale)
    assert torch.equal(got.scale.cpu().float(), expected.scale.float())
    assert torch.equal(got.data.cpu(), expected.data)


@hopper
@pytest.mark.parametrize("tokens", [1, 60, 1500])
def test_w4a4(streamed_layer, tokens):
    x, ids, weights = layer_case(tokens)
    options = dict(activation="swiglu", precision="w4a4")
    got = moe_ffn(x, streamed_layer, ids, weights, **options)
    expected = moe_ffn(x, streamed_layer, ids, weights, **options, backend="reference").float()
    assert relative_error(got, expected) < 5 * GEMM_TOLERANCE  # a sum's last bits decide a code now and then
    assert torch.equal(moe_ffn(x, streamed_layer, ids, weights, **options), got)


@hopper
def test_layouts_are_refused():
    layer, _ = make_experts(3, 64, 64)
    x, ids, weights = randn(2, 64).bfloat16().cuda(), torch.zeros(2, 1).int().cuda(), torch.ones(2, 1).cuda()
    with pytest.raises(ValueError, match="laid out for 'sm100'"):
        moe_ffn(x, layer.to("cuda"), ids, weights)
