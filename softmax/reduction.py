"""Reductions of the states of a row's parts: over the lanes of a warp, the warps of a CTA, the CTAs of a cluster or of
the whole grid. Device side.

Every thread gets the state of the whole row. Sums are added in a fixed order, so results repeat bit for bit.
``accurate``: compute exponentials accurately (see online.exponential), for fp32 data.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from warpspec.common.hardware import WARP_THREADS
from warpspec.common.workspace import EMPTY
from warpspec.softmax.online import exponential, join, reference_of

STATE_WORDS = 2  # maximum and sum, fp32
STATE_BYTES = 8
# States of a cluster's warps from which on each CTA joins those of its own warps first. Below, another exchange within
# the CTA takes longer than it saves (H200, 2026-11-27, up to 13% with 300 states).
MANY_STATES = 3 * WARP_THREADS


def warp_maximum(value, lanes: int) -> Float32:
    """Largest value of a group of ``lanes`` threads (a power of two, at most a warp); ignores NaN."""
    return cute.arch.warp_reduction_max(value, threads_in_group=min(lanes, WARP_THREADS))


def warp_sum(value, lanes: int) -> Float32:
    """Sum over a group of ``lanes`` threads (a power of two, at most a warp)."""
    return cute.arch.warp_reduction_sum(value, threads_in_group=min(lanes, WARP_THREADS))


def warp_join(state: tuple, lanes: int, accurate: bool) -> tuple:
    """The joint state of a group of ``lanes`` threads."""
    maximum = warp_maximum(state[0], lanes)
    scaled = state[1] * exponential(state[0] - reference_of(maximum), accurate)
    return maximum, warp_sum(scaled, lanes)


def join_states(states: cute.Tensor, count: int, accurate: bool) -> tuple:
    """The state of the whole row, from its parts' ``states`` (STATE_WORDS, count) in shared memory. Executed by a whole
    warp.

    Each part's exponential is relative to the maximum of all, so parts need not wait for each other.
    """
    lane, lanes = cute.arch.lane_idx(), WARP_THREADS
    while lanes // 2 >= count:
        lanes //= 2
    parts = [read_state(states, first + lane % lanes, count) for first in range(0, count, lanes)]
    maximum = warp_maximum(largest_of(parts), lanes)
    reference = reference_of(maximum)
    scaled = [part[1] * exponential(part[0] - reference, accurate) for part in parts]
    return maximum, warp_sum(sum(scaled[1:], scaled[0]), lanes)


def largest_of(parts: list[tuple]) -> Float32:
    """The largest maximum of several states; ignores NaN."""
    return functools.reduce(cute.arch.fmax, [part[0] for part in parts])


def read_state(states: cute.Tensor, place, count: int) -> tuple:
    """The state at a place among ``states``; past the last one, the state of no element."""
    inside = Boolean(place < count)
    place = Int32(cutlass.select_(inside, place, 0))
    maximum = Float32(cutlass.select_(inside, states[0, place], -Float32.inf))
    return maximum, Float32(cutlass.select_(inside, states[1, place], Float32(0.0)))


@cute.jit
def join_warps(
    state: tuple, states: cute.Tensor, row, warp, warps: cutlass.Constexpr, accurate: cutlass.Constexpr
) -> tuple:
    """The state of a row that ``warps`` warps of the CTA share. Called by all threads of the CTA.

    state: the calling warp's. states: (STATE_WORDS, WARP, ROW) in shared memory, used once. row: the row's number in
    the CTA. warp: the warp's number among the row's warps.
    """
    if cute.arch.lane_idx() == 0:
        states[0, warp, row], states[1, warp, row] = state
    cute.arch.sync_threads()
    return join_states(states[None, None, row], warps, accurate)


def cluster_states(cluster: int, warps: int) -> int:
    """States for which a ``ClusterReduction`` needs room in a CTA's shared memory. warps: those of a CTA."""
    return cluster + warps if cluster * warps >= MANY_STATES else cluster * warps


@dataclass(frozen=True)
class ClusterReduction:
    """One reduction over all warps of a cluster's CTAs, through distributed shared memory. Where their states are many,
    each CTA sends one, that of all its warps.

    states: (STATE_WORDS, ``cluster_states``) in shared memory: those that arrive, then those of the CTA's own warps if
    it joins them first. full: mbarrier that completes once every state has arrived. Call ``open`` first, and ``close``
    when the CTA has its states; each once.
    """

    states: cute.Tensor
    full: cute.Pointer
    cluster: int
    warps: int
    accurate: bool

    @property
    def joins_first(self) -> bool:
        """Whether each CTA joins its warps' states before it sends them."""
        return self.cluster * self.warps >= MANY_STATES

    @property
    def arriving(self) -> int:
        """States that arrive at a CTA."""
        return self.cluster if self.joins_first else self.cluster * self.warps

    @cute.jit
    def open(self, thread):
        """Initialise the mbarrier and tell the cluster. Called by all threads."""
        if thread == 0:
            cute.arch.mbarrier_init(self.full, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(self.full, self.arriving * STATE_BYTES)
        cute.arch.cluster_arrive_relaxed()

    @cute.jit
    def close(self, state: tuple, warp) -> tuple:
        """Send the calling warp's state, or the CTA's, to every CTA and wait for all others. Returns the state of the
        whole row. Called by all threads.

        A CTA waits for all writes to its memory, so none can exit while a write is in flight.
        """
        cute.arch.cluster_wait()  # every CTA's mbarrier is initialised
        rank = cute.arch.block_idx_in_cluster()
        if cutlass.const_expr(self.joins_first):
            layout = cute.make_layout((STATE_WORDS, self.warps))
            own = cute.make_tensor(self.states.iterator + STATE_WORDS * self.cluster, layout)
            if cute.arch.lane_idx() == 0:
                own[0, warp], own[1, warp] = state
            cute.arch.sync_threads()
            if warp == 0:
                self.send(join_states(own, self.warps, self.accurate), rank)
        else:
            self.send(state, rank * self.warps + warp)
        cute.arch.mbarrier_wait(self.full, 0)
        return join_states(self.states, self.arriving, self.accurate)

    @cute.jit
    def send(self, state: tuple, place):
        """Write a state to its place in every CTA's shared memory."""
        lane = cute.arch.lane_idx()
        if lane < self.cluster:
            words = (Float32(state[0]).bitcast(Int32), Float32(state[1]).bitcast(Int32))
            target = (self.states.iterator + place * STATE_WORDS).align(STATE_BYTES)
            cute.arch.store_async_dsmem(target, words, self.full, lane)


def allocate_states(smem, config, accurate: bool) -> tuple:
    """Allocate shared memory for the states of a row's warps, or of its CTAs. Returns (states (STATE_WORDS, STATE), the
    ClusterReduction of these states, not yet open; None if a CTA has whole rows). accurate: as in ``exponential``."""
    count = cluster_states(config.cluster, config.warps)
    states = smem.allocate_tensor(Float32, cute.make_layout((STATE_WORDS, count)), byte_alignment=16)
    if config.cluster == 1:
        return states, None
    full = smem.allocate_array(Int64, 1)
    return states, ClusterReduction(states, full, config.cluster, config.warps, accurate)


@cute.jit
def join_row(
    state: tuple, states: cute.Tensor, reduction, warps: cutlass.Constexpr, accurate: cutlass.Constexpr
):
    """The state of a row that belongs to the whole CTA or cluster, from every thread's state. Called once by all
    threads.

    states: (STATE_WORDS, WARP) in shared memory, of all CTAs. reduction: the open ClusterReduction of these states;
    None: no other CTA has a part of the row. warps: warps of a CTA.
    """
    warp = cute.arch.thread_idx()[0] // WARP_THREADS
    state = warp_join(state, WARP_THREADS, accurate)
    if cutlass.const_expr(reduction is not None):
        state = reduction.close(state, warp)
    else:
        by_row = cute.make_tensor(states.iterator, cute.make_layout((STATE_WORDS, warps, 1)))
        state = join_warps(state, by_row, 0, warp, warps, accurate)
    return state


BUFFERS = 2  # buffers of states in ClusterRounds


@dataclass(frozen=True)
class ClusterRounds:
    """Reductions over the CTAs of a cluster, one a round, for any number of rounds.

    states: (STATE_WORDS, CTA, BUFFER) in shared memory. full: an mbarrier for each buffer. Two buffers are enough. A
    CTA sends its state of round r + 2 only after it has received every CTA's state of round r + 1, and each CTA sent
    that only after all its threads had read the states of round r.
    """

    states: cute.Tensor
    full: cute.Pointer
    cluster: int
    accurate: bool

    @cute.jit
    def open(self, thread):
        """Initialise the mbarriers, for all CTAs. Called by all threads."""
        if thread == 0:
            for buffer in cutlass.range_constexpr(BUFFERS):
                cute.arch.mbarrier_init(self.full + buffer, 1)
            cute.arch.mbarrier_init_fence()
            for buffer in cutlass.range_constexpr(BUFFERS):
                cute.arch.mbarrier_arrive_and_expect_tx(self.full + buffer, self.cluster * STATE_BYTES)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()

    @cute.jit
    def publish(self, state: tuple, row, round_):
        """Send the CTA's state to all CTAs of the cluster, including itself. Called by one warp."""
        # All lanes have read the warps' states, which may be overwritten once this one arrives.
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        buffer = round_ % BUFFERS
        if lane < self.cluster:
            words = (Float32(state[0]).bitcast(Int32), Float32(state[1]).bitcast(Int32))
            place = cute.arch.block_idx_in_cluster() + buffer * self.cluster
            target = (self.states.iterator + place * STATE_WORDS).align(STATE_BYTES)
            cute.arch.store_async_dsmem(target, words, self.full + buffer, lane)

    @cute.jit
    def collect(self, row, round_, thread) -> tuple:
        """The state of the whole row, once all CTAs have sent theirs. Called by the same threads each round."""
        buffer = round_ % BUFFERS
        cute.arch.mbarrier_wait(self.full + buffer, round_ // BUFFERS % 2)
        state = join_states(self.states[None, None, buffer], self.cluster, self.accurate)
        if thread == 0:  # arm the buffer's next phase, which cannot complete before this
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + buffer, self.cluster * STATE_BYTES)
        return state

    def finish(self, thread, threads):
        """Does nothing: a CTA has already waited for everything written to its memory."""


@dataclass(frozen=True)
class GridRounds:
    """Reductions over CTAs that are all on the GPU at once, one a round, through global memory.

    workspace: Int64, all EMPTY before the launch and after it. Word 0 counts finished CTAs. The words after it are
    states, one for each (row, CTA of its group), written once in a launch. A state has 8 bytes and is stored and read
    as a whole, so nothing else need be ordered with it. Waiting cannot deadlock, because a cooperative launch starts
    only when all CTAs have a place. The last CTA to finish empties the workspace.

    group: CTAs to a row. rank: this CTA's number in its group. scratch: (STATE_WORDS, WARP) in shared memory; leader:
    Int32 there. threads: those that call ``collect`` and ``finish``, on named barrier ``barrier``.
    """

    workspace: cute.Tensor
    group: Int32
    rank: Int32
    scratch: cute.Tensor
    leader: cute.Tensor
    threads: int
    barrier: int
    accurate: bool

    def open(self, thread):
        """Does nothing: there is nothing to initialise."""

    def _synchronize(self):
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=self.threads)

    def _slot(self, row, rank):
        return self.workspace.iterator + (1 + Int64(row) * self.group + rank)

    @cute.jit
    def publish(self, state: tuple, row, round_):
        """Write the CTA's state. Called by one warp."""
        if cute.arch.lane_idx() == 0:
            low = Int64(cutlass.Uint32(Float32(state[0]).bitcast(cutlass.Uint32)))
            high = Int64(cutlass.Uint32(Float32(state[1]).bitcast(cutlass.Uint32)))
            cute.arch.store(self._slot(row, self.rank), high << 32 | low, sem="relaxed", scope="gpu")

    @cute.jit
    def collect(self, row, round_, thread) -> tuple:
        """The state of the whole row, once all CTAs of the group have written theirs."""
        warps = self.threads // WARP_THREADS
        state = (-Float32.inf, Float32(0.0))
        for peer in cutlass.range(thread, self.group, self.threads, unroll=1):
            word = Int64(EMPTY)
            while word == EMPTY:
                word = cute.arch.load(self._slot(row, peer), Int64, sem="relaxed", scope="gpu")
            maximum = cutlass.Int32(word & 0xFFFFFFFF).bitcast(Float32)
            state = join(state, (maximum, cutlass.Int32(word >> 32).bitcast(Float32)), self.accurate)
        state = warp_join(state, WARP_THREADS, self.accurate)
        if cute.arch.lane_idx() == 0:
            self.scratch[0, thread // WARP_THREADS], self.scratch[1, thread // WARP_THREADS] = state
        self._synchronize()
        state = join_states(self.scratch, warps, self.accurate)
        self._synchronize()  # before the next round overwrites the scratch
        return state

    @cute.jit
    def finish(self, thread, threads):
        """Restore the workspace; the last CTA of the launch does that. Called after the last ``collect``."""
        blocks, _, _ = cute.arch.grid_dim()
        if thread == 0:
            self.leader[0] = cute.arch.atomic_add(
                self.workspace.iterator, Int64(1), sem="acq_rel", scope="gpu"
            ).to(Int32)
        self._synchronize()
        if self.leader[0] == blocks - 1 + EMPTY:
            for word in cutlass.range(thread, cute.size(self.workspace), threads, unroll=1):
                self.workspace[word] = Int64(EMPTY)
