"""The sm90 attention kernel, compiled for sm_90a and executed in the simulator."""

import itertools
from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import (
    CASES,
    PARTLY_POISONED,
    SPLIT_KEYS,
    Case,
    arguments,
    check,
    poisoned_out,
    relative_error,
)
from helpers.attention_configs import configured, made_problem
from helpers.page_layouts import PAGE_SIZES, paged
from helpers.simulate import choosing, plan_for
from helpers.suites import long

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.fmha import attention, sm90
from warpspec.fmha.heads import CLASSES as HEAD_DIMS
from warpspec.fmha.logits import BiasLayout
from warpspec.fmha.sm90 import shapes
from warpspec.fmha.sm90.shapes import PAIR, Shape

BY_ID = {case.id: case for case in (*CASES, *PARTLY_POISONED)}


@pytest.fixture(autouse=True)
def simulate_sm90(simulate_as):
    """Backend "sim" runs the sm90 kernel."""
    simulate_as("sm_90a")


def run(case: Case, seed: int = 0, **options) -> sim.SimReport:
    """Run a case into an output full of NaN, judge it, and return what the simulator reports."""
    inputs = arguments(case, seed)
    out = poisoned_out(case)
    result = attention(**inputs, **options, out=out, return_lse=case.normalize, backend="sim")
    check(case, result, inputs)
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches)
    return sim.last_report()


# What the recorded cases of tests/silicon leave out; they are held against the reference too.
QUICK = [("q-start-window-past-keys", 128)]
REST = [
    ("lengths-window", 512),
    ("window-both", 128),
    ("gpt-oss-layer", 64),
    ("lengths-window", 256),
    ("state", 64),
]


@pytest.mark.parametrize(("name", "head_dim"), [*QUICK, *(long(*case) for case in REST)])
def test_cases(name, head_dim):
    run(replace(BY_ID[name], head_dim=head_dim), num_splits=1)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case(case, head_dim):
    run(replace(case, head_dim=head_dim))


def of_shape(consumers: int, keys: int):
    """Plans are chosen among tiles of this many consumers and keys."""
    return choosing(wanted=lambda one: (one.tiling.row_groups, one.tiling.tile_n) == (consumers, keys))


@pytest.mark.parametrize("name", [
    "three-tiles", *map(long, (
        "past-a-tile", "state", "lengths-causal", "group-3-odd-queries", "q-start", "sink", "poison-causal",
        "data-creeping",
    ))
])  # fmt: skip
def test_three_consumers(name):
    case = BY_ID[name]
    case = replace(case, head_dim=128, seq_q=max(case.seq_q, 129))
    with of_shape(3, 80):
        assert plan_for("sm_90a", **arguments(case, 0)).config.consumers == 3
        run(case, num_splits=1)


@pytest.mark.parametrize(
    ("head_dim", "name"), [long(128, "three-tiles"), long(64, "three-tiles"), long(128, "past-a-tile")]
)
def test_three_consumers_whatever_their_keys(head_dim, name):
    case = replace(BY_ID[name], head_dim=head_dim)
    keys = {64: 128, 128: 80}[head_dim]
    with of_shape(3, keys):
        config = plan_for("sm_90a", **arguments(case, 0)).config
        assert (config.consumers, config.tile_n) == (3, keys)
        run(case, num_splits=1)


@pytest.mark.parametrize(("head_dim", "name"), [(256, "three-tiles"), long(128, "past-a-tile")])
def test_one_consumer(head_dim, name):
    case = replace(BY_ID[name], head_dim=head_dim)
    with of_shape(1, 64):
        assert plan_for("sm_90a", **arguments(case, 0)).config.consumers == 1
        run(case, num_splits=1)


@pytest.mark.parametrize(("head_dim", "page_size", "causal"), [
    long(64, 48, True), (128, 112, True), long(256, 128, True), long(64, 384, False),
    *(pytest.param(*one, marks=pytest.mark.long) for one in itertools.product(HEAD_DIMS, PAGE_SIZES, (False, True))),
])  # fmt: skip
def test_many_queries_through_pages(head_dim, page_size, causal):
    """With pages, as many queries are computed together as without."""
    lengths, seq_k = (200, 77, 256), 256
    case = Case(
        "pages", batch=3, seq_q=70, seq_k=seq_k, heads_q=4, heads_kv=2, head_dim=head_dim, causal=causal, sink=True,
        kv_lengths=lengths,
    )  # fmt: skip
    inputs = arguments(case, 0)
    pages, table = paged((inputs["k"], inputs["v"]), lengths, page_size)
    out = poisoned_out(case)
    through = {**inputs, "k": pages[0], "v": pages[1], "page_table": table}
    result = attention(**through, out=out, return_lse=True, num_splits=1, backend="sim")
    check(case, result, inputs)
    config = plan_for("sm_90a", **through).config
    assert config.consumers > 1 and config.tile_n % config.kv.page_keys == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_persistent_ctas_take_several_tiles(simulate_as, seed):
    case = Case(
        "persistent", batch=2, seq_q=150, seq_k=300, heads_q=2, heads_kv=1, causal=True, window=(130, None)
    )
    inputs = arguments(case, seed)
    out = poisoned_out(case)
    simulate_as("sm_90a", sm_count=2, seed=seed)
    result = attention(**inputs, out=out, return_lse=True, backend="sim", num_splits=1)
    check(case, result, inputs)
    config = plan_for("sm_90a", **inputs).config
    assert sim.last_report().launches[0].grid == (2 * config.shape.ctas_per_sm, 1, 1)
    assert sim.last_report().launches[0].grid[0] < 2 * -(-150 * 2 // config.tile_m)


@pytest.mark.parametrize("head_dim", [64, long(128), long(512)])  # of 512 test_sm90_pair has one with pages
def test_splits_and_shared_kv(head_dim):
    run(replace(SPLIT_KEYS["sm_90a"], head_dim=head_dim), num_splits=3)


@pytest.mark.parametrize(("head_dim", "dtype", "shape", "window"), [
    long(64, torch.bfloat16, (1, 4, 70, 261), None), long(128, torch.float32, (2, 1, 70, 261), (100, 3)),
], ids=["bf16 a head", "fp32 a batch row, window"])  # fmt: skip
def test_bias(head_dim, dtype, shape, window):
    case = Case("bias", batch=2, seq_q=70, seq_k=261, heads_q=4, heads_kv=2, head_dim=head_dim, window=window)
    inputs = arguments(case, 0)
    generator = torch.Generator().manual_seed(0)
    bias = 2 * torch.randn(shape, generator=generator)
    bias[torch.rand(shape, generator=generator) < 0.3] = -torch.inf
    bias[torch.rand(shape, generator=generator) < 0.1] = torch.finfo(
        dtype
    ).min  # stays finite, weighs nothing
    bias[:, :, 5] = -torch.inf  # a row that sees no key
    bias = bias.to(dtype)
    o, lse = attention(**inputs, bias=bias, return_lse=True, backend="sim")
    expected, lse_expected = attention(**inputs, bias=bias, return_lse=True, backend="reference")
    assert relative_error(o.float(), expected.float()) <= 4e-3
    torch.testing.assert_close(lse, lse_expected, rtol=0, atol=1e-3)
    assert (o[:, 5] == 0).all() and (lse[:, :, 5] == -torch.inf).all()


VARIANTS = {
    "causal": {"causal": True, "has_lse": True, "has_sink": True},
    "window": {"causal": True, "has_left": True, "has_kv_lengths": True, "pack": 8},
    "splits": {"splits": True, "normalize": False, "has_kv_lengths": True, "page_size": 16, "pack": 8},
    "shared": {"shared_kv": True, "causal": True, "pack": 8, "negate": True},
}


def shapes_of(head_dim: int, **options) -> tuple[Shape, ...]:
    """Tile shapes of a head dimension. options: of the problem."""
    problem = made_problem(1, 128, 128, 1, 1, head_dim, **options)
    return shapes.shapes_of(problem)


SHAPES = [(head_dim, shape) for head_dim in HEAD_DIMS for shape in shapes_of(head_dim)]


def spilled_bytes(head_dim, shape, variant) -> int:
    options = dict(VARIANTS[variant])
    if options.get("shared_kv"):
        shape = PAIR if head_dim == 512 else shape
    if options.get("page_size", 0) and shape.tile_n % options["page_size"]:
        options["page_size"] = 0
    config = configured(sm90.AttentionConfig, head_dim=head_dim, shape=shape, **options)
    (kernel,) = resources(sm90.ATTENTION.compiled(config, "sm_90a")).values()
    return kernel.local_bytes


@pytest.mark.long
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_largest_shapes_do_not_spill(head_dim):
    assert (
        spilled_bytes(head_dim, max(shapes_of(head_dim), key=lambda s: s.tile_n * s.consumers), "causal") == 0
    )


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_spills(shape, variant):
    assert spilled_bytes(*shape, variant) == 0


BIASES = {
    "bfloat16": {"bias": BiasLayout("bfloat16")},
    "causal": {"bias": BiasLayout("bfloat16", heads=True, batches=True), "causal": True, "has_sink": True},
    "everything": {
        "bias": BiasLayout("float32", heads=True, batches=True), "causal": True, "has_left": True, "negate": True,
        "has_kv_lengths": True, "has_q_start": True, "has_sink": True, "has_lse": True, "key_stride": 4, "pack": 8,
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "bias", "page_size"), itertools.product(HEAD_DIMS, BIASES, (0, 64)))
def test_a_bias_spills_nothing(head_dim, bias, page_size):
    options = {**BIASES[bias], "page_size": page_size}
    if page_size:
        options["has_kv_lengths"] = True
    for shape in shapes_of(head_dim, bias=BiasLayout("bfloat16")):
        config = configured(
            sm90.AttentionConfig, head_dim=head_dim, shape=shape, exact_maximum=head_dim == 64, **options
        )
        (kernel,) = resources(sm90.ATTENTION.compiled(config, "sm_90a")).values()
        assert kernel.local_bytes == 0, shape
