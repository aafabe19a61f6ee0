"""softmax_topk on a GPU, against torch in float64."""

import helpers.topk_cases as cases
import pytest
import torch

from warpspec.softmax.topk import softmax_topk

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def poisoned(rows, length, dtype, offset, gap, seed):
    """Random rows as a view, NaN everywhere around them."""
    buffer = torch.full((offset + rows * (length + gap) + 64,), torch.nan, dtype=dtype, device="cuda")
    view = buffer.as_strided((rows, length), (length + gap, 1), offset)
    return view.copy_(cases.random_rows(rows, length, dtype, seed=seed, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_random_shapes(dtype):
    generator = torch.Generator().manual_seed(DTYPES.index(dtype))

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    for trial in range(24):
        length = min(2 ** draw(0, 20) + draw(-3, 9), 2**20) if trial % 2 else draw(1, 3000)
        length = max(length, 1)
        rows = max(1, min(draw(1, 2 ** draw(0, 12)), 2**24 // length))
        k = draw(1, min(length, 128 if trial % 3 else 12))
        logits = poisoned(rows, length, dtype, draw(0, 9), draw(0, 9), trial)
        renormalize = bool(trial % 2)
        results = [softmax_topk(logits, k, renormalize=renormalize) for _ in range(2)]
        cases.judge(*results[0], logits, k, renormalize)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))  # bit for bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copies", [1, 40, 400])  # few rows are divided among more warps
def test_adversarial_rows(dtype, copies):
    for length, k in ((37, 5), (384, 6), (640, 20), (2048, 8), (4100, 32), (33333, 10), (70001, 128)):
        rows = torch.stack(list(cases.adversarial_rows(length, k, dtype).values())).cuda()
        logits = rows.repeat(max(1, copies * 2000 // length), 1)
        cases.judge(*softmax_topk(logits, k), logits, k)


def test_agrees_with_torch():
    """torch.topk of torch.softmax: values to rounding."""
    logits = cases.random_rows(512, 50257, device="cuda")
    probs, indices = softmax_topk(logits, 10)
    values, columns = logits.softmax(-1).topk(10)
    torch.testing.assert_close(probs, values, rtol=2e-6, atol=0)
    assert (
        indices == columns
    ).float().mean() > 0.999  # equal probabilities of different logits have any order


@pytest.mark.parametrize("scale", [1.0, 4.0])  # sums of many small terms; a few large ones
@pytest.mark.parametrize(("dtype", "length"), [
    *((torch.float32, length) for length in (384, 4096, 50257, 129280, 2**20)), (torch.bfloat16, 2048),
])  # fmt: skip
def test_error_is_not_above_torchs(dtype, length, scale):
    """At most 1.25 times that of torch.softmax in the same dtype, both against float64. (In bf16 a low bar: torch's
    result is rounded to it, ours is fp32.)"""
    logits = cases.random_rows(512, length, dtype, scale=scale, device="cuda")
    probs, indices = softmax_topk(logits, 8)
    exact = logits.double().softmax(-1).gather(-1, indices.long())
    torchs = logits.softmax(-1).gather(-1, indices.long())
    error, own = (probs - exact).norm(), (torchs - exact).norm()
    assert error <= 1.25 * own


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_longest_rows(dtype):
    """2**20 columns and k 128, which the simulator would take too long for."""
    for rows, k in ((1, 128), (3, 1), (2, 33)):
        logits = cases.random_rows(rows, 2**20, dtype, device="cuda")
        cases.judge(*softmax_topk(logits, k), logits, k)


def test_cuda_graph_and_streams():
    logits = cases.random_rows(64, 5000, device="cuda")
    expected = softmax_topk(logits, 7)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probs, indices = softmax_topk(logits, 7)
    for _ in range(2):
        probs.fill_(torch.nan)
        indices.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(probs, expected[0]) and torch.equal(indices, expected[1])
    with torch.cuda.stream(torch.cuda.Stream()):
        assert torch.equal(softmax_topk(logits, 7)[0], expected[0])
    torch.cuda.synchronize()


def test_repeated_calls_see_what_changed():
    """The shortcut for repeated calls does not outlive what it was made for."""
    for length in (64, 65):
        for k in (1, 3):
            for renormalize in (False, True):
                for offset in (0, 1):
                    logits = poisoned(5, length, torch.float32, offset, 2, length + k)
                    for _ in range(2):
                        cases.judge(*softmax_topk(logits, k, renormalize=renormalize), logits, k, renormalize)
    with pytest.raises(TypeError):
        softmax_topk(logits, True)


def test_torch_compile():
    compiled = torch.compile(lambda x: softmax_topk(x, 5), fullgraph=True)
    logits = cases.random_rows(32, 1000, device="cuda")
    cases.judge(*compiled(logits), logits, 5)
