"""Every strategy of the row softmax, as compiled for both architectures, in the simulator."""

import dataclasses
import math

import pytest
import torch
from helpers.softmax_cases import check, logits, matrix, untouched
from helpers.suites import long

from warpspec.common.compile import resources
from warpspec.common.hardware import MIB, REGISTER_STEP
from warpspec.common.launch import SIMULATED, simulated
from warpspec.softmax import launch
from warpspec.softmax.plan import SoftmaxPlan, best_of_each, rows_registers
from warpspec.softmax.problem import SoftmaxProblem
from warpspec.softmax.resident import ResidentConfig
from warpspec.softmax.rows import RowsConfig
from warpspec.softmax.staged import StagedConfig
from warpspec.softmax.two_pass import TwoPassConfig

H200 = dataclasses.replace(SIMULATED["sm_90a"], sm_count=132, l2_bytes=60 * MIB)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAMES = {FP32: "float32", FP16: "float16", BF16: "bfloat16"}


# name: (configuration of (dtype, edges, store_bytes), groups, CTAs of a group, rows, longest row in 16-byte vectors)
STRATEGIES = {
    "warp": (lambda d, e, s: RowsConfig(d, 32, 4, 1, 3, e, 1, s), 0, 0, 6, 96),
    "part of a warp": (lambda d, e, s: RowsConfig(d, 16, 8, 1, 2, e, 1, s), 0, 0, 21, 32),
    "warps": (lambda d, e, s: RowsConfig(d, 64, 2, 1, 5, e, 1, s), 0, 0, 3, 320),
    "cluster": (lambda d, e, s: RowsConfig(d, 64, 1, 4, 2, e, 1, s), 0, 0, 3, 512),
    "cluster of many warps": (lambda d, e, s: RowsConfig(d, 384, 1, 8, 1, e, 1, s), 0, 0, 1, 3000),
    "staged": (lambda d, e, s: StagedConfig(d, 64, 1, 4, e, 1, s), 0, 0, 3, 256),
    "staged cluster": (lambda d, e, s: StagedConfig(d, 64, 2, 3, e, 4, s, copies=2), 0, 0, 3, 384),
    "two-pass": (lambda d, e, s: TwoPassConfig(d, 64, 1, e, s, 2), 0, 0, 2, 600),
    "two-pass cluster": (lambda d, e, s: TwoPassConfig(d, 64, 2, e, s, 2), 0, 0, 2, 600),
    "resident": (lambda d, e, s: ResidentConfig(d, 64, 3, 2, e, 2, 1, s), 2, 2, 5, 1500),
    "split": (lambda d, e, s: ResidentConfig(d, 64, 2, 1, e, 0, 1, s), 2, 3, 3, 1800),
    "split, all resident": (lambda d, e, s: ResidentConfig(d, 64, 5, 1, e, 0, 2, s), 1, 3, 3, 1500),
}


# By default also on sm_100a, where other tests have the same kernels: each way to divide a row once.
ON_SM100 = ("warp", "cluster", "staged", "two-pass", "split")


def target(arch):
    return simulated(arch, sm_count=launch.SIMULATED_SMS, l2_bytes=launch.SIMULATED_L2)


def run(name, x, out, arch, seed=0):
    """The strategy of that name on x and out, aligned or not as they are."""
    make, groups, group, _, _ = STRATEGIES[name]
    problem = SoftmaxProblem.of(x, out)
    config = make(problem.dtype, not problem.aligned, problem.store_bytes)
    return config, launch.run_sim(
        x, out, SoftmaxPlan(name, config, groups, group, 0.0), target(arch), seed=seed
    )


def case(name, dtype, *, aligned, seed=0, shorten=0):
    """(x, storage of out, out): of the strategy's size, rows anywhere unless ``aligned``."""
    _, _, _, rows, vectors = STRATEGIES[name]
    per_vector = 16 // dtype.itemsize
    length = vectors * per_vector - (0 if aligned else 1) - shorten
    offset = 0 if aligned else 3
    _, x = matrix(rows, length, dtype, offset=offset, fill=logits(rows, length, seed=seed))
    storage, out = matrix(rows, length, dtype, offset=offset)
    return x, storage, out


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(("arch", "name"), [
    ("sm_100a", name) if name in ON_SM100 else long("sm_100a", name) for name in STRATEGIES
] + [("sm_90a", name) for name in STRATEGIES])  # fmt: skip
def test_strategy(name, arch):
    x, storage, out = case(name, BF16 if arch == "sm_90a" else FP32, aligned=False)
    before = x.clone()
    config, report = run(name, x, out, arch)
    check(out, x)
    assert untouched(storage, out) and torch.equal(x, before)
    assert all(
        kernel.local_bytes == 0 for kernel in resources(launch.softmax_kernel.compiled(config, arch)).values()
    )
    assert len(report.launches) == 1


@pytest.mark.parametrize("name", ["warp", long("cluster"), "staged", "two-pass", long("split")])
def test_aligned_rows(name):
    x, storage, out = case(name, FP16, aligned=True)
    config, _ = run(name, x, out, "sm_100a")
    assert not config.edges
    check(out, x)
    assert untouched(storage, out)


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(
    "name", ["warp", "cluster", "staged cluster", "two-pass cluster", "resident", "split"]
)
def test_rows_far_shorter_than_the_room_for_them(name):
    """CTAs, warps and threads without an element take part all the same."""
    vectors = STRATEGIES[name][-1]
    for length in (1, 9):
        x, storage, out = case(name, BF16, aligned=False, shorten=vectors * 8 - 1 - length)
        assert x.shape[1] == length
        run(name, x, out, "sm_90a")
        check(out, x)
        assert untouched(storage, out)


@pytest.mark.parametrize("name", ["warp", "cluster", "staged", "two-pass", "split"])
@pytest.mark.parametrize("dtype", [FP32, long(FP16)])
def test_special_values(name, dtype):
    """NaN, +inf, some -inf, only -inf, the ends of the number range; each in a row of its own, others unharmed."""
    rows, length = 6, 101
    values = logits(rows, length)
    largest = torch.finfo(dtype).max
    values[0, 17] = torch.nan
    values[1, 100] = torch.inf
    values[2, :98] = -torch.inf
    values[3] = -torch.inf
    values[4, ::2], values[4, 1::2] = largest, -largest
    _, x = matrix(rows, length, dtype, offset=1, fill=values)
    storage, out = matrix(rows, length, dtype, offset=1)
    run(name, x, out, "sm_100a")
    check(out, x)
    assert untouched(storage, out)
    assert out[[0, 1, 3]].isnan().all() and not out[[2, 4, 5]].isnan().any()
    assert (out[2, :98] == 0).all()


@pytest.mark.usefixtures("check_order")
@pytest.mark.parametrize(
    ("arch", "cluster", "threads", "vectors"), [("sm_90a", 2, 128, 3), ("sm_100a", 1, 64, 6)]
)
def test_exponentials_taken_once(arch, cluster, threads, vectors):
    """Special rows too, threads without an element, and a maximum that comes last. Shares of whole lines in a cluster;
    two groups of vectors that have references of their own."""
    rows, length = 7, 4 * (threads * (2 * vectors - 3) // 2 * cluster - 7)
    values = logits(rows, length)
    values[5, :9], values[5, -300:] = -torch.inf, 200.0 + values[5, -300:]
    values[0, 17], values[1, length - 1] = torch.nan, torch.inf
    values[2, : length - 3], values[3] = -torch.inf, -torch.inf
    values[4, ::2], values[4, 1::2] = torch.finfo(FP32).max, -torch.finfo(FP32).max
    _, x = matrix(rows, length, FP32, offset=0, fill=values)
    storage, out = matrix(rows, length, FP32, offset=0)
    config = StagedConfig("float32", threads, cluster, vectors, False, 4, once=True, copies=2)
    launch.run_sim(x, out, SoftmaxPlan("staged", config, 0, 0, 0.0), target(arch))
    check(out, x)
    assert untouched(storage, out)
    assert out[[0, 1, 3]].isnan().all() and not out[[2, 4, 5, 6]].isnan().any()
    roomy = dataclasses.replace(config, vectors=vectors + 2)
    with pytest.raises(ValueError, match=f"^once: every CTA must have at least {vectors * threads} vectors"):
        launch.run_sim(x, out, SoftmaxPlan("staged", roomy, 0, 0, 0.0), target(arch))
    with pytest.raises(ValueError, match=r"^once: of fp32"):
        StagedConfig("bfloat16", 64, cluster, 2, False, once=True)
    with pytest.raises(ValueError, match=r"^copies: .* from 1 to 2"):
        StagedConfig("bfloat16", 64, cluster, 2, False, copies=3)


@pytest.mark.parametrize("name", ["warps", "cluster"])
def test_a_warp_of_only_minus_infinity(name):
    """Most of a row masked, what is left far below 0: its exponential against 0's would overflow."""
    x, _, out = case(name, BF16, aligned=False)
    x.fill_(-torch.inf)
    x[:, :9], x[:, -1] = -100.0, -98.0
    run(name, x, out, "sm_90a")
    check(out, x)
    assert (out[:, 9:-1] == 0).all()


@pytest.mark.parametrize("name", ["warp", "cluster", "staged", "two-pass", "split"])
@pytest.mark.parametrize("dtype", [long(FP16), BF16])
def test_one_element_far_above_the_others(name, dtype):
    """Anywhere in a vector: a maximum that misses it lets exponentials overflow."""
    rows, length = 11, 300
    _, x = matrix(rows, length, dtype, offset=3, fill=torch.zeros(rows, length))
    _, out = matrix(rows, length, dtype, offset=3)
    x[range(rows), range(150, 150 + rows)] = 200.0
    run(name, x, out, "sm_90a")
    assert torch.equal(out, (x == 200).to(dtype))


@pytest.mark.parametrize("name", ["warps", "staged", "two-pass", "split"])
def test_in_place(name):
    _, storage, x = case(name, BF16, aligned=False)
    x.copy_(logits(*x.shape))
    expected = x.clone()
    run(name, x, x, "sm_90a")
    check(x, expected)
    assert untouched(storage, x)


OTHERWISE = [
    ("warp", 4, 8), ("warp", 2, 4), ("warp", 1, 2), ("two-pass", 4, 8), ("resident", 2, 4), ("staged", 1, 2),
]  # fmt: skip


# Stores of each size, from x with edges (100) or without (104); the others in the long suite.
@pytest.mark.parametrize(("name", "shift", "store_bytes", "length"), [
    mark(*strategy, length)
    for number, strategy in enumerate(OTHERWISE)
    for mark, length in (
        (pytest.param if number in (0, 4, 5) else long, (104, 100)[number % 2]),
        (long, (100, 104)[number % 2]),
    )
])  # fmt: skip
def test_out_lies_otherwise_than_x(name, shift, store_bytes, length):
    """16-byte loads stay; stores shrink to what the distance of out from x allows."""
    rows = 3
    _, x = matrix(rows, length, BF16, fill=logits(rows, length))
    storage, out = matrix(rows, length, BF16, offset=shift, gap=16)
    problem = SoftmaxProblem.of(x, out)
    assert (problem.store_bytes, problem.aligned) == (store_bytes, length == 104)
    run(name, x, out, "sm_90a")
    check(out, x)
    assert untouched(storage, out)


@pytest.mark.parametrize("name", ["cluster", long("resident"), "split"])
def test_bitwise_repeatable_however_ctas_interleave(name):
    x, _, out = case(name, FP32, aligned=False)
    run(name, x, out, "sm_100a")
    for seed in (1, 2):
        _, again = matrix(*out.shape, out.dtype, offset=3)
        run(name, x, again, "sm_100a", seed)
        assert torch.equal(again, out)


def test_chosen_strategies():
    """The public function on CPU tensors, shapes that fall to different strategies, N-dimensional and strided."""
    from warpspec.softmax import softmax

    for shape in ((5, 7), (2, 3, 130), (1,), (2, 9000)):
        x = logits(math.prod(shape[:-1]), shape[-1]).reshape(shape).to(BF16)
        check(softmax(x), x)
    x = logits(40, 9)
    check(softmax(x.t()), x.t())  # rows not contiguous: copied
    check(softmax(x[::2, 1:]), x[::2, 1:])  # rows contiguous and far apart: not
    empty = softmax(torch.empty(3, 0, 5))
    assert empty.shape == (3, 0, 5)


@pytest.mark.parametrize(("dtype", "edges"), [
    ("float32", True), long("bfloat16", False), long("float32", False), long("bfloat16", True),
])  # fmt: skip
def test_the_plan_knows_what_registers_rows_take(dtype, edges):
    """As compiled for sm_90a: with fewer in its model, it expects CTAs beside each other that do not fit."""
    for lanes, rows, cluster, vectors in ((32, 4, 1, 2), (256, 1, 1, 3), (512, 1, 4, 4)):
        config = RowsConfig(dtype, lanes, rows, cluster, vectors, edges)
        (kernel,) = resources(launch.softmax_kernel.compiled(config, "sm_90a")).values()
        assert abs(rows_registers(config) - kernel.registers) <= REGISTER_STEP, config


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("sm_90a", StagedConfig("float32", 736, 16, 6, True, 2, 4)),
        ("sm_100a", StagedConfig("float32", 736, 16, 7, False, 2)),
        ("sm_90a", StagedConfig("float32", 544, 16, 7, False, 3)),
        long("sm_100a", StagedConfig("float32", 736, 16, 6, True, 2, 4)),
        long("sm_90a", StagedConfig("float32", 736, 16, 7, False, 2)),
        long("sm_100a", StagedConfig("float32", 544, 16, 7, False, 3)),
    ],
)
def test_large_clusters_of_many_warps_do_not_spill(arch, config):
    (kernel,) = resources(launch.softmax_kernel.compiled(config, arch)).values()
    assert kernel.local_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nothing_that_may_be_chosen_spills(arch, dtype):
    """Every strategy's best configuration at shapes of every kind."""
    shapes = ((128, 1024), (2048, 8192), (8192, 50257), (4096, 131072), (4, 65536), (15, 371627), (4, 2**25))
    for rows, length in shapes:
        problem = SoftmaxProblem(rows, length, dtype, length % 8 == 0)
        for plan in best_of_each(problem, H200).values():
            (kernel,) = resources(launch.softmax_kernel.compiled(plan.config, arch)).values()
            assert kernel.local_bytes == 0, plan
