"""The order of phases: counters in global memory in the fused kernel, otherwise the order of launches.

For each tile of TILE_M rows, the fused kernel counts what has been done of every phase since the launch began. A phase
waits for the tile that it reads, never for the grid. There is no deadlock, because every CTA goes through the phases in
the same order, and all CTAs are resident (the launch is cooperative). A phase may overwrite its output, because the
counters that it waits for imply that earlier readers are done:

    rows (step t) waits for down (t - 1), down (t) for up (t), up (t) for rows (t), all of the same row tile
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from warpspec.swap.config import GRID_COUNTERS, GROUP_ROWS, GROUP_TILES, THREADS, TILE_M

# Named barriers.
CONSUMER_BARRIER = 1  # THREADS threads meet here
TURN_BARRIER = 2  # both consumers meet here at the end of a tile (sm90)


class Flow(NamedTuple):
    """State of the order of phases.

    counters: Int32, zeros before the launch and after it; None if kernels are a chain. row_tiles: number of row tiles.
    groups: number of groups of up's column tiles.
    """

    counters: cute.Tensor | None
    row_tiles: Int32
    groups: Int32

    @classmethod
    def of(cls, config, ops) -> Flow:
        if not config.fused:
            return cls(None, Int32(0), Int32(0))
        column_tiles = ops.w13.shape[0] // config.tiles.up_n
        row_tiles = cute.ceil_div(ops.vectors.shape[0], TILE_M)
        return cls(ops.counters, Int32(row_tiles), Int32(cute.ceil_div(column_tiles, GROUP_TILES)))

    def tile(self, phase: str, row_tile, group=0) -> cute.Pointer:
        """Pointer to the counter of a row tile in a phase. group: which group of column tiles, for "up"."""
        if phase == "up":
            return self.counters.iterator + ((2 + group) * self.row_tiles + row_tile)
        return self.counters.iterator + (("rows", "down").index(phase) * self.row_tiles + row_tile)

    def grid(self, name: str) -> cute.Pointer:
        return self.counters.iterator + ((2 + self.groups) * self.row_tiles + GRID_COUNTERS.index(name))


def synchronize() -> None:
    """Barrier of the threads that do rows, epilogues and the collapse."""
    cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=THREADS)


def groups_of(rows, row_tile) -> Int32:
    """Groups of GROUP_ROWS rows in a row tile."""
    return Int32((cutlass.min(rows - row_tile * TILE_M, TILE_M) + GROUP_ROWS - 1) // GROUP_ROWS)


@cute.jit
def reached(counter: cute.Pointer, target) -> Int32:
    """Whether a counter has reached the target, 0 or 1; if so, what was written before it is visible to this thread."""
    return Int32(cute.arch.load(counter, Int32, sem="acquire", scope="gpu") >= target)


@cute.jit
def wait_for(counter: cute.Pointer, target):
    """Wait until a counter has reached the target. Executed by one thread."""
    while cute.arch.load(counter, Int32, sem="acquire", scope="gpu") < target:
        pass


@cute.jit
def wait_together(counter: cute.Pointer, target, thread):
    """``wait_for`` on behalf of all threads of ``synchronize``."""
    if thread == 0:
        wait_for(counter, target)
    synchronize()


@cute.jit
def count(counter: cute.Pointer, thread, done=1):
    """Add ``done`` to a counter, for all threads of ``synchronize``.

    What they have written is visible to whoever sees the count, also to its TMA loads.
    """
    cute.arch.fence_proxy("async.global")
    synchronize()
    if thread == 0:
        cute.arch.atomic_add(counter, Int32(done), sem="release", scope="gpu")


@cute.jit
def finish(flow):
    """Reset the counters; the last CTA of the launch does it. Called by all threads of a CTA after its last wait."""
    thread, _, _ = cute.arch.thread_idx()
    blocks, _, _ = cute.arch.grid_dim()
    if thread == 0:
        before = cute.arch.atomic_add(flow.grid("finished"), Int32(1), sem="acq_rel", scope="gpu")
        if Int32(before) == blocks - 1:
            for i in cutlass.range(cute.size(flow.counters), unroll=1):
                flow.counters[i] = Int32(0)
