"""Converts flash-attn-4's lists of blocks (``fmha.lists``): three kernels.

``Rows``: a warp takes the list of one block of queries. It flags the listed blocks of keys in shared memory, counts
them, and writes them in the order of kernels. ``Links``: a warp goes through the blocks of queries that visit one block
of keys. ``Orders``: a warp finds the place of one block of queries, or of keys, among all, by how many it visits, or
visit it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int32

from warpspec.common.device.host import host_function
from warpspec.common.hardware import WARP_THREADS, WORD_BYTES
from warpspec.fmha.lists import (
    COUNT,
    FIRST,
    LAST,
    MOST_BLOCKS,
    NEXT,
    ORDER,
    RANK,
    RULE,
    WARPS,
    ListsConfig,
    ListsNumbers,
    ListsOperands,
)

PARTIAL, FULL = 1, 2  # flags
MOST = 2**31 - 1  # visits of a block that comes first
ALL_KEYS = ~0  # the rule of a full block without patterns; that of a partial one is 0


def own_warp() -> Int32:
    """The warp's number in its CTA."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def own_number(warp) -> Int32:
    """The number of a CTA's warp in the grid."""
    cta, _, _ = cute.arch.block_idx()
    return cta * WARPS + warp


class ListsKernel:
    """A kernel in which each warp has a row of lists, or a column; ``Rows(config)(...)`` launches it."""

    smem_bytes = 0

    def __init__(self, config: ListsConfig):
        self.config = config

    def warps(self, operands: ListsOperands):
        """Warps with something to do."""
        raise NotImplementedError

    @host_function(ListsOperands, ListsNumbers)
    def __call__(self, operands: ListsOperands, numbers: ListsNumbers, stream: CUstream):
        """Host side."""
        self.kernel(operands, numbers).launch(
            grid=(cute.ceil_div(self.warps(operands), WARPS), 1, 1),
            block=(WARPS * WARP_THREADS, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
        )


class Rows(ListsKernel):
    """The first kernel."""

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    def warps(self, operands: ListsOperands):
        lists, rows, _, _ = operands.kv_visits.shape
        return lists * rows

    @cute.kernel
    def kernel(self, operands, numbers):
        warp = own_warp()
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_layout((WARPS, MOST_BLOCKS), stride=(MOST_BLOCKS, 1))
        flags = smem.allocate_tensor(Int32, layout, byte_alignment=WORD_BYTES)  # (WARP, BLOCK)
        _, rows, _, _ = operands.kv_visits.shape
        number = own_number(warp)
        if number < self.warps(operands):
            convert_row(self.config, operands, numbers, flags[warp, None], number // rows, number % rows)


class Links(ListsKernel):
    """The second kernel."""

    def warps(self, operands: ListsOperands):
        lists, _, blocks, _ = operands.kv_visits.shape
        return lists * blocks

    @cute.kernel
    def kernel(self, operands, numbers):
        _, _, blocks, _ = operands.kv_visits.shape
        number = own_number(own_warp())
        if number < self.warps(operands):
            link_visitors(operands, number // blocks, number % blocks)


class Orders(ListsKernel):
    """The third kernel."""

    def warps(self, operands: ListsOperands):
        lists, rows, blocks, _ = operands.kv_visits.shape
        return lists * (rows + blocks)

    @cute.kernel
    def kernel(self, operands, numbers):
        _, rows, blocks, _ = operands.kv_visits.shape
        number = own_number(own_warp())
        if number < self.warps(operands):
            of_lists, place = number // (rows + blocks), number % (rows + blocks)
            if place < rows:
                write_order(operands, of_lists, place, numbers.cut_q)
            else:
                column = place - rows
                first = place_of(operands.q_counts[of_lists, None, COUNT], column, numbers.cut_k)
                if cute.arch.lane_idx() == 0:
                    operands.q_counts[of_lists, first, ORDER] = column


@cute.jit
def convert_row(config: cutlass.Constexpr, operands, numbers, flags, of_lists, row):
    """Write the list of one block of queries. flags: (BLOCK), the warp's own. of_lists: its batch row and head."""
    blocks, heads = operands.kv_visits.shape[2], operands.counts.shape[1]
    place = (of_lists // heads, of_lists % heads, row)
    lane = cute.arch.lane_idx()
    chunks = cute.ceil_div(blocks, WARP_THREADS)
    for chunk in cutlass.range(chunks, unroll=1):
        flags[chunk * WARP_THREADS + lane] = 0
    cute.arch.sync_warp()
    set_flags(operands.counts, operands.indices, flags, place, blocks, PARTIAL)
    if cutlass.const_expr(config.has_full):
        cute.arch.sync_warp()  # what is in both lists is full
        set_flags(operands.full_counts, operands.full_indices, flags, place, blocks, FULL)
    cute.arch.sync_warp()
    masked, visited = Int32(0), Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        some, every, _ = kinds(flags, chunk * WARP_THREADS + lane, blocks, numbers.cut_k)
        masked += cute.arch.popc(cute.arch.vote_ballot_sync(some))
        visited += cute.arch.popc(cute.arch.vote_ballot_sync(every))
    if lane == 0:
        operands.kv_counts[of_lists, row, 0] = masked
        operands.kv_counts[of_lists, row, 1] = visited
    write_row(operands, numbers, flags, of_lists, row, (masked, visited))


@cute.jit
def set_flags(counts, indices, flags, place, blocks, flag: cutlass.Constexpr):
    """Flag the blocks that the list at ``place`` has. What is past its count or no block's number counts for
    nothing."""
    lists, head, row = place
    count = cutlass.min(counts[lists, head, row], indices.shape[3])
    for entry in cutlass.range(cute.arch.lane_idx(), count, WARP_THREADS, unroll=1):
        block = indices[lists, head, row, entry]
        if Boolean(block >= 0) & Boolean(block < blocks):
            # (relaxed, for a list may have a block twice)
            cute.arch.store(flags.iterator + block, Int32(flag), ss="cta", sem="relaxed", scope="cta")


def kinds(flags, block, blocks, cut_k) -> tuple:
    """(whether a block is visited and needs a mask, is visited, is listed as full). block: below the flags' room."""
    flag = flags[block]
    full = Boolean(flag == FULL)
    ends = Boolean(block == blocks - 1) & Boolean(cut_k != 0)  # its last keys do not exist
    return Boolean(flag == PARTIAL) | (full & ends), Boolean(flag != 0), full


@cute.jit
def write_row(operands, numbers, flags, of_lists, row, totals):
    """Write the blocks of keys of a row: first those that need a mask, then other visited ones, then the rest. totals:
    (blocks that need a mask, visited ones)."""
    blocks = operands.kv_visits.shape[2]
    lane = cute.arch.lane_idx()
    masked, whole, rest = Int32(0), totals[0], totals[1]  # places of the next ones
    for chunk in cutlass.range(cute.ceil_div(blocks, WARP_THREADS), unroll=1):
        block = chunk * WARP_THREADS + lane
        exists = Boolean(block < blocks)
        some, every, full = kinds(flags, block, blocks, numbers.cut_k)
        votes = cute.arch.vote_ballot_sync(some), cute.arch.vote_ballot_sync(every & ~some)
        hidden = cute.arch.vote_ballot_sync(exists & ~every)
        earlier = masked + whole - totals[0]  # visited ones of the chunks before
        place = rest + before(hidden, lane)
        if some:
            place = masked + before(votes[0], lane)
        elif every:
            place = whole + before(votes[1], lane)
        if exists:
            rule = Int32(cutlass.select_(full, Int32(ALL_KEYS), Int32(0)))
            operands.kv_visits[of_lists, row, place, 0] = block
            operands.kv_visits[of_lists, row, place, 1] = rule
            operands.q_visits[of_lists, block, row, NEXT] = Int32(every)  # until its own warp links them
            operands.q_visits[of_lists, block, row, RULE] = rule
            operands.q_visits[of_lists, block, row, RANK] = earlier + before(votes[0] | votes[1], lane)
        masked += cute.arch.popc(votes[0])
        whole += cute.arch.popc(votes[1])
        rest += cute.arch.popc(hidden)


def before(votes, lane) -> Int32:
    """Votes of the lanes before this one."""
    return Int32(cute.arch.popc(Int32(votes) & ((Int32(1) << lane) - 1)))


def first_of(votes) -> Int32:
    """The first lane that voted; there is one."""
    votes = Int32(votes)
    return Int32(cute.arch.popc((votes & -votes) - 1))


@cute.jit
def write_order(operands, of_lists, row, cut_q):
    """Write the entry of kv_order of one block of queries."""
    place = place_of(operands.kv_counts[of_lists, None, 1], row, cut_q)
    if cute.arch.lane_idx() == 0:
        operands.kv_order[of_lists, place, 0] = row
        for i in cutlass.range_constexpr(2):
            operands.kv_order[of_lists, place, 1 + i] = operands.kv_counts[of_lists, row, i]
            operands.kv_order[of_lists, place, 3 + i] = operands.kv_visits[of_lists, row, 0, i]


@cute.jit
def place_of(lengths, number, cut) -> Int32:
    """The place of a block, by its number, among all: after those with more visits, and with as many whose numbers are
    less. lengths: visits of all. cut: whether the last one is not whole, and first therefore."""
    count = cute.size(lengths)
    lane, mine, place = cute.arch.lane_idx(), length_of(lengths, number, cut), Int32(0)
    for chunk in cutlass.range(cute.ceil_div(count, WARP_THREADS), unroll=1):
        other = chunk * WARP_THREADS + lane
        theirs = Int32(-1)
        if other < count:
            theirs = length_of(lengths, other, cut)
        comes = Boolean(theirs > mine) | (Boolean(theirs == mine) & Boolean(other < number))
        place += cute.arch.popc(cute.arch.vote_ballot_sync(comes))
    return place


def length_of(lengths, number, cut) -> Int32:
    """Visits of a block; of a last one that is not whole more than any has."""
    first = Boolean(number == cute.size(lengths) - 1) & Boolean(cut != 0)
    return Int32(cutlass.select_(first, Int32(MOST), lengths[number]))


@cute.jit
def link_visitors(operands, of_lists, block):
    """Write q_counts of one block of keys, and in q_visits, where ``Rows`` left whether a block of queries visits it,
    the next one that does."""
    rows = operands.kv_visits.shape[1]
    lane, chunks = cute.arch.lane_idx(), cute.ceil_div(rows, WARP_THREADS)
    first, last, count = Int32(rows), Int32(-1), Int32(0)
    for chunk in cutlass.range(chunks, unroll=1):
        votes = visitors(operands, of_lists, block, chunk, lane)
        if votes != 0:
            first = cutlass.min(first, chunk * WARP_THREADS + first_of(votes))
            last = chunk * WARP_THREADS + WARP_THREADS - 1 - Int32(cute.arch.clz(votes))
        count += Int32(cute.arch.popc(votes))
    after = first  # of the last visitor
    for step in cutlass.range(chunks, unroll=1):
        chunk = chunks - 1 - step
        row = chunk * WARP_THREADS + lane
        votes = visitors(operands, of_lists, block, chunk, lane)
        later = votes & ~((Int32(2) << lane) - 1)
        found = after
        if later != 0:
            found = chunk * WARP_THREADS + first_of(later)
        if row < rows:
            operands.q_visits[of_lists, block, row, NEXT] = found
        if votes != 0:
            after = chunk * WARP_THREADS + first_of(votes)
    if lane == 0:
        operands.q_counts[of_lists, block, FIRST] = first
        operands.q_counts[of_lists, block, LAST] = last
        operands.q_counts[of_lists, block, COUNT] = count


@cute.jit
def visitors(operands, of_lists, block, chunk, lane) -> Int32:
    """Votes of the blocks of queries of a chunk that visit a block of keys."""
    row = chunk * WARP_THREADS + lane
    visits = Boolean(False)
    if row < operands.kv_visits.shape[1]:
        visits = Boolean(operands.q_visits[of_lists, block, row, NEXT] != 0)
    return Int32(cute.arch.vote_ballot_sync(visits))
