"""Rows of one query that few keys decide, in the simulator; test_sm90_pair has K and V one tensor on sm_90a."""

import pytest
from helpers.peaks import check_as_exact_as_torch, every_peak
from helpers.suites import long


@pytest.mark.parametrize("arch", [long("sm_90a"), "sm_100a"])
@every_peak
def test_as_exact_as_torch(simulate_as, arch, steps):
    simulate_as(arch)
    check_as_exact_as_torch(steps, 128, shared_kv=False)
