"""How kernels' packages find the simulator."""

import pytest

from warpspec.common import simulator


def test_the_offered_simulator_is_used(monkeypatch):
    class Counting:
        def remember(self, report):
            return ("last", report)

    monkeypatch.setattr(simulator, "_offered", Counting())
    assert simulator.joined(2, 3, 4) == ("last", 9)
    assert simulator.joined(None, None) is None


def test_an_absent_simulator_says_what_to_install(monkeypatch):
    monkeypatch.setattr(simulator, "_offered", None)
    monkeypatch.setattr(simulator, "PROVIDER", "warpspec.no_such_simulator")
    with pytest.raises(ImportError, match=r"pip install 'warpspec\[sim\]'"):
        simulator.simulator()
