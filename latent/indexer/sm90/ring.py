"""A ring of tiles of FP8 index keys in shared memory; each warp copies its own keys.

The four lanes of a row copy it by halves, a 16-byte vector each, and read it by blocks. A lane thus reads what other
lanes of its warp have copied, but no warp waits for another. Copies in flight take no registers, and the compiler
cannot move them.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS, WORD_BYTES
from warpspec.latent.indexer.device.entries import divided, find_page, locate
from warpspec.latent.indexer.scores_config import BLOCKS, WARP_ROWS, ScoresConfig
from warpspec.latent.indexer.sm90.keys import ROW_DISTANCE, THREAD_ROWS, VECTOR_WORDS

NO_ADDRESS = -1  # high word of a missing address
QUAD_BYTES = BLOCKS * VECTOR_BYTES  # bytes of a row that its lanes copy at once
ODD_ROW = BLOCKS + 1  # XORed with a vector's place in odd rows, to avoid bank conflicts


@dataclass(frozen=True)
class Ring:
    """A warpgroup's tiles first, first + step, ..., from a lane's point of view.

    vectors: address, in the first stage, of the vector that the lane reads first. target: address of the vector that it
    copies first. scales: address of its scale, which it copies itself. The vectors of a row lie together. warp_row: row
    of the warp's first key in a tile. A tile without a page is not copied; if it has one, keys past the length are
    copied too.
    """

    config: ScoresConfig
    entries: tuple
    first: Int32
    step: Int32
    vectors: Int32
    target: Int32
    scales: Int32
    warp_row: Int32
    lane: Int32

    @classmethod
    def of(cls, config, base, entries, thread, first, step) -> Ring:
        """base: from ``allocate_ring``."""
        thread = opaque(thread)
        member, quad = thread % BLOCKS, thread // BLOCKS
        row, odd = base + quad * config.fmt.data_bytes, quad % 2 * ODD_ROW
        vectors = row + (member * row_vectors(config) ^ odd) * VECTOR_BYTES
        target = row + (member ^ odd) * VECTOR_BYTES
        scales = base + THREAD_ROWS * rows_bytes(config) + thread * WORD_BYTES
        warp_row = thread % WARPGROUP_THREADS // WARP_THREADS * WARP_ROWS
        return cls(config, entries, first, step, vectors, target, scales, warp_row, thread % WARP_THREADS)

    def index(self, number) -> Int32:
        """Index of the warp's first key in the lane's tile, among the 32 tiles from the number-th on."""
        return (self.first + (number + self.lane) * self.step) * self.config.tile_keys + self.warp_row

    def look_up(self, number) -> Int32:
        """The page of the key at ``index(number)``: looked up once for 32 tiles and 32 ahead, as in ``LanePages``."""
        return find_page(self.config, self.entries, self.index(number))

    def locate(self, number, page) -> tuple:
        """(low, high word) of the address of the key at ``index(number)``; high is NO_ADDRESS without a page."""
        address = locate(self.config, self.entries, self.index(number), page)[0]
        low, high = Int32(address & Int64(0xFFFFFFFF)), Int32(address >> Int64(32))
        return low, Int32(cutlass.select_(Boolean(address != 0), high, Int32(NO_ADDRESS)))

    def first_pages(self) -> tuple:
        """The pages that ``begin`` takes."""
        return self.look_up(Int32(0)), self.look_up(Int32(WARP_THREADS))

    def begin(self, pages: tuple) -> tuple:
        """Issue the copies of the first ``depth`` tiles; returns the state of ``follow``.

        The state is: number of the next tile to copy, byte offset of its stage, a bit for each tile in flight that has
        a page, the low and high word of the lane's address, and its page 32 tiles on.
        """
        zero = Int32(0)
        page, ahead = pages
        state = (zero, zero, zero, *self.locate(zero, page), ahead)
        for _ in range(self.config.depth):
            state = self.follow(*state)
        return state

    @cute.jit
    def follow(self, number, offset, here, low, high, ahead) -> tuple:
        """Issue the copies of the number-th tile as one group; returns the new state."""
        config = self.config
        owner = number & (WARP_THREADS - 1)
        if (owner == 0) & (number > 0):
            low, high = self.locate(number, ahead)
            ahead = self.look_up(number + WARP_THREADS)
        own_low, own_high = (cute.arch.shuffle_sync(word, owner) for word in (low, high))
        there = Boolean(Int32(own_high) != NO_ADDRESS)
        if there:
            address = (Int64(own_high) << Int64(32)) | Int64(Uint32(own_low))
            copy_keys(self, address, number, offset)
        cute.arch.cp_async_commit_group()
        offset += config.stage_bytes
        offset = Int32(
            cutlass.select_(Boolean(offset == config.depth * config.stage_bytes), Int32(0), offset)
        )
        return number + 1, offset, here << 1 | Int32(there), low, high, ahead

    def read(self, state: tuple, words: cute.Tensor) -> Boolean:
        """Wait for the oldest tile and load its words (WORD, ROW); returns whether it has a page.

        All lanes call it. The stage is the next one to be copied to.
        """
        config, (_, offset, here, *_) = self.config, state
        cute.arch.cp_async_wait_group(config.depth - 1)
        cute.arch.sync_warp()  # wait for the other lanes' copies too
        parts, last = row_vectors(config), row_vectors(config) * VECTOR_WORDS
        for r in range(THREAD_ROWS):
            for part in range(parts):
                at = (self.vectors ^ part * VECTOR_BYTES) + offset + r * rows_bytes(config)
                found = shared(at, VECTOR_WORDS)
                for i in range(VECTOR_WORDS):
                    words[part * VECTOR_WORDS + i, r] = found[i]
            words[last, r] = shared(self.scales + offset, 1)[0]
        cute.arch.sync_warp()  # all lanes have read before one copies to this stage
        return Boolean((here >> (config.depth - 1)) & 1 != 0)


def allocate_ring(config, smem) -> Int32:
    """The address of all threads' rings."""
    return Int32(smem.allocate(config.depth * config.stage_bytes, config.fmt.data_bytes).toint())


def opaque(word: Int32) -> Int32:
    """Keep a number in a register: a loop would otherwise recompute what derives from special registers."""
    return Int32(cute.arch.shuffle_sync_bfly(word, 0)) & 0x7FFFFFFF


def row_vectors(config) -> int:
    """16-byte vectors of a lane's block."""
    return config.fmt.data_bytes // BLOCKS // VECTOR_BYTES


def rows_bytes(config) -> int:
    """Bytes of one key for each group of four lanes, over all threads."""
    return config.threads // BLOCKS * config.fmt.data_bytes


def shared(address: Int32, count: int) -> cute.Tensor:
    """Load ``count`` words from shared memory to registers."""
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=count * WORD_BYTES)
    words = cute.make_rmem_tensor(count, Uint32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), words)
    return words


def copy_keys(ring: Ring, address, number, offset) -> None:
    """Copy a lane's vectors of two keys of a tile, one vector of each half of a row, and one scale.

    address: address of the warp's first key. A row's scale is copied by the lane that will store the row's score.
    """
    config, fmt = ring.config, ring.config.fmt
    member, quad = ring.lane % BLOCKS, ring.lane // BLOCKS
    row = address + Int64(quad * fmt.data_bytes + member * VECTOR_BYTES)
    for r in range(THREAD_ROWS):
        for part in range(row_vectors(config)):
            at = (ring.target ^ part * QUAD_BYTES) + offset + r * rows_bytes(config)
            copy(at, row, r * ROW_DISTANCE * fmt.data_bytes + part * QUAD_BYTES, VECTOR_BYTES)
    within = divided(ring.warp_row, config.page_size)[1]
    if config.tile_keys % config.page_size:  # otherwise the offset is the same in every tile
        tile = ring.first + number * ring.step
        within = divided(tile * config.tile_keys + ring.warp_row, config.page_size)[1]
    behind = config.page_size * fmt.data_bytes + quad * fmt.scale_bytes
    scale = address + Int64(behind - within * (fmt.data_bytes - fmt.scale_bytes))
    distance = (member & 1) * (ROW_DISTANCE * fmt.scale_bytes)
    copy(ring.scales + offset, scale + Int64(distance), 0, WORD_BYTES)


def copy(target, source, distance: int, size: int) -> None:
    """Copy ``size`` bytes to shared memory from ``distance`` after source."""
    cached = "cg" if size == VECTOR_BYTES else "ca"  # .cg bypasses L1 but copies only 16 bytes
    cute.arch.inline_ptx(
        f"cp.async.{cached}.shared.global [{{$r0}}], [{{$r1}}+{distance}], {size};",
        read_only_args=[target, source],
    )
