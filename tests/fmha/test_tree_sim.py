"""Trees of drafts by the kernels in the simulator, judged by the reference (``test_tree`` judges that)."""

import pytest
from helpers.judged_calls import check, run
from helpers.suites import long_but
from helpers.tree_cases import CASES, inputs_of

from warpspec import sim

EVERY = [
    (case, arch) for case in CASES for arch in ("sm_90a", "sm_100a") if arch == "sm_90a" or not case.kv_dtype
]


@pytest.mark.parametrize(("case", "arch"), long_but([EVERY[0]], EVERY), ids=lambda v: getattr(v, "id", v))
def test_case(case, arch, simulate_as, check_order):
    simulate_as(arch, small=True, sm_count=2)
    inputs = inputs_of(case)
    check(case, run(case, inputs, backend="sim"), inputs)
    assert all(found.local_bytes == 0 for found in sim.last_report().launches)
