"""The sm100 attention kernel in the simulator, on every case, against the reference and torch."""

from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import CASES, PARTLY_POISONED, Case, arguments, check, poisoned_out
from helpers.suites import long
from hypothesis import given, settings
from hypothesis import strategies as st

from warpspec import sim
from warpspec.fmha import attention, merge

BACKEND = "sim"
BY_ID = {case.id: case for case in CASES}

# fmt: off
# Compiling and translating take nearly all of a case's time, and cases of one line have one kernel: by default every
# feature has a line and every hazard a case.
DEFAULT = (
    "one-tile", "scale", "layout-broadcast", "data-rising", "data-very-negative",
    "past-a-tile",
    "causal-square", "causal-one-key", "scale-zero", "layout-packed", "data-equal",
    "one-tile-fp16", "data-creeping",
    "group-3-odd-queries",
    "decode-mqa-128",
    "window-causal",
    "q-start-lengths",
)
# Hazards on a kernel of those lines; with the kernel of the case itself they are in the long suite.
SHARING = [
    replace(BY_ID["data-falling"], sink=False),
    replace(BY_ID["data-peaked"], heads_q=1),
    replace(BY_ID["data-outliers"], dtype=torch.bfloat16),
    replace(BY_ID["short-of-a-tile"], heads_q=1),
    replace(BY_ID["layout-padded"], heads_kv=2, sink=False, causal=True),
    replace(BY_ID["layout-bhsd"], heads_kv=4),
    replace(BY_ID["three-tiles"], heads_kv=2),
]
# The mask of poison-window, on the kernel of window-causal.
POISON_WINDOW = next(
    replace(case, id="poison-window-causal", causal=True, heads_q=2)
    for case in PARTLY_POISONED
    if case.id == "poison-window"
)
# fmt: on


def run(case, seed=0):
    """Run the case into an output full of NaN and judge it; inputs must come back as they were. Where the maximum
    changes from tile to tile, one CTA goes through all of them."""
    inputs = arguments(case, seed)
    splits = {"num_splits": 1} if case.data in ("rising", "creeping", "falling") else {}
    if case is POISON_WINDOW:  # otherwise it is of a kernel of its own
        splits = {"num_splits": 2}
    before = {name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)}
    out = poisoned_out(case)
    result = attention(**inputs, **splits, out=out, return_lse=case.normalize, backend=BACKEND)
    assert (result[0] if isinstance(result, tuple) else result) is out
    check(case, result, inputs)
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches), "registers spill"
    for name, t in before.items():
        torch.testing.assert_close(
            inputs[name], t, rtol=0, atol=0, equal_nan=True, msg=f"{name} was modified"
        )


@pytest.mark.parametrize(
    "case", [case if case.id in DEFAULT else long(case) for case in CASES], ids=lambda case: case.id
)
def test_case(case):
    run(case)


@pytest.mark.parametrize("case", SHARING, ids=lambda case: case.id)
def test_hazard_on_a_kernel_of_other_cases(case):
    run(case)


@pytest.mark.parametrize(
    "case",
    [case if case.id == "poison-causal" else long(case) for case in PARTLY_POISONED] + [POISON_WINDOW],
    ids=lambda case: case.id,
)
def test_nan_and_inf_reach_only_rows_that_see_them(case):
    run(case)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_with_other_data(case):
    run(case, seed=1)


def test_merged_states_of_two_caches_are_attention_over_both():
    """The kernel's own row_max and row_sum, from different sets of keys, with a sink counted once."""
    whole = Case("two-caches", batch=2, seq_q=9, seq_k=200, heads_q=4, heads_kv=2, causal=True, sink=True)
    inputs = arguments(whole)
    states = []
    for first, end in ((0, 130), (130, 200)):
        start = torch.full((2,), whole.seq_k - whole.seq_q - first, dtype=torch.int32)
        part = {
            "normalize": False,
            "k": inputs["k"][:, first:end],
            "v": inputs["v"][:, first:end],
            "q_start": start,
            "sink": None,
            "num_splits": 1,  # both parts by one kernel
        }
        states.append(attention(**{**inputs, **part}, backend=BACKEND))
    o, lse = merge(states, inputs["sink"])
    check(whole, (o.to(whole.dtype), lse), inputs)


def test_compiled_graph_calls_the_kernel():
    case = Case("compiled", seq_q=130, seq_k=70)
    inputs = arguments(case)
    layer = torch.compile(
        lambda q, k, v: attention(q, k, v, return_lse=True, backend=BACKEND),
        fullgraph=True,
        backend="aot_eager",
    )
    check(case, layer(inputs["q"], inputs["k"], inputs["v"]), inputs)


@st.composite
def any_case(draw):
    """A case of any sizes up to a few tiles, any masks and any data."""
    batch = draw(st.integers(1, 3))
    seq_q, seq_k = draw(st.integers(1, 200)), draw(st.integers(1, 400))
    group, heads_kv = draw(st.integers(1, 9)), draw(st.integers(1, 2))
    reach = st.none() | st.integers(0, 300)
    per_batch_row = {"min_size": batch, "max_size": batch}
    normalize = draw(st.booleans())
    return Case(
        id="any",
        batch=batch,
        seq_q=seq_q if group < 3 else min(seq_q, 60),
        seq_k=seq_k,
        heads_q=group * heads_kv,
        heads_kv=heads_kv,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        scale=draw(st.none() | st.floats(-0.3, 0.3)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(reach, reach)),
        sink=normalize and draw(st.booleans()),
        kv_lengths=draw(st.none() | st.lists(st.integers(0, seq_k), **per_batch_row).map(tuple)),
        q_start=draw(st.none() | st.lists(st.integers(-250, 450), **per_batch_row).map(tuple)),
        normalize=normalize,
        shared_kv=draw(st.booleans()),
        layout=draw(st.sampled_from(["bshd", "bhsd", "padded", "broadcast"])),
        data=draw(st.sampled_from(["normal", "rising", "creeping", "falling", "equal", "outliers"])),
    )


@pytest.mark.long
@settings(max_examples=60)
@given(case=any_case(), seed=st.integers(0, 2**20))
def test_any_case(case, seed):
    run(case, seed)
