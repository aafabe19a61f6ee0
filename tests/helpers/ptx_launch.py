"""Runs small kernels written as PTX text in the simulator, for tests of the machine itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from warpspec.common.cubin import KernelResources
from warpspec.sim.memory import GlobalMemory
from warpspec.sim.names import Field
from warpspec.sim.report import LaunchReport
from warpspec.sim.runtime import execute

HEADER = """
.version 9.4
.target sm_100a
.address_size 64
{variables}
.visible .entry kernel({parameters})
{{
  .reg .pred %p<32>;
  .reg .b16 %h<32>;
  .reg .b32 %r<128>;
  .reg .b32 %f<128>;
  .reg .b64 %rd<64>;
{body}
  ret;
}}
"""


def launch(
    body: str,
    arrays: dict[str, np.ndarray] | None = None,
    *,
    scalars: dict[str, int] | None = None,
    variables: str = ".shared .align 128 .b8 sm[4096];",
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    seed: int = 0,
    check: str | None = None,
    target: str = "sm_100a",
    registers: int | None = None,
    storage: Sequence[Field] = (),
) -> LaunchReport:
    """Run `body` as a kernel whose .u64 parameters are the arrays' addresses, then .u32 scalars.

    Arrays are copied in and, after the run, back in place.
    """
    gmem = GlobalMemory()
    arrays, scalars = arrays or {}, scalars or {}
    staged = {name: gmem.allocate(a.nbytes, name, data=a.tobytes()) for name, a in arrays.items()}
    parameters = [f".param .u64 {name}" for name in arrays] + [f".param .u32 {name}" for name in scalars]
    blob = b"".join(struct.pack("<Q", s.address) for s in staged.values())
    blob += b"".join(struct.pack("<I", value & 0xFFFFFFFF) for value in scalars.values())
    text = HEADER.format(variables=variables, parameters=", ".join(parameters), body=body)
    text = text.replace(".target sm_100a", f".target {target}")
    resources = None if registers is None else KernelResources(registers, 0, 0, 0, 1024)
    options = dict(grid=grid, block=block, cluster=cluster, params=blob, gmem=gmem, seed=seed)
    report = execute(text, "kernel", **options, resources=resources, check=check, storage=storage)
    for name, array in arrays.items():
        array[...] = staged[name].array.view(array.dtype).reshape(array.shape)
    return report
