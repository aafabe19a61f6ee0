"""Statistics of rows as columns of products, which subtract them from S and dP: what the first kernel writes, and the
gradients, by the kernels for sm_90a in the simulator."""

import pytest
import torch
from helpers.gradient_cases import KERNEL_TOLERANCE, Case

from warpspec.common.compile import resources
from warpspec.common.launch import SIMULATED
from warpspec.common.logarithms import LOG2_E
from warpspec.fmha.backward import launch, work
from warpspec.fmha.backward.operands import RowOperands
from warpspec.fmha.backward.problem import BackwardProblem
from warpspec.fmha.backward.rows import ROWS, row_config
from warpspec.fmha.backward.schedule import Order
from warpspec.fmha.backward.sm90 import MAIN
from warpspec.fmha.problem import AttentionProblem

ROWS_Q, HEADS, DIM = 150, 2, 64
HIDDEN = 2.0**63
# Fewer bits than fp32 would show; infinite ones hide a row, also beside a NaN.
STATISTICS = {3: -torch.inf, 4: torch.inf, 5: torch.nan, 6: 1e30, 7: 0.0, 8: 2.0**-40}


def problem_of(scale: float | None = None, **options) -> BackwardProblem:
    tensors = (torch.empty(1, ROWS_Q, HEADS, DIM, dtype=torch.bfloat16, device="meta") for _ in range(3))
    options = {"causal": True, "return_lse": True, "memory": False, "scale": scale} | options
    return BackwardProblem.check(AttentionProblem.of(*tensors, **options), ("q", "k", "v")).padded


def config_of(problem: BackwardProblem):
    return launch.supported(problem, SIMULATED["sm_90a"])


@pytest.mark.parametrize("scale", [0.125, -3.7])
def test_columns_add_up_to_the_statistics(scale):
    """Exactly, in fp32: three pieces of 8 bits each."""
    problem, inverse = problem_of(scale), 1.0 / (scale * LOG2_E)
    config, generator = config_of(problem), torch.Generator().manual_seed(0)
    assert config.subtracts
    o, do = (torch.randn(1, ROWS_Q, HEADS, DIM, generator=generator).to(torch.bfloat16) for _ in range(2))
    lse = 1e3 * torch.randn(1, HEADS, ROWS_Q, generator=generator)
    for row, value in STATISTICS.items():
        lse[..., row] = value
    tiles = -(-ROWS_Q // config.tile_m)
    statistics = torch.full((HEADS, tiles, 2 * config.tile_m, 4), torch.nan)
    sums = torch.empty(HEADS, tiles, config.tile_m * DIM)
    given = RowOperands._make([None] * len(RowOperands._fields))._replace(
        o=o, do=do, lse=lse, statistics=statistics, dq_sums=sums, window_left=0, window_right=0, piece_start=0.0,
        piece_share=0.0, piece_cost=0.0, piece_last=0.0, piece_further=0, slices=1, inverse_factor=inverse,
    )  # fmt: skip
    ROWS.launcher(row_config(config, problem), SIMULATED["sm_90a"])(*given)
    columns = statistics.view(torch.bfloat16).double()  # (HEAD, TILE, STATISTIC and ROW, 8)
    assert bool((columns[..., 3:] == 0).all())
    found = columns.sum(-1).float().view(HEADS, tiles, 2, config.tile_m).transpose(1, 2).flatten(2)
    rows = torch.zeros(1, HEADS, tiles * config.tile_m)
    rows[..., :ROWS_Q] = lse
    rows[..., ROWS_Q:] = -torch.inf
    factor = torch.tensor(-inverse)  # fp32, as the kernel's
    expected = rows * torch.tensor(LOG2_E) * factor
    hidden = -HIDDEN if scale > 0 else HIDDEN
    expected[rows.isinf() | (rows >= 1e30)] = hidden
    torch.testing.assert_close(found[:, 0], expected[0], rtol=0, atol=0, equal_nan=True)
    delta = (o.double() * do.double()).sum(-1).transpose(1, 2)[0]
    delta[lse[0] == -torch.inf] = 0.0
    torch.testing.assert_close(found[:, 1, :ROWS_Q].double(), -delta, rtol=1e-5, atol=1e-5)
    assert bool((found[:, 1, ROWS_Q:] == 0).all())


def test_other_maps_read_the_statistics():
    """A soft cap and a bias need S itself; a scale whose inverse is extreme would lose bits."""
    assert config_of(problem_of()).subtracts
    for options in ({"scale": 0.0}, {"scale": 2.0**-30}, {"scale": 2.0**30}, {"softcap": 5.0}):
        assert not config_of(problem_of(**options)).subtracts


CASES = {
    "causal": Case("causal", seq_q=300, seq_k=280, heads_q=2, heads_kv=1, causal=True, scale=-0.3, sink=True,
                   through="o+lse", dtype=torch.float16),
    "unseen": Case("unseen", seq_q=200, seq_k=70, causal=True),
    "window": Case("window", seq_q=200, seq_k=250, window=(70, 10), sliced=True),
    "short": Case("short", batch=3, seq_q=150, seq_k=150, heads_q=2, heads_kv=2),
    "packed": Case("packed", lengths_q=(1, 150, 0, 200, 64), lengths_k=(1, 150, 20, 230, 64), heads_q=2, causal=True),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, monkeypatch, simulate_gradients_as, check_order):
    """Gradients and memory order, by the kernels that ``BackwardConfig.subtracts`` chooses."""
    found, prepare = [], launch.prepare.__wrapped__
    monkeypatch.setattr(launch.apart, "gains", lambda *_: False)
    monkeypatch.setattr(launch, "choose_order", lambda *_: Order(1, 1))  # no key tile is cut
    monkeypatch.setattr(launch, "prepare", lambda *args: found.append(prepare(*args)) or found[-1])
    if name == "short":
        monkeypatch.setattr(work, "SHORT_CTAS", 0)
    simulate_gradients_as("sm_90a", sm_count=2, seed=1)
    case = CASES[name]
    tensors = case.tensors()
    case.check(case.gradients(tensors, backend="reference"), tensors, KERNEL_TOLERANCE[case.dtype])
    config = found[0].config
    assert config.subtracts
    assert not any(each.local_bytes for each in resources(MAIN.compiled(config, "sm_90a")).values())  # spills
