"""Calls that repeat an earlier one on the same bytes are not run again, and all others are."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass.cute.runtime import from_dlpack

import warpspec.sim
from warpspec.sim import simulation
from warpspec.sim.clocks import record


@cute.kernel
def _scale(x: cute.Tensor, y: cute.Tensor, by: cutlass.Int32, prints: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread] * by
    if cutlass.const_expr(prints):
        cute.printf("ran {}", thread)


@cute.jit
def _scaled(x: cute.Tensor, y: cute.Tensor, by: cutlass.Int32, prints: cutlass.Constexpr):
    _scale(x, y, by, prints).launch(grid=(1, 1, 1), block=(32, 1, 1))


@pytest.fixture
def runs(monkeypatch):
    """A list that gets an item for each run."""
    made, run = [], simulation.run
    monkeypatch.setattr(simulation, "run", lambda *args, **kwargs: (made.append(1), run(*args, **kwargs))[1])
    return made


@pytest.mark.parametrize("ffi", [False, True])
def test_a_benchmark_runs_few_calls(runs, ffi):
    with warpspec.sim.intercept("sm_100a") as session:
        x = torch.arange(32, dtype=torch.int32, device="cuda")
        compiled = cute.compile(
            _scaled, from_dlpack(x), from_dlpack(x), 3, False, options="--enable-tvm-ffi" if ffi else ""
        )
        as_given = (lambda tensor: tensor) if ffi else from_dlpack
        for _ in range(50):
            mine, y = x.clone(), torch.full((32,), -1, dtype=torch.int32, device="cuda")
            compiled(as_given(mine), as_given(y), 3)
            assert torch.equal(y, 3 * x)
        assert len(runs) == 2 and len(session.report.launches) == 50
        compiled(as_given(x), as_given(y), 4)
        assert torch.equal(y, 4 * x), "another number"
        compiled(as_given(x + 1), as_given(y), 3)
        assert torch.equal(y, 3 * x + 3), "other contents"
        expected = x.clone()
        for _ in range(5):
            compiled(as_given(x), as_given(x), 3)
            expected *= 3
            assert torch.equal(x, expected), "in place"


def test_recorded_calls_repeat_recorded_ones_and_a_repeated_one_is_the_last(runs):
    with warpspec.sim.intercept("sm_100a") as session:
        x, y = (torch.ones(32, dtype=torch.int32, device="cuda") for _ in "xy")
        compiled = cute.compile(_scaled, from_dlpack(x), from_dlpack(y), 3, False)
        for by in (3, 3, 4, 4, 3):
            compiled(from_dlpack(x), from_dlpack(torch.zeros_like(y)), by)
        repeated = warpspec.sim.last_report()
        assert len(runs) == 4 and repeated.launches == session.report.launches[1:2]
        with warpspec.sim.recording(None):
            for _ in range(3):
                compiled(from_dlpack(x), from_dlpack(torch.zeros_like(y)), 3)
            assert len(runs) == 6 and all(launch.trace for launch in session.report.launches[-3:])
            with record.captured() as traces:
                compiled(from_dlpack(x), from_dlpack(torch.zeros_like(y)), 3)
        assert len(runs) == 7 and len(traces) == 1


def test_a_kernel_that_prints_runs_each_time(capfd):
    with warpspec.sim.intercept("sm_100a"):
        x, y = (torch.ones(32, dtype=torch.int32, device="cuda") for _ in "xy")
        for _ in range(4):
            _scaled(from_dlpack(x), from_dlpack(y), 1, True)
    assert capfd.readouterr().out.count("ran 7\n") == 4
