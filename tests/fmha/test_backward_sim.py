"""Attention's gradients by the kernels, in the simulator, against float64 autograd."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import block_cases
from helpers.gradient_cases import CASES, KERNEL_TOLERANCE, Case
from helpers.pairwise import pairwise
from helpers.simulate import simulating_gradients
from helpers.suites import long, long_but

from warpspec.common.architecture import architecture
from warpspec.common.compile import resources
from warpspec.common.launch import Kernel
from warpspec.fmha import attention, attention_varlen
from warpspec.fmha.backward import call, direct, launch
from warpspec.fmha.backward.pieces import PieceLength
from warpspec.fmha.backward.problem import DIFFERENTIABLE
from warpspec.fmha.backward.schedule import Order
from warpspec.fmha.operands import Operands, Options
from warpspec.sim import simulation

ARCHS = ("sm_90a", "sm_100a")
HEAD_DIMS = (64, 128, 256, 512)
# A tile or two of queries and of keys, some not whole.
SMALL = {
    128: Case("sliced-sink-lse", seq_q=70, seq_k=140, heads_q=2, head_dim=128, causal=True, sink=(0.3, torch.inf),
              sink_dtype=torch.bfloat16, through="o+lse", sliced=True),
    64: Case("packed-window", lengths_q=(20, 0, 3), lengths_k=(20, 5, 9), heads_q=1, window=(7, 0), causal=True),
    256: Case("bias", seq_q=20, seq_k=65, heads_q=1, head_dim=256, bias=(False, True), dtype=torch.float16),
    512: Case("one-tensor", seq_q=66, seq_k=64, heads_q=1, head_dim=512, causal=True, shared_kv=True),
}  # fmt: skip


def compare(case: Case) -> dict:
    tensors = case.tensors()
    found = case.gradients(tensors, backend="reference")
    case.check(found, tensors, KERNEL_TOLERANCE[case.dtype])
    return found


@pytest.mark.parametrize(
    ("arch", "dim"),
    [
        long("sm_90a", 64),
        long("sm_90a", 128),
        ("sm_90a", 256),
        ("sm_90a", 512),
        ("sm_100a", 128),
        long("sm_100a", 512),
    ],
)
def test_small(arch, dim, monkeypatch, simulate_gradients_as, check_order):
    """The kernel for these, in order, and that no register spills in it."""
    plans, plan = [], launch.plan
    monkeypatch.setattr(launch, "plan", lambda *arguments: plans.append(plan(*arguments)) or plans[-1])
    launch.prepare.cache_clear()
    simulate_gradients_as(arch)
    compare(SMALL[dim])
    compiled = launch.GRADIENTS.of(architecture(arch)).MAIN.compiled(plans[-1], arch)
    assert all(kernel.local_bytes == 0 for kernel in resources(compiled).values())


# Key tiles cut into pieces of several heads, or of parts of one; pieces without steps; several sections.
CUT = {
    64: Case("cut", batch=2, seq_q=300, seq_k=300, heads_q=2, causal=True),
    128: Case("cut-packed", lengths_q=(140, 0, 70), lengths_k=(140, 5, 300), heads_q=6, heads_kv=2, head_dim=128,
              causal=True),
    256: Case("cut-whole-tiles", seq_q=128, seq_k=128, heads_q=3, head_dim=256),
    512: Case("cut-one-head", seq_q=130, seq_k=70, heads_q=1, head_dim=512, causal=True, sink=True),
}  # fmt: skip


def cut_into(monkeypatch, order: Order) -> list:
    """Give every launch from now on this order, and a main kernel that makes all gradients. The returned list will hold
    what is prepared for them."""
    prepared, prepare = [], launch.prepare.__wrapped__
    monkeypatch.setattr(launch.apart, "gains", lambda *_: False)
    monkeypatch.setattr(launch, "choose_order", lambda *_: order)
    monkeypatch.setattr(launch, "prepare", lambda *args: prepared.append(prepare(*args)) or prepared[-1])
    return prepared


def test_kernels_take_small_tensors_without_gaps(monkeypatch):
    """Strides of small tensors are compiled in, whatever the strides of q, k and v are."""
    seen = []
    monkeypatch.setattr(Kernel, "launcher", lambda *_, **__: None)
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)  # remembers nothing
    monkeypatch.setattr(launch, "run_kernels", lambda prepared, problem, record, *rest: seen.append(record))
    small = {
        "sink": torch.zeros(2, 2, dtype=torch.float64)[:, 0],
        "kv_lengths": torch.full((2, 2), 3, dtype=torch.int32)[:, 0],
        "q_start": torch.ones(2, 2, dtype=torch.int32)[:, 0],
    }
    operands = Operands(
        *(torch.zeros(2, 4, 2, 64).bfloat16() for _ in "qkvo"), lse=torch.zeros(2, 2, 4), **small
    )
    do = torch.zeros_like(operands.o)
    wanted = [each in "qkv" for each in DIFFERENTIABLE]
    checked = call.check(operands, Options(causal=True), "sim", wanted, do, None)
    call.run(checked, operands, do, None)
    (record,) = seen
    assert all(getattr(record, name).is_contiguous() for name in small)
    assert record.sink.dtype == torch.float32


@pytest.mark.parametrize(
    ("dim", "deterministic"),
    long_but([], itertools.product(HEAD_DIMS, (False, True))),
)
def test_pieces(dim, deterministic, monkeypatch, simulate_gradients_as):
    """Each piece of a key tile leaves its part of dK and dV; and no register spills."""
    prepared = cut_into(monkeypatch, Order(pieces=4, section=1))
    simulate_gradients_as("sm_90a", seed=1)
    compare(replace(CUT[dim], deterministic=deterministic))
    config = prepared[-1].config
    assert config.cut and config.deterministic == deterministic
    compiled = launch.GRADIENTS.of(architecture("sm_90a")).MAIN.compiled(config, "sm_90a")
    # Two registers of ptxas's choice, where turns are taken as well.
    assert all(kernel.local_bytes <= 8 * deterministic for kernel in resources(compiled).values())


@pytest.mark.parametrize(("arch", "apart"), [("sm_90a", False), long("sm_90a", True), long("sm_100a", False)])
def test_nan_of_the_next_batch_row(arch, apart, monkeypatch, simulate_gradients_as):
    """A batch row's last tiles have zeros of TMA's past its end, not rows of the next one."""
    monkeypatch.setattr(launch.apart, "gains", lambda *_: apart)
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)
    simulate_gradients_as(arch, sm_count=2, seed=1)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 70, 1, 64, generator=generator).bfloat16() for _ in range(3))
    for tensor in (q, k, v):
        tensor[1] = torch.nan
    call = [tensor.requires_grad_() for tensor in (q, k, v)]
    attention(*call, causal=True, backend="reference").sum().backward()
    for tensor in call:
        assert tensor.grad[0].isfinite().all() and tensor.grad[0, 1:].any(-1).all()


@pytest.mark.parametrize("dim", [96, long(64)])
def test_nan_of_the_next_request(dim, monkeypatch, simulate_gradients_as):
    """A request's last tiles have rows of the next one, which are cleared; without a mask, too."""
    monkeypatch.setattr(launch.apart, "gains", lambda *_: False)
    monkeypatch.setattr(launch, "prepare", launch.prepare.__wrapped__)
    simulate_gradients_as("sm_90a", sm_count=2, seed=1)
    generator = torch.Generator().manual_seed(1)
    call = [torch.randn(140, 1, dim, generator=generator).bfloat16() for _ in range(3)]
    for tensor in call:
        tensor[70:] = torch.nan
        tensor.requires_grad_()
    starts = torch.tensor([0, 70, 140], dtype=torch.int32)
    attention_varlen(
        *call, starts, cu_seqlens_k=starts, max_seqlen_q=70, backend="reference"
    ).sum().backward()
    for tensor in call:
        assert tensor.grad[:70].isfinite().all() and tensor.grad[:70].any(-1).all()


SLICED = {
    64: (Case("sliced", batch=2, seq_q=200, seq_k=300, heads_q=8, heads_kv=2, causal=True), Order(3, 2, slices=2)),
    128: (Case("sliced-packed", lengths_q=(140, 0, 70), lengths_k=(140, 5, 300), heads_q=3, head_dim=128, causal=True),
          Order(2, 1, slices=3)),
    256: (Case("sliced-shared", seq_q=128, seq_k=200, heads_q=4, heads_kv=1, head_dim=256, causal=True,
               shared_kv=True), Order(2, 1, slices=4)),
    "last-rows": (Case("sliced-last", batch=2, seq_q=200, seq_k=280, heads_q=4, heads_kv=1, causal=True),
                  Order(3, 1, slices=2, whole=3)),
    "whole": (Case("sliced-whole", lengths_q=(140, 0, 70), lengths_k=(140, 5, 300), heads_q=6, heads_kv=2),
              Order(2, 1, slices=3)),
    "lists": (Case("sliced-lists", batch=2, seq_q=300, seq_k=400, heads_q=4, heads_kv=2, head_dim=128, through="o+lse",
                   blocks=(True, (2, 4), block_cases.EVEN)), Order(1, 3, slices=2)),
    "lists-64": (Case("sliced-lists-64", seq_q=140, seq_k=270, heads_q=4, causal=True,
                      blocks=(False, (1, 1), block_cases.EVEN)), Order(1, 2, slices=4, most=6)),
    "lists-256": (Case("sliced-lists-256", seq_q=140, seq_k=310, head_dim=256,
                       blocks=(True, (1, 1), block_cases.SPARSE)), Order(1, 1, slices=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", long_but([128, "lists-64"], SLICED))
def test_sliced_heads(name, monkeypatch, simulate_gradients_as):
    """Slices of heads come one after another, and pieces of all slices add to the same sums."""
    case, order = SLICED[name]
    prepared = cut_into(monkeypatch, order)
    simulate_gradients_as("sm_90a", seed=1)
    compare(case)
    config = prepared[-1].config
    assert config.slices and (config.finishes or not config.writes_k)
    compiled = launch.GRADIENTS.of(architecture("sm_90a")).MAIN.compiled(config, "sm_90a")
    assert not any(kernel.local_bytes for kernel in resources(compiled).values())


@pytest.mark.long
@pytest.mark.parametrize("name", ["lists", "lists-64", "lists-256"])
def test_memory_order_of_sliced_lists(name, monkeypatch, simulate_gradients_as, check_order):
    case, order = SLICED[name]
    cut_into(monkeypatch, order)
    simulate_gradients_as("sm_90a", seed=1)
    compare(case)


CUT_BY_LENGTH = {
    "many-tiles": (Case("", seq_q=70, seq_k=4300, heads_q=1), Order(2, 1)),
    "more-than-steps": (Case("", batch=2, seq_q=300, seq_k=300, causal=True), Order(20, 1)),
    "window": (Case("", batch=2, seq_q=300, seq_k=330, heads_kv=2, window=(100, 0)), Order(3, 2)),
    "sections": (Case("", batch=2, seq_q=300, seq_k=300, heads_q=6, heads_kv=2, causal=True), Order(5, 2)),
    "last-rows": (Case("", batch=2, seq_q=150, seq_k=280, heads_q=4, heads_kv=2), Order(3, 1, whole=3)),
    "in-order": (
        Case("", batch=2, seq_q=300, seq_k=330, heads_q=4, heads_kv=2, window=(100, 0), deterministic=True),
        Order(3, 1, whole=1),
    ),
}


@pytest.mark.parametrize(
    ("name", "dim"), long_but([("many-tiles", 64)], itertools.product(CUT_BY_LENGTH, HEAD_DIMS[:-1]))
)
def test_equal_rows_are_cut_by_length(name, dim, monkeypatch, simulate_gradients_as):
    """The host cuts long key tiles into more pieces than short ones; nothing spills."""
    case, order = CUT_BY_LENGTH[name]
    prepared = cut_into(monkeypatch, order)
    simulate_gradients_as("sm_90a", seed=1)
    compare(replace(case, head_dim=dim))
    config = prepared[-1].config
    assert config.cuts_by_length and prepared[-1].cut.pieces > 1
    compiled = launch.GRADIENTS.of(architecture("sm_90a")).MAIN.compiled(config, "sm_90a")
    assert all(kernel.local_bytes == 0 for kernel in resources(compiled).values())


PACKED = (
    CUT[128],
    Case(
        "window", lengths_q=(140, 300, 70), lengths_k=(140, 300, 300), heads_q=6, heads_kv=2, window=(150, 0)
    ),
    Case("whole", lengths_q=(130, 0, 5), lengths_k=(130, 5, 70), heads_q=4, heads_kv=2),
)


# Without a fixed order the default suite has packed requests in test_sliced_heads.
BY_LENGTH = [(PACKED[1], True, 0.1, 40, 64)]
MORE_BY_LENGTH = [
    (PACKED[2], False, 0.1, 40, 64),
    *pairwise(PACKED, [False, True], [0.1, 0.3], [40, 3], HEAD_DIMS),
]


@pytest.mark.parametrize(
    ("case", "deterministic", "share", "further", "dim"),
    [*BY_LENGTH, *(long(*row) for row in dict.fromkeys(MORE_BY_LENGTH) if row not in BY_LENGTH)],
)
def test_pieces_by_length(case, deterministic, share, further, dim, monkeypatch, simulate_gradients_as):
    """The device cuts the long key tiles of packed requests, leaves places without a piece, and cuts no more than there
    is room for. Under a fixed order, no CTA waits for one that comes later."""
    prepared = cut_into(monkeypatch, Order(pieces=2, section=1))
    monkeypatch.setattr(launch, "piece_length", lambda *_: PieceLength(0.0, share, 0.0, 1.0, further))
    simulate_gradients_as("sm_90a", seed=1)
    compare(replace(case, head_dim=dim, deterministic=deterministic))
    config = prepared[-1].config
    assert config.cuts_by_length and config.deterministic == deterministic
    compiled = launch.GRADIENTS.of(architecture("sm_90a")).MAIN.compiled(config, "sm_90a")
    assert all(kernel.local_bytes <= 8 * deterministic for kernel in resources(compiled).values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("lengths", "heads_q", "heads_kv", "slices"), [((70, 407), 9, 3, 1), ((122, 93, 446), 8, 4, 2)]
)
def test_first_rows_are_whole(
    lengths, heads_q, heads_kv, slices, monkeypatch, simulate_gradients_as, check_order
):
    """The device leaves the key tiles of the first KV heads, or slices, whole, and cuts those of the last ones."""
    cut_into(monkeypatch, Order(pieces=2, section=1, slices=slices))
    rows, made, allocate = heads_kv * slices, [], direct.allocate
    length = PieceLength(0.5, rows / 2, 0.4 * rows, 1 / rows, 12)
    monkeypatch.setattr(launch, "piece_length", lambda *_: length)
    monkeypatch.setattr(direct, "allocate", lambda *given: made.append(allocate(*given)) or made[-1])
    simulate_gradients_as("sm_90a", seed=1)
    sizes = {"lengths_q": lengths, "lengths_k": lengths, "heads_q": heads_q, "heads_kv": heads_kv}
    compare(Case("", **sizes, head_dim=128, causal=True))
    order = next(t for t in made[-1] if t.shape[1:] == (6,) and t.dtype == torch.int32)
    assert 0 < order[-1, 1] < rows


@pytest.mark.long
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_memory_order_of_pieces(dim, deterministic, monkeypatch, simulate_gradients_as, check_order):
    cut_into(monkeypatch, Order(pieces=3, section=2))
    simulate_gradients_as("sm_90a", seed=1)
    compare(replace(CUT[dim], deterministic=deterministic))


FINISHED = {
    "last-rows": (replace(CUT_BY_LENGTH["last-rows"][0], causal=True), CUT_BY_LENGTH["last-rows"][1]),
    "lengths": (Case("", batch=2, seq_q=150, seq_k=140, heads_q=2, kv_lengths=(140, 3)), Order(1, 1)),
    "window": (replace(CUT_BY_LENGTH["window"][0], heads_q=6), CUT_BY_LENGTH["window"][1]),
    "uncut": (Case("", batch=2, seq_q=150, seq_k=280, heads_q=4, heads_kv=2), Order(1, 1)),
}


@pytest.mark.long
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", FINISHED)
def test_memory_order_of_results(name, dim, monkeypatch, simulate_gradients_as, check_order):
    """The main kernel's last CTAs make gradients of rows whose key tiles are done, while others are at work."""
    case, order = FINISHED[name]
    prepared = cut_into(monkeypatch, order)
    simulate_gradients_as("sm_90a", seed=3)
    compare(replace(case, head_dim=dim))
    assert prepared[-1].config.finishes and prepared[-1].results is None


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_memory_order(arch, dim, simulate_gradients_as, check_order):
    simulate_gradients_as(arch, seed=1)
    compare(replace(SMALL[dim], deterministic=True))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_whole_tiles(arch, dim, simulate_gradients_as, check_order):
    """Where every row sees every key, nothing is cleared, and other barriers hand tiles on."""
    simulate_gradients_as(arch)
    compare(Case("whole", seq_q=256, seq_k=128, heads_q=1, head_dim=dim))


@pytest.mark.long
def test_memory_order_of_a_bias_by_tma(simulate_gradients_as, check_order):
    simulate_gradients_as("sm_90a", seed=1)
    compare(
        Case(
            "tiles",
            seq_q=200,
            seq_k=136,
            head_dim=128,
            heads_q=1,
            bias=(True, True),
            bias_dtype=torch.bfloat16,
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("pieces", [1, 2])
def test_heads_inside(pieces, monkeypatch, simulate_gradients_as):
    """Steps go through the heads at each query tile, from another head on in each key tile."""
    plan = launch.plan
    monkeypatch.setattr(launch, "plan", lambda *args: replace(plan(*args), heads_inside=True))
    cut_into(monkeypatch, Order(pieces, section=2))
    simulate_gradients_as("sm_90a", seed=1)
    compare(Case("inside", seq_q=300, seq_k=300, heads_q=6, heads_kv=2, head_dim=128, causal=True))


WINDOWED = Case(
    "inner", seq_q=300, seq_k=300, heads_q=6, heads_kv=2, head_dim=128, window=(150, 0), deterministic=True
)


@pytest.mark.parametrize(("arch", "inner"), long_but([], itertools.product(ARCHS, (1, 2, 4))))
def test_inner_heads(arch, inner, monkeypatch, simulate_gradients_as):
    """With a fixed order, steps go through some heads after others; of the three, the last may be alone."""
    monkeypatch.setattr(launch, "inner_heads_of", lambda *_: inner)
    monkeypatch.setattr(launch.apart, "gains", lambda *_: False)
    plans, plan = [], launch.plan
    monkeypatch.setattr(launch, "plan", lambda *arguments: plans.append(plan(*arguments)) or plans[-1])
    launch.prepare.cache_clear()
    simulate_gradients_as(arch, seed=1)
    compare(WINDOWED)
    compiled = launch.GRADIENTS.of(architecture(arch)).MAIN.compiled(plans[-1], arch)
    assert plans[-1].inner_heads == inner
    assert all(kernel.local_bytes <= 16 for kernel in resources(compiled).values())  # of the turn warps
    launch.prepare.cache_clear()


# Every case at every head size, each on one of the two, so that each case meets both. At D 512 the simulator takes five
# minutes for a larger case; tests/gpu has all of them.
FEATURES = [
    (case, dim, ARCHS[(number + place) % 2])
    for number, case in enumerate((*CASES, *SMALL.values()))
    for place, dim in enumerate(HEAD_DIMS)
    if dim < 512 or case in SMALL.values()
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "dim", "arch"), FEATURES, ids=lambda value: getattr(value, "id", value))
def test_all_features(case, dim, arch, simulate_gradients_as):
    simulate_gradients_as(arch, seed=2)
    compare(case.with_dim(dim))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("sink",), ("bias",), ("q", "v")])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_any_subset(wanted, dim, arch, simulate_gradients_as):
    simulate_gradients_as(arch)
    compare(replace(SMALL[256], head_dim=dim, sink=True, wanted=wanted))


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_deterministic_gives_the_same_bits(arch, dim, monkeypatch):
    """CTAs take turns in another order under every seed; the gradient of a bias of all heads is added up in order."""
    case = Case(
        "bias-of-all", batch=2, seq_q=70, seq_k=140, heads_q=4, heads_kv=2, head_dim=dim, bias=(False, False)
    )
    run = simulation._run_once  # which joins products as they happen to wait, and sums with them
    monkeypatch.setattr(simulation, "_run_once", lambda *arguments: run(*arguments[:-1], False))
    results = []
    for seed in (0, 1, 2):
        with simulating_gradients(arch, seed=seed):
            results.append(compare(replace(case, deterministic=True)))
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in other)
