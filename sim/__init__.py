"""Functional simulator: runs kernels for Hopper and Blackwell, from CuTe DSL or any PTX, on any x86-64 CPU.

>>> compiled = cute.compile(host_function, *fake_tensors, options="--gpu-arch sm_100a --keep-ptx --keep-cubin")
>>> report = warpspec.sim.run(compiled, a, b, c)     # CPU torch tensors; c is written in place
>>> print(report)
"""

from __future__ import annotations

import sys

from warpspec.common.simulator import offer
from warpspec.sim import errors
from warpspec.sim.clocks.record import recording, times
from warpspec.sim.errors import (
    BadDescriptor,
    BarrierFault,
    Deadlock,
    HostError,
    MemoryFault,
    ScheduleDependence,
    SimError,
    TmemFault,
    UnsupportedInstruction,
    WrongResult,
)
from warpspec.sim.order.findings import Finding, OrderError
from warpspec.sim.order.stores import Stores, recording_stores
from warpspec.sim.pretend import intercept
from warpspec.sim.ptx_run import launch
from warpspec.sim.report import LaunchReport, SimReport
from warpspec.sim.runs import CHECK_VARIABLE, last_report, one_stream, remember
from warpspec.sim.simulation import run
from warpspec.sim.tensor_maps import tensor_map
from warpspec.sim.triton_run import triton

__all__ = [
    "CHECK_VARIABLE",
    "BadDescriptor",
    "BarrierFault",
    "Deadlock",
    "Finding",
    "HostError",
    "LaunchReport",
    "MemoryFault",
    "OrderError",
    "ScheduleDependence",
    "SimError",
    "SimReport",
    "Stores",
    "TmemFault",
    "UnsupportedInstruction",
    "WrongResult",
    "errors",
    "intercept",
    "last_report",
    "launch",
    "one_stream",
    "recording",
    "recording_stores",
    "remember",
    "run",
    "tensor_map",
    "times",
    "triton",
]

pretended = None  # as `common.simulator.Simulator` says; inside of `intercept` another simulator is offered
offer(sys.modules[__name__])
