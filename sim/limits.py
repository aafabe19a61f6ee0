"""Launches that hardware refuses: limits of the device, and of a kernel's PTX directives and registers."""

from __future__ import annotations

from warpspec.common.cubin import KernelResources
from warpspec.sim.device import (
    MAX_BLOCK,
    MAX_GRID,
    REGISTERS_PER_SM,
    REGISTERS_PER_WARP_STEP,
    SM_PARTITIONS,
    Device,
)
from warpspec.sim.errors import HostError
from warpspec.sim.instruction import Kernel
from warpspec.sim.lanes import WARP_SIZE

Dim3 = tuple[int, int, int]

MAX_THREADS = 1024  # most threads of a CTA


def cluster_of(kernel: Kernel, cluster: Dim3 | None) -> Dim3:
    """The cluster's shape: the requested one, else that of .reqnctapercluster, else a single CTA.

    HostError if both are given and differ. (1, 1, 1) counts as not requested.
    """
    declared = kernel.cluster_dims
    if cluster is None or (declared is not None and cluster == (1, 1, 1)):
        return declared or (1, 1, 1)
    if declared is not None and cluster != declared:
        raise HostError(
            f"launch of {kernel.name}: cluster {cluster}; the kernel is compiled for exactly {declared} "
            "(.reqnctapercluster)"
        )
    return cluster


def check_launch(
    kernel: Kernel,
    device: Device,
    *,
    grid: Dim3,
    block: Dim3,
    cluster: Dim3,
    shared_bytes: int,
    resources: KernelResources | None,
) -> None:
    """Raise HostError, naming the limit, for a launch that `device` refuses. shared_bytes: static plus dynamic.

    PTX ISA, "Performance-Tuning Directives" and "Cluster Dimension Directives"; CUDA C++ Programming Guide, "Compute
    Capabilities".
    """

    def refuse(reason: str) -> None:
        raise HostError(f"launch of {kernel.name}: {reason}")

    threads = block[0] * block[1] * block[2]
    ctas = cluster[0] * cluster[1] * cluster[2]
    for what, shape, limits in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
        if any(not 1 <= size <= limit for size, limit in zip(shape, limits, strict=True)):
            refuse(f"{what} {shape}: at most {limits} are allowed, and at least 1")
    if min(cluster) < 1:
        refuse(f"cluster {cluster} has no CTA")
    if threads > MAX_THREADS:
        refuse(f"block {block} has {threads} threads; at most {MAX_THREADS} are allowed")
    if kernel.reqntid is not None and block != kernel.reqntid:
        refuse(f"block {block}; the kernel is compiled for exactly {kernel.reqntid} (.reqntid)")
    if kernel.maxntid is not None and threads > (most := _product(kernel.maxntid)):
        refuse(f"block {block} has {threads} threads; the kernel is compiled for at most {most} (.maxntid)")
    if kernel.blocks_are_clusters:
        refuse("a grid that counts clusters (.blocksareclusters) is not simulated")
    if kernel.max_cluster_rank is not None and ctas > kernel.max_cluster_rank:
        refuse(
            f"cluster {cluster} has {ctas} CTAs; the kernel is compiled for at most {kernel.max_cluster_rank} "
            "(.maxclusterrank)"
        )
    if ctas > device.max_cluster:
        refuse(f"cluster {cluster} has {ctas} CTAs; {device.name} allows {device.max_cluster}")
    if any(size % part for size, part in zip(grid, cluster, strict=True)):
        refuse(f"grid {grid} is not a multiple of the cluster {cluster}")
    if shared_bytes > device.shared_per_cta:
        refuse(
            f"{shared_bytes} bytes of shared memory a CTA (static and dynamic); {device.name} has "
            f"{device.shared_per_cta}"
        )
    if resources is not None and (shortage := register_shortage(resources.registers, threads)):
        refuse(shortage)


def register_shortage(registers: int, threads: int) -> str | None:
    """Why an SM cannot hold a CTA with this many threads and registers per thread; None if it can."""
    if ctas_by_registers(registers, threads):
        return None
    return (
        f"{threads} threads of {registers} registers; an SM has {REGISTERS_PER_SM}, "
        f"{REGISTERS_PER_SM // SM_PARTITIONS} for every {SM_PARTITIONS}th warp"
    )


def ctas_by_registers(registers: int, threads: int) -> int:
    """CTAs that an SM has registers for.

    A warp's registers lie in one of the SM's partitions and are taken in steps: nine warps of 224 do not fit, although
    they are fewer than an SM has (CUDA's occupancy calculation: warps count by fours).
    """
    per_warp = -(-registers * WARP_SIZE // REGISTERS_PER_WARP_STEP) * REGISTERS_PER_WARP_STEP
    held = REGISTERS_PER_SM // SM_PARTITIONS // per_warp * SM_PARTITIONS  # warps
    return held // -(-threads // WARP_SIZE)


def _product(shape: Dim3) -> int:
    return shape[0] * shape[1] * shape[2]
