"""Functional simulator: runs kernels that CuTe DSL compiled for sm_100a or sm_90a on any x86-64 CPU.

>>> compiled = cute.compile(host_function, *fake_tensors, options="--gpu-arch sm_100a --keep-ptx --keep-cubin")
>>> report = warpspec.sim.run(compiled, a, b, c)     # CPU torch tensors; c is written in place
>>> print(report)
"""

from __future__ import annotations

import sys

from warpspec.common.simulator import offer
from warpspec.sim import errors
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
)
from warpspec.sim.order.findings import Finding, OrderError
from warpspec.sim.report import LaunchReport, SimReport
from warpspec.sim.simulation import last_report, one_stream, remember, run

__all__ = [
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
    "TmemFault",
    "UnsupportedInstruction",
    "errors",
    "last_report",
    "one_stream",
    "remember",
    "run",
]

offer(sys.modules[__name__])
