"""Attention's gradients on the GPU of this machine: against float64 autograd and torch, bits, graphs, torch.compile."""

from dataclasses import replace

import pytest
import torch
from helpers import block_cases
from helpers.gradient_cases import CASES, KERNEL_TOLERANCE, Case

from warpspec.common.repeated import Remembered
from warpspec.fmha import attention, ops
from warpspec.fmha.backward import apart, launch, work
from warpspec.fmha.backward.schedule import Order

pytestmark = pytest.mark.gpu

HEAD_DIMS = (64, 128, 256, 512)
LARGE = [
    Case(f"large-{'causal' if causal else 'full'}-{window}", batch=2, seq_q=700, seq_k=900, heads_q=4, heads_kv=2,
         causal=causal, window=window, sink=True, through="o+lse")
    for causal in (True, False) for window in (None, (200, 30))
]  # fmt: skip
PACKED = Case(
    "packed-large", lengths_q=(1, 300, 0, 700, 64), lengths_k=(900, 300, 20, 1500, 3), heads_q=4, causal=True
)
LENGTHS = {"lengths_q": (1, 300, 0, 700, 64), "lengths_k": (1, 300, 20, 1500, 64)}
SIZES = [
    Case(
        "plain", batch=2, seq_q=500, seq_k=700, heads_q=4, heads_kv=2, causal=True, sink=True, through="o+lse"
    ),
    Case("packed", **LENGTHS, heads_q=4, heads_kv=2, causal=True),
    Case("order", seq_q=500, seq_k=500, heads_q=4, heads_kv=2, causal=True, deterministic=True),
]
SLICED = [
    Case("plain", batch=3, seq_q=500, seq_k=700, heads_q=8, heads_kv=2, causal=True),
    Case("packed", **LENGTHS, heads_q=8, heads_kv=2, causal=True),
    Case("packed-full", **LENGTHS, heads_q=8, heads_kv=2),
]
WINDOWS = [
    Case("window", batch=2, seq_q=900, seq_k=900, heads_q=6, heads_kv=2, window=(300, 0), deterministic=True),
    Case("packed", **LENGTHS, heads_q=8, heads_kv=2, causal=True, window=(200, 0), deterministic=True),
]


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("case", [*CASES, *LARGE, PACKED], ids=lambda case: case.id)
def test_against_float64_autograd(case, dim):
    case = case.with_dim(dim)
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_not_worse_than_torch(dim, causal):
    """Errors against float64 at most 1.25 times those of torch's own kernels in the same dtype, head by head."""
    case = Case("torch", seq_q=1024, seq_k=1024, heads_q=4, heads_kv=4, head_dim=dim, causal=causal)
    tensors = case.tensors("cuda")
    found, expected = case.gradients(tensors), case.expected(tensors)
    heads_first = {name: t.detach().transpose(1, 2).requires_grad_() for name, t in tensors.items()}
    o = torch.nn.functional.scaled_dot_product_attention(*heads_first.values(), is_causal=causal)
    seed = case.seed_of(torch.empty_like(tensors["q"])).transpose(1, 2)
    theirs = torch.autograd.grad(o, list(heads_first.values()), seed)
    for name, other in zip(heads_first, theirs, strict=True):
        wanted = expected[name].transpose(1, 2)
        errors = [
            torch.linalg.vector_norm(t.cpu().double() - wanted, dim=(0, 2, 3))
            for t in (found[name].transpose(1, 2), other)
        ]
        assert (errors[0] <= 1.25 * errors[1]).all(), name


@pytest.mark.parametrize(
    ("qk", "v"),
    [(40, 24), (72, 72), (80, 80), (96, 96), (128, 64), (136, 96), (192, 128), (192, 192), (256, 200)],
)
@pytest.mark.parametrize("case", SIZES, ids=lambda case: case.id)
def test_head_sizes(case, qk, v):
    case = case.with_dim(qk)
    tensors = case.tensors("cuda")
    tensors["v"] = tensors["v"].detach()[..., :v].contiguous().requires_grad_()
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])


@pytest.fixture
def prepared(monkeypatch):
    """What gradients prepare in this test, without the caches of plans and of calls, so that a patched choice is taken
    and forgotten. One main kernel makes all gradients, unless the test says otherwise."""
    found, prepare = [], launch.prepare.__wrapped__
    monkeypatch.setattr(apart, "gains", lambda *_: False)
    monkeypatch.setattr(launch, "prepare", lambda *args: found.append(prepare(*args)) or found[-1])
    monkeypatch.setattr(ops, "_checked", Remembered())
    return found


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("case", SLICED, ids=lambda case: case.id)
def test_sliced_heads(case, slices, dim, monkeypatch, prepared):
    case = case.with_dim(dim)
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(3, 2, slices))
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])
    assert prepared[-1].config.slices and prepared[-1].order.slices == slices


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("flex", [False, True])
def test_sliced_heads_of_lists(flex, dim, monkeypatch, prepared):
    """Batch rows and heads with lists of their own; a last block of keys that is not whole."""
    case = Case("lists", batch=2, seq_q=700, seq_k=900, heads_q=8, heads_kv=2, head_dim=dim, through="o+lse")
    case = replace(case, causal=not flex, blocks=(flex, (2, 8), block_cases.EVEN))
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 3, 2))
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])
    assert prepared[-1].config.slices and prepared[-1].order.slices == 2


APART = [
    Case(
        "plain", batch=2, seq_q=500, seq_k=700, heads_q=4, heads_kv=2, causal=True, sink=True, through="o+lse"
    ),
    Case("full", batch=3, seq_q=300, seq_k=300, heads_q=3, heads_kv=3),
    Case("window", batch=2, seq_q=500, seq_k=600, heads_q=4, heads_kv=2, window=(200, 30), sliced=True),
    Case("long-q", seq_q=700, seq_k=300, heads_q=4, heads_kv=2, causal=True),
    Case("lengths", batch=3, seq_q=300, seq_k=500, heads_q=2, kv_lengths=(500, 130, 0), causal=True),
    Case("packed", **LENGTHS, heads_q=4, heads_kv=2, causal=True),
    Case("packed-full", **LENGTHS, heads_q=4, heads_kv=4, dtype=torch.float16),
    Case("order", batch=2, seq_q=500, seq_k=500, heads_q=4, heads_kv=2, causal=True, deterministic=True),
]


@pytest.mark.parametrize(("qk", "v"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128)])
@pytest.mark.parametrize("case", APART, ids=lambda case: case.id)
def test_queries_apart(case, qk, v, monkeypatch, prepared):
    """dQ by query tiles, dK and dV by key tiles: against float64, and the same bits again."""
    monkeypatch.setattr(apart, "gains", lambda *_: True)
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 1))  # no key tile is cut
    case = replace(case, head_dim=qk, v_dim=v)
    tensors = case.tensors("cuda")
    found, again = case.gradients(tensors), case.gradients(tensors)
    case.check(found, tensors, KERNEL_TOLERANCE[case.dtype])
    assert prepared[-1].queries is not None or (qk == 192 and case.deterministic)
    assert all(torch.equal(again[name], found[name]) for name in "qkv")


SUBTRACTED = [
    Case(
        "plain", batch=2, seq_q=700, seq_k=700, heads_q=4, heads_kv=2, causal=True, sink=True, through="o+lse"
    ),
    Case("unseen", seq_q=700, seq_k=300, heads_q=4, causal=True, scale=-0.3, dtype=torch.float16),
    Case("window", batch=2, seq_q=500, seq_k=600, heads_q=4, heads_kv=2, window=(200, 30), sliced=True),
    Case("short", batch=3, seq_q=300, seq_k=300, heads_q=3, heads_kv=3),
    Case("packed", **LENGTHS, heads_q=4, causal=True),
]


@pytest.mark.parametrize("case", SUBTRACTED, ids=lambda case: case.id)
def test_products_subtract_the_statistics(case, monkeypatch, prepared):
    """D 64: lse' and delta as columns of products, against float64."""
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 1))  # no key tile is cut
    monkeypatch.setattr(work, "SHORT_CTAS", 0)  # rows of one head are short enough for a last kernel
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])
    assert prepared[-1].config.subtracts


SENT = [
    Case(
        "causal",
        batch=2,
        seq_q=700,
        seq_k=700,
        heads_q=4,
        heads_kv=2,
        causal=True,
        sink=True,
        through="o+lse",
    ),
    Case("full", batch=2, seq_q=500, seq_k=700, heads_q=3, heads_kv=3, dtype=torch.float16),
    Case("window", batch=2, seq_q=500, seq_k=600, heads_q=4, heads_kv=2, window=(200, 30), sliced=True),
    Case("packed-full", **LENGTHS, heads_q=4, heads_kv=4),
    Case("lists", seq_q=700, seq_k=900, heads_q=4, heads_kv=2, blocks=(False, (1, 4), block_cases.EVEN)),
]


@pytest.mark.parametrize("dim", [72, 80, 96])
@pytest.mark.parametrize("case", SENT, ids=lambda case: case.id)
def test_the_copy_engine_adds_dq(case, dim, monkeypatch, prepared):
    """One or two spans of dQ on their way through shared memory, against float64."""
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 1))  # no key tile is cut
    case = case.with_dim(dim)
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])
    assert prepared[-1].config.sent_spans == (1 if case.id in ("full", "packed-full") else 2)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_last_rows(deterministic, dim, monkeypatch, prepared):
    """Key tiles of the last rows alone are cut, in the middle of a batch row's heads."""
    case = Case("last-rows", batch=2, seq_q=500, seq_k=700, heads_q=12, heads_kv=6, head_dim=dim, causal=True)
    case = replace(case, deterministic=deterministic)
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(4, 3, whole=9))
    tensors = case.tensors("cuda")
    case.check(case.gradients(tensors), tensors, KERNEL_TOLERANCE[case.dtype])
    assert prepared[-1].order.whole == 9


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("case", WINDOWS, ids=lambda case: case.id)
def test_few_heads_in_order(case, inner, dim, monkeypatch, prepared):
    """Gradients and their bits do not depend on which heads come first."""
    case = case.with_dim(dim)
    monkeypatch.setattr(launch, "inner_heads_of", lambda *_: inner)
    tensors = case.tensors("cuda")
    first = case.gradients(tensors)
    case.check(first, tensors, KERNEL_TOLERANCE[case.dtype])
    again = case.gradients(tensors)
    assert all(torch.equal(again[name], first[name]) for name in first)
    assert prepared[-1].config.inner_heads == inner


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_deterministic(dim):
    case = Case(
        "bits",
        batch=2,
        seq_q=1500,
        seq_k=1500,
        heads_q=8,
        heads_kv=2,
        head_dim=dim,
        causal=True,
        bias=(False, False),
    )
    case = replace(case, deterministic=True)
    tensors = case.tensors("cuda")
    first = case.gradients(tensors)
    for _ in range(5):
        again = case.gradients(tensors)
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_graph_of_forward_and_backward():
    case = Case("graph", seq_q=300, seq_k=300, heads_q=4, heads_kv=2, head_dim=128, causal=True, sink=True)
    tensors = case.tensors("cuda")
    seed = case.seed_of(torch.empty_like(tensors["q"]))

    def step():
        o = attention(**tensors, causal=True)
        return torch.autograd.grad(o, list(tensors.values()), seed)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for value in (1.0, -0.5):
        with torch.no_grad():
            tensors["k"].mul_(value)
        graph.replay()
        for got, expected in zip(captured, step(), strict=True):
            torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-3)


def test_compiled_training_step():
    case = Case("compiled", seq_q=200, seq_k=200, heads_q=4, heads_kv=2, head_dim=128, causal=True)
    tensors = case.tensors("cuda")

    def step(q, k, v):
        return attention(q, k, v, causal=True, deterministic=True).float().square().sum()

    expected = torch.autograd.grad(step(**tensors), list(tensors.values()))
    torch._dynamo.reset()
    again = torch.autograd.grad(torch.compile(step, fullgraph=True)(**tensors), list(tensors.values()))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
