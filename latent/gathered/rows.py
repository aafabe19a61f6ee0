"""Copies rows to shared memory by the lanes of a producer warp, four lanes to a key.

bf16 rows are copied to where the 128-byte swizzle puts them. FP8 rows are copied unchanged to a buffer; each lane then
reads what it copied itself, converts it, and stores it where the swizzle puts it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from warpspec.common.device import tma
from warpspec.common.device.words import permute, shuffle_address
from warpspec.common.hardware import BF16_BYTES, VECTOR_BYTES, WARP_THREADS, WORD_BYTES
from warpspec.fmha.heads import BLOCK
from warpspec.latent.gathered.convert import some_large, to_bf16
from warpspec.latent.gathered.task import Gathered

VECTOR_WORDS = VECTOR_BYTES // WORD_BYTES
MEMBERS = 4  # lanes that copy a key together: each has 16 bytes, which are 16 of a block's 64 e4m3 values
GROUP_KEYS = WARP_THREADS // MEMBERS  # keys that a warp copies at a time
BYTE_ALONE = 0x4440  # prmt selector: one byte, with three zero bytes above it
ALL_SCALES = 0xFFFFFFFF  # mask of scale bytes: four in the first column group, three in the second
RAW_PAIR = 2 * WARP_THREADS * VECTOR_BYTES  # bytes of two vectors for each of a warp's lanes


@dataclass(frozen=True)
class Peer:
    """The other CTA of a cluster (``cluster``). rank: this CTA's. distance: from an address in this CTA's shared memory
    to the same place in the peer's."""

    rank: Int32
    distance: Int32


@dataclass(frozen=True)
class Loader:
    """The keys and columns that a producer warp copies.

    column_group: which columns. share: which of a tile's keys, in shares of ``keys_of_warp``. lane: this lane's
    number in the warp. peer: the CTA that shares the work on the keys, or None. All warps run one copy of the
    instructions, because the instruction cache is small. The two groups therefore differ only in numbers, except for
    the last block of FP8 rows: it is e4m3 in the first column group and bf16 in the second.
    """

    config: object
    operands: Gathered
    column_group: Int32
    share: Int32
    lane: Int32
    peer: Peer | None = None

    def ring_use(self, number):
        """Ring use count of this warp's column group of the number-th tile."""
        if self.config.barrier_groups > 1:
            return number * self.config.barrier_groups + self.column_group
        return number

    @property
    def warp_of_group(self):
        """This warp's number among those of its column group in this CTA."""
        return self.share if self.peer is None else self.share % self.config.gathers.warps_of_group

    @property
    def peers_share(self):
        """The share of the peer's warp with this warp's number."""
        return self.share ^ self.config.gathers.warps_of_group

    @property
    def lane_key(self):
        """The key of a tile that this lane looks up: one of the warp's, or, in the second half of the warp, of the
        share of the peer's."""
        keys = self.config.gathers.keys_of_warp
        if self.peer is None:
            return self.share * keys + self.lane
        return (
            self.share ^ (self.lane // keys * self.config.gathers.warps_of_group)
        ) * keys + self.lane % keys

    @property
    def member(self) -> Int32:
        return self.lane % MEMBERS

    @property
    def key(self) -> Int32:
        """The key of a group that this lane copies. The swizzle XORs the key's row with the same number."""
        return self.lane // MEMBERS

    def plain_chunk(self, i: int):
        """The 16 bytes of a bf16 block that this lane copies in its i-th turn.

        The four lanes of a key copy 64 bytes together. Every other key begins with the second half, so that the stores
        of two keys have no bank conflict.
        """
        second = self.key % 2 if i == 0 else 1 - self.key % 2
        return self.member + MEMBERS * second

    @property
    def groups(self) -> int:
        """Groups of keys that this warp copies in a tile."""
        return self.config.gathers.keys_of_warp // GROUP_KEYS

    @property
    def blocks(self) -> int:
        """Blocks of 64 columns of a column group."""
        return self.config.gathers.group_blocks

    @property
    def converted(self) -> int:
        """Number of a column group's first blocks that are e4m3 in both groups of an FP8 row."""
        return self.blocks - 1

    @property
    def vectors(self) -> int:
        """16-byte vectors that a lane copies of an FP8 key."""
        return self.config.gathers.raw_vectors

    def words(self) -> cute.Tensor:
        """(WORD, VECTOR): registers for a lane's vectors of an FP8 key."""
        return cute.make_rmem_tensor((VECTOR_WORDS, self.vectors), Uint32)


def row_of(loader, row, scale_at, group) -> tuple:
    """(address of the row, bytes from there to its scales) of the lane's key of a group, which another lane looked up.

    row, scale_at: those of the key that this lane looked up.
    """
    source = group * GROUP_KEYS + loader.key
    return shuffle_address(row, source), Int32(cute.arch.shuffle_sync(scale_at, source))


def bytes_of(address, count: int) -> Int32:
    """``count``, or 0 if the row is not there: bytes that a copy reads."""
    return Int32(cutlass.select_(Boolean(address != 0), Int32(count), Int32(0)))


def copy_vector(target, at: int, source, offset: int, wanted) -> None:
    """Copy 16 bytes from source + offset to target + at in shared memory; bytes after the first ``wanted`` are
    zeros."""
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global [{{$r0}}+{at}], [{{$r1}}+{offset}], {VECTOR_BYTES}, {{$r2}};",
        read_only_args=[target, source, wanted],
    )


# bf16 rows.


def rows_of_groups(loader, row) -> list:
    """(address of the row's column group, bytes that a copy reads) of the lane's key in every group of a tile.

    row: address of the row that this lane looked up.
    """
    begin = loader.column_group * (loader.blocks * BLOCK * BF16_BYTES)
    rows = []
    for group in range(loader.groups):
        address = shuffle_address(row, group * GROUP_KEYS + loader.key)
        rows.append((address + Int64(begin), bytes_of(address, VECTOR_BYTES)))
    return rows


def copy_rows(loader, base, rows: list) -> None:
    """Issue the copies of a warp's keys to the tile's column group at ``base``; keys that are not there become zeros.

    rows: what ``rows_of_groups`` returns.
    """
    row_bytes, group_bytes = BLOCK * BF16_BYTES, GROUP_KEYS * tma.ROW_BYTES
    block_bytes = loader.config.tile_n * tma.ROW_BYTES
    target = base + loader.share * (loader.groups * group_bytes) + loader.key * tma.ROW_BYTES
    places = [target + (loader.key ^ loader.plain_chunk(i)) * VECTOR_BYTES for i in range(2)]
    for group, (address, wanted) in enumerate(rows):
        for i in range(2):
            source = address + Int64(loader.plain_chunk(i) * VECTOR_BYTES)
            for block in range(loader.blocks):
                at = block * block_bytes + group * group_bytes
                copy_vector(places[i], at, source, block * row_bytes, wanted)


# FP8 rows before conversion. A lane has, of a key, an e4m3 vector of each of the ``converted`` blocks, two vectors of
# the last block and a word of scales. The last block needs only one vector, e4m3, in the first column group, and both,
# bf16, in the second.


def copy_raw(loader, target, pair_bytes: int, address, scale_at) -> None:
    """Issue the copies of the bytes of an FP8 key that the lane will convert; zeros if the key is not there.

    target: shared-memory address of the lane's first vector. Two vectors of every lane lie together; the next two are
    pair_bytes further on.
    """
    fmt = loader.config.gathers.fmt
    wanted = bytes_of(address, VECTOR_BYTES)
    begin = address + Int64(loader.column_group * (loader.blocks * BLOCK) + loader.member * VECTOR_BYTES)
    for block in range(loader.converted):
        copy_vector(target, raw_place(block, pair_bytes), begin, block * BLOCK, wanted)
    # The last block: e4m3 values in the first column group, the bf16 tail in the second.
    chunk = fmt.tail_offset + loader.plain_chunk(0) * VECTOR_BYTES
    value = loader.converted * BLOCK + loader.member * VECTOR_BYTES
    offset = Int32(cutlass.select_(Boolean(loader.column_group == 1), chunk, value))
    at = raw_place(loader.converted, pair_bytes)
    copy_vector(target, at, address + Int64(offset), 0, wanted)
    chunk = address + Int64(loader.plain_chunk(1) * VECTOR_BYTES)
    at = raw_place(loader.converted + 1, pair_bytes)
    copy_vector(target, at, chunk, fmt.tail_offset, wanted * loader.column_group)
    cute.arch.inline_ptx(
        f"cp.async.ca.shared.global [{{$r0}}+{raw_place(loader.vectors, pair_bytes)}], [{{$r1}}], {WORD_BYTES}, "
        "{$r2};",
        read_only_args=[
            scales_place(loader, target),
            address + Int64(scale_at + loader.column_group * loader.blocks),
            wanted // VECTOR_WORDS,
        ],
    )


def raw_place(vector: int, pair_bytes: int) -> int:
    """Offset in bytes of a lane's vector from its first one. The scales come after the last vector; their offset counts
    from ``scales_place``."""
    return vector // 2 * pair_bytes + vector % 2 * (WARP_THREADS * VECTOR_BYTES)


def scales_place(loader, target):
    """The lane's base address for its word of scales.

    Scales of adjacent lanes are WORD_BYTES apart, not VECTOR_BYTES.
    """
    return target - loader.lane * (VECTOR_BYTES - WORD_BYTES)


def load_vectors(loader, target, pair_bytes: int, words: cute.Tensor) -> None:
    """Load the lane's vectors of a raw row, from ``target`` on, into words (WORD, VECTOR)."""
    outputs = ", ".join(f"{{$w{i}}}" for i in range(VECTOR_WORDS))
    for vector in range(loader.vectors):
        loaded = cute.arch.inline_ptx(
            f"ld.shared.v4.b32 {{{outputs}}}, [{{$r0}}+{raw_place(vector, pair_bytes)}];",
            write_only_types=[Uint32] * VECTOR_WORDS,
            read_only_args=[target],
        )
        for i in range(VECTOR_WORDS):
            words[i, vector] = loaded[i]


def load_raw(loader, target, pair_bytes: int, words: cute.Tensor) -> Uint32:
    """Load what ``copy_raw`` copied into words (WORD, VECTOR); returns the scales."""
    load_vectors(loader, target, pair_bytes, words)
    return cute.arch.inline_ptx(
        f"ld.shared.b32 {{$w0}}, [{{$r0}}+{raw_place(loader.vectors, pair_bytes)}];",
        write_only_types=[Uint32],
        read_only_args=[scales_place(loader, target)],
    )


# FP8 rows, converted.


@cute.jit
def store_group(loader, base, group, words: cute.Tensor, scales):
    """Store the lane's numbers of one key, converted to bf16, in the tile's column group at ``base``, with the 128-byte
    swizzle."""
    used = Uint32(
        cutlass.select_(Boolean(loader.column_group == 0), Uint32(ALL_SCALES), Uint32(ALL_SCALES >> 8))
    )
    if cute.arch.vote_any_sync(some_large(scales & used)):
        store_key(loader, base, group, words, scales, False)
    else:
        store_key(loader, base, group, words, scales, True)


@cute.jit
def store_key(loader, base, group, words: cute.Tensor, scales, small: cutlass.Constexpr):
    """``store_group`` once it is known whether all scales of the warp's keys are ``small`` (``to_bf16``)."""
    key = loader.share * loader.config.gathers.keys_of_warp + group * GROUP_KEYS + loader.key
    row = base + key * tma.ROW_BYTES
    block_bytes = loader.config.tile_n * tma.ROW_BYTES
    # Addresses of the lane's first 16-byte chunk. The second chunk's differs in bit 0 (converted) or bit 2 (plain).
    converted = row + (loader.key ^ (2 * loader.member)) * VECTOR_BYTES
    plain = row + (loader.key ^ loader.plain_chunk(0)) * VECTOR_BYTES
    for block in cutlass.range_constexpr(loader.converted):
        store_converted(converted + block * block_bytes, words, block, scales, small)
    at = loader.converted * block_bytes
    if loader.column_group == 0:
        store_converted(converted + at, words, loader.converted, scales, small)
    else:
        store_plain(plain + at, words, loader.converted)


def store_converted(address, words: cute.Tensor, block: int, scales, small: bool) -> None:
    """Convert and store 16 numbers of a block of the column group. address: address of the first chunk."""
    scale = permute(scales, BYTE_ALONE | block)
    out = to_bf16([words[i, block] for i in range(VECTOR_WORDS)], scale, small)
    store_vector(address, out[:VECTOR_WORDS])
    store_vector(address ^ VECTOR_BYTES, out[VECTOR_WORDS:])


def store_plain(address, words: cute.Tensor, vector: int) -> None:
    """Store two vectors unchanged. address: address of the first chunk."""
    for half in range(2):
        at = address ^ (half * MEMBERS * VECTOR_BYTES)
        store_vector(at, [words[i, vector + half] for i in range(VECTOR_WORDS)])


def store_vector(address, words: list) -> None:
    """Store 16 bytes to shared memory."""
    pointer = cute.make_ptr(Uint32, Int32(address), cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    vector = cute.make_rmem_tensor(VECTOR_WORDS, Uint32)
    for i in range(VECTOR_WORDS):
        vector[i] = words[i]
    cute.autovec_copy(vector, cute.make_tensor(pointer, cute.make_layout(VECTOR_WORDS)))
