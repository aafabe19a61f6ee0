"""The device that host code sees: limits and attributes of H200, B200, B300 and others, as CUDA reports them (CUDA C++
Programming Guide, "Compute Capabilities")."""

from __future__ import annotations

import re
from dataclasses import dataclass

from warpspec.sim.errors import HostError
from warpspec.sim.lanes import WARP_SIZE

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_PORTABLE_CLUSTER = 8
MAX_CLUSTER = 16
REGISTERS_PER_SM = 65536
SM_PARTITIONS = 4  # partitions of an SM, each with a quarter of its registers; warps go to them in turn
REGISTERS_PER_WARP_STEP = 256  # unit in which registers are allocated to a warp
SHARED_PER_CTA_DEFAULT = 48 * 1024
SHARED_RESERVED = 1024  # bytes of a CTA's shared memory reserved for the system


@dataclass(frozen=True)
class Device:
    """The attributes that cudaDeviceGetAttribute reports about the simulated device."""

    name: str
    major: int
    minor: int
    sms: int
    l2_bytes: int
    clock_khz: int
    shared_per_sm: int = 228 * 1024
    threads_per_sm: int = 2048
    ctas_per_sm: int = 32
    max_cluster: int = MAX_CLUSTER

    @property
    def shared_per_cta(self) -> int:
        """Bytes of shared memory that a CTA may have, static and dynamic together, with opt-in."""
        return self.shared_per_sm - SHARED_RESERVED

    def attribute(self, number: int) -> int:
        """Value of a cudaDeviceAttr."""
        own = {
            13: self.clock_khz,
            16: self.sms,
            38: self.l2_bytes,
            39: self.threads_per_sm,
            75: self.major,
            76: self.minor,
            81: self.shared_per_sm,
            97: self.shared_per_cta,
            106: self.ctas_per_sm,
        }
        value = own.get(number, DEVICE_ATTRIBUTES.get(number))
        if value is None:
            raise HostError(
                f"the host function asks for cudaDeviceAttr {number}, which the simulator does not know"
            )
        return value


# NVIDIA documents nothing of sm_107: shared memory as CuTe DSL 4.8.1 has it, the rest as B300 (of its 576 columns of
# tensor memory the simulator has 512).
DEVICES = {
    "sm_90": Device("H200", 9, 0, 132, 60 << 20, 1_980_000),
    "sm_100": Device("B200", 10, 0, 148, 126 << 20, 1_965_000),
    "sm_103": Device("B300", 10, 3, 148, 126 << 20, 2_032_000),
    "sm_107": Device("sm_107", 10, 7, 148, 126 << 20, 2_032_000, shared_per_sm=328 * 1024),
    "sm_120": Device(
        "RTX 5090", 12, 0, 170, 96 << 20, 2_407_000,
        shared_per_sm=100 * 1024, threads_per_sm=1536, ctas_per_sm=24, max_cluster=MAX_PORTABLE_CLUSTER,
    ),
}  # fmt: skip


def device_of(target: str) -> Device:
    """The device for a PTX target such as "sm_90a"; raises HostError for a target without one."""
    found = re.match(r"sm_\d+", target)
    if found is None or found[0] not in DEVICES:
        known = [f"{name}a" for name in DEVICES]
        raise HostError(f"the simulator runs {', '.join(known[:-1])} and {known[-1]}, not {target}")
    return DEVICES[found[0]]


# cudaDeviceAttr values that these devices share.
DEVICE_ATTRIBUTES = {
    1: 1024,  # MaxThreadsPerBlock
    2: MAX_BLOCK[0],
    3: MAX_BLOCK[1],
    4: MAX_BLOCK[2],
    5: MAX_GRID[0],
    6: MAX_GRID[1],
    7: MAX_GRID[2],
    8: SHARED_PER_CTA_DEFAULT,
    9: 65536,  # TotalConstantMemory
    10: WARP_SIZE,
    12: REGISTERS_PER_SM,  # MaxRegistersPerBlock
    15: 1,  # GpuOverlap
    17: 0,  # KernelExecTimeout
    18: 0,  # Integrated
    20: 0,  # ComputeMode
    31: 1,  # ConcurrentKernels
    41: 1,  # UnifiedAddressing
    78: 1,  # StreamPrioritiesSupported
    82: REGISTERS_PER_SM,
    83: 1,  # ManagedMemory
    84: 0,  # IsMultiGpuBoard
    95: 1,  # CooperativeLaunch
    111: SHARED_RESERVED,
    115: 1,  # MemoryPoolsSupported
    120: 1,  # ClusterLaunch
}
