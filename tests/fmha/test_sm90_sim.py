"""The sm90 attention kernel, compiled for sm_90a and executed in the simulator."""

from dataclasses import replace

import pytest
import torch
from attention_cases import CASES, Case, arguments, check, poisoned_out, relative_error

from warpspec import sim
from warpspec.common.compile import resources
from warpspec.fmha import attention, sm90, sm100
from warpspec.fmha.sm90.shapes import DECODE, NARROW, PREFILL, SHARED

BY_ID = {case.id: case for case in CASES}


@pytest.fixture(autouse=True)
def simulate_sm90(monkeypatch):
    """Backend "sim" runs the sm90 kernel."""
    monkeypatch.setattr(sm100, "run_sim", sm90.run_sim)


def run(case: Case, seed: int = 0, **options) -> sim.SimReport:
    """Run a case into an output full of NaN, judge it, and return what the simulator reports."""
    inputs = arguments(case, seed)
    out = poisoned_out(case)
    result = attention(**inputs, **options, out=out, return_lse=case.normalize, backend="sim")
    check(case, result, inputs)
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches)
    return sim.last_report()


QUICK = [
    ("window-both", 128), ("lengths-window", 512), ("gpt-oss-layer", 64), ("lengths-window", 256),
    ("q-start-window-past-keys", 128), ("state", 64),
]  # fmt: skip


@pytest.mark.parametrize(("name", "head_dim"), QUICK)
def test_cases(name, head_dim):
    run(replace(BY_ID[name], head_dim=head_dim), num_splits=1)


@pytest.mark.long
@pytest.mark.parametrize("head_dim", PREFILL)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case(case, head_dim):
    run(replace(case, head_dim=head_dim))


@pytest.mark.parametrize("seed", range(2))
def test_persistent_ctas_take_several_tiles(monkeypatch, seed):
    case = Case(
        "persistent", batch=2, seq_q=150, seq_k=300, heads_q=2, heads_kv=1, causal=True, window=(130, None)
    )
    inputs = arguments(case, seed)
    out = poisoned_out(case)
    monkeypatch.setattr(sm100, "run_sim", lambda *a, **k: sm90.run_sim(*a, **k, sm_count=2, seed=seed))
    result = attention(**inputs, out=out, return_lse=True, backend="sim", num_splits=1)
    check(case, result, inputs)
    assert sim.last_report().launches[0].grid == (2, 1, 1)


@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_splits_and_shared_kv(head_dim):
    case = Case(
        "splits", batch=2, seq_q=1, seq_k=420, heads_q=16, heads_kv=1, head_dim=head_dim, shared_kv=True, sink=True,
        kv_lengths=(420, 3),
    )  # fmt: skip
    run(case, num_splits=3)


@pytest.mark.parametrize(("head_dim", "dtype", "shape", "window"), [
    (64, torch.bfloat16, (1, 4, 70, 261), None), (128, torch.float32, (2, 1, 70, 261), (100, 3)),
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
SHAPES = list(
    dict.fromkeys(
        (head_dim, shape) for table in (PREFILL, NARROW, DECODE) for head_dim, shape in table.items()
    )
)


def spilled_bytes(head_dim, shape, variant) -> int:
    options = dict(VARIANTS[variant])
    if options.get("shared_kv"):
        shape = SHARED.get(head_dim, shape)
    if options.get("page_size", 0) and shape.tile_n % options["page_size"]:
        options["page_size"] = 0
    config = sm90.AttentionConfig(dtype="bfloat16", head_dim=head_dim, shape=shape, **options)
    (kernel,) = resources(sm90.compiled(config)).values()
    return kernel.local_bytes


@pytest.mark.parametrize("head_dim", PREFILL)
def test_the_largest_shapes_do_not_spill(head_dim):
    assert spilled_bytes(head_dim, PREFILL[head_dim], "causal") == 0


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_spills(shape, variant):
    assert spilled_bytes(*shape, variant) == 0
