"""The sm100 attention kernel at every head dimension, staging of P and split of the keys, in the simulator."""

from dataclasses import replace

import pytest
import torch
from helpers.attention_cases import SPLIT_KEYS, WHOLE_KEYS, Case, arguments, check, poisoned_out
from helpers.simulate import plan_for
from helpers.suites import long

from warpspec import sim
from warpspec.fmha import attention
from warpspec.fmha.sm100 import shapes as tile_shapes
from warpspec.fmha.sm100.shapes import SHAPES, SHARED_SHAPES

PREFILL, DECODE = WHOLE_KEYS["sm_100a"], SPLIT_KEYS["sm_100a"]
WINDOW = Case(
    "window", batch=2, seq_q=40, seq_k=200, heads_q=4, heads_kv=2, causal=True, window=(60, None),
    kv_lengths=(130, 7), layout="bhsd",
)  # fmt: skip
STATE = Case(
    "state", seq_q=5, seq_k=90, heads_q=8, heads_kv=2, causal=True, normalize=False, dtype=torch.float16
)


def run(case: Case, seed: int = 0, **options) -> sim.SimReport:
    """Run a case into an output full of NaN, judge it, and return what the simulator reports."""
    inputs = arguments(case, seed)
    out = poisoned_out(case)
    result = attention(**inputs, **options, out=out, return_lse=case.normalize, backend="sim")
    check(case, result, inputs)
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches), "registers spill"
    return sim.last_report()


@pytest.mark.parametrize(
    ("case", "head_dim", "shared"),
    [
        (PREFILL, 128, False), (DECODE, 256, True), long(PREFILL, 512, True), long(WINDOW, 512, False),
    ],
    ids=lambda value: getattr(value, "id", str(value)),
)  # fmt: skip
def test_head_dimension(case, head_dim, shared):
    run(
        replace(case, head_dim=head_dim, shared_kv=shared, heads_kv=1 if shared else case.heads_kv),
        num_splits=1,
    )


OTHER_SHAPES = [
    (head_dim, shared, number)
    for shared, table in ((False, SHAPES), (True, SHARED_SHAPES))
    for head_dim, shapes in table.items()
    for number in range(1, len(shapes))
]


def with_shape(monkeypatch, head_dim: int, shared: bool, number: int) -> None:
    """Make another of a head dimension's shapes the default."""
    name = "SHARED_SHAPES" if shared else "SHAPES"
    table = dict(getattr(tile_shapes, name))
    table[head_dim] = (table[head_dim][number],)
    monkeypatch.setattr(tile_shapes, name, table)


@pytest.mark.parametrize(("head_dim", "shared", "number"), [(64, False, 1)])
def test_p_through_shared_memory(monkeypatch, head_dim, shared, number):
    with_shape(monkeypatch, head_dim, shared, number)
    opcodes = run(replace(PREFILL, head_dim=head_dim), num_splits=1).launches[0].opcodes
    assert "tcgen05.st.sync.aligned.32x32b.x64.b32" not in opcodes, "only O is stored to tensor memory"
    assert any(name.startswith("tcgen05.st") for name in opcodes)


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "shared", "number"), OTHER_SHAPES)
@pytest.mark.parametrize("case", [PREFILL, WINDOW, DECODE], ids=lambda case: case.id)
def test_other_shape(monkeypatch, case, head_dim, shared, number):
    with_shape(monkeypatch, head_dim, shared, number)
    run(
        replace(case, head_dim=head_dim, shared_kv=shared, heads_kv=1 if shared else case.heads_kv),
        num_splits=1,
    )


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [128, 256, 512])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("case", [PREFILL, WINDOW, DECODE, STATE], ids=lambda case: case.id)
def test_every_head_dimension(case, head_dim, shared):
    run(
        replace(case, head_dim=head_dim, shared_kv=shared, heads_kv=1 if shared else case.heads_kv),
        num_splits=1,
    )


def test_shared_kv_is_loaded_once():
    """TMA reads Q once and, for each M tile of 64 rows, one pass over the KV tiles: not K and V apart."""
    case = Case("bytes", seq_k=256, heads_q=128, heads_kv=1, head_dim=512, shared_kv=True)
    report = run(case, num_splits=1)
    row = case.head_dim * 2
    m_tiles = 128 // 64
    assert report.launches[0].tma_bytes_loaded == 128 * row + m_tiles * case.seq_k * row


@pytest.mark.parametrize(("head_dim", "shared", "splits"), [long(64, False, 3), long(512, True, 7)])
def test_split_keys(head_dim, shared, splits):
    """More splits than tiles included: some then hold no key."""
    case = replace(DECODE, head_dim=head_dim, shared_kv=shared)
    report = run(case, num_splits=splits)
    assert len(report.launches) == 2 and report.launches[0].grid[0] % splits == 0


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("case", [PREFILL, WINDOW, STATE], ids=lambda case: case.id)
@pytest.mark.parametrize("splits", [2, 5])
def test_split_keys_of_every_case(case, head_dim, splits):
    run(replace(case, head_dim=head_dim), num_splits=splits)


def test_splits_are_chosen_for_one_long_row():
    """B = 1 at 64k keys fills the device: every SM gets a CTA, and the results agree with one split's."""
    for head_dim, heads_q, heads_kv in ((64, 64, 8), (128, 64, 8), (512, 128, 1)):
        q = torch.empty(1, 1, heads_q, head_dim, dtype=torch.bfloat16)
        k = torch.empty(1, 65536, heads_kv, head_dim, dtype=torch.bfloat16)
        plan = plan_for("sm_100a", q=q, k=k, v=None if heads_kv == 1 else k)
        m_tiles = heads_kv * -(-(heads_q // heads_kv) // plan.config.rows.pack)
        assert m_tiles * plan.splits >= 148 * 0.9


@pytest.mark.parametrize("stride", [128, long(4)])
def test_compressed_keys(stride):
    """Key j stands for positions j * stride to (j + 1) * stride - 1 and is visible once the last is not after p."""
    generator = torch.Generator().manual_seed(stride)
    q = torch.randn(2, 37, 8, 64, generator=generator).bfloat16()
    k = torch.randn(2, 60, 1, 64, generator=generator).bfloat16()
    start = torch.tensor([30 * stride, -3], dtype=torch.int32)
    inputs = dict(causal=True, key_stride=stride, q_start=start, num_splits=1, return_lse=True)
    o, lse = attention(q, k, **inputs, backend="sim")
    expected, expected_lse = attention(q, k, **inputs, backend="reference")
    error = (o - expected).float().norm(dim=(1, 3)) / expected.float().norm(dim=(1, 3)).clamp(min=1e-9)
    assert error.max() < 4e-3
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-3)
    if stride == 128:  # of 60 keys the second row sees none: no tile of it is visited
        loaded = sim.last_report().launches[0].tma_bytes_loaded
        assert loaded == 3 * (128 + 128) * 64 * 2  # 3 M tiles: Q and one shared KV tile
