"""Rows of one query that few keys decide, in the simulator; test_sm90_pair has K and V one tensor on sm_90a."""

import pytest
from peaks import check_as_exact_as_torch, every_peak
from simulate import simulate_as


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@every_peak
def test_as_exact_as_torch(monkeypatch, arch, steps):
    simulate_as(monkeypatch, arch)
    check_as_exact_as_torch(steps, 128, shared_kv=False)
