"""A launch's grid: makes clusters of CTAs with their memories and special registers, and hands them out in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from warpspec.sim.codegen.layout import Ctx
from warpspec.sim.codegen.program import Program
from warpspec.sim.device import Device
from warpspec.sim.errors import HostError
from warpspec.sim.lanes import WARP_SIZE
from warpspec.sim.memory import LOCAL_WINDOW, SHARED_BASE_OFFSET, GlobalMemory
from warpspec.sim.names import StorageNames
from warpspec.sim.register_memory import POISON, RegisterMemory, aligned_bytes
from warpspec.sim.report import LaunchStats
from warpspec.sim.starving import Schedule
from warpspec.sim.warp import LANE_NUMBERS, Cluster, Cta, Warp

Dim3 = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """A kernel launch as the machine needs it."""

    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    params: int  # address of the parameter buffer
    device: Device
    symbol_addresses: np.ndarray = field(default_factory=lambda: np.zeros(1, np.uint64))
    registers: int | None = None  # registers of a thread, as compiled; None: not known
    names: StorageNames = field(default_factory=StorageNames)  # names of fields in shared memory
    share: tuple[int, int] = (0, 1)  # this process runs clusters number i with i % share[1] == share[0]
    starved: Schedule | None = None  # what the schedule starves; None: the schedule is uniformly random
    keeps_back: bool = False  # reductions into global memory are kept back until all shares have ended
    recorder: object = None  # recorder of a trace to be timed (clocks/record.py); None: nothing is recorded

    @property
    def threads(self) -> int:
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_size(self) -> int:
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


_PER_CTA = {"%smid", "%cluster_ctarank"} | {
    f"%{name}.{axis}" for name in ("ctaid", "clusterid", "cluster_ctaid") for axis in "xyz"
}


def unravel(index: int, shape: Dim3) -> Dim3:
    """Coordinates of a linear index, x fastest."""
    return index % shape[0], index // shape[0] % shape[1], index // (shape[0] * shape[1])


class ClusterFactory:
    """Makes the grid's clusters in order, as many at a time as the device holds."""

    def __init__(self, program: Program, launch: Launch, gmem: GlobalMemory, stats: LaunchStats):
        self.program, self.launch, self.stats = program, launch, stats
        self.clusters_shape = tuple(-(-g // c) for g, c in zip(launch.grid, launch.cluster, strict=True))
        self.total = self.clusters_shape[0] * self.clusters_shape[1] * self.clusters_shape[2]
        self.smem_end = program.tables.static_shared_end + launch.dynamic_smem
        per_sm = min(
            launch.device.shared_per_sm // max(self.smem_end, 1),
            launch.device.threads_per_sm // launch.threads,
            launch.device.ctas_per_sm,
        )
        self.capacity = max(1, launch.device.sms * max(per_sm, 1) // launch.cluster_size)
        self.following = launch.share[0]
        # Clusters that run; None: all.
        self.only = None if launch.recorder is None else launch.recorder.following()
        self._free_smem: list[np.ndarray] = []
        self._free_registers: list[RegisterMemory] = []
        self._free_tmem: list[np.ndarray] = []
        self.ranges = gmem.ranges.copy()
        self._local_size = program.tables.local_size
        self._by_warp: dict[int, dict[str, object]] = {}
        self._same_everywhere = self._of_launch()
        known = self._same_everywhere.keys() | self._of_warp(0).keys() | _PER_CTA
        for name in program.registers.special:
            if name not in known:
                raise HostError(f"special register {name} is not simulated")

    def cancel(self) -> Dim3 | None:
        """Remove the next cluster that has not started from the grid (clusterlaunchcontrol); returns its first CTA's
        ctaid."""
        if self.following >= self.total or self.only is not None:
            return None
        at = unravel(self.following, self.clusters_shape)
        self.following += self.launch.share[1]
        return tuple(a * c for a, c in zip(at, self.launch.cluster, strict=True))

    def next(self, resident: int) -> Cluster | None:
        """The next cluster, or None if none is left or the device is full."""
        if self.only is not None:
            number = next(self.only, None) if resident < self.capacity else None
            return None if number is None else self._make(number)
        if self.following >= self.total or resident >= self.capacity:
            return None
        number = self.following
        self.following += self.launch.share[1]
        return self._make(number)

    def retire(self, cluster: Cluster) -> None:
        """Take back a finished cluster's memory."""
        for cta in cluster.ctas:
            self._free_smem.append(cta.smem)
            self._free_registers += [w.memory for w in cta.warps]
            cta.retire()
        cluster.ctas.clear()
        cluster.barrier = None

    def _make(self, number: int) -> Cluster:
        launch = self.launch
        cluster = Cluster(number, launch.cluster)
        first = unravel(number, self.clusters_shape)
        for rank in range(launch.cluster_size):
            inside = unravel(rank, launch.cluster)
            coords = tuple(f * c + i for f, c, i in zip(first, launch.cluster, inside, strict=True))
            linear = coords[0] + launch.grid[0] * (coords[1] + launch.grid[1] * coords[2])
            cta = Cta(cluster, rank, coords, linear, self._shared_memory(), launch.names)
            cta.spare_tmem = self._free_tmem
            cluster.ctas.append(cta)
        cluster.live_ctas = len(cluster.ctas)
        cluster.smem_table = np.array([cta.smem.ctypes.data for cta in cluster.ctas], np.uint64)
        for cta in cluster.ctas:
            self._add_warps(cta, self._of_cta(cta, first))
        return cluster

    def _shared_memory(self) -> np.ndarray:
        if self._free_smem:
            smem = self._free_smem.pop()
            smem.fill(POISON)
            return smem
        return aligned_bytes(self.smem_end, 1024, POISON)

    def _add_warps(self, cta: Cta, special: dict[str, object]) -> None:
        program, launch = self.program, self.launch
        count = -(-launch.threads // WARP_SIZE)
        context = self._context(cta)
        for index in range(count):
            threads = min(WARP_SIZE, launch.threads - index * WARP_SIZE)
            memory = self._free_registers.pop() if self._free_registers else None
            own = special | self._of_warp(index)
            w = Warp(program, launch.symbol_addresses, cta, index, threads, own, memory)
            w.counters = self.stats.counters(index, len(program.blocks))
            w.executed = memoryview(w.counters)
            w.ctx[:] = context
            w.ctx[Ctx.COUNTERS] = w.counters.ctypes.data
            w.ctx[Ctx.ALIVE] = w.alive
            w.ctx[Ctx.REGISTERS] = w.memory.address
            if self._local_size:
                w.local = aligned_bytes(self._local_size * WARP_SIZE, 64, POISON)
                w.ctx[Ctx.LOCAL_BASE] = w.local.ctypes.data
            cta.warps.append(w)
        cta.live_warps = count

    def _context(self, cta: Cta) -> np.ndarray:
        """The part of the native code's context that a CTA's warps share."""
        context = np.zeros(Ctx.COUNT, np.uint64)
        fields = {
            Ctx.SMEM_TABLE: cta.cluster.smem_table.ctypes.data,
            Ctx.SMEM_SIZE: self.smem_end,
            Ctx.CLUSTER_SIZE: self.launch.cluster_size,
            Ctx.CTA_RANK: cta.rank,
            Ctx.RANGES: self.ranges.ctypes.data,
            Ctx.RANGE_COUNT: len(self.ranges),
            Ctx.PARAMS: self.launch.params,
            Ctx.SYMBOLS: self.launch.symbol_addresses.ctypes.data,
            Ctx.LOCAL_SIZE: self._local_size,
            **self.program.context,
        }
        for field_, value in fields.items():
            context[field_] = value
        return context

    def _wanted(self, values: dict[str, object]) -> dict[str, object]:
        """The special registers among `values` that the kernel reads."""
        return {name: values[name] for name in self.program.registers.special if name in values}

    def _of_launch(self) -> dict[str, object]:
        """Values of special registers that are the same in all CTAs (PTX ISA chapter 10)."""
        launch = self.launch
        values: dict[str, object] = {
            "%laneid": LANE_NUMBERS,
            "%nwarpid": launch.device.threads_per_sm // WARP_SIZE,
            "%nsmid": launch.device.sms,
            "%gridid": 1,
            "%cluster_nctarank": launch.cluster_size,
            "%is_explicit_cluster": launch.cluster_size > 1,
            "%total_smem_size": self.smem_end,
            "%aggr_smem_size": self.smem_end,
            "%dynamic_smem_size": launch.dynamic_smem,
            "%reserved_smem_offset_begin": 0,
            "%reserved_smem_offset_end": SHARED_BASE_OFFSET,
            "%lanemask_eq": np.uint32(1) << LANE_NUMBERS,
            "%lanemask_lt": (np.uint32(1) << LANE_NUMBERS) - np.uint32(1),
            "%lanemask_le": (np.uint32(2) << LANE_NUMBERS) - np.uint32(1),
            "%lanemask_gt": ~((np.uint32(2) << LANE_NUMBERS) - np.uint32(1)),
            "%lanemask_ge": ~((np.uint32(1) << LANE_NUMBERS) - np.uint32(1)),
            "%SP": LOCAL_WINDOW,
            "%SPL": LOCAL_WINDOW,
            **{f"%envreg{number}": 0 for number in range(32)},
            **_axes("%ntid", launch.block),
            **_axes("%nctaid", launch.grid),
            **_axes("%nclusterid", self.clusters_shape),
            **_axes("%cluster_nctaid", launch.cluster),
        }
        return self._wanted(values)

    def _of_cta(self, cta: Cta, cluster_id: Dim3) -> dict[str, object]:
        """Values of the special registers that the CTA's warps share."""
        launch = self.launch
        values = {
            "%smid": cta.number % launch.device.sms,
            "%cluster_ctarank": cta.rank,
            **_axes("%ctaid", cta.coords),
            **_axes("%clusterid", cluster_id),
            **_axes("%cluster_ctaid", unravel(cta.rank, launch.cluster)),
        }
        return self._same_everywhere | self._wanted(values)

    def _of_warp(self, index: int) -> dict[str, object]:
        """Values of the special registers that depend on the warp's number in its CTA."""
        if index not in self._by_warp:
            thread = LANE_NUMBERS + index * WARP_SIZE
            self._by_warp[index] = self._wanted(
                {"%warpid": index, **_axes("%tid", unravel(thread, self.launch.block))}
            )
        return self._by_warp[index]


def _axes(name: str, triple: tuple) -> dict[str, object]:
    return {f"{name}.{axis}": value for axis, value in zip("xyz", triple, strict=True)}
