"""mbarriers and rings of buffers between warp roles.

A role never keeps a phase bit. It counts its uses of a buffer (0, 1, 2, ...) and passes the count; which
stage and which parity that is follows from the count. PTX ISA: "mbarrier", parity waits
(mbarrier.try_wait.parity): waiting with parity P returns once the phase with parity P is complete, and at
once on a fresh barrier for P = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from warpspec.common.barriers import Barrier

BOTH_CTAS = 0b11  # mask of a cluster of two


@dataclass(frozen=True)
class Channel:
    """Device side of one ``Barrier``: its mbarriers, addressed by use count.

    base: pointer to the first mbarrier (shared memory, Int64). stages: as in the table.
    """

    base: cute.Pointer
    stages: int

    def stage(self, use):
        """Buffer that the use-th fill lies in."""
        return use % self.stages if self.stages > 1 else 0

    def barrier(self, use):
        """mbarrier of the use-th fill."""
        return self.base + self.stage(use) if self.stages > 1 else self.base

    def wait(self, use):
        """Wait until the use-th completion (counting from 0)."""
        cute.arch.mbarrier_wait(self.barrier(use), (use // self.stages) % 2)

    def wait_previous(self, use):
        """Wait until the completion before the use-th on the same buffer; return at once where there is none."""
        cute.arch.mbarrier_wait(self.barrier(use), (use // self.stages + 1) % 2)

    def arrive(self, use):
        """Every calling thread arrives, and releases what it wrote before."""
        cute.arch.mbarrier_arrive(self.barrier(use))

    def arrive_in(self, rank, use, *, has_read=False):
        """``arrive`` on the same barrier of the cluster's CTA ``rank``.

        has_read: what the thread hands back has been read by it, not written. That is released at CTA scope, as
        CUTLASS does for a CTA of the cluster, too: a release to the cluster waits for every store of the thread (a
        MEMBAR of the GPU), a relaxed arrival would order no read before what overwrites it.
        """
        scope = nvvm.MemScopeKind.CTA if has_read else nvvm.MemScopeKind.CLUSTER
        cute.arch.mbarrier_arrive(self.barrier(use), rank, scope=scope)

    def arrive_warp(self, use, rank=None):
        """The warp arrives once, when all its lanes are here; on CTA ``rank``'s barrier where given."""
        cute.arch.sync_warp()
        self.arrive_behind_collective(use, rank)

    def arrive_behind_collective(self, use, rank=None):
        """The warp arrives once, where all that it hands back has been read by collective instructions, which it has
        waited for by another (``tcgen05.wait``, ``wgmma.wait_group``): these gather the lanes themselves."""
        with cute.arch.elect_one():
            if rank is None:
                self.arrive(use)
            else:
                self.arrive_in(rank, use)

    def expect_bytes(self, use, transaction_bytes):
        """The producer's arrival, by one elected thread: the phase also waits for these TMA bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(use), transaction_bytes)

    def commit_mma(self, use, *, pair=False):
        """The barrier gets one arrival when every tcgen05.mma this warp has issued so far is complete (tcgen05.commit).

        pair: of cta_group::2, on the same barrier of both CTAs.
        """
        with cute.arch.elect_one():
            if pair:
                tcgen05.commit(self.barrier(use), BOTH_CTAS, tcgen05.CtaGroup.TWO)
            else:
                tcgen05.commit(self.barrier(use))


def init_barriers(table: tuple[Barrier, ...], base: cute.Pointer) -> dict[str, Channel]:
    """Initialise every mbarrier of a table, laid out one after another from ``base``; name -> Channel.

    Called by all threads; thread 0 initialises. The caller synchronises the CTA before anyone waits or
    arrives.
    """
    channels, offset = {}, 0
    for barrier in table:
        channels[barrier.name] = Channel(base + offset, barrier.stages)
        offset += barrier.stages
    _init(table, channels)
    return channels


@cute.jit
def _init(table: cutlass.Constexpr, channels: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for barrier in table:
            for stage in cutlass.range_constexpr(barrier.stages):
                cute.arch.mbarrier_init(channels[barrier.name].base + stage, barrier.arrivals)
        cute.arch.mbarrier_init_fence()
