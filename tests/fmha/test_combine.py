"""The combine kernel of split KV, compiled for both architectures, in the simulator against ``state``."""

import itertools

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cuda.bindings.driver import CUstream
from helpers.attention_cases import SPLIT_KEYS, WHOLE_KEYS, arguments
from helpers.simulate import plan_for
from helpers.suites import long, long_but
from hypothesis import given, settings
from hypothesis import strategies as st

from warpspec import sim
from warpspec.common.architecture import architecture
from warpspec.common.compile import compile_kernel, resources
from warpspec.common.launch import SIMULATED
from warpspec.fmha import launch
from warpspec.fmha.combine import (
    BATCH,
    COMBINE,
    THREADS,
    VECTOR,
    CombineConfig,
    combine_arguments,
    combine_splits,
)
from warpspec.fmha.device.combine import CTAS_PER_SM, Combine
from warpspec.fmha.state import AttentionState, combine, normalized_output

ARCHS = ("sm_100a", "sm_90a")
HEAD_DIMS = (64, 128, 256, 512)
BY_TURNS = [(ARCHS[number % 2], head_dim) for number, head_dim in enumerate(HEAD_DIMS)]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def partials(splits, batch, seq_q, heads, head_dim, *, empty=0.3, seed=0):
    """(o, row_max, row_sum) with splits stacked in front. Some splits are empty, their o NaN and Inf: all of
    the first row, all but the last of the last row, and a share of the others."""
    random = torch.Generator().manual_seed(seed)
    row_max = 5 * torch.randn(splits, batch, heads, seq_q, generator=random)
    row_sum = 1 + 50 * torch.rand(splits, batch, heads, seq_q, generator=random)
    o = torch.randn(splits, batch, seq_q, heads, head_dim, generator=random)
    o *= row_sum.transpose(2, 3)[..., None]
    if empty:
        hidden = torch.rand(splits, batch, heads, seq_q, generator=random) < empty
        hidden[:, 0, 0, 0] = True
        hidden[:-1, -1, -1, -1] = True
        row_max[hidden], row_sum[hidden] = -torch.inf, 0.0
        poison = torch.tensor([torch.nan, torch.inf, -torch.inf]).repeat(head_dim)[:head_dim]
        o[hidden.transpose(2, 3)] = poison
    return o, row_max, row_sum


def expected(o, row_max, row_sum) -> AttentionState:
    """The state over all splits; o of empty splits does not count."""
    empty = (row_sum == 0).transpose(2, 3)[..., None]
    return combine(
        [AttentionState(*split) for split in zip(torch.where(empty, 0.0, o), row_max, row_sum, strict=True)]
    )


def unwritten(*shape, dtype=torch.float32):
    return torch.full(shape, torch.nan, dtype=dtype)


def error(got, reference):
    """Largest relative error of a head."""
    difference = (got.float() - reference).pow(2).sum((0, 1, 3)).sqrt()
    return (difference / reference.pow(2).sum((0, 1, 3)).sqrt().clamp(min=1e-30)).max().item()


def check(splits, batch, seq_q, heads, head_dim, *, dtype, sink, arch, layout="bshd", seed=0):
    """Run with every output; compare with the exact combination."""
    inputs = partials(splits, batch, seq_q, heads, head_dim, seed=seed)
    before = [t.clone() for t in inputs]
    sink = 3 * torch.randn(heads, generator=torch.Generator().manual_seed(seed)) if sink else None
    o = unwritten(batch, seq_q, heads, head_dim, dtype=dtype)
    if layout == "bhsd":
        o = unwritten(batch, heads, seq_q, head_dim, dtype=dtype).transpose(1, 2)
    elif layout == "padded":
        o = unwritten(batch, seq_q, heads, head_dim + 16, dtype=dtype)[..., 8:-8]
    lse = unwritten(batch, heads, seq_q)
    report = combine_splits(*inputs, o, sink=sink, lse=lse, target=SIMULATED[arch])
    state = expected(*inputs)
    assert error(o, normalized_output(state, sink)) <= TOLERANCE[dtype]
    torch.testing.assert_close(lse, state.lse, rtol=0, atol=1e-5)
    assert (o[0, 0, 0] == 0).all() and lse[0, 0, 0] == -torch.inf
    for got, kept in zip(inputs, before, strict=True):
        torch.testing.assert_close(got, kept, rtol=0, atol=0, equal_nan=True)
    return report


SPLITS = [  # number, dtype, sink, layout
    (1, torch.bfloat16, False, "bshd"),
    (2, torch.float16, True, "bhsd"),
    (BATCH + 1, torch.bfloat16, True, "padded"),
    (37, torch.float32, False, "bhsd"),
    (2 * 148, torch.bfloat16, True, "bshd"),
]


# By default every head size, and every number of splits.
@pytest.mark.parametrize(("arch", "head_dim", "splits", "dtype", "sink", "layout"), [
    (*case, *split) if case in BY_TURNS and number % 4 == HEAD_DIMS.index(case[1]) else long(*case, *split)
    for case in itertools.product(ARCHS, HEAD_DIMS) for number, split in enumerate(SPLITS)
])  # fmt: skip
def test_against_the_exact_combination(arch, head_dim, splits, dtype, sink, layout):
    check(splits, 2, 3, 5, head_dim, dtype=dtype, sink=sink, layout=layout, arch=arch)


@pytest.mark.parametrize(
    ("arch", "head_dim"), long_but([BY_TURNS[0], BY_TURNS[-1]], itertools.product(ARCHS, HEAD_DIMS))
)
@pytest.mark.parametrize("splits", [3, 40])
def test_state(arch, head_dim, splits):
    """normalize=False: the state over all splits, with zeros in a row that no split saw a key for."""
    inputs = partials(splits, 2, 4, 3, head_dim)
    o, row_max, row_sum = unwritten(2, 4, 3, head_dim), unwritten(2, 3, 4), unwritten(2, 3, 4)
    combine_splits(*inputs, o, row_max=row_max, row_sum=row_sum, target=SIMULATED[arch])
    state = expected(*inputs)
    assert error(o, state.o) <= TOLERANCE[torch.float32]
    torch.testing.assert_close(row_max, state.row_max, rtol=0, atol=0)
    torch.testing.assert_close(row_sum, state.row_sum, rtol=1e-6, atol=0)
    assert (o[0, 0, 0] == 0).all() and row_sum[0, 0, 0] == 0


@pytest.mark.parametrize("splits", [3, 40])
@pytest.mark.parametrize("head_dim", [64, 512])
def test_one_full_split_comes_through_unchanged(head_dim, splits):
    """Whichever split it is: weight 1, nothing of the empty ones."""
    o, row_max, row_sum = partials(splits, 1, splits, 2, head_dim, empty=0)
    for query in range(splits):
        others = torch.arange(splits) != query
        o[others, :, query] = torch.nan
        row_max[others, :, :, query], row_sum[others, :, :, query] = -torch.inf, 0.0
    got, maximum, total = unwritten(1, splits, 2, head_dim), unwritten(1, 2, splits), unwritten(1, 2, splits)
    combine_splits(o, row_max, row_sum, got, row_max=maximum, row_sum=total)
    for query in range(splits):
        assert torch.equal(got[:, query], o[query, :, query])
        assert torch.equal(maximum[..., query], row_max[query, ..., query])
        assert torch.equal(total[..., query], row_sum[query, ..., query])


@pytest.mark.parametrize("splits", [2, 21])
@pytest.mark.parametrize("where", ["o", "row_sum", "row_max"])
def test_nan_in_a_split_that_saw_keys_comes_through(splits, where):
    o, row_max, row_sum = partials(splits, 1, 4, 2, 128, empty=0)
    at = splits - 1
    if where == "o":
        o[at, 0, 1, 1, 7] = torch.nan
    elif where == "row_sum":  # as a NaN in Q leaves it
        row_sum[at, 0, 1, 1], row_max[at, 0, 1, 1] = torch.nan, -torch.inf
    else:
        row_max[at, 0, 1, 1] = torch.nan
    got, lse = unwritten(1, 4, 2, 128), torch.zeros(1, 2, 4)
    combine_splits(o, row_max, row_sum, got, lse=lse)
    reached = torch.zeros(1, 4, 2, 128, dtype=torch.bool)
    reached[0, 1, 1, 7 if where == "o" else slice(None)] = True
    assert torch.equal(got.isnan(), reached)
    sums_reached = torch.zeros(1, 2, 4, dtype=torch.bool)
    sums_reached[0, 1, 1] = where != "o"
    assert torch.equal(lse.isnan(), sums_reached)


def test_no_rows():
    inputs = partials(3, 1, 4, 2, 64, empty=0)
    none = [t[:, :0] for t in inputs]
    assert combine_splits(*none, unwritten(0, 4, 2, 64), lse=unwritten(0, 2, 4)) is None


def test_sinks_far_above_and_below_every_logit():
    inputs = partials(5, 1, 2, 4, 64)
    sink = torch.tensor([200.0, -200.0, torch.inf, -torch.inf])
    o = unwritten(1, 2, 4, 64)
    combine_splits(*inputs, o, sink=sink)
    reference = normalized_output(expected(*inputs), sink)
    torch.testing.assert_close(o, reference, rtol=1e-5, atol=1e-6)
    assert (o[:, :, 2] == 0).all() and (o[:, 1, 3] != 0).any()


def test_weights_that_underflow_and_maxima_far_apart():
    o, row_max, row_sum = partials(9, 1, 2, 2, 64, empty=0)
    row_max += torch.linspace(-3e4, 3e4, 9)[:, None, None, None]
    got, lse = unwritten(1, 2, 2, 64), unwritten(1, 2, 2)
    combine_splits(o, row_max, row_sum, got, lse=lse)
    state = expected(o, row_max, row_sum)
    torch.testing.assert_close(got, normalized_output(state), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, state.lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "head_dim, splits", [*itertools.product(HEAD_DIMS, (1, BATCH, BATCH + 1, 8 * BATCH, 100 * BATCH))]
)
def test_every_part_of_every_row_has_its_threads(head_dim, splits):
    config = CombineConfig.of(head_dim, splits)
    assert config.lanes * config.segments * VECTOR == head_dim
    assert config.lanes * config.ways * config.row_segments == THREADS
    assert config.ways == min(config.groups, 1 << (-(-splits // BATCH) - 1).bit_length())


@pytest.mark.parametrize(
    ("rows", "splits", "times"),
    [
        (768, 19, {(4, 2): 7.16, (4, 4): 9.26, (4, 8): 15.18, (8, 2): 5.06, (8, 4): 6.22, (8, 8): 13.06}),
        (256, 8, {(4, 1): 2.27, (4, 2): 2.01, (4, 4): 3.06, (8, 1): 2.32, (8, 2): 2.17, (8, 4): 2.39}),
        (64, 32, {(4, 2): 3.28, (4, 4): 2.44, (4, 8): 2.52, (8, 2): 3.51, (8, 4): 2.72, (8, 8): 2.68}),
        (1024, 16, {(4, 1): 6.03, (4, 2): 7.81, (4, 4): 9.62, (4, 8): 19.32}),
        (64, 44, {(4, 4): 3.34, (4, 8): 3.62}),
    ],
)
def test_the_configuration_is_about_the_fastest(rows, splits, times):
    """The configuration takes at most 1.1 of the least time at D 512 on an H200. times: microseconds, by (columns of a
    thread, groups that add up)."""
    config = CombineConfig.of(512, splits, rows=rows, vectors=tuple({vector: None for vector, _ in times}))
    assert times[config.vector, config.ways] <= 1.1 * min(times.values())


@pytest.mark.parametrize(("arch", "head_dim"), long_but(BY_TURNS, itertools.product(ARCHS, HEAD_DIMS)))
@pytest.mark.parametrize(
    "options", [dict(has_sink=True, has_lse=True), dict(normalize=False, dtype="float32")]
)
def test_compiles_without_spills_and_loads_16_bytes(arch, head_dim, options):
    for splits in (1, 2 * 148):
        compiled = COMBINE.compiled(CombineConfig.of(head_dim, splits, **options), arch)
        (kernel,) = resources(compiled).values()
        assert kernel.local_bytes == 0
        assert kernel.registers * THREADS * CTAS_PER_SM <= 65536
        ptx = compiled.artifacts.PTX
        assert ptx.count("ld.global.v4") == 2 * BATCH  # ahead of the maximum, and in a loop
        assert "griddepcontrol.wait" in ptx


@pytest.mark.parametrize(("arch", "splits", "case"), [
    ("sm_90a", 3, SPLIT_KEYS["sm_90a"]), ("sm_100a", 1, WHOLE_KEYS["sm_100a"]),
    long("sm_90a", 1, WHOLE_KEYS["sm_90a"]), long("sm_100a", 3, SPLIT_KEYS["sm_100a"]),
])  # fmt: skip
def test_attention_lets_it_come_up_early(simulate_as, arch, splits, case):
    """The instruction is there, once; on sm_100a not without split keys. On sm_90a, where the launch is a dependent one
    itself, after the wait for the launch before. The kernels are those of the cases that run elsewhere."""
    simulate_as(arch)
    found = plan_for(arch, **arguments(case), num_splits=splits, return_lse=True)
    assert found.splits == splits
    ptx = launch.ATTENTION.of(architecture(arch)).ATTENTION.compiled(found.config, arch).artifacts.PTX
    assert ptx.count("griddepcontrol.launch_dependents") == (splits > 1 or arch == "sm_90a")
    if arch == "sm_90a":
        assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


def test_launched_behind_another_kernel_of_one_host_function():
    """An attention host function uses it so: of two launches, the second reads what the first has written."""
    config = CombineConfig.of(64, 2, dtype="float32", normalize=False)

    @cute.kernel
    def double(values: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        for split in cutlass.range(values.shape[0]):
            values[split, 0, block, 0, thread] = 2 * values[split, 0, block, 0, thread]

    @cute.jit
    def host(o, row_max, row_sum, sink, out, lse, out_max, out_sum, starts, stream: CUstream):
        double(o).launch(grid=(o.shape[2], 1, 1), block=(o.shape[4], 1, 1), stream=stream)
        Combine(config)(o, row_max, row_sum, sink, out, lse, out_max, out_sum, starts, stream)

    compiled = compile_kernel(
        "test_combine",
        lambda: (host, *combine_arguments(config)[1:]),
        arch="sm_100a",
        native=False,
    )
    o, row_max, row_sum = partials(2, 1, 3, 1, 64, empty=0)
    state = expected(2 * o, row_max, row_sum)
    got = AttentionState(unwritten(1, 3, 1, 64), unwritten(1, 1, 3), unwritten(1, 1, 3))
    report = sim.run(compiled, o, row_max, row_sum, None, got.o, None, got.row_max, got.row_sum, None, None)
    assert len(report.launches) == 2
    for mine, reference in zip(got, state, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "name, change",
    [
        ("partial_o", lambda a: a.update(partial_o=a["partial_o"][:0])),
        ("partial_o", lambda a: a.update(partial_o=a["partial_o"].double())),
        ("partial_max", lambda a: a.update(partial_max=a["partial_max"][:-1])),
        ("partial_sum", lambda a: a.update(partial_sum=a["partial_sum"].half())),
        ("sink", lambda a: a.update(sink=torch.zeros(3))),
        ("lse", lambda a: a.update(lse=torch.zeros(1, 4, 2))),
        ("row_max", lambda a: a.update(row_max=torch.zeros(1, 2, 4))),
        ("o", lambda a: a.update(o=torch.zeros(1, 4, 2, 65)[..., 1:])),
        ("o", lambda a: a.update(o=torch.zeros(1, 4, 64, 2).transpose(2, 3))),
    ],
)
def test_what_does_not_fit_is_named(name, change):
    o, row_max, row_sum = partials(3, 1, 4, 2, 64)
    arguments = dict(partial_o=o, partial_max=row_max, partial_sum=row_sum, o=unwritten(1, 4, 2, 64))
    change(arguments)
    with pytest.raises(ValueError, match=rf"^{name}: "):
        combine_splits(**arguments)


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    splits=st.integers(1, 300),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9)),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(list(TOLERANCE)),
    sink=st.booleans(),
    layout=st.sampled_from(["bshd", "bhsd", "padded"]),
    arch=st.sampled_from(ARCHS),
    seed=st.integers(0, 2**20),
)
def test_any_sizes(splits, sizes, head_dim, dtype, sink, layout, arch, seed):
    check(splits, *sizes, head_dim, dtype=dtype, sink=sink, layout=layout, arch=arch, seed=seed)
