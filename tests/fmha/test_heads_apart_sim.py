"""Consumers with a KV head each, for rows of keys that fill no lines of L2: sm_90a's kernel in the simulator."""

from dataclasses import replace

import pytest
from helpers.attention_cases import Case, arguments, check
from helpers.simulate import choosing
from helpers.suites import long_but
from helpers.varlen_cases import Packed

from warpspec import sim
from warpspec.fmha import attention, attention_varlen
from warpspec.fmha.plan.cost import Way

# Requests without keys, ends amid a KV tile, NaN at hidden keys; grouped heads of several queries; windows.
PAGED = Packed(
    "paged",
    seq_q=(1,) * 3,
    seq_k=(540, 0, 37),
    heads_q=4,
    heads_kv=4,
    head_dim=72,
    page_size=16,
    poisoned=(2,),
)
GROUPED = Packed(
    "grouped", seq_q=(3, 0, 1, 4), seq_k=(540, 10, 37, 150), heads_q=8, heads_kv=4, head_dim=160, causal=True,
    window=(100, 0), sink=True,
)  # fmt: skip
PLAIN = Case("plain", batch=2, seq_q=5, seq_k=530, heads_q=4, heads_kv=2, head_dim=96, causal=True)
RUNS = [(PAGED, Way.PARTITIONS, 3), (PLAIN, Way.SPLIT, 2)]
EVERY = [
    *RUNS,
    (replace(PLAIN, head_dim=80), Way.PERSISTENT, 1),
    (replace(PLAIN, softcap=2.0, seq_q=1), Way.SINGLE, 1),
    (GROUPED, Way.QUEUE, 1),
    (GROUPED, Way.PARTITIONS, 4),
    (replace(PAGED, head_dim=112, normalize=False, poisoned=()), Way.SINGLE, 1),
    (replace(PAGED, head_dim=248), Way.SPLIT, 2),
]


@pytest.mark.parametrize(("case", "way", "splits"), long_but(RUNS, EVERY), ids=lambda v: getattr(v, "id", v))
def test_cases(case, way, splits, simulate_as, check_order):
    simulate_as("sm_90a", sm_count=2)
    chosen = []
    with choosing(way, lambda found: found.shape.heads_apart and not chosen.append(found), splits=splits):
        if isinstance(case, Case):
            inputs = arguments(case)
            check(case, attention(**inputs, return_lse=True, backend="sim"), inputs)
        else:
            found = attention_varlen(
                **case.arguments(), out=case.poisoned_out(), return_lse=case.normalize, backend="sim"
            )
            case.check(found)
    assert chosen and all(one.way is way for one in chosen)
    assert all(launch.local_bytes == 0 for launch in sim.last_report().launches)
