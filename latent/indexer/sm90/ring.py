"""FP8 index keys on their way: a ring of tiles in shared memory, each warp's keys copied by the warp itself.

The four lanes of a row copy it by halves, a vector of 16 bytes each, and read it by blocks: what a lane reads other
lanes of its warp have copied, and a warp waits for no other. What is under way takes no registers, and no compiler
moves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common.hardware import VECTOR_BYTES, WARP_THREADS, WARPGROUP_THREADS
from warpspec.latent.indexer.device.entries import WORD_BYTES, divided, find_page, locate
from warpspec.latent.indexer.scores_config import BLOCKS, WARP_ROWS, ScoresConfig
from warpspec.latent.indexer.sm90.keys import ROW_DISTANCE, THREAD_ROWS, VECTOR_WORDS

NO_ADDRESS = -1  # high word
QUAD_BYTES = BLOCKS * VECTOR_BYTES  # that the lanes of a row copy of it at once
ODD_ROW = BLOCKS + 1  # XORed with a vector's place in an odd row: no two meet in a bank


@dataclass(frozen=True)
class Ring:
    """A warpgroup's tiles first, first + step, ..., as a lane has them.

    vectors: address in the first stage of what the lane reads first; target: of what it copies first; scales: of its
    scale, which it copies itself. A row's vectors are together. warp_row: of the warp's first key in a tile. Nothing is
    copied where there is no page; keys past the length that share one are.
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
        """Of the warp's first key of a tile, that of the lane among those from the number-th on."""
        return (self.first + (number + self.lane) * self.step) * self.config.tile_keys + self.warp_row

    def look_up(self, number) -> Int32:
        """The page of that key: looked up once for 32 tiles and 32 ahead, as in ``LanePages``."""
        return find_page(self.config, self.entries, self.index(number))

    def locate(self, number, page) -> tuple:
        """(low, high word) of that key's address, high NO_ADDRESS where there is no page."""
        address = locate(self.config, self.entries, self.index(number), page)[0]
        low, high = Int32(address & Int64(0xFFFFFFFF)), Int32(address >> Int64(32))
        return low, Int32(cutlass.select_(Boolean(address != 0), high, Int32(NO_ADDRESS)))

    def first_pages(self) -> tuple:
        """What ``begin`` takes, looked up."""
        return self.look_up(Int32(0)), self.look_up(Int32(WARP_THREADS))

    def begin(self, pages: tuple) -> tuple:
        """Copies of the first ``depth`` tiles begin; returns what ``follow`` keeps between calls: the number of the
        next tile to copy, its stage's bytes from the first one, a bit for each tile under way that has a page,
        the lane's address, and its page 32 tiles on."""
        zero = Int32(0)
        page, ahead = pages
        state = (zero, zero, zero, *self.locate(zero, page), ahead)
        for _ in range(self.config.depth):
            state = self.follow(*state)
        return state

    @cute.jit
    def follow(self, number, offset, here, low, high, ahead) -> tuple:
        """The copies of the number-th tile begin, and make a group."""
        config = self.config
        slot = number & (WARP_THREADS - 1)
        if (slot == 0) & (number > 0):
            low, high = self.locate(number, ahead)
            ahead = self.look_up(number + WARP_THREADS)
        own_low, own_high = (cute.arch.shuffle_sync(word, slot) for word in (low, high))
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
        """The oldest tile's words (WORD, ROW), waited for by all lanes; whether it has a page. Its stage is the next
        to be copied to."""
        config, (_, offset, here, *_) = self.config, state
        cute.arch.cp_async_wait_group(config.depth - 1)
        cute.arch.sync_warp()  # the other lanes' copies too
        parts, last = row_vectors(config), row_vectors(config) * VECTOR_WORDS
        for r in range(THREAD_ROWS):
            for part in range(parts):
                at = (self.vectors ^ part * VECTOR_BYTES) + offset + r * rows_bytes(config)
                found = shared(at, VECTOR_WORDS)
                for i in range(VECTOR_WORDS):
                    words[part * VECTOR_WORDS + i, r] = found[i]
            words[last, r] = shared(self.scales + offset, 1)[0]
        cute.arch.sync_warp()  # no lane copies to the stage before
        return Boolean((here >> (config.depth - 1)) & 1 != 0)


def allocate_ring(config, smem) -> Int32:
    """The address of all threads' rings."""
    return Int32(smem.allocate(config.depth * config.stage_bytes, config.fmt.data_bytes).toint())


def opaque(word: Int32) -> Int32:
    """The same number, which stays in a register: what comes from special registers is computed anew in a loop."""
    return Int32(cute.arch.shuffle_sync_bfly(word, 0)) & 0x7FFFFFFF


def row_vectors(config) -> int:
    """Vectors of 16 bytes of a lane's block."""
    return config.fmt.data_bytes // BLOCKS // VECTOR_BYTES


def rows_bytes(config) -> int:
    """Of one key of each row of lanes, of all threads."""
    return config.threads // BLOCKS * config.fmt.data_bytes


def shared(address: Int32, count: int) -> cute.Tensor:
    """(count) words of shared memory, in registers."""
    pointer = cute.make_ptr(Uint32, address, cute.AddressSpace.smem, assumed_align=count * WORD_BYTES)
    words = cute.make_rmem_tensor(count, Uint32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), words)
    return words


def copy_keys(ring: Ring, address, number, offset) -> None:
    """A lane's vectors of two keys of a tile: one of each half of a row. address: of the warp's first. A row's scale
    is wanted by the lane that stores the row's score: a lane has one key's."""
    config, fmt = ring.config, ring.config.fmt
    member, quad = ring.lane % BLOCKS, ring.lane // BLOCKS
    row = address + Int64(quad * fmt.data_bytes + member * VECTOR_BYTES)
    for r in range(THREAD_ROWS):
        for part in range(row_vectors(config)):
            at = (ring.target ^ part * QUAD_BYTES) + offset + r * rows_bytes(config)
            copy(at, row, r * ROW_DISTANCE * fmt.data_bytes + part * QUAD_BYTES, VECTOR_BYTES)
    within = divided(ring.warp_row, config.page_size)[1]
    if config.tile_keys % config.page_size:  # else the same in every tile
        tile = ring.first + number * ring.step
        within = divided(tile * config.tile_keys + ring.warp_row, config.page_size)[1]
    behind = config.page_size * fmt.data_bytes + quad * fmt.scale_bytes
    scale = address + Int64(behind - within * (fmt.data_bytes - fmt.scale_bytes))
    distance = (member & 1) * (ROW_DISTANCE * fmt.scale_bytes)
    copy(ring.scales + offset, scale + Int64(distance), 0, WORD_BYTES)


def copy(target, source, distance: int, size: int) -> None:
    """So many bytes to shared memory from ``distance`` behind source."""
    cached = "cg" if size == VECTOR_BYTES else "ca"  # past L1, which only whole vectors go
    cute.arch.inline_ptx(
        f"cp.async.{cached}.shared.global [{{$r0}}], [{{$r1}}+{distance}], {size};",
        read_only_args=[target, source],
    )
