"""mbarriers and rings of buffers between warp roles.

A role never keeps a phase bit. It counts its uses of a buffer (0, 1, 2, ...) and passes the count, from which stage and
parity follow. PTX ISA: "mbarrier", parity waits (mbarrier.try_wait.parity): waiting with parity P returns once the
phase with parity P is complete, and at once on a fresh barrier for P = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05

from warpspec.common.barriers import Barrier

BOTH_CTAS = 0b11  # mask of both CTAs of a pair


@dataclass(frozen=True)
class Channel:
    """Device side of one ``Barrier``: its mbarriers, addressed by use count.

    base: pointer to the first mbarrier (shared memory, Int64). stages: as in the table.
    """

    base: cute.Pointer
    stages: int

    def stage(self, use):
        """Buffer of the use-th fill."""
        return use % self.stages if self.stages > 1 else 0

    def barrier(self, use):
        """mbarrier of the use-th fill."""
        return self.base + self.stage(use) if self.stages > 1 else self.base

    def wait(self, use):
        """Wait until the use-th phase (counted from 0) is complete."""
        cute.arch.mbarrier_wait(self.barrier(use), (use // self.stages) % 2)

    def wait_previous(self, use):
        """Wait until the phase before the use-th on the same buffer is complete; return at once if there is none."""
        cute.arch.mbarrier_wait(self.barrier(use), (use // self.stages + 1) % 2)

    def arrive(self, use):
        """Every calling thread arrives; this releases what it wrote before."""
        cute.arch.mbarrier_arrive(self.barrier(use))

    def arrive_in(self, rank, use, *, has_read=False):
        """``arrive`` on the same barrier of the cluster's CTA ``rank``.

        has_read: the thread hands back a buffer that it has only read. The arrival is then released at CTA scope, as
        CUTLASS does too, even for another CTA of the cluster. A release at cluster scope would wait for every store of
        the thread (a MEMBAR of the GPU), and a relaxed arrival would not order the reads before the overwriting store.
        """
        scope = nvvm.MemScopeKind.CTA if has_read else nvvm.MemScopeKind.CLUSTER
        cute.arch.mbarrier_arrive(self.barrier(use), rank, scope=scope)

    def arrive_warp(self, use, rank=None):
        """The warp arrives once, after all its lanes have come here; on CTA ``rank``'s barrier if given."""
        cute.arch.sync_warp()
        self.arrive_behind_collective(use, rank)

    def arrive_behind_collective(self, use, rank=None):
        """The warp arrives once, without synchronising its lanes.

        Use it only if everything handed back was read by collective instructions whose completion the warp has awaited
        (``tcgen05.wait``, ``wgmma.wait_group``); these have synchronised the lanes.
        """
        with cute.arch.elect_one():
            if rank is None:
                self.arrive(use)
            else:
                self.arrive_in(rank, use)

    def expect_bytes(self, use, transaction_bytes):
        """The producer's arrival, by one elected thread; the phase also waits for this many TMA bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.barrier(use), transaction_bytes)

    def arrive_behind_copies(self, use):
        """Every calling thread arrives once its copies so far (``words.copy_async``) are done."""
        cute.arch.inline_ptx(
            "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[self.barrier(use).toint()]
        )

    def commit_mma(self, use, *, pair=False):
        """Have the barrier get one arrival when all tcgen05.mma that this warp has issued are complete
        (tcgen05.commit).

        pair: for cta_group::2, on the same barrier of both CTAs.
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


@cute.jit
def drain(rings: cutlass.Constexpr, fills, uses: cutlass.Constexpr = 1, own=0):
    """Wait until every buffer of some rings has been released, after ``fills`` fills of each.

    Needed before other data take the memory, here and in CTAs that this one loads for, and at the end, so that no
    arrival is still on its way to a barrier of a CTA that has ended.

    rings: the channels on which buffers come back, all with equally many. uses: number of uses of a channel in a fill;
    this role waits for number ``own`` of them.
    """
    # On a ring with fewer stages than the others this would wait for a phase before the last, for ever.
    (stages,) = {ring.stages // uses for ring in rings}
    for fill in cutlass.range(cutlass.max(fills - stages, 0), fills, unroll=1):
        for ring in rings:
            ring.wait(fill * uses + own)
