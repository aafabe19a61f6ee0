"""Every operator under autocast and under torch.func's transforms, on backend "reference"."""

import pytest
import torch
from helpers.gathered_cases import random_case
from helpers.moe_cases import make_experts
from helpers.swap_cases import small

from warpspec.cache import insert
from warpspec.common.checks import ANY, has_shape
from warpspec.fmha import attention, attention_varlen
from warpspec.latent.cache import IndexPool, store_rows
from warpspec.latent.gathered import gathered_attention
from warpspec.latent.indexer import index_queries, index_scores, select_entries
from warpspec.latent.projection import output_projection
from warpspec.moe import grouped_swiglu, moe_ffn, route
from warpspec.softmax import softmax, softmax_topk
from warpspec.swap import swap_ffn_decode

STARTS = torch.tensor([0, 2, 6], dtype=torch.int32)
WEIGHT = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
EXPERTS = make_experts(4, 32, 32)[0]
IDS, WEIGHTS = route(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), 2)


def bf16(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


KEYS, INDEX_KEYS = bf16(1, 6, 2, 64, seed=1), bf16(128, 128)


def packed(q):
    return attention_varlen(q, KEYS[0], None, STARTS, max_seqlen_q=4, cu_seqlens_k=STARTS, causal=True)


def gathered(q):
    case = random_case(2, 4, (8,), lse=False)
    return gathered_attention(case.q if q is None else q, case.key_sets, **case.options)


def swap(x):
    _, state, weights = small(1, cores=4, d_model=32, d_ff=16)  # its caches are empty
    return swap_ffn_decode(x, state, weights, events=1, k_ffn=1)[0]


OPERATORS = {  # name: a function of the first argument, and that
    "attention": (lambda q: attention(q, KEYS, causal=True, return_lse=True), bf16(1, 6, 4, 64)),
    "attention_varlen": (packed, bf16(6, 4, 64)),
    "softmax": (softmax, bf16(5, 32)),
    "softmax_topk": (lambda x: softmax_topk(x, 3)[0], bf16(5, 32)),
    "moe_ffn": (lambda x: moe_ffn(x, EXPERTS, IDS, WEIGHTS), bf16(6, 32)),
    "moe_ffn, sm90": (lambda x: moe_ffn(x, EXPERTS.for_backend("sm90"), IDS, WEIGHTS), bf16(6, 32)),
    "grouped_swiglu": (lambda a: grouped_swiglu(a, EXPERTS.w13, IDS.new_tensor([1, 1, 4, 6])), bf16(6, 32)),
    "gathered_attention": (gathered, random_case(2, 4, (8,), lse=False).q),
    "output_projection": (lambda o: output_projection(o, WEIGHT), bf16(3, 2, 512)),
    "swap_ffn_decode": (swap, small(1, cores=4, d_model=32, d_ff=16)[0]),
}
DIFFERENTIABLE = ("attention", "attention_varlen", "softmax")


@pytest.fixture(autouse=True)
def reference(monkeypatch):
    monkeypatch.setenv("WARPSPEC_BACKEND", "reference")


def parts(found) -> tuple:
    return found if isinstance(found, tuple) else (found,)


def selected(q):
    pool = IndexPool.empty(2, 64, "fp8")
    store_rows(INDEX_KEYS, pool, torch.arange(128, dtype=torch.int32))
    table, ones = torch.tensor([[1, 0]], dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    weights, angles = (torch.ones(shape, dtype=torch.float32) for shape in ((3, 8), (4, 64)))
    queries = index_queries(q, weights, angles, ones, format="fp8")
    call = (queries, pool, table, ones - 1, ones + 70)
    return index_scores(*call), *select_entries(*call, 5)


def inserted(k):
    caches = torch.zeros(2, 9, 2, 64, dtype=torch.float8_e4m3fn)
    angles, positions = torch.linspace(0, 1, 256, dtype=torch.float32).view(4, 64), torch.tensor([0, 3, 1])
    insert(k, k, *caches, torch.tensor([4, 0, 7]), cos_sin=angles, positions=positions)
    return caches.float()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "x"),
    [
        *(OPERATORS[name] for name in ("attention", "moe_ffn", "moe_ffn, sm90", "grouped_swiglu")),
        (selected, bf16(3, 8, 128)),
        (inserted, bf16(3, 2, 64)),
    ],
)
def test_the_default_dtype_changes_nothing(function, x, dtype):
    """Servers set it to their model's."""
    expected = parts(function(x))
    torch.set_default_dtype(dtype)
    try:
        found = parts(function(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_half_precision_autocast_changes_no_cache():
    expected = inserted(bf16(3, 2, 64))
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(inserted(bf16(3, 2, 64)), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_changes_nothing(name):
    function, x = OPERATORS[name]
    expected = parts(function(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = parts(function(x))
    assert all(map(torch.equal, found, expected))


def loss(function):
    return lambda x: sum(t.float().square().sum() for t in parts(function(x)))


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_func_grad(name):
    function, x = OPERATORS[name]
    if name not in DIFFERENTIABLE:
        with pytest.raises(NotImplementedError, match="gradients are not implemented"):
            torch.func.grad(loss(function))(x)
        return
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(function)(leaf), leaf)
    assert torch.equal(torch.func.grad(loss(function))(x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(torch.func.grad(loss(function))(x), expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_transforms():
    x = bf16(3, 8).float()
    ours, theirs = (lambda row, s=s: (s(row) ** 3).sum() for s in (softmax, lambda t: torch.softmax(t, -1)))
    for transform in (
        lambda f: torch.vmap(torch.func.grad(f))(x),
        lambda f: torch.func.grad(lambda rows: torch.vmap(f)(rows).sum())(x),
        lambda f: torch.func.grad(lambda row: torch.func.grad(f)(row).square().sum())(x[0]),
        lambda f: torch.func.jacrev(f)(x[0]),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))
    q, k = bf16(2, 1, 6, 4, 64), loss(lambda q: attention(q, KEYS))
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(k)(q).float().sum())(q[0])
    expected = torch.stack([torch.func.grad(k)(row) for row in q])
    for both in (torch.vmap(torch.func.grad(k)), torch.func.grad(lambda q: torch.vmap(k)(q).sum())):
        assert torch.equal(both(q), expected)


@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "softmax_topk", "moe_ffn"])
def test_a_tensor_that_has_left_its_transform(name):
    """Such a tensor has no storage of its own."""
    function, x = OPERATORS[name]
    left = []
    torch.func.grad(lambda x: (left.append(x), x.float().sum())[1])(x)
    assert all(map(torch.equal, parts(function(left[0])), parts(function(x))))


@pytest.mark.parametrize("name", OPERATORS)
def test_tangents_are_refused(name):
    function, x = OPERATORS[name]
    with pytest.raises(NotImplementedError, match="forward-mode derivatives"):
        torch.func.jvp(function, (x,), (torch.ones_like(x),))


def test_what_swap_keeps_is_made_without_autocast():
    _, _, weights = small(1, cores=4, d_model=32, d_ff=16)
    _, _, others = small(1, cores=4, d_model=32, d_ff=16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = weights.core_shift
    assert kept.dtype == torch.float32 and torch.equal(kept, others.core_shift)


def test_shapes_are_checked_while_traced():
    checked = torch.compile(lambda t: has_shape(t, (ANY, 8)), dynamic=True, fullgraph=True, backend="eager")
    assert checked(torch.zeros(3, 8)) and not checked(torch.zeros(3, 9))
