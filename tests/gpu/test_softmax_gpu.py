"""Row softmax on the GPU of this machine: random shapes through every strategy, against torch in float64."""

import random

import pytest
import torch
from helpers.softmax_cases import OF_TORCH, check, logits, matrix, untouched

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random_cases(count, most_elements):
    draw = random.Random(7)
    cases = []
    while len(cases) < count:
        rows, length = round(2 ** draw.uniform(0, 14)), round(2 ** draw.uniform(0, 24))
        if rows * length <= most_elements:
            aligned = draw.random() < 0.4
            length = -(-length // 8) * 8 if aligned else length
            offset, gap = (0, 0) if aligned else (draw.randrange(8), draw.choice((0, 0, 1, 5)))
            cases.append((rows, length, draw.choice(DTYPES), offset, gap))
    return cases


@pytest.mark.parametrize("rows, length, dtype, offset, gap", random_cases(24, 2**24))
def test_every_strategy_at_random_shapes(rows, length, dtype, offset, gap):
    from warpspec.common.launch import target_of
    from warpspec.softmax import launch
    from warpspec.softmax.plan import best_of_each
    from warpspec.softmax.problem import SoftmaxProblem

    _, x = matrix(
        rows, length, dtype, offset=offset, gap=gap, device="cuda", fill=logits(rows, length, device="cuda")
    )
    storage, out = matrix(rows, length, dtype, offset=offset, gap=gap, device="cuda")
    problem = SoftmaxProblem.of(x, out)
    target = target_of(x.device)
    plans = best_of_each(problem, target)
    assert plans
    for name, plan in plans.items():
        out.fill_(torch.nan)
        run = launch.launcher(problem, target, plan)
        run(x, out)
        check(out, x)
        assert untouched(storage, out), name
        first = out.clone()
        for _ in range(3):
            run(x, out)
            assert torch.equal(first.nan_to_num(7), out.nan_to_num(7)), f"{name} is not repeatable"


@pytest.mark.parametrize("shape", [(300, 1000), (3, 70001), (2, 3000001)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_special_values_and_in_place(shape, dtype):
    from warpspec.softmax import softmax

    values = logits(*shape, device="cuda")
    values[0, shape[1] // 2] = torch.nan
    values[1, 1:] = -torch.inf
    x = values.to(dtype)
    expected = x.clone()
    check(softmax(x), expected)
    assert softmax(x, out=x) is x
    check(x, expected)


@pytest.mark.parametrize("shape", [(300, 1000), (3, 16384), (64, 50257), (3, 3000001)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_rows_far_below_zero_and_outliers(shape, dtype):
    """Exponentials taken against anything but the row's maximum, or a part's own, would overflow."""
    from warpspec.softmax import softmax

    x = logits(*shape, device="cuda") - 500
    x[:, shape[1] // 3 :] = -torch.inf
    x[1, 1], x[2, -1] = 300.0, 300.0  # odd columns too
    x = x.to(dtype)
    check(softmax(x), x)


@pytest.mark.parametrize("length", [1024, 65536, 3000000])
def test_out_off_the_boundaries_of_x(length):
    from warpspec.softmax import softmax

    _, x = matrix(3, length, torch.bfloat16, device="cuda", fill=logits(3, length, device="cuda"))
    storage, out = matrix(3, length, torch.bfloat16, offset=1, gap=16, device="cuda")
    for _ in range(2):
        out.fill_(torch.nan)
        assert softmax(x, out=out) is out
        check(out, x)
        assert untouched(storage, out)


def test_rows_of_only_minus_infinity_and_infinity():
    from warpspec.softmax import softmax

    x = torch.full((4, 5000), -torch.inf, device="cuda")
    x[1, 17], x[2] = torch.inf, 1.0
    y = softmax(x)
    assert y[[0, 1, 3]].isnan().all()
    check(y, x)


@pytest.mark.parametrize("shape", [(64, 1000), (4, 65536), (4, 1048576)])
def test_graph_capture(shape):
    """Replays see new inputs; also the strategy with a workspace, beside eager calls on another stream."""
    from warpspec.softmax import softmax

    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    softmax(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = softmax(x)
        z = softmax(y)
    other = torch.cuda.Stream()
    for _ in range(3):
        x.normal_()
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(other):
            beside = softmax(x)
        torch.cuda.synchronize()
        check(y, x)
        check(z, y)
        assert torch.equal(beside, y)


def test_many_streams_at_once():
    """The grid-wide exchange on several streams: none waits for ever, none sees another's states."""
    from warpspec.softmax import softmax

    xs = [torch.randn(4, 1048576 + 8 * i, device="cuda", dtype=torch.bfloat16) for i in range(4)]
    expected = [softmax(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                results.append(softmax(x))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % len(xs)])


def test_compiles_and_differentiates():
    from warpspec.softmax import softmax

    x = torch.randn(33, 1001, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer = torch.compile(lambda x: softmax(x * 2).float().square().sum(), fullgraph=True)
    layer(x).backward()
    twin = x.detach().clone().requires_grad_()
    torch.softmax(twin * 2, -1).float().square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("length", [384, 4096, 50257, 129280, 2**20])
def test_error_is_not_above_torchs(length):
    """fp32, at most 1.25 times torch's error against float64, no allowance: a bias in exponentials would show."""
    from warpspec.softmax import softmax

    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(max(4, 2**24 // length), length, device="cuda", generator=generator)
    exact = torch.softmax(x.double(), -1)
    error, own = ((y - exact).norm() / exact.norm() for y in (softmax(x), torch.softmax(x, -1)))
    assert error <= OF_TORCH * own, (error, own)


def test_length_limit():
    from warpspec.softmax import softmax

    x = torch.randn(1, 2**25, device="cuda", dtype=torch.float16)
    check(softmax(x), x)
    with pytest.raises(ValueError, match=r"^x: rows must have"):
        softmax(torch.empty(1, 2**25 + 1, device="cuda", dtype=torch.float16))
